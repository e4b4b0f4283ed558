"""What clients and server look through in a round."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from fedquilt.condense.augment import Augmentation, Transform
from fedquilt.condense.embeds import embed_and_forward, embedding_model
from fedquilt.condense.feature_models import FeatureModels
from fedquilt.learning import FlatModel
from fedquilt.randomness import generator

Progress = Callable[[str, float], None]
"""Told what is being done within a round, and which part of it is done."""


class Lens:
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
        seed: int = 0,
    ) -> None:
        self._flat = FlatModel(copy.deepcopy(model), sample[:2])
        self._layer = embed_layer
        self._features = features
        self._augmentation = augmentation
        self._seed = seed
        self.classes = classes
        self.with_logits = with_logits
        self.round_index = -1
        self.models: list[nn.Module] = []
        self.transforms: list[Transform] = []
        with torch.no_grad():
            embedded, scores = embed_and_forward(self._embedding(self._flat.module), sample[:1])
        self.num_features = embedded.shape[1]
        self.num_logits = scores.shape[1] if with_logits else 0

    def open(self, weights: torch.Tensor, round_index: int) -> None:
        """Build the models and draw the augmentations of a round."""
        self._flat.write(weights)
        self.round_index = round_index
        numbers = range(self._features.count)
        self.models = [
            self._embedding(self._features.build(self._flat.module, round_index, number))
            for number in numbers
        ]
        self.transforms = [
            self._augmentation.draw(
                generator(self._seed, "siamese", round_index, number), len(self.classes)
            )
            for number in numbers
        ]

    def bytes_down(self) -> int:
        """Return what one client receives in a round."""
        return self._features.bytes_down(self._flat.module)

    def _embedding(self, module: nn.Module) -> nn.Module:
        return embedding_model(module, self._layer)
