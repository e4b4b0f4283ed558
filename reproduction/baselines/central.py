"""Baselines on pooled data: a coreset (the floor), DM (the ceiling)."""

from __future__ import annotations

import time

from torch import nn

from fedquilt.common.randomness import generator, torch_seed
from fedquilt.condense.embeds import embedding_model, reinitialised
from fedquilt.condense.matching import RealImages, SyntheticSet, match_real
from fedquilt.config import CondenseConfig
from fedquilt.method import Progress
from fedquilt.setup.task import FederatedTask
from fedquilt.training import Task
from reproduction.baselines.common import (
    BaselineResult,
    accuracy_of_images,
    augmentation,
    held_by_class,
    image_bytes,
    matching_settings,
    progress_of,
    real_sample,
)

BATCH_REAL = 256


def run_dm(
    config: CondenseConfig,
    problem: FederatedTask,
    budget_bytes: int,
    progress: Progress | None = None,
) -> BaselineResult:
    """Condense the pooled data and train on the images; the budget plays no part."""
    began = time.perf_counter()
    task = problem.task
    synthetic, _ = dm_images(config, problem, progress)
    grown = synthetic.expanded()
    accuracy, loss = accuracy_of_images(config, problem, grown.images, grown.labels, progress)
    held = sum(len(samples) for samples in held_by_class(task).values())
    return BaselineResult(
        name="dm",
        accuracy=accuracy,
        loss=loss,
        bytes_up=held * image_bytes(task),
        bytes_down=0,
        rounds=1,
        seconds=time.perf_counter() - began,
        raw=True,
        note="all raw images of all clients are pooled in one place; it begins with real ones, "
        f"{config.num_rounds * config.dc_iterations} steps with a new random model each",
    )


def dm_images(
    config: CondenseConfig, problem: FederatedTask, progress: Progress | None = None
) -> tuple[SyntheticSet, list[float]]:
    """Return the images that DM makes, and the loss before each step.

    It begins with real images, as published: the data are pooled anyway, and a ceiling
    must not lie below the floor.  Image step, momentum and the number of steps are the
    condensation's; every step has a new random model and up to `BATCH_REAL` real images
    of each class.
    """
    task = problem.task
    real = RealImages(task.inputs, held_by_class(task))
    source = generator(config.seed, "first images")
    tiles = config.tiles_in(*task.inputs.shape[2:])
    synthetic = real_sample(task.inputs, real.classes, config.ipc, source, tiles)
    steps = config.num_rounds * config.dc_iterations

    def model_at(step: int) -> nn.Module:
        fresh = reinitialised(problem.flat.module, torch_seed(config.seed, "dm model", step))
        return embedding_model(fresh.eval().requires_grad_(False), config.embed_layer)

    losses = match_real(
        synthetic,
        real,
        model_at,
        matching_settings(config, problem, steps, "none"),
        BATCH_REAL,
        augmentation(config, task),
        generator(config.seed, "dm"),
        progress_of(progress, "matching", steps),
    )
    return synthetic, losses


def run_coreset(
    config: CondenseConfig,
    problem: FederatedTask,
    budget_bytes: int,
    progress: Progress | None = None,
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
