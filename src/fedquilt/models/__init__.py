"""The models of the QuAP-FL API document, and small ones for trying things out.

`make_model` builds one by name for a data set's shape.
"""

from fedquilt.models.convolutional import ConvNet, ExitNet, LeNet, ResNet18
from fedquilt.models.features import FeatureModel, OwnFront
from fedquilt.models.images import MLP, CIFAR10Model, DigitsModel, Linear, MNISTModel
from fedquilt.models.lora import lora, merge_lora
from fedquilt.models.registry import MODELS, make_model
from fedquilt.models.texts import CharLSTM

__all__ = [
    "MLP",
    "MODELS",
    "CIFAR10Model",
    "CharLSTM",
    "ConvNet",
    "DigitsModel",
    "ExitNet",
    "FeatureModel",
    "LeNet",
    "Linear",
    "MNISTModel",
    "OwnFront",
    "ResNet18",
    "lora",
    "make_model",
    "merge_lora",
]
