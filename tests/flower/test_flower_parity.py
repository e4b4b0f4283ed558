"""The same seed gives the same cohorts and the same model, wherever the clients are."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr")

from fedquilt.config import build_config
from fedquilt.experiment.api import run_in_memory
from fedquilt.flower.simulate import OneForAll, simulate
from fedquilt.record.result import RunResult
from fedquilt.setup.build_task import build_task
from fedquilt.training.engines import LocalEngine
from tiers import rest_is_slow

BASE: dict[str, Any] = {
    "num_clients": 8,
    "clients_per_round": 0.5,
    "num_rounds": 5,
    "partition": "iid",
    "seed": 1,
    "eval_every": 5,
}
TRAINED = {"local_epochs": 1}
TABLES = {"method": "condense", "ipc": 1, "num_rounds": 2, "eval_every": 2}
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {"mode": "fedavg", **TRAINED},
    "certified": {"mode": "certified", "epsilon": 60.0, "noise_seed": 3, **TRAINED},
    "certified quantile": {
        "mode": "certified",
        "noise_seed": 3,
        "clipping": "quantile",
        **TRAINED,
    },
    "fixed_dp": {"mode": "fixed_dp", "noise_seed": 3, "noise_layers": "all", **TRAINED},
    "quap_fl": {"mode": "quap_fl", "noise_seed": 3, **TRAINED},
    "quap_fl_client": {"mode": "quap_fl_client", "noise_seed": 3, **TRAINED},
    "heterofl": {"method": "heterofl", **TRAINED},
    "fedrolex, certified": {
        "method": "fedrolex",
        "mode": "certified",
        "noise_seed": 3,
        **TRAINED,
    },
    "fjord": {"method": "fjord", **TRAINED},
    "depthfl": {"method": "depthfl", "tiers": "1,1/2", **TRAINED},
    "smallest": {"method": "smallest", **TRAINED},
    "frozen front": {"mode": "certified", "model": "hog-linear", "noise_seed": 3, **TRAINED},
    "condensation": {**TABLES, "dc_iterations": 5, "model_epochs": 2},
    "condensation, global": {
        **TABLES,
        "feature_model": "global",
        "model_n": 1,
        "dc_iterations": 3,
        "model_epochs": 2,
    },
    "condensation, certified": {
        "method": "condense",
        "ipc": 1,
        "mode": "certified",
        "noise_seed": 3,
        "mean_rounds": 1,
        "model_epochs": 2,
        "synthetic_images": 20,
    },
}
# Images are matched to tables that agree; a few steps of it stay near.
LOOSE = {"condensation": 1e-4, "condensation, global": 1e-4}


def both(case: str, engine: str) -> tuple[RunResult, RunResult]:
    config = build_config({**BASE, **CASES[case]})
    here = run_in_memory(config.replace(engine="sequential"))
    return here, simulate(config.replace(engine=engine), in_memory=True)


def distance(one: RunResult, other: RunResult) -> float:
    return max(
        float((one.state_dict[name].double() - tensor.double()).abs().max())
        for name, tensor in other.state_dict.items()
    )


LONG = {"condensation", "condensation, global", "depthfl"}


@pytest.mark.parametrize(
    "case", rest_is_slow([*CASES], [case for case in CASES if case not in LONG])
)
def test_nodes_of_this_process_agree_with_sequential(case: str) -> None:
    here, there = both(case, "flower")
    assert there.result["cohorts"] == here.result["cohorts"]
    assert distance(here, there) <= LOOSE.get(case, 1e-5)


@pytest.mark.parametrize(
    ("case", "is_by_hand"), [("fedavg", True), ("heterofl", False), ("fedrolex, certified", True)]
)
def test_nodes_take_steps_by_hand_where_the_task_has_them(case: str, is_by_hand: bool) -> None:
    config, problem = build_task(build_config({**BASE, **CASES[case]}))
    engine: Any = OneForAll(config, problem)._node.method.engine
    if case != "fedavg":  # one engine for each slice; heterofl hides classes
        (engine,) = engine._engines.values()
    assert isinstance(engine, LocalEngine)
    assert engine.trainer.name == ("manual" if is_by_hand else "autograd")


@pytest.mark.slow
@pytest.mark.deploy
@pytest.mark.parametrize("case", ["fedavg", "certified", "heterofl", "condensation, certified"])
def test_nodes_of_ray_agree_with_sequential(case: str) -> None:
    pytest.importorskip("ray")
    here, there = both(case, "flower-ray")
    assert there.result["cohorts"] == here.result["cohorts"]
    assert distance(here, there) <= 1e-5


def test_the_statement_says_that_the_server_sees_single_updates() -> None:
    config = build_config({**BASE, **CASES["fedavg"], "num_rounds": 1})
    notes = " ".join(simulate(config.replace(engine="flower"), in_memory=True).statement.notes)
    assert "the server sees every client's update by itself" in notes
    assert "there is no secure aggregation" in notes
    assert "who answered before the deadline (600 s)" in notes
