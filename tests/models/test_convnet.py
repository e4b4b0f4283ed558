"""The network of the condensation literature: its published sizes and its shape.

What it computes is compared with NumPy in `tests/condense/test_condense_numpy.py`.
"""

from __future__ import annotations

import doctest

import pytest
import torch
from torch import nn

import fedquilt.models.networks
from fedquilt.errors import InvalidValueError
from fedquilt.models.networks import ConvNet


@pytest.mark.parametrize(
    ("shape", "classes", "parameters", "width"),
    [
        ((3, 32, 32), 10, 320_010, 2048),
        ((3, 32, 32), 100, 504_420, 2048),
        ((1, 28, 28), 10, 317_706, 2048),
        ((3, 64, 64), 200, 1_938_120, 8192),
    ],
)
def test_published_sizes(
    shape: tuple[int, int, int], classes: int, parameters: int, width: int
) -> None:
    net = ConvNet(shape, classes)
    assert net.get_num_parameters() == parameters
    with torch.no_grad():
        embedded, logits = net.embed_and_forward(torch.zeros(2, *shape))
    assert embedded.shape == (2, width)
    assert logits.shape == (2, classes)


@pytest.mark.parametrize(
    ("shape", "width", "depth"),
    [
        ((1, 8, 8), 4, 3),
        ((1, 9, 13), 4, 2),
        ((3, 12, 8), 5, 2),
        ((2, 17, 15), 3, 3),
        ((3, 2, 2), 4, 1),
    ],
)
def test_any_shape_that_leaves_a_pixel(shape: tuple[int, int, int], width: int, depth: int) -> None:
    net = ConvNet(shape, 7, width, depth)
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    assert net(x).shape == (3, 7)
    channels = [shape[0]] + [width] * (depth - 1)
    by_hand = sum(9 * c * width + width + 2 * width for c in channels)
    assert net.get_num_parameters() == by_hand + (net.embed(x).shape[1] + 1) * 7


def test_one_pass_and_two_agree() -> None:
    net = ConvNet((3, 8, 8), 5, width=4, depth=2)
    x = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    embedded, logits = net.embed_and_forward(x)
    assert torch.equal(embedded, net.embed(x))
    assert torch.equal(logits, net(x))


def test_training_and_evaluation_are_the_same_and_images_do_not_mix() -> None:
    net = ConvNet((3, 8, 8), 5, width=4, depth=2)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    together = net.train()(x)
    assert torch.equal(net.eval()(x), together)
    torch.testing.assert_close(net(x[1:2]), together[1:2])
    assert not list(net.buffers())


def test_contrast_of_an_image_is_normed_away() -> None:
    """Without bias the first norm sees a multiple of the same map."""
    net = ConvNet((3, 8, 8), 5, width=4, depth=1)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    net.double()
    net.features[0].bias.data.zero_()
    torch.testing.assert_close(net(x), net(1000 * x), rtol=0, atol=1e-3)


def test_parts_stand_in_the_published_order() -> None:
    kinds = [type(layer) for layer in ConvNet((1, 28, 28)).features]
    assert kinds == [nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.AvgPool2d] * 3
    paddings = [ConvNet((c, 28, 28)).features[at].padding for c in (1, 3) for at in (0, 4, 8)]
    assert paddings == [(3, 3), (1, 1), (1, 1), (1, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((3, 4, 4), 10, 8, 3), "depth=3 must leave at least one pixel"),
        (((3, 32), 10, 8, 3), "input_shape"),
        (((0, 32, 32), 10, 8, 3), "input_shape"),
        (((3, 32, 32), 0, 8, 3), "num_classes=0"),
        (((3, 32, 32), 10, 0, 3), "width=0"),
        (((3, 32, 32), 10, 8, 0), "depth=0"),
    ],
)
def test_shapes_that_cannot_be_are_refused(arguments, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        ConvNet(*arguments)


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(fedquilt.models.networks).failed == 0
