"""`QuAPFLServer`: the documents' interface, its refusals and its extension points."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedquilt.config import HYPERPARAMETERS
from fedquilt.errors import FedquiltError, InvalidValueError
from fedquilt.framework import (
    AdaptivePrivacyAllocator,
    ParticipationTracker,
    QuantileClipper,
    QuAPFLServer,
)
from fedquilt.privacy.clip import FixedClipper

K = math.sqrt(2 * math.log(1.25e5))
RANDOM = torch.Generator().manual_seed(2)
INPUTS = torch.randn(60, 4, generator=RANDOM)
LABELS = (INPUTS[:, 0] > 0).long() + (INPUTS[:, 1] > 0).long()
PARTS = [list(range(i * 6, i * 6 + 6)) for i in range(10)]
EVERYBODY = {"participation_distribution": "always", "clients_per_round": 10}
SMALL = {
    "num_rounds": 3,
    "local_epochs": 1,
    "learning_rate": 0.1,
    "lr_decay": 0.99,
    "epsilon_total": 3000.0,
    "seed": 4,
    "noise_seed": 5,
    "eval_every": 1,
    **EVERYBODY,
}


class Pairs:
    """Anything with a length and [i] -> (tensor, int)."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return INPUTS[index], int(LABELS[index])


class Net(nn.Module):
    """It cannot be built without arguments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, width)
        self.fc2 = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def make_net() -> Net:
    torch.manual_seed(0)
    return Net(5)


def server(
    kind: type[QuAPFLServer] = QuAPFLServer, model: nn.Module | None = None, **config: Any
) -> QuAPFLServer:
    return kind(
        model=make_net() if model is None else model,
        train_dataset=Pairs(),
        test_dataset=Pairs(),
        client_indices=PARTS,
        dataset_name="toy",
        config={**SMALL, **config},
    )


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def test_the_documents_classes_are_here() -> None:
    made = server()
    assert isinstance(made.tracker, ParticipationTracker)
    assert isinstance(made.privacy_allocator, AdaptivePrivacyAllocator)
    assert isinstance(made.clipper, QuantileClipper)
    assert made.privacy_allocator.epsilon_base == 1000.0
    assert made.config["num_rounds"] == 3
    assert made.config["beta"] == HYPERPARAMETERS["beta"]


def test_train_returns_the_documented_history_and_moves_the_model() -> None:
    made = server()
    before = flat(made.model)
    history = made.train()
    for key in ("test_accuracy", "test_loss", "clip_values", "noise_levels"):
        assert len(history[key]) == 3
    assert len(history["participation_stats"]) == len(history["privacy_budgets"]) == 3
    assert history["participation_stats"][-1] == made.tracker.get_statistics()
    assert made.tracker.total_rounds == 3
    assert not np.array_equal(flat(made.model), before)
    assert made.evaluate() == pytest.approx(
        (history["test_accuracy"][-1], history["test_loss"][-1])
    )
    assert made.history is history


def test_learning_really_happens_without_noise() -> None:
    made = server(noise_strategy="none", num_rounds=40, learning_rate=0.5, lr_decay=1.0)
    first, _ = made.evaluate()
    made.train()
    assert made.evaluate()[0] > max(0.85, first)


def by_the_architecture_document(made: QuAPFLServer, cohort: list[int], round_t: int) -> np.ndarray:
    """Steps 2 to 8 of the document's loop, with the server's own parts."""
    made.tracker.update(cohort)
    gradients = [made.local_training(cid, round_t) for cid in cohort]
    clip_val = made.clipper.update_clip_value(gradients)
    clipped = made.clipper.clip_gradients(gradients)
    noisy = []
    for i, cid in enumerate(cohort):
        p_rate = made.tracker.get_participation_rate(cid)
        eps = made.privacy_allocator.compute_privacy_budget(p_rate)
        noisy.append(made.privacy_allocator.add_gaussian_noise(clipped[i], eps, clip_val))
    global_grad = np.mean(noisy, axis=0)
    made.update_global_model(global_grad)
    return global_grad


def test_the_documents_own_loop_gives_what_train_gives() -> None:
    """The methods are the steps: calling them one by one is the same algorithm."""
    from fedquilt.privacy.noise import SeededNoise

    whole, stepped = server(), server()
    history = whole.train()
    for round_t in range(3):
        stepped.privacy_allocator.noise = SeededNoise(5).stream(round_t)
        by_the_architecture_document(stepped, stepped.select_clients(round_t), round_t)
    assert np.allclose(flat(stepped.model), flat(whole.model), atol=1e-6)
    assert stepped.clipper.clip_history == pytest.approx(history["clip_values"], rel=1e-5)


def test_local_training_is_local_minus_global_and_divided_only_for_the_paper() -> None:
    document, paper = server(), server(noise_strategy="full")
    delta, loss = document.local_training(3, 2)
    gradient, same_loss = paper.local_training(3, 2)
    assert isinstance(delta, np.ndarray)
    assert delta.shape == (4 * 5 + 5 + 5 * 3 + 3,)
    assert np.allclose(gradient * 0.1 * 0.99**2, delta, atol=1e-7)
    assert loss == same_loss > 0
    # The direction is downhill: v1.1.1 of the document.
    model = make_net()
    x, y = INPUTS[PARTS[3]], LABELS[PARTS[3]]
    before = nn.functional.cross_entropy(model(x), y)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(flat(model) + delta), model.parameters())
    assert nn.functional.cross_entropy(model(x), y) < before


def test_an_update_is_the_vector_and_unpacks_into_vector_and_loss() -> None:
    made = server()
    update = made.local_training(3, 2)
    vector, loss = update
    assert type(vector) is np.ndarray
    assert np.array_equal(np.asarray(update), vector)
    assert update.loss == loss > 0
    assert np.mean([update, update], axis=0).shape == vector.shape
    assert np.linalg.norm(update) == pytest.approx(np.linalg.norm(vector))
    assert list(2 * update) == list(2 * vector)  # what is computed from it is a plain vector
    assert np.array_equal(torch.as_tensor(update).numpy(), vector)


@pytest.mark.parametrize("client", [-1, 10, 1.5, "0", None])
def test_a_foreign_client_cannot_train(client: Any) -> None:
    with pytest.raises(ValueError, match="client_id"):
        server().local_training(client, 0)


def test_the_present_weights_of_the_model_count() -> None:
    """Who loads a checkpoint into the model finds every method starting from it."""
    made = server()
    other = Net(5)
    made.model.load_state_dict(other.state_dict())
    start = flat(made.model)
    update = np.full(len(start), 0.5)
    made.update_global_model(update)
    assert np.allclose(flat(made.model), start + 0.5)
    reference = server(model=copy.deepcopy(other))
    made.model.load_state_dict(other.state_dict())
    assert np.array_equal(made.local_training(0, 0), reference.local_training(0, 0))
    assert made.evaluate() == reference.evaluate()
    made.model.load_state_dict(other.state_dict())
    made.train()
    reference.train()
    assert np.array_equal(flat(made.model), flat(reference.model))


def test_the_global_update_is_added_limited_and_skipped_when_not_finite() -> None:
    made = server(max_agg_norm=2.0)
    start = flat(made.model)
    update = np.zeros(len(start))
    update[3] = 10.0
    made.update_global_model(torch.from_numpy(update))
    assert flat(made.model)[3] == pytest.approx(start[3] + 2.0)
    for bad in (math.nan, math.inf):
        update[3] = bad
        made.update_global_model(update)
    assert flat(made.model)[3] == pytest.approx(start[3] + 2.0)
    with pytest.raises(ValueError, match="aggregated_gradient"):
        made.update_global_model(np.zeros(3))


def test_selection_is_a_list_of_ids_and_repeatable() -> None:
    config = {"participation_distribution": "beta", "clients_per_round": 4}
    made, again = server(**config), server(**config)
    cohorts = [made.select_clients(t) for t in range(20)]
    assert cohorts == [again.select_clients(t) for t in range(20)]
    assert all(isinstance(client, int) for cohort in cohorts for client in cohort)
    assert all(len(set(cohort)) == len(cohort) <= 4 for cohort in cohorts)
    assert len({tuple(cohort) for cohort in cohorts}) > 10


def test_the_participation_keys_shape_the_population() -> None:
    def mean_turnout(**config: Any) -> np.ndarray:
        made = server(clients_per_round=10, **config)
        counts = np.zeros(10)
        for t in range(300):
            counts[made.select_clients(t)] += 1
        return counts / 300

    beta = {"participation_distribution": "beta"}
    often = mean_turnout(**beta, participation_alpha=50, participation_beta=5)
    rarely = mean_turnout(**beta, participation_alpha=1, participation_beta=20)
    assert often.min() > 0.7
    assert rarely.mean() < 0.15
    mixed = mean_turnout(**beta, participation_mix=1.0)
    assert mixed.std() < 0.05 < mean_turnout(**beta).std()
    assert mean_turnout(participation_distribution="always").tolist() == [1.0] * 10


def test_convergence_is_the_documents_target() -> None:
    made = server()
    assert not made.check_convergence(1.0)
    made.dataset_name = "mnist"
    assert made.check_convergence(0.971)
    assert not made.check_convergence(0.9709)


# Extension points of the architecture document


def test_a_subclass_of_the_allocator_changes_the_noise() -> None:
    class Flat(AdaptivePrivacyAllocator):
        def compute_privacy_budget(self, participation_rate: float) -> float:
            return 7.0

    for strategy in ({}, {"noise_strategy": "full"}):
        made = server(**strategy)
        made.privacy_allocator = Flat()
        history = made.train()
        assert history["privacy_budgets"] == pytest.approx([7.0] * 3)
        scale = 10 if strategy else math.sqrt(10)
        expected = [clip * K / 7.0 / scale for clip in history["clip_values"]]
        assert history["noise_levels"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "strategy",
    [{}, {"noise_strategy": "full"}, {"critical_layers": ["fc2"]}, {"mode": "fixed_dp"}],
)
def test_a_subclass_of_the_allocator_can_replace_the_mechanism(strategy: dict[str, Any]) -> None:
    class Silent(AdaptivePrivacyAllocator):
        def add_gaussian_noise(self, data: Any, epsilon: float, clip_norm: float) -> Any:
            return data

    made = server(**strategy)
    made.privacy_allocator = Silent()
    history = made.train()
    assert [stats["noise_norm"] for stats in history["noise_stats"]] == [0.0] * 3
    assert history["noise_levels"] == [0.0] * 3
    assert not made.statement.is_bounded
    assert any("rule of its own" in note for note in made.statement.notes)
    made.privacy_allocator = AdaptivePrivacyAllocator()
    assert any("rule of its own" in note for note in made.statement.notes)


@pytest.mark.parametrize("strategy", [{}, {"noise_strategy": "full"}])
def test_a_subclass_of_the_clipper_changes_the_bound(strategy: dict[str, str]) -> None:
    class Shrinking(QuantileClipper):
        calls = 0

        def update_clip_value(self, gradients_list: Sequence[Any]) -> float:
            assert len(gradients_list) == 10
            self.calls += 1
            return 0.1 / self.calls

    made = server(**strategy)
    made.clipper = Shrinking()
    history = made.train()
    assert history["clip_values"] == pytest.approx([0.1, 0.05, 0.1 / 3])
    for stats, bound in zip(history["noise_stats"], history["clip_values"], strict=True):
        assert stats["signal_norm"] <= bound * (1 + 1e-5)


def test_a_subclass_of_the_server_selects() -> None:
    class Chooser(QuAPFLServer):
        def select_clients(self, round_t: int) -> list[int]:
            return torch.tensor([[3, 1], [7, 2], [0, 9]])[round_t]

    made = server(Chooser)
    history = made.train()
    assert history["client_participation"] == [[3, 1], [7, 2], [0, 9]]
    assert np.flatnonzero(made.tracker.participation_count).tolist() == [0, 1, 2, 3, 7, 9]


@pytest.mark.parametrize("cohort", [[0, 0], [10], [-1], [0.5], ["a"], [[1]]])
def test_a_bad_selection_stops_before_anything_changes(cohort: list[Any]) -> None:
    class Chooser(QuAPFLServer):
        def select_clients(self, round_t: int) -> list[int]:
            return cohort

    made = server(Chooser)
    before = flat(made.model)
    with pytest.raises(ValueError, match="client") as caught:
        made.train()
    assert isinstance(caught.value, FedquiltError)
    assert made.tracker.total_rounds == 0
    assert np.array_equal(flat(made.model), before)


def test_a_subclass_that_selects_nobody_leaves_the_model() -> None:
    class Nobody(QuAPFLServer):
        def select_clients(self, round_t: int) -> list[int]:
            return []

    made = server(Nobody)
    before = flat(made.model)
    history = made.train()
    assert np.array_equal(flat(made.model), before)
    assert history["clip_values"] == [None] * 3
    assert made.tracker.total_rounds == 3


@pytest.mark.parametrize("strategy", ["none", "full"])
def test_a_subclass_trains_from_the_global_model_of_the_round(strategy: str) -> None:
    """An own loop over a copy of `self.model` must see every round's model, not the first."""

    seen: list[np.ndarray] = []

    class Own(QuAPFLServer):
        def local_training(self, client_id: int, round_t: int) -> tuple[np.ndarray, float]:
            seen.append(flat(self.model))
            local = copy.deepcopy(self.model)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.1 * 0.99**round_t)
            index = PARTS[client_id]
            loss = nn.functional.cross_entropy(local(INPUTS[index]), LABELS[index])
            loss.backward()
            optimizer.step()
            delta = flat(local) - flat(self.model)
            return delta / (0.1 * 0.99**round_t if strategy == "full" else 1.0), loss.item()

    own, plain = server(Own, noise_strategy=strategy), server(noise_strategy=strategy)
    history, reference = own.train(), plain.train()
    assert np.allclose(flat(own.model), flat(plain.model), atol=1e-5)
    assert history["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-4)
    assert len({vector.tobytes() for vector in seen}) == 3


def test_local_training_may_return_the_vector_alone_as_the_document_writes_it() -> None:
    class Alone(QuAPFLServer):
        def local_training(self, client_id: int, round_t: int) -> Any:
            return np.array(super().local_training(client_id, round_t))

    alone, plain = server(Alone), server()
    alone.train()
    plain.train()
    assert np.allclose(flat(alone.model), flat(plain.model), atol=1e-7)


def test_a_training_that_is_not_finite_or_misshapen() -> None:
    class Broken(QuAPFLServer):
        def local_training(self, client_id: int, round_t: int) -> Any:
            vector, loss = super().local_training(client_id, round_t)
            return (np.full_like(vector, np.nan), loss) if client_id == 4 else (vector, loss)

    made = server(Broken)
    history = made.train()
    assert np.all(np.isfinite(flat(made.model)))
    assert all(math.isfinite(value) for value in history["test_loss"])

    class Short(QuAPFLServer):
        def local_training(self, client_id: int, round_t: int) -> Any:
            return np.ones(1)

    with pytest.raises(
        InvalidValueError, match=r"local_training must return .*\(43,\), not \(1,\)"
    ):
        server(Short).train()


def test_a_subclass_updates_the_model_itself() -> None:
    class Halved(QuAPFLServer):
        def update_global_model(self, aggregated_gradient: Any) -> None:
            super().update_global_model(0.5 * aggregated_gradient)

    class ByHand(QuAPFLServer):
        def update_global_model(self, aggregated_gradient: Any) -> None:
            assert isinstance(aggregated_gradient, np.ndarray)
            start = 0
            for param in self.model.parameters():
                part = aggregated_gradient[start : start + param.numel()].reshape(param.shape)
                param.data += 0.5 * torch.from_numpy(part).float()
                start += param.numel()

    halved, by_hand, plain = server(Halved), server(ByHand), server()
    for made in (halved, by_hand, plain):
        made.train()
    assert np.allclose(flat(halved.model), flat(by_hand.model), atol=1e-6)
    assert not np.allclose(flat(halved.model), flat(plain.model), atol=1e-3)


def test_a_subclass_evaluates() -> None:
    class Judge(QuAPFLServer):
        def evaluate(self) -> tuple[float, float]:
            return float(flat(self.model)[0]), 42.0

    made = server(Judge)
    history = made.train()
    assert history["test_loss"] == [42.0] * 3
    assert history["test_accuracy"][-1] == pytest.approx(flat(made.model)[0])
    assert len(set(history["test_accuracy"])) == 3


def test_the_tracker_can_be_replaced() -> None:
    made = server()
    made.tracker = ParticipationTracker(10, ema=0.5)
    history = made.train()
    budgets = [1000 * (1 + 0.5 * math.exp(-2 * rate)) for rate in (0.5, 0.75, 0.875)]
    assert history["privacy_budgets"] == pytest.approx(budgets)
    assert made.tracker.total_rounds == 3


# Configuration


def test_the_clipping_keys() -> None:
    fixed = server(clipping_strategy="fixed", initial_clip=0.25)
    assert isinstance(fixed.clipper, FixedClipper)
    assert fixed.train()["clip_values"] == [0.25] * 3
    assert server(clipping_strategy="fixed").clipper.get_current_clip_value() == 1.0
    moving = server(initial_clip=2.0, clip_momentum=0.0)
    assert moving.clipper.get_current_clip_value() == 2.0
    assert moving.clipper.momentum == 0.0
    swapped = server(clipping_strategy="fixed")
    swapped.clipper = QuantileClipper()
    assert len(set(swapped.train()["clip_values"])) == 3
    for bad in (
        {"clipping_strategy": "quantil"},
        {"initial_clip": -1.0},
        {"initial_clip": math.nan},
        {"clipping_strategy": "fixed", "initial_clip": 0.0},
    ):
        with pytest.raises(ValueError, match=r"clip"):
            server(**bad)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_clients": 11}, "num_clients=11 must be 10"),
        ({"clients_per_round": 11}, "clients_per_round=11"),
        ({"participation_alpha": 0}, "participation_alpha"),
        ({"participation_mix": 2}, "participation_mix"),
        ({"rounds": 3}, "unknown key 'rounds'.*did you mean 'num_rounds'"),
        ({"alpha": -1}, "budget_alpha=-1"),
    ],
)
def test_bad_configurations_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        server(**config)


def test_the_configuration_given_is_neither_kept_nor_changed() -> None:
    given = dict(SMALL)
    made = QuAPFLServer(make_net(), Pairs(), Pairs(), PARTS, "toy", config=given)
    assert given == SMALL
    given["num_rounds"] = 99
    assert made.config["num_rounds"] == 3
    assert HYPERPARAMETERS["num_rounds"] == 200


def test_settings_that_were_used_cannot_be_changed_without_a_word() -> None:
    """The architecture document reads `self.config.get('max_agg_norm')` as it updates the model."""
    made = server()
    assert made.config.get("max_agg_norm", 100) == 10_000
    assert json.loads(json.dumps(made.config)) == made.config == {**HYPERPARAMETERS, **SMALL}
    for change in (
        lambda: made.config.__setitem__("max_agg_norm", 0.001),
        lambda: made.config.update(max_agg_norm=0.001),
        lambda: made.config.pop("max_agg_norm"),
        lambda: made.config.setdefault("other", 1),
    ):
        with pytest.raises(InvalidValueError, match=r"server\.config cannot be changed"):
            change()
    with pytest.raises(AttributeError):
        made.config = {"max_agg_norm": 0.001}  # type: ignore[misc]
    own = copy.deepcopy(made.config)
    own["max_agg_norm"] = 0.001  # a copy is anybody's
    moved = server(**{**SMALL, "max_agg_norm": own["max_agg_norm"]})
    before = flat(moved.model)
    moved.update_global_model(np.ones(len(before)))
    assert np.linalg.norm(flat(moved.model) - before) == pytest.approx(0.001, rel=1e-3)


def test_without_a_seed_the_run_follows_torch() -> None:
    def trained(torch_seed: int) -> np.ndarray:
        model = make_net()
        config = {key: value for key, value in SMALL.items() if key != "seed"}
        torch.manual_seed(torch_seed)
        made = QuAPFLServer(
            model, Pairs(), Pairs(), PARTS, "toy", config={**config, "local_batch_size": 2}
        )
        made.train()
        return flat(made.model)

    assert np.array_equal(trained(1), trained(1))
    assert not np.array_equal(trained(1), trained(2))


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_devices(device: Any) -> None:
    made = QuAPFLServer(make_net(), Pairs(), Pairs(), PARTS, "toy", config=SMALL, device=device)
    made.train()


class Centred(Net):
    """Its class keeps a mean of what it saw in training."""

    centre = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.training:
            Centred.centre = self.centre + 1 + float(out.mean())
        return out * (1 + self.centre)


def test_a_step_by_hand_leaves_nothing_behind_in_what_is_evaluated() -> None:
    made = server(model=Centred(5))
    before = made.evaluate()
    made.local_training(3, 0)
    assert made.evaluate() == before


def test_a_device_that_cannot_be_had_is_refused() -> None:
    for device in ("cuda:3", "meta"):
        with pytest.raises(ValueError, match="device="):
            QuAPFLServer(make_net(), Pairs(), Pairs(), PARTS, "toy", config=SMALL, device=device)


def test_client_indices_come_as_lists_arrays_or_tensors() -> None:
    results = []
    for form in (list, np.asarray, torch.tensor, tuple):
        parts = [form(part) for part in PARTS]
        made = QuAPFLServer(make_net(), Pairs(), Pairs(), parts, "toy", config=SMALL)
        made.train()
        results.append(flat(made.model))
    assert all(np.array_equal(results[0], other) for other in results)


@pytest.mark.parametrize("parts", [[], [[0, 60]], [[-1]], [[0.5]], [[[0, 1]]]])
def test_bad_client_indices_are_refused(parts: Any) -> None:
    with pytest.raises(ValueError, match="clients"):
        QuAPFLServer(make_net(), Pairs(), Pairs(), parts, "toy")


def with_batchnorm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def test_running_statistics_travel_with_fedavg() -> None:
    made = server(model=with_batchnorm(), noise_strategy="none", num_rounds=1)
    made.train()
    # After one round: the clients' mean of one step of momentum 0.1 from zero.
    model = with_batchnorm()
    hidden = [model[0](INPUTS[part]).detach() for part in PARTS]
    expected = torch.stack([0.1 * rows.mean(0) for rows in hidden]).mean(0)
    assert torch.allclose(made.model[1].running_mean, expected, atol=1e-5)
    assert made.model[1].num_batches_tracked.item() == 1


@pytest.mark.parametrize(
    "config", [{}, {"noise_strategy": "full"}, {"mode": "fixed_dp", "noise_layers": "all"}]
)
def test_running_statistics_are_refused_by_the_modes_with_noise(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=r"running_mean.*GroupNorm"):
        server(model=with_batchnorm(), **config)


def test_an_interrupted_training_keeps_what_it_had() -> None:
    class Tired(QuAPFLServer):
        def select_clients(self, round_t: int) -> list[int]:
            if round_t == 2:
                raise KeyboardInterrupt
            return super().select_clients(round_t)

    tired, plain = server(Tired), server(num_rounds=2, epsilon_total=2000.0)
    with pytest.raises(KeyboardInterrupt):
        tired.train()
    plain.train()
    assert np.array_equal(flat(tired.model), flat(plain.model))
    assert len(tired.history["clip_values"]) == 2
