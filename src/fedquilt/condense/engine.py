"""Step 3 when clients never train: they send statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator
from fedquilt.condense.augment import Augmentation, Transform
from fedquilt.condense.embeds import (
    SEED_BYTES,
    FeatureModels,
    HalfPrecision,
    TwoMoments,
    embed_and_forward,
    embedding_model,
    frozen_copy,
)
from fedquilt.condense.statistics import Groups, StatisticsTable, group_means, make_groups
from fedquilt.method import Progress
from fedquilt.training import ClientIds, ClientUpdate, Engine, FlatModel, Task


class RoundModels:
    """The feature models and augmentations of the round that is open.

    Both sides derive them from the global model, the round and the run's seed, so that
    weights (or a seed alone) are all that must travel; here they share one object.

    Parameters
    ----------
    model
        The global model, as it starts; it is copied.
    sample
        One input or more, to learn what the model puts out.
    classes
        All classes of the run; augmentation has a row of parameters for each.
    moments
        2: embeddings are followed by their squares.
    half
        Whether feature models compute in bfloat16.
    row_bits
        Bits of a number on its way (`statistics.encode_rows`).
    """

    def __init__(
        self,
        model: nn.Module,
        sample: torch.Tensor,
        features: FeatureModels,
        augmentation: Augmentation,
        classes: tuple[int, ...],
        *,
        embed_layer: str | None = None,
        with_logits: bool = False,
        moments: int = 1,
        half: bool = False,
        row_bits: int = 32,
        seed: int = 0,
    ) -> None:
        self._flat = FlatModel(copy.deepcopy(model), sample[:2])
        self._layer = embed_layer
        self._features = features
        self._augmentation = augmentation
        self._seed = seed
        self._moments, self._half = moments, half
        self.classes = classes
        self.with_logits = with_logits
        self.row_bits = row_bits
        # Weights [models, parameters] of a trained pool; empty until there is one.
        self.pool = torch.zeros(0, 0)
        self.train_pool: Callable[[int], torch.Tensor] | None = None
        self.round_index = -1
        self.models: list[nn.Module] = []
        self.transforms: list[Transform] = []
        with torch.no_grad():
            trial = self._embedding(frozen_copy(self._flat.module))
            embedded, scores = embed_and_forward(trial, sample[:1])
        self.num_features = embedded.shape[1]
        self.num_logits = scores.shape[1] if with_logits else 0

    def open(self, weights: torch.Tensor, round_index: int) -> None:
        """Build the models and draw the augmentations of a round."""
        if self.train_pool is not None:
            self.pool = self.train_pool(round_index)
        self._flat.write(weights)
        self.round_index = round_index
        numbers = range(self._features.count)
        self.models = self._pooled(numbers) or [
            self._embedding(self._features.build(self._flat.module, round_index, number))
            for number in numbers
        ]
        self.transforms = [
            self._augmentation.draw(
                generator(self._seed, "siamese", round_index, number), len(self.classes)
            )
            for number in numbers
        ]

    def _pooled(self, numbers: Iterable[int]) -> list[nn.Module]:
        """Return the trained models in turn, one for each number; none without a pool."""
        kept = []
        for weights in self.pool:
            self._flat.write(weights)
            kept.append(self._embedding(frozen_copy(self._flat.module)))
        return [kept[number % len(kept)] for number in numbers] if kept else []

    @property
    def are_trained(self) -> bool:
        """Whether the models of the round have been trained, so that their scores say something."""
        return len(self.pool) > 0 or self._features.kind in ("global", "perturbed")

    @property
    def need_weights(self) -> bool:
        """Whether the feature models depend on the global model, and not on a seed alone."""
        return self._features.kind in ("global", "perturbed")

    def weights(self) -> torch.Tensor:
        """Return the weights that were written last."""
        return self._flat.read()

    def bytes_down(self) -> int:
        """Return what one client receives in a round."""
        if len(self.pool):
            return self.pool.numel() * self.pool.element_size() + SEED_BYTES
        return self._features.bytes_down(self._flat.module)

    def table(self, vector: torch.Tensor) -> StatisticsTable:
        """Read the tables that clients have packed."""
        return StatisticsTable.unpack(vector, self.num_features, self.num_logits, self.row_bits)

    def _embedding(self, module: nn.Module) -> nn.Module:
        model = embedding_model(module, self._layer)
        model = HalfPrecision(model) if self._half else model
        return TwoMoments(model) if self._moments == 2 else model


# Clients share batches as long as they hold no more samples than this together.
_MAX_SAMPLES_TOGETHER = 65536


class TableSource(Engine):
    """What a round's tables follow from, and which vectors are tables of it."""

    round_models: RoundModels
    table_size: int | None = None

    def outgoing(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the weights, those of the pool, or nothing where a seed alone decides."""
        if len(self.round_models.pool):
            return self.round_models.pool.flatten()
        return weights if self.round_models.need_weights else weights[:0]

    def incoming(self, sent: torch.Tensor) -> torch.Tensor:
        """Return the weights to build feature models from; take in those of a pool."""
        models = self.round_models
        if models.need_weights:
            return sent
        here = models.weights()
        models.train_pool = None  # the server's images, which a pool is trained on, are elsewhere
        models.pool = sent.view(-1, here.numel()) if sent.numel() else sent.view(0, 0)
        return here

    def objection(self, vector: torch.Tensor) -> str | None:
        """Refuse what is no table of this round's models and classes, with finite means."""
        models = self.round_models
        try:
            table = models.table(vector)
        except InvalidValueError as error:
            return str(error)
        known = torch.isin(table.classes, torch.tensor(models.classes, device=vector.device))
        counted = (table.counts >= 1) & (table.models >= 0) & (table.models < len(models.models))
        if not bool((known & counted).all()):
            return "rows must be of the round's models"
        # Coded numbers can be read as infinite where none of those that travelled is.
        means = (table.features, table.logits)
        finite = all(bool(torch.isfinite(part).all()) for part in means)
        overflows = not finite and bool(torch.isfinite(vector).all())
        return "means must be finite" if overflows else None


class StatisticsEngine(TableSource):
    """Send means over groups of samples, as one table a client.

    Several clients go through a feature model in one stream of batches; each client's
    rows are its own.

    Parameters
    ----------
    task : Task
        All samples, and who holds which.
    round_models : RoundModels
        The feature models that the statistics are computed with.
    avg_num, min_group, max_samples
        See `fedquilt.condense.statistics`; at most `max_samples` of a class, drawn anew
        for each model, are used (0: all).
    """

    def __init__(
        self,
        task: Task,
        round_models: RoundModels,
        *,
        avg_num: int,
        min_group: int,
        max_samples: int = 0,
        seed: int = 0,
    ) -> None:
        self.task = task
        self.round_models = round_models
        self.avg_num = avg_num
        self.min_group = min_group
        self.max_samples = max_samples
        self.bytes_up = 0
        self.bytes_down = 0
        self.progress: Progress | None = None
        self._clients_done, self._cohort_size = 0.0, 1
        self._seed = seed
        self._labels = task.targets.cpu().numpy()
        largest = max(int(self._labels.max(initial=-1)), *round_models.classes)
        row_of = np.full(largest + 1, -1)
        row_of[list(round_models.classes)] = np.arange(len(round_models.classes))
        self._rows = torch.from_numpy(row_of).to(task.inputs.device)[task.targets]

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the table of each client of the cohort as a vector, in its order."""
        self.round_models.open(start, round_index)
        self._clients_done, self._cohort_size = 0.0, len(cohort)
        self.bytes_up, self.bytes_down = 0, len(cohort) * self.round_models.bytes_down()
        for clients in self._chunks([int(client) for client in cohort]):
            for client, table in zip(clients, self._tables(clients, round_index), strict=True):
                bits = self.round_models.row_bits
                self.bytes_up += table.num_bytes(bits)
                size = len(self.task.clients[client])
                yield ClientUpdate(client, table.pack(bits), size, math.nan)

    def _chunks(self, cohort: list[int]) -> Iterator[list[int]]:
        """Divide the cohort, in its order, into chunks of few enough samples."""
        part: list[int] = []
        size = 0
        for client in cohort:
            held = len(self.task.clients[client])
            if part and size + held > _MAX_SAMPLES_TOGETHER:
                yield part
                part, size = [], 0
            part.append(client)
            size += held
        if part:
            yield part

    def _tables(self, clients: list[int], round_index: int) -> list[StatisticsTable]:
        """Return the table of each client, with the rows of all feature models."""
        tables = []
        for number in range(len(self.round_models.models)):
            tables.append(self._tables_of_model(number, clients, round_index))
            self._report_progress(len(clients) / len(self.round_models.models))
        return [joined(parts) for parts in zip(*tables, strict=True)]

    def _report_progress(self, clients: float) -> None:
        self._clients_done += clients
        if self.progress is not None:
            self.progress("looking", self._clients_done / self._cohort_size)

    def _tables_of_model(
        self, number: int, clients: list[int], round_index: int
    ) -> list[StatisticsTable]:
        groups = [self._groups(client, round_index, number) for client in clients]
        order = torch.from_numpy(np.concatenate([g.order for g in groups]))
        order = order.to(self.task.inputs.device)
        counts = torch.from_numpy(np.concatenate([g.counts for g in groups]))
        features, logits = group_means(
            self.round_models.models[number],
            self.task.inputs,
            order,
            counts,
            transform=self.round_models.transforms[number],
            rows=self._rows[order],
            with_logits=self.round_models.with_logits,
        )
        device = features.device
        sizes = [len(g.counts) for g in groups]
        parts = zip(groups, torch.split(features, sizes), torch.split(logits, sizes), strict=True)
        return [
            StatisticsTable(
                torch.full((len(g.counts),), number, device=device),
                torch.from_numpy(g.classes).to(device),
                torch.from_numpy(g.counts).to(device),
                f.reshape(len(g.counts), self.round_models.num_features),
                z.reshape(len(g.counts), self.round_models.num_logits),
            )
            for g, f, z in parts
        ]

    def _groups(self, client: int, round_index: int, number: int) -> Groups:
        """Return the groups of a client's samples, by their numbers in the whole data."""
        samples = np.asarray(self.task.clients[client])
        source = generator(self._seed, "groups", round_index, client, number)
        groups = make_groups(
            self._labels[samples], self.avg_num, self.min_group, source, self.max_samples
        )
        return Groups(samples[groups.order], groups.counts, groups.classes)


def joined(tables: Sequence[StatisticsTable]) -> StatisticsTable:
    """Return the rows of several tables as one."""
    return StatisticsTable(
        *(
            torch.cat([getattr(table, name) for table in tables])
            for name in ("models", "classes", "counts", "features", "logits")
        )
    )
