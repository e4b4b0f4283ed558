"""What clients hold, samples by class, and what they measured on it.  For the owner only."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedquilt.common.errors import FedquiltError
from fedquilt.config import RunConfig
from fedquilt.data import DATASETS
from fedquilt.record.folder import RunFolder
from fedquilt.setup.build_task import build_problem


def holdings_view(config: RunConfig) -> dict[str, Any] | None:
    """Return how many samples of each class every client holds; None for somebody's own data.

    The data set is dealt out again as the run did, from the same options and seed.
    """
    if config.dataset not in DATASETS:
        return None
    try:
        _, problem = build_problem(config.replace(no_download=True, device="cpu"))
    except (FedquiltError, OSError) as error:
        return {"missing": str(error)}
    labels = problem.task.targets.numpy()
    counts = [
        np.bincount(labels[part], minlength=problem.num_classes).tolist()
        for part in problem.task.clients
    ]
    return {"classes": problem.num_classes, "counts": counts}


def measured_view(folder: RunFolder) -> dict[str, Any] | None:
    """Return what each client measured last on samples of its own, None where nobody did."""
    measured = folder.read_client_metrics()
    if not measured:
        return None
    rounds = max(measured)
    return {"rounds": rounds, "rows": measured[rounds]}
