"""Matching: synthetic images are moved until their statistics are the clients'.

One step, for a feature model with frozen weights: all images of all classes in one
batch, one forward pass, one backward pass to the pixels and not to the weights.  With
`S` images a class the mean embedding of a class is a mean over `S` rows of that batch.
The images move by SGD with momentum (0.5 in DM, FedDM and FedNum), or by Adam (betas 0.9
and 0.99), whose rate falls along a cosine to a tenth within the round.

The loss is the distance of the synthetic set from the statistics.  For class c with mean
embedding f and mean scores z of its synthetic images, and groups j with means F_j, Z_j and
weights w_j (counts, scaled to sum 1),

    avg-loss   |f - sum_j w_j F_j|^2 + l(z, sum_j w_j Z_j)
    loss-avg   sum_j w_j ( |f - F_j|^2 + l(z, Z_j) )

summed over classes.  With p = softmax(z), q = softmax(Z), l is one of

| name | l(z, Z) |
|---|---|
| l2 | sum_k (z_k - Z_k)^2 |
| kl | KL(q || p) = sum_k q_k (log q_k - log p_k) |
| wasserstein | W1(p, q) for the ground metric d(a, b) = 1 where a != b: sum_k |p_k - q_k| / 2 |
| wasserstein_sorted | sum_k |P_k - Q_k|, P and Q cumulative sums of p and q each sorted ascending |
| none | 0 |

Classes have no order, so the 0/1 metric is the one that treats them alike; its
1-Wasserstein distance is the total variation.  `wasserstein_sorted` is what the
published FedNum code calls Wasserstein: it compares how peaked two distributions
are and not where, so that certainty of class 0 and certainty of class 5 are at
distance 0.  It is here for comparison.

With two moments (`moments=2`) an embedding is followed by its squares, so that groups
merge exactly, and f and F are replaced by (mean, standard deviation) of every feature:

    s = sqrt(max(0, mean of squares - mean^2) + 1e-4)

Images that all look like the mean of their class match the mean, but not that.

Where the feature model was trained on the server's own images, a cross-entropy of the
synthetic images under it, times `discrimination`, keeps classes apart (the regulariser of
Zhao et al. 2023).  It asks nothing of the clients.

For the squared terms both forms have the same gradient: they differ by the variance
of the groups, which no image can change.

Where real images are at hand (DM, FedDM, first images that clients condense), data that lie beside
the matching need no statistics: every step has a model, an augmentation and a batch of real images
of its own (`match_real`).

The synthetic set (`SyntheticSet`) has `ipc` images of each class, class after class.  Every image
may hold `tiles` x `tiles` smaller ones (`fedquilt.data.condensed`), which are what is matched and
trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.condense.augment import Augmentation, Transform
from fedquilt.condense.embeds import Embeds, embed_and_forward, embedding_model, perturbed
from fedquilt.condense.statistics import ClassTargets, Drawn, StatisticsTable, group_means
from fedquilt.config import CondenseConfig
from fedquilt.config.choices import IMAGE_OPTIMIZERS, LOGIT_LOSSES, LOSS_COMPUTATIONS
from fedquilt.data.condensed import expand_tiles, most_tiles, shrink_to_tiles
from fedquilt.models.features import draw


@dataclass(eq=False)
class SyntheticSet:
    """Images [len(classes) * ipc, C, H, W] in class order, and their labels.

    Class labels may be any whole numbers; `classes` lists them ascending.  Each image
    holds `tiles` x `tiles` smaller ones; `expanded` returns those.
    """

    images: torch.Tensor
    classes: tuple[int, ...]
    ipc: int
    tiles: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.tiles <= (most := most_tiles(self.images.shape)):
            raise InvalidValueError(
                f"tiles={self.tiles} must be >= 1 and at most {most} for {len(self.images)} images "
                f"of {tuple(self.images.shape[2:])} pixels"
            )
        if list(self.classes) != sorted(set(self.classes)):
            raise InvalidValueError(f"classes={self.classes} must be ascending, each named once")
        if len(self.images) != len(self.classes) * self.ipc:
            raise InvalidValueError(
                f"{len(self.images)} images must be {self.ipc} for each of "
                f"{len(self.classes)} classes"
            )

    @classmethod
    def random(
        cls,
        classes: Sequence[int],
        ipc: int,
        shape: Sequence[int],
        source: np.random.Generator,
        device: torch.device | str = "cpu",
        tiles: int = 1,
    ) -> SyntheticSet:
        """Start from standard normal pixels, in the units of normalised images."""
        checks.integer("ipc", ipc, at_least=1)
        size = (len(classes) * ipc, *shape)
        images = torch.from_numpy(source.standard_normal(size, dtype=np.float32))
        return cls(images.to(device), tuple(sorted(classes)), ipc, tiles)

    def smoothed(self) -> SyntheticSet:
        """Return a start of smooth noise: means over 3 x 3 pixels, of standard deviation 1/2.

        What matching does not decide stays as it began; less of that is sharp noise, which
        a network trained on the images would learn.
        """
        smooth = functional.avg_pool2d(self.images, 3, 1, 1)
        smooth = 0.5 * smooth / smooth.std()
        return SyntheticSet(smooth, self.classes, self.ipc, self.tiles)

    def drawn(self, seed: int) -> SyntheticSet:
        """Return a start of public drawings: shapes that cover one another, as in photographs.

        Every smaller image is a drawing of its own ("leaves" in
        `fedquilt.models.features.draw`), with mean 0 and standard deviation 1/2 in each
        channel before it is made smaller.  What matching does not decide then looks like the
        edges of things.
        """
        count = len(self.images) * self.tiles**2
        drawings = draw("leaves", tuple(self.images.shape[1:]), count, seed)
        std, mean = torch.std_mean(drawings, dim=(0, 2, 3), keepdim=True)
        begin = shrink_to_tiles(0.5 * (drawings - mean) / std.clamp(min=1e-6), self.tiles)
        return SyntheticSet(begin.to(self.images), self.classes, self.ipc, self.tiles)

    @property
    def labels(self) -> torch.Tensor:
        """The class of each image."""
        labels = torch.tensor(self.classes, device=self.images.device)
        return labels.repeat_interleave(self.ipc)

    def of(self, classes: Sequence[int]) -> SyntheticSet:
        """Return the images of some classes."""
        chosen = tuple(label for label in self.classes if label in set(classes))
        if chosen == self.classes:
            return self
        places = [place for place, label in enumerate(self.classes) if label in chosen]
        return SyntheticSet(self.by_class()[places].flatten(0, 1), chosen, self.ipc, self.tiles)

    def by_class(self) -> torch.Tensor:
        """Return the images as [classes, ipc, C, H, W], without a copy."""
        return self.images.view(len(self.classes), self.ipc, *self.images.shape[1:])

    def expanded(self) -> SyntheticSet:
        """Return the smaller images, enlarged: what is matched and trained on."""
        return SyntheticSet(
            expand_tiles(self.images, self.tiles), self.classes, self.ipc * self.tiles**2
        )


def logit_distance(kind: str, z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return l(z, Z) along the last axis; the leading axes broadcast."""
    checks.choice("logit_loss_type", kind, LOGIT_LOSSES)
    if kind == "none":
        return (0 * (z - target)).sum(dim=-1)
    if kind == "l2":
        return (z - target).square().sum(dim=-1)
    if kind == "kl":
        log_p, log_q = functional.log_softmax(z, dim=-1), functional.log_softmax(target, dim=-1)
        return (log_q.exp() * (log_q - log_p)).sum(dim=-1)
    p, q = functional.softmax(z, dim=-1), functional.softmax(target, dim=-1)
    if kind == "wasserstein":
        return (p - q).abs().sum(dim=-1) / 2
    gap = p.sort(dim=-1).values.cumsum(dim=-1) - q.sort(dim=-1).values.cumsum(dim=-1)
    return gap.abs().sum(dim=-1)


def matching_loss(
    f: torch.Tensor,
    z: torch.Tensor,
    features: torch.Tensor,
    logits: torch.Tensor,
    weights: torch.Tensor,
    *,
    logit_loss_type: str = "none",
    loss_computation: str = "avg-loss",
    moments: int = 1,
) -> torch.Tensor:
    """Return the loss of each class, [P].

    Parameters
    ----------
    f, z : [P, D], [P, K]
        Means over the synthetic images of each class.
    features, logits : [P, S, D], [P, S, K]
        Means over groups of real images.
    weights : [P, S]
        Weight of each group; rows sum to 1, and a place without a group has 0.
    moments
        2: the second half of f and of features are means of squares.
    """
    checks.choice("loss_computation", loss_computation, LOSS_COMPUTATIONS)
    if loss_computation == "avg-loss":
        features = (weights[..., None] * features).sum(dim=1, keepdim=True)
        logits = (weights[..., None] * logits).sum(dim=1, keepdim=True)
        weights = weights.new_ones(len(weights), 1)
    if moments == 2:
        f, features = mean_and_spread(f), mean_and_spread(features)
    apart = (f[:, None] - features).square().sum(dim=-1)
    if logit_loss_type != "none":
        apart = apart + logit_distance(logit_loss_type, z[:, None], logits)
    return (weights * apart).sum(dim=1)


_LEAST_VARIANCE = 1e-4  # the square root has no gradient at 0


def mean_and_spread(moments: torch.Tensor) -> torch.Tensor:
    """Return (mean, standard deviation) for (mean, mean of squares), along the last axis."""
    mean, squares = moments.chunk(2, dim=-1)
    variance = (squares - mean.square()).clamp(min=0)
    return torch.cat([mean, (variance + _LEAST_VARIANCE).sqrt()], dim=-1)


@dataclass(frozen=True)
class MatchingSettings:
    """The numbers of the matching (`dc_iterations`, `image_lr`, ...)."""

    iterations: int = 1000
    image_lr: float = 1.0
    momentum: float = 0.5
    logit_loss_type: str = "none"
    loss_computation: str = "avg-loss"
    moments: int = 1
    discrimination: float = 0.0
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        checks.integer("dc_iterations", self.iterations, at_least=1)
        checks.number("image_lr", self.image_lr, above=0)
        checks.number("image_momentum", self.momentum, at_least=0, below=1)
        checks.choice("logit_loss_type", self.logit_loss_type, LOGIT_LOSSES)
        checks.choice("loss_computation", self.loss_computation, LOSS_COMPUTATIONS)
        checks.integer("moments", self.moments, at_least=1, at_most=2)
        checks.number("discrimination", self.discrimination, at_least=0)
        checks.choice("image_optimizer", self.optimizer, IMAGE_OPTIMIZERS)


@dataclass(frozen=True, eq=False)
class View:
    """A frozen feature model, its augmentation, and the targets that clients sent for both.

    `knows_classes`: it was trained, so that its scores mean something.
    """

    model: nn.Module
    targets: ClassTargets
    transform: Transform | None = None
    knows_classes: bool = False


def view_loss(
    view: View,
    images: torch.Tensor,
    places: torch.Tensor,
    drawn: Drawn,
    settings: MatchingSettings,
    tiles: int = 1,
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
    tiles
        Each image holds `tiles` x `tiles` smaller ones (`fedquilt.condense.matching`).
    """
    classes = len(images)
    batch = expand_tiles(images.flatten(0, 1), tiles)
    ipc = len(batch) // classes
    owners = places.repeat_interleave(ipc)
    if view.transform is not None:
        batch = view.transform.apply(batch, owners)
    discriminates = settings.discrimination > 0 and view.knows_classes
    sent_logits = settings.logit_loss_type != "none"
    if sent_logits or discriminates:
        f, z = embed_and_forward(view.model, batch)
    else:
        f = cast(Embeds, view.model).embed(batch)
        z = f.new_zeros(len(f), 0)
    mean_scores = z.view(classes, ipc, z.shape[1]).mean(dim=1)
    loss = matching_loss(
        f.view(classes, ipc, -1).mean(dim=1),
        mean_scores if sent_logits else mean_scores[:, :0],
        drawn.features,
        drawn.logits,
        drawn.weights,
        logit_loss_type=settings.logit_loss_type,
        loss_computation=settings.loss_computation,
        moments=settings.moments,
    )
    if not discriminates:
        return loss
    labels = torch.tensor(view.targets.classes, device=z.device).repeat_interleave(ipc)
    wrong = functional.cross_entropy(z, labels, reduction="none").view(classes, ipc)
    return loss + settings.discrimination * wrong.mean(dim=1)


class Matcher:
    """SGD with momentum, or Adam, on the images of a synthetic set, for one round's views.

    The set's images change in place.  Classes that a view has no statistics of keep
    theirs.
    """

    def __init__(
        self, synthetic: SyntheticSet, views: Sequence[View], settings: MatchingSettings
    ) -> None:
        self._images = synthetic.by_class()
        self._tiles = synthetic.tiles
        self._velocity = torch.zeros_like(self._images)
        self._squares = torch.zeros_like(self._images) if settings.optimizer == "adam" else None
        self._steps = np.zeros(len(self._images), dtype=np.int64)
        self._views = views
        self._settings = settings
        place_of = {label: place for place, label in enumerate(synthetic.classes)}
        self._places = [_places(view.targets.classes, place_of, synthetic) for view in views]

    def step(self, number: int, source: np.random.Generator) -> torch.Tensor:
        """Take one step in the view of this number; return the loss before it."""
        view, places = self._views[number], self._places[number]
        whole = len(places) == len(self._images)
        part = (self._images if whole else self._images[places]).detach().requires_grad_(True)
        drawn = view.targets.draw(source)
        loss = view_loss(view, part, places, drawn, self._settings, self._tiles).sum()
        (gradient,) = torch.autograd.grad(loss, part)
        self._move(gradient, None if whole else places)
        return loss.detach()

    @torch.no_grad()
    def _move(self, gradient: torch.Tensor, places: torch.Tensor | None) -> None:
        """Move the classes at `places` (None: all); the others stand still, velocity and all."""
        if places is not None:
            images, velocity = self._images[places], self._velocity[places]
            squares = None if self._squares is None else self._squares[places]
            self._update(images, velocity, squares, gradient, places.cpu().numpy())
            self._images[places], self._velocity[places] = images, velocity
            if self._squares is not None and squares is not None:
                self._squares[places] = squares
            return
        everybody = np.arange(len(self._images))
        self._update(self._images, self._velocity, self._squares, gradient, everybody)

    def _update(
        self,
        images: torch.Tensor,
        velocity: torch.Tensor,
        squares: torch.Tensor | None,
        gradient: torch.Tensor,
        classes: NDArray[np.int64],
    ) -> None:
        """Take one step in place; classes that have stood still have taken fewer."""
        rate = self._settings.image_lr
        if squares is None:
            velocity.mul_(self._settings.momentum).add_(gradient)
            images.add_(velocity, alpha=-rate)
            return
        self._steps[classes] += 1
        taken = self._steps[classes]
        left = np.cos(np.pi * np.minimum(1, taken / self._settings.iterations))
        scale = rate * (0.1 + 0.45 * (1 + left)) / (1 - _FIRST**taken)
        undone = 1 - _SECOND**taken
        velocity.mul_(_FIRST).add_(gradient, alpha=1 - _FIRST)
        squares.mul_(_SECOND).addcmul_(gradient, gradient, value=1 - _SECOND)
        root = (squares / _beside(undone, images)).sqrt_().add_(1e-12)
        images.sub_(_beside(scale, images) * velocity / root)


_FIRST, _SECOND = 0.9, 0.99  # Adam's betas


def _beside(values: NDArray[Any], images: torch.Tensor) -> torch.Tensor:
    """Lay one number a class beside the images [P, ipc, C, H, W]."""
    return torch.from_numpy(values).to(images).view(-1, 1, 1, 1, 1)


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


@dataclass(frozen=True, eq=False)
class RealImages:
    """The images at hand: all of a data set, and which of them, by class in ascending order."""

    images: torch.Tensor
    classes: Mapping[int, NDArray[np.int64]]

    def batch(self, size: int, source: np.random.Generator) -> list[NDArray[np.int64]]:
        """Draw `size` samples of each class without replacement, all where there are fewer."""
        return [
            source.choice(samples, size, replace=False) if len(samples) > size else samples
            for samples in self.classes.values()
        ]


def real_view(
    model: nn.Module,
    real: RealImages,
    batch: int,
    augmentation: Augmentation,
    source: np.random.Generator,
    with_logits: bool,
) -> View:
    """Look at a batch of each class through a model, under one draw of the augmentation.

    The draw has a row of parameters for each class; synthetic images of the same classes
    meet the same ones (siamese augmentation).
    """
    device = real.images.device
    drawn = real.batch(batch, source)
    counts = torch.tensor([len(samples) for samples in drawn])
    places = torch.arange(len(drawn), device=device)
    transform = augmentation.draw(source, len(drawn))
    features, logits = group_means(
        model,
        real.images,
        torch.from_numpy(np.concatenate(drawn)).to(device),
        counts,
        transform=transform,
        rows=places.repeat_interleave(counts.to(device)),
        with_logits=with_logits,
    )
    labels = torch.tensor(list(real.classes), device=device)
    table = StatisticsTable(torch.zeros_like(labels), labels, counts.to(device), features, logits)
    return View(model, ClassTargets(table), transform)


def match_real(
    synthetic: SyntheticSet,
    real: RealImages,
    model_at: Callable[[int], nn.Module],
    settings: MatchingSettings,
    batch: int,
    augmentation: Augmentation,
    source: np.random.Generator,
    progress: Callable[[int], None] | None = None,
) -> list[float]:
    """Match the set to real images of its classes; return the loss before each step.

    Parameters
    ----------
    synthetic
        Its images change in place; its classes are those of `real`.
    model_at
        The feature model of a step, frozen.
    batch
        Real images of a class that a step sees.
    """
    with_logits = settings.logit_loss_type != "none"
    views: list[View] = []
    matcher = None
    losses = []
    for done in range(settings.iterations):
        view = real_view(model_at(done), real, batch, augmentation, source, with_logits)
        # The matcher keeps the momentum; its view is another one of the same classes.
        views[:] = [view]
        matcher = matcher or Matcher(synthetic, views, settings)
        losses.append(matcher.step(0, source))
        if progress is not None:
            progress(done + 1)
    return torch.stack(losses).tolist()


BATCH_OF_CLIENT = 32
"""Real images of a class that a client's step sees, as in the published FedNum code."""


def condensed_by_clients(
    config: CondenseConfig,
    model: nn.Module,
    held: Iterable[Mapping[int, torch.Tensor]],
    settings: MatchingSettings,
    first: SyntheticSet,
) -> int:
    """Replace first images by ones that clients have condensed (`init_method="dm"`, FedDM).

    Every client moves `ipc` images of each class that it holds enough of, which begin as
    its own, around the untrained model for `dc_iterations` steps, and sends them; of all that
    were sent for a class, `first` takes some at random.

    Parameters
    ----------
    held
        The images of each client by class.
    settings
        How images are moved.
    first
        Its images change in place; a class that nobody holds keeps its own.

    Returns the bytes that clients sent.
    """
    sent: dict[int, list[torch.Tensor]] = {}
    for number, by_class in enumerate(held):
        least = config.min_group
        kept = {c: images for c, images in sorted(by_class.items()) if len(images) >= least}
        if kept:
            made = _condensed(config, model, number, kept, settings)
            for label, images in zip(made.classes, made.by_class(), strict=True):
                sent.setdefault(label, []).append(images)
    source = generator(config.seed, "first of condensed")
    for label, images in zip(first.classes, first.by_class(), strict=True):
        if label in sent:
            pool = torch.cat(sent[label])
            chosen = np.resize(source.permutation(len(pool)), first.ipc * first.tiles**2)
            images.copy_(
                shrink_to_tiles(pool[torch.from_numpy(chosen).to(pool.device)], first.tiles)
            )
    return 4 * sum(images.numel() for parts in sent.values() for images in parts)


def _condensed(
    config: CondenseConfig,
    model: nn.Module,
    number: int,
    by_class: Mapping[int, torch.Tensor],
    settings: MatchingSettings,
) -> SyntheticSet:
    """Return the images that one client makes of its own."""
    source = generator(config.seed, "client condenses", number)
    ends = np.cumsum([0, *(len(images) for images in by_class.values())])
    places = {c: np.arange(ends[i], ends[i + 1]) for i, c in enumerate(by_class)}
    real = RealImages(torch.cat(list(by_class.values())), places)
    begin = [np.resize(source.permutation(at), config.ipc) for at in places.values()]
    index = torch.from_numpy(np.concatenate(begin)).to(real.images.device)
    made = SyntheticSet(real.images[index], tuple(by_class), config.ipc)

    def model_at(step: int) -> nn.Module:
        seed = torch_seed(config.seed, "client condenses", number, step)
        moved = perturbed(model, config.rho, seed).eval().requires_grad_(False)
        return embedding_model(moved, config.embed_layer)

    match_real(made, real, model_at, settings, BATCH_OF_CLIENT, Augmentation("none"), source)
    return made
