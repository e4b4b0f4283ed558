"""The floor: as many real images as a condensation has synthetic ones, drawn at random."""

from __future__ import annotations

import time

from fedquilt.baselines.common import (
    BaselineResult,
    Progress,
    accuracy_of_images,
    held_by_class,
    image_bytes,
    real_sample,
)
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.config import CondenseConfig
from fedquilt.learning import Task
from fedquilt.problem import Problem
from fedquilt.randomness import generator


def run_coreset(
    config: CondenseConfig, problem: Problem, budget_bytes: int, progress: Progress | None = None
) -> BaselineResult:
    """Train on `ipc` real images of each class; whatever the budget, it is sent once."""
    began = time.perf_counter()
    task = problem.task
    chosen = coreset(config, task)
    accuracy, loss = accuracy_of_images(config, problem, chosen.images, chosen.labels, progress)
    return BaselineResult(
        name="coreset",
        accuracy=accuracy,
        loss=loss,
        bytes_up=len(chosen.images) * image_bytes(task),
        bytes_down=0,
        rounds=1,
        seconds=time.perf_counter() - began,
        raw=True,
        note=f"clients' raw images leave them: {config.ipc} of each class, drawn at random",
    )


def coreset(config: CondenseConfig, task: Task) -> SyntheticSet:
    """Return for each class `ipc` of the images that somebody holds."""
    source = generator(config.seed, "coreset")
    return real_sample(task.inputs, held_by_class(task), config.ipc, source)
