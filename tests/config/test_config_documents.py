"""The QuAP-FL API document's dictionaries, and their translation into our settings."""

from __future__ import annotations

from typing import Any

import pytest

from fedquilt.config import (
    EXPECTED_MILESTONES,
    HYPERPARAMETERS,
    OUTPUT_CONFIG,
    PRESETS,
    PRIVACY_CONFIG,
    TARGET_ACCURACY,
    VISUALIZATION_CONFIG,
    build_config,
    plain_config,
)
from fedquilt.config.documents import settings_from_hyperparameters
from fedquilt.errors import InvalidValueError

NAMES = ["conv1.weight", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def translated(config: dict[str, Any], clients: int = 100, names: list[str] = NAMES) -> Any:
    settings = settings_from_hyperparameters(
        config, num_clients=clients, dataset_name="mnist", parameter_names=names
    )
    return plain_config(settings)


def test_the_dictionaries_hold_the_documents_values() -> None:
    documented = {
        "num_clients": 100,
        "num_rounds": 200,
        "clients_per_round": 30,
        "local_epochs": 5,
        "local_batch_size": 32,
        "learning_rate": 0.01,
        "epsilon_total": 3.0,
        "alpha": 0.5,
        "beta": 2.0,
        "max_agg_norm": 10000,
    }
    assert {key: HYPERPARAMETERS[key] for key in documented} == documented
    assert PRIVACY_CONFIG["epsilon_base"] == pytest.approx(3.0 / 200)
    assert TARGET_ACCURACY == {"mnist": 0.971, "cifar10": 0.812}
    assert VISUALIZATION_CONFIG == {
        "enabled": True,
        "show_plot": False,
        "dpi": 150,
        "format": "png",
        "style": "seaborn-v0_8",
        "figsize": (12, 10),
        "include_table": True,
    }
    assert OUTPUT_CONFIG == {
        "save_results": True,
        "save_plots": True,
        "output_dir": "./results",
        "log_dir": "./results",
    }
    for milestones in EXPECTED_MILESTONES.values():
        assert list(milestones) == [f"round_{number}" for number in (10, 50, 100, 150, 200)]
        assert all(low < high for low, high in milestones.values())


# Number by number, typed from where it stands; not computed from the package.
IN_THE_PAPER = {
    "num_clients": 100,  # 5.1: 100 clients in all
    "clients_per_round": 30,  # 5.1: 30 % (30 of them) every round
    "num_rounds": 200,  # 5.3, Table 2: 200 rounds
    "partition": "dirichlet",  # 5.1: Dirichlet (alpha = 0.5)
    "dirichlet_alpha": 0.5,
    "delta": 1e-5,  # 3.3: a small fixed value, 10^-5
    "budget_alpha": 0.5,  # 3.3 and 5.2
    "budget_beta": 2.0,
    "clip_quantile": 0.9,  # Algorithm 1
    "clip_momentum": 0.95,
    "epsilon": 6.0,  # 5.2: Fixed-DP with epsilon = 6.0 and C = 1.0
    "clip_norm": 1.0,
    "mode": "quap_fl",
}
IN_THE_PUBLISHED_CODE = {
    "warmup_rounds": 5,
    "local_epochs": 3,
    "batch_size": 32,
    "learning_rate": 0.005,
    "lr_decay": 0.995,
    "min_clip": 0.1,
    "max_clip": 1.0,
    "noise_layers": "fc*",  # the classifier, equation 7
}
CHOSEN_HERE = {
    "model": "auto",  # the API document's network for the data set
    "availability": "always",  # with `weighted`: exactly 30 of everybody, by weights of Beta(2, 5)
    "selection": "weighted",
}


@pytest.mark.parametrize(("name", "target"), [("paper-mnist", 0.932), ("paper-cifar10", 0.768)])
def test_the_presets_are_the_papers_experiments(name: str, target: float) -> None:
    own = {"dataset": name.removeprefix("paper-"), "target_accuracy": target}
    typed = {**IN_THE_PAPER, **IN_THE_PUBLISHED_CODE, **CHOSEN_HERE, **own}
    assert set(PRESETS) == {"paper-mnist", "paper-cifar10"}
    assert PRESETS[name] == typed
    config = build_config(preset=name).as_dict()
    assert {key: config[key] for key in typed} == typed


def test_the_empty_dictionary_is_the_documents_algorithm() -> None:
    config = translated({})
    assert config.mode == "quap_fl_client"
    assert (config.batch_size, config.epsilon) == (32, 3.0)
    assert (config.budget_alpha, config.budget_beta) == (0.5, 2.0)
    assert config.clients_per_round == 30
    assert config.dataset == "mnist"
    assert config.availability == "beta"


def test_seed_keys_and_our_keys_are_both_understood() -> None:
    given = {
        "local_batch_size": 8,
        "epsilon_total": 6.0,
        "alpha": 0.0,
        "beta": 3.0,
        "warmup_rounds": 5,
        "participation_distribution": "always",
        "seed": 11,
        "noise_seed": 12,
        "eval_every": 2,
        "participation_ema": 0.3,
    }
    config = translated(given)
    assert (config.batch_size, config.epsilon) == (8, 6.0)
    assert (config.budget_alpha, config.budget_beta, config.warmup_rounds) == (0.0, 3.0, 5)
    assert (config.availability, config.seed, config.noise_seed) == ("always", 11, 12)
    assert (config.eval_every, config.participation_ema) == (2, 0.3)


@pytest.mark.parametrize(
    ("given", "mode", "layers"),
    [
        ({}, "quap_fl_client", None),
        ({"noise_strategy": "none"}, "fedavg", None),
        ({"noise_strategy": "full"}, "quap_fl", ("all",)),
        ({"noise_strategy": "layer_wise"}, "quap_fl", ("*fc2*",)),
        ({"critical_layers": ["fc1"]}, "quap_fl", ("*fc1*",)),
        ({"critical_layers": "fc2"}, "quap_fl", ("*fc2*",)),
        ({"critical_layers": ["fc1", "fc2", "fc3"]}, "quap_fl", ("*fc1*", "*fc2*")),
        ({"mode": "fixed_dp"}, "fixed_dp", None),
    ],
)
def test_the_noise_strategy_picks_the_algorithm(
    given: dict[str, Any], mode: str, layers: tuple[str, ...] | None
) -> None:
    config = translated(given)
    assert config.mode == mode
    if layers is not None:
        assert config.patterns("noise_layers") == layers


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"noise_strategy": "layerwise"}, "did you mean 'layer_wise'"),
        ({"critical_layers": ["head"]}, r"critical_layers=\['head'\] must name .*conv1.weight"),
        ({"critical_layers": []}, r"critical_layers=\[\]"),
        ({"critical_layers": [""]}, r"critical_layers=\[''\]"),
        ({"participation_distribution": "poisson"}, "participation_distribution"),
        ({"epsilon_total": -1}, "epsilon=-1"),
        ({"local_batchsize": 3}, "unknown key 'local_batchsize'"),
        ({"mode": "certified"}, "mode='certified' must be one of"),
    ],
)
def test_bad_dictionaries_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        translated(given)


def test_a_small_population_gets_a_cohort_that_fits_unless_one_was_asked_for() -> None:
    assert translated({}, clients=10).cohort_limit(10) == 3
    assert translated({"clients_per_round": 4}, clients=10).cohort_limit(10) == 4
    with pytest.raises(InvalidValueError, match="clients_per_round=30"):
        translated({"clients_per_round": 30, "num_clients": 10}, clients=10)


def test_nothing_writes_into_the_dictionaries() -> None:
    before = dict(HYPERPARAMETERS)
    given = {"num_rounds": 3, "critical_layers": ["fc1"]}
    translated(given)
    assert before == HYPERPARAMETERS
    assert given == {"num_rounds": 3, "critical_layers": ["fc1"]}
