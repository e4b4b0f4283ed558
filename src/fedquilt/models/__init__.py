"""Models of the seed documents and small ones for trying things out.

`make_model` builds one by name for a data set's shape.
"""

from fedquilt.models.convnet import ConvNet
from fedquilt.models.exits import ExitNet
from fedquilt.models.features import FeatureModel
from fedquilt.models.images import CIFAR10Model, DigitsModel, MNISTModel
from fedquilt.models.registry import MODELS, make_model
from fedquilt.models.simple import MLP, Linear

__all__ = [
    "MLP",
    "MODELS",
    "CIFAR10Model",
    "ConvNet",
    "DigitsModel",
    "ExitNet",
    "FeatureModel",
    "Linear",
    "MNISTModel",
    "make_model",
]
