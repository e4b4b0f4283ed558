"""From the seed documents' dictionary of hyperparameters to our settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedquilt import validate
from fedquilt.config.seeds import HYPERPARAMETERS
from fedquilt.errors import InvalidValueError

# The seed's keys on the left, the package's on the right.
_RENAMED = {
    "local_batch_size": "batch_size",
    "epsilon_total": "epsilon",
    "alpha": "budget_alpha",
    "beta": "budget_beta",
}
_SAME = (
    "num_rounds",
    "clients_per_round",
    "warmup_rounds",
    "local_epochs",
    "learning_rate",
    "lr_decay",
    "delta",
    "clip_quantile",
    "clip_momentum",
    "min_clip",
    "max_clip",
    "max_agg_norm",
)
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
_MODES = ("fedavg", "fixed_dp", "quap_fl", "quap_fl_client")


def settings_from_seed(
    given: Mapping[str, Any],
    *,
    num_clients: int,
    dataset_name: str,
    parameter_names: Sequence[str],
) -> dict[str, Any]:
    """Return keyword settings of `RunConfig` for a dictionary of the seed documents.

    Keys that are absent have the values of `HYPERPARAMETERS`; keys of `RunConfig`
    itself pass as they are and win.
    """
    merged = {**HYPERPARAMETERS, **given}
    settings: dict[str, Any] = {key: merged[key] for key in _SAME if key in merged}
    settings |= {new: merged[old] for old, new in _RENAMED.items()}
    settings |= {"dataset": dataset_name, "model": "custom"}
    if "num_clients" in given:
        settings["num_clients"] = given["num_clients"]
    if "clients_per_round" not in given and merged["clients_per_round"] > num_clients:
        settings["clients_per_round"] = 0.3
    settings["availability"] = validate.choice(
        "participation_distribution",
        merged["participation_distribution"],
        ("beta", "uniform", "always"),
    )
    settings |= _mode(given, parameter_names)
    known = {*_SAME, *_RENAMED, *_OTHER}
    settings |= {key: value for key, value in given.items() if key not in known}
    validate.choice("mode", settings["mode"], _MODES)
    return settings


def _mode(given: Mapping[str, Any], parameter_names: Sequence[str]) -> dict[str, Any]:
    """Pick the algorithm: the paper's when its noise is described, else the document's."""
    named = "layer_wise" if given.get("critical_layers") is not None else None
    strategy = given.get("noise_strategy", named)
    if strategy is None:
        return {"mode": "quap_fl_client"}
    validate.choice("noise_strategy", strategy, _STRATEGIES)
    if strategy == "none":
        return {"mode": "fedavg"}
    if strategy == "full":
        return {"mode": "quap_fl", "noise_layers": "all"}
    layers = _layers(given.get("critical_layers", ["fc2"]), parameter_names)
    return {"mode": "quap_fl", "noise_layers": ",".join(f"*{layer}*" for layer in layers)}


def _layers(given: str | Sequence[str], parameter_names: Sequence[str]) -> list[str]:
    """Return the layers that the model has; the seed matches names by substring.

    The seed's list names the layers of all its models at once, so one that a
    model lacks is no error, but a list that fits nothing is.
    """
    listed = [given] if isinstance(given, str) else list(given)
    found = [layer for layer in listed if any(layer in name for name in parameter_names)]
    if not found or "" in found:
        raise InvalidValueError(
            f"critical_layers={given!r} must name parts of the parameters' names; "
            f"the model has {', '.join(parameter_names)}"
        )
    return found
