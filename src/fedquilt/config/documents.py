"""The dictionaries of the QuAP-FL API document, and their translation to `RunConfig`.

Names and values are those of its sections Config and Config (Extended); what these leave
out is from the code published with it.  The experiments of the QuAP-FL paper (section 5)
used other values (epsilon 6, five warm-up rounds, lower targets); they are the presets
`paper-mnist` and `paper-cifar10`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.config.choices import AVAILABILITIES
from fedquilt.config.modes import DOCUMENT_MODES

HYPERPARAMETERS: dict[str, Any] = {
    "num_clients": 100,
    "num_rounds": 200,
    "clients_per_round": 30,
    "local_epochs": 5,
    "local_batch_size": 32,
    "learning_rate": 0.01,
    "lr_decay": 1.0,  # the API document states none
    "epsilon_total": 3.0,
    "delta": 1e-5,
    "alpha": 0.5,
    "beta": 2.0,
    "clip_quantile": 0.9,
    "clip_momentum": 0.95,
    "min_clip": 0.1,
    "max_clip": 10.0,
    "max_agg_norm": 10000.0,
    "participation_distribution": "beta",
    "participation_alpha": 2,
    "participation_beta": 5,
}

PRIVACY_CONFIG: dict[str, float] = {"epsilon_base": 0.015, "alpha": 0.5, "beta": 2.0, "delta": 1e-5}

TARGET_ACCURACY: dict[str, float] = {"mnist": 0.971, "cifar10": 0.812}

EXPECTED_MILESTONES: dict[str, dict[str, tuple[float, float]]] = {
    "mnist": {
        "round_10": (0.65, 0.70),
        "round_50": (0.88, 0.92),
        "round_100": (0.94, 0.96),
        "round_150": (0.96, 0.98),
        "round_200": (0.965, 0.976),
    },
    "cifar10": {
        "round_10": (0.35, 0.40),
        "round_50": (0.65, 0.70),
        "round_100": (0.74, 0.78),
        "round_150": (0.78, 0.82),
        "round_200": (0.803, 0.821),
    },
}

VISUALIZATION_CONFIG: dict[str, Any] = {
    "enabled": True,
    "show_plot": False,
    "dpi": 150,
    "format": "png",
    "style": "seaborn-v0_8",
    "figsize": (12, 10),
    "include_table": True,
}

OUTPUT_CONFIG: dict[str, Any] = {
    "save_results": True,
    "save_plots": True,
    "output_dir": "./results",
    "log_dir": "./results",
}

STATED: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("presets.toml").read_text("utf-8")
)
"""What documents state, by name, in the words of the configuration."""

PRESETS: dict[str, dict[str, Any]] = {
    name: {**STATED["paper"], **STATED[name]} for name in ("paper-mnist", "paper-cifar10")
}

# The keys of HYPERPARAMETERS on the left, those of RunConfig on the right.
_RENAMED = {
    "local_batch_size": "batch_size",
    "epsilon_total": "epsilon",
    "alpha": "budget_alpha",
    "beta": "budget_beta",
}
# Keys that are no options; all others are, by the same name.
_OTHER = (
    "num_clients",
    "participation_distribution",
    "participation_alpha",
    "participation_beta",
    "participation_mix",
    "noise_strategy",
    "critical_layers",
    "clipping_strategy",
    "initial_clip",
)
_STRATEGIES = ("layer_wise", "full", "none")


def settings_from_hyperparameters(
    given: Mapping[str, Any], *, num_clients: int, dataset_name: str, parameter_names: Sequence[str]
) -> dict[str, Any]:
    """Return keyword settings of `RunConfig` for a dictionary like `HYPERPARAMETERS`.

    Keys that are absent have the values of `HYPERPARAMETERS`; keys of `RunConfig`
    itself pass as they are and win.
    """
    merged = {**HYPERPARAMETERS, **given}
    translated = {*_RENAMED, *_OTHER}
    settings = {key: value for key, value in merged.items() if key not in translated}
    settings |= {new: merged[old] for old, new in _RENAMED.items()}
    settings |= {"dataset": dataset_name, "model": "custom"}
    if "num_clients" in given:
        settings["num_clients"] = given["num_clients"]
    if "clients_per_round" not in given and merged["clients_per_round"] > num_clients:
        settings["clients_per_round"] = 0.3
    settings["availability"] = checks.choice(
        "participation_distribution", merged["participation_distribution"], AVAILABILITIES
    )
    settings |= _mode(given, parameter_names)
    settings |= {key: value for key, value in given.items() if key not in translated}
    checks.choice("mode", settings["mode"], DOCUMENT_MODES)
    return settings


def _mode(given: Mapping[str, Any], parameter_names: Sequence[str]) -> dict[str, Any]:
    """Pick the QuAP-FL paper's algorithm if its noise is described, else the API document's."""
    named = "layer_wise" if given.get("critical_layers") is not None else None
    strategy = given.get("noise_strategy", named)
    if strategy is None:
        return {"mode": "quap_fl_client"}
    checks.choice("noise_strategy", strategy, _STRATEGIES)
    if strategy == "none":
        return {"mode": "fedavg"}
    if strategy == "full":
        return {"mode": "quap_fl", "noise_layers": "all"}
    layers = _layers(given.get("critical_layers", ["fc2"]), parameter_names)
    return {"mode": "quap_fl", "noise_layers": ",".join(f"*{layer}*" for layer in layers)}


def _layers(given: str | Sequence[str], parameter_names: Sequence[str]) -> list[str]:
    """Return the layers that the model has; names match by substring.

    A list may name the layers of several models at once, so a layer that a model
    lacks is no error, but a list that fits nothing is.
    """
    listed = [given] if isinstance(given, str) else list(given)
    found = [layer for layer in listed if any(layer in name for name in parameter_names)]
    if not found or "" in found:
        raise InvalidValueError(
            f"critical_layers={given!r} must name parts of the parameters' names; "
            f"the model has {', '.join(parameter_names)}"
        )
    return found
