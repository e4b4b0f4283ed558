"""In which order clients see their samples, epoch by epoch, for programs of many clients.

Each epoch of a client is one permutation, drawn as `local.epoch_batches` draws it: from the
client's own generator, one epoch after the other.  The epochs of all clients are laid end to
end in the order in which a program of steps needs them, so that a device can begin with the
first step while the host draws the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Stretch:
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
        self,
        held: Sequence[NDArray[np.int64]],
        seeds: Sequence[int],
        batch_size: int,
        epochs: int,
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

    def stretches(self) -> Iterator[Stretch]:
        """Yield the table a stretch at a time, by the step that needs it first."""
        generators = [torch.Generator().manual_seed(seed) for seed in self._seeds]
        place, begin = 0, 0
        while begin < len(self._rows):
            end = int(np.searchsorted(self._first, self._first[begin], side="right"))
            drawn = [self._epoch(row, generators[row]) for row in self._rows[begin:end].tolist()]
            samples = np.concatenate(drawn)
            if len(samples):
                yield Stretch(int(self._first[begin]), place, samples)
            place, begin = place + len(samples), end

    def _epoch(self, row: int, generator: torch.Generator) -> NDArray[np.int64]:
        count = int(self.counts[row])
        order: NDArray[np.int64] = torch.randperm(count, generator=generator).numpy()
        return np.asarray(self._held[row][order], dtype=np.int64)

    def table(self) -> NDArray[np.int64]:
        """Return the whole table; its last entry, the first sample, is nobody's choice."""
        table = np.zeros(self.length, dtype=np.int64)
        for stretch in self.stretches():
            table[stretch.place : stretch.place + len(stretch.samples)] = stretch.samples
        return table
