"""What the statement of a run says beside its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedquilt
import fedquilt.experiment.api
import fedquilt.models.features
from fedquilt.config import RunConfig, build_config
from fedquilt.data import load_dataset, split_clients
from fedquilt.experiment.api import run_in_memory
from fedquilt.models.features import CHOSEN_ON, FEATURE_MODELS, choice_note, make_feature_model
from fedquilt.record.result import RunResult
from fedquilt.setup.build_task import build_task
from fedquilt.setup.federation import build_method
from fedquilt.setup.mechanism import front_notes

QUICK: dict[str, Any] = {
    "dataset": "digits",
    "model": "linear",
    "num_clients": 8,
    "num_rounds": 2,
    "local_epochs": 1,
}
FIXED: dict[str, Any] = {"mode": "fixed_dp", "noise_layers": "all"}


def finished(**changes: Any) -> RunResult:
    return run_in_memory(build_config({**QUICK, **changes}))


def said(done: RunResult) -> str:
    return "\n".join(done.statement.notes)


@pytest.mark.parametrize("settings", [{"mode": "certified"}, FIXED], ids=["certified", "fixed_dp"])
def test_a_bound_says_what_is_public_and_what_it_does_not_cover(settings: dict[str, Any]) -> None:
    done = finished(**settings)
    assert done.statement.is_bounded
    notes = said(done)
    assert "public by this adjacency: who joined when" in notes
    assert "cohort sizes" in notes
    assert "not covered: the private file of the run" in notes
    assert "every released version of the model" in notes


@pytest.mark.parametrize("settings", [{"mode": "certified"}, FIXED], ids=["certified", "fixed_dp"])
def test_a_large_delta_is_said_in_the_record(settings: dict[str, Any], tmp_path: Path) -> None:
    config = build_config({**QUICK, **settings, "delta": 0.5, "output_dir": str(tmp_path)})
    done = fedquilt.experiment.api.run_config(config)
    assert done.folder is not None
    record = json.loads((done.folder / "result.json").read_text())
    assert any("delta 0.5 is above 1/8" in note for note in record["statement"]["notes"])
    assert "delta 0.5 is above 1/8" in done.statement.as_text()
    assert "caution" not in said(finished(**settings))


def test_a_large_epsilon_is_called_hardly_a_protection() -> None:
    done = finished(mode="certified", epsilon=9999.0, policy="worst_case", availability="always")
    assert done.statement.is_bounded
    assert "is above 10" in said(done)


def test_every_front_says_what_it_was_chosen_on() -> None:
    assert set(CHOSEN_ON) == {*FEATURE_MODELS, "drawn-linear", "hog-drawn-linear", "condensation"}
    drawn = make_feature_model("drawn-linear-16", (3, 32, 32), 10)
    assert drawn.chosen_on == drawn.on_features().chosen_on == CHOSEN_ON["drawn-linear"]
    for name in FEATURE_MODELS:
        model = make_feature_model(name, (1, 8, 8), 10)
        assert model.chosen_on == model.on_features().chosen_on == CHOSEN_ON[name]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("mnist", "MNIST, which these clients hold: that choice is not covered"),
        ("mnist-writers", "MNIST, which these clients hold: that choice is not covered"),
        ("fashion-mnist", "MNIST; none of it is data of a client here"),
        ("custom", "MNIST: if clients hold any of it, that choice is not covered"),
    ],
)
def test_the_words_follow_who_holds_what(dataset: str, words: str) -> None:
    note = choice_note("settings", ("mnist",), dataset)
    assert note == f"settings were chosen on {words}"
    assert choice_note("settings", (), dataset) is None


def test_of_two_data_sets_the_held_one_is_named() -> None:
    assert choice_note("settings", ("mnist", "cifar10"), "cifar10") == (
        "settings were chosen on MNIST and CIFAR-10, and these clients hold CIFAR-10: "
        "that choice is not covered"
    )


@pytest.mark.parametrize("settings", [{"mode": "certified"}, FIXED], ids=["certified", "fixed_dp"])
def test_a_run_on_a_front_says_what_it_was_chosen_on(settings: dict[str, Any]) -> None:
    wanted = "the model's frozen front were chosen on MNIST; none of it is data of a client here"
    assert wanted in said(finished(**settings, model="hog-linear"))
    assert "chosen on" not in said(finished(**settings))


def test_on_mnist_the_choice_is_not_covered() -> None:
    """The name of the data decides, so that MNIST itself need not be there."""
    config, problem = build_task(
        build_config({**QUICK, "mode": "certified", "model": "hog-linear"})
    )
    mnist: RunConfig = config.replace(dataset="mnist")
    (note,) = front_notes(mnist, problem.flat)
    assert note.endswith("which these clients hold: that choice is not covered")


def test_features_computed_beforehand_keep_the_note() -> None:
    train, test = load_dataset("digits")
    model = make_feature_model("hog-linear", (1, 8, 8), 10)
    clients = split_clients("iid", train.targets, 5, np.random.default_rng(0))
    described = [
        (fedquilt.models.features.precompute(model.front, part.images), part.targets)
        for part in (train, test)
    ]
    done = fedquilt.run(
        model.on_features(),
        *described,
        clients,
        output_dir=None,
        mode="certified",
        num_rounds=1,
        availability="always",
    )
    assert "chosen on MNIST: if clients hold any of it" in said(done)


def test_a_condensation_says_it_of_its_front_and_of_its_defaults() -> None:
    config = build_config(
        {
            "method": "condense",
            "mode": "certified",
            "dataset": "digits",
            "num_clients": 5,
            "num_rounds": 1,
            "ipc": 1,
            "synthetic_images": 20,
            "model_epochs": 1,
        }
    )
    _, problem = build_task(config)
    notes = "\n".join(build_method(config, problem).notes)
    assert "the front's settings were chosen on MNIST; none of it is data of a client" in notes
    assert "the condensation's default settings were chosen on MNIST and CIFAR-10; none" in notes
