"""Whole runs: what is measured when, what is recorded, what may be claimed."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import get_epsilon_gaussian
from torch import nn
from torch.nn import functional

import fedquilt
from fedquilt.config import MODES
from fedquilt.data import ImageDataset, load_dataset
from fedquilt.errors import FedquiltError, InvalidValueError
from fedquilt.experiment import loop as training_loop
from fedquilt.experiment.api import RunResult, run_config
from fedquilt.setup.build_task import build_task
from fedquilt.setup.task import pick_device
from run_samples import assert_same_run, same_tensors, tiny

PER_ROUND = (
    "train_loss",
    "clip_values",
    "noise_levels",
    "noise_stats",
    "privacy_budgets",
    "client_participation",
)
PER_EVALUATION = ("test_accuracy", "test_loss", "participation_stats", "evaluation_rounds")


def start(tmp_path: Path, **changes: Any) -> RunResult:
    return run_config(tiny(**changes, output_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("num_rounds", "eval_every", "expected"),
    [(6, 2, [2, 4, 6]), (5, 2, [2, 4, 5]), (3, 10, [3]), (2, 1, [1, 2]), (1, 1, [1])],
)
def test_evaluation_comes_every_so_many_rounds_and_at_the_end(
    tmp_path: Path, num_rounds: int, eval_every: int, expected: list[int]
) -> None:
    result = start(tmp_path, num_rounds=num_rounds, eval_every=eval_every, batch_size=1024).result
    assert result["history"]["evaluation_rounds"] == expected
    assert all(len(result["history"][name]) == len(expected) for name in PER_EVALUATION)
    assert all(len(result["history"][name]) == num_rounds for name in PER_ROUND)
    assert result["rounds"] == num_rounds
    stats = result["history"]["participation_stats"]
    assert [entry["total_rounds"] for entry in stats] == expected


def test_evaluating_more_often_changes_nothing_else(tmp_path: Path) -> None:
    often, rarely = (start(tmp_path, eval_every=every) for every in (1, 100))
    assert same_tensors(often.state_dict, rarely.state_dict)
    assert often.result["cohorts"] == rarely.result["cohorts"]
    assert often.result["history"]["train_loss"] == rarely.result["history"]["train_loss"]


@pytest.mark.parametrize("mode", MODES)
def test_same_seeds_same_run_other_seed_other_run(tmp_path: Path, mode: str) -> None:
    first, again = start(tmp_path, mode=mode), start(tmp_path, mode=mode)
    assert_same_run(first, again)
    other = start(tmp_path, mode=mode, seed=1)
    assert not same_tensors(first.state_dict, other.state_dict)
    assert first.result["cohorts"] != other.result["cohorts"]
    if mode == "fedavg":
        return
    noisy = start(tmp_path, mode=mode, noise_seed=12)
    assert noisy.result["cohorts"] == first.result["cohorts"]
    assert not same_tensors(first.state_dict, noisy.state_dict)
    secret = [start(tmp_path, mode=mode, noise_seed=None) for _ in range(2)]
    assert secret[0].result["cohorts"] == secret[1].result["cohorts"]
    assert not same_tensors(secret[0].state_dict, secret[1].state_dict)


def test_the_final_accuracy_is_that_of_the_model_that_comes_back(tmp_path: Path) -> None:
    finished = start(tmp_path, mode="fedavg", learning_rate=0.5)
    _, test = load_dataset("digits")
    assert finished.model is not None
    with torch.no_grad():
        outputs = finished.model.eval()(test.images)
    right = (outputs.argmax(dim=1) == test.targets).double().mean().item()
    loss = functional.cross_entropy(outputs.double(), test.targets).item()
    assert finished.final_accuracy == pytest.approx(right, abs=1e-12)
    assert finished.result["metadata"]["final_loss"] == pytest.approx(loss, rel=1e-5)
    assert right > 0.3  # it learned something, so the comparison means something
    assert same_tensors(dict(finished.model.state_dict()), finished.state_dict)


def with_test_labels(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Let runs load the digits with other labels in the test part."""

    def load(*given: Any, **options: Any) -> tuple[ImageDataset, ImageDataset]:
        train, test = load_dataset(*given, **options)
        return train, ImageDataset(test.images, change(test.targets), test.name, test.num_classes)

    monkeypatch.setattr("fedquilt.setup.build_task.load_dataset", load)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("early_stopping", [False, True])
def test_test_data_never_steer_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, early_stopping: bool
) -> None:
    changes = {"mode": mode, "eval_every": 1, "num_rounds": 6, "learning_rate": 0.3}
    if early_stopping:
        changes |= {"early_stopping": True, "target_accuracy": 0.25, "epsilon": 1e4}
    plain = start(tmp_path, **changes)
    shuffle = np.random.default_rng(3).permutation(355)
    with_test_labels(monkeypatch, lambda targets: targets[torch.from_numpy(shuffle)])
    blind = start(tmp_path, **changes)
    history = plain.result["history"]
    assert blind.result["history"]["test_accuracy"] != history["test_accuracy"]
    assert same_tensors(plain.state_dict, blind.state_dict)
    assert plain.result["cohorts"] == blind.result["cohorts"]
    assert plain.result["rounds"] == blind.result["rounds"]
    assert plain.statement == blind.statement
    for name in PER_ROUND:
        assert history[name] == blind.result["history"][name]


def test_the_validation_split_belongs_to_no_client() -> None:
    config = tiny(early_stopping=True, target_accuracy=0.5, validation_fraction=0.2)
    _, problem = build_task(config)
    train, _ = load_dataset("digits")
    held = np.concatenate(problem.task.clients)
    assert problem.validation is not None
    count = round(0.2 * len(train))
    assert len(problem.validation[1]) == count
    assert len(held) == len(np.unique(held)) == len(train) - count
    missing = np.setdiff1d(np.arange(len(train)), held)
    assert torch.equal(problem.validation[0], train.images[torch.from_numpy(missing)])
    assert torch.equal(problem.validation[1], train.targets[torch.from_numpy(missing)])
    _, plain = build_task(tiny())
    assert plain.validation is None
    assert len(np.concatenate(plain.task.clients)) == len(train)


@pytest.mark.parametrize(("on_test", "on_validation", "rounds"), [(0.99, 0.4, 4), (0.0, 0.5, 2)])
def test_early_stopping_looks_at_the_validation_split_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_test: float,
    on_validation: float,
    rounds: int,
) -> None:
    def pretend(
        module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[float, float]:
        return (on_test if len(targets) == 355 else on_validation), 1.0

    monkeypatch.setattr("fedquilt.setup.task.evaluate", pretend)
    stopped = start(tmp_path, mode="fedavg", early_stopping=True, target_accuracy=0.5)
    assert stopped.result["rounds"] == rounds
    assert stopped.result["history"]["evaluation_rounds"][-1] == rounds
    assert len(stopped.result["cohorts"]) == rounds
    assert sum(stopped.result["joins"]) == 3 * rounds


def test_early_stopping_needs_a_target(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="early_stopping=True needs target_accuracy"):
        start(tmp_path, early_stopping=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("availability", ["always", "uniform", "staircase.csv"])
def test_fixed_dp_on_all_layers_states_the_exact_epsilon(here: Path, availability: str) -> None:
    stairs = [f"{round_index},{client}" for client in range(10) for round_index in range(client)]
    (here / "staircase.csv").write_text("\n".join(["round,client", *stairs]))
    changes = {"num_rounds": 6, "epsilon": 4.0, "delta": 1e-6, "noise_seed": None}
    changes |= {
        "availability": availability,
        "clients_per_round": 10 if ".csv" in availability else 3,
    }
    finished = start(here / "results", mode="fixed_dp", noise_layers="all", **changes)
    joins = [sum(client in cohort for cohort in finished.result["cohorts"]) for client in range(10)]
    assert finished.result["joins"] == joins
    noise_multiplier = math.sqrt(2 * math.log(1.25 / 1e-6)) / (4.0 / 6)

    def epsilon(count: int) -> float:
        if count == 0:
            return 0.0
        return float(get_epsilon_gaussian(noise_multiplier / math.sqrt(count), 1e-6))

    statement = finished.statement
    assert max(joins) > 1
    assert statement.epsilon_max == pytest.approx(epsilon(max(joins)), rel=1e-6)
    assert statement.epsilon_median == pytest.approx(
        float(np.median([epsilon(count) for count in joins])), rel=1e-6
    )
    assert statement.is_bounded
    assert statement.uncovered == ()
    assert statement.covered == ("fc.weight", "fc.bias")
    assert (statement.unit, statement.adjacency) == ("client", "zero-out")
    assert statement.noise_source == "operating system generator"
    assert finished.summary()["statement"]["epsilon_max"] == statement.epsilon_max


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "fedavg"}, "no noise"),
        ({"mode": "fixed_dp", "model": "auto", "noise_seed": None}, "conv1.weight, conv1.bias"),
        ({"mode": "fixed_dp", "noise_layers": "all", "noise_seed": 3}, "reproducible noise"),
        ({"mode": "quap_fl", "noise_layers": "all", "noise_seed": None}, "raw percentile"),
        ({"mode": "quap_fl_client", "noise_seed": None}, "raw percentile"),
    ],
    ids=str,
)
def test_what_cannot_be_claimed_is_said(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    finished = start(tmp_path, **changes)
    record = finished.summary()["statement"]
    assert record["epsilon_max"] == record["epsilon_median"] == "inf"
    assert any(words in note for note in record["notes"])
    assert "epsilon: inf" in finished.statement.as_text()
    keys = ["unit", "adjacency", "delta", "epsilon_max", "epsilon_median"]
    keys += ["covered", "uncovered", "noise_source", "notes"]
    assert sorted(record) == sorted(keys)


def test_a_run_in_which_nobody_ever_came(tmp_path: Path) -> None:
    trace = tmp_path / "nobody.csv"
    trace.write_text("round,client\n99,0\n")
    results = tmp_path / "results"
    options = {"noise_layers": "all", "noise_seed": None, "availability": str(trace)}
    finished = start(results, mode="fixed_dp", **options)
    assert finished.result["cohorts"] == [[]] * 4
    assert finished.result["history"]["train_loss"] == [None] * 4
    assert finished.statement.epsilon_max == 0.0
    _, problem = build_task(tiny())
    assert same_tensors(finished.state_dict, dict(problem.flat.module.state_dict()))


def test_a_trace_decides_who_is_there(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("round,client\n0,4\n0,2\n2,9\n2,9\n3,1\n")
    finished = start(tmp_path / "results", mode="fedavg", availability=str(trace))
    assert finished.result["cohorts"] == [[2, 4], [], [9], [1]]


class Own(nn.Module):
    """A model with a parameter that is frozen, in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), 2.0), requires_grad=False)
        self.fc = nn.Linear(5, 3)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x * self.scale)  # type: ignore[no-any-return]


def own_data() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(60, 5, generator=random)
    return x, x[:, :3].argmax(dim=1)


CLIENTS = [range(start, 60, 6) for start in range(6)]
OWN: dict[str, Any] = {
    "mode": "fedavg",
    "num_rounds": 3,
    "availability": "always",
    "learning_rate": 0.3,
    "output_dir": None,
}


@pytest.mark.parametrize("mode", MODES)
def test_own_model_and_data_are_never_changed(here: Path, mode: str) -> None:
    model, data = Own(), own_data()
    before = copy.deepcopy(model.state_dict())
    places = [parameter.data_ptr() for parameter in model.parameters()]
    copies = [tensor.clone() for tensor in data]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr]
    finished = fedquilt.run(model, data, data, CLIENTS, **{**OWN, "mode": mode})
    assert same_tensors(dict(model.state_dict()), dict(before))
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert not model.training
    assert [p.requires_grad for p in model.parameters()] == [False, True, True]
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(data, copies, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tobytes() == states[2]  # type: ignore[union-attr]
    assert isinstance(finished.model, Own)
    assert finished.model is not model
    assert torch.equal(finished.state_dict["scale"], before["scale"])
    assert not torch.equal(finished.state_dict["fc.weight"], before["fc.weight"])
    assert list(here.iterdir()) == []


def test_own_model_learns_and_names_itself(here: Path) -> None:
    seen: list[int] = []
    finished = fedquilt.run(
        Own(),
        own_data(),
        own_data(),
        CLIENTS,
        **{**OWN, "output_dir": "out", "num_rounds": 30, "eval_every": 30},
        observer=lambda config, line: seen.append(line["round"]),
    )
    assert seen == list(range(30))
    assert finished.final_accuracy is not None
    assert finished.final_accuracy > 0.7
    assert finished.folder is not None
    assert finished.folder.parent == Path("out")
    assert finished.folder.name.startswith("custom_fedavg_seed0_")
    assert finished.result["metadata"]["hyperparameters"]["output_dir"] == "out"
    bare = fedquilt.load(finished.folder)
    assert bare.model is None
    assert same_tensors(bare.state_dict, finished.state_dict)
    loaded = fedquilt.load(finished.folder, Own())
    assert isinstance(loaded.model, Own)
    assert same_tensors(dict(loaded.model.state_dict()), finished.state_dict)
    assert loaded.summary() == finished.summary()


@pytest.mark.parametrize(
    ("clients", "options", "match"),
    [
        ([], {}, r"clients=\[\]"),
        ([[0], ["a"]], {}, r"clients\[1\] must be a list of sample numbers"),
        ([[0], [60]], {}, r"clients\[1\] must hold numbers >= 0 and < 60.*60"),
        ([[0], [-1]], {}, r"clients\[1\].*-1"),
        ([[0.5]], {}, r"clients\[0\]"),
        ([[[0], [1]]], {}, r"clients\[0\]"),
        ([[0]], {"num_clients": 4}, "num_clients=4 must be 1"),
        ([[0]], {"clients_per_round": 4}, "clients_per_round=4 must be <= num_clients=1"),
        ([[0]], {"early_stopping": True, "target_accuracy": 0.5}, "early_stopping=True"),
        ([[0]], {"num_round": 4}, "unknown key 'num_round'.*'num_rounds'"),
        ([[0]], {"num_rounds": "4"}, "num_rounds='4' must be a whole number"),
        ([[0]], {"noise_layers": "conv*", "mode": "quap_fl"}, r"noise_layers='conv\*' must match"),
        ([[0]], {"output_dir": ""}, "output_dir=''"),
    ],
)
def test_bad_arguments_change_nothing(
    here: Path, clients: list[Any], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(FedquiltError, match=match):
        fedquilt.run(
            Own(), own_data(), own_data(), clients, **{**OWN, "output_dir": "out", **options}
        )
    assert list(here.iterdir()) == []


def test_own_validation_data_end_a_run(here: Path) -> None:
    x, y = own_data()
    settings = {**OWN, "num_rounds": 40, "eval_every": 1, "output_dir": "out"}
    stop = {**settings, "early_stopping": True, "target_accuracy": 0.7}
    ended = fedquilt.run(Own(), (x, y), None, CLIENTS, validation=(x[:20], y[:20]), **stop)
    assert ended.result["stopped"] == "the validation accuracy reached the target"
    assert 1 <= ended.result["rounds"] < 40
    assert ended.model is not None
    assert (ended.model(x[:20]).argmax(1) == y[:20]).float().mean() >= 0.7
    watched = {**settings, "num_rounds": 2, "output_dir": None}
    lines: list[dict[str, Any]] = []
    fedquilt.run(
        Own(), (x, y), (x, y), CLIENTS, validation=(x, y), **watched,
        observer=lambda config, line: lines.append(line),
    )  # fmt: skip
    assert [line["validation_accuracy"] == line["test_accuracy"] for line in lines] == [True] * 2


@pytest.mark.parametrize(
    ("validation", "match"),
    [
        ((torch.zeros(3, 4), torch.zeros(3).long()), "shape"),
        ((torch.zeros(3, 5), torch.full((3,), 7)), "8 classes of the validation data"),
        ((torch.zeros(3, 5), torch.zeros(3, 2)), "validation targets of shape"),
    ],
)
def test_validation_data_must_fit(here: Path, validation: Any, match: str) -> None:
    with pytest.raises(InvalidValueError, match=match):
        fedquilt.run(Own(), own_data(), own_data(), CLIENTS, validation=validation, **OWN)


def test_a_run_goes_on_with_its_own_validation_data(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = own_data()
    settings = {**OWN, "num_rounds": 4, "eval_every": 1, "output_dir": "out"}

    def stop(config: Any, line: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedquilt.run(Own(), (x, y), None, CLIENTS, validation=(x, y), observer=stop, **settings)
    (folder,) = Path("out").iterdir()
    with pytest.raises(FedquiltError, match="other validation data"):
        fedquilt.run(Own(), (x, y), None, CLIENTS, validation=(x + 1, y), resume=folder)
    done = fedquilt.run(Own(), (x, y), None, CLIENTS, validation=(x, y), resume=folder)
    assert done.result["rounds"] == 4


def test_numbers_of_numpy_are_numbers() -> None:
    options = {
        "clients_per_round": np.int64(2),
        "num_rounds": np.int32(2),
        "learning_rate": np.float32(0.5),
    }
    finished = fedquilt.run(Own(), own_data(), own_data(), CLIENTS, **{**OWN, **options})
    assert [len(cohort) for cohort in finished.result["cohorts"]] == [2, 2]
    json.dumps(finished.summary(), allow_nan=False)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "fedavg"])
def test_statistics_that_training_moves_are_refused_under_privacy(mode: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"mode='{mode}'.*norm\.running_mean.*GroupNorm"):
        fedquilt.run(Buffered(), own_data(), own_data(), CLIENTS, **{**OWN, "mode": mode})


def test_statistics_travel_with_fedavg() -> None:
    finished = fedquilt.run(Buffered(), own_data(), own_data(), CLIENTS, **OWN)
    assert not torch.equal(finished.state_dict["norm.running_mean"], torch.zeros(5))


def test_a_run_that_diverges_is_recorded_as_strict_json(tmp_path: Path) -> None:
    finished = start(tmp_path, mode="fedavg", server_lr=1e300)
    summary = json.loads(json.dumps(finished.summary(), allow_nan=False))
    assert summary["final_loss"] is None
    assert finished.folder is not None
    json.loads((finished.folder / "result.json").read_text(), parse_constant=pytest.fail)
    for line in (finished.folder / "rounds.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    loaded = fedquilt.load(finished.folder)
    assert loaded.summary() == finished.summary()
    assert loaded.result["history"] == finished.result["history"]


def test_engines_are_closed_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedquilt.training.engines import LocalEngine

    closed: list[str] = []
    monkeypatch.setattr(LocalEngine, "close", lambda engine: closed.append("closed"))
    start(tmp_path, engine="sequential")
    assert closed == ["closed"]
    monkeypatch.setattr(training_loop.Experiment, "measure", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start(tmp_path, engine="sequential")
    assert closed == ["closed", "closed"]


@pytest.mark.parametrize("device", ["cuda:99", "cuda:0"])
def test_one_of_several_gpus_can_be_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny(device=device).device == device
    if device == "cuda:99" or not torch.cuda.is_available():
        with pytest.raises(InvalidValueError, match=f"device='{device}' must be"):
            pick_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    assert (chosen, pick_device("cuda")) == ([1], torch.device("cuda", 0))
    with pytest.raises(InvalidValueError, match="torch finds 2 GPUs"):
        pick_device("cuda:2")
    with pytest.raises(InvalidValueError, match="device='cuda:x' must be one of"):
        tiny(device="cuda:x")
