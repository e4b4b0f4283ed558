"""What clients minimise: how a model's answer is read, and the loss of it.

A loss is one of

| given | called | its value |
|---|---|---|
| a name of `LOSSES` | on (outputs, targets) | the mean over the counted elements of a batch |
| a callable on (outputs, targets) | the same | a number, or one for each sample, then their mean |
| a callable on (model, batch), batch = (inputs, targets) | the same | the same |
| `model` | the model, on its inputs and `labels=targets` | the `.loss` it returns |

Which of the two a callable is, its first parameter says: called `model`, `module`, `net` or
`network`, or annotated as an `nn.Module`, it is on (model, batch); otherwise on
(outputs, targets).

A model may return a tensor, a tuple (its first part counts), or an object or a dictionary
with `logits`, as those of Hugging Face do.
"""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fedquilt.common import checks, trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.trees import Tree
from fedquilt.config.choices import LOSSES
from fedquilt.training.state import ModuleState

IGNORED = -100
"""The target that torch leaves out of a mean, unless another is named."""

_MODEL_NAMES = ("model", "module", "net", "network")
_OWN = "custom"

OwnLoss = Callable[[Any, Any], torch.Tensor]
"""A user's loss, on (outputs, targets) or on (model, batch)."""


@dataclass(frozen=True)
class _Named:
    """A named loss: its elements on outputs and targets, and how many a sample counts.

    `elements(outputs, targets, ignored)` has the shape of what is averaged, zero where a
    target is ignored; `counts(targets, ignored)` [N] are the elements that are not.
    """

    elements: Callable[..., torch.Tensor]
    counts: Callable[[torch.Tensor, int], torch.Tensor]
    has_classes: bool = False


def _cross_entropy(
    outputs: torch.Tensor, targets: torch.Tensor, ignored: int, reduction: str = "none"
) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=ignored, reduction=reduction)


def _nll(
    outputs: torch.Tensor, targets: torch.Tensor, ignored: int, reduction: str = "none"
) -> torch.Tensor:
    return functional.nll_loss(outputs, targets, ignore_index=ignored, reduction=reduction)


def _token_cross_entropy(
    outputs: torch.Tensor, targets: torch.Tensor, ignored: int, reduction: str = "none"
) -> torch.Tensor:
    if outputs.shape[:-1] != targets.shape:
        raise InvalidValueError(
            f"outputs of shape {tuple(outputs.shape)} must be scores (batch, tokens, classes) for "
            f"targets of shape {tuple(targets.shape)}"
        )
    # One row a token: torch's loss of [batch, classes, tokens] adds up in any order on a GPU.
    rows, labels = outputs.flatten(0, -2), targets.flatten()
    if reduction == "none":
        return _cross_entropy(rows, labels, ignored, reduction).view_as(targets)
    total = _cross_entropy(rows, labels, ignored, "sum")
    # A batch of padding alone has the loss zero, not 0 / 0.
    return total / (targets != ignored).sum().clamp(min=1) if reduction == "mean" else total


def _next_token(
    outputs: torch.Tensor, targets: torch.Tensor, ignored: int, reduction: str = "none"
) -> torch.Tensor:
    return _token_cross_entropy(outputs[:, :-1], targets[:, 1:], ignored, reduction)


def _on_numbers(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a loss of numbers against numbers of the same shape."""

    def loss(
        outputs: torch.Tensor, targets: torch.Tensor, ignored: int, reduction: str = "none"
    ) -> torch.Tensor:
        ours, theirs = fitted(outputs, targets)
        return function(ours, theirs, reduction=reduction)

    return loss


def fitted(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and targets in one shape and type, or raise.

    One of them may have a last dimension of one that the other has not; torch would
    broadcast the two against each other.
    """
    if outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    elif targets.dim() == outputs.dim() + 1 and targets.shape[-1] == 1:
        targets = targets.squeeze(-1)
    if outputs.shape != targets.shape:
        raise InvalidValueError(
            f"outputs of shape {tuple(outputs.shape)} must have the shape of the targets, "
            f"{tuple(targets.shape)}, for a loss of numbers"
        )
    return outputs, targets.to(outputs.dtype)


def _counted(targets: torch.Tensor, ignored: int) -> torch.Tensor:
    if targets.is_floating_point():  # class probabilities: one element a sample
        return torch.ones(len(targets), dtype=torch.int64, device=targets.device)
    counted = targets != ignored
    return counted.long() if targets.dim() == 1 else counted.flatten(1).sum(1)


def _all_counted(targets: torch.Tensor, ignored: int) -> torch.Tensor:
    each = targets[:1].numel() if len(targets) else 1
    return torch.full((len(targets),), each, dtype=torch.int64, device=targets.device)


_NAMED: dict[str, _Named] = {
    "cross_entropy": _Named(_cross_entropy, _counted, has_classes=True),
    "nll": _Named(_nll, _counted, has_classes=True),
    "token_cross_entropy": _Named(_token_cross_entropy, _counted, has_classes=True),
    "next_token": _Named(
        _next_token, lambda targets, ignored: _counted(targets[:, 1:], ignored), has_classes=True
    ),
    "binary_cross_entropy": _Named(
        _on_numbers(functional.binary_cross_entropy_with_logits), _all_counted
    ),
    "mse": _Named(_on_numbers(functional.mse_loss), _all_counted),
    "mae": _Named(_on_numbers(functional.l1_loss), _all_counted),
    "huber": _Named(_on_numbers(functional.huber_loss), _all_counted),
}


class Objective:
    """A loss, and how a model's answer is read for it.

    Parameters
    ----------
    loss : str or callable
        A name of `LOSSES` (but `auto`), or a callable: see the table above.
    ignore_index : int
        The target that named losses of classes leave out, such as padding.
    shifts : bool
        With `model`: the model asks each place for the next token (`shifts_labels`).
    """

    def __init__(
        self,
        loss: str | OwnLoss = "cross_entropy",
        ignore_index: int = IGNORED,
        shifts: bool = False,
    ) -> None:
        self.loss = loss
        self.shifts = shifts or loss == "next_token"
        """Whether the outputs of a place are for the target of the next one."""
        self.ignore_index = ignore_index
        self.name: str = loss if isinstance(loss, str) else _OWN
        known = [name for name in LOSSES if name != "auto"]
        self._named = None if callable(loss) else _NAMED.get(checks.choice("loss", loss, known))
        self.on_batches = callable(loss) and _is_on_batches(loss)
        self._state = ModuleState(loss) if callable(loss) else None

    def __getstate__(self) -> dict[str, Any]:
        return {"loss": self.loss, "ignore_index": self.ignore_index, "shifts": self.shifts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def begin(self) -> None:
        """Put a user's loss back as it was: no client's data may reach the next one's."""
        if self._state is not None:
            self._state.restore()

    def moved(self) -> list[str]:
        """Return the names of what in a user's loss is not as it was, and put it back."""
        names = [] if self._state is None else self._state.moved()
        self.begin()
        return [f"loss.{name}" for name in names]

    @property
    def opaque(self) -> list[str]:
        """The names of things in a user's loss whose state can neither be seen nor put back."""
        return [] if self._state is None else [f"loss.{name}" for name in self._state.opaque]

    @property
    def has_classes(self) -> bool:
        """Whether targets are classes, of which each has a score."""
        return self._named is not None and self._named.has_classes

    @property
    def is_named(self) -> bool:
        """Whether the loss of every element is known, so that many clients can share a program."""
        return self._named is not None

    def __call__(self, module: nn.Module, inputs: Tree, targets: Tree) -> torch.Tensor:
        """Return the loss of a batch, one number."""
        if self.on_batches:
            value = self.loss(module, (inputs, targets))  # type: ignore[operator]
        elif self._named is not None:
            outputs = outputs_of(trees.call_with(module, inputs))
            return self._named.elements(outputs, targets, self.ignore_index, "mean")
        elif self.loss == "model":
            value = own_loss(trees.call_with(module, inputs, labels=targets))
        else:
            value = self.loss(outputs_of(trees.call_with(module, inputs)), targets)  # type: ignore[operator]
        if not isinstance(value, torch.Tensor):
            raise InvalidValueError(
                f"loss={self.name!r} must return a tensor, got {type(value).__name__}"
            )
        return value if value.dim() == 0 else value.mean()

    def of_samples(self, outputs: torch.Tensor, targets: Tree) -> torch.Tensor:
        """Return, for each sample [N], the sum of its elements' losses.

        A user's loss is asked about one sample at a time, so that none can depend on another.
        """
        if self._named is None:
            each: Callable[..., torch.Tensor] = torch.func.vmap(self._of_one)
            return each(outputs, targets)
        values = self._named.elements(outputs, targets, self.ignore_index)
        return values if values.dim() == 1 else values.flatten(1).sum(1)

    def _of_one(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        one = trees.mapped(target, lambda tensor: tensor[None])
        value: torch.Tensor = self.loss(output[None], one)  # type: ignore[operator]
        return value[0]

    def counts(self, targets: Tree) -> torch.Tensor:
        """Return how many elements of each sample [N] the mean is over."""
        if self._named is None or not isinstance(targets, torch.Tensor):
            first = trees.leaves(targets)[0]
            return torch.ones(len(first), dtype=torch.int64, device=first.device)
        return self._named.counts(targets, self.ignore_index)

    def total(
        self, module: nn.Module, inputs: Tree, targets: Tree
    ) -> tuple[torch.Tensor, torch.Tensor | int, torch.Tensor | None]:
        """Return the loss of a batch as (sum, count), and the model's outputs where it has any."""
        if self._named is not None:
            outputs = outputs_of(trees.call_with(module, inputs))
            value = self._named.elements(outputs, targets, self.ignore_index, "sum")
            return value, self.counts(targets).sum(), outputs
        size = trees.length(targets)
        if self.on_batches or self.loss == "model":
            value = self(module, inputs, targets)
            if self.shifts and isinstance(targets, torch.Tensor):  # a mean over tokens
                size = int((targets[:, 1:] != IGNORED).sum())
                value = value if size else torch.zeros_like(value)
            try:
                return value * size, size, outputs_of(trees.call_with(module, inputs))
            except InvalidValueError:  # a model without scores has none to be measured
                return value * size, size, None
        outputs = outputs_of(trees.call_with(module, inputs))
        value = self.loss(outputs, targets)  # type: ignore[operator]
        return (value if value.dim() == 0 else value.mean()) * size, size, outputs

    def obstacle(self, outputs: torch.Tensor, targets: Tree) -> str | None:
        """Return why many clients cannot share a program under this loss, None when they can.

        Tried on public outputs and targets.
        """
        if self._named is not None:
            return None
        if self.on_batches:
            return "its loss is a callable on (model, batch), which sees the whole batch"
        if self.loss == "model":
            return "its loss is the model's own, one number for the whole batch"
        value = self.loss(outputs, targets)  # type: ignore[operator]
        if not isinstance(value, torch.Tensor) or value.shape != (len(outputs),):
            return (
                "its loss returns one number for a batch; one that returns a number for each "
                "sample, before the mean, can be trained so"
            )
        return None

    def to(self, device: torch.device) -> Objective:
        """Return the objective with the tensors of a loss module on a device."""
        if not isinstance(self.loss, nn.Module):
            return self
        return Objective(copy.deepcopy(self.loss).to(device), self.ignore_index)


CROSS_ENTROPY = Objective()
"""What clients minimise unless somebody says otherwise."""


def _is_on_batches(loss: Callable[..., Any]) -> bool:
    """Tell whether a callable is on (model, batch); raise where it takes no two arguments."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin
        return False
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise InvalidValueError(
            f"loss={loss!r:.60} must take two arguments, (outputs, targets) or (model, batch): "
            f"{error}"
        ) from error
    first = next(iter(signature.parameters.values()))
    kind = first.annotation
    if isinstance(kind, str):
        try:
            kind = typing.get_type_hints(function).get(first.name, kind)
        except (NameError, TypeError):
            kind = nn.Module if kind.split(".")[-1] == "Module" else kind
    is_module = isinstance(kind, type) and issubclass(kind, nn.Module)
    return is_module or first.name in _MODEL_NAMES


def outputs_of(answer: Any) -> torch.Tensor:
    """Return the outputs in what a model returned: a tensor, a tuple's first, or `logits`."""
    if isinstance(answer, torch.Tensor):
        return answer
    if isinstance(answer, Mapping) and "logits" in answer:
        answer = answer["logits"]
    elif getattr(answer, "logits", None) is not None:
        answer = answer.logits
    elif isinstance(answer, tuple | list) and answer:
        answer = answer[0]
    if isinstance(answer, torch.Tensor):
        return answer
    raise InvalidValueError(
        f"the model must return a tensor, a tuple that begins with one, or an object with "
        f"`logits`; it returns {type(answer).__name__} (a model that returns its `loss` alone is "
        "trained with loss='model')"
    )


def own_loss(answer: Any) -> torch.Tensor:
    """Return the loss in what a model returned: `loss`, or a tuple's first number."""
    loss = answer.get("loss") if isinstance(answer, Mapping) else getattr(answer, "loss", None)
    if loss is None and isinstance(answer, tuple | list) and answer:
        loss = answer[0]
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    raise InvalidValueError(
        "loss='model' needs a model that takes `labels` and returns an object with `loss`; it "
        f"returns {type(answer).__name__}"
    )


@torch.no_grad()
def shifts_labels(module: nn.Module, inputs: Tree, targets: Tree) -> bool:
    """Tell whether a model's own loss asks each place for the next token, as causal ones do.

    Tried in one pass on public inputs and made-up labels: the loss is then the mean
    cross-entropy of the scores before the last place and the labels after the first, and not
    that of scores and labels of the same place.
    """
    if not isinstance(targets, torch.Tensor) or targets.dim() != 2 or targets.shape[1] < 2:
        return False
    try:
        scores = outputs_of(trees.call_with(module, inputs))
        if scores.dim() != 3 or scores.shape[:2] != targets.shape or scores.shape[2] < 2:
            return False
        # The next place's best and the first place's worst: the two means lie apart.
        labels = scores.argmax(2).roll(1, 1)
        labels[:, 0] = scores[:, 0].argmin(1)
        answer = trees.call_with(module, inputs, labels=labels)
        scores, loss = outputs_of(answer), own_loss(answer)
    except (IndexError, RuntimeError, TypeError, ValueError):  # then it has no such scores
        return False
    if not isinstance(answer, Mapping) and not hasattr(answer, "logits"):
        return False  # of a tuple the first part is the loss itself
    shifted = _next_token(scores, labels, IGNORED, "mean")
    in_place = _token_cross_entropy(scores, labels, IGNORED, "mean")
    return bool((loss - shifted).abs() < 0.1 * (shifted - in_place).abs())


def auto_loss(outputs: torch.Tensor | None, targets: Tree) -> str:
    """Return the loss that fits a model's outputs and targets; both public in shape and type.

    Whole numbers are classes, real ones are numbers to be met: cross-entropy and squared
    error.  Scores of tokens may have the classes last, as in Hugging Face, or second.
    """
    if outputs is None:
        return "model"
    if not isinstance(targets, torch.Tensor):
        raise InvalidValueError(
            f"loss='auto' needs targets of one tensor, not {type(targets).__name__}: give your own "
            "loss, a callable on (outputs, targets) or (model, batch)"
        )
    if targets.is_floating_point():
        return "mse"
    second = outputs.dim() >= 2 and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape)
    last = targets.dim() >= 2 and tuple(outputs.shape[:-1]) == tuple(targets.shape)
    if second and last:
        raise InvalidValueError(
            f"loss='auto' cannot tell which dimension of outputs {tuple(outputs.shape)} are the "
            "classes: name 'cross_entropy' (the second) or 'token_cross_entropy' (the last)"
        )
    return "token_cross_entropy" if last else "cross_entropy"
