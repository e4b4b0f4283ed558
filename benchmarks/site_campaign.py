"""Sites and their server, killed at random moments, together and one by one.

    python benchmarks/site_campaign.py [--faults 400] [--seed 0] [--folder FOLDER]

A federation of four sites and a server that share a disk and nothing else.  The server is a
process; every order is answered by a process of its own, as on a node, which runs the site's
policy, account and clip around an app whose vectors are far too long.  All of them get SIGKILL:
the server at a random moment, together with the site that works just then in half of the cases
where one does, and a site's process at a random moment of its order.  What was killed is started
again: a server resumes its run, under a new number at the grid as on a SuperLink.

Two logs tell what happened in truth.  A site's process writes down, before its reply leaves, the
squared length of the vector in it over the variance of the promised noise.  The server writes down,
between settlement and use, the squared clips over the variance of the noise that it added.  After
every fault

* no site's account may be below what it has sent,
* no client may have less in the ledger than what was released of it,
* all five accounts must be whole.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from torch import nn

import kill_campaign
from fedquilt.flower import internals, wire
from fedquilt.flower.client_registry import PlaceRegistry
from fedquilt.flower.node import client_app
from fedquilt.flower.policy import policy_text
from fedquilt.flower.server import run_on_grid
from fedquilt.flower.settings import FlowerSettings
from fedquilt.flower.simulate import InProcessGrid
from fedquilt.flower.site import Site
from fedquilt.privacy.ledger import Ledger

SITES, SIZE, CLASSES, ROUNDS = 4, 6, 3, 12
RUNS_PER_LEDGER = 6
EPSILON, LIFE = 2.0, 60.0
APP = "ab" * 32
MUST_BE_ZERO = (
    "accounts below what their site sent",
    "ledgers below what was released",
    "accounts that are not whole",
    "runs that failed",
)


def make_model() -> nn.Module:
    """Return a model of 21 numbers."""
    return nn.Sequential(nn.Linear(SIZE, CLASSES))


def client_data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of a site, whose updates are long: its clip has work to do."""
    generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    x = 50 * torch.randn(16, SIZE, generator=generator)
    return x, x[:, :CLASSES].argmax(dim=1)


def append(path: Path, line: str) -> None:
    """Write a line with one call; who is killed in it has written all of it or nothing."""
    target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(target, (line + "\n").encode())
    os.close(target)


class GridOfForks(InProcessGrid):
    """Nodes whose every order is answered by a process of its own, which may be killed."""

    def __init__(self, world: Path, run_id: int, seed: int) -> None:
        self._world = world
        self.came: set[int] = set()
        self._draws = random.Random(f"{seed} {run_id} {os.getpid()}")
        self._honest = client_app(make_model, client_data)
        self._sites = [Site(world / f"site{place}" / "site.toml") for place in range(SITES)]
        super().__init__(self._honest, SITES, run_id=run_id)

    def _answer(self, message: Message) -> list[Message]:
        node = message.metadata.dst_node_id
        context = self.contexts[node]
        if message.metadata.message_type != "train":
            return super()._answer(message)
        place = int(context.node_config["partition-id"])
        outside = self._world / f"reply-{place}"
        outside.unlink(missing_ok=True)
        child = kill_campaign._fork(lambda: self._in_child(message, context, place, outside))
        append(self._world / "working", str(child))
        began, killed = time.monotonic(), self._draws.random() < 0.3
        if killed:
            time.sleep(usual_seconds(self._world) * self._draws.random())
            os.kill(child, signal.SIGKILL)
            append(self._world / "site-kills", str(place))
        os.waitpid(child, 0)
        if not killed:
            (self._world / "seconds").write_text(repr(time.monotonic() - began))
        if not outside.exists():
            return []  # nothing came: the node is absent at the deadline
        facts = json.loads(outside.read_text())
        arrays = facts["vector"] and {"vector": np.array(facts["vector"], np.float32)}
        content = wire.pack_reply(facts["token"], arrays, refusal=facts["refusal"])
        if arrays:
            self.came.add(place)
        with internals.acting_as(self.run_id_here, node):
            return [Message(content, reply_to=message)]

    def _in_child(self, message: Message, context: Context, place: int, outside: Path) -> None:
        with internals.acting_as(self.run_id_here, context.node_id):
            reply = self._sites[place].answer(message, context, APP, lambda: self._honest)
        order, _ = wire.unpack_order(message.content)
        answer = wire.unpack_reply(reply.content, 1 << 20)
        vector = None if answer.failed else answer.arrays["vector"]
        if vector is not None:
            length = float(np.linalg.norm(vector.astype(np.float64)))
            append(self._world / f"sent-{place}.log", repr((length / order.noise_std) ** 2))
        facts = {"token": answer.token, "refusal": answer.refusal}
        text = json.dumps({**facts, "vector": None if vector is None else vector.tolist()})
        (outside.with_suffix(".half")).write_text(text)
        outside.with_suffix(".half").rename(outside)


def usual_seconds(world: Path) -> float:
    """Return how long the last order took that was not killed: a busy machine takes longer."""
    return float(_text(world / "seconds") or 0.1)


def serve(world: Path, number: int, seed: int) -> None:
    """Be the server: begin a run in the folder of this number, or resume it."""
    kill_campaign._note_releases(world / "released.log")
    of_all = kill_campaign.given_away
    parent = world / f"run-{number}"
    found = [path.parent for path in parent.glob("*/config.toml")]
    starts = world / "starts"
    append(starts, ".")
    grid = GridOfForks(world, starts.stat().st_size, seed)

    def of_those_who_came(*given: Any) -> dict[int, float]:
        came, grid.came = grid.came, set()
        return {client: cost for client, cost in of_all(*given).items() if client in came}

    kill_campaign.given_away = of_those_who_came
    options = {
        "mode": "certified",
        "policy": "worst_case",
        "epsilon": EPSILON,
        "num_rounds": ROUNDS,
        "local_epochs": 1,
        "clients_per_round": 1.0,
        "eval_every": ROUNDS,
        "ledger": str(world / "ledger.sqlite"),
        "population": "wards",
        "allowance": LIFE,
    }
    run_on_grid(
        grid,
        PlaceRegistry(grid, SITES),
        make_model,
        lambda: client_data(next(iter(grid.contexts.values()))),
        options,
        FlowerSettings(deadline=0.4, poll=0.01),
        client_ids=[f"ward {place}" for place in range(SITES)],
        output_dir=str(parent),
        resume=found[0] if found else None,
    )


class Campaign:
    """Kills, looks, and starts again."""

    def __init__(self, folder: Path, faults: int, seed: int) -> None:
        self._folder = folder
        self._faults = faults
        self._seed = seed
        self._draws = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.messages: list[str] = []
        self.largest_excess = 0.0

    def run(self) -> None:
        """Run one federation after another until there were enough faults."""
        number = 0
        while self.counts["faults"] < self._faults:
            world = self._folder / f"world-{number // RUNS_PER_LEDGER}"
            if not world.exists():
                self._begin(world)
            self._one_run(world, number)
            number += 1

    def _begin(self, world: Path) -> None:
        for place in range(SITES):
            (world / f"site{place}").mkdir(parents=True)
            policy = policy_text(apps=(APP,), epsilon=LIFE, min_roster=SITES, min_cohort=SITES)
            (world / f"site{place}" / "site.toml").write_text(policy)

    def _one_run(self, world: Path, number: int) -> None:
        """Let a run begin and go on, however often it is killed, to its end."""
        (world / f"run-{number}").mkdir()
        while True:
            self.counts["servers started"] += 1
            child = kill_campaign._fork(lambda: serve(world, number, self._seed))
            lives = 5.0 * self._draws.random()
            code = self._watched(child, world, time.monotonic() + lives)
            self._check(world)
            if code != -signal.SIGKILL:
                break
        self.counts["runs finished" if code == 0 else "runs out of budget"] += code in (0, 3)
        if code not in (0, 3):
            self.counts["runs that failed"] += 1
            self.messages.append(f"run {number} ended with {code}")

    def _watched(self, child: int, world: Path, dies_at: float) -> int:
        """Return how a server ended; kill it when its time has come, if faults are left."""
        kills = world / "site-kills"
        before = _lines(kills)
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                break
            if time.monotonic() > dies_at and self.counts["faults"] < self._faults:
                code = self._kill(child, world)
                break
            time.sleep(0.002)
        self.counts["kills of a site"] += _lines(kills) - before
        self.counts["faults"] = sum(self.counts[name] for name in KILLS)
        return code

    def _kill(self, child: int, world: Path) -> int:
        """Kill the server, and in half of the cases the site that works for it just then."""
        working, seen = world / "working", _lines(world / "working")
        until = time.monotonic() + self._draws.choice([0.0, 0.5])
        while time.monotonic() < until and _lines(working) == seen:
            time.sleep(0.001)
        time.sleep(usual_seconds(world) * self._draws.random())
        last = int((_text(working).splitlines() or ["0"])[-1])
        os.kill(child, signal.SIGSTOP)
        if _is_alive(last) and self._draws.random() < 0.5:
            os.kill(last, signal.SIGKILL)
            self.counts[KILLS[2]] += 1
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.counts[KILLS[0]] += code == -signal.SIGKILL
        until = time.monotonic() + 10
        while _is_alive(last) and time.monotonic() < until:
            time.sleep(0.005)
        return code

    def _check(self, world: Path) -> None:
        """Compare five accounts with what was sent and released."""
        self.counts["checks"] += 1
        for place in range(SITES):
            sent = sum(map(float, _text(world / f"sent-{place}.log").splitlines()))
            self._compare(world / f"site{place}" / "site.sqlite", np.array([sent]), MUST_BE_ZERO[0])
        released = np.zeros(SITES)
        for line in _text(world / "released.log").splitlines():
            for client, cost in json.loads(line)["cost"].items():
                released[int(client)] += cost
        self._compare(world / "ledger.sqlite", released, MUST_BE_ZERO[1])

    def _compare(self, path: Path, truth: Any, name: str) -> None:
        if not path.exists():
            self.counts[name] += bool(truth.any())
            return
        with Ledger.open(path) as opened:
            problems = opened.verify().problems
            whole = [] if problems else opened.populations()  # what is damaged has no balances
            counted = whole[0].spent() if whole else 0 * truth
        below = bool(not problems and (counted[: len(truth)] < truth * (1 - 1e-9)).any())
        self.counts[name] += int(below)
        self.counts[MUST_BE_ZERO[2]] += bool(problems)
        self.largest_excess = max(self.largest_excess, float((counted - truth).max()))
        if below or problems:
            self.messages.append(f"{path}: {counted} {truth} {problems}")

    def finish(self) -> bool:
        """Count what was sent and released; tell whether nothing was found that must not be."""
        for world in sorted(self._folder.glob("world-*")):
            used = _lines(world / "released.log")
            self.counts["releases"] += used
            self.counts[UNUSED[1]] += _settled(world / "ledger.sqlite") - used
            for place in range(SITES):
                sent = _lines(world / f"sent-{place}.log")
                self.counts["replies sent"] += sent
                self.counts[UNUSED[0]] += _settled(world / f"site{place}" / "site.sqlite") - sent
                refused = world / f"site{place}" / "refused.log"
                self.counts["orders refused by a site"] += _lines(refused)
        return not self.messages and not any(self.counts[name] for name in MUST_BE_ZERO)

    def table(self) -> str:
        """Return what was done and what was found."""
        names = ("faults", *KILLS, "servers started", "runs finished", "runs out of budget")
        did = ("replies sent", UNUSED[0], "orders refused by a site", "releases", UNUSED[1])
        more = (*did, "checks", *MUST_BE_ZERO)
        rows = [(name, str(self.counts[name])) for name in (*names, *more)]
        rows.append(("in an account and not sent or released, at most", _mu2(self.largest_excess)))
        width = max(len(name) for name, _ in rows) + 2
        return "\n".join(f"{name.ljust(width)}{value}" for name, value in rows)


KILLS = ("kills of the server", "kills of a site", "kills of a site with its server")
# Killed between the entry and what it pays for.
UNUSED = ("replies charged and never sent", "releases charged and never used")


def _mu2(value: float) -> str:
    return f"{value:.4f} mu^2"


def _settled(path: Path) -> int:
    """Return how many charges an account has entered."""
    if not path.exists():
        return 0
    with Ledger.open(path, read_only=True) as opened:
        return sum(len(population.charges()) for population in opened.populations())


def _is_alive(pid: int) -> bool:
    """Tell whether a process works, and is not a dead one that nobody has buried."""
    try:
        return (
            pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _lines(path: Path) -> int:
    return len(_text(path).splitlines())


def main() -> int:
    """Print the table; exit 1 when something was found that must not be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=400, help="how many processes are killed")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--folder", type=Path, help="where the runs are made (then removed)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        campaign = Campaign(Path(folder), options.faults, options.seed)
        began = time.monotonic()
        campaign.run()
        good = campaign.finish()
        seconds = time.monotonic() - began
    print(campaign.table())
    print(f"\nthe campaign took {seconds:.0f} s")
    print("\n".join(campaign.messages[:20]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
