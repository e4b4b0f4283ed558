"""Twenty rounds on five SuperNodes while everything that can break is broken.

    python benchmarks/flower_chaos.py [--folder DIR] [--rounds 20] [--deadline 25]

First a calm run (nodes in this process), then one in which nodes are killed, delayed past the
deadline, given new keys (and so new ids), revoked and let in again, send garbage, NaN and forged
replies and raise, a site changes its policy and back, a stranger knocks, the operator stops the
run, and the SuperLink and the ServerApp are killed twice each.  The mode is certified, with an
epsilon so large that five clients learn: it is the ledger and the accounts of three sites that
are tried.
Noise is secret, so no two runs are alike; the settings are such that calm runs end within half
a point of one another.
Prints what happened and the checks; ends with 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import fedquilt
from fedquilt.flower import keys
from fedquilt.flower.control import going_on, stop
from fedquilt.flower.federation import LocalFederation
from fedquilt.flower.policy import POLICY, policy_text
from fedquilt.flower.processes import SITES, free_ports
from fedquilt.flower.run_notes import began_at, is_running
from fedquilt.flower.simulate import OFFLINE
from fedquilt.flower.template import FILES, fab_hash, write_app
from fedquilt.privacy.ledger import Ledger

NODES = 5
# Nodes 2 and 3 misbehave: without a site, so that what their apps send arrives.
SITED = (0, 1, 4)
TASK = "quiltapp/task.py"
SITE_LIFE = 1e6
"""The epsilon of a site's policy: as large as the run's is, it shall not be what ends it."""

CLIENT = '''
"""The honest app, and what a file beside the node's data tells it to do instead."""
import os
import time
from pathlib import Path
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.clientapp import ClientApp
from fedquilt.flower import client_app, wire
from quiltapp.task import client_data, make_model

honest = client_app(make_model, client_data)
app = ClientApp()


@app.query()
def query(message, context):
    return honest(message, context)


@app.train()
def train(message, context):
    told = Path(str(context.node_config["orders"]))
    what = told.read_text().strip() if told.exists() else ""
    if what.startswith("sleep"):
        time.sleep(float(what.split()[1]))
    if what == "raise":
        raise ValueError("patient 17")
    if what == "die":
        os._exit(9)
    reply = honest(message, context)
    if what == "garbage":
        reply.content["arrays"] = ArrayRecord({"x": wire.as_array(np.ones(7, np.int8))})
    if what == "nan":
        size = len(wire.read_arrays(reply.content["arrays"], 1 << 30)["vector"])
        bad = np.full(size, np.nan, np.float32)
        reply.content["arrays"] = ArrayRecord({"vector": wire.as_array(bad)})
    if what == "forge":
        reply.content["config"] = ConfigRecord({"token": "0" * 32, "failed": False})
    return reply
'''


class Chaos:
    """A federation, and what is done to it after so many rounds."""

    def __init__(self, federation: LocalFederation, orders: Path) -> None:
        self.federation = federation
        self.orders = orders
        self.events: list[str] = []
        self.outside: list[int] = []
        self._over = threading.Event()

    def tell(self, node: int, what: str) -> None:
        """Let a node misbehave; an empty text: behave again."""
        (self.orders / f"node{node}").write_text(what)
        self._note(f"node{node}: {what or 'honest again'}")

    def kill(self, name: str) -> None:
        """SIGKILL one of the processes, or the ServerApp, which is a child of one."""
        jobs = (self.federation.status() or {})["processes"]
        pids = [jobs[name]["pid"]] if name in jobs else children(jobs["serverapp"]["pid"])
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self._note(f"SIGKILL {name}")

    def site(self, node: int) -> Path:
        return self.federation.folder / SITES / f"node{node}"

    def write_policy(self, node: int, *, dry_run: bool) -> None:
        """Let the site of a node refuse every order, or none of this run's."""
        path = self.site(node) / POLICY
        path.parent.mkdir(parents=True, exist_ok=True)
        apps = (fab_hash(self.federation.config()["app"]),)
        text = policy_text(apps=apps, epsilon=SITE_LIFE, min_roster=NODES, dry_run=dry_run)
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").replace(path)  # it may be read just now
        self._note(f"node{node}: its site {'refuses' if dry_run else 'takes orders'}")

    def stop(self) -> None:
        """Stop the run after its round, as its operator may; the watcher resumes it."""
        stopped = stop(going_on(self.federation.config()["output"]), now=False)
        self._note("stopped by its operator" if stopped else "could not be stopped")

    def revoke(self, node: int) -> None:
        """Let no key of a node count any more."""
        self.federation.revoke(f"node{node}")
        self._note(f"node{node} revoked: {self.federation.node_states()[f'node{node}']}")

    def join_again(self, node: int) -> None:
        """Let a revoked node come back with another key, on its own account."""
        before = self.federation.roster().client_ids
        told = f'partition-id={node} num-partitions={NODES} orders="{self.orders}/node{node}"'
        own = self.federation.join(f"node{node}", told)
        same = own and self.federation.roster().client_ids == before
        self._note(f"node{node} joined again on {'its own' if same else 'another'} account")

    def stranger(self) -> None:
        """Let a node knock whose key nobody has registered."""
        path = self.federation.folder / "stranger"
        keys.make_node_key(path)
        port = self.federation.config()["ports"]["gate"]
        ended = subprocess.run(
            [
                *(str(Path(sys.executable).parent / "flower-supernode"), "--max-retries", "0"),
                *("--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1"),
                *("--isolation", "process"),
                *("--port", str(free_ports(1)[0])),
                *("--root-certificates", str(self.federation.folder / "ca.crt")),
                *("--auth-supernode-private-key", str(path)),
            ],
            env={**os.environ, **OFFLINE, "FLWR_HOME": str(self.federation.folder / "stranger.d")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )
        self._note(f"a stranger's node ended with {ended.returncode}")
        assert ended.returncode == 1  # what Flower's own errors end with; 2 is a slip of ours

    def watch_gate(self) -> None:
        """Knock at Control and Runtime from outside all the time."""
        context = ssl.create_default_context(cafile=str(self.federation.folder / "ca.crt"))
        port = self.federation.config()["ports"]["gate"]
        while not self._over.wait(2.0):
            for path in ("control/list-runs", "control/start-run", "runtime/get-nodes"):
                try:
                    url = f"https://127.0.0.1:{port}/v1/{path}"
                    self.outside.append(httpx.post(url, verify=context, timeout=10).status_code)
                except httpx.HTTPError:
                    continue

    def run(self, plan: dict[int, list[Any]], rounds: int, overrides: dict[str, Any]) -> Path:
        """Run to the end; resume whenever the ServerApp was killed."""
        watcher = threading.Thread(target=self.watch_gate, daemon=True)
        watcher.start()
        begun = time.time()
        self._submit(overrides)
        done, last_change, alive_at = 0, time.monotonic(), time.monotonic()
        while True:
            time.sleep(0.3)
            if self._server_app():
                alive_at = time.monotonic()
            folder = self.federation.last_run()
            if folder is None or (folder / "config.toml").stat().st_mtime < begun - 5:
                if time.monotonic() - last_change > 120:
                    raise SystemExit("the run did not begin; see the logs")
                continue
            if (folder / "result.json").exists():
                break
            lines = folder / "rounds.jsonl"
            now = lines.read_text().count("\n") if lines.exists() else 0
            last_change = time.monotonic() if now != done else last_change
            done = now
            for number in [n for n in plan if n <= now]:
                for action in plan.pop(number):
                    action()
                    alive_at = time.monotonic()
            if time.monotonic() - alive_at > 3:
                self._note(f"no ServerApp after round {done}: resuming")
                self._submit({**overrides, "flower_resume": True})
                alive_at = time.monotonic() + 30
            if time.monotonic() - last_change > 400:
                raise SystemExit(f"nothing happened for 400 s after round {done}")
        self._over.set()
        return folder

    def _submit(self, overrides: dict[str, Any]) -> None:
        """Start a run; it goes on whether anybody follows it or not."""
        for _ in range(10):
            if self.federation.run(overrides, stream=False) == 0:
                return
            time.sleep(3)  # the SuperLink is just coming back
        raise SystemExit("no run could be started")

    def _server_app(self) -> list[int]:
        """Return the process of the ServerApp."""
        job = (self.federation.status() or {"processes": {}})["processes"].get("serverapp")
        return children(job["pid"]) if job and job["pid"] else []

    def _note(self, text: str) -> None:
        self.events.append(text)
        print(f"  {time.strftime('%H:%M:%S')} {text}", flush=True)


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        found = [int(child) for child in path.read_text().split()]
    except OSError:
        return []
    return [child for child in found if is_running(child, began_at(child))]


def plan_of(chaos: Chaos, rounds: int, deadline: float) -> dict[int, list[Any]]:
    """Return what is done after how many rounds, for twenty of them."""

    def kill_serverapp() -> None:
        chaos.kill("the ServerApp")

    def let_site_refuse(refuses: bool) -> None:
        chaos.write_policy(0, dry_run=refuses)

    at = {
        1: [lambda: chaos.tell(1, f"sleep {deadline + 20:g}")],
        2: [lambda: chaos.tell(1, ""), lambda: chaos.tell(2, "garbage")],
        3: [lambda: chaos.tell(2, "forge"), lambda: chaos.kill("superlink")],
        4: [lambda: chaos.tell(2, "raise"), lambda: chaos.tell(3, "nan")],
        5: [lambda: let_site_refuse(True)],
        6: [lambda: chaos.tell(2, ""), lambda: chaos.tell(3, ""), kill_serverapp],
        7: [lambda: let_site_refuse(False), chaos.stop],
        8: [lambda: chaos.kill("node4")],
        9: [lambda: chaos.revoke(1)],
        10: [lambda: chaos._note(f"new key {chaos.federation.rotate('node3')[:16]}")],
        11: [lambda: chaos.join_again(1)],
        12: [lambda: chaos.kill("superlink"), chaos.stranger],
        14: [kill_serverapp],
        16: [lambda: chaos.kill("node0.app")],
    }
    plan: dict[int, list[Any]] = {}
    for number, actions in at.items():
        plan.setdefault(number * rounds // 20, []).extend(actions)
    return plan


def check(name: str, holds: bool, shown: object) -> bool:
    print(f"{'ok  ' if holds else 'FAIL'} {name}: {shown}", flush=True)
    return holds


def released_joins(folder: Path) -> np.ndarray[Any, Any]:
    """Return in how many of the public releases each client had a part."""
    joins = np.zeros(NODES)
    for line in map(json.loads, (folder / "rounds.jsonl").read_text().splitlines()):
        here = set(line["cohort"]) - set(line.get("absent", ()))
        joins[list(here)] += 1
    return joins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="kept; a temporary one by default")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--deadline", type=float, default=25.0)
    parser.add_argument("--epsilon", type=float, default=10000.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.folder or temporary)
        # Twice as many test samples as the template keeps: a point is then six of them.
        task = FILES[TASK].replace("300", "600")
        app = write_app(folder / "app", {"quiltapp/client_app.py": CLIENT, TASK: task})
        orders = folder / "orders"
        orders.mkdir()
        federation = LocalFederation(folder / "federation")
        told = {
            f"node{i}": f'partition-id={i} num-partitions={NODES} orders="{orders}/node{i}"'
            for i in range(NODES)
        }
        federation.prepare(app, NODES, node_config=told)
        overrides = {
            "mode": "certified",
            "epsilon": given.epsilon,
            "policy": "worst_case",
            "learning_rate": 0.3,
            "local_epochs": 8,
            "server_lr": 0.5,
            "clip_norm": 3.0,
            "normalise_updates": False,
            "batch_size": 32,
            "num_rounds": given.rounds,
            "flower_deadline": given.deadline,
            "flower_min_nodes": 3,
        }
        chaos = Chaos(federation, orders)
        for node in SITED:
            chaos.write_policy(node, dry_run=False)
        try:
            federation.up(300)
            sys.exit(0 if _measure(federation, chaos, given, overrides) else 1)
        finally:
            print("had to kill:", federation.down() or "nothing")


def _calm(federation: LocalFederation, overrides: dict[str, Any]) -> Any:
    """Run the same with nothing broken, with the nodes in this process: the tests of a
    deployment say that it makes the same model."""
    app = Path(federation.config()["app"])
    sys.path.insert(0, str(app))
    from quiltapp import task

    from fedquilt.flower.client_registry import PlaceRegistry
    from fedquilt.flower.node import client_app
    from fedquilt.flower.server import run_on_grid
    from fedquilt.flower.settings import split_settings
    from fedquilt.flower.simulate import InProcessGrid
    from fedquilt.flower.template import run_configuration

    grid = InProcessGrid(client_app(task.make_model, task.client_data), NODES)
    options, settings = split_settings(run_configuration(**overrides))
    places = PlaceRegistry(grid, NODES)
    output = str(federation.folder / "calm")
    return run_on_grid(
        grid, places, task.make_model, task.test_data, options, settings, output_dir=output
    )


def _measure(
    federation: LocalFederation, chaos: Chaos, given: argparse.Namespace, overrides: dict[str, Any]
) -> bool:
    calm = _calm(federation, overrides)
    print(f"calm: accuracy {calm.final_accuracy:.4f}", flush=True)
    began = time.monotonic()
    folder = chaos.run(plan_of(chaos, given.rounds, given.deadline), given.rounds, overrides)
    result, seconds = fedquilt.load(folder), time.monotonic() - began
    print(f"chaos: accuracy {result.final_accuracy:.4f} in {seconds:.0f} s", flush=True)
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        spent = np.asarray(ledger.populations()[0].spent())
    with Ledger.open(calm.folder / "ledger.sqlite") as ledger:
        each = float(np.median(ledger.populations()[0].spent())) / given.rounds
    joins = released_joins(folder)
    apart = abs(result.final_accuracy - calm.final_accuracy)
    checks = [
        check("rounds", result.result["rounds"] == given.rounds, result.result["rounds"]),
        *_check_events(chaos, folder),
        check("accuracy apart from calm", apart <= 0.01, f"{apart:.4f}"),
        check(
            "ledger is never below what was released",
            bool((spent >= joins * each * (1 - 1e-9)).all()),
            f"spent/charge {np.round(spent / each, 3).tolist()}, releases {joins.tolist()}",
        ),
        *_check_sites(chaos, spent, joins, each),
        *_check_who_was_served(federation, chaos),
        check("claim", result.statement.is_bounded, f"epsilon {result.statement.epsilon_max:.4g}"),
    ]
    return all(checks)


def _check_events(chaos: Chaos, folder: Path) -> list[bool]:
    """Check that everything that was to go wrong did, and what the engine made of it."""
    nodes = [json.loads(line) for line in (folder / "nodes.jsonl").read_text().splitlines()]
    refused = sorted({line["refused"] for line in nodes if "refused" in line})
    late = [line["round"] for line in nodes if 1 in line.get("absent", ())]
    ids = {line["node"] for line in nodes if line.get("client") == 3 and "node" in line}
    killed = {
        name: chaos.events.count(f"SIGKILL {name}")
        for name in ("superlink", "the ServerApp", "node4", "node0.app")
    }
    expected = {"forged: another token", "error 2", "array 'vector' is missing"}
    by_site = [x["round"] for x in nodes if "by its site: dry run" in x.get("refused", "")]
    client_1 = {x["node"] for x in nodes if x.get("client") == 1 and "node" in x}
    resumed = sum("resuming" in event for event in chaos.events)
    not_finite = [line["client"] for line in nodes if line.get("finite") is False]
    return [
        check("killed", killed == dict(zip(killed, (2, 2, 1, 1), strict=True)), killed),
        check("delayed past the deadline, and absent", bool(late), f"client 1 in rounds {late}"),
        check("refused by its site, mid-run", bool(by_site), f"client 0 in rounds {by_site}"),
        check("stopped", "stopped by its operator" in chaos.events, f"resumed {resumed} times"),
        check(
            "revoked, and in again on its own account",
            {"node1 revoked: revoked", "node1 joined again on its own account"} <= set(chaos.events)
            and len(client_1) > 1,
            f"client 1 was {len(client_1)} nodes",
        ),
        check("restarted with a new id", len(ids) > 1, f"client 3 was {len(ids)} nodes"),
        check("garbage, forged, raised", expected <= set(refused), refused),
        check("not finite", 3 in not_finite, f"of clients {sorted(set(not_finite))}"),
    ]


def _check_sites(chaos: Chaos, spent: Any, joins: Any, each: float) -> list[bool]:
    """Check that a site's account is never below what was released of it, and hides nothing.

    A reply to a server that was killed before its release is in the site's account alone.
    """
    own = {}
    for node in SITED:
        with Ledger.open(chaos.site(node) / "site.sqlite", read_only=True) as account:
            assert account.verify().ok
            own[node] = float(account.populations()[0].spent()[0])
    released = all(own[node] >= joins[node] * each * (1 - 1e-6) for node in SITED)
    charged = all(own[node] >= spent[node] * (1 - 1e-6) for node in SITED)
    shown = {node: round(value / each, 3) for node, value in own.items()}
    return [
        check("no site's account is below what was released of it", released, shown),
        check("nor below the server's ledger", charged, shown),
    ]


def _check_who_was_served(federation: LocalFederation, chaos: Chaos) -> list[bool]:
    """Check that the SuperLink knows nobody but the roster, and who reached what."""
    seen, known = federation.keys_seen(), federation.roster()
    listed = {value for prints in known.keys.values() for value in prints}
    knocked = [event for event in chaos.events if event.startswith("a stranger")]
    online = sorted(federation.online())
    answers = sorted(set(chaos.outside))
    return [
        check("only keys of the roster were ever served", set(seen) <= listed, knocked),
        check("all nodes are back", len(online) == NODES, online),
        check(
            "Control and Runtime from outside the gate",
            bool(chaos.outside) and set(answers) <= {403},
            f"{len(chaos.outside)} tries, answers {answers}",
        ),
    ]


if __name__ == "__main__":
    main()
