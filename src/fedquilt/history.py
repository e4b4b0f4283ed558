"""From the rounds of a run to its history, as the seed documents name the lists."""

from __future__ import annotations

from typing import Any

from fedquilt.round import RoundRecord

_PER_ROUND = {
    "train_loss": "train_loss",
    "clip_values": "clip_value",
    "noise_levels": "noise_std",
    "privacy_budgets": "epsilon",
    "client_participation": "cohort",
}


# What a condensing server says of its rounds.
_SERVER = ("bytes_up", "bytes_down", "groups", "matching_loss", "epoch_avg_loss")

# Statistics of the clients' data: public only where nothing is claimed.
PRIVATE = (
    "train_loss",
    "noise_norm",
    "signal_norm",
    "clipped_fraction",
    "non_finite",
    "seconds",  # how long clients take tells how much they hold
)


def as_line(record: RoundRecord, seconds: float) -> dict[str, Any]:
    """Return a round as the flat dictionary of rounds.jsonl."""
    return {
        "round": record.round,
        "cohort": record.cohort,
        "train_loss": record.train_loss,
        "clip_value": record.clip_value,
        "epsilon": record.noise.epsilon,
        "noise_std": record.noise.noise_std,
        "noise_norm": record.noise.noise_norm,
        "signal_norm": record.noise.signal_norm,
        "clipped_fraction": record.noise.clipped_fraction,
        "non_finite": record.non_finite,
        "without_allowance": record.without_allowance,
        "seconds": round(seconds, 6),
        **record.server,
    }


def split_private(line: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part a line into what may be published and what may not."""
    public = {key: None if key in PRIVATE else value for key, value in line.items()}
    return public, {key: line[key] for key in PRIVATE}


def build_history(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Gather the rounds into the documented lists.

    Lists per round: train_loss, clip_values, noise_levels, noise_stats,
    privacy_budgets, client_participation; entries are None where a mode has no
    such thing; a condensation has bytes_up, bytes_down, groups, matching_loss and
    epoch_avg_loss beside them.  Lists per evaluation: test_accuracy, test_loss,
    evaluation_rounds (finished rounds, from 1), participation_stats.
    """
    history: dict[str, list[Any]] = {
        name: [line[key] for line in lines] for name, key in _PER_ROUND.items()
    }
    for name in _SERVER:
        if any(name in line for line in lines):
            history[name] = [line.get(name) for line in lines]
    history["noise_stats"] = [
        {
            "sigma": line["noise_std"],
            "noise_norm": line["noise_norm"],
            "signal_norm": line["signal_norm"],
        }
        for line in lines
    ]
    evaluated = [line for line in lines if "test_accuracy" in line]
    history["evaluation_rounds"] = [line["round"] + 1 for line in evaluated]
    for name in ("test_accuracy", "test_loss", "participation_stats"):
        history[name] = [line[name] for line in evaluated]
    return history
