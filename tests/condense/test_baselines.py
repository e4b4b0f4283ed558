"""Baselines: what they take, what they send, and that nothing else changes."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

import fedquilt
from fedquilt.common.randomness import generator
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.training import TrainingSettings, train_on
from fedquilt.config import CondenseConfig, RunConfig
from fedquilt.data import load_dataset
from fedquilt.errors import InvalidValueError
from fedquilt.models import ConvNet
from fedquilt.setup.build_task import build_task, task_from
from fedquilt.setup.federation import build_method
from fedquilt.setup.task import FederatedTask
from fedquilt.training import evaluate
from reproduction.baselines import BASELINES, BaselineResult, run_baseline
from reproduction.baselines import federated as feddm_module
from reproduction.baselines.central import coreset, dm_images
from reproduction.baselines.common import held_by_class, own_model
from reproduction.baselines.federated import (
    BATCH_SIZE,
    COHORT,
    LEARNING_RATE,
    LOCAL_EPOCHS,
    Clients,
    make_plan,
    same_steps,
)

PIXEL_BYTES = 4 * 1 * 8 * 8
# conv 1->8, norm, conv 8->8, norm, and 8 channels of 3 x 3 to 10 classes.
PARAMETERS = (8 * 9 + 8) + 16 + (8 * 8 * 9 + 8) + 16 + (8 * 9 * 10 + 10)


def small(**changes: Any) -> CondenseConfig:
    settings: dict[str, Any] = {
        "dataset": "digits",
        "num_rounds": 2,
        "ipc": 3,
        "dc_iterations": 6,
        "model_epochs": 5,
        "device": "cpu",
        **changes,
    }
    return CondenseConfig(**settings)


def model(seed: int = 0) -> ConvNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ConvNet((1, 8, 8), 10, width=8, depth=2)


def problem_of(clients: list[np.ndarray], **changes: Any) -> tuple[CondenseConfig, FederatedTask]:
    train, test = load_dataset("digits")
    config, problem = task_from(
        small(**changes), model(), train, (test.images[:200], test.targets[:200]), clients
    )
    assert isinstance(config, CondenseConfig)
    return config, problem


def dealt(num_clients: int, size: int = 1000) -> list[np.ndarray]:
    order = np.random.default_rng(0).permutation(size)
    return [np.sort(part) for part in np.array_split(order, num_clients)]


def labels_of_digits() -> np.ndarray:
    return load_dataset("digits")[0].targets.numpy()


def timeless(result: BaselineResult) -> BaselineResult:
    return dataclasses.replace(result, seconds=0.0)


def test_a_coreset_is_of_real_images_that_clients_hold() -> None:
    config, problem = problem_of(dealt(5, size=400), ipc=4)
    chosen = coreset(config, problem.task)
    train, _ = load_dataset("digits")
    held, rest = train.images[:400].flatten(1), train.images[400:].flatten(1)
    assert chosen.labels.tolist() == [label for label in range(10) for _ in range(4)]
    for image, label in zip(chosen.images.flatten(1), chosen.labels, strict=True):
        same = torch.nonzero((held == image).all(dim=1)).flatten()
        assert train.targets[same].tolist() == [int(label)] * max(1, len(same))
        assert not (rest == image).all(dim=1).any()
    assert len(torch.unique(chosen.images.flatten(1), dim=0)) == 40


def test_a_class_with_too_few_images_repeats_them() -> None:
    labels = labels_of_digits()
    threes = np.flatnonzero(labels == 3)[:2]
    config, problem = problem_of([np.flatnonzero(labels == 7)[:20], threes], ipc=5)
    chosen = coreset(config, problem.task)
    assert chosen.classes == (3, 7)
    first = chosen.images[:5].flatten(1)
    assert len(torch.unique(first, dim=0)) == 2
    known = problem.task.inputs[torch.from_numpy(threes)].flatten(1)
    assert all((known == image).all(dim=1).any() for image in first)


def test_coreset_trains_like_the_condensation_and_counts_its_images() -> None:
    config, problem = problem_of(dealt(5), model_epochs=30, model_weight_decay=0.02)
    result = run_baseline("coreset", config, problem, 0)
    net, chosen = copy.deepcopy(problem.flat.module), coreset(config, problem.task)
    families = Augmentation("color_crop_cutout_scale_rotate")
    train_on(
        net,
        chosen.images,
        chosen.labels,
        TrainingSettings(30, 256, 0.01, weight_decay=0.02),
        families,
        generator(0, "training", 1),
    )
    assert (result.accuracy, result.loss) == evaluate(net, *problem.test)
    assert (result.bytes_up, result.bytes_down) == (30 * PIXEL_BYTES, 0)
    assert (result.rounds, result.raw) == (1, True)
    assert "raw images" in result.note


@pytest.mark.parametrize("num_clients", [4, 12])
def test_fedavg_takes_the_rounds_that_fit(num_clients: int) -> None:
    config, problem = problem_of(dealt(num_clients, 240))
    cohort = min(10, num_clients)
    cost = 2 * cohort * 4 * PARAMETERS
    for budget, rounds in ((0, 1), (cost - 1, 1), (cost, 1), (3 * cost - 1, 2), (3 * cost, 3)):
        result = run_baseline("fedavg", config, problem, budget)
        assert result.rounds == rounds
        assert result.bytes_up == result.bytes_down == rounds * cohort * 4 * PARAMETERS
        assert result.bytes_up + result.bytes_down <= max(budget, cost)
        assert ("more than the budget" in result.note) == (budget < cost)


def test_fedavg_is_the_packages_own_run() -> None:
    clients = dealt(12, 600)
    config, problem = problem_of(clients, seed=3)
    result = run_baseline("fedavg", config, problem, 4 * 2 * COHORT * 4 * PARAMETERS)
    train, test = load_dataset("digits")
    run = fedquilt.run(
        model(),
        train,
        (test.images[:200], test.targets[:200]),
        clients,
        output_dir=None,
        mode="fedavg",
        num_rounds=4,
        clients_per_round=COHORT,
        availability="always",
        local_epochs=LOCAL_EPOCHS,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        seed=3,
        device="cpu",
    )
    assert result.accuracy == run.result["metadata"]["final_accuracy"]
    before, _ = evaluate(problem.flat.module, *problem.test)
    assert result.accuracy > before + 0.2


def test_dm_brings_the_images_nearer_under_models_it_has_not_seen() -> None:
    config, problem = problem_of(dealt(5), num_rounds=2, dc_iterations=30, augmentation="none")
    made, losses = dm_images(config, problem)
    assert len(losses) == 60
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:3])
    first = build_method(config, problem).images.synthetic.images  # type: ignore[attr-defined]
    held = held_by_class(problem.task)
    for seed in (100, 101):
        net = model(seed).eval()
        with torch.no_grad():
            real = np.array(
                [net.embed(problem.task.inputs[s]).mean(0).numpy() for s in held.values()]
            )
            began, ended = (
                net.embed(images).view(10, 3, -1).mean(1).numpy() for images in (first, made.images)
            )
        assert ((ended - real) ** 2).sum() < 0.5 * ((began - real) ** 2).sum()


def test_dm_pools_everything_once() -> None:
    config, problem = problem_of(
        [np.arange(0, 60), np.arange(40, 100)], dc_iterations=1, allow_overlap=True
    )
    result = run_baseline("dm", config, problem, 0)
    assert (result.bytes_up, result.bytes_down) == (100 * PIXEL_BYTES, 0)
    assert (result.rounds, result.raw) == (1, True)
    assert "raw images" in result.note


def feddm_clients() -> list[np.ndarray]:
    """Three clients: 10 zeros and 7 ones; 8 ones and 20 fours; 7 fours."""
    labels = labels_of_digits()
    zeros, ones, fours = (np.flatnonzero(labels == label) for label in (0, 1, 4))
    return [
        np.concatenate([zeros[:10], ones[:7]]),
        np.concatenate([ones[7:15], fours[:20]]),
        fours[20:27],
    ]


def test_feddm_clients_send_images_of_the_classes_they_hold_enough_of() -> None:
    config, problem = problem_of(feddm_clients(), min_group=8)
    clients = Clients(config, problem)
    assert [tuple(held) for held in clients.held] == [(0,), (1, 4), ()]
    assert clients.images([0, 1, 2]) == 9
    first, second = clients.condense(problem.flat.module, [0, 1, 2], 0, 2)
    assert first.labels.tolist() == [0, 0, 0]
    assert second.labels.tolist() == [1, 1, 1, 4, 4, 4]
    assert second.images.shape == (6, 1, 8, 8)
    again = [made.images.clone() for made in (first, second)]
    union = clients.condense(problem.flat.module, [1], 1, 2)
    assert len(union) == 1
    assert torch.equal(first.images, again[0])
    assert not torch.equal(union[0].images, again[1])


def test_feddm_counts_images_up_and_weights_down() -> None:
    config, problem = problem_of(feddm_clients(), min_group=8)
    up, down = 9 * PIXEL_BYTES, 3 * 4 * PARAMETERS
    for budget, rounds in ((0, 1), (2 * (up + down) - 1, 1), (2 * (up + down), 2), (10**9, 2)):
        plan = make_plan(config, problem, Clients(config, problem), budget)
        assert plan.cohorts == ((0, 1, 2),) * rounds
        assert (plan.bytes_up, plan.bytes_down) == (rounds * up, rounds * down)
        # 2 rounds of 6 steps for 3 classes, shared by 3 (client, class) in each round.
        assert plan.steps == 12 // rounds
    result = run_baseline("feddm", config, problem, 0)
    assert (result.bytes_up, result.bytes_down, result.rounds) == (up, down, 1)
    assert not result.raw
    assert f"{up + down:,}" in result.note
    assert "more than the budget" in result.note


def test_feddm_looks_through_models_at_distance_rho(monkeypatch: pytest.MonkeyPatch) -> None:
    config, problem = problem_of(feddm_clients(), rho=0.25)
    seen = []

    def spy(made: Any, real: Any, model_at: Any, *rest: Any) -> list[float]:
        seen.extend(model_at(step) for step in range(2))
        return []

    monkeypatch.setattr(feddm_module, "match_real", spy)
    Clients(config, problem).condense(problem.flat.module, [0, 1], 0, 2)
    vectors = [own_model(problem).read().double()]
    vectors += [torch.cat([p.flatten() for p in net.parameters()]).double() for net in seen]
    distances = [float((vector - vectors[0]).norm()) for vector in vectors[1:]]
    assert distances == pytest.approx([0.25] * 4, rel=1e-4)
    assert all(not torch.equal(a, b) for i, a in enumerate(vectors) for b in vectors[:i])


def test_feddm_without_anything_to_send_leaves_the_model_alone() -> None:
    config, problem = problem_of(feddm_clients(), min_group=50)
    result = run_baseline("feddm", config, problem, 0)
    assert (result.accuracy, result.loss) == evaluate(problem.flat.module, *problem.test)
    assert result.bytes_up == 0


def test_feddm_from_real_images_says_so() -> None:
    config, problem = problem_of(feddm_clients(), init_method="real_sample", dc_iterations=1)
    result = run_baseline("feddm", config, problem, 0)
    assert result.raw
    assert "raw images" in result.note


def test_training_on_a_union_takes_as_many_steps() -> None:
    settings = TrainingSettings(600, 256)
    assert same_steps(settings, 100, 100).epochs == 600
    assert same_steps(settings, 100, 2050).epochs == math.ceil(600 / 9)
    assert same_steps(settings, 1000, 2050).epochs == math.ceil(600 * 4 / 9)
    assert same_steps(TrainingSettings(1, 10), 10, 10_000).epochs == 1


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_repeats_itself_and_changes_nothing(name: str) -> None:
    config, problem = problem_of(dealt(4, 300), seed=5)
    weights = problem.flat.read().clone()
    inputs = problem.task.inputs.clone()
    told: list[tuple[str, float]] = []
    first = run_baseline(name, config, problem, 10**5)
    torch.rand(3)
    state = torch.random.get_rng_state()
    again = run_baseline(name, config, problem, 10**5, lambda what, part: told.append((what, part)))
    assert timeless(first) == timeless(again)
    assert first.name == name
    assert first.seconds > 0
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(problem.flat.read(), weights)
    assert torch.equal(problem.task.inputs, inputs)
    assert told[-1][1] == 1
    assert all(0 < part <= 1 for _, part in told)
    other, problem = problem_of(dealt(4, 300), seed=6)
    assert run_baseline(name, other, problem, 10**5).loss != first.loss


def test_baselines_stand_beside_a_certified_condensation_too() -> None:
    """Its coins may be secret; those of a baseline are not, and real images may be drawn."""
    settings: dict[str, Any] = {
        "mode": "certified",
        "selection": "poisson",
        "amplification": True,
        "policy": "worst_case",
        "clients_per_round": 0.5,
    }
    config, problem = problem_of(dealt(12, 300), **settings)
    plain, other = problem_of(dealt(12, 300), **settings | {"mode": "fednum"})
    for name in BASELINES:
        ours, theirs = (
            run_baseline(name, *pair, 10**5) for pair in ((config, problem), (plain, other))
        )
        assert timeless(ours) == timeless(theirs)


def test_what_a_baseline_refuses() -> None:
    config, problem = problem_of(dealt(3, 90), dc_iterations=1, model_epochs=1)
    with pytest.raises(InvalidValueError, match=r"'fedvg'.*did you mean 'fedavg'"):
        run_baseline("fedvg", config, problem, 0)
    with pytest.raises(InvalidValueError, match="budget_bytes=-1"):
        run_baseline("coreset", config, problem, -1)
    plain, other = build_task(RunConfig(dataset="digits", num_clients=3, device="cpu"))
    with pytest.raises(InvalidValueError, match="method='full' must be 'condense'"):
        run_baseline("coreset", plain, other, 0)  # type: ignore[arg-type]
