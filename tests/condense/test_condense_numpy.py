"""Statistics, losses, pixel gradients and matching steps against NumPy written by hand."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import condense_oracle as oracle
import numpy as np
import pytest
import torch
from condense_oracle import Descent, Group, Network

from fedquilt.condense.embeds import frozen_copy
from fedquilt.condense.matching import (
    Matcher,
    MatchingSettings,
    SyntheticSet,
    View,
    match,
    view_loss,
)
from fedquilt.condense.statistics import ClassTargets, StatisticsTable, group_means
from fedquilt.config.choices import LOGIT_LOSSES, LOSS_COMPUTATIONS
from fedquilt.models.networks import ConvNet

CLASSES = (1, 4, 7, 9)
# Class 4 sends nothing; the others send different numbers of groups of different sizes.
SIZES = {1: [3, 4, 1], 7: [5], 9: [2, 2, 6, 3, 1]}
DTYPES = (torch.float64, torch.float32)


def close(actual: torch.Tensor, expected: oracle.Array, tolerance: float = 1e-5) -> None:
    """Demand agreement relative to the largest entry; doubles much more closely."""
    if actual.dtype == torch.float64:
        tolerance = 1e-10
    scale = max(1e-3, float(np.abs(expected).max()))
    assert actual.shape == expected.shape
    assert float(np.abs(actual.detach().numpy() - expected).max()) <= tolerance * scale


@dataclass
class Case:
    """The same network, images and groups twice: for torch and for NumPy."""

    model: torch.nn.Module
    network: Network
    real: torch.Tensor
    groups: dict[int, list[list[int]]]
    synthetic: SyntheticSet
    statistics: dict[int, list[Group]]
    table: StatisticsTable

    def view(self, average: bool = True) -> View:
        return View(self.model, ClassTargets(self.table, None, average))

    def descent(self, settings: MatchingSettings) -> Descent:
        shape = (len(CLASSES), self.synthetic.ipc, *self.synthetic.images.shape[1:])
        images = self.synthetic.images.numpy().astype(np.float64).reshape(shape)
        return Descent(
            self.network,
            dict(zip(CLASSES, images, strict=True)),
            settings.image_lr,
            settings.momentum,
            settings.logit_loss_type,
            settings.loss_computation,
        )


def make_net(channels: int, seed: int, side: int = 8, depth: int = 2) -> ConvNet:
    """Return a small network whose norms do scale and shift."""
    net = ConvNet((channels, side, side), len(CLASSES), width=4, depth=depth)
    source = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            values = source.normal(0, 0.4, parameter.shape)
            parameter.copy_(torch.from_numpy(values) + (0.8 if parameter.ndim == 1 else 0))
    return net


def network_of(model: torch.nn.Module, channels: int) -> Network:
    weights = {k: v.numpy().astype(np.float64) for k, v in model.state_dict().items()}
    return Network(weights, channels)


def make_case(channels: int, ipc: int, dtype: torch.dtype, seed: int = 0, depth: int = 2) -> Case:
    source = np.random.default_rng(seed)
    model = frozen_copy(make_net(channels, seed, depth=depth)).to(dtype)
    network = network_of(model, channels)
    total = sum(sum(sizes) for sizes in SIZES.values())
    real = torch.from_numpy(source.normal(size=(total + 3, channels, 8, 8))).to(dtype)
    samples = source.permutation(len(real)).tolist()
    groups = {
        label: [[samples.pop() for _ in range(size)] for size in sizes]
        for label, sizes in SIZES.items()
    }
    embedded, logits = network.forward(real.numpy().astype(np.float64))
    statistics = {
        label: [
            Group(len(part), f, z)
            for part, f, z in zip(
                parts,
                oracle.group_means(embedded, parts),
                oracle.group_means(logits, parts),
                strict=True,
            )
        ]
        for label, parts in groups.items()
    }
    images = source.normal(size=(len(CLASSES) * ipc, channels, 8, 8))
    synthetic = SyntheticSet(torch.from_numpy(images).to(dtype), CLASSES, ipc)
    return Case(
        model, network, real, groups, synthetic, statistics, torch_table(model, real, groups)
    )


def torch_table(
    model: torch.nn.Module, real: torch.Tensor, groups: dict[int, list[list[int]]]
) -> StatisticsTable:
    """Return the table that the package makes, its rows mixed as those of clients are."""
    flat = [(label, part) for label, parts in groups.items() for part in parts]
    flat = [flat[i] for i in np.random.default_rng(5).permutation(len(flat))]
    counts = torch.tensor([len(part) for _, part in flat])
    order = torch.tensor([sample for _, part in flat for sample in part])
    features, logits = group_means(model, real, order, counts, batch_size=7)
    labels = torch.tensor([label for label, _ in flat])
    return StatisticsTable(torch.zeros_like(labels), labels, counts, features, logits)


def stacked(images: dict[int, oracle.Array]) -> oracle.Array:
    return np.concatenate([images[label] for label in CLASSES])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_oracle_gradient_is_the_slope_of_its_own_loss(channels: int, depth: int) -> None:
    """The judge is judged first: derivatives by hand against central differences."""
    case = make_case(channels, 2, torch.float64, seed=3, depth=depth)
    source = np.random.default_rng(1)
    images = case.synthetic.images[:2].numpy()
    for kind in LOGIT_LOSSES:
        groups = case.statistics[9]
        _, slope = oracle.image_gradient(case.network, images, groups, kind, "loss-avg")
        for _ in range(3):
            along = source.normal(size=images.shape)
            ahead, behind = (
                oracle.image_gradient(case.network, images + h * along, groups, kind, "loss-avg")[0]
                for h in (1e-6, -1e-6)
            )
            assert (ahead - behind) / 2e-6 == pytest.approx((slope * along).sum(), rel=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "side", "depth"), [(1, 8, 3), (3, 12, 2), (3, 9, 2)])
def test_network_puts_out_what_numpy_says(
    channels: int, side: int, depth: int, dtype: torch.dtype
) -> None:
    model = make_net(channels, 2, side, depth).to(dtype).eval()
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, channels, side, side))).to(dtype)
    features, logits = network_of(model, channels).forward(x.numpy().astype(np.float64))
    embedded, scores = model.embed_and_forward(x)
    close(embedded, features)
    close(scores, logits)
    close(model.embed(x), features)
    close(model(x), logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 512])
def test_group_means_are_those_of_numpy(channels: int, batch_size: int, dtype: torch.dtype) -> None:
    case = make_case(channels, 1, dtype)
    parts = [part for groups in case.groups.values() for part in groups]
    embedded, logits = case.network.forward(case.real.numpy().astype(np.float64))
    order = torch.tensor([sample for part in parts for sample in part])
    counts = torch.tensor([len(part) for part in parts])
    actual = group_means(case.model, case.real, order, counts, batch_size=batch_size)
    close(actual[0], oracle.group_means(embedded, parts))
    close(actual[1], oracle.group_means(logits, parts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("computation", LOSS_COMPUTATIONS)
@pytest.mark.parametrize("kind", LOGIT_LOSSES)
def test_loss_and_pixel_gradient_are_those_of_numpy(
    kind: str, computation: str, channels: int, dtype: torch.dtype
) -> None:
    case = make_case(channels, 3, dtype, seed=4)
    settings = MatchingSettings(logit_loss_type=kind, loss_computation=computation)
    view = case.view(average=computation == "avg-loss")
    places = torch.tensor([CLASSES.index(label) for label in view.targets.classes])
    images = case.synthetic.by_class()[places].requires_grad_(True)
    loss = view_loss(view, images, places, view.targets.draw(np.random.default_rng(0)), settings)
    (gradient,) = torch.autograd.grad(loss.sum(), images)
    pixels = case.descent(settings).images
    for place, label in enumerate(view.targets.classes):
        value, slope = oracle.image_gradient(
            case.network, pixels[label], case.statistics[label], kind, computation
        )
        assert loss[place].item() == pytest.approx(value, rel=1e-5)
        close(gradient[place], slope)


PICTURES = [(1, 1), (3, 1), (1, 4), (3, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "computation"),
    [
        ("none", "avg-loss"),
        ("l2", "loss-avg"),
        ("kl", "avg-loss"),
        ("wasserstein", "loss-avg"),
        ("wasserstein_sorted", "avg-loss"),
    ],
)
def test_images_after_steps_are_those_of_numpy(
    kind: str, computation: str, dtype: torch.dtype
) -> None:
    for (channels, ipc), steps in itertools.product(PICTURES, (1, 3)):
        compare_images(kind, computation, channels, ipc, dtype, steps)


def compare_images(
    kind: str, computation: str, channels: int, ipc: int, dtype: torch.dtype, steps: int
) -> None:
    case = make_case(channels, ipc, dtype, seed=6)
    settings = MatchingSettings(steps, 0.3, 0.5, kind, computation)
    descent = case.descent(settings)
    before = case.synthetic.images.clone()
    mean_loss = match(
        case.synthetic, [case.view(computation == "avg-loss")], settings, np.random.default_rng(0)
    )
    losses = [descent.step(case.statistics) for _ in range(steps)]
    assert mean_loss == pytest.approx(sum(losses) / steps, rel=1e-5)
    close(case.synthetic.images, stacked(descent.images))
    after = case.synthetic.by_class()
    moved = (after != before.view_as(after)).flatten(1).any(dim=1)
    assert moved.tolist() == [True, False, True, True]


def test_batched_step_is_a_loop_over_classes() -> None:
    """One batch of all classes against one class at a time, both in torch."""
    settings = MatchingSettings(3, 0.5, 0.5, "l2", "avg-loss")
    together, apart = (make_case(3, 2, torch.float64) for _ in range(2))
    match(together.synthetic, [together.view()], settings, np.random.default_rng(0))
    shape = apart.synthetic.images.shape[1:]
    for place, label in enumerate(CLASSES):
        rows = apart.table.classes == label
        if not rows.any():
            continue
        alone = SyntheticSet(apart.synthetic.by_class()[place].reshape(-1, *shape), (label,), 2)
        parts = ("models", "classes", "counts", "features", "logits")
        table = StatisticsTable(*(getattr(apart.table, name)[rows] for name in parts))
        view = View(apart.model, ClassTargets(table))
        match(alone, [view], settings, np.random.default_rng(0))
    torch.testing.assert_close(together.synthetic.images, apart.synthetic.images)


@pytest.mark.parametrize("kind", ["none", "l2"])
def test_both_computations_have_one_gradient_for_squares(kind: str) -> None:
    """Their losses differ by the variance of the groups, which no image changes."""
    images, losses = [], []
    for computation in LOSS_COMPUTATIONS:
        case = make_case(3, 2, torch.float64)
        settings = MatchingSettings(3, 0.3, 0.5, kind, computation)
        view = case.view(average=computation == "avg-loss")
        losses.append(match(case.synthetic, [view], settings, np.random.default_rng(0)))
        images.append(case.synthetic.images)
    torch.testing.assert_close(images[0], images[1])
    variance = 0.0
    for groups in case.statistics.values():
        counts = np.array([group.count for group in groups]) / sum(g.count for g in groups)
        rows = np.stack(
            [
                np.concatenate([g.features, g.logits] if kind == "l2" else [g.features])
                for g in groups
            ]
        )
        variance += float((counts @ rows**2 - (counts @ rows) ** 2).sum())
    assert variance > 0.1
    assert losses[1] - losses[0] == pytest.approx(variance)


def test_gradients_differ_where_the_loss_is_not_a_square() -> None:
    """Otherwise the choice of the computation would have been lost on the way."""
    images = []
    for computation in LOSS_COMPUTATIONS:
        case = make_case(3, 2, torch.float64)
        settings = MatchingSettings(1, 0.3, 0.5, "wasserstein", computation)
        match(case.synthetic, [case.view(average=False)], settings, np.random.default_rng(0))
        images.append(case.synthetic.images)
    assert float((images[0] - images[1]).abs().max()) > 1e-4


def test_two_views_share_one_velocity() -> None:
    """Steps through two models in turn: momentum carries over from one to the other."""
    case, other = make_case(3, 2, torch.float64), make_case(3, 2, torch.float64, seed=8)
    settings = MatchingSettings(4, 0.2, 0.5, "l2", "avg-loss")
    descent = case.descent(settings)
    matcher = Matcher(case.synthetic, [case.view(), other.view()], settings)
    for number in (0, 1, 1, 0):
        descent.network = (case, other)[number].network
        loss = matcher.step(number, np.random.default_rng(0))
        assert loss.item() == pytest.approx(descent.step((case, other)[number].statistics))
    close(case.synthetic.images, stacked(descent.images))


@pytest.mark.parametrize("computation", LOSS_COMPUTATIONS)
def test_images_without_logits_in_the_table_are_those_of_numpy(computation: str) -> None:
    """Where logits are not matched, a table that never held them serves as well."""
    case = make_case(1, 3, torch.float32)
    settings = MatchingSettings(3, 0.3, 0.5, "none", computation)
    descent = case.descent(settings)
    bare = replace(case.table, logits=case.table.logits[:, :0])
    view = View(case.model, ClassTargets(bare, None, computation == "avg-loss"))
    match(case.synthetic, [view], settings, np.random.default_rng(0))
    for _ in range(3):
        descent.step(case.statistics)
    close(case.synthetic.images, stacked(descent.images))
