"""Augmentation against per-pixel NumPy, hand-made cases, and the statistics of its draws."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from examples import examples
from fedquilt.condense.augment import FAMILIES, Augmentation, Transform
from fedquilt.errors import InvalidValueError

Array = NDArray[np.float64]
WIDTHS = {"color": 3, "crop": 2, "cutout": 2, "flip": 1, "scale": 2, "rotate": 1}


def pixels(image: Array, source) -> Array:
    """Return the image whose pixel (i, j) is the weighted sum over `source(i, j)`."""
    height, width = image.shape[1:]
    result = np.zeros_like(image)
    for i in range(height):
        for j in range(width):
            for weight, k, m in source(i, j):
                if 0 <= k < height and 0 <= m < width:
                    result[:, i, j] += weight * image[:, k, m]
    return result


def bilinear(image: Array, at) -> Array:
    """Sample at `at(dy, dx)`, offsets in pixels from the centre of the image."""
    cy, cx = (image.shape[1] - 1) / 2, (image.shape[2] - 1) / 2

    def source(i: int, j: int):
        y, x = at(i - cy, j - cx)
        y, x = y + cy, x + cx
        top, left = math.floor(y), math.floor(x)
        for k, wy in ((top, top + 1 - y), (top + 1, y - top)):
            for m, wx in ((left, left + 1 - x), (left + 1, x - left)):
                yield wy * wx, k, m

    return pixels(image, source)


def color(image: Array, u: Array) -> Array:
    image = image + (u[0] - 0.5)
    gray = image.mean(0, keepdims=True)
    image = (image - gray) * (2 * u[1]) + gray
    return (image - image.mean()) * (u[2] + 0.5) + image.mean()


def crop(image: Array, u: Array) -> Array:
    most = [int(0.125 * side + 0.5) for side in image.shape[1:]]
    y, x = (math.floor(v * (2 * m + 1)) - m for v, m in zip(u, most, strict=True))
    return pixels(image, lambda i, j: [(1.0, i + y, j + x)])


def cutout(image: Array, u: Array) -> Array:
    holes = []
    for v, side in zip(u, image.shape[1:], strict=True):
        length = int(0.5 * side + 0.5)
        centre = math.floor(v * (side + 1 if length % 2 == 0 else side))
        holes.append(range(centre - length // 2, centre - length // 2 + length))
    return pixels(image, lambda i, j: [(0.0 if i in holes[0] and j in holes[1] else 1.0, i, j)])


def flip(image: Array, u: Array) -> Array:
    return image[:, :, ::-1].copy() if u[0] < 0.5 else image


def scale(image: Array, u: Array) -> Array:
    x, y = 1 / 1.2 + u * (1.2 - 1 / 1.2)
    return bilinear(image, lambda dy, dx: (y * dy, x * dx))


def rotate(image: Array, u: Array) -> Array:
    angle = math.pi * 15 / 180 * (2 * u[0] - 1)
    cos, sin = math.cos(angle), math.sin(angle)
    return bilinear(image, lambda dy, dx: (sin * dx + cos * dy, cos * dx - sin * dy))


ORACLES = {
    "color": color,
    "crop": crop,
    "cutout": cutout,
    "flip": flip,
    "scale": scale,
    "rotate": rotate,
}


def images_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def drawn(family: str, rows: int, seed: int = 1) -> Transform:
    return Augmentation(family).draw(np.random.default_rng(seed), rows)


def fixed(family: str, *u: float) -> Transform:
    return Transform(family, torch.tensor([u], dtype=torch.float32))


def expected(transform: Transform, images: torch.Tensor, owner: list[int]) -> Array:
    table = transform.parameters.numpy().astype(np.float64)
    oracle = ORACLES[transform.family]
    return np.stack([oracle(x, table[r]) for x, r in zip(images.numpy(), owner, strict=True)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(6, 3, 9, 12), (6, 1, 8, 8), (6, 2, 13, 5), (6, 1, 1, 1)])
def test_every_family_agrees_with_numpy(family: str, shape: tuple[int, ...]) -> None:
    images = images_of(*shape)
    many, few, one = (drawn(family, rows) for rows in (6, 3, 1))
    owner = [2, 0, 0, 1, 2, 2]
    cases = (
        (many.apply(images), expected(many, images, list(range(6)))),
        (few.apply(images, torch.tensor(owner)), expected(few, images, owner)),
        (one.apply(images), expected(one, images, [0] * 6)),
        (one.apply(images, torch.zeros(6, dtype=torch.int64)), expected(one, images, [0] * 6)),
    )
    for result, truth in cases:
        np.testing.assert_allclose(result.numpy(), truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_single_precision_stays_single_and_close(family: str) -> None:
    images = images_of(5, 3, 16, 16)
    transform = drawn(family, 5)
    result = transform.apply(images.float())
    assert result.dtype == torch.float32
    # A sampling point a rounding error away moves a pixel by that error times the slope.
    np.testing.assert_allclose(result.numpy(), transform.apply(images).numpy(), atol=5e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_of_the_images_does_not_matter(family: str) -> None:
    images = images_of(4, 3, 8, 10).to(memory_format=torch.channels_last)
    for rows in (1, 4):
        transform = drawn(family, rows)
        assert torch.allclose(transform.apply(images), transform.apply(images.contiguous()))


def test_crop_by_hand() -> None:
    image = torch.arange(64.0).view(1, 1, 8, 8)  # shifts by -1, 0 or 1
    up_left = fixed("crop", 0.0, 0.0).apply(image)[0, 0]
    assert torch.equal(up_left[1:, 1:], image[0, 0, :-1, :-1])
    assert not up_left[0].any()
    assert not up_left[:, 0].any()
    down_right = fixed("crop", 0.999, 0.999).apply(image)[0, 0]
    assert torch.equal(down_right[:-1, :-1], image[0, 0, 1:, 1:])
    assert not down_right[-1].any()
    assert torch.equal(fixed("crop", 0.5, 0.5).apply(image), image)


def test_cutout_by_hand() -> None:
    image = torch.ones(1, 2, 8, 8)  # a hole of 4 by 4, its centre at a corner or in the middle
    corner = fixed("cutout", 0.0, 0.999).apply(image)
    assert corner.sum() == 2 * (64 - 4)
    assert not corner[:, :, :2, -2:].any()
    middle = fixed("cutout", 0.5, 0.5).apply(image)
    assert middle.sum() == 2 * (64 - 16)
    assert not middle[:, :, 2:6, 2:6].any()


def test_cutout_hides_what_is_not_a_number() -> None:
    image = torch.full((1, 1, 8, 8), math.nan)
    assert fixed("cutout", 0.5, 0.5).apply(image).isnan().sum() == 64 - 16


def test_middle_parameters_change_nothing() -> None:
    image = images_of(3, 3, 12, 12)
    one = float(np.float32((1 - 1 / 1.2) / (1.2 - 1 / 1.2)))
    for transform in (
        fixed("color", 0.5, 0.5, 0.5),
        fixed("rotate", 0.5),
        fixed("scale", one, one),
        fixed("flip", 0.5),
    ):
        assert torch.allclose(transform.apply(image), image, rtol=0, atol=1e-5)


def test_flip_by_hand() -> None:
    image = torch.tensor([[[[1.0, 2.0, 3.0]]]])
    assert fixed("flip", 0.49).apply(image).tolist() == [[[[3.0, 2.0, 1.0]]]]


def test_none_returns_the_same_tensor_and_draws_nothing() -> None:
    generator = np.random.default_rng(0)
    before = generator.bit_generator.state
    transform = Augmentation("none").draw(generator, 4)
    assert generator.bit_generator.state == before
    images = images_of(4, 1, 5, 5)
    assert transform.apply(images) is images
    assert transform.rows == 4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_gradient_in_the_images(family: str, rows: int) -> None:
    images = images_of(3, 2, 4, 5).requires_grad_()
    transform = drawn(family, rows)
    owner = torch.tensor([1, 0, 1]) if rows == 2 else None
    assert torch.autograd.gradcheck(lambda x: transform.apply(x, owner), images)


@pytest.mark.parametrize("family", FAMILIES)
def test_real_and_synthetic_batches_are_treated_alike(family: str) -> None:
    shared = images_of(1, 3, 10, 10)
    real = torch.cat((images_of(6, 3, 10, 10, seed=5), shared))
    synthetic = torch.cat((shared, images_of(2, 3, 10, 10, seed=6)))
    by_class = drawn(family, 4)
    for transform, real_owner, synthetic_owner in (
        (drawn(family, 1), None, None),
        (by_class, torch.tensor([0, 1, 2, 3, 0, 1, 3]), torch.tensor([3, 0, 2])),
    ):
        first = transform.apply(real, real_owner)[-1]
        second = transform.apply(synthetic, synthetic_owner)[0]
        assert torch.allclose(first, second, rtol=0, atol=1e-14)


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 20),
    more=st.integers(0, 20),
    families=st.lists(st.sampled_from(FAMILIES), min_size=1, unique=True),
)
@settings(max_examples=examples(60))
def test_a_row_depends_on_nothing_after_it(
    seed: int, rows: int, more: int, families: list[str]
) -> None:
    augmentation = Augmentation("_".join(families))
    short = augmentation.draw(np.random.default_rng(seed), rows)
    long = augmentation.draw(np.random.default_rng(seed), rows + more)
    assert short.family == long.family
    assert short.family in families
    assert short.parameters.shape == (rows, WIDTHS[short.family])
    assert torch.equal(short.parameters, long.parameters[:rows])


@given(u=st.floats(0, 1, exclude_max=True, width=32), side=st.integers(1, 40))
@settings(max_examples=examples(60))
def test_a_crop_means_the_same_at_every_resolution(u: float, side: int) -> None:
    column = torch.arange(1.0, side + 1, dtype=torch.float64).view(1, 1, side, 1)
    moved = fixed("crop", u, 0.5).apply(column).flatten()
    index = int(moved.nonzero()[0])
    shift = int(moved[index]) - 1 - index
    # (2 u - 1) / 8 of the side, up to the rounding of the largest shift and of the step.
    assert abs(shift - (2 * u - 1) * side / 8) <= abs(2 * u - 1) / 2 + max(u, 1 - u) + 1e-9


def test_drawing_and_applying_leave_global_randomness_alone() -> None:
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for family in FAMILIES:
        drawn(family, 3).apply(images_of(3, 1, 6, 6))
    assert torch.equal(torch_before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])


def test_families_are_equally_likely() -> None:
    generator = np.random.default_rng(3)
    augmentation = Augmentation()
    counts = Counter(augmentation.draw(generator, 1).family for _ in range(3000))
    assert set(counts) == set(FAMILIES)
    # Six standard deviations of a binomial(3000, 1/6).
    assert all(abs(count - 500) < 6 * math.sqrt(3000 * 5 / 36) for count in counts.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_uniform_and_independent(family: str) -> None:
    table = drawn(family, 4000).parameters.double().numpy()
    assert table.shape == (4000, WIDTHS[family])
    assert table.min() >= 0
    assert table.max() < 1
    error = 6 / math.sqrt(4000)
    np.testing.assert_allclose(table.mean(0), 0.5, atol=error * math.sqrt(1 / 12))
    np.testing.assert_allclose(table.var(0), 1 / 12, atol=error * math.sqrt(1 / 180))
    both = np.concatenate((table[:-1], table[1:]), axis=1)  # a row and the next
    correlation = np.corrcoef(both.T) - np.eye(2 * WIDTHS[family])
    assert np.abs(correlation).max() < error


def test_shifts_are_equally_likely() -> None:
    marked = torch.zeros(7000, 1, 28, 28)  # shifts of -4 .. 4 in both axes
    marked[:, :, 14, 14] = 1
    places = drawn("crop", 7000).apply(marked).nonzero()
    assert len(places) == 7000
    for axis in (2, 3):
        counts = np.bincount(places[:, axis] - 10)
        assert len(counts) == 9
        assert np.abs(counts - 7000 / 9).max() < 6 * math.sqrt(7000 * 8 / 81)


def test_half_the_images_are_flipped() -> None:
    images = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2).expand(2000, 1, 1, 2)
    flipped = drawn("flip", 2000).apply(images)[:, 0, 0, 0].sum().item()
    assert abs(flipped - 1000) < 6 * math.sqrt(500)


def slopes(family: str, axis: int) -> Array:
    """Return d(source `axis`) / d(x, y) at the centre, from what becomes of a ramp."""
    ramp = torch.arange(9, dtype=torch.float64).expand(3000, 1, 9, 9)
    result = drawn(family, 3000).apply(ramp if axis == 1 else ramp.mT)[:, 0].numpy()
    return np.stack((result[:, 4, 5] - result[:, 4, 4], result[:, 5, 4] - result[:, 4, 4]), 1)


def test_scale_factors_fill_their_range() -> None:
    along_x, along_y = slopes("scale", 1), slopes("scale", 0)
    np.testing.assert_allclose(along_x[:, 1], 0, atol=1e-12)
    np.testing.assert_allclose(along_y[:, 0], 0, atol=1e-12)
    for factor in (along_x[:, 0], along_y[:, 1]):
        assert 1 / 1.2 - 1e-9 < factor.min() < 1 / 1.2 + 0.01
        assert 1.2 - 0.01 < factor.max() < 1.2 + 1e-9
    assert abs(np.corrcoef(along_x[:, 0], along_y[:, 1])[0, 1]) < 6 / math.sqrt(3000)


def test_angles_fill_their_range() -> None:
    along_x = slopes("rotate", 1)
    np.testing.assert_allclose((along_x**2).sum(1), 1, atol=1e-12)  # a rotation, no stretch
    degrees = np.degrees(np.arctan2(-along_x[:, 1], along_x[:, 0]))
    assert -15 - 1e-9 < degrees.min() < -14.9
    assert 14.9 < degrees.max() < 15 + 1e-9


@pytest.mark.parametrize("family", [*FAMILIES, "none"])
@pytest.mark.parametrize("rows", [1, 4])
def test_nothing_is_read_back_from_the_device(family: str, rows: int) -> None:
    images = torch.empty(4, 3, 8, 8, device="meta")  # reading a value from it raises
    owner = torch.empty(4, dtype=torch.int64, device="meta")
    transform = drawn(family, rows)
    assert transform.apply(images).shape == images.shape
    assert transform.apply(images, owner).shape == images.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 6])
def test_gpu_agrees_with_cpu(family: str, rows: int) -> None:
    images = images_of(6, 3, 28, 28)
    transform = drawn(family, rows)
    on_gpu = transform.apply(images.cuda())
    assert on_gpu.is_cuda
    assert torch.allclose(on_gpu.cpu(), transform.apply(images), rtol=0, atol=1e-10)
    owner = torch.arange(6) % rows
    on_gpu = transform.apply(images.cuda(), owner)
    assert torch.allclose(on_gpu.cpu(), transform.apply(images, owner), rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_image_at_all(family: str) -> None:
    nothing = torch.empty(0, 3, 8, 8)
    assert drawn(family, 1).apply(nothing).shape == nothing.shape
    owner = torch.empty(0, dtype=torch.int64)
    assert drawn(family, 5).apply(nothing, owner).shape == nothing.shape


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("color_flop", r"'flop' must be one of 'color', 'crop', .*did you mean 'flip'"),
        ("", "'' must be one of 'color'"),
        ("color__flip", "'' must be one of 'color'"),
        ("flip_crop_flip", "'flip_crop_flip' must name each family once"),
        ("none_crop", "must not join 'none'"),
        (None, "strategy=None must be a text"),
    ],
)
def test_bad_strategies(strategy: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Augmentation(strategy)


@pytest.mark.parametrize("rows", [0, -1, 2.0, True])
def test_bad_row_counts_leave_the_generator_alone(rows: int) -> None:
    generator = np.random.default_rng(0)
    before = generator.bit_generator.state
    with pytest.raises(InvalidValueError, match="rows="):
        Augmentation().draw(generator, rows)
    assert generator.bit_generator.state == before


@pytest.mark.parametrize("family", [*FAMILIES, "none"])
@pytest.mark.parametrize(
    ("owner", "message"),
    [
        (torch.tensor([0, 1, 3]), "owner=3 must be >= 0 and <= 2"),
        (torch.tensor([0, -1, 2]), "owner=-1 must be >= 0 and <= 2"),
        (torch.tensor([0, 1]), r"owner of shape \(2,\)"),
        (torch.tensor([0, 1, 2], dtype=torch.int32), "type torch.int32"),
        (torch.tensor([[0], [1], [2]]), r"owner of shape \(3, 1\)"),
    ],
)
def test_bad_owners(family: str, owner: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        drawn(family, 3).apply(images_of(3, 1, 4, 4), owner)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(4, 1, 4, 4), "images=4 must be 3"),
        (torch.zeros(3, 4, 4), r"shape \(3, 4, 4\)"),
        (torch.zeros(3, 1, 0, 4), r"shape \(3, 1, 0, 4\)"),
        (torch.zeros(3, 1, 4, 4, dtype=torch.uint8), "type torch.uint8"),
    ],
)
def test_bad_images(images: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        drawn("crop", 3).apply(images)


@pytest.mark.parametrize(
    ("family", "table", "message"),
    [
        ("zoom", torch.zeros(1, 2), "family='zoom' must be one of"),
        ("crop", torch.zeros(1, 3), r"shape \(1, 3\) must have .* 2 columns"),
        ("crop", torch.zeros(0, 2), r"shape \(0, 2\)"),
        ("crop", torch.zeros(1, 2, dtype=torch.float64), "torch.float64 on cpu"),
        ("flip", torch.ones(1, 1), "parameter 1.0 must be"),
        ("flip", torch.full((1, 1), math.nan), "parameter nan must be"),
    ],
)
def test_bad_transforms(family: str, table: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Transform(family, table)


def test_a_transform_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        drawn("flip", 1).family = "crop"
