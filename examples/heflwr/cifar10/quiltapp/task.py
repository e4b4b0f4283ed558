"""CIFAR-10 with a ResNet-18, as in HeFlwr's examples."""

from torch import nn

from fedquilt.flower.demo_data import own_file, public_data, share_of
from fedquilt.models import ResNet18

DATASET = "cifar10"


def make_model() -> nn.Module:
    """Return a ResNet-18 with GroupNorm in the place of BatchNorm without memory."""
    return ResNet18()


def client_data(context):
    """Return this node's own samples: of its file, or its share, with label skew as in HeFlwr."""
    return own_file(context) or share_of(DATASET, context, dirichlet_alpha=0.5)


def test_data():
    """Return what the server evaluates on."""
    return public_data(DATASET)[1]
