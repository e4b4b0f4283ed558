"""Step 8 when clients never train: images are matched to the release, the model trains on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.condense.augment import Augmentation
from fedquilt.condense.matching import MatchingSettings, View, match
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.condense.table import StatisticsTable
from fedquilt.condense.targets import ClassTargets
from fedquilt.condense.training import TrainingSettings, train_on
from fedquilt.condensing.lens import Lens
from fedquilt.learning import FlatModel
from fedquilt.randomness import generator, torch_seed

Progress = Callable[[str, float], None]
"""Told what the server is doing, and which part of it is done."""


class CondensingServer:
    """Holds the synthetic set, matches it to what clients sent, trains the model on it.

    Parameters
    ----------
    model
        The global model, as it starts; it is copied.
    synthetic
        The images to begin with; they stay from round to round.
    lens
        What the clients of the round looked through.
    groups_per_step
        Groups of a class that a matching step sees; None: all.
    trains_in
        Whether the model is trained in a round.
    restarts
        Whether training begins at the first weights each time, instead of where the
        last round ended.
    """

    def __init__(
        self,
        model: nn.Module,
        synthetic: SyntheticSet,
        lens: Lens,
        matching: MatchingSettings,
        training: TrainingSettings,
        augmentation: Augmentation,
        *,
        groups_per_step: int | None = None,
        trains_in: Callable[[int], bool] = lambda round_index: True,
        restarts: bool = False,
        seed: int = 0,
    ) -> None:
        self.synthetic = synthetic
        self.lens = lens
        self.progress: Progress | None = None
        self._flat = FlatModel(copy.deepcopy(model), synthetic.images[:2])
        self._first = self._flat.read().clone()
        self._matching = matching
        self._training = training
        self._augmentation = augmentation
        self._groups_per_step = groups_per_step
        self._trains_in = trains_in
        self._restarts = restarts
        self._seed = seed
        self._report: dict[str, float] = {}

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Match the images to the tables in `update`; return the weights trained on them."""
        index = self.lens.round_index
        table = StatisticsTable.unpack(update, self.lens.num_features, self.lens.num_logits)
        self._report = {"groups": len(table), "matching_loss": self._match(table, index)}
        if not self._trains_in(index):
            return weights
        return self._train(self._first if self._restarts else weights, index)

    def _match(self, table: StatisticsTable, index: int) -> float:
        average = self._matching.loss_computation == "avg-loss"
        views = [
            View(model, ClassTargets(table.of_model(number), self._groups_per_step, average), seen)
            for number, (model, seen) in enumerate(
                zip(self.lens.models, self.lens.transforms, strict=True)
            )
        ]
        steps = self._matching.iterations
        source = generator(self._seed, "matching", index)
        return match(self.synthetic, views, self._matching, source, self._teller("matching", steps))

    def _train(self, weights: torch.Tensor, index: int) -> torch.Tensor:
        self._flat.write(weights)
        teller = self._teller("training", self._training.epochs)
        # Layers that drop out draw from torch's global generator.
        with torch.random.fork_rng(devices=self._devices()):
            torch.manual_seed(torch_seed(self._seed, "dropout", index))
            self._report["epoch_avg_loss"] = train_on(
                self._flat.module,
                self.synthetic.images,
                self.synthetic.labels,
                self._training,
                self._augmentation,
                generator(self._seed, "training", index),
                teller,
            )
        return self._flat.read().clone()

    def _devices(self) -> list[torch.device]:
        device = self.synthetic.images.device
        return [device] if device.type == "cuda" else []

    def _teller(self, what: str, total: int) -> Callable[[int], None] | None:
        tell = self.progress
        if tell is None:
            return None
        return lambda done: tell(what, done / total)

    def report(self) -> dict[str, float]:
        """Return groups, matching loss and, where the model was trained, its loss."""
        return dict(self._report)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the images: all that one round leaves to the next beside the weights."""
        return {"images": self.synthetic.images.detach().cpu().numpy()}

    def load_state(self, state: dict[str, NDArray[Any]], device: torch.device) -> None:
        """Take over what `state` returned."""
        images = torch.from_numpy(np.array(state["images"], dtype=np.float32)).to(device)
        self.synthetic.images.copy_(images)
