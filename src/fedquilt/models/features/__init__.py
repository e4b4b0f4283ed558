"""Small trainable models on a frozen front that is computed without data.

>>> import torch
>>> from fedquilt.models.features import make_feature_model, precompute
>>> model = make_feature_model("hog-linear", (1, 8, 8), num_classes=10)
>>> [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
[('head.weight', (10, 128))]
>>> features = precompute(model.front, torch.rand(5, 1, 8, 8))
>>> tuple(features.shape)
(5, 128)
>>> torch.equal(model.on_features()(features), model(torch.zeros(5, 1, 8, 8)))  # untrained
True
"""

from fedquilt.models.features.frozen import FrozenFront, SampleStandard, draw
from fedquilt.models.features.gradients import OrientedGradients
from fedquilt.models.features.model import (
    CHOSEN_ON,
    FEATURE_MODELS,
    FeatureModel,
    GivenFeatures,
    OwnFront,
    choice_note,
    make_feature_model,
    precompute,
)
from fedquilt.models.features.scattering import Scattering

__all__ = [
    "CHOSEN_ON",
    "FEATURE_MODELS",
    "FeatureModel",
    "FrozenFront",
    "GivenFeatures",
    "OrientedGradients",
    "OwnFront",
    "SampleStandard",
    "Scattering",
    "choice_note",
    "draw",
    "make_feature_model",
    "precompute",
]
