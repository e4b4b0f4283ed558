"""One client after the other on a GPU, each step replayed as a CUDA graph.

A step of a network with hundreds of small kernels costs the host more than the GPU: every kernel
is launched from Python.  Forward pass, loss, backward pass and the optimiser's step are therefore
captured once and replayed for every full batch.  This is for models that no stack of clients can
run (BatchNorm); a client's update depends on its own samples only, as with autograd.

A replay does what was captured, on the same memory, and runs no Python.  So
- samples and targets are copied into buffers of fixed place before it;
- what changes from step to step, such as the bias correction of Adam, is a tensor (`RecordedRule`);
- a loss that decides anew in every step is captured once a decision (`StepLoss`);
- a model that draws random numbers, or changes anything else than tensors that travel, is not
  captured.
The last batch of an epoch, where it is smaller, takes the same step without a graph.
Convolutions add up in a fixed order (cuDNN's deterministic algorithms).

Whether steps are captured is decided before the first client, from the settings, the model and a
trial on public samples against autograd.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fedquilt.common import trees
from fedquilt.common.trees import Tree
from fedquilt.training.draws import seeded_layers
from fedquilt.training.flat import FlatModel
from fedquilt.training.objective import Objective
from fedquilt.training.optimizers import ClientOptimizer, RuleState
from fedquilt.training.state import ModuleState
from fedquilt.training.task import LocalSettings, Loss, LossOf, StepLoss, Task, public_inputs
from fedquilt.training.trainers import NEVER_SILENT
from fedquilt.training.trainers.autograd import (
    AutogradTrainer,
    local_batches,
    parameter_views,
    repeatable,
    train_client,
)
from fedquilt.training.trainers.trial import FLOAT32, TF32, disagreement

_log = logging.getLogger(__name__)

_LARGEST_BATCH = 1 << 14
# A model, its gradient and its moments stay in place as long as the engine does.
_COPIES, _MEMORY_SHARE = 5, 0.05
_GRAPHS = 8  # of different decisions of a loss
_WARM_UP = 3
_TRIAL_EPOCHS = 2
_TRIAL_RATE = 0.01


class Recorder(Protocol):
    """Records what a function does to tensors; the function has run before, to warm up."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return what does it again."""


class CannotCaptureError(Exception):
    """The steps of a model cannot be captured; the message says why."""


class CapturedTrainer(AutogradTrainer):
    """Trains one client after the other by captured steps, by autograd where they cannot be."""

    name = "captured"

    def __init__(
        self,
        model: nn.Module | FlatModel,
        task: Task,
        settings: LocalSettings,
        loss_of: LossOf | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model, task, settings, loss_of)
        self.captured: CapturedTraining | None = None
        recorder = recorder or CudaRecorder(task.device)
        try:
            refuse_uncapturable(self.flat, task, settings, self.draws is not None)
            self.captured = self._tried(recorder)
        except CannotCaptureError as error:
            _log.info("clients train without a CUDA graph: %s", error)
        finally:
            self.restore()

    def _tried(self, recorder: Recorder) -> CapturedTraining:
        """Return the captured steps, by the first layout of images that computes what it should."""
        pictures = any(t.dim() == 4 and t.is_floating_point() for t in self._input_leaves)
        for channels_last in (True, False) if pictures else (False,):
            made = CapturedTraining(self.flat, self.task, self.settings, recorder, channels_last)
            obstacle = self._disagreement(made)
            if obstacle is None:
                _log.info("clients train by CUDA graphs, channels last: %s", channels_last)
                return made
        raise CannotCaptureError(obstacle)

    @property
    def _input_leaves(self) -> list[torch.Tensor]:
        return trees.leaves(self.task.inputs)

    def _disagreement(self, made: CapturedTraining) -> str | None:
        """Return how captured steps differ from autograd's on public samples, None if they do not.

        Whatever the attempt raises is an answer too: many operations cannot be captured.
        """
        flat, public, size = self.flat, self.task.public(), self.settings.batch_size
        how = dataclasses.replace(self.settings, epochs=_TRIAL_EPOCHS)
        targets = self.task.public_targets(size)
        index = torch.arange(size, device=public.device)
        start = flat.read().clone()

        def captured(weights: torch.Tensor, inputs: Tree) -> torch.Tensor:
            made.train(weights, inputs, targets, index, _TRIAL_RATE, how, 0, self._public_loss())
            return flat.read() - weights

        def autograd(weights: torch.Tensor, inputs: Tree) -> torch.Tensor:
            loss = self._public_loss()
            train_client(flat, weights, inputs, targets, index, _TRIAL_RATE, how, 0, loss)
            return flat.read() - weights

        unit = TF32 if public.device.type == "cuda" else FLOAT32
        try:
            far = disagreement(captured, autograd, start, public.inputs, size, unit)
        except NEVER_SILENT:
            raise
        except Exception as error:  # whatever capturing a user's code may raise
            first = str(error).strip().split("\n")[0]
            return f"a step cannot be captured ({type(error).__name__}: {first})"
        finally:
            flat.write(start)
        return far and f"its captured steps are {far}"

    def _public_loss(self) -> Loss:
        """Return the loss of a client, with hidden classes that are nobody's."""
        loss = self._loss_of(0, 0)
        if self._hidden is not None:
            self._hidden.fill_(False)
            self._hidden[1:2] = True
        return loss

    def _train(
        self, start: torch.Tensor, index: torch.Tensor, learning_rate: float, seed: int, loss: Loss
    ) -> float:
        if self.captured is None:
            return super()._train(start, index, learning_rate, seed, loss)
        inputs, targets = self.task.inputs, self.task.targets
        return self.captured.train(
            start, inputs, targets, index, learning_rate, self.settings, seed, loss
        )


def refuse_uncapturable(flat: FlatModel, task: Task, settings: LocalSettings, draws: bool) -> None:
    """Raise where a replay would not do what a step does; tried on public samples."""
    if settings.optimizer.factory is not None:
        raise CannotCaptureError("the optimizer is not one of the named ones")
    if settings.batch_size > _LARGEST_BATCH:
        raise CannotCaptureError(f"batches of {settings.batch_size} are above {_LARGEST_BATCH}")
    needed = _COPIES * flat.vector.numel() * flat.vector.element_size()
    if needed > _MEMORY_SHARE * _memory(task.device):
        raise CannotCaptureError(f"a step would keep {needed / 2**30:.1f} GiB")
    if draws:
        raise CannotCaptureError("layers of the model draw random numbers")
    moved = _moved_by_a_step(flat, task)
    if moved:
        raise CannotCaptureError(f"a step changes {', '.join(moved)}")


def _memory(device: torch.device) -> float:
    if device.type != "cuda":
        return math.inf
    return float(torch.cuda.get_device_properties(device).total_memory)


def _moved_by_a_step(flat: FlatModel, task: Task) -> list[str]:
    """Return what a forward and backward pass changes beside the tensors that travel."""
    public = task.public()
    flat.restore()
    flat.module.train()
    buffers = [flat.module.get_buffer(name) for name in flat.buffer_names]
    state = ModuleState(flat.module, [*flat.parameters, *buffers])
    before = flat.read().clone()
    with seeded_layers(public.device, 0):
        generators = _generator_states(public.device)
        loss = public.objective(flat.module, public.inputs, public.targets)
        torch.autograd.grad(loss, flat.parameters, allow_unused=True)
        drew = _generator_states(public.device) != generators
    moved = [*state.moved(), *public.objective.moved()]
    flat.write(before)
    return [*moved, *(["random generators"] if drew else [])]


def _generator_states(device: torch.device) -> tuple[str | bytes, ...]:
    """Return where the generators stand that a layer may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    numbers = repr((random.getstate(), np.random.get_state()))
    return (numbers, *(state.numpy().tobytes() for state in states))


class CudaRecorder:
    """Captures CUDA graphs, which share one pool of memory: they are replayed in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run the function a few times, on a side stream, and capture it."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                function()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use other devices meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            function()
        self._pool = graph.pool()
        return graph.replay


class CapturedTraining:
    """The local steps of one model on batches of one size.

    Parameters
    ----------
    flat, task, settings
        As of any engine; of the task only shapes are read here.
    recorder : Recorder
        How a step is captured.
    channels_last : bool
        Whether images lie with their channels last, for which a GPU's convolutions are made.
    """

    def __init__(
        self,
        flat: FlatModel,
        task: Task,
        settings: LocalSettings,
        recorder: Recorder,
        channels_last: bool,
    ) -> None:
        self._flat, self._record = flat, recorder
        self._size, self._mu = settings.batch_size, settings.fedprox_mu
        self._channels_last = channels_last
        self._public = public_inputs(task.inputs, self._size), task.public_targets(self._size)
        self._inputs = trees.mapped(self._public[0], self._laid_out)
        self._targets = trees.mapped(self._public[1], torch.clone)
        self._rule = RecordedRule(settings.optimizer, flat.parameters)
        self._anchor = torch.zeros_like(flat.vector)
        self._anchors = parameter_views(flat, self._anchor) if self._mu else None
        self._loss_sum = torch.zeros((), device=task.device)
        self._replays: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()

    def train(
        self,
        start: torch.Tensor,
        inputs: Tree,
        targets: Tree,
        index: torch.Tensor,
        learning_rate: float,
        settings: LocalSettings,
        seed: int,
        loss: Loss,
    ) -> float:
        """Train from `start` as `train_client` does; return the mean loss, NaN without samples."""
        self._flat.write(start)
        self._flat.module.train()
        self._loss_sum.zero_()
        if self._anchors is not None:
            self._anchor.copy_(start)
        steps = settings.epochs * math.ceil(len(index) / self._size)
        self._rule.begin(learning_rate, steps)
        seen = 0
        with seeded_layers(start.device, seed), repeatable():
            for batch in local_batches(index, settings, seed, self._flat):
                self._rule.next_step()
                samples, wanted = trees.take(inputs, batch), trees.take(targets, batch)
                name, decided = _decision(loss)
                if len(batch) == self._size:
                    replay = self._replay_of(name, decided)
                    _fill(self._inputs, samples)
                    _fill(self._targets, wanted)
                    replay()
                else:
                    self._step(decided, trees.mapped(samples, self._laid_out), wanted)
                seen += len(batch)
        return float(self._loss_sum) / seen if seen else math.nan

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._channels_last and tensor.dim() == 4 and tensor.is_floating_point():
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor.clone()

    def _step(self, loss: Loss, samples: Tree, targets: Tree) -> None:
        """Take one step: what is captured."""
        value = loss(self._flat.module, samples, targets)
        parameters = self._flat.parameters
        gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        self._rule.step(parameters, gradients, self._anchors, 0.0, self._mu)
        with torch.no_grad():
            self._loss_sum += value.detach() * trees.length(targets)

    def _replay_of(self, name: Hashable, loss: Loss) -> Callable[[], None]:
        """Return the captured step under a decision of the loss."""
        if name not in self._replays:
            self._replays[name] = self._captured(loss)
            if len(self._replays) > _GRAPHS:
                self._replays.popitem(last=False)
        self._replays.move_to_end(name)
        return self._replays[name]

    def _captured(self, loss: Loss) -> Callable[[], None]:
        """Capture a step on public samples, and leave everything as it was."""
        for buffer, public in zip((self._inputs, self._targets), self._public, strict=True):
            _fill(buffer, public)
        moving = [
            self._flat.vector,
            *(tensor for _, tensor in self._flat.copied()),
            *self._rule.tensors,
            self._loss_sum,
        ]
        before = [tensor.detach().clone() for tensor in moving]
        replay = self._record(lambda: self._step(loss, self._inputs, self._targets))
        with torch.no_grad():
            for tensor, saved in zip(moving, before, strict=True):
                tensor.copy_(saved)
        return replay


def _decision(loss: Loss) -> tuple[Hashable, Loss]:
    """Return the name of what a loss computes in the next step, and that."""
    if isinstance(loss, StepLoss):
        return loss.decided()
    if isinstance(loss, Objective):
        return None, loss
    raise CannotCaptureError("the clients' loss may compute something else in every step")


def _fill(buffer: Tree, values: Tree) -> None:
    for here, there in zip(trees.leaves(buffer), trees.leaves(values), strict=True):
        here.copy_(there)


class RecordedRule(RuleState):
    """A named rule whose rates are tensors, so that a captured step can take them anew."""

    def __init__(self, rule: ClientOptimizer, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(rule, parameters)
        wide = any(parameter.dtype == torch.float64 for parameter in parameters)
        kind = torch.float64 if wide else torch.float32
        self._rates = torch.zeros(3, dtype=kind, device=parameters[0].device)
        self._move, self._root, self._kept = self._rates.unbind()
        self._table = self._rates[None]
        self._at = 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What a step changes."""
        return [tensor for kind in self._moments for tensor in kind]

    def begin(self, learning_rate: float, steps: int) -> None:
        """Forget the last client, and lay out the rates of all steps of the next."""
        for tensor in self.tensors:
            tensor.zero_()
        rows = [self.rates(learning_rate, step) for step in range(1, steps + 1)]
        self._table = torch.tensor(rows, dtype=self._rates.dtype).to(self._rates.device)
        self._at = 0

    def next_step(self) -> None:
        """Take the rates of the next step."""
        self._rates.copy_(self._table[self._at])
        self._at += 1

    def _decay(self, weights: list[torch.Tensor], rate: float) -> None:
        torch._foreach_mul_(weights, self._kept)

    def _advance(self, weights: list[torch.Tensor], moves: list[torch.Tensor], rate: float) -> None:
        torch._foreach_add_(weights, torch._foreach_mul(moves, self._move))

    def _advance_adam(
        self,
        weights: list[torch.Tensor],
        first: list[torch.Tensor],
        scale: list[torch.Tensor],
        rate: float,
    ) -> None:
        torch._foreach_div_(scale, self._root)
        torch._foreach_add_(scale, self.SMALL)
        self._advance(weights, list(torch._foreach_div(first, scale)), rate)
