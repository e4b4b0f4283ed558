"""The models of many clients stacked as one program, and the shapes it may run in.

Each client's update must be the same, bit by bit, in every shape of the program.  A kernel
may add up in another order when there are more or fewer rows beside a client's (the clients
still training) or a wider batch (the largest of theirs): how much data other clients hold
would then show in its update.  On a GPU such differences reach a thousandth.  A step
therefore runs in the full shape, [clients of the group, batch size], which is public.

Where nobody is protected a smaller shape does, too, if it gave the very same bits on this device
in a trial of one step on synthetic samples (`ProgramShapes`).  No claim rests on that: kernels
that compute a tensor's last numbers in another way than the rest may agree in one step and differ
by a bit in another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call, vmap

from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.trees import Tree
from fedquilt.training.draws import (
    ClientDraws,
    bits_of,
    draw_keys,
    generator_states,
    hashed_bits,
    own_draws,
    seeded_layers,
)
from fedquilt.training.flat import FlatModel
from fedquilt.training.hardware import NoCompilerMode
from fedquilt.training.objective import outputs_of
from fedquilt.training.optimizers import ClientOptimizer, RuleState
from fedquilt.training.task import ClassMask, Task, public_inputs
from fedquilt.training.trainers.autograd import find_draws
from fedquilt.training.trainers.trial import BFLOAT16, FLOAT32, TF32, disagreement

_GPU_SHARE = 0.4
_CPU_BYTES = 2**28
# Memory is reckoned for batches up to this size, whatever the clients really hold.
_WIDEST = 512
_TRIAL_SHAPE = (4, 16)  # a wider batch than the first trials'


class Batch(NamedTuple):
    """One step of K clients: samples [K, B, ...] and targets [K, B, ...], or trees of such.

    `bits` are what the step's random layers draw from, one [K, B, ...] for each draw;
    `hidden` are rows of the task's class mask, [K, classes].
    """

    inputs: Tree
    targets: Tree
    bits: Sequence[torch.Tensor] = ()
    hidden: torch.Tensor | None = None


class ModelStack:
    """A model that runs with K sets of weights at once."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self.public = task.public()
        self.objective = task.objective
        self.flat = FlatModel(model, self.public.inputs)
        self.state = self.flat.state
        self._first = self.flat.read().clone()
        self.mask: ClassMask | None = task.class_mask
        self.draws = find_draws(self.flat, self.public)
        self.draw_shapes = [] if self.draws is None else list(self.draws.shapes)
        self.reset()
        # Whatever draws in another way than `draws` is an error: see `obstacle`.
        self._forward: Callable[..., torch.Tensor] = vmap(self._one, randomness="error")

    def _one(
        self, weights: list[torch.Tensor], inputs: Tree, bits: list[torch.Tensor]
    ) -> torch.Tensor:
        named = dict(zip(self.flat.names, weights, strict=True))
        if self.draws is not None:
            self.draws.begin(_given(bits))
        arguments, keywords = trees.arguments_of(inputs)
        return outputs_of(functional_call(self.flat.module, named, arguments, keywords))

    def reset(self) -> None:
        """Restore the module, weights too, ready to train."""
        self.flat.write(self._first)
        self.flat.module.train()

    def losses(self, weights: list[torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the loss of each sample, [K, B], under its client's weights.

        The sum over a sample's elements, where it has several.
        """
        count, width = trees.leaves(batch.targets)[0].shape[:2]
        with own_draws(self.draws):
            outputs = self._forward(weights, batch.inputs, list(batch.bits))
        if batch.hidden is not None and self.mask is not None:
            outputs = self.mask.apply(outputs, batch.hidden[:, None, :])
        targets = trees.mapped(batch.targets, lambda tensor: tensor.flatten(0, 1))
        return self.objective.of_samples(outputs.flatten(0, 1), targets).view(count, width)

    def spread(self, vector: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return the vector's tensors, each repeated for `count` clients."""
        return [
            vector[s.start : s.stop]
            .view(1, *s.shape)
            .expand(count, *s.shape)
            .to(parameter.dtype)
            .clone(memory_format=torch.contiguous_format)
            for s, parameter in zip(self.flat.segments, self.flat.parameters, strict=True)
        ]

    def gather(self, weights: list[torch.Tensor], start: torch.Tensor) -> torch.Tensor:
        """Return weights minus `start`, one row a client."""
        count = len(weights[0])
        rows = start.new_empty(count, len(start))
        for segment, tensor in zip(self.flat.segments, weights, strict=True):
            part = slice(segment.start, segment.stop)
            torch.sub(tensor.view(count, -1), start[part], out=rows[:, part])
        return rows

    @property
    def draws_a_sample(self) -> int:
        """How many numbers the random layers draw for one sample."""
        return sum(shape[1:].numel() for shape in self.draw_shapes)

    def bits(self, keys: Sequence[torch.Tensor], width: int) -> list[torch.Tensor]:
        """Return what each draw gives under its keys, [..., 2] -> [..., width, ...]."""
        return [
            hashed_bits(part, width * shape[1:].numel()).view(*part.shape[:-1], width, *shape[1:])
            for part, shape in zip(keys, self.draw_shapes, strict=True)
        ]

    def trial_bits(self, count: int, width: int) -> list[torch.Tensor]:
        """Return the draws of a trial step of `count` clients."""
        random = torch.Generator().manual_seed(0)
        keys = torch.randint(-(2**31), 2**31, (len(self.draw_shapes), count, 2), generator=random)
        return self.bits(list(keys.to(torch.int32).to(self.flat.vector.device)), width)


def _given(bits: list[torch.Tensor]) -> Callable[[int, torch.Size, torch.device], torch.Tensor]:
    """Return draws that were made before the step, for all of its clients."""

    def draw(number: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
        if number >= len(bits) or bits[number].shape[1:] != shape[1:]:
            raise InvalidValueError(
                "engine='batched' cannot train this model: its layers draw other random numbers "
                "than in its first pass; use engine='sequential' or engine='processes'"
            )
        return bits[number]

    return draw


def obstacle(model: nn.Module, task: Task) -> str | None:
    """Return why the model cannot run as a stack, or None when it can.

    What cannot be read off the model is tried, on public samples: one step on two clients
    of two samples.  An error of the model itself, stacked or not, is raised as it is.
    """
    reason = _loss_obstacle(model, task)
    if reason:
        return reason
    stack = ModelStack(model, task)
    if stack.flat.buffer_names:
        moving = ", ".join(stack.flat.buffer_names)
        return f"a training step changes its buffers ({moving}), as BatchNorm does"
    if any(shape[0] != trees.length(stack.public.inputs) for shape in stack.draw_shapes):
        return "a random layer of it draws for something else than the samples of a batch"
    with seeded_layers(stack.public.device, 0):
        if _mixes_samples(stack):
            return "its output for a sample depends on the other samples of the batch"
        before = generator_states()
        try:
            far = _disagreement(stack)
        except _MovesWeightsError:
            return "its forward pass changes its own weights"
        except Exception as error:
            return f"torch.func.vmap cannot run it ({_first_line(error)})"
        if generator_states() != before:
            return "it draws from the generators of Python or NumPy, which all clients would share"
    moved = [*stack.state.moved(), *stack.objective.moved()]
    if moved:
        return f"a forward pass changes {', '.join(moved)}"
    if far:
        return far
    if _looks_up_anything(stack, task.unranged):
        return "it looks up rows of a table by numbers whose range is not known"
    return ProgramShapes(stack).side_effect(*_TRIAL_SHAPE)


@torch.no_grad()
def _loss_obstacle(model: nn.Module, task: Task) -> str | None:
    """Return why clients cannot share a program under the task's loss, or None."""
    objective, public = task.objective, task.public()
    if objective.is_named or objective.on_batches or objective.loss == "model":
        return objective.obstacle(torch.empty(0), public.targets)
    flat = FlatModel(model, public.inputs)
    flat.module.eval()
    return objective.obstacle(
        outputs_of(trees.call_with(flat.module, public.inputs)), public.targets
    )


class _MovesWeightsError(Exception):
    """The stacked weights changed in a forward pass: rows that only fill up would move."""


class _SideEffectError(InvalidValueError):
    """A forward pass of many clients leaves something behind that would reach the next."""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"


@torch.no_grad()
def _mixes_samples(stack: ModelStack) -> bool:
    """Tell whether another second sample changes the first one's output."""
    public = stack.public
    outputs = []
    for change in (lambda tensor: tensor, _other_second):
        stack.reset()
        inputs = trees.mapped(public.inputs, change)
        with seeded_layers(public.device, 0), own_draws(stack.draws):
            _begin(stack.draws)
            outputs.append(outputs_of(trees.call_with(stack.flat.module, inputs))[0])
    return not torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-6, equal_nan=True)


def _other_second(pair: torch.Tensor) -> torch.Tensor:
    """Return two samples, the second one another than it was."""
    first, second = pair[:1], pair[1:]
    return torch.cat([first, 1 - 2 * second if second.is_floating_point() else first])


class _LookUps(NoCompilerMode):
    """Notes which rows of tables are looked up."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default:
            self.rows.append(args[1].tolist())
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _looks_up_anything(stack: ModelStack, unranged: frozenset[str]) -> bool:
    """Tell whether a sample may ask for a row that a table does not have.

    In a stack the row after a client's last one is the next client's first: nothing would fail.
    """

    def other(name: str, leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_floating_point():
            return 1e6 * leaf
        return 1 - leaf if name in unranged else leaf

    found = []
    public = stack.public
    for samples in (public.inputs, trees.mapped_by_name(public.inputs, other, "inputs")):
        stack.reset()
        with seeded_layers(public.device, 0), own_draws(stack.draws), _LookUps() as seen:
            _begin(stack.draws)
            try:
                trees.call_with(stack.flat.module, samples)
            except (IndexError, RuntimeError):
                return True
        found.append(seen.rows)
    return bool(found[0] != found[1])


def _begin(draws: ClientDraws | None) -> None:
    if draws is not None:
        draws.begin(bits_of(0, 0))


def _disagreement(stack: ModelStack) -> str | None:
    """Say how gradients of a stack differ from the model's own, None where they do not."""
    reached: dict[str, set[str]] = {}
    names = stack.flat.names
    types = {parameter.dtype for parameter in stack.flat.parameters}
    unit = TF32 if stack.public.device.type == "cuda" else FLOAT32
    unit = BFLOAT16 if types & {torch.bfloat16, torch.float16} else unit
    weights_type = stack.flat.vector.dtype

    def joined(way: str, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        pairs = list(zip(names, gradients, strict=True))
        reached[way] = {name for name, gradient in pairs if gradient is not None}
        shapes = zip(stack.flat.parameters, gradients, strict=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in shapes]
        return torch.cat([part.detach().flatten().to(weights_type) for part in parts])

    def in_stack(weights: torch.Tensor, inputs: Tree) -> torch.Tensor:
        stack.reset()
        gradients, _ = _trial_step(stack, weights, inputs)
        return joined("in a stack", [g if g is None else g[1] for g in gradients])

    def alone(weights: torch.Tensor, inputs: Tree) -> torch.Tensor:
        stack.reset()
        stack.flat.write(weights)
        with own_draws(stack.draws):
            _begin(stack.draws)
            outputs = outputs_of(trees.call_with(stack.flat.module, inputs))
        loss = stack.objective.of_samples(outputs, stack.public.targets).sum()
        gradients = torch.autograd.grad(loss, stack.flat.parameters, allow_unused=True)
        return joined("alone", gradients)

    start = stack.flat.read().clone()
    far = disagreement(in_stack, alone, start, stack.public.inputs, 2, unit)
    lost = [name for name in names if name in reached["alone"] - reached["in a stack"]]
    if lost:
        return f"torch.func.functional_call does not reach its parameter {lost[0]}"
    return far and f"its gradients in a stack are {far}"


def _trial_step(
    stack: ModelStack, vector: torch.Tensor, samples: Tree
) -> tuple[tuple[torch.Tensor | None, ...], int]:
    """Return the gradients of one step on 2 x 2 samples, and the bytes it kept a sample."""
    weights = [tensor.requires_grad_() for tensor in stack.spread(vector, 2)]
    known = {tensor.untyped_storage().data_ptr() for tensor in weights}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs, targets = (
        trees.mapped(part, lambda tensor: torch.stack([tensor] * 2))
        for part in (samples, stack.public.targets)
    )
    keys = [torch.from_numpy(draw_keys(0, 0, n)) for n in range(len(stack.draw_shapes))]
    batch = Batch(inputs, targets, stack.bits([k.to(vector.device).expand(2, 2) for k in keys], 2))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = stack.losses(weights, batch).sum()
    start = stack.spread(vector, 2)
    if not all(torch.equal(one, other) for one, other in zip(weights, start, strict=True)):
        raise _MovesWeightsError
    return torch.autograd.grad(loss, weights, allow_unused=True), sum(kept.values()) // 4


def group_size(stack: ModelStack, batch_size: int, copies: int = 4) -> int:
    """Return how many clients fit into the memory that a group may take.

    A client holds its weights, their gradient, its update and one tensor of
    scratch (`copies`; an optimiser with a state holds more), and for each sample of a
    batch what the forward pass keeps and the gradients with respect to it.  What
    clients really hold does not enter.
    """
    with seeded_layers(stack.public.device, 0):
        _, sample_bytes = _trial_step(stack, stack.flat.vector, stack.public.inputs)
    vector = stack.flat.vector
    widest = min(batch_size, _WIDEST)
    client_bytes = copies * vector.numel() * vector.element_size() + 2 * sample_bytes * widest
    return clients_that_fit(client_bytes, vector.device)


def clients_that_fit(client_bytes: int, device: torch.device) -> int:
    """Return how many clients of so many bytes a group may have."""
    return max(1, _memory(device) // client_bytes)


def _memory(device: torch.device) -> int:
    """Return the bytes a group may take: a share of a GPU, a fixed amount on a CPU."""
    if device.type != "cuda":
        return _CPU_BYTES
    return int(_GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)


_FEWEST_ROWS = 4
_NARROWEST = 4
_BIT_TYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ProgramShapes:
    """The shapes in which a stack of models was seen to compute alike."""

    def __init__(self, stack: ModelStack, optimizer: ClientOptimizer | None = None) -> None:
        self._stack = stack
        # Plain steps compute number by number; what other rules make of gradients is compared.
        self._optimizer = None if optimizer is None or optimizer.is_plain else optimizer
        self._prints: dict[tuple[int, int, int, int, int, bool], torch.Tensor] = {}
        self._fits: dict[tuple[int, int, int, int], tuple[int, int]] = {}

    def fit(self, active: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """Return the smallest shape that holds active x width and computes as the full one.

        The full shape is rows x columns.
        """
        key = (active, width, rows, columns)
        if key not in self._fits:
            alike = (
                shape
                for shape in smaller_shapes(active, width, rows, columns)
                if self._is_alike(shape, rows, columns)
            )
            self._fits[key] = next(alike, (rows, columns))
        return self._fits[key]

    def rows_are_alike(self, rows: int, columns: int) -> bool:
        """Tell whether a client's update is the same in every row of the full shape."""
        upright = self._print(rows, columns, rows, columns, columns)
        turned = self._print(rows, columns, rows, columns, columns, turned=True)
        return torch.equal(upright.flip(0), turned)

    def _is_alike(self, shape: tuple[int, int], rows: int, columns: int) -> bool:
        count, width = shape
        full = self._print(rows, columns, rows, columns, width)
        return torch.equal(full[:count], self._print(count, width, rows, columns, width))

    def _print(
        self, count: int, width: int, rows: int, columns: int, longest: int, turned: bool = False
    ) -> torch.Tensor:
        """Return a fingerprint of what each of the first `count` clients computes."""
        key = (count, width, rows, columns, longest, turned)
        if key not in self._prints:
            self._prints[key] = self._compute(*key)
        return self._prints[key]

    def side_effect(self, rows: int, columns: int) -> str | None:
        """Return what a forward pass in this shape leaves behind, None where it is nothing."""
        try:
            self._print(rows, columns, rows, columns, columns)
        except _SideEffectError as error:
            return str(error)
        return None

    def _refuse_side_effects(
        self, leaves: list[torch.Tensor], states: str, values: list[torch.Tensor]
    ) -> None:
        """Refuse a forward pass that leaves something behind in a program of this shape."""
        what = ", ".join(self._stack.state.moved())
        if generator_states() != states:
            what = "the generators of Python or NumPy"
        if not all(torch.equal(a, b) for a, b in zip(leaves, values, strict=True)):
            what = "its own weights"
        if what:
            raise _SideEffectError(f"a forward pass changes {what}")

    def _compute(
        self, count: int, width: int, rows: int, columns: int, longest: int, turned: bool
    ) -> torch.Tensor:
        """Run one step of made-up clients, whose batches hold 1 to `longest` samples."""
        stack = self._stack
        device = stack.flat.vector.device
        random = torch.Generator().manual_seed(rows)
        lengths = torch.randint(1, longest + 1, (rows, 1), generator=random)
        shares = (torch.arange(columns) < lengths) / lengths
        inputs, targets = (
            trees.mapped(part, lambda tensor: tensor.view(rows, columns, *tensor.shape[1:]))
            for part in (
                public_inputs(stack.public.inputs, rows * columns, seed=columns),
                stack.public.public_targets(rows * columns),
            )
        )
        weights = [
            tensor + torch.randn(tensor.shape, generator=random).to(tensor)
            for tensor in stack.spread(stack.flat.vector, rows)
        ]
        bits = stack.trial_bits(rows, columns)
        order = torch.arange(rows).flip(0) if turned else torch.arange(rows)
        order = order[:count].to(device)
        leaves = [tensor[order].requires_grad_() for tensor in weights]
        batch = Batch(
            trees.mapped(inputs, lambda tensor: tensor[order, :width]),
            trees.mapped(targets, lambda tensor: tensor[order, :width]),
            [part[order, :width] for part in bits],
        )
        stack.reset()
        with seeded_layers(device, 0):  # a trial must not use up what training draws
            before = generator_states(), [leaf.detach().clone() for leaf in leaves]
            losses = stack.losses(leaves, batch)
            self._refuse_side_effects(leaves, *before)
        losses = losses * shares.to(device)[order, :width]
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        marks = [losses.detach().sum(1), *(g for g in gradients if g is not None)]
        return bits_of_rows([*marks, *self._steps(leaves, gradients)])

    def _steps(
        self, leaves: list[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Return the weights after two steps of a rule that is not plain."""
        if self._optimizer is None:
            return []
        weights = [leaf.detach().clone() for leaf in leaves]
        state = RuleState(self._optimizer, weights, stacked=True)
        for _ in range(2):
            state.step(weights, gradients, None, 0.1, 0.0)
        return weights


@torch.no_grad()
def bits_of_rows(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return one number for each row and tensor that follows from all of the row's bits."""
    columns = []
    for tensor in tensors:
        bits = tensor.reshape(len(tensor), -1).contiguous().view(_BIT_TYPES[tensor.element_size()])
        odd = torch.arange(bits.shape[1], device=bits.device) * 0x9E3779B1 | 1
        columns.append((bits.to(torch.int64) * odd).sum(1))
    return torch.stack(columns, 1)


def smaller_shapes(active: int, width: int, rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield shapes below rows x columns that hold active x width, small ones first.

    Rows in steps of an eighth, widths in halves: few enough to be tried, and little waste.
    """
    widths = [columns]
    while widths[-1] // 2 >= max(width, _NARROWEST):
        widths.append(widths[-1] // 2)
    for narrow in reversed(widths):
        for count in _row_steps(active, rows):
            if (count, narrow) != (rows, columns):
                yield count, narrow


def _row_steps(active: int, rows: int) -> Iterator[int]:
    count = max(active, min(_FEWEST_ROWS, rows))
    while count < rows:
        step = max(1, 2 ** (count.bit_length() - 4))
        count = -(-count // step) * step
        if count < rows:
            yield count
        count += step
    yield rows
