"""Secure aggregation over TLS: a server that is killed at every step of a round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedquilt.flower.federation import LocalFederation
from fedquilt.flower.template import write_app
from fedquilt.flower.wire import STEPS
from fedquilt.privacy.ledger import Ledger

pytestmark = [pytest.mark.deploy, pytest.mark.processes, pytest.mark.timeout(600)]

DYING_SERVER = """
import os
import signal
from pathlib import Path

from fedquilt.flower import server_app
from fedquilt.flower.masked_engine import MaskedEngine
from fedquilt.flower.wire import STEPS
from quiltapp.task import make_model, test_data

here = Path(os.environ["FEDQUILT_FLOWER_OUTPUT"])
real, asked = MaskedEngine._replies, iter(STEPS)


def replies(self, *given):
    name = next(asked) if self._traffic.round_index == 1 else None
    for answer in real(self, *given):
        if name is not None and not (died := here / ("died at " + name)).exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield answer


MaskedEngine._replies = replies
app = server_app(make_model, test_data)
"""


def test_a_server_that_is_killed_at_every_step_has_charged_whatever_it_released(
    tmp_path: Path,
) -> None:
    app = write_app(
        tmp_path / "app",
        {"quiltapp/server_app.py": DYING_SERVER},
        mode="certified", epsilon=60.0, num_rounds=3, clients_per_round=1.0, eval_every=3,
        secure_aggregation="protocol", flower_min_nodes=3, flower_step_deadline=20.0,
        policy="worst_case", seed=3,
    )  # fmt: skip
    federation = LocalFederation(tmp_path / "federation")
    ledger = tmp_path / "ledger.sqlite"
    federation.prepare(app, 3, ledger=str(ledger), population="wards")
    federation.up()
    charged: list[list[int]] = []
    try:
        for number in range(len(STEPS) + 1):
            ended = federation.run({"flower_resume": True} if number else {})
            assert ended == (0 if number == len(STEPS) else 1)
            with Ledger.open(ledger, read_only=True) as read:
                assert read.verify().ok
                (population,) = read.populations()
                charged.append(sorted(entry.round_index for entry in population.charges()))
        folder = federation.wait()
    finally:
        federation.down()
    died = {path.name for path in folder.parent.glob("died*")}
    assert died == {f"died at {step}" for step in STEPS}
    # Before anybody is asked for a share round 1 is not charged, from there on it is; played again
    # it is another release, charged again, and then worst_case has nothing left for a third round.
    assert charged == [[0]] * (len(STEPS) - 1) + [[0, 1], [0, 1, 1]]
    lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    released = [line["round"] for line in lines if line["noise_std"]]
    assert released == [0, 1]
