"""Training the global model on a synthetic set, in a round."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedquilt.condense.augment import Augmentation
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.condense.training import TrainingSettings, train_on
from fedquilt.condensing.lens import Progress
from fedquilt.learning import FlatModel
from fedquilt.randomness import generator, torch_seed


class Trainer:
    """Trains copies of a model on images, from its first weights or from given ones."""

    def __init__(
        self,
        model: nn.Module,
        sample: torch.Tensor,
        settings: TrainingSettings,
        augmentation: Augmentation,
        seed: int,
    ) -> None:
        self._flat = FlatModel(copy.deepcopy(model), sample[:2])
        self._first = self._flat.read().clone()
        self.settings = settings
        self.augmentation = augmentation
        self._seed = seed

    def train(
        self,
        weights: torch.Tensor | None,
        synthetic: SyntheticSet,
        round_index: int,
        progress: Progress | None = None,
    ) -> tuple[torch.Tensor, float]:
        """Return the trained weights and the mean loss of an epoch; None: from the first."""
        self._flat.write(self._first if weights is None else weights)
        device = synthetic.images.device
        told = None
        if progress is not None:
            total = self.settings.epochs
            told = lambda done: progress("training", done / total)  # noqa: E731
        # Layers that drop out draw from torch's global generator.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(torch_seed(self._seed, "dropout", round_index))
            loss = train_on(
                self._flat.module,
                synthetic.images,
                synthetic.labels,
                self.settings,
                self.augmentation,
                generator(self._seed, "training", round_index),
                told,
            )
        return self._flat.read().clone(), loss
