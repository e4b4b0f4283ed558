"""Step 8 when clients never train: images are matched to the release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator
from fedquilt.condense.engine import RoundModels
from fedquilt.condense.matching import MatchingSettings, SyntheticSet, View, match
from fedquilt.condense.statistics import ClassTargets, StatisticsTable
from fedquilt.condense.training import Learner, PoolSettings
from fedquilt.method import Progress


class Traffic(Protocol):
    """Who knows how many bytes the clients of a round sent and received."""

    bytes_up: int
    bytes_down: int


class CondensingServer:
    """Holds the synthetic set, matches it to what clients sent, trains the model on it.

    Parameters
    ----------
    trainer
        Trains the global model on images.
    synthetic
        The images to begin with; they stay from round to round.
    round_models
        The feature models that the clients of the round compute their statistics with.
    groups_per_step
        Groups of a class that a matching step sees; None: all.
    source
        Knows the bytes that the clients of the round sent and received; None: nobody counts.
    trains_in
        Whether the model is trained in a round.
    skips_empty
        Whether it is left alone in a round in which nobody sent anything.
    restarts
        Whether training begins at the first weights each time, instead of where the
        last round ended.
    pool
        The feature models that it trains on its images for the clients; None: none.
    first_bytes
        What clients sent for the images to begin with; counted in the first round.
    """

    def __init__(
        self,
        trainer: Learner,
        synthetic: SyntheticSet,
        round_models: RoundModels,
        matching: MatchingSettings,
        *,
        groups_per_step: int | None = None,
        source: Traffic | None = None,
        trains_in: Callable[[int], bool] = lambda round_index: True,
        skips_empty: bool = False,
        restarts: bool = False,
        pool: PoolSettings | None = None,
        first_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        self.synthetic = synthetic
        self.round_models = round_models
        self.progress: Progress | None = None
        self._trainer = trainer
        self.matching = matching
        self._groups_per_step = groups_per_step
        self._source = source
        self._trains_in = trains_in
        self._skips_empty = skips_empty
        self._restarts = restarts
        self._seed = seed
        self._report: dict[str, float] = {}
        self._sent: set[int] = set()
        self._first_bytes = first_bytes
        self._pool = pool
        if pool is not None:
            round_models.train_pool = self._train_pool
        # The round whose images the model has not been trained on yet; -1: none is open.
        self._untrained_round = -1

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Match the images to the tables in `update`; return the weights trained on them."""
        index = self.round_models.round_index
        table = self.round_models.table(update)
        self._sent |= set(table.classes.tolist())
        self._report = {
            "bytes_up": self._first_bytes if index == 0 else 0,
            "bytes_down": 0,
            "groups": len(table),
            "matching_loss": self._match(table, index),
        }
        if self._source is not None:
            self._report["bytes_up"] += self._source.bytes_up
            self._report["bytes_down"] = self._source.bytes_down
        if not bool(torch.isfinite(self.synthetic.images).all()):
            raise InvalidValueError(
                f"image_lr={self.matching.image_lr:g} must be smaller: the synthetic images left "
                f"the range of numbers in round {index}"
            )
        self._untrained_round = index
        if not self._trains_in(index) or (self._skips_empty and not len(table)):
            return weights
        trained, measured = self.train_if_stale(weights)
        self._report |= measured
        return trained

    def train_if_stale(self, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """Train the model on the images if it has not been trained since they were matched.

        Returns the weights and the measurements of the training.
        """
        if self._untrained_round < 0 or not self._sent:
            return weights, {}
        start = None if self._restarts else weights
        trained, loss = self._trainer.train(
            start, self.grown(), self._untrained_round, self.progress
        )
        self._untrained_round = -1
        return trained, {"epoch_avg_loss": loss}

    def _train_pool(self, round_index: int) -> torch.Tensor:
        """Return the feature models of a round; none before there are images of a class."""
        if self._pool is None or not self._sent:
            return torch.zeros(0, 0)
        return self._trainer.train_pool(self.grown(), round_index, self._pool)

    def grown(self) -> SyntheticSet:
        """Return the images of the classes that somebody has sent; the others are noise still."""
        self.check_contributed()
        return self.synthetic.of(sorted(self._sent))

    def check_contributed(self) -> None:
        """Raise where nobody has sent anything so far: all images are noise still."""
        if not self._sent:
            raise InvalidValueError(
                "nobody has sent statistics of any class, so there are no images: a client sends a "
                "class only if it holds min_group samples of it; lower min_group, or let clients "
                "with more samples join"
            )

    def not_sent(self) -> list[int]:
        """Return the classes that nobody has sent so far."""
        return [label for label in self.synthetic.classes if label not in self._sent]

    def _match(self, table: StatisticsTable, index: int) -> float:
        average = self.matching.loss_computation == "avg-loss"
        views = [
            View(
                model,
                ClassTargets(table.of_model(number), self._groups_per_step, average),
                transform,
                self.round_models.are_trained,
            )
            for number, (model, transform) in enumerate(
                zip(self.round_models.models, self.round_models.transforms, strict=True)
            )
        ]
        steps = self.matching.iterations
        source = generator(self._seed, "matching", index)
        return match(
            self.synthetic, views, self.matching, source, self._progress_of("matching", steps)
        )

    def _progress_of(self, what: str, total: int) -> Callable[[int], None] | None:
        progress = self.progress
        if progress is None:
            return None
        return lambda done: progress(what, done / total)

    def report(self) -> dict[str, float]:
        """Return bytes, groups, matching loss and, where the model was trained, its loss."""
        return dict(self._report)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the images, and the round that the model has not been trained after."""
        return {
            "images": self.synthetic.images.detach().cpu().numpy(),
            "behind": np.array(self._untrained_round),
            "sent": np.array(sorted(self._sent), dtype=np.int64),
        }

    def load_state(self, state: dict[str, NDArray[Any]], device: torch.device) -> None:
        """Restore what `state` returned."""
        self.synthetic.images.copy_(load_like(state, "images", self.synthetic.images))
        self._untrained_round = int(state["behind"])
        self._sent = set(state["sent"].tolist())


def load_like(state: dict[str, NDArray[Any]], name: str, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a saved state, which must have the shape of its successor."""
    saved = torch.from_numpy(np.array(state[name]))
    if saved.shape != like.shape:
        raise InvalidValueError(
            f"saved {name} of shape {tuple(saved.shape)} must have the shape {tuple(like.shape)}"
        )
    return saved.to(like)
