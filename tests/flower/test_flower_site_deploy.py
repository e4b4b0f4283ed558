"""Sites on a federation with TLS and keys: what their policies refuse, what their accounts say.

An honest server, one that asks for more than it may, and masked rounds, on the same three nodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from command_line import Said
from fedquilt.flower.federation import LocalFederation
from fedquilt.flower.policy import POLICY, policy_text
from fedquilt.flower.processes import SITES
from fedquilt.flower.site import REFUSALS
from fedquilt.flower.template import FILES, fab_hash, write_app
from fedquilt.privacy.ledger import Ledger

pytestmark = [pytest.mark.deploy, pytest.mark.processes, pytest.mark.timeout(240)]

NODES, HONEST = 3, 2
# What the app's server, which nodes trust, asks for after two honest rounds, and why not; at
# last it asks for an evaluation.
ATTACKS = {
    "settings=having(order, mode='fedavg')": "mode='fedavg' is not one of 'certified'",
    "settings=having(order, local_epochs=50)": "local_epochs=50 is not one of 2",
    "settings=CONDENSATION": "method='condense' is not one of 'full'",
    "cohort=1": "cohort=1 is fewer than 2",
    "num_clients=2, cohort=2": "num_clients=2 is fewer than 3",
    "roster=order.roster.replace('node1', 'nobody')": "node1 is not in the roster",
    "client=(order.client + 1) % 3": "the order is for another client of the roster",
    "round_index=0": "round 0 of this run was answered before",
    "clip=4 * order.clip": "what this run, or this site in its life, may take is used up",
    "clip=1000 * order.clip": "the round costs",
    "version='0.0.1'": "this order cannot be read",
    "": "messages of type 'evaluate' are not taken",
}
SERVER = """
import json
from dataclasses import replace

from fedquilt.flower import server_app, wire
from fedquilt.flower.engine import FlowerEngine
from quiltapp.task import make_model, test_data

CONDENSATION = json.dumps({"mode": "certified", "method": "condense"})
ATTACKS = {ATTACKS}
honest, usual = wire.pack_order, FlowerEngine._message


def having(order, **options):
    return json.dumps({**json.loads(order.settings), **options})


def message(self, content, node, index, *kind):
    return usual(self, content, node, index, *(("evaluate",) if index == max(ATTACKS) else kind))


FlowerEngine._message = message


def pack_order(order, vector):
    attack = ATTACKS.get(order.round_index)
    return honest(attack(order) if attack else order, vector)


wire.pack_order = pack_order
app = server_app(make_model, test_data)
"""
# A node whose samples are read leaves a mark.
TASK = FILES["quiltapp/task.py"].replace(
    '    path = context.node_config.get("data")\n',
    '    with open(context.node_config["reads"], "a") as reads:\n'
    '        reads.write("x")\n'
    "    path = None\n",
)
CERTIFIED: dict[str, Any] = {"mode": "certified", "epsilon": 60.0, "clients_per_round": 1.0}


def app_in(folder: Path) -> Path:
    lines = [
        f"    {HONEST + place}: lambda order: replace(order, {change}),"
        for place, change in enumerate(ATTACKS)
    ]
    table = "{\n" + "\n".join(lines) + "\n}"
    files = {
        "quiltapp/server_app.py": SERVER.replace("{ATTACKS}", table),
        "quiltapp/task.py": TASK,
    }
    return write_app(folder, files, **CERTIFIED, num_rounds=HONEST + len(ATTACKS), eval_every=20)


class Sites(LocalFederation):
    """A federation of three nodes that have sites, and a ledger that outlives its runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "federation")
        self.ledger = folder / "ledger.sqlite"
        self.names = [f"node{place}" for place in range(NODES)]
        told = {
            name: f'partition-id={place} num-partitions={NODES} reads="{folder}/reads-{name}"'
            for place, name in enumerate(self.names)
        }
        app = app_in(folder / "app")
        self.apps = (fab_hash(app),)
        config = {"ledger": str(self.ledger), "population": "wards"}
        self.prepare(app, NODES, node_config=told, **config)
        self.prints = [self.roster().keys[name][0] for name in self.names]
        with Ledger.open(self.ledger, create=True) as opened:
            opened.population("wards", client_ids=self.prints, epsilon=200.0, delta=1e-5)

    def site(self, name: str) -> Path:
        return self.folder / SITES / name

    def write_policies(self, **chosen: Any) -> None:
        """Write the policy of every site; what is a tuple differs from site to site."""
        for place, name in enumerate(self.names):
            own = {k: v[place] if isinstance(v, tuple) else v for k, v in chosen.items()}
            self.site(name).mkdir(parents=True, exist_ok=True)
            pinned = "local_epochs = 2\n"  # as the app has
            (self.site(name) / POLICY).write_text(policy_text(apps=self.apps, **own) + pinned)

    def charged(self) -> list[float]:
        """Return what the server's ledger has charged each client with."""
        with Ledger.open(self.ledger, read_only=True) as opened:
            assert opened.verify().ok
            (population,) = opened.populations()
            return population.spent()[population.numbers(self.prints)].tolist()

    def given_away(self, name: str) -> float:
        """Return what a site's account says that it has sent, 0 where there is none."""
        path = self.site(name) / "site.sqlite"
        if not path.exists():
            return 0.0
        with Ledger.open(path, read_only=True) as opened:
            assert opened.verify().ok
            (own,) = opened.populations()
            return float(own.spent()[0])

    def reads(self, name: str) -> int:
        """Return how often a node's samples were read."""
        path = self.folder.parent / f"reads-{name}"
        return len(path.read_text()) if path.exists() else 0

    def lines(self, file: str = "nodes.jsonl") -> list[dict[str, Any]]:
        """Return what the last run has written down, line by line."""
        folder = self.last_run()
        assert folder is not None
        return [json.loads(line) for line in (folder / file).read_text().splitlines()]

    def rounds(self) -> list[tuple[int, list[int]]]:
        """Return how many answered and who was absent, in each round of the last run."""
        return [(line["answered"], line["absent"]) for line in self.lines() if "asked" in line]

    def refused(self) -> list[tuple[int, int, str]]:
        """Return round, client and reason of each refusal in the last run, in their order."""
        told = [line for line in self.lines() if "refused" in line]
        return sorted((line["round"], line["client"], line["refused"]) for line in told)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FEDQUILT_FLOWER_ALLOW_UNBOUNDED", "yes")  # a server that asks for it all
        sites = Sites(tmp_path_factory.mktemp("sites"))
        sites.write_policies(
            epsilon=(200.0, 200.0, 3.0),
            min_roster=NODES,
            min_cohort=2,
            client=tuple(sites.prints),
            roster=(("node1",),) * NODES,
        )
        try:
            sites.up()
            yield sites
        finally:
            assert sites.down() == []


def test_sites_refuse_before_a_sample_is_read_and_the_rest_goes_on(
    sites: Sites, cli: Callable[..., Said]
) -> None:
    assert sites.run() == 0
    assert sites.rounds() == [(2, [2])] * HONEST + [(0, [0, 1, 2])] * len(ATTACKS)
    told = sites.refused()
    reasons = {index: reason for index, client, reason in told if client == 0}
    assert [told[:2], len(told)] == [
        [(index, 2, "by its site: epsilon=60 of a run is above 3") for index in range(HONEST)],
        HONEST + NODES * len(ATTACKS),
    ]
    for place, words in enumerate(ATTACKS.values()):
        assert words in reasons[HONEST + place]
    charged = sites.charged()
    assert charged[2] == 0 < charged[0]
    assert [sites.given_away(name) for name in sites.names] == pytest.approx(charged, rel=1e-6)
    assert [sites.reads(name) for name in sites.names] == [HONEST, HONEST, 0]
    assert not (sites.site("node2") / "site.sqlite").exists()
    for place in (0, 1):
        account = sites.site(f"node{place}") / "site.sqlite"
        given = ("ledger", "reconcile", sites.ledger, account, "--client", sites.prints[place])
        assert cli(*given).code == 0


def test_the_trusted_app_asked_for_a_mode_that_no_site_allows_gets_nothing(sites: Sites) -> None:
    before = [(sites.given_away(name), sites.reads(name)) for name in sites.names]
    charged = sites.charged()
    sites.run({"mode": "fedavg", "epsilon": "", "num_rounds": 1})
    assert sites.rounds() == [(0, [0, 1, 2])]
    reason = "by its site: mode='fedavg' is not one of 'certified'"
    assert sites.refused() == [(0, client, reason) for client in range(NODES)]
    for name in sites.names:
        last = (sites.site(name) / REFUSALS).read_text().splitlines()[-1]
        assert last.endswith("refused: mode='fedavg' is not one of 'certified'")
    assert [(sites.given_away(name), sites.reads(name)) for name in sites.names] == before
    assert sites.charged() == charged


def test_nodes_over_tls_open_the_sums_of_rounds_alone(sites: Sites) -> None:
    sites.write_policies(
        epsilon=200.0, min_cohort=NODES, min_survivors=NODES, secure_aggregation="required"
    )
    own = [sites.given_away(name) for name in sites.names]
    charged = sites.charged()
    assert sites.run({"secure_aggregation": "protocol", "num_rounds": HONEST}) == 0
    rounds = [line["absent"] for line in sites.lines() if "absent" in line]
    assert rounds == [[]] * HONEST
    assert not [line for line in sites.lines() if "closed" in line or "refused" in line]
    folder = sites.last_run()
    assert folder is not None
    assert "the server saw numbers under masks" in (folder / "result.json").read_text()
    more = np.subtract(sites.charged(), charged)
    np.testing.assert_allclose(
        [sites.given_away(name) - before for name, before in zip(sites.names, own, strict=True)],
        more,
        rtol=1e-6,
    )
    assert (more > 0).all()
