"""How a measure is spread over clients, and over groups of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LOWER_IS_BETTER = frozenset({"loss", "mse", "mae", "perplexity"})
"""Measures of which a client with much is worse off; of any other, one with little."""


def client_spread(
    values: Sequence[float | None], name: str, *, lower_is_better: bool = False
) -> dict[str, float]:
    """Return how a measure is spread over clients: mean, worst decile, Gini.

    The worst decile is the mean of the tenth of the clients that have least (most, where lower
    is better), at least one.
    Gini's coefficient is sum_ij |x_i - x_j| / (2 n^2 mean): 0 when all have the same.
    Clients without a finite measure are left out; without any, nothing is returned.
    """
    known = np.sort([v for v in values if v is not None and math.isfinite(v)])
    if not known.size:
        return {}
    n, mean = known.size, float(known.mean())
    ranks = 2 * np.arange(1, n + 1) - n - 1
    gini = float((ranks * known).sum() / (n * n * mean)) if mean > 0 else 0.0
    tenth = math.ceil(n / 10)
    worst = known[-tenth:] if lower_is_better else known[:tenth]
    return {name: mean, f"{name}_worst_decile": float(worst.mean()), f"{name}_gini": gini}


def grouped(
    rows: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[int]], key: str = "accuracy"
) -> dict[str, dict[str, float]]:
    """Return the spread of a measure in each group of clients; empty groups are left out."""
    by_client = {row["client"]: row.get(key) for row in rows}
    found = {
        name: client_spread(
            [by_client.get(client) for client in members],
            "mean",
            lower_is_better=key in LOWER_IS_BETTER,
        )
        for name, members in groups.items()
    }
    return {name: values for name, values in found.items() if values}
