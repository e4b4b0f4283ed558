"""Matching: moving the synthetic images until their statistics are the clients'.

One step, for a feature model with frozen weights: all images of all classes in one
batch, one forward pass, one backward pass to the pixels and not to the weights.  With
`S` images a class the mean embedding of a class is a mean over `S` rows of that batch.
The images move by SGD with momentum (0.5 in DM, FedDM and FedNum).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import nn

from fedquilt import validate
from fedquilt.condense.augment import Transform
from fedquilt.condense.embeds import Embeds, embed_and_forward
from fedquilt.condense.losses import COMPUTATIONS, LOGIT_LOSSES, matching_loss
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.condense.targets import ClassTargets, Drawn
from fedquilt.errors import InvalidValueError


@dataclass(frozen=True)
class MatchingSettings:
    """The numbers of the matching (`dc_iterations`, `image_lr`, ...)."""

    iterations: int = 1000
    image_lr: float = 1.0
    momentum: float = 0.5
    logit_loss_type: str = "none"
    loss_computation: str = "avg-loss"

    def __post_init__(self) -> None:
        validate.integer("dc_iterations", self.iterations, at_least=1)
        validate.number("image_lr", self.image_lr, above=0)
        validate.number("image_momentum", self.momentum, at_least=0, below=1)
        validate.choice("logit_loss_type", self.logit_loss_type, LOGIT_LOSSES)
        validate.choice("loss_computation", self.loss_computation, COMPUTATIONS)


@dataclass(frozen=True, eq=False)
class View:
    """One way to look at the images: a frozen model, an augmentation, what clients saw."""

    model: nn.Module
    targets: ClassTargets
    transform: Transform | None = None


def view_loss(
    view: View,
    images: torch.Tensor,
    places: torch.Tensor,
    drawn: Drawn,
    settings: MatchingSettings,
) -> torch.Tensor:
    """Return the loss of each of P classes.

    Parameters
    ----------
    images : [P, ipc, C, H, W]
        The synthetic images of the classes.
    places : int64 [P]
        Place of each class among all classes of the run: its augmentation's row.
    drawn
        What the classes are matched to, in the same order.
    """
    classes, ipc = images.shape[:2]
    batch = images.flatten(0, 1)
    if view.transform is not None:
        batch = view.transform.apply(batch, places.repeat_interleave(ipc))
    if settings.logit_loss_type == "none":
        f = cast(Embeds, view.model).embed(batch)
        z = f.new_zeros(len(f), 0)
    else:
        f, z = embed_and_forward(view.model, batch)
    return matching_loss(
        f.view(classes, ipc, -1).mean(dim=1),
        z.view(classes, ipc, z.shape[1]).mean(dim=1),
        drawn.features,
        drawn.logits,
        drawn.weights,
        logit_loss_type=settings.logit_loss_type,
        loss_computation=settings.loss_computation,
    )


class Matcher:
    """SGD with momentum on the images of a synthetic set, for the views of one round.

    The set's images change in place.  Classes that a view has no statistics of keep
    theirs.
    """

    def __init__(
        self, synthetic: SyntheticSet, views: Sequence[View], settings: MatchingSettings
    ) -> None:
        self._images = synthetic.by_class()
        self._velocity = torch.zeros_like(self._images)
        self._views = views
        self._settings = settings
        place_of = {label: place for place, label in enumerate(synthetic.classes)}
        self._places = [_places(view.targets.classes, place_of, synthetic) for view in views]

    def step(self, number: int, source: np.random.Generator) -> torch.Tensor:
        """Take one step in the view of this number; return the loss before it."""
        view, places = self._views[number], self._places[number]
        whole = len(places) == len(self._images)
        part = (self._images if whole else self._images[places]).detach().requires_grad_(True)
        loss = view_loss(view, part, places, view.targets.draw(source), self._settings).sum()
        (gradient,) = torch.autograd.grad(loss, part)
        self._move(gradient, None if whole else places)
        return loss.detach()

    @torch.no_grad()
    def _move(self, gradient: torch.Tensor, places: torch.Tensor | None) -> None:
        """Move the classes at `places` (None: all); the others stand still, velocity and all."""
        rate, momentum = self._settings.image_lr, self._settings.momentum
        if places is None:
            self._velocity.mul_(momentum).add_(gradient)
            self._images.add_(self._velocity, alpha=-rate)
            return
        velocity = self._velocity[places].mul_(momentum).add_(gradient)
        self._velocity[places] = velocity
        self._images[places] = self._images[places].sub_(velocity, alpha=rate)


def _places(
    classes: Sequence[int], place_of: dict[int, int], synthetic: SyntheticSet
) -> torch.Tensor:
    for label in classes:
        if label not in place_of:
            raise InvalidValueError(
                f"class {label} of the statistics must be one of the set's {synthetic.classes}"
            )
    places = [place_of[label] for label in classes]
    return torch.tensor(places, dtype=torch.int64).to(synthetic.images.device)


def match(
    synthetic: SyntheticSet,
    views: Sequence[View],
    settings: MatchingSettings,
    source: np.random.Generator,
    progress: Callable[[int], None] | None = None,
) -> float:
    """Match the set to the views for `settings.iterations` steps; return the mean loss.

    The views take turns in an order that is shuffled each time it is through.  A view
    without statistics is passed over; without any, nothing changes and the loss is 0.
    """
    usable = [number for number, view in enumerate(views) if view.targets.classes]
    if not usable:
        return 0.0
    matcher = Matcher(synthetic, views, settings)
    total = torch.zeros((), device=synthetic.images.device)
    turn: list[int] = []
    for done in range(settings.iterations):
        if not turn:
            turn = source.permutation(usable).tolist()
        total += matcher.step(turn.pop(), source)
        if progress is not None:
            progress(done + 1)
    return float(total) / settings.iterations
