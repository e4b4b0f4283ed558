"""Histories as runs write them, and a way to read a panel."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

FAST = {"dpi": 40}


def make_history(
    seed: int = 0,
    rounds: int = 40,
    every: int = 10,
    num_clients: int = 20,
    top: float = 0.9,
    noised: bool = True,
) -> dict[str, Any]:
    """Return the history of a run that learns, in a mode with or without noise."""
    generator = np.random.default_rng(seed)
    evaluated = [r for r in range(1, rounds + 1) if r % every == 0 or r == rounds]
    cohorts = [
        sorted(generator.choice(num_clients, 6, replace=False).tolist()) for _ in range(rounds)
    ]
    stats = [
        {
            "total_rounds": r,
            "mean_participation_rate": 6 / num_clients,
            "participating_clients": len(set().union(*cohorts[:r])),
        }
        for r in evaluated
    ]
    learned = 1 - np.exp(-np.asarray(evaluated) / 15)
    return {
        "test_accuracy": (0.1 + (top - 0.1) * learned + generator.normal(0, 0.004)).tolist(),
        "test_loss": (2.3 - 2.1 * learned).tolist(),
        "evaluation_rounds": evaluated,
        "train_loss": np.linspace(2, 0.3, rounds).tolist(),
        "clip_values": generator.uniform(0.4, 0.6, rounds).tolist() if noised else [None] * rounds,
        "privacy_budgets": generator.uniform(0.015, 0.02, rounds).tolist()
        if noised
        else [None] * rounds,
        "noise_levels": [1.0] * rounds if noised else [None] * rounds,
        "participation_stats": stats,
        "client_participation": cohorts,
    }


def make_run(mode: str, seed: int, accuracy: float | None, epsilon: Any, **extra: Any) -> Any:
    """Return the dictionary of a result.json."""
    history = make_history(seed, top=accuracy or 0.5)
    metadata = {"dataset": "mnist", "seed": seed, "final_accuracy": accuracy}
    statement = {"unit": "client", "delta": 1e-5, "epsilon_max": epsilon}
    run = {"mode": mode, "metadata": metadata, "history": history, "statement": statement}
    return run | extra


def words(axes: Axes) -> str:
    """Return everything that is written in and around one panel."""
    texts = [text.get_text() for text in axes.texts]
    return "\n".join([axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel(), *texts])
