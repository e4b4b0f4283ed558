"""Masked rounds over TLS of five nodes, of which one after another dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedquilt.flower.federation import LocalFederation
from fedquilt.flower.template import write_app
from fedquilt.flower.wire import STEPS
from fedquilt.privacy.ledger import Ledger

pytestmark = [pytest.mark.deploy, pytest.mark.processes, pytest.mark.timeout(600)]


# The server's app kills, at step k of round 2 k + 1, all that node k has: its SuperNode, its apps
# and its keeper.  It notes what it opens, and nodes what they hand to their keepers.
KILLING_SERVER = """
import json
import os
import signal
from pathlib import Path

from fedquilt.aggregation.secure.server import Server
from fedquilt.flower import server_app
from fedquilt.flower.masked_engine import MaskedEngine
from quiltapp.task import make_model, test_data

here = Path(os.environ["FEDQUILT_FLOWER_OUTPUT"])
real, asked, real_open = MaskedEngine._replies, {}, Server.open


def opened(self, answers):
    total = real_open(self, answers)
    clients = sorted(self._senders)
    with open(here / "opened.jsonl", "a") as file:
        line = {"round": self.order.round_index, "clients": clients, "sum": total.tolist()}
        file.write(json.dumps(line) + "\\n")
    return total


Server.open = opened


def replies(self, orders, method, until):
    index = self._traffic.round_index
    step = asked[index] = asked.get(index, -1) + 1
    if index == 2 * step + 1:
        jobs = json.loads((here.parent / "status.json").read_text())["processes"]
        for name in (f"node{step}.app", f"node{step}"):
            os.kill(jobs[name]["pid"], signal.SIGKILL)
        with open(here / "killed.jsonl", "a") as file:
            file.write(json.dumps([index, step]) + "\\n")
    yield from real(self, orders, method, until)


MaskedEngine._replies = replies
app = server_app(make_model, test_data)
"""
NOTING_CLIENT = """
import json

from fedquilt.flower import client_app, keeper
from quiltapp.task import client_data, make_model

real_words, real_noised, now = keeper.client_words, keeper.noised_integers, []


def words(noise, round_index, client):
    now[:] = [round_index, client]
    return real_words(noise, round_index, client)


def noised(*args, **kwargs):
    vector = real_noised(*args, **kwargs)
    with open(FOLDER + "/{}-{}.json".format(*now), "w") as file:
        json.dump(vector.tolist(), file)
    return vector


keeper.client_words, keeper.noised_integers = words, noised
app = client_app(make_model, client_data)
"""
ROUNDS, NODES, LEAST = 10, 5, 3


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_node_is_killed_at_every_step_and_no_sum_of_too_few_is_opened(tmp_path: Path) -> None:
    vectors = tmp_path / "vectors"
    vectors.mkdir()
    app = write_app(
        tmp_path / "app",
        {
            "quiltapp/server_app.py": KILLING_SERVER,
            "quiltapp/client_app.py": f"FOLDER = {str(vectors)!r}\n{NOTING_CLIENT}",
        },
        mode="certified", epsilon=60.0, num_rounds=ROUNDS, clients_per_round=1.0,
        secure_aggregation="protocol", least_survivors=LEAST / NODES, eval_every=ROUNDS,
        # A killed node comes back after its last sign of life is missed; rounds go on meanwhile.
        flower_min_nodes=NODES - 1, flower_step_deadline=12.0, flower_deadline=40.0,
        policy="worst_case", seed=3,
    )  # fmt: skip
    federation = LocalFederation(tmp_path / "federation")
    ledger = tmp_path / "ledger.sqlite"
    federation.prepare(app, NODES, ledger=str(ledger), population="wards")
    federation.up()
    try:
        assert federation.run() == 0
        folder = federation.wait()
    finally:
        federation.down()
    killed = lines_of(federation.folder / "results" / "killed.jsonl")
    assert killed == [[2 * step + 1, step] for step in range(len(STEPS))]
    rounds = lines_of(folder / "rounds.jsonl")
    assert [line["round"] for line in rounds] == list(range(ROUNDS))
    opened = {line["round"]: line for line in rounds if line["noise_std"] is not None}
    assert all(NODES - len(line.get("absent", [])) >= LEAST for line in opened.values())
    assert len(opened) >= ROUNDS - 1, "one node of five is no reason to lose a round"
    sums = lines_of(federation.folder / "results" / "opened.jsonl")
    assert [line["round"] for line in sums] == sorted(opened)
    for line in sums:
        sent = [
            json.loads((vectors / f"{line['round']}-{c}.json").read_text()) for c in line["clients"]
        ]
        assert len(sent) >= LEAST
        assert np.array_equal(np.sum(sent, axis=0), line["sum"]), "exact, whoever was killed"
    with Ledger.open(ledger, read_only=True) as read:
        assert read.verify().ok
        (population,) = read.populations()
        charged = {entry.round_index: len(entry.clients) for entry in population.charges()}
    for index, line in opened.items():  # whoever is in an opened sum has paid for it
        assert charged[index] >= NODES - len(line.get("absent", []))
