"""Class statistics: groups, their means, the table that travels, targets.

The numbers of a row travel as they are, or as whole numbers of a few bits: rows are
means over many samples, uncertain by a few per cent of a feature's spread, and a code of 8 bits is
finer than that.  A row is cut into blocks of `ROW_BLOCK` numbers.  With the least number l
of a block and s = (largest - l) / (2^b - 1), a number v travels as

    c = round((v - l) / s),    read as l + s c,    |l + s c - v| <= s / 2

and l and s travel beside them.  As many codes as there is room for below 2^24 become one
whole number, which float32 holds exactly: three of 8 bits, two of 12.  So a coded row is
a vector like any other, whatever carries it, and what it costs is its length.  No number
is too large for it, and a row that is not finite has an l or s that is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.condense.augment import Transform
from fedquilt.condense.embeds import Embeds, embed_and_forward
from fedquilt.config.choices import ROW_BITS

BATCH = 512


@torch.no_grad()
def group_means(
    model: nn.Module,
    images: torch.Tensor,
    order: torch.Tensor,
    counts: torch.Tensor,
    *,
    transform: Transform | None = None,
    rows: torch.Tensor | None = None,
    with_logits: bool = True,
    batch_size: int = BATCH,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean embedding [G, D] and the mean scores [G, K] of each group.

    Parameters
    ----------
    images
        All images; `order` picks from them.
    order : int64 [M]
        Samples, group after group; `counts` [G] says how many each has.
    transform, rows
        Augmentation, and for each sample of `order` the row of its parameters.
    with_logits
        Without them K is 0, and the scores are not computed.

    Samples go through the model in batches of `batch_size`, whatever groups they
    belong to; within a batch the sums are one matrix product with the 0/1 matrix of
    membership, which gives the same bits in every run, unlike atomic additions.
    """
    device = images.device
    groups = len(counts)
    counts = counts.to(device)
    members = torch.repeat_interleave(torch.arange(groups, device=device), counts)
    ends = members.cpu()
    features = logits = torch.zeros(groups, 0, device=device)
    for start in range(0, len(order), batch_size):
        part = slice(start, min(start + batch_size, len(order)))
        batch = images[order[part].to(device)]
        if transform is not None:
            batch = transform.apply(batch, None if rows is None else rows[part].to(device))
        if with_logits:
            embedded, scores = embed_and_forward(model, batch)
        else:
            embedded, scores = cast(Embeds, model).embed(batch), batch.new_zeros(len(batch), 0)
        if start == 0:
            features = embedded.new_zeros(groups, embedded.shape[1])
            logits = scores.new_zeros(groups, scores.shape[1])
        first, last = int(ends[part.start]), int(ends[part.stop - 1]) + 1
        here = torch.arange(first, last, device=device)[:, None] == members[part][None, :]
        features[first:last] += here.to(embedded) @ embedded
        logits[first:last] += here.to(scores) @ scores
    size = counts.to(features)[:, None]
    return features / size, logits / size


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of samples of one class each.

    Attributes
    ----------
    order : int64 [M]
        Sample numbers, group after group; samples of classes that are not sent are
        left out.
    counts : int64 [G]
        Samples in each group.
    classes : int64 [G]
        Class of each group, ascending.
    """

    order: NDArray[np.int64]
    counts: NDArray[np.int64]
    classes: NDArray[np.int64]

    @property
    def members(self) -> NDArray[np.int64]:
        """Return the group of each sample of `order`."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def group_counts(samples: int, avg_num: int) -> NDArray[np.int64]:
    """Return the sizes of the groups of a class: max(1, n // avg_num), as equal as can be.

    The remainder goes into the groups instead of into a small one of its own, so that
    no group is smaller than avg_num unless the whole class is.

    >>> group_counts(100, 32), group_counts(5, 32)
    (array([34, 33, 33]), array([5]))
    """
    number = max(1, samples // avg_num)
    small, larger = divmod(samples, number)
    return np.array([small + 1] * larger + [small] * (number - larger), dtype=np.int64)


def make_groups(
    labels: NDArray[np.int64],
    avg_num: int,
    min_group: int,
    source: np.random.Generator,
    max_samples: int = 0,
) -> Groups:
    """Shuffle the samples of each class and cut them into groups.

    A class with fewer than `min_group` samples gives none: a mean over few samples is
    close to a sample.  Shuffling before grouping makes the groups of two rounds
    different cuts through the same class.  With `max_samples`, only so many of a class
    are taken, others in every round.

    So no group has fewer than min(avg_num, min_group) samples.
    """
    checks.integer("avg_num", avg_num, at_least=1)
    checks.integer("min_group", min_group, at_least=1)
    checks.integer("max_samples", max_samples, at_least=0)
    if 0 < max_samples < min(avg_num, min_group):
        raise InvalidValueError(
            f"max_samples={max_samples} must be 0 (all) or at least {min(avg_num, min_group)}, "
            f"the smaller of avg_num={avg_num} and min_group={min_group}"
        )
    orders, counts, classes = [], [], []
    for label in np.unique(labels):
        samples = np.flatnonzero(labels == label)
        if len(samples) < min_group:
            continue
        samples = source.permutation(samples)[: max_samples or None]
        sizes = group_counts(len(samples), avg_num)
        orders.append(samples)
        counts.append(sizes)
        classes.append(np.full(len(sizes), label))
    nothing = [np.zeros(0, dtype=np.int64)]
    return Groups(
        *(np.concatenate(parts or nothing).astype(np.int64) for parts in (orders, counts, classes))
    )


_HEAD = 3  # feature model, class, samples


@dataclass(frozen=True, eq=False)
class StatisticsTable:
    """Means over groups of samples, as seen by one or several feature models.

    Attributes
    ----------
    models, classes, counts : int64 [G]
        Which feature model, which class, how many samples.
    features : [G, D]
        Mean embedding of the group.
    logits : [G, K]
        Mean scores of the group; K is 0 where they are not sent.
    """

    models: torch.Tensor
    classes: torch.Tensor
    counts: torch.Tensor
    features: torch.Tensor
    logits: torch.Tensor

    def __len__(self) -> int:
        return len(self.classes)

    def num_bytes(self, bits: int = 32) -> int:
        """Bytes of the table as `pack` writes it, its three numbers a row included."""
        numbers = self.features.shape[1] + self.logits.shape[1]
        return 4 * len(self) * (_HEAD + coded_width(numbers, bits))

    def pack(self, bits: int = 32) -> torch.Tensor:
        """Return the rows as one vector; the vectors of clients can be laid end to end.

        Class, model and count are whole numbers below 2^24, exact in float32; means have
        `bits` bits each (`encode_rows`).
        """
        head = torch.stack([self.models, self.classes, self.counts], dim=1)
        means = encode_rows(torch.cat([self.features, self.logits], dim=1), bits)
        return torch.cat([head.to(means), means], dim=1).flatten()

    @classmethod
    def unpack(
        cls, vector: torch.Tensor, features: int, logits: int, bits: int = 32
    ) -> StatisticsTable:
        """Read what `pack` wrote, for one client or many."""
        width = _HEAD + coded_width(features + logits, bits)
        if vector.numel() % width:
            raise InvalidValueError(
                f"a table of {vector.numel()} numbers must consist of rows of {width}"
            )
        rows = vector.view(-1, width)
        models, classes, counts = rows[:, :_HEAD].round().to(torch.int64).unbind(dim=1)
        means = decode_rows(rows[:, _HEAD:], features + logits, bits)
        return cls(models, classes, counts, means[:, :features], means[:, features:])

    def of_model(self, number: int) -> StatisticsTable:
        """Return the rows of one feature model."""
        at = self.models == number
        return StatisticsTable(
            *(
                part[at]
                for part in (self.models, self.classes, self.counts, self.features, self.logits)
            )
        )


@dataclass(frozen=True, eq=False)
class Drawn:
    """Groups drawn for each class: means [P, S, .] and weights [P, S] that sum to 1."""

    features: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor

    def averaged(self) -> Drawn:
        """Return the weighted means as one group a class."""
        weights = self.weights[..., None]
        return Drawn(
            (weights * self.features).sum(dim=1, keepdim=True),
            (weights * self.logits).sum(dim=1, keepdim=True),
            self.weights.new_ones(len(self.weights), 1),
        )


class ClassTargets:
    """The groups of one feature model, by class.

    Parameters
    ----------
    table
        Rows of one feature model, from all clients of the round.
    per_step
        Groups of a class that one step sees, drawn without replacement; None: all of
        them.
    average
        Whether the groups of a draw may be merged into their weighted mean, which is
        all that `avg-loss` needs.
    """

    def __init__(
        self, table: StatisticsTable, per_step: int | None = None, average: bool = True
    ) -> None:
        if per_step is not None:
            checks.integer("per_step", per_step, at_least=1)
        self.classes: list[int] = torch.unique(table.classes).tolist()
        self._features, self._logits = table.features, table.logits
        self._counts = table.counts.to(table.features)
        groups = table.classes.cpu().numpy()
        self._rows = [np.flatnonzero(groups == label) for label in self.classes]
        self._per_step = per_step
        self._average = average
        largest = max((len(rows) for rows in self._rows), default=0)
        self._fixed = None
        if per_step is None or per_step >= largest:
            self._fixed = self._gather(self._rows)

    def draw(self, source: np.random.Generator) -> Drawn:
        """Return what one step is matched to."""
        if self._fixed is not None:
            return self._fixed
        return self._gather([self._some(rows, source) for rows in self._rows])

    def _some(self, rows: NDArray[np.int64], source: np.random.Generator) -> NDArray[np.int64]:
        if self._per_step is None or len(rows) <= self._per_step:
            return rows
        return source.choice(rows, self._per_step, replace=False)

    def _gather(self, chosen: list[NDArray[np.int64]]) -> Drawn:
        """Lay the chosen groups side by side, short classes filled up with weight 0."""
        device = self._features.device
        most = max((len(rows) for rows in chosen), default=0)
        index = np.zeros((len(chosen), most), dtype=np.int64)
        filled = np.zeros((len(chosen), most), dtype=np.float32)
        for place, rows in enumerate(chosen):
            # A class is filled up with its own row: 0 times another's NaN would be NaN.
            index[place] = rows[0]
            index[place, : len(rows)] = rows
            filled[place, : len(rows)] = 1
        at = torch.from_numpy(index).to(device)
        weights = self._counts[at] * torch.from_numpy(filled).to(self._counts)
        weights = weights / weights.sum(dim=1, keepdim=True)
        drawn = Drawn(self._features[at], self._logits[at], weights)
        return drawn.averaged() if self._average else drawn


ROW_BLOCK = 512
_ROOM = 24  # bits of a whole number that float32 holds exactly


def coded_width(numbers: int, bits: int) -> int:
    """Return how many float32 a row of so many numbers becomes.

    >>> coded_width(4096, 32), coded_width(4096, 12), coded_width(4096, 8)
    (4096, 2064, 1382)
    """
    _check_bits(bits)
    if bits == 32:
        return numbers
    return 2 * _row_blocks(numbers) + math.ceil(numbers * bits / _ROOM)


def _check_bits(bits: int) -> None:
    if bits not in ROW_BITS:
        raise InvalidValueError(f"row_bits={bits} must be one of {', '.join(map(str, ROW_BITS))}")


def _row_blocks(numbers: int) -> int:
    return math.ceil(numbers / ROW_BLOCK)


def encode_rows(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Return rows [G, N] as they travel, [G, coded_width(N, bits)]."""
    _check_bits(bits)
    groups, numbers = rows.shape
    if bits == 32:
        return rows
    if not rows.numel():
        return rows.new_zeros(groups, coded_width(numbers, bits))
    blocks = _row_blocks(numbers)
    # The last number stands in for those that the last block lacks: no range changes.
    full = torch.cat([rows, rows[:, -1:].expand(-1, blocks * ROW_BLOCK - numbers)], dim=1)
    full = full.view(groups, blocks, ROW_BLOCK)
    low, high = full.amin(dim=2), full.amax(dim=2)
    step = high / (2**bits - 1) - low / (2**bits - 1)  # apart, so that no difference overflows
    # A block of equal numbers has no step; any will do.
    codes = (full / _positive(step)[..., None] - (low / _positive(step))[..., None]).round()
    codes = codes.nan_to_num().clamp(0, 2**bits - 1).flatten(1)[:, :numbers]
    many = _ROOM // bits
    codes = functional.pad(codes, (0, -numbers % many)).view(groups, -1, many)
    places = (2.0 ** (bits * torch.arange(many))).to(codes)
    return torch.cat([low, step, (codes * places).sum(dim=2)], dim=1)


def _positive(step: torch.Tensor) -> torch.Tensor:
    return torch.where(step > 0, step, torch.ones_like(step))


def decode_rows(coded: torch.Tensor, numbers: int, bits: int) -> torch.Tensor:
    """Return the rows [G, N] that `encode_rows` was given, to half a step."""
    _check_bits(bits)
    if bits == 32:
        return coded
    blocks, many = _row_blocks(numbers), _ROOM // bits
    low, step, whole = coded[:, :blocks], coded[:, blocks : 2 * blocks], coded[:, 2 * blocks :]
    shifts = bits * torch.arange(many, device=coded.device)
    # What a stranger sent may be no whole number, or none in range; its codes are in range.
    whole = whole.nan_to_num().clamp(0, 2**_ROOM - 1).round().to(torch.int64)
    codes = ((whole[..., None] >> shifts) & (2**bits - 1)).flatten(1)[:, :numbers].to(coded)
    block_of = torch.arange(numbers, device=coded.device) // ROW_BLOCK
    return torch.addcmul(low[:, block_of], step[:, block_of], codes)
