"""The models of the QuAP-FL API document, and small ones for trying things out.

`make_model` builds one by name for a data set's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.config.choices import BESIDE_MODEL, DRAWN_MODELS
from fedquilt.models.adapters import merge_cores, with_cores
from fedquilt.models.features import FeatureModel, OwnFront, make_feature_model
from fedquilt.models.lora import lora, merge_lora
from fedquilt.models.networks import (
    MLP,
    CharLSTM,
    CIFAR10Model,
    ConvNet,
    DigitsModel,
    ExitNet,
    LeNet,
    Linear,
    MNISTModel,
    ResNet18,
)

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
    "merge_cores",
    "merge_lora",
    "with_cores",
]


MODELS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "digits": lambda shape, classes: DigitsModel(classes),
    "mnist": lambda shape, classes: MNISTModel(classes),
    "cifar10": lambda shape, classes: CIFAR10Model(classes),
    "mlp": lambda shape, classes: MLP(shape, classes),
    "linear": lambda shape, classes: Linear(shape, classes),
    "lenet": lambda shape, classes: LeNet(shape, classes),
    "exits": lambda shape, classes: ExitNet(classes, shape[0]),
    "convnet": lambda shape, classes: ConvNet(shape, classes),
    "convnet-64": lambda shape, classes: ConvNet(shape, classes, width=64),
    "convnet-32": lambda shape, classes: ConvNet(shape, classes, width=32),
    "resnet18": lambda shape, classes: ResNet18(classes, shape[0]),
    "resnet18-batchnorm": lambda shape, classes: ResNet18(classes, shape[0], norm="batch"),
    "lstm": lambda shape, classes: CharLSTM(classes),
    "hog-linear": lambda shape, classes: make_feature_model("hog-linear", shape, classes),
    "scatter-linear": lambda shape, classes: make_feature_model("scatter-linear", shape, classes),
    **{name: partial(make_feature_model, name) for name in (BESIDE_MODEL, *DRAWN_MODELS)},
}
_MADE_FOR: dict[tuple[int, ...], str] = {
    (1, 8, 8): "digits",
    (1, 28, 28): "mnist",
    (3, 32, 32): "cifar10",
    (3, 64, 64): "resnet18",
    (80,): "lstm",
}


def make_model(name: str, input_shape: Sequence[int], num_classes: int, seed: int) -> nn.Module:
    """Build a model with initial weights drawn from `seed`.

    `auto` takes the model made for the input shape, or an MLP for any other.
    """
    shape = tuple(input_shape)
    if name == "auto":
        name = _MADE_FOR.get(shape, "mlp")
    checks.choice("model", name, ["auto", *MODELS])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = MODELS[name](shape, num_classes)
    _check_fits(name, model, shape)
    return model


@torch.no_grad()
def _check_fits(name: str, model: nn.Module, shape: tuple[int, ...]) -> None:
    """Try one input, so that a misfit is an error here and not in the first round."""
    try:
        model.eval()(torch.zeros(1, *shape))
    except (RuntimeError, ValueError, IndexError) as error:
        raise InvalidValueError(
            f"model={name!r} must take inputs of shape {shape}, which it does not: {error}"
        ) from error
    model.train()
