"""Matching as a whole: what moves, what stays, whose turn it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedquilt.condense.augment import Augmentation, Transform
from fedquilt.condense.embeds import frozen_copy
from fedquilt.condense.matching import Matcher, MatchingSettings, SyntheticSet, View, match
from fedquilt.condense.statistics import ClassTargets, StatisticsTable, group_means
from fedquilt.errors import InvalidValueError
from fedquilt.models.networks import ConvNet

CLASSES = (0, 3, 11)
SHAPE = (3, 8, 8)


def make_model(seed: int = 0) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return frozen_copy(ConvNet(SHAPE, 12, width=4, depth=2))


def make_view(
    model: torch.nn.Module,
    classes: tuple[int, ...] = CLASSES,
    transform: Transform | None = None,
    seed: int = 1,
) -> View:
    """Return a view with four groups of three samples a class."""
    number = 4 * len(classes)
    values = np.random.default_rng(seed).normal(size=(3 * number, *SHAPE))
    labels = torch.tensor(classes, dtype=torch.int64).repeat_interleave(4)
    counts = torch.full((number,), 3)
    features, logits = group_means(
        model, torch.from_numpy(values).float(), torch.arange(3 * number), counts
    )
    if not number:
        features, logits = torch.zeros(0, 16), torch.zeros(0, 12)
    table = StatisticsTable(torch.zeros_like(labels), labels, counts, features, logits)
    return View(model, ClassTargets(table, 2), transform)


def make_set(ipc: int = 2, classes: tuple[int, ...] = CLASSES) -> SyntheticSet:
    return SyntheticSet.random(classes, ipc, SHAPE, np.random.default_rng(3))


def run(synthetic: SyntheticSet, views: list[View], **changes: Any) -> float:
    settings = MatchingSettings(**{"iterations": 4, "image_lr": 0.3, **changes})
    return match(synthetic, views, settings, np.random.default_rng(5))


def moved(synthetic: SyntheticSet, before: torch.Tensor) -> list[bool]:
    return (synthetic.by_class() != before).flatten(1).any(dim=1).tolist()


def test_weights_get_no_gradient_and_do_not_change() -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(make_set(), [make_view(model)], logit_loss_type="l2")
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_images_move_in_place_and_keep_no_graph() -> None:
    synthetic = make_set()
    images, at = synthetic.images, synthetic.images.data_ptr()
    before = synthetic.by_class().clone()
    run(synthetic, [make_view(make_model())])
    assert synthetic.images is images
    assert images.data_ptr() == at
    assert not images.requires_grad
    assert moved(synthetic, before) == [True] * 3


def test_loss_falls() -> None:
    synthetic, view = make_set(ipc=4), make_view(make_model())
    first = run(synthetic, [view], iterations=1, image_lr=1.0)
    run(synthetic, [view], iterations=60, image_lr=1.0)
    last = run(synthetic, [view], iterations=1, image_lr=1.0)
    assert last < first / 2


def test_class_missing_from_every_view_stays() -> None:
    synthetic = make_set()
    before = synthetic.by_class().clone()
    run(synthetic, [make_view(make_model(), (0, 11)), make_view(make_model(1), (0, 11))])
    assert moved(synthetic, before) == [True, False, True]


def test_class_missing_from_one_view_stands_still_in_its_steps() -> None:
    """Not even the velocity of earlier steps carries it on."""
    synthetic = make_set()
    views = [make_view(make_model()), make_view(make_model(1), (0, 11))]
    matcher = Matcher(synthetic, views, MatchingSettings(image_lr=0.3))
    source = np.random.default_rng(0)
    for number, expected in ((0, [True] * 3), (1, [True, False, True]), (0, [True] * 3)):
        before = synthetic.by_class().clone()
        matcher.step(number, source)
        assert moved(synthetic, before) == expected


def test_nothing_to_match_changes_nothing() -> None:
    synthetic = make_set()
    before = synthetic.by_class().clone()
    assert run(synthetic, [make_view(make_model(), ())]) == 0.0
    assert run(synthetic, []) == 0.0
    assert moved(synthetic, before) == [False] * 3


def test_view_without_statistics_is_passed_over() -> None:
    alone, beside = make_set(), make_set()
    view, empty = make_view(make_model()), make_view(make_model(1), ())
    assert run(alone, [view]) == run(beside, [view, empty])
    assert torch.equal(alone.images, beside.images)


def test_views_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ten steps through three views each is used three times or four, none twice a turn."""
    used: list[int] = []
    monkeypatch.setattr(
        Matcher, "step", lambda self, number, source: used.append(number) or torch.zeros(())
    )
    run(make_set(), [make_view(make_model(seed)) for seed in range(3)], iterations=10)
    assert [sorted(used[at : at + 3]) for at in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert len(used) == 10
    used.clear()
    run(make_set(), [make_view(make_model(seed)) for seed in range(3)], iterations=60)
    assert len({tuple(used[at : at + 3]) for at in range(0, 60, 3)}) > 3


def test_equal_generators_give_equal_images() -> None:
    one, other = make_set(), make_set()
    for synthetic in (one, other):
        views = [make_view(make_model(seed)) for seed in range(2)]
        run(synthetic, views, iterations=5)
    assert torch.equal(one.images, other.images)


def test_augmentation_of_a_class_is_the_row_of_its_place() -> None:
    """A class missing from the statistics must not shift the rows of those after it."""
    model = make_model()
    transform = Augmentation("cutout").draw(np.random.default_rng(2), rows=3)
    together = make_set()
    run(together, [make_view(model, (0, 11), transform)])
    for place, label in ((0, 0), (2, 11)):
        alone = SyntheticSet(make_set().by_class()[place].clone(), (label,), 2)
        row = Transform("cutout", transform.parameters[place : place + 1])
        view = make_view(model, (0, 11))
        keep = ClassTargets(_of_class(view, label), 2)
        before = alone.images.clone()
        run(alone, [View(model, keep, row)], iterations=1)
        fresh = make_set()
        run(fresh, [View(model, keep, transform)], iterations=1)
        torch.testing.assert_close(fresh.by_class()[place], alone.images)
        hidden = row.apply(torch.ones_like(before)) == 0
        assert hidden.any()
        assert torch.equal(together.by_class()[place][hidden], before[hidden])


def _of_class(view: View, label: int) -> StatisticsTable:
    """Return what a view is matched to in one class, as one group."""
    drawn = view.targets.draw(np.random.default_rng(0))
    place = view.targets.classes.index(label)
    labels = torch.tensor([label])
    return StatisticsTable(
        torch.zeros_like(labels),
        labels,
        torch.ones_like(labels),
        drawn.features[place],
        drawn.logits[place],
    )


def test_progress_counts_the_steps() -> None:
    told: list[int] = []
    settings = MatchingSettings(iterations=3)
    source = np.random.default_rng(0)
    match(make_set(), [make_view(make_model())], settings, source, told.append)
    assert told == [1, 2, 3]


def test_class_that_the_set_does_not_have_is_refused() -> None:
    synthetic = make_set(classes=(0, 3))
    before = synthetic.by_class().clone()
    with pytest.raises(InvalidValueError, match=r"class 11 .* \(0, 3\)"):
        run(synthetic, [make_view(make_model())])
    assert moved(synthetic, before) == [False] * 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"iterations": 0}, "dc_iterations"),
        ({"image_lr": 0.0}, "image_lr"),
        ({"momentum": 1.0}, "image_momentum"),
        ({"logit_loss_type": "l1"}, "logit_loss_type"),
        ({"loss_computation": "avg"}, "loss_computation"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidValueError, match=name):
        MatchingSettings(**change)


def test_synthetic_set_is_in_class_order() -> None:
    synthetic = SyntheticSet.random((9, 2, 5), 2, SHAPE, np.random.default_rng(0))
    assert synthetic.classes == (2, 5, 9)
    assert synthetic.labels.tolist() == [2, 2, 5, 5, 9, 9]
    assert synthetic.images.shape == (6, *SHAPE)
    assert synthetic.by_class().data_ptr() == synthetic.images.data_ptr()
    assert torch.equal(synthetic.by_class()[1, 1], synthetic.images[3])


def test_random_pixels_are_standard_normal_and_reproducible() -> None:
    one, other = (
        SyntheticSet.random((0, 1), 50, SHAPE, np.random.default_rng(4)) for _ in range(2)
    )
    assert torch.equal(one.images, other.images)
    assert abs(float(one.images.mean())) < 0.03
    assert abs(float(one.images.std()) - 1) < 0.03


@pytest.mark.parametrize(("classes", "number"), [((1, 0), 2), ((1, 1), 2), ((0, 1), 3)])
def test_synthetic_sets_that_do_not_fit_are_refused(classes: tuple[int, ...], number: int) -> None:
    with pytest.raises(InvalidValueError, match="must be"):
        SyntheticSet(torch.zeros(number, *SHAPE), classes, 1)
    with pytest.raises(InvalidValueError, match="ipc=0"):
        SyntheticSet.random((0, 1), 0, SHAPE, np.random.default_rng(0))
