"""MNIST with LeNet, as in HeFlwr's examples."""

from torch import nn

from fedquilt.flower.demo_data import own_file, public_data, share_of

DATASET = "mnist"


class LeNet(nn.Sequential):
    """LeNet (LeCun et al. 1998) with HeFlwr's widths 8, 16, 120, 84, for 28 x 28 images."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )


def make_model() -> nn.Module:
    """Return HeFlwr's LeNet."""
    return LeNet()


def client_data(context):
    """Return this node's own samples: of its file, or its share, with label skew as in HeFlwr."""
    return own_file(context) or share_of(DATASET, context, dirichlet_alpha=0.5)


def test_data():
    """Return what the server evaluates on."""
    return public_data(DATASET)[1]
