"""Training with teachers and several families; parts of a class; first drawings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from condense_samples import Linear, condense, images_of, small
from torch import nn
from torch.nn import functional

from fedquilt.common.randomness import generator
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.matching import MatchingSettings, part_means
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.condense.training import TrainingSettings, answered, augmented, learn, train_on
from fedquilt.errors import InvalidValueError

NONE = Augmentation("none")
SOURCE = torch.Generator().manual_seed(0)
IMAGES = torch.randn(12, 1, 4, 4, generator=SOURCE)
LABELS = torch.arange(12) % 3


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def learned(**changes: Any) -> tuple[nn.Module, float, list[float]]:
    model, told = network(0), list[float]()
    settings = TrainingSettings(**{"epochs": 3, "batch_size": 5, **changes})
    loss = learn(model, IMAGES, LABELS, settings, NONE, 3, (1,), told.append)
    return model, loss, told


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_answers_are_the_mean_of_the_teachers() -> None:
    teachers = [network(1), network(2)]
    scores = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = answered(scores, teachers, IMAGES, 2.0)
    with torch.no_grad():
        shares = sum(functional.softmax(one(IMAGES) / 2, dim=1).numpy() for one in teachers) / 2
    log_p = np.log(functional.softmax(scores / 2, dim=1).detach().numpy())
    assert loss.item() == pytest.approx(4 * -(shares * log_p).sum(axis=1).mean(), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    assert all(p.grad is None for one in teachers for p in one.parameters())


def test_a_model_learns_what_its_teacher_says_and_not_the_labels() -> None:
    model, teacher = network(0), network(5)
    settings = TrainingSettings(epochs=300, learning_rate=0.05, weight_decay=0.0, temperature=1.0)
    before = weights(teacher)
    train_on(model, IMAGES, LABELS, settings, NONE, np.random.default_rng(0), None, [teacher])
    assert torch.equal(weights(teacher), before)
    with torch.no_grad():
        told = functional.softmax(teacher(IMAGES), dim=1)
        said = functional.softmax(model(IMAGES), dim=1)
    assert float((told - said).abs().max()) < 0.1
    assert not torch.equal(told.argmax(dim=1), LABELS)


def test_teachers_change_the_result_in_the_same_way_every_time() -> None:
    plain, _, told = learned()
    one, _, told_too = learned(teachers=2)
    again, *_ = learned(teachers=2)
    assert not torch.equal(weights(plain), weights(one))
    assert torch.equal(weights(one), weights(again))
    assert told == pytest.approx([1 / 3, 2 / 3, 1])
    assert told_too == pytest.approx([k / 9 for k in range(1, 10)])


def test_without_teachers_learning_is_training_with_the_stream_of_its_name() -> None:
    model, loss, _ = learned()
    other = network(0)
    settings = TrainingSettings(epochs=3, batch_size=5)
    source = generator(3, "training", 1)
    assert train_on(other, IMAGES, LABELS, settings, NONE, source) == loss
    assert torch.equal(weights(model), weights(other))


def test_families_of_a_batch_are_all_different() -> None:
    families = Augmentation("color_flip")
    one, both, more = (
        augmented(IMAGES, families, count, np.random.default_rng(4)) for count in (1, 2, 6)
    )
    alone = families.draw(np.random.default_rng(4), len(IMAGES)).apply(IMAGES)
    assert torch.equal(one, alone)
    assert not torch.equal(one, both)
    assert torch.equal(both, more)


@pytest.mark.parametrize(
    "change", [{"families": 0}, {"teachers": -1}, {"temperature": 0.0}, {"teachers": 1.5}]
)
def test_wrong_settings_of_learning(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match="must be"):
        TrainingSettings(**change)


def test_parts_keep_the_smaller_images_of_one_together() -> None:
    values = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(2))
    means = part_means(values, 2, tiles=4)  # three images of four: two and one
    by_hand = [values[c, at].mean(dim=0) for c in (0, 1) for at in (slice(8), slice(8, 12))]
    assert torch.allclose(means, torch.stack(by_hand))
    assert torch.equal(part_means(values, 1), values.mean(dim=1))
    assert [MatchingSettings(together=10).parts(ipc) for ipc in (1, 10, 19, 50)] == [1, 1, 1, 5]
    assert MatchingSettings().parts(50) == 1
    with pytest.raises(InvalidValueError, match="match_together=-1 must be"):
        MatchingSettings(together=-1)


def test_every_part_is_matched_by_itself() -> None:
    settings: dict[str, Any] = {
        "ipc": 4,
        "dc_iterations": 300,
        "num_rounds": 1,
        "image_lr": 5.0,
        "model_epochs": 1,
        "feature_model": "global",
        "augmentation": "none",
        "model_n": None,
    }
    whole, parts = (condense(**settings, match_together=count) for count in (0, 2))

    def apart(images: torch.Tensor) -> float:
        """Distance of the two halves of each class in the embedding."""
        with torch.no_grad():
            seen = Linear().body(images).view(10, 2, 2, -1).mean(dim=2)
        return float((seen[:, 0] - seen[:, 1]).norm())

    assert apart(images_of(parts)) < 0.2 * apart(images_of(whole))
    assert parts.result["metadata"]["hyperparameters"]["match_together"] == 2


def test_first_drawings_follow_from_the_seed_and_stand_apart() -> None:
    shape = (3, 16, 16)
    empty = SyntheticSet.random((0, 2), 2, shape, np.random.default_rng(0), tiles=2)
    one, again, other = (empty.drawn(seed) for seed in (4, 4, 5))
    assert one.images.shape == (4, *shape)
    assert torch.equal(one.images, again.images)
    assert not torch.equal(one.images, other.images)
    seen = one.expanded().images
    assert len(torch.unique(seen.flatten(1), dim=0)) == 16
    assert abs(float(seen.mean())) < 0.1
    assert 0.2 < float(seen.std()) < 0.6


def test_a_run_records_what_it_began_with_and_what_taught_it() -> None:
    done = condense(init_method="leaves", teachers=1, model_families=2, temperature=3.0)
    used = done.result["metadata"]["hyperparameters"]
    assert (used["init_method"], used["teachers"], used["model_families"]) == ("leaves", 1, 2)
    assert used["temperature"] == 3.0
    assert "leave them" not in done.statement.as_text()
    with pytest.raises(InvalidValueError, match="teachers=-1 must be"):
        small(teachers=-1)
