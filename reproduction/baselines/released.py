"""What a certified condensation has released, put to use in three ways.

| row | what is trained, on what | what it needs in use |
|---|---|---|
| head | nothing: the released head itself | the head and the public front |
| network | a ConvNet from scratch, on the synthetic images and their labels | itself |
| distilled | the same, on images and public drawings with the head's soft labels | itself |

The run's own row is a head on the front, trained on the synthetic images.  All of them are
computed from releases and public drawings: the claim of the run covers them, and they
cost nothing more.

Everything after the noise is free.  The released head W says for any image x how likely
each class is, softmax(W phi(x)); so a network of any kind can learn from as many public
drawings as it likes, each labelled by the head, and from the synthetic images besides
(distillation, Hinton, Vinyals and Dean 2015).  Drawings come from a seed; what the network
learns of the clients it learns from the releases alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.method import normalisation
from fedquilt.condense.training import TrainingSettings, train_on
from fedquilt.config import CondenseConfig
from fedquilt.method import Progress
from fedquilt.models import make_model
from fedquilt.models.features import draw, make_feature_model, precompute
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import RunResult
from fedquilt.setup.task import FederatedTask
from fedquilt.training import evaluate
from reproduction.baselines.common import BaselineResult, progress_of

NETWORK = "convnet-32"
ON_IMAGES, FAMILIES = TrainingSettings(epochs=500), "crop_cutout_scale_rotate"
# Of drawings (3,000 to 20,000), how sure the head must be of them, the temperature and the
# augmentation of a few values each, the best on 10,000 training images of MNIST held out.
# Drawings vary enough: an augmented one has another label than the head gave.
DRAWINGS = 20000
DISTILLATION = TrainingSettings(epochs=3, batch_size=64, learning_rate=0.05, schedule="cosine")


@dataclass(frozen=True, eq=False)
class Release:
    """What a certified condensation has released, and the public front it is about.

    Attributes
    ----------
    head : [K, D]
        The head that the residuals have built.
    front
        The public front phi.
    images : [N, C, H, W]
        The synthetic images, normalised.
    mean, std
        What images are normalised with, one value a channel.
    """

    head: torch.Tensor
    front: nn.Module
    images: torch.Tensor
    mean: Sequence[float]
    std: Sequence[float]

    def scores(self, images: torch.Tensor) -> torch.Tensor:
        """Return W phi(x), [N, K]."""
        return precompute(self.front, images) @ self.head.T

    def shares(self, images: torch.Tensor) -> torch.Tensor:
        """Return how likely the head holds each class, [N, K]."""
        return functional.softmax(self.scores(images), dim=1)


def transfer_set(release: Release, drawings: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images to train on and their soft labels: public drawings, then the synthetic ones.

    Parameters
    ----------
    drawings
        Public drawings; 0: the synthetic images alone.
    seed
        Draws them.
    """
    checks.integer("drawings", drawings, at_least=0)
    images = release.images
    if drawings:
        channels, *_ = shape = tuple(images.shape[1:])
        drawn = draw("strokes" if channels == 1 else "leaves", shape, drawings, seed)
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (release.mean, release.std))
        images = torch.cat([((drawn - mean) / std).to(images), images])
    return images, release.shares(images)


def released(config: CondenseConfig, finished: RunResult) -> Release:
    """Return what the run has released, from its folder."""
    if config.mode != "certified" or finished.folder is None or finished.synthetic is None:
        raise InvalidValueError(
            "what was released can be used after a certified condensation in a folder"
        )
    checkpoint = RunFolder.open(finished.folder).load_checkpoint()
    if checkpoint is None:
        raise InvalidValueError(f"{finished.folder} has lost its checkpoint, which holds the head")
    images = finished.synthetic.images
    shape, head = tuple(images.shape[1:]), torch.from_numpy(checkpoint.state["server.head"])
    front = make_feature_model(config.feature_extractor, shape, len(head)).front
    return Release(head, front, images, *normalisation(config, shape[0]))


def run_released(
    name: str,
    config: CondenseConfig,
    problem: FederatedTask,
    finished: RunResult,
    progress: Progress | None = None,
) -> BaselineResult:
    """Return the row of a use of the release, one of `RELEASED`."""
    began = time.perf_counter()
    record = finished.result["condensation"]
    (accuracy, loss), note = RELEASED[name](config, problem, finished, progress)
    return BaselineResult(
        name=name,
        accuracy=accuracy,
        loss=loss,
        bytes_up=record["bytes_up"],
        bytes_down=record["bytes_down"],
        rounds=finished.result["rounds"],
        seconds=time.perf_counter() - began,
        raw=False,
        note=note,
    )


Row = tuple[tuple[float, float], str]


def _head(
    config: CondenseConfig, problem: FederatedTask, finished: RunResult, progress: Progress | None
) -> Row:
    release = released(config, finished)
    inputs, targets = (part.cpu() for part in problem.test_data)
    scores = release.scores(inputs)
    accuracy = float((scores.argmax(dim=1) == targets).float().mean())
    loss = float(functional.cross_entropy(scores, targets))
    return (accuracy, loss), (
        f"the released head itself on the public front {config.feature_extractor}; no images are "
        "needed"
    )


def _network(
    config: CondenseConfig, problem: FederatedTask, finished: RunResult, progress: Progress | None
) -> Row:
    release = released(config, finished)
    assert finished.synthetic is not None
    labels = finished.synthetic.targets
    measured = _trained(config, problem, (release.images, labels), ON_IMAGES, FAMILIES, progress)
    return measured, (
        f"{NETWORK} from scratch on the synthetic images alone; it needs neither head nor front"
    )


def _distilled(
    config: CondenseConfig, problem: FederatedTask, finished: RunResult, progress: Progress | None
) -> Row:
    release = released(config, finished)
    seed = torch_seed(config.seed, "drawings for a network")
    labelled = transfer_set(release, DRAWINGS, seed)
    measured = _trained(config, problem, labelled, DISTILLATION, "none", progress)
    return measured, (
        f"{NETWORK} from scratch on the synthetic images and {DRAWINGS} public drawings, with the "
        "head's soft labels; it needs head and front while it is trained, and neither afterwards"
    )


def _trained(
    config: CondenseConfig,
    problem: FederatedTask,
    labelled: tuple[torch.Tensor, torch.Tensor],
    settings: TrainingSettings,
    families: str,
    progress: Progress | None,
) -> tuple[float, float]:
    """Train the network from scratch; return (accuracy, loss) on the test data."""
    images, labels = labelled
    inputs, targets = problem.test_data
    classes = problem.num_classes
    network = make_model(NETWORK, images.shape[1:], classes, torch_seed(config.seed, "network"))
    network.to(inputs.device)
    train_on(
        network,
        images.to(inputs.device),
        labels.to(inputs.device),
        settings,
        Augmentation(families),
        generator(config.seed, "network"),
        progress_of(progress, "training", settings.epochs),
    )
    return evaluate(network, inputs, targets)


RELEASED: dict[str, Callable[[CondenseConfig, FederatedTask, RunResult, Progress | None], Row]] = {
    "head": _head,
    "network": _network,
    "distilled": _distilled,
}
