"""The engine of group means, the round models and the server, against NumPy and by hand."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from condense_samples import PARTS, WIDTH, Linear, condense, images_of, small
from numpy.typing import NDArray
from torch import nn

from fedquilt.common.randomness import generator
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.embeds import FeatureModels
from fedquilt.condense.engine import RoundModels, StatisticsEngine, joined
from fedquilt.condense.matching import MatchingSettings, SyntheticSet
from fedquilt.condense.method import (
    augmentation_of,
    first_images,
    groups_per_step,
    make_condensation,
    normalisation,
)
from fedquilt.condense.server import CondensingServer
from fedquilt.condense.statistics import StatisticsTable, make_groups
from fedquilt.condense.training import Learner, TrainingSettings
from fedquilt.errors import InvalidValueError
from fedquilt.training import ClientUpdate, FlatModel, Task

SEED, SAMPLES = 9, 60


def make_task() -> Task:
    """Return random images of classes 1, 3 and 4, held by three clients."""
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.normal(size=(SAMPLES, 1, 8, 8)).astype(np.float32))
    targets = torch.from_numpy(rng.choice([1, 3, 4], size=SAMPLES, p=[0.5, 0.4, 0.1]))
    clients = [np.arange(25), np.arange(25, 50), np.arange(50, SAMPLES)]
    return Task(inputs, targets, clients)


def make_engine(
    kind: str = "perturbed", logits: bool = True
) -> tuple[StatisticsEngine, RoundModels]:
    """Return an engine with two feature models, and what it looks through."""
    task = make_task()
    count = 1 if kind == "global" else 2
    round_models = RoundModels(
        *(Linear(), task.inputs[:2], FeatureModels(kind, count, 0.5, SEED)),
        *(Augmentation("none"), (1, 3, 4)),
        embed_layer="body",
        with_logits=logits,
        seed=SEED,
    )
    return StatisticsEngine(
        task, round_models, avg_num=4, min_group=3, max_samples=9, seed=SEED
    ), round_models


def weights() -> torch.Tensor:
    return FlatModel(Linear(), torch.zeros(1, 1, 8, 8)).read()


def arrays_of(module: nn.Module) -> list[NDArray[np.float64]]:
    """Return weights and biases of the embedding and of the head."""
    return [tensor.double().numpy() for tensor in module.state_dict().values()]


def rows_by_hand(
    task: Task, client: int, round_index: int, models: list[nn.Module], logits: bool
) -> NDArray[np.float64]:
    """Return a client's rows: model, class, samples, mean embedding, mean scores."""
    rows = []
    samples = np.asarray(task.clients[client])
    labels = task.targets.numpy()[samples]
    for number, model in enumerate(models):
        w, b, v, c = arrays_of(model)
        source = generator(SEED, "groups", round_index, client, number)
        groups = make_groups(labels, 4, 3, source, 9)
        at = 0
        for label, count in zip(groups.classes, groups.counts, strict=True):
            members = samples[groups.order[at : at + count]]
            at += count
            flat = task.inputs.double().numpy()[members].reshape(count, -1)
            embedded = flat @ w.T + b
            scores = embedded @ v.T + c if logits else np.zeros((count, 0))
            rows.append([number, label, count, *embedded.mean(axis=0), *scores.mean(axis=0)])
    return np.asarray(rows)


def sent(engine: StatisticsEngine, cohort: list[int], round_index: int = 3) -> list[ClientUpdate]:
    return list(engine.train(weights(), cohort, round_index, 0.1))


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("kind", ["random_pool", "perturbed", "global"])
def test_tables_equal_a_direct_computation(kind: str, logits: bool) -> None:
    engine, round_models = make_engine(kind, logits)
    updates = sent(engine, [0, 2])
    assert [update.client for update in updates] == [0, 2]
    assert [update.num_examples for update in updates] == [25, 10]
    originals = [model.model if hasattr(model, "model") else model for model in round_models.models]
    for update in updates:
        wanted = rows_by_hand(engine.task, update.client, 3, originals, logits)
        rows = update.delta.view(-1, 3 + WIDTH + (10 if logits else 0)).numpy()
        assert len(wanted) > 2
        np.testing.assert_allclose(rows, wanted, rtol=1e-4, atol=1e-5)
    assert engine.bytes_up == 4 * sum(update.delta.numel() for update in updates)


@pytest.mark.parametrize("together", [1, 26, 40, 10**9])
def test_clients_are_the_same_however_they_are_streamed(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr("fedquilt.condense.engine._MAX_SAMPLES_TOGETHER", together)
    engine, _ = make_engine()
    alone = [sent(engine, [client])[0] for client in (0, 1, 2)]
    for one, other in zip(sent(engine, [0, 1, 2]), alone, strict=True):
        assert one.client == other.client
        torch.testing.assert_close(one.delta, other.delta, rtol=1e-5, atol=1e-6)


def test_a_client_says_nothing_of_another() -> None:
    engine, _ = make_engine()
    before = sent(engine, [0, 1, 2])
    engine.task.inputs[25:50] = 1e3
    after = sent(engine, [0, 1, 2])
    for client in (0, 2):
        torch.testing.assert_close(after[client].delta, before[client].delta)
    assert not torch.allclose(after[1].delta, before[1].delta)


def test_traffic_counts_the_open_round_only() -> None:
    engine, round_models = make_engine("random_pool")
    sent(engine, [0, 1])
    first = engine.bytes_up
    sent(engine, [0])
    assert 0 < engine.bytes_up < first
    assert engine.bytes_down == 8
    numbers = sum(tensor.numel() for tensor in Linear().state_dict().values())
    assert numbers == 64 * WIDTH + WIDTH + 10 * WIDTH + 10
    for kind, down in (("global", 4 * numbers), ("perturbed", 4 * numbers + 8)):
        engine, round_models = make_engine(kind)
        sent(engine, [0, 1, 2])
        assert round_models.bytes_down() == down
        assert engine.bytes_down == 3 * down


def test_progress_ends_at_one() -> None:
    engine, _ = make_engine()
    seen: list[tuple[str, float]] = []
    engine.progress = lambda what, share: seen.append((what, share))
    sent(engine, [0, 1, 2])
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    assert {what for what, _ in seen} == {"looking"}


def test_a_round_has_models_and_augmentations_of_its_own() -> None:
    _, round_models = make_engine("random_pool", logits=False)
    round_models.open(weights(), 0)
    first = round_models.models
    round_models.open(weights(), 1)
    assert len(round_models.models) == len(round_models.transforms) == 2
    states = [[t.clone() for t in m.state_dict().values()] for m in (*first, *round_models.models)]
    for one in range(4):
        for other in range(one):
            assert not torch.equal(states[one][0], states[other][0])
    assert (round_models.num_features, round_models.num_logits) == (WIDTH, 0)


def test_tables_of_models_are_joined_in_order() -> None:
    def table(number: int, rows: int) -> StatisticsTable:
        whole = torch.full((rows,), number)
        return StatisticsTable(whole, whole, whole, torch.full((rows, 2), 1.0), torch.ones(rows, 0))

    both = joined([table(0, 2), table(1, 1)])
    assert both.models.tolist() == [0, 0, 1]
    assert both.features.shape == (3, 2)


def make_server(round_models: RoundModels, **changes: Any) -> CondensingServer:
    task = make_task()
    trainer = Learner(Linear(), task.inputs, TrainingSettings(2, 4, 0.1), Augmentation("none"), 1)
    synthetic = SyntheticSet.random((1, 3, 4), 2, (1, 8, 8), np.random.default_rng(1))
    return CondensingServer(trainer, synthetic, round_models, MatchingSettings(5, 0.5), **changes)


def release(engine: StatisticsEngine, cohort: list[int]) -> torch.Tensor:
    return torch.cat([update.delta for update in sent(engine, cohort)])


def test_matching_brings_the_class_means_of_the_images_to_the_targets() -> None:
    engine, round_models = make_engine("global", logits=False)
    update = release(engine, [0, 1, 2])
    server = make_server(round_models)
    server.matching = MatchingSettings(200, 0.1)
    table = StatisticsTable.unpack(update, WIDTH, 0)
    server.step(weights(), update)
    w, b, *_ = arrays_of(Linear())
    images = server.synthetic.by_class().double().numpy().reshape(3, 2, 64)
    for place, label in enumerate((1, 3, 4)):
        at = (table.classes == label).numpy()
        counts = table.counts.numpy()[at]
        wanted = np.average(table.features.numpy()[at], axis=0, weights=counts)
        np.testing.assert_allclose((images[place] @ w.T + b).mean(axis=0), wanted, atol=1e-3)


def test_a_model_that_is_not_trained_in_a_round_catches_up() -> None:
    """What is made up for later is what the round itself would have done."""
    engine, round_models = make_engine("random_pool", logits=False)
    update = release(engine, [0, 1])
    at_once, later = (
        make_server(round_models, restarts=True),
        make_server(round_models, restarts=True, trains_in=lambda index: False),
    )
    trained = at_once.step(weights(), update)
    assert "epoch_avg_loss" in at_once.report()
    assert at_once.train_if_stale(trained)[1] == {}
    assert torch.equal(later.step(weights(), update), weights())
    assert "epoch_avg_loss" not in later.report()
    fresh = make_server(round_models, restarts=True)
    fresh.load_state(later.state(), torch.device("cpu"))
    for server in (later, fresh):
        made_up, said = server.train_if_stale(weights())
        assert torch.equal(made_up, trained)
        assert said["epoch_avg_loss"] == at_once.report()["epoch_avg_loss"]
        assert server.train_if_stale(made_up) == (made_up, {})


def test_training_begins_anew_or_goes_on() -> None:
    engine, round_models = make_engine("random_pool", logits=False)
    update = release(engine, [0, 1])
    other = torch.ones_like(weights())
    anew, on = (make_server(round_models, restarts=restarts) for restarts in (True, False))
    assert torch.equal(
        anew.step(other, update), make_server(round_models, restarts=True).step(weights(), update)
    )
    assert not torch.allclose(on.step(other, update), anew.step(weights(), update))


def test_a_table_of_nobody_leaves_the_images_alone() -> None:
    _, round_models = make_engine("random_pool", logits=False)
    round_models.open(weights(), 0)
    server = make_server(round_models)
    before = server.synthetic.images.clone()
    server.step(weights(), torch.zeros(0))
    assert torch.equal(server.synthetic.images, before)
    assert server.report()["groups"] == 0
    assert server.report()["matching_loss"] == 0


def test_steps_that_are_too_long_are_named() -> None:
    engine, round_models = make_engine("global", logits=False)
    update = release(engine, [0, 1])
    server = make_server(round_models)
    server.matching = MatchingSettings(50, 1e20)
    with pytest.raises(InvalidValueError, match=r"image_lr=1e\+20 must be smaller.*round 3"):
        server.step(weights(), update)


def test_a_state_of_other_images_is_refused() -> None:
    _, round_models = make_engine()
    server = make_server(round_models)
    state = server.state()
    state["images"] = state["images"][:1]
    with pytest.raises(InvalidValueError, match=r"saved images of shape \(1, 1, 8, 8\) must"):
        server.load_state(state, torch.device("cpu"))


def test_real_samples_come_from_clients_and_from_the_class() -> None:
    task = Task(make_task().inputs, make_task().targets, [np.arange(20), np.arange(20, 40)])
    config = small(init_method="real_sample", ipc=9)
    first, sent = first_images(config, task, (1, 3, 4), Linear())
    images = first.by_class()
    assert sent == 4 * images.numel()
    for place, label in enumerate((1, 3, 4)):
        own = [i for i in range(40) if task.targets[i] == label]
        found = [
            next(i for i in range(SAMPLES) if torch.equal(task.inputs[i], image))
            for image in images[place]
        ]
        assert set(found) <= set(own)
        assert len(set(found)) == min(9, len(own))  # repeated only where there are fewer


def test_small_choices() -> None:
    assert augmentation_of(small(), 1) == "color_crop_cutout_scale_rotate"
    assert augmentation_of(small(), 3).endswith("_flip")
    assert augmentation_of(small(augmentation="crop"), 3) == "crop"
    asked = [(None, 64), (256, 64), (10, 64)]
    assert [groups_per_step(*pair) for pair in asked] == [None, 4, 1]
    assert normalisation(small(dataset="nowhere"), 3) == ((0.0,) * 3, (1.0,) * 3)
    assert normalisation(small(dataset="digits"), 3) == ((0.0,) * 3, (1.0,) * 3)
    assert normalisation(small(dataset="digits"), 1) == ((0.3051,), (0.3762,))
    told = small(dataset="nowhere", pixel_mean="0.5", pixel_std="0.2,0.3")
    assert normalisation(told, 2) == ((0.5, 0.5), (0.2, 0.3))
    with pytest.raises(InvalidValueError, match=r"pixel_std='0.2,0.3' must be one number, or 3"):
        normalisation(told, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pixel_mean": "0.5"}, "must be given together"),
        ({"pixel_mean": "a", "pixel_std": "1"}, "pixel_mean='a' must be numbers"),
        ({"pixel_mean": "0", "pixel_std": "0"}, "pixel_std=0.0 must be > 0"),
        ({"local_epochs": 7}, "local_epochs=7 must be left out of a condensation"),
        ({"tiers": "1,1/2"}, "tiers='1,1/2' must be left out"),
    ],
)
def test_settings_that_make_no_sense(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidValueError, match=re.escape(said)):
        small(**given)


def test_only_images_can_be_condensed() -> None:
    task = make_task()
    flat = Task(task.inputs.flatten(1), task.targets, task.clients)
    with pytest.raises(InvalidValueError, match=r"inputs of shape \(64,\) must be images"):
        make_condensation(small(embed_layer="body"), Linear(), flat, 10)


def test_the_global_generators_of_others_are_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = condense(clients=PARTS, num_rounds=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(images_of(condense(clients=PARTS, num_rounds=1)), images_of(first))
