"""What a run keeps of a condensation: its images, on the way and at the end."""

from __future__ import annotations

from typing import Any

from fedquilt.assemble import Problem
from fedquilt.condense.method import normalisation
from fedquilt.config import CondenseConfig, RunConfig
from fedquilt.data import ImageDataset, save_condensed
from fedquilt.round import Federation
from fedquilt.run_folder import RunFolder, storage_errors


def grown_set(config: RunConfig, problem: Problem, whole: bool = False) -> ImageDataset | None:
    """Return the synthetic set as it stands; None in a run that condenses nothing.

    Classes that nobody has sent are left out, unless the `whole` set is wanted.
    """
    if problem.condensing is None:
        return None
    server = problem.condensing.server
    synthetic = server.synthetic if whole else server.grown()
    images = synthetic.images.detach().cpu().clone()
    return ImageDataset(
        images, synthetic.labels.cpu(), f"{config.dataset}-condensed", problem.num_classes
    )


def keep_images(
    config: RunConfig,
    problem: Problem,
    folder: RunFolder | None,
    rounds: int | None = None,
    observer: Any = None,
) -> None:
    """Write the images after so many rounds into the run's folder; None: the final ones.

    An observer that asks for it (`kept`) is told where they are.
    """
    # On the way all images are kept: those of one round must fit those of another.
    synthetic = grown_set(config, problem, whole=rounds is not None)
    if synthetic is None or folder is None:
        return
    path = folder.synthetic_path(rounds)
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
    mean, std = normalisation(config, problem.input_shape[0])
    about: dict[str, str | int | float] = {
        "dataset": config.dataset,
        "mode": config.mode,
        "seed": config.seed,
        "rounds": config.num_rounds if rounds is None else rounds,
    }
    save_condensed(path, synthetic, mean=mean, std=std, about=about)
    kept = getattr(observer, "kept", None)
    if kept is not None:
        kept(path)


def train_if_stale(problem: Problem, federation: Federation) -> dict[str, float]:
    """Let the model of a condensation know all images before it is looked at.

    It is trained in the rounds that are evaluated; where nobody came to such a round,
    or the run ended before one, that is made up for.
    """
    if problem.condensing is None:
        return {}
    federation.weights, said = problem.condensing.server.train_if_stale(federation.weights)
    return said


def condensation_record(
    config: RunConfig,
    problem: Problem,
    lines: list[dict[str, Any]],
    synthetic: ImageDataset,
) -> dict[str, Any]:
    """Return what result.json says of a condensation."""
    assert isinstance(config, CondenseConfig)
    assert problem.condensing is not None
    seconds = [line["seconds"] for line in lines]
    return {
        "ipc": config.ipc,
        "images": len(synthetic),
        "bytes_up": sum(line.get("bytes_up", 0) for line in lines),
        "bytes_down": sum(line.get("bytes_down", 0) for line in lines),
        "classes_not_sent": problem.condensing.server.not_sent(),
        "seconds": None if None in seconds else sum(seconds),
    }


def report_progress(problem: Problem, observer: Any) -> None:
    """Let an observer that asks for it (`working`) see what happens within a round."""
    working = getattr(observer, "working", None)
    if problem.condensing is not None and working is not None:
        problem.condensing.engine.progress = working
        problem.condensing.server.progress = working
