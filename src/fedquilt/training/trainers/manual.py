"""Training of clients on a CPU, with gradients by hand (`cpu_program`).

The same batches and the same dropout as `local.train_client`, so updates agree with the
sequential engine up to rounding; what a client computes depends on its own samples and seed.

Clients train one after the other.  Small networks of dense layers train a few at a time, in
lanes: as many steps as all of them have full batches for are taken together, the rest of each
alone.  A lane's numbers are the same bits in any company, which is tried before it is relied on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fedquilt.training.draws import ClientDraws, bits_of, draw_keys, hashed_bits, own_draws
from fedquilt.training.flat import FlatModel
from fedquilt.training.hardware import one_thread
from fedquilt.training.objective import IGNORED
from fedquilt.training.task import ClientUpdate, LocalSettings, Task, public_inputs
from fedquilt.training.trainers.autograd import NEVER_SILENT, client_seed, epoch_order, train_client
from fedquilt.training.trainers.cpu_update import Update
from fedquilt.training.trainers.manual_layers import CpuProgram, Frame, check_layers, matrices
from fedquilt.training.trainers.plan import Conv, Dense, Dropout, NoPlanError, Plan, make_plan
from fedquilt.training.trainers.trial import FLOAT32, SCALES, disagreement, moved_by_a_pass

_log = logging.getLogger(__name__)

_TRIAL_RATE = 0.1
_TRIAL_SEED = 0
# How many numbers of dropout masks are drawn at once.
_DRAWN = 2**20
# Batches above this stand for "all samples": memory for them is not kept.
_WIDEST = 1024
# A product over more samples is made in parts, and each one would round the weights once more.
_FUSED_BATCH = 128
# Multiplications of a layer after another in a step, forward: a millisecond on one core.
_FEW_PRODUCTS = 2**25
# How many scores of an epoch are laid out at once for clients that train together.
_LAID_OUT = 2**22
# Clients that take a step together: with more of them their weights leave a core's cache.
_LANES, _LANE_BYTES = 6, 5 * 2**18


class Given(NamedTuple):
    """A client to train: the places of its samples, its seed, and where its update goes."""

    samples: torch.Tensor
    seed: int
    out: torch.Tensor


class _Member(NamedTuple):
    """A client of those that train together."""

    given: Given
    labels: torch.Tensor


class CpuTraining:
    """Trains clients by the plan of their network.

    Parameters
    ----------
    flat : FlatModel
        The model; its module trains those clients that a plan cannot: who holds labels that
        the loss leaves out, or labels out of range, is trained by autograd, or fails as there.

    Raises
    ------
    NoPlanError
        It cannot be used here; the message says why.
    """

    def __init__(
        self, flat: FlatModel, task: Task, settings: LocalSettings, draws: ClientDraws | None
    ) -> None:
        self._flat, self._task, self._settings, self._draws = flat, task, settings, draws
        self.plan: Plan = cpu_plan(flat, task, settings)
        is_plain = settings.optimizer.is_plain and not settings.fedprox_mu
        self._fused = is_plain and settings.batch_size <= _FUSED_BATCH
        weights = sum(segment.stop - segment.start for segment in flat.segments)
        has_images = any(isinstance(layer, Conv) for layer in self.plan.layers)
        self.is_small = not has_images and weights * settings.batch_size < _FEW_PRODUCTS
        is_dense = all(isinstance(layer, Dense) for layer in self.plan.layers)
        most = min(_LANES, _LANE_BYTES // (4 * weights))
        # On several threads a product of many samples is cut up, alone in another way than beside
        # others; there is little to win for it, either.
        has_lanes = most > 1 and is_dense and self._fused and self.is_small
        lanes = most if has_lanes else None
        self.together = lanes or 1
        self._program = CpuProgram(self.plan, settings.batch_size, not self._fused, lanes)
        self._anchors: dict[str, torch.Tensor] = {}
        if settings.fedprox_mu:
            self._anchors = {n: torch.empty_like(t) for n, t in self._program.weights.items()}
        tensors = [self._program.weights[segment.name] for segment in flat.segments]
        self._lanes = [[t[lane] for t in tensors] for lane in range(lanes)] if lanes else [tensors]
        self._first_lanes = [
            [t[:many] for t in tensors] if lanes else tensors for many in range(self.together + 1)
        ]
        self._sizes = [tensor.numel() for tensor in self._lanes[0]]
        self._by_class = torch.arange(self.plan.classes)[:, None]
        with one_thread(self.is_small):
            self._try()

    @property
    def window(self) -> int:
        """Of how many clients those that train together are best chosen."""
        return 4 * self.together if self.together > 1 else 1

    def update_of(
        self, start: torch.Tensor, client: int, round_index: int, learning_rate: float
    ) -> ClientUpdate:
        """Return what a client of the task sends in a round."""
        return self.updates_of(start, [client], round_index, learning_rate)[0]

    def updates_of(
        self, start: torch.Tensor, clients: Sequence[int], round_index: int, learning_rate: float
    ) -> list[ClientUpdate]:
        """Return what clients of the task send in a round."""
        task, settings = self._task, self._settings
        given = [
            Given(task.index(c), client_seed(settings, round_index, c), torch.empty_like(start))
            for c in clients
        ]
        losses = self.train(start, given, learning_rate)
        updates = []
        for client, (samples, _, delta), loss in zip(clients, given, losses, strict=True):
            if isinstance(loss, Exception):
                if not settings.silent or isinstance(loss, NEVER_SILENT):
                    raise loss
                delta.fill_(math.nan)
                loss = math.nan
            updates.append(ClientUpdate(client, delta, len(samples), loss))
        return updates

    @torch.no_grad()
    def train(
        self, start: torch.Tensor, given: Sequence[Given], learning_rate: float
    ) -> list[float | Exception]:
        """Put the clients' updates where they go; return their mean losses.

        Without samples the loss is NaN and the update zero.  Who cannot be trained has the error
        in the place of the loss.
        """
        losses: list[float | Exception] = [math.nan] * len(given)
        members: dict[int, _Member] = {}
        for place, client in enumerate(given):
            try:
                labels = self._task.targets[client.samples]
                if not len(labels):
                    client.out.zero_()
                elif self._are_classes(labels):
                    members[place] = _Member(client, labels)
                else:
                    losses[place] = self._by_autograd(start, client, learning_rate)
            except Exception as error:
                losses[place] = error
        inputs, begin = self._task.inputs.flatten(1), self._parts(start)
        # Those of a size have the most steps to take together.
        order = sorted(members, key=lambda place: len(members[place].labels))
        with one_thread(self.is_small):
            for places in self._groups(order, members):
                group = [members[place] for place in places]
                trained = self._train_group(begin, inputs, group, learning_rate)
                for place, loss in zip(places, trained, strict=True):
                    losses[place] = loss
        return losses

    def _groups(self, order: list[int], members: dict[int, _Member]) -> Iterator[list[int]]:
        """Yield the places of those that train together, the smallest first.

        All of them take as much memory for an epoch as the largest.
        """
        group: list[int] = []
        for place in order:
            numbers = (len(group) + 1) * len(members[place].labels) * self.plan.classes
            if group and (len(group) == self.together or numbers > _LAID_OUT):
                yield group
                group = []
            group.append(place)
        if group:
            yield group

    def _train_group(
        self,
        begin: list[torch.Tensor],
        inputs: torch.Tensor,
        group: list[_Member],
        learning_rate: float,
    ) -> list[float | Exception]:
        """Train clients together, or one by one where that fails: an error is one's own."""
        losses: list[float | Exception] = []
        try:
            losses += self._train(begin, inputs, group, learning_rate)
        except Exception as error:
            if len(group) == 1:
                return [error]
            for member in group:
                losses += self._train_group(begin, inputs, [member], learning_rate)
            return losses
        for lane, member in zip(self._lanes, group, strict=False):
            for tensor, part, into in zip(lane, begin, self._parts(member.given.out), strict=True):
                torch.sub(tensor, part, out=into)
        return losses

    def _are_classes(self, labels: torch.Tensor) -> bool:
        least, largest = torch.aminmax(labels)
        return int(least) >= 0 and int(largest) < self.plan.classes

    def _parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a vector as the flat model lays tensors out, in the tensors' shapes."""
        parts = zip(torch.split(vector, self._sizes), self._lanes[0], strict=True)
        return [part.view(tensor.shape) for part, tensor in parts]

    def _train(
        self,
        begin: list[torch.Tensor],
        inputs: torch.Tensor,
        group: Sequence[_Member],
        learning_rate: float,
    ) -> list[float]:
        """Train clients, at most `together`, from the tensors `begin`; return their mean losses.

        Their weights are in the program's lanes afterwards.
        """
        program, most = self._program, self._settings.batch_size
        program.reset()
        for tensor, part in zip(self._first_lanes[len(group)], begin, strict=True):
            tensor.copy_(part)
        rule = None if self._fused else self._begin_rule(learning_rate)
        shuffles = [torch.Generator().manual_seed(member.given.seed) for member in group]
        counts = [len(member.labels) for member in group]
        full = min(counts) // most
        joint = self._frame(most, rule, learning_rate, lanes=len(group)) if full else None
        masks = self._masks(group[0].given.seed, self._settings.epochs * -(-counts[0] // most))
        losses = [0.0] * len(group)
        for _ in range(self._settings.epochs):
            orders = [epoch_order(*one) for one in zip(counts, shuffles, strict=True)]
            drawn = list(zip(group, orders, strict=True))
            taken = [member.given.samples[order] for member, order in drawn]
            labels = [member.labels[order] for member, order in drawn]
            epoch = _Epoch(labels, most, self._by_class, has_lanes=len(self._lanes) > 1)
            for batch, places in zip(_joint(taken, full, most), epoch.first(full), strict=True):
                self._step(joint, inputs, batch, places, next(masks), rule)
            for lane, samples in enumerate(taken):
                for step, batch in enumerate(torch.split(samples[full * most :], most), full):
                    if len(batch):
                        frame = self._frame(len(batch), rule, learning_rate, lane)
                        places = epoch.place(step, lane, len(batch))
                        self._step(frame, inputs, batch, places, next(masks), rule)
            losses = [a + b for a, b in zip(losses, epoch.losses(), strict=True)]
        return [
            loss / (self._settings.epochs * count)
            for loss, count in zip(losses, counts, strict=True)
        ]

    def _step(
        self,
        frame: tuple[Frame, Update] | None,
        inputs: torch.Tensor,
        batch: torch.Tensor,
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        masks: list[torch.Tensor],
        rule: tuple[Any, list[torch.Tensor]] | None,
    ) -> None:
        assert frame is not None
        self._program.step(frame[0], inputs, batch, *places, frame[1], masks)
        if rule is not None:
            rule[0].step(rule[1])

    def _begin_rule(self, learning_rate: float) -> tuple[Any, list[torch.Tensor]]:
        """Return the optimizer of a client that begins at the program's weights."""
        program, mu, names = self._program, self._settings.fedprox_mu, self._flat.names
        parameters = [program.weights[name] for name in names]
        for name, anchor in self._anchors.items():
            anchor.copy_(program.weights[name])
        anchors = [self._anchors[name] for name in names] if self._anchors else None
        rule = self._settings.optimizer.begin(parameters, anchors, learning_rate, mu)
        return rule, [program.gradients[name] for name in names]

    def _frame(
        self, size: int, rule: object, learning_rate: float, lane: int = 0, lanes: int = 1
    ) -> tuple[Frame, Update]:
        """Return the layers for batches of a size, and where their gradients go."""
        frame = self._program.frame(size, lane, lanes)
        if rule is not None:  # it asks for the gradient itself
            return frame, Update(0.0, 1.0 / size)
        return frame, Update(1.0, -learning_rate * (1.0 / size))

    def _masks(self, seed: int, steps: int) -> Iterator[list[torch.Tensor]]:
        """Yield the dropout masks of each step, one row for a full batch each."""
        layers = [layer for layer in self.plan.layers if isinstance(layer, Dropout)]
        if not layers:
            while True:
                yield []
        counts = [_numbers(layer) * self._settings.batch_size for layer in layers]
        block = max(1, _DRAWN // max(counts))
        for first in range(0, steps, block):
            numbers = np.arange(first, min(first + block, steps))
            drawn = [
                _mask(layer, draw_keys(seed, numbers, layer.draw), count)
                for layer, count in zip(layers, counts, strict=True)
            ]
            for step in range(len(numbers)):
                yield [mask[step] for mask in drawn]

    def _by_autograd(self, start: torch.Tensor, client: Given, learning_rate: float) -> float:
        task, flat = self._task, self._flat
        task.objective.begin()
        with torch.enable_grad():
            loss = train_client(
                *(flat, start, task.inputs, task.targets, client.samples, learning_rate),
                *(self._settings, client.seed, task.objective, self._draws),
            )
        torch.sub(flat.read(), start, out=client.out)
        return loss

    @torch.no_grad()
    def _try(self) -> None:
        """Refuse a plan that does not compute what the network does, on public samples."""
        flat, most, like = self._flat, self._settings.batch_size, self._task.public()
        start = flat.read().clone()
        # What a network computes shows on few samples; a full batch, that its memory is laid out.
        for count, scales in ((max(1, most // 8), SCALES), (most, SCALES[:1])):
            reason = disagreement(
                *(self._gradient, self._autograd_gradient, start, like.inputs, count, FLOAT32),
                scales=scales,
            )
            if reason:
                raise NoPlanError(f"its gradient by hand is {reason}")
        moved = moved_by_a_pass(flat, like.inputs, self._draws)
        flat.write(start)
        if moved:
            raise NoPlanError(f"a pass changes {', '.join(moved)}, which steps by hand do not")
        self._try_together(start, public_inputs(like.inputs, most + max(1, most // 2)))

    def _trial_labels(self, count: int) -> torch.Tensor:
        labels = torch.arange(count) % self.plan.classes
        return labels.to(self._task.targets.dtype)

    def _gradient(self, weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gradient by hand of one batch; a program of plain steps has it as weights."""
        program, labels = self._program, self._trial_labels(len(inputs))
        program.reset()
        for tensor, part in zip(self._first_lanes[1], self._parts(weights), strict=True):
            tensor.copy_(part)
        epoch = _Epoch([labels], len(labels), self._by_class, has_lanes=len(self._lanes) > 1)
        program.step(
            program.frame(len(labels)),
            inputs.flatten(1),
            torch.arange(len(labels)),
            *epoch.place(0, 0, len(labels)),
            Update(0.0, 1.0 / len(labels)),
            next(self._masks(_TRIAL_SEED, 1)),
        )
        by_name = program.gradients
        tensors = [by_name[name] for name in self._flat.names] if by_name else self._lanes[0]
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def _autograd_gradient(self, weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        flat, objective = self._flat, self._task.objective
        flat.write(weights)
        flat.module.train()
        objective.begin()
        with torch.enable_grad(), own_draws(self._draws):
            if self._draws is not None:
                self._draws.begin(bits_of(_TRIAL_SEED, 0))
            loss = objective(flat.module, inputs, self._trial_labels(len(inputs)))
            gradients = torch.autograd.grad(loss, flat.parameters)
        return torch.cat([gradient.reshape(-1) for gradient in gradients])

    def _try_together(self, start: torch.Tensor, inputs: torch.Tensor) -> None:
        """Let clients train one by one where company changes a bit of what one computes.

        Every number of clients is tried, with full batches and a part of one: there are no other
        shapes.
        """
        count, begin = len(inputs), self._parts(start)
        given = Given(torch.arange(count), _TRIAL_SEED, start)
        member, inputs = _Member(given, self._trial_labels(count)), inputs.flatten(1)
        alone: list[torch.Tensor] = []
        for many in range(1, self.together + 1):
            self._train(begin, inputs, [member] * many, _TRIAL_RATE)
            alone = alone or [tensor.clone() for tensor in self._lanes[0]]
            for lane in self._lanes[:many]:
                if not all(map(torch.equal, lane, alone)):
                    _log.info("clients train one by one: %d together round differently", many)
                    self.together = 1
                    return


class _Epoch:
    """What the batches of an epoch need beside their samples, made for all of them at once.

    Labels and scores are [steps, clients, classes, samples], without the second axis where the
    program has no lanes.  Batches that a client lacks, and places that a shorter one leaves
    free, count nowhere.
    """

    def __init__(
        self, labels: list[torch.Tensor], most: int, by_class: torch.Tensor, has_lanes: bool
    ) -> None:
        self._free = len(by_class)  # the class of places where no sample is
        self._steps = [-(-len(part) // most) for part in labels]
        self._has_lanes = has_lanes
        steps = max(self._steps)
        true = torch.full((len(labels), steps * most), self._free)
        for row, part in zip(true.unbind(), labels, strict=True):
            row[: len(part)] = part
        self._true = true.view(-1, steps, most).transpose(0, 1).contiguous()
        self._onehot = (self._true[:, :, None] == by_class).to(torch.float32)
        self._scores = matrices(*self._onehot.shape)

    def first(self, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield labels, scores and scores turned of the first steps, for all clients."""
        blocks = [block[:steps] for block in (self._onehot, self._scores, self._scores.mT)]
        if not self._has_lanes:
            blocks = [block[:, 0] for block in blocks]
        return zip(*(block.unbind() for block in blocks), strict=True)

    def place(
        self, step: int, lane: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return those of one step of a client, with `size` samples."""
        where = slice(lane, lane + 1) if self._has_lanes else 0
        scores = self._scores[step, where, ..., :size]
        return self._onehot[step, where, ..., :size], scores, scores.mT

    def losses(self) -> list[float]:
        """Return the sum of each client's losses, of the scores before each step."""
        scores, true = self._scores.flatten(0, 1), self._true.flatten(0, 1)
        each = functional.cross_entropy(scores, true, ignore_index=self._free, reduction="none")
        by_client = each.view(self._true.shape).transpose(0, 1).contiguous()
        # Only a client's own steps: how many others take must not change the order of a sum.
        pairs = zip(by_client, self._steps, strict=True)
        return [float(part[:steps].sum()) for part, steps in pairs]


def _joint(samples: list[torch.Tensor], steps: int, most: int) -> Sequence[torch.Tensor]:
    """Return the first batches of clients, each with the samples of all of them."""
    if not steps:
        return ()
    if len(samples) == 1:
        return torch.split(samples[0][: steps * most], most)
    parts = [part[: steps * most].view(steps, most) for part in samples]
    return torch.stack(parts, 1).view(steps, -1).unbind()


def cpu_plan(flat: FlatModel, task: Task, settings: LocalSettings) -> Plan:
    """Return the plan of a model whose layers are all written here; else raise NoPlanError."""
    reason = _unsuited(flat, task, settings)
    if reason:
        raise NoPlanError(reason)
    flat.module.train()
    plan = make_plan(flat.module, task.public().inputs)
    if {weights.name for weights in plan.weights} != set(flat.names):
        raise NoPlanError("it has parameters outside its layers, or frozen ones")
    check_layers(plan)
    return plan


def hand_training(
    flat: FlatModel, task: Task, settings: LocalSettings, draws: ClientDraws | None
) -> CpuTraining | None:
    """Return the steps by hand; None, and the reason in the log, where there are none."""
    try:
        return CpuTraining(flat, task, settings, draws)
    except NoPlanError as error:
        _log.info("the model trains by autograd: %s", error)
        return None
    finally:
        flat.restore()  # following the forward pass may have left something behind


def _numbers(layer: Dropout) -> int:
    """Return how many numbers a dropout draws for one sample."""
    return layer.image[-1] if layer.by_channel else math.prod(layer.shape)


def _mask(layer: Dropout, keys: NDArray[np.int32], count: int) -> torch.Tensor:
    """Return 0 or 1 / (1 - p), [steps, count], as `draws` has it."""
    kept = hashed_bits(torch.from_numpy(keys), count) >= int(layer.share * 2**32) - 2**31
    return kept.to(torch.float32).mul_(1.0 / (1.0 - layer.share))


def _unsuited(flat: FlatModel, task: Task, settings: LocalSettings) -> str | None:
    """Return why no plan is tried here, None where one is."""
    tensors = isinstance(task.inputs, torch.Tensor) and isinstance(task.targets, torch.Tensor)
    if not tensors or task.class_mask is not None or task.inputs.dtype != torch.float32:
        return "its inputs are not one tensor of float32, or classes are hidden"
    objective = task.objective
    is_label = task.targets.dim() == 1 and not task.targets.is_floating_point()
    if not is_label or objective.loss != "cross_entropy" or objective.ignore_index != IGNORED:
        return "its loss is not the cross-entropy of one class a sample"
    if flat.vector.device.type != "cpu":
        return "it is not on a CPU"
    if settings.optimizer.factory is not None or settings.batch_size > _WIDEST:
        return f"own optimizers and batches above {_WIDEST} have no steps by hand"
    if flat.buffer_names or flat.vector.dtype != torch.float32 or flat.is_lossy:
        return "it has buffers that move, or other types than float32"
    return None
