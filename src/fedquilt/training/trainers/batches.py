"""Which samples each client trains on in each step, for programs of many clients.

Each epoch of a client is one permutation, drawn as `autograd.epoch_batches` draws it: from the
client's own generator, one epoch after the other.  The epochs of all clients are laid end to
end in the order in which a program of steps needs them, so that a device can begin with the
first step while the host draws the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.training.draws import draw_keys
from fedquilt.training.task import LocalSettings, Task, client_seed
from fedquilt.training.trainers.stack import ModelStack

# How many numbers are laid out at once: places of samples, draws of random layers.
_LAID_OUT = 2**24


@dataclass(frozen=True, eq=False)
class IndexChunk:
    """Sample numbers that are needed from a step on, and where they lie in the table."""

    step: int
    place: int
    samples: NDArray[np.int64]


class Shuffles:
    """The shuffled samples of some clients in all epochs of a round.

    Parameters
    ----------
    held : sequence of arrays
        The sample numbers of each client.
    seeds : sequence of int
        Each client's seed of this round.
    batch_size, epochs : int
        A client of n samples takes ceil(n / batch_size) steps an epoch.
    """

    def __init__(
        self, held: Sequence[NDArray[np.int64]], seeds: Sequence[int], batch_size: int, epochs: int
    ) -> None:
        self._held, self._seeds = held, seeds
        self.counts = np.array([len(part) for part in held], dtype=np.int64)
        self.steps = -(-self.counts // batch_size)
        epoch, row = np.mgrid[:epochs, : len(held)].reshape(2, -1)
        first = epoch * self.steps[row]
        order = np.lexsort((row, first))
        self._rows, self._first = row[order], first[order]
        ends = np.cumsum(self.counts[self._rows])
        self.places = np.zeros((epochs, len(held)), dtype=np.int64)
        self.places[epoch[order], self._rows] = ends - self.counts[self._rows]
        # One more, so that there is something to point at where a program is filled up.
        self.length = int(ends[-1]) + 1 if len(ends) else 1

    def chunks(self) -> Iterator[IndexChunk]:
        """Yield the table a chunk at a time, by the step that needs it first."""
        generators = [torch.Generator().manual_seed(seed) for seed in self._seeds]
        place, begin = 0, 0
        while begin < len(self._rows):
            end = int(np.searchsorted(self._first, self._first[begin], side="right"))
            drawn = [self._epoch(row, generators[row]) for row in self._rows[begin:end].tolist()]
            samples = np.concatenate(drawn)
            if len(samples):
                yield IndexChunk(int(self._first[begin]), place, samples)
            place, begin = place + len(samples), end

    def _epoch(self, row: int, generator: torch.Generator) -> NDArray[np.int64]:
        count = int(self.counts[row])
        order: NDArray[np.int64] = torch.randperm(count, generator=generator).numpy()
        return np.asarray(self._held[row][order], dtype=np.int64)

    def table(self) -> NDArray[np.int64]:
        """Return the whole table; its last entry, the first sample, is nobody's choice."""
        table = np.zeros(self.length, dtype=np.int64)
        for chunk in self.chunks():
            table[chunk.place : chunk.place + len(chunk.samples)] = chunk.samples
        return table


@dataclass(frozen=True, eq=False)
class Tables:
    """All steps of a group: rows are clients, those with most steps first.

    `begins` and `sizes` are [steps, clients]: where a batch begins in the shuffled samples,
    and how many it has; these samples, `length` of them, come in `chunks`, by the step that
    needs them first; `keys` are those of each random draw, [steps, clients, 2].
    """

    begins: NDArray[np.int64]
    sizes: NDArray[np.int64]
    length: int
    chunks: Callable[[], Iterator[IndexChunk]]
    keys: list[NDArray[np.int32]]
    hidden: torch.Tensor | None = None
    """Which classes each client's loss leaves alone, [clients, classes]."""

    def of(self, rows: list[int]) -> Tables:
        """Return the table of some of the clients."""
        keys = [part[:, rows] for part in self.keys]
        hidden = None if self.hidden is None else self.hidden[rows]
        return replace(
            self, begins=self.begins[:, rows], sizes=self.sizes[:, rows], keys=keys, hidden=hidden
        )


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a program: rows beyond `active` and samples of share 0 only fill it up.

    `moving` [active] says who has samples in this step, None where all of them have;
    `shares` is 1/(counted elements of the batch) for a sample of the batch; `sizes` [active]
    are the sizes of the batches, `bits` what the random layers draw from.
    """

    active: int
    samples: torch.Tensor
    shares: torch.Tensor
    sizes: torch.Tensor
    moving: torch.Tensor | None
    bits: list[torch.Tensor]
    hidden: torch.Tensor | None

    def moving_rows(self, count: int) -> torch.Tensor | None:
        """Return who moves, as a mask of the program's rows; None where all of them do."""
        if self.moving is None and self.active == count:
            return None
        mask = torch.zeros(count, dtype=torch.bool, device=self.samples.device)
        mask[: self.active] = True if self.moving is None else self.moving
        return mask


class BatchTable:
    """All local steps of a group: who trains on which samples when.

    Rows are clients, those with most samples first where rows may be sorted.
    """

    def __init__(
        self,
        task: Task,
        clients: list[int],
        settings: LocalSettings,
        round_index: int,
        sorted_rows: bool,
        training: set[int],
    ) -> None:
        self.training = training
        held = [len(task.clients[client]) if client in training else 0 for client in clients]
        counts = np.array(held, dtype=np.int64)
        order = np.argsort(-counts, kind="stable") if sorted_rows else np.arange(len(clients))
        self.clients = [clients[member] for member in order]
        self.sorted_rows = sorted_rows
        self._task = task
        seeds = [client_seed(settings, round_index, client) for client in self.clients]
        self._seeds = np.array(seeds, dtype=np.uint64)
        nothing = np.zeros(0, dtype=np.int64)
        parts = [task.clients[client] if client in training else nothing for client in self.clients]
        self._shuffles = Shuffles(
            [np.asarray(part, dtype=np.int64) for part in parts],
            seeds,
            settings.batch_size,
            settings.epochs,
        )
        self._begins, self._sizes = _batch_table(self._shuffles, settings)
        self.active: list[int] = (self._sizes > 0).sum(axis=1).tolist()
        self.widths: list[int] = self._sizes.max(axis=1, initial=0).tolist()
        self.seen = torch.from_numpy(self._sizes.sum(axis=0)).clamp(min=1)

    @functools.cached_property
    def _shuffled(self) -> NDArray[np.int64]:
        return self._shuffles.table()

    def steps(
        self, shapes: list[tuple[int, int]], rows: int, columns: int, stack: ModelStack
    ) -> Iterator[Step]:
        """Yield the steps, each in its shape (at most rows x columns), with its draws."""
        block = max(1, _LAID_OUT // (rows * columns * max(1, stack.draws_a_sample)))
        for first in range(0, len(shapes), block):
            yield from self._block(first, shapes[first : first + block], rows, columns, stack)

    def _block(
        self, first: int, shapes: list[tuple[int, int]], rows: int, columns: int, stack: ModelStack
    ) -> Iterator[Step]:
        """Lay out a chunk of steps on the host and move it to the device at once."""
        device = self._task.device
        steps = slice(first, first + len(shapes))
        missing = ((0, 0), (0, rows - len(self.clients)))
        sizes = np.pad(self._sizes[steps], missing)[..., None]
        place = np.pad(self._begins[steps], missing)[..., None]
        place = place + np.minimum(np.arange(columns), np.maximum(sizes - 1, 0))
        # Rows without samples point at one sample, never at what another client holds next.
        samples = self._shuffled[np.where(sizes > 0, place, len(self._shuffled) - 1)]
        there = torch.from_numpy(samples).to(device)
        lengths = torch.from_numpy(sizes).to(device)
        inside = torch.arange(columns, device=device) < lengths
        counted = torch.where(inside, self._task.counts[there], 0)
        elements = counted.sum(-1, keepdim=True)
        shares = torch.where(counted > 0, 1.0 / elements.clamp(min=1), 0.0)
        number = np.arange(first, first + len(shapes))[:, None]
        seeds = np.pad(self._seeds, (0, rows - len(self._seeds)))
        draws = range(len(stack.draw_shapes))
        keys = [torch.from_numpy(draw_keys(seeds, number, draw)).to(device) for draw in draws]
        bits = stack.bits(keys, columns)
        hidden = self._hidden(rows)
        has_samples = sizes[..., 0] > 0
        trains = torch.from_numpy(has_samples).to(device)
        for t, (count, width) in enumerate(shapes):
            # Unsorted rows all count, and all are masked: how many train is not for others to see.
            active = self.active[first + t] if self.sorted_rows else rows
            all_train = self.sorted_rows and bool(has_samples[t, :active].all())
            yield Step(
                active,
                there[t, :count, :width],
                shares[t, :count, :width],
                lengths[t, :active, 0].float(),
                None if all_train else trains[t, :active],
                [part[t, :count, :width] for part in bits],
                None if hidden is None else hidden[:count],
            )

    def tables(self, draws: int) -> Tables:
        """Return the whole table, for a program that reads it on the device."""
        number = np.arange(len(self._sizes))[:, None]
        keys = [draw_keys(self._seeds, number, draw) for draw in range(draws)]
        shuffles = self._shuffles
        hidden = self._hidden(len(self.clients))
        return Tables(self._begins, self._sizes, shuffles.length, shuffles.chunks, keys, hidden)

    def _hidden(self, rows: int) -> torch.Tensor | None:
        """Return the clients' rows of the class mask; rows that fill up hide nothing."""
        mask = self._task.class_mask
        if mask is None:
            return None
        nothing = mask.hidden.new_zeros(rows - len(self.clients), mask.hidden.shape[1])
        return torch.cat([mask.hidden[self.clients], nothing])


def _batch_table(
    shuffles: Shuffles, settings: LocalSettings
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each batch begins in the shuffled samples, and its size, as [steps, clients].

    A client of n samples has ceil(n / B) steps an epoch; batch j of an epoch
    begins at j * B and holds min(B, n - j * B) samples.  A client with no step
    left has size 0.
    """
    batch_size, epochs, counts = settings.batch_size, settings.epochs, shuffles.counts
    step = np.arange(epochs * int(shuffles.steps.max(initial=0)))[:, None]
    epoch, batch = np.divmod(step, np.maximum(shuffles.steps, 1))
    sizes = np.where(epoch < epochs, np.minimum(batch_size, counts - batch * batch_size), 0)
    places = shuffles.places[np.minimum(epoch, epochs - 1), np.arange(len(counts))]
    return places + batch * batch_size, sizes
