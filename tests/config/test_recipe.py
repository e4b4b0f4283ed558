"""What a certified run does where nobody says how follows from public numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.config import build_config
from fedquilt.config.modes import gaussian_mu, recipe_line, rules_for, strength, width_for
from fedquilt.models import FeatureModel, OwnFront, make_feature_model
from fedquilt.privacy.accounting import gaussian_mu as exact_mu


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 6.0, 100.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
def test_the_planned_mu_is_that_of_the_account(epsilon: float, delta: float) -> None:
    assert gaussian_mu(epsilon, delta) == pytest.approx(exact_mu(epsilon, delta), rel=1e-4)


def test_who_says_epsilon_and_rounds_gets_windows_a_step_and_an_average() -> None:
    made = build_config({"epsilon": 3.0, "num_rounds": 100})
    assert (made.rounds_per_release, made.num_releases) == (10, 10)  # 100 x 0.719 / 8 = 9
    assert (made.clip_norm, made.average_late, made.local_epochs) == (1.0, 0.5, 3)
    weak = build_config({"epsilon": 1.0, "num_rounds": 100})
    many = build_config({"epsilon": 1.0, "num_rounds": 100, "num_clients": 1000})
    assert weak.num_releases < made.num_releases < many.num_releases == 20


@pytest.mark.parametrize("rounds", [1, 7, 60, 100, 101])
@pytest.mark.parametrize("strong", [1.0, 26.8, 71.9, 131.0, 5000.0])
def test_no_window_is_short_where_another_is_long(strong: float, rounds: int) -> None:
    window = rules_for(strong, rounds)["rounds_per_release"]
    releases = -(-rounds // window)
    assert window == -(-rounds // releases), "as few rounds each as so many releases allow"
    assert releases <= rounds


@pytest.mark.parametrize(
    "said",
    [
        {"rounds_per_release": 2},
        {"clip_norm": 0.3},
        {"local_epochs": 1},
        {"learning_rate": 0.1},
        {"clients_per_round": 10},
        {"clipping": "quantile"},
        {"policy": "worst_case"},
        {"noise_bands": 3},
        {"secure_aggregation": "simulated"},
        {"buffer_size": 5},
        {"model": "mlp"},
        {"model": "scatter-linear"},
        {"dataset": "mnist-writers", "partition": "writer"},  # nobody said how many clients
        {"availability": "trace.csv"},
        {"preset": "paper-mnist", "mode": "certified"},
        {"mode": "fedavg"},
        {"method": "heterofl", "mode": "certified"},
    ],
    ids=str,
)
def test_who_says_how_gets_nothing_of_it(said: dict[str, object]) -> None:
    """All of the recipe or nothing: its parts were measured together."""
    preset = said.pop("preset", None)
    made = build_config(said, preset=None if preset is None else str(preset))
    assert made.average_late == 0.0
    assert made.rounds_per_release == said.get("rounds_per_release", 1)
    assert recipe_line(made.as_dict()) is None


def test_what_stands_beside_it_changes_the_numbers() -> None:
    plain = build_config({})
    assert recipe_line(plain.as_dict()) is not None
    either = build_config({"adjacency": "replace_one"})  # a client moves a sum twice as far
    assert (plain.num_releases, either.num_releases) == (20, 9)
    assert build_config({"epsilon": 1.0, "allowance": 1.0}).num_releases == 3
    assert strength(6.0, 1e-5, 100, "replace_one") == strength(6.0, 1e-5, 50)
    writers = build_config({"dataset": "mnist-writers", "partition": "writer", "num_clients": 539})
    assert writers.rounds_per_release == 3


def test_modes_that_are_compared_share_what_they_shared() -> None:
    arms = [{"mode": "fedavg"}, {"mode": "certified"}]
    assert build_config({}, arms=arms).average_late == 0.0


def test_points_of_a_sweep_share_the_recipe_of_what_is_not_swept_or_have_none() -> None:
    whole = build_config({}).rounds_per_release
    over_epsilon = build_config({}, arms=[{"epsilon": 1.0}, {"epsilon": 6.0}])
    assert over_epsilon.rounds_per_release == whole > 1
    over_clip = build_config({}, arms=[{"clip_norm": 0.1}, {"clip_norm": 0.4}])
    assert (over_clip.rounds_per_release, over_clip.average_late) == (1, 0.0)


def test_your_own_head_on_a_named_extractor_gets_it_and_nothing_else_does() -> None:
    data = torch.rand(40, 1, 8, 8), torch.arange(40) % 4
    clients = [list(range(k, 40, 4)) for k in range(4)]
    named = make_feature_model("hog-linear", (1, 8, 8), 4)
    other = FeatureModel(OwnFront(nn.Flatten(), (1, 8, 8)), 4)
    by_hand: dict[str, Any] = {"rounds_per_release": 2, "average_late": 0.5}
    for model, said, window in ((named, {}, 2), (other, {}, 1), (other, by_hand, 2)):
        done = fedquilt.run(
            model, data, data, clients, num_rounds=4, output_dir=None, quiet=True, **said
        )
        settings = done.result["metadata"]["hyperparameters"]
        assert settings["rounds_per_release"] == window
        noted = any("rules for windows" in note for note in done.statement.notes)
        assert noted == (model is named)


def test_the_width_on_colour_pictures_follows_clients_and_epsilon() -> None:
    widths = {
        (n, epsilon): build_config(
            {"dataset": "cifar10", "num_clients": n, "epsilon": epsilon}
        ).model.rpartition("-")[2]
        for n, epsilon in ((100, 6.0), (100, 3.0), (100, 1.0), (1000, 1.0), (1000, 3.0))
    }
    assert list(widths.values()) == ["128", "64", "32", "256", "512"]
    assert width_for(strength(1.0, 1e-5, 5)) == 16


def test_grey_pictures_have_both_kinds_of_features_unless_a_model_is_named() -> None:
    for name in ("mnist", "fashion-mnist", "mnist-writers"):
        clients = {"partition": "writer", "num_clients": 539} if "writers" in name else {}
        made = build_config({"dataset": name, **clients})
        assert made.model == "hog-drawn-linear"
        assert "head hog-drawn-linear" in str(recipe_line(made.as_dict()))
    said = {"dataset": "mnist", "model": "hog-linear"}
    assert build_config(said).model == "hog-linear"
    assert build_config({"dataset": "mnist", "learning_rate": 0.1}).model == "hog-linear"
    assert build_config({"dataset": "digits"}).model == "hog-linear"
