"""Whether a model, a loss and data fit one another, found out before anything is trained.

What is decided for all clients is decided on public samples (`Task.public`): that the model
takes inputs of this form, that the loss takes its outputs, and which whole numbers (token
ids, classes, codes of a table's columns) both take.  Clients' data are then held against that
range: where clients are protected, whoever holds a sample outside of it trains on nothing, and
nobody but the owner is told.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.trees import Tree
from fedquilt.training.hardware import NoCompilerMode
from fedquilt.training.objective import Objective, outputs_of
from fedquilt.training.task import Task, public_inputs

# Above this no bound is looked for: vocabularies are smaller.
_MOST = 2**18
# Above this columns are not tried one by one: a table's codes are fewer.
_MOST_COLUMNS = 512
_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError)


@torch.no_grad()
def trial_outputs(
    module: nn.Module, objective: Objective | None, inputs: Tree, what: str
) -> torch.Tensor | None:
    """Return what a model makes of a few inputs; None where only its loss can be had."""
    was_training = module.training
    module.eval()
    try:
        answer = trees.call_with(module, inputs)
    except _ERRORS as error:
        if objective is not None and (objective.on_batches or objective.loss == "model"):
            return None
        raise InvalidValueError(
            f"the model must take {what} inputs of shape {trees.described(inputs)}; it does not: "
            f"{error}"
        ) from error
    finally:
        module.train(was_training)
    try:
        return outputs_of(answer)
    except InvalidValueError:
        if objective is not None and (objective.on_batches or objective.loss == "model"):
            return None
        raise


@torch.no_grad()
def check_loss(module: nn.Module, objective: Objective, inputs: Tree, targets: Tree) -> None:
    """Raise where the loss cannot be computed of public samples."""
    was_training = module.training
    module.eval()
    try:
        objective(module, inputs, targets)
    except _ERRORS as error:
        raise InvalidValueError(
            f"loss={objective.name!r} cannot be computed for targets of shape "
            f"{trees.described(targets)}: {error}"
        ) from error
    finally:
        module.train(was_training)
        objective.begin()


def num_classes(objective: Objective, outputs: torch.Tensor) -> int:
    """Return how many classes outputs have scores for."""
    last = objective.name in ("token_cross_entropy", "next_token") or outputs.dim() == 1
    return int(outputs.shape[-1 if last else 1])


def warn_of_softmax(objective: Objective, outputs: torch.Tensor | None) -> str | None:
    """Warn of a model that ends in a softmax under a loss that takes logits; return the words."""
    if outputs is None or objective.name not in ("cross_entropy", "token_cross_entropy"):
        return None
    dim = 1 if objective.name == "cross_entropy" else -1
    if outputs.dim() < 2 or outputs.shape[dim] < 2:
        return None
    sums = outputs.sum(dim)
    if not bool((outputs >= 0).all()) or not bool((sums - 1).abs().max() < 1e-4):
        return None
    words = (
        "the model's outputs are probabilities (it ends in a softmax?), and cross-entropy takes "
        "them for logits: it learns slowly; leave the softmax out, or end in log_softmax"
    )
    warnings.warn(words, stacklevel=2)
    return words


@dataclass(frozen=True)
class Range:
    """The whole numbers that a tensor may hold, both ends included; None: no end is known."""

    low: int | None
    high: int | None

    def outside(self, values: torch.Tensor) -> torch.Tensor:
        """Return which values lie outside."""
        bad = torch.zeros_like(values, dtype=torch.bool)
        if self.low is not None:
            bad |= values < self.low
        if self.high is not None:
            bad |= values > self.high
        return bad

    @property
    def is_open(self) -> bool:
        """Whether an end is not known."""
        return self.low is None or self.high is None

    def __str__(self) -> str:
        low = "" if self.low is None else str(self.low)
        return f"{low}..{'' if self.high is None else self.high}"


@dataclass(frozen=True)
class Columns:
    """The ranges of the columns of a sample, or of all its places, in their order."""

    ranges: tuple[Range, ...]
    shape: torch.Size
    """Of a sample."""

    @property
    def is_open(self) -> bool:
        """Whether an end of one is not known."""
        return any(one.is_open for one in self.ranges)

    def outside(self, values: torch.Tensor) -> torch.Tensor:
        """Return which values of samples, or of one, lie outside."""
        least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        lows = [least if one.low is None else one.low for one in self.ranges]
        highs = [most if one.high is None else one.high for one in self.ranges]
        low, high = (
            torch.tensor(ends, device=values.device).view(self.shape) for ends in (lows, highs)
        )
        return (values < low) | (values > high)


def accepted(
    module: nn.Module, task: Task, outputs: torch.Tensor | None
) -> dict[str, Range | Columns]:
    """Return the range of every tensor of whole numbers, by name (`inputs.ids`, `targets`).

    Classes have as many as the model has scores.  Otherwise the range is found by trying
    values on public samples, on a copy of the model on the CPU: a GPU does not survive a
    token id that is out of range.
    """
    objective, found = task.objective, dict[str, Range | Columns]()
    inputs, targets = _on_cpu(public_inputs(task.inputs, 1)), _on_cpu(task.public_targets(1))
    probe = _Probe(module, objective, inputs, targets)
    for name, leaf in trees.named_leaves(task.inputs, "inputs"):
        if _is_whole(leaf):
            found[name] = probe.range_of(name)
    for name, leaf in trees.named_leaves(task.targets, "targets"):
        if not _is_whole(leaf):
            continue
        if objective.has_classes and outputs is not None:
            found[name] = Range(0, num_classes(objective, outputs) - 1)
        elif not objective.is_named:
            found[name] = probe.range_of(name)
    return found


def _is_whole(leaf: torch.Tensor) -> bool:
    return not leaf.is_floating_point() and leaf.dtype != torch.bool


def _on_cpu(tree: Tree) -> Tree:
    moved: Tree = trees.mapped(tree, torch.Tensor.cpu)
    return moved


class _Probe:
    """Tries values in the place of one tensor."""

    def __init__(
        self, module: nn.Module, objective: Objective, inputs: Tree, targets: Tree
    ) -> None:
        self._source = module
        self._module: nn.Module | None = None
        self._objective, self._samples = objective.to(torch.device("cpu")), (inputs, targets)

    def range_of(self, name: str) -> Range | Columns:
        """Return which values the tensor of a name may have.

        One table of rows that all columns are looked up in has one range for them.  Where there
        is none each column is tried by itself, among others that the model takes: an embedding of
        its own has a range of its own.
        """
        base = next((value for value in (0, 1) if self._works(name, value)), None)
        if base is None:
            return Range(None, None)  # nothing can be said: the public value itself fails
        both = self._range(name, base, None)
        leaf = self._leaf(name)
        if leaf.numel() == 1 or both == Range(None, None) or self._looks_up_all(name, both, base):
            return both
        if leaf.numel() > _MOST_COLUMNS:
            return Range(None, None)  # too many to try: a wrong range would be worse than none
        ranges = tuple(self._column(name, base, both, column) for column in range(leaf.numel()))
        return both if set(ranges) == {both} else Columns(ranges, leaf.shape[1:])

    def _column(self, name: str, base: int, both: Range, column: int) -> Range:
        """Return which values a column may have; all of them together have those of `both`."""
        beyond = [] if both.low is None else [both.low - 1]
        beyond += [] if both.high is None else [both.high + 1]
        if not any(self._works(name, value, column, base) for value in beyond):
            return both
        return self._range(name, base, column)

    def _range(self, name: str, base: int, column: int | None) -> Range:
        """Return which values one column may have, or all of them together."""

        def works(value: int) -> bool:
            return self._works(name, value, column, base)

        low: int | None = 0
        if works(-1):
            least = _largest(lambda value: works(-value))
            low = None if least is None else -least
        sizes = {m.num_embeddings for m in self._source.modules() if isinstance(m, nn.Embedding)}
        for size in sorted(sizes):
            if works(size - 1) and not works(size):
                return Range(low, size - 1)
        return Range(low, _largest(works))

    def _looks_up_all(self, name: str, both: Range, base: int) -> bool:
        """Tell whether all columns together are looked up in one table as long as the range."""
        count, seen = self._leaf(name).numel(), _LookUps()
        with seen:
            self._works(name, base)
        return both.high is not None and any(
            indices >= count and rows == both.high + 1 for indices, rows in seen.found
        )

    def _leaf(self, name: str) -> torch.Tensor:
        inputs, targets = self._samples
        named = [*trees.named_leaves(inputs, "inputs"), *trees.named_leaves(targets, "targets")]
        return dict(named)[name]

    @torch.no_grad()
    def _works(self, name: str, value: int, column: int | None = None, base: int = 0) -> bool:
        """Tell whether the model takes a value, in all columns or in one beside `base`."""
        if self._module is None:
            self._module = copy.deepcopy(self._source).cpu().eval()

        def filled(here: str, leaf: torch.Tensor) -> torch.Tensor:
            if here != name:
                return leaf
            if column is None:
                return torch.full_like(leaf, value)
            tried = torch.full_like(leaf, base)
            tried.view(-1)[column] = value
            return tried

        try:
            inputs, targets = (
                trees.mapped_by_name(tree, filled, outer)
                for tree, outer in zip(self._samples, ("inputs", "targets"), strict=True)
            )
            self._objective(self._module, inputs, targets)
        except Exception:  # of the model, or of a type that cannot hold the value
            return False
        return True


class _LookUps(NoCompilerMode):
    """Notes how many numbers are looked up in tables of how many rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call as it is, and note it."""
        parts = [part for arg in args for part in (arg if isinstance(arg, list) else [arg])]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        tables = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1]
        for indices in tensors:
            if _is_whole(indices):
                self.found += [(indices.numel(), len(table)) for table in tables]
        return func(*args, **(kwargs or {}))


def _largest(works: Callable[[int], bool]) -> int | None:
    """Return the largest value that works, by doubling and halving; None: there is no end."""
    good = 1
    while works(2 * good):
        good *= 2
        if good >= _MOST:
            return None
    bad = 2 * good
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if works(middle) else (good, middle)
    return good if good > 1 or works(1) else 0


def outside(
    inputs: Tree, targets: Tree, ranges: dict[str, Range | Columns], ignored: int | None
) -> dict[str, torch.Tensor]:
    """Return, by the name of a tensor, which samples [N] hold a value outside of its range.

    `ignored` is a target that counts for nothing; None: there is none such.
    """
    bad: dict[str, torch.Tensor] = {}
    named = [*trees.named_leaves(inputs, "inputs"), *trees.named_leaves(targets, "targets")]
    for name, leaf in named:
        if name in ranges:
            wrong = _misfits(name, leaf, ranges[name], ignored)
            bad[name] = wrong if wrong.dim() == 1 else wrong.flatten(1).any(1)
    return bad


def _misfits(
    name: str, leaf: torch.Tensor, allowed: Range | Columns, ignored: int | None
) -> torch.Tensor:
    """Return which values of a tensor are outside of its range."""
    wrong = allowed.outside(leaf)
    if ignored is not None and name.startswith("targets"):
        wrong &= leaf != ignored
    return wrong


def refuse_outside(
    inputs: Tree,
    targets: Tree,
    ranges: dict[str, Range | Columns],
    objective: Objective,
    what: str,
    *,
    ignores: bool = True,
) -> None:
    """Raise for the first sample that model or loss cannot take; for data that are nobody's."""
    named = dict([*trees.named_leaves(inputs, "inputs"), *trees.named_leaves(targets, "targets")])
    ignored = objective.ignore_index if ignores else None
    for name, wrong in outside(inputs, targets, ranges, ignored).items():
        if not bool(wrong.any()):
            continue
        first = int(torch.nonzero(wrong)[0])
        values, allowed = named[name][first], ranges[name]
        misfits = allowed.outside(values)
        value = int(values[misfits].flatten()[0])
        if isinstance(allowed, Columns):
            column = int(torch.nonzero(misfits.flatten())[0])
            name, allowed = f"column {column} of {name}", allowed.ranges[column]
        elif name.startswith("targets") and objective.has_classes:
            raise InvalidValueError(_class_words(named[name], value, allowed, what))
        raise InvalidValueError(
            f"{what} sample {first} holds {value} in {name}; the model takes {allowed}"
        )


def _class_words(labels: torch.Tensor, value: int, allowed: Range, what: str) -> str:
    scores = (allowed.high or 0) + 1
    highest = int(labels.max())
    hint = ""
    if value < 0:
        hint = f"; {value} is below 0"
    elif int(labels.min()) == 1 and highest == scores:
        hint = "; labels start at 0, yours at 1"
    return (
        f"the model must return one score for each of {highest + 1} classes of the {what} data; "
        f"it returns {scores}{hint}"
    )


def drop_invalid_clients(
    task: Task, ranges: dict[str, Range | Columns], *, ignores: bool = True
) -> tuple[Task, frozenset[int]]:
    """Return the task in which a client that holds a sample out of range holds nothing, and who.

    `ignores`: the objective's target that counts for nothing is in range.

    Each client's own samples decide for itself alone.  What lies out of range is then put
    inside, though nobody trains on it: a program of many clients is filled up with samples
    of any.
    """
    ignored = task.objective.ignore_index if ignores else None
    bad = outside(task.inputs, task.targets, ranges, ignored)
    wrong = np.zeros(trees.length(task.targets), dtype=bool)
    for part in bad.values():
        wrong |= part.cpu().numpy()
    if not wrong.any():
        return task, frozenset()
    nothing = np.zeros(0, dtype=np.int64)
    left_out = frozenset(c for c, part in enumerate(task.clients) if wrong[part].any())
    clients = [nothing if c in left_out else part for c, part in enumerate(task.clients)]

    def inside(name: str, leaf: torch.Tensor) -> torch.Tensor:
        if name not in ranges:
            return leaf
        return leaf.masked_fill(_misfits(name, leaf, ranges[name], ignored), 0)

    rest = dataclasses.replace(
        task,
        inputs=trees.mapped_by_name(task.inputs, inside, "inputs"),
        targets=trees.mapped_by_name(task.targets, inside, "targets"),
        clients=clients,
    )
    return rest, left_out
