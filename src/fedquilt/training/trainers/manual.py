"""Steps with gradients written by hand, on a CPU (`manual_layers`).

The same batches and the same dropout as `autograd.train_client`, so updates agree with autograd
up to rounding; what a client computes depends on its own samples and seed.

Clients train one after the other.  Small networks of dense layers train a few at a time, in
lanes: as many steps as all of them have full batches for are taken together, the rest of each
alone.  A client's update does not depend on which other clients train in the same lanes, bit by
bit, which is tried before it is relied on.
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

from fedquilt.training.draws import ClientDraws, draw_keys, hashed_bits
from fedquilt.training.flat import FlatModel
from fedquilt.training.task import (
    ClientUpdate,
    LocalSettings,
    Task,
    client_seed,
    epoch_order,
    one_thread,
    public_inputs,
)
from fedquilt.training.trainers import Trainer, failed_update, trial
from fedquilt.training.trainers.autograd import train_client
from fedquilt.training.trainers.manual_layers import (
    BatchBuffers,
    ManualProgram,
    check_layers,
    matrices,
)
from fedquilt.training.trainers.plan import Conv, Dense, Dropout, LayerPlan, NoPlanError
from fedquilt.training.trainers.winograd import Update

_log = logging.getLogger(__name__)

_TRIAL_RATE = 0.1
# How many numbers of dropout masks are drawn at once.
_DRAWN = 2**20
# A product over more samples is made in parts, and each one would round the weights once more.
_FUSED_BATCH = 128
# Multiplications of a layer after another in a step, forward: a millisecond on one core.
_FEW_PRODUCTS = 2**25
# How many scores of an epoch are laid out at once for clients that train together.
_LAID_OUT = 2**22
# Clients that take a step together: with more of them their weights leave a core's cache.
_LANES, _LANE_BYTES = 6, 5 * 2**18


class _Job(NamedTuple):
    """A client to train: the places of its samples, its seed, and where its update goes."""

    samples: torch.Tensor
    seed: int
    out: torch.Tensor


class _Member(NamedTuple):
    """A client of those that train together."""

    job: _Job
    labels: torch.Tensor


class ManualTrainer(Trainer):
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

    name = "manual"

    def __init__(
        self, flat: FlatModel, task: Task, settings: LocalSettings, draws: ClientDraws | None
    ) -> None:
        self.flat, self.task, self.settings, self._draws = flat, task, settings, draws
        self.plan: LayerPlan = trial.plan_for("manual", flat, task, settings)
        check_layers(self.plan)
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
        self._program = ManualProgram(self.plan, settings.batch_size, not self._fused, lanes)
        self._anchors: dict[str, torch.Tensor] = {}
        if settings.fedprox_mu:
            self._anchors = {n: torch.empty_like(t) for n, t in self._program.weights.items()}
        tensors = [self._program.weights[segment.name] for segment in flat.segments]
        self._lanes = [[t[lane] for t in tensors] for lane in range(lanes)] if lanes else [tensors]
        self._first_lanes = [
            [t[:many] for t in tensors] if lanes else tensors for many in range(self.together + 1)
        ]
        self._sizes = [tensor.numel() for tensor in self._lanes[0]]
        self._classes = self.plan.classes
        self._by_class = torch.arange(self._classes)[:, None]
        self._used_autograd = False
        with one_thread(self.is_small):
            self._try()
        # Of how many clients those that train together are best chosen.
        self.group_size = 4 * self.together if self.together > 1 else 1

    def train(
        self,
        start: torch.Tensor,
        clients: Sequence[int],
        round_index: int,
        learning_rate: float,
        out: Sequence[torch.Tensor] | None = None,
    ) -> Iterator[ClientUpdate]:
        """Yield the updates of clients, in their order."""
        task, settings = self.task, self.settings
        into = [torch.empty_like(start) for _ in clients] if out is None else out
        jobs = [
            _Job(task.index(client), client_seed(settings, round_index, client), memory)
            for client, memory in zip(clients, into, strict=True)
        ]
        losses = self._train_jobs(start, jobs, learning_rate)
        for client, (samples, _, delta), loss in zip(clients, jobs, losses, strict=True):
            if isinstance(loss, Exception):
                yield failed_update(loss, settings, client, delta, len(samples))
            else:
                yield ClientUpdate(client, delta, len(samples), loss)

    def restore(self) -> None:
        """Restore what training by autograd has changed; steps by hand leave the model alone."""
        if self._used_autograd:
            self.flat.restore()
            self.task.objective.begin()
            self._used_autograd = False

    @torch.no_grad()
    def _train_jobs(
        self, start: torch.Tensor, jobs: Sequence[_Job], learning_rate: float
    ) -> list[float | Exception]:
        """Put the clients' updates where they go; return their mean losses.

        Without samples the loss is NaN and the update zero.  Who cannot be trained has the error
        in the place of the loss.
        """
        losses: list[float | Exception] = [math.nan] * len(jobs)
        members: dict[int, _Member] = {}
        for place, client in enumerate(jobs):
            try:
                labels = self.task.targets[client.samples]
                if not len(labels):
                    client.out.zero_()
                elif self._are_classes(labels):
                    members[place] = _Member(client, labels)
                else:
                    losses[place] = self._by_autograd(start, client, learning_rate)
            except Exception as error:
                losses[place] = error
        inputs, begin = self.task.inputs.flatten(1), self._parts(start)
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
            numbers = (len(group) + 1) * len(members[place].labels) * self._classes
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
            for tensor, part, into in zip(lane, begin, self._parts(member.job.out), strict=True):
                torch.sub(tensor, part, out=into)
        return losses

    def _are_classes(self, labels: torch.Tensor) -> bool:
        least, largest = torch.aminmax(labels)
        return int(least) >= 0 and int(largest) < self._classes

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
        program, most = self._program, self.settings.batch_size
        program.reset()
        for tensor, part in zip(self._first_lanes[len(group)], begin, strict=True):
            tensor.copy_(part)
        rule = None if self._fused else self._begin_rule(learning_rate)
        shuffles = [torch.Generator().manual_seed(member.job.seed) for member in group]
        counts = [len(member.labels) for member in group]
        full = min(counts) // most
        joint = self._buffers(most, rule, learning_rate, lanes=len(group)) if full else None
        masks = self._masks(group[0].job.seed, self.settings.epochs * -(-counts[0] // most))
        losses = [0.0] * len(group)
        for _ in range(self.settings.epochs):
            orders = [epoch_order(*one) for one in zip(counts, shuffles, strict=True)]
            drawn = list(zip(group, orders, strict=True))
            taken = [member.job.samples[order] for member, order in drawn]
            labels = [member.labels[order] for member, order in drawn]
            epoch = _Epoch(labels, most, self._by_class, has_lanes=len(self._lanes) > 1)
            for batch, places in zip(_joint(taken, full, most), epoch.first(full), strict=True):
                self._step(joint, inputs, batch, places, next(masks), rule)
            for lane, samples in enumerate(taken):
                for step, batch in enumerate(torch.split(samples[full * most :], most), full):
                    if len(batch):
                        buffers = self._buffers(len(batch), rule, learning_rate, lane)
                        places = epoch.place(step, lane, len(batch))
                        self._step(buffers, inputs, batch, places, next(masks), rule)
            losses = [a + b for a, b in zip(losses, epoch.losses(), strict=True)]
        return [
            loss / (self.settings.epochs * count)
            for loss, count in zip(losses, counts, strict=True)
        ]

    def _step(
        self,
        buffers: tuple[BatchBuffers, Update] | None,
        inputs: torch.Tensor,
        batch: torch.Tensor,
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        masks: list[torch.Tensor],
        rule: tuple[Any, list[torch.Tensor]] | None,
    ) -> None:
        assert buffers is not None
        self._program.step(buffers[0], inputs, batch, *places, buffers[1], masks)
        if rule is not None:
            rule[0].step(rule[1])

    def _begin_rule(self, learning_rate: float) -> tuple[Any, list[torch.Tensor]]:
        """Return the optimizer of a client that begins at the program's weights."""
        program, mu, names = self._program, self.settings.fedprox_mu, self.flat.names
        parameters = [program.weights[name] for name in names]
        for name, anchor in self._anchors.items():
            anchor.copy_(program.weights[name])
        anchors = [self._anchors[name] for name in names] if self._anchors else None
        rule = self.settings.optimizer.begin(parameters, anchors, learning_rate, mu)
        return rule, [program.gradients[name] for name in names]

    def _buffers(
        self, size: int, rule: object, learning_rate: float, lane: int = 0, lanes: int = 1
    ) -> tuple[BatchBuffers, Update]:
        """Return the layers for batches of a size, and where their gradients go."""
        buffers = self._program.buffers(size, lane, lanes)
        if rule is not None:  # it asks for the gradient itself
            return buffers, Update(0.0, 1.0 / size)
        return buffers, Update(1.0, -learning_rate * (1.0 / size))

    def _masks(self, seed: int, steps: int) -> Iterator[list[torch.Tensor]]:
        """Yield the dropout masks of each step, one row for a full batch each."""
        layers = [layer for layer in self.plan.layers if isinstance(layer, Dropout)]
        if not layers:
            while True:
                yield []
        counts = [_numbers(layer) * self.settings.batch_size for layer in layers]
        block = max(1, _DRAWN // max(counts))
        for first in range(0, steps, block):
            numbers = np.arange(first, min(first + block, steps))
            drawn = [
                _mask(layer, draw_keys(seed, numbers, layer.draw), count)
                for layer, count in zip(layers, counts, strict=True)
            ]
            for step in range(len(numbers)):
                yield [mask[step] for mask in drawn]

    def _by_autograd(self, start: torch.Tensor, client: _Job, learning_rate: float) -> float:
        self._used_autograd = True
        task, flat = self.task, self.flat
        task.objective.begin()
        with torch.enable_grad():
            loss = train_client(
                *(flat, start, task.inputs, task.targets, client.samples, learning_rate),
                *(self.settings, client.seed, task.objective, self._draws),
            )
        torch.sub(flat.read(), start, out=client.out)
        return loss

    @torch.no_grad()
    def _try(self) -> None:
        """Refuse a plan that does not compute what the network does, on public samples."""
        most, like = self.settings.batch_size, self.task.public().inputs
        # What a network computes shows on few samples; a full batch, that its memory is laid out.
        trials = [
            trial.Trial(like, max(1, most // 8), trial.SCALES),
            trial.Trial(like, most, trial.SCALES[:1]),
        ]
        ways = self._gradient, self._autograd_gradient
        trial.refuse_disagreement(
            "its gradient by hand is", *ways, self.flat, trials, trial.FLOAT32, self._draws
        )
        start = self.flat.read().clone()
        self._try_together(start, public_inputs(like, most + max(1, most // 2)))

    def _trial_labels(self, count: int) -> torch.Tensor:
        labels = torch.arange(count) % self._classes
        return labels.to(self.task.targets.dtype)

    def _gradient(self, weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gradient by hand of one batch; a program of plain steps has it as weights."""
        program, labels = self._program, self._trial_labels(len(inputs))
        program.reset()
        for tensor, part in zip(self._first_lanes[1], self._parts(weights), strict=True):
            tensor.copy_(part)
        epoch = _Epoch([labels], len(labels), self._by_class, has_lanes=len(self._lanes) > 1)
        program.step(
            program.buffers(len(labels)),
            inputs.flatten(1),
            torch.arange(len(labels)),
            *epoch.place(0, 0, len(labels)),
            Update(0.0, 1.0 / len(labels)),
            next(self._masks(trial.TRIAL_SEED, 1)),
        )
        by_name = program.gradients
        tensors = [by_name[name] for name in self.flat.names] if by_name else self._lanes[0]
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def _autograd_gradient(self, weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        labels, objective = self._trial_labels(len(inputs)), self.task.objective
        self.flat.write(weights)
        gradients = trial.autograd_gradients(self.flat, objective, inputs, labels, self._draws)
        return torch.cat([gradient.reshape(-1) for gradient in gradients])

    def _try_together(self, start: torch.Tensor, inputs: torch.Tensor) -> None:
        """Let clients train one by one where company changes a bit of what one computes.

        Every number of clients is tried, with full batches and a part of one: there are no other
        shapes.
        """
        count, begin = len(inputs), self._parts(start)
        job = _Job(torch.arange(count), trial.TRIAL_SEED, start)
        member, inputs = _Member(job, self._trial_labels(count)), inputs.flatten(1)
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


def try_manual(
    flat: FlatModel, task: Task, settings: LocalSettings, draws: ClientDraws | None
) -> ManualTrainer | None:
    """Return the trainer by hand; None, and the reason in the log, where there is none."""
    try:
        return ManualTrainer(flat, task, settings, draws)
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
