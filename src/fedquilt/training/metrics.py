"""What is measured on test data: metrics by name or by a callable, batch after batch.

| name | of outputs and targets |
|---|---|
| accuracy | share of classes, or of labels of a multi-label target, that are right |
| top5 (any k) | share of samples whose class is among the k best scores |
| auroc | area under the ROC curve; of several classes the mean, each against the rest |
| f1 | F1 of class 1 of two; the mean over classes, or over labels, where there are several |
| mse, mae | mean squared, mean absolute error |
| perplexity | exp of the mean cross-entropy of a token |

Outputs are logits: classes stand in the last dimension where targets have one dimension less,
or in the second as torch has them for images; outputs in the targets' own shape are those of
yes-or-no labels, yes above zero.  Targets with the ignored index do not count.

A metric that cannot be told, such as the AUROC of a single class, is NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from fedquilt.common import checks, trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.trees import Tree
from fedquilt.config.choices import METRICS
from fedquilt.training.draws import seeded_layers
from fedquilt.training.objective import CROSS_ENTROPY, IGNORED, Objective, fitted
from fedquilt.training.state import ModuleState

OwnMetric = Callable[[Any, Any], float]
"""A user's metric on all (outputs, targets) of the test data, on the CPU."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = ("loss",)


class Metric(Protocol):
    """A measurement that takes in one batch after the other."""

    def update(self, outputs: torch.Tensor, targets: Tree) -> None:
        """Take in a batch."""

    def result(self) -> float:
        """Return the value over all batches."""


MakeMetric = Callable[[int], Metric]
"""Makes a metric that has seen nothing, from the ignored index."""


class _Mean:
    """A sum over a count, kept on the device until it is asked for."""

    def __init__(self, ignored: int = IGNORED) -> None:
        self.ignored = ignored
        self._sum: torch.Tensor | int = 0
        self._count: torch.Tensor | int = 0

    def add(self, value: torch.Tensor, count: torch.Tensor | int) -> None:
        self._sum, self._count = self._sum + value, self._count + count

    def result(self) -> float:
        count = int(self._count)
        return float(self._sum) / count if count else math.nan


def by_class(
    outputs: torch.Tensor, targets: Tree, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [M, classes] and classes [M] of the counted elements; one column: yes or no.

    Raises where outputs are not scores of the targets' classes.
    """
    if not isinstance(targets, torch.Tensor):
        raise InvalidValueError("a metric by name needs targets of one tensor: give a callable")
    shape = tuple(targets.shape)
    if outputs.dim() == targets.dim() + 1 and tuple(outputs.shape[:-1]) == shape:
        scores = outputs
    elif (
        outputs.dim() == targets.dim() + 1
        and outputs.shape[0] == shape[0]
        and (tuple(outputs.shape[2:]) == shape[1:])
    ):
        scores = outputs.movedim(1, -1)
    else:
        scores, targets = (part.unsqueeze(-1) for part in fitted(outputs, targets))
        targets = targets.squeeze(-1)
    labels = targets.long().flatten()
    scores = scores.reshape(len(labels), -1)
    counted = labels != ignored
    return scores[counted], labels[counted]


class Accuracy(_Mean):
    """The share of right answers."""

    def update(self, outputs: torch.Tensor, targets: Tree) -> None:
        """Take in a batch."""
        plain = outputs.dim() == 2 and outputs.shape[1] > 1
        if plain and isinstance(targets, torch.Tensor) and targets.dim() == 1:  # without copies
            counted = targets != self.ignored
            right = (outputs.argmax(dim=1) == targets) & counted
            self.add(right.sum(), counted.sum())
            return
        scores, labels = by_class(outputs, targets, self.ignored)
        guesses = scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).long()
        self.add((guesses == labels).sum(), len(labels))


class TopK(_Mean):
    """The share of samples whose class is among the k best scores."""

    def __init__(self, k: int, ignored: int = IGNORED) -> None:
        super().__init__(ignored)
        self._k = k

    def update(self, outputs: torch.Tensor, targets: Tree) -> None:
        """Take in a batch."""
        scores, labels = by_class(outputs, targets, self.ignored)
        best = scores.topk(min(self._k, scores.shape[1]), dim=1).indices
        self.add((best == labels[:, None]).any(1).sum(), len(labels))


class SquaredError(_Mean):
    """The mean squared error."""

    def update(self, outputs: torch.Tensor, targets: Tree) -> None:
        """Take in a batch."""
        apart = _apart(outputs, targets)
        self.add(apart.square().sum(), apart.numel())


class AbsoluteError(_Mean):
    """The mean absolute error."""

    def update(self, outputs: torch.Tensor, targets: Tree) -> None:
        """Take in a batch."""
        apart = _apart(outputs, targets)
        self.add(apart.abs().sum(), apart.numel())


def _apart(outputs: torch.Tensor, targets: Tree) -> torch.Tensor:
    if not isinstance(targets, torch.Tensor):
        raise InvalidValueError("a metric by name needs targets of one tensor: give a callable")
    ours, theirs = fitted(outputs, targets)
    return ours.double() - theirs.double()


class Perplexity(_Mean):
    """exp of the mean cross-entropy of a counted token."""

    def __init__(self, ignored: int = IGNORED, *, shifted: bool = False) -> None:
        super().__init__(ignored)
        self._shifted = shifted

    def update(self, outputs: torch.Tensor, targets: Tree) -> None:
        """Take in a batch."""
        if self._shifted and isinstance(targets, torch.Tensor):
            outputs, targets = outputs[:, :-1], targets[:, 1:]
        scores, labels = by_class(outputs, targets, self.ignored)
        self.add(functional.cross_entropy(scores.double(), labels, reduction="sum"), len(labels))

    def result(self) -> float:
        """Return the value over all batches."""
        mean = super().result()
        return math.exp(mean) if mean < 700 else math.inf if not math.isnan(mean) else math.nan


class F1:
    """The harmonic mean of precision and recall, 2 TP / (2 TP + FP + FN).

    Of class 1 where there are two; the mean over classes that occur or are guessed, or over
    the labels of a multi-label target, where there are several.
    """

    def __init__(self, ignored: int = IGNORED) -> None:
        self._ignored = ignored
        self._table: torch.Tensor | None = None
        self._is_binary = False

    def update(self, outputs: torch.Tensor, targets: Tree) -> None:
        """Take in a batch."""
        if _is_multi_label(outputs, targets):
            ours, theirs = fitted(outputs, targets)  # type: ignore[arg-type]
            yes, true = ours > 0, theirs > 0.5
            counts = [(yes & true).sum(0), (yes & ~true).sum(0), (~yes & true).sum(0)]
            self._add(torch.stack(counts))
            return
        scores, labels = by_class(outputs, targets, self._ignored)
        self._is_binary = scores.shape[1] <= 2
        classes = max(2, scores.shape[1])
        guesses = scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).long()
        right = torch.bincount(labels[guesses == labels], minlength=classes)
        guessed = torch.bincount(guesses, minlength=classes)
        there = torch.bincount(labels, minlength=classes)
        self._add(torch.stack([right, guessed - right, there - right]))

    def _add(self, counts: torch.Tensor) -> None:
        self._table = counts if self._table is None else self._table + counts

    def result(self) -> float:
        """Return the value over all batches."""
        if self._table is None:
            return math.nan
        right, wrong, missed = self._table.double().cpu()
        whole = 2 * right + wrong + missed
        values = torch.where(whole > 0, 2 * right / whole.clamp(min=1), 0.0)
        if self._is_binary:
            return float(values[1])
        there = whole > 0
        return float(values[there].mean()) if bool(there.any()) else math.nan


class Auroc:
    """The area under the ROC curve: how often a positive scores above a negative, ties half.

        AUROC = (R - n (n + 1) / 2) / (n m)

    R is the sum of the mid-ranks of the n positives among n + m scores (Mann and Whitney
    1947).  Several classes: the mean over each against the rest, of the classes that have
    both; scores are then class probabilities.
    """

    def __init__(self, ignored: int = IGNORED) -> None:
        self._ignored = ignored
        self._scores: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []

    def update(self, outputs: torch.Tensor, targets: Tree) -> None:
        """Take in a batch."""
        if _is_multi_label(outputs, targets):
            scores, labels = fitted(outputs, targets)  # type: ignore[arg-type]
            labels = labels > 0.5
        else:
            scores, classes = by_class(outputs, targets, self._ignored)
            if scores.shape[1] == 1:
                labels = classes[:, None] > 0
            else:
                scores = scores.double().softmax(1)
                labels = functional.one_hot(classes, scores.shape[1]).bool()
        self._scores.append(scores.double().cpu())
        self._labels.append(labels.cpu())

    def result(self) -> float:
        """Return the value over all batches."""
        if not self._scores:
            return math.nan
        scores, labels = torch.cat(self._scores), torch.cat(self._labels)
        if scores.shape[1] == 2 and bool((labels.sum(1) == 1).all()):
            scores, labels = scores[:, 1:], labels[:, 1:]  # two classes: one against the other
        areas = [_area(scores[:, k], labels[:, k]) for k in range(scores.shape[1])]
        known = [area for area in areas if not math.isnan(area)]
        return sum(known) / len(known) if known else math.nan


def _area(scores: torch.Tensor, labels: torch.Tensor) -> float:
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives or bool(scores.isnan().any()):
        return math.nan
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts - 1) / 2)[places]
    above = float(ranks[labels].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def _is_multi_label(outputs: torch.Tensor, targets: Tree) -> bool:
    """Tell whether each sample has several yes-or-no targets."""
    return (
        isinstance(targets, torch.Tensor)
        and targets.dim() == 2
        and outputs.shape == targets.shape
        and targets.shape[1] > 1
    )


class Whole:
    """A user's metric: it sees all outputs and targets at once."""

    def __init__(self, function: OwnMetric) -> None:
        self._function = function
        self._outputs: list[torch.Tensor] = []
        self._targets: list[Tree] = []

    def update(self, outputs: torch.Tensor, targets: Tree) -> None:
        """Take in a batch."""
        self._outputs.append(outputs.detach().cpu())
        self._targets.append(trees.mapped(targets, torch.Tensor.cpu))

    def result(self) -> float:
        """Return the value over all batches."""
        if not self._outputs:
            return math.nan
        return float(self._function(torch.cat(self._outputs), trees.concatenated(self._targets)))


_KINDS: dict[str, MakeMetric] = {
    "accuracy": Accuracy,
    "auroc": Auroc,
    "f1": F1,
    "mse": SquaredError,
    "mae": AbsoluteError,
    "perplexity": Perplexity,
}


def make_metrics(
    wanted: str | Sequence[str | OwnMetric] | Mapping[str, str | OwnMetric] | OwnMetric,
    objective: Objective,
    outputs: torch.Tensor | None = None,
    targets: Tree | None = None,
) -> dict[str, MakeMetric]:
    """Return the metrics of a run by name; the first is the headline.

    Parameters
    ----------
    wanted : str, callable, sequence or mapping
        Names joined by commas, `auto`, callables, or a mapping from your names to them.
    objective : Objective
        Decides what `auto` is.
    outputs, targets : tensor, optional
        Public outputs of the model and targets: their form decides where the loss does not.
    """
    if isinstance(wanted, str):
        names = [part.strip() for part in wanted.split(",") if part.strip()]
        wanted = _automatic(objective, outputs, targets) if names == ["auto"] else names
    if callable(wanted):
        wanted = [wanted]
    items = wanted.items() if isinstance(wanted, Mapping) else ((None, one) for one in wanted)
    made: dict[str, MakeMetric] = {}
    for given, one in items:
        own = one if isinstance(one, str) else getattr(one, "__name__", "metric")
        name = _checked_name(str(given or own))
        made[name] = _make(one, objective)
    return made


def refuse_metrics_of_classes(metrics: Mapping[str, MakeMetric], targets: Tree) -> None:
    """Refuse accuracy, AUROC and F1 where a target is one number between two whole ones."""
    single = isinstance(targets, torch.Tensor) and targets.numel() == len(targets)
    wrong = [name for name, make in metrics.items() if make in (Accuracy, Auroc, F1)]
    if single and wrong and bool((targets != targets.round()).any()):  # type: ignore[union-attr]
        raise InvalidValueError(
            f"metrics: {wrong[0]!r} is of classes, and the test targets are real numbers: take "
            "'mse', 'mae' or a callable"
        )


def _automatic(
    objective: Objective, outputs: torch.Tensor | None, targets: Tree | None
) -> list[str]:
    """Return what is measured where nobody said: accuracy of classes, else the error."""
    if objective.is_named:
        usual = {"next_token": "perplexity", "mse": "mse", "mae": "mae", "huber": "mse"}
        return [usual.get(objective.name, "accuracy")]
    classes = isinstance(targets, torch.Tensor) and targets.dtype == torch.int64
    scores = outputs is not None and isinstance(targets, torch.Tensor)
    fits = scores and outputs is not None and outputs.dim() == 2 and targets.dim() == 1  # type: ignore[union-attr]
    return ["accuracy"] if classes and fits else []


def _make(one: str | OwnMetric, objective: Objective) -> MakeMetric:
    if isinstance(one, str):
        kind = _named(one)
        if one == "perplexity" and objective.shifts:
            return lambda ignored: Perplexity(ignored, shifted=True)
        if objective.shifts:
            return lambda ignored: _Shifted(kind(ignored))
        return kind
    if not callable(one):
        raise InvalidValueError(f"metrics: {one!r:.60} must be a name or a callable")
    function, state = one, ModuleState(one)

    def make(ignored: int) -> Metric:
        state.restore()  # clients measure with it in turn
        return Whole(function)

    return make


class _Shifted:
    """A metric of each token's guess of the next one."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self.result = metric.result

    def update(self, outputs: torch.Tensor, targets: Tree) -> None:
        """Take in a batch."""
        assert isinstance(targets, torch.Tensor)
        self._metric.update(outputs[:, :-1], targets[:, 1:])


def _named(name: str) -> MakeMetric:
    best = re.fullmatch(r"top_?(\d+)", name)
    if best:
        k = checks.integer("metrics: k of top<k>", int(best[1]), at_least=1)
        return lambda ignored: TopK(k, ignored)
    if name not in _KINDS:
        raise InvalidValueError(
            f"metrics={name!r} must be one of {', '.join(map(repr, METRICS))}"
            f"{checks.did_you_mean(name, _KINDS)}"
        )
    return _KINDS[name]


def _checked_name(name: str) -> str:
    plain = name.lower().replace("<lambda>", "metric").replace("-", "_").replace(" ", "_")
    if not _NAME.fullmatch(plain) or plain in _RESERVED:
        raise InvalidValueError(
            f"metrics: the name {name!r} must be small letters, digits and '_', and not 'loss'"
        )
    return plain


@torch.no_grad()
def measure(
    module: nn.Module,
    objective: Objective,
    metrics: Mapping[str, MakeMetric],
    inputs: Tree,
    targets: Tree,
    batch_size: int = 1024,
) -> dict[str, float]:
    """Return each metric and the mean loss, with the model in evaluation mode.

    What model and metrics draw is the same in every evaluation: how much one client's has drawn
    must not show in what is measured next.
    """
    with seeded_layers(trees.device_of(inputs), 0):
        return _measured(module, objective, metrics, inputs, targets, batch_size)


def _measured(
    module: nn.Module,
    objective: Objective,
    metrics: Mapping[str, MakeMetric],
    inputs: Tree,
    targets: Tree,
    batch_size: int,
) -> dict[str, float]:
    was_training = module.training
    module.eval()
    device = trees.device_of(inputs)
    made = {name: make(objective.ignore_index) for name, make in metrics.items()}
    loss = torch.zeros((), dtype=torch.float64, device=device)
    count: torch.Tensor | int = 0
    batches = zip(trees.split(inputs, batch_size), trees.split(targets, batch_size), strict=True)
    objective.begin()
    for batch, wanted in batches:
        value, size, outputs = objective.total(module, batch, wanted)
        loss += value
        count = count + size
        for metric in made.values():
            if outputs is not None:
                metric.update(outputs, wanted)
    module.train(was_training)
    measured = {name: metric.result() for name, metric in made.items()}
    seen = int(count)
    return {**measured, "loss": float(loss) / seen if seen else math.nan}


def evaluate(
    module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, batch_size: int = 1024
) -> tuple[float, float]:
    """Return (accuracy, mean cross-entropy), with the model in evaluation mode."""
    metrics = {"accuracy": Accuracy}
    measured = measure(module, CROSS_ENTROPY, metrics, inputs, targets, batch_size)
    return measured["accuracy"], measured["loss"]
