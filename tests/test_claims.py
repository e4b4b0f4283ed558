"""Whole neighbouring worlds through `fedquilt.run`: the sum moves by no more than was charged.

Each world is a run of one round with the same noise.  The victim is client 0, and every
client's clip is 1, so the released sum may move by 1 when the victim's data are taken away,
and not at all between two worlds in which the victim sends nothing.

Below, the victim is the last to train and clips are next to nothing, so that all worlds release
the same weights: whatever is measured of them must then be the same number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.data import ImageDataset, as_dataset
from fedquilt.errors import InvalidValueError
from fedquilt.models import FeatureModel
from fedquilt.privacy.certified import Certified

CLIENTS = 30
SAMPLES = 12
NAN, HUGE = float("nan"), 3e38


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4)
        )


class LogSoftmax(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4), nn.LogSoftmax(1)
        )


class Teacher(nn.Module):
    """A frozen parameter follows the outputs, as a momentum teacher's does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 4)
        self.centre = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.fc(x.flatten(1))
        if self.training:
            self.centre.data = 0.5 * self.centre.data + 20 * out.detach().mean(0)
        return out - self.centre


class Attribute(nn.Module):
    """A plain tensor that no list of parameters or buffers shows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 4)
        self.centre = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.fc(x.flatten(1))
        if self.training:
            self.centre = 0.5 * self.centre + 20 * out.detach().mean(0)
        return out - self.centre


class Late(nn.Module):
    """A buffer that moves from the sixth call on, and only with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 4)
        self.register_buffer("centre", torch.zeros(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.fc(x.flatten(1))
        self.calls += 1
        if self.training and torch.is_grad_enabled() and self.calls > 5:
            self.centre.copy_(0.5 * self.centre + 20 * out.detach().mean(0))
        return out - self.centre


def world(victim_samples: int, value: float | None = None) -> tuple[ImageDataset, list[np.ndarray]]:
    """Return the data in which the victim has so many samples, all of one value or its own."""
    draws = np.random.default_rng(0)
    inputs = draws.standard_normal((CLIENTS, SAMPLES, 1, 4, 4)).astype(np.float32)
    # Nobody holds all classes, or there would be nothing for HeteroFL to mask.
    labels = np.repeat(np.arange(CLIENTS)[:, None] % 3, SAMPLES, axis=1)
    labels[:, 0] = 3
    own = inputs[0, :victim_samples]
    if value is not None:
        own = np.full_like(own, value)
    others = inputs[1:].reshape(-1, 1, 4, 4)
    y = np.concatenate([labels[0, :victim_samples], labels[1:].ravel()])
    sizes = [len(own)] + [SAMPLES] * (CLIENTS - 1)
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    x = torch.from_numpy(np.concatenate([own, others]))
    return ImageDataset(x, torch.from_numpy(y), "worlds", 4), parts


def released(
    model: nn.Module, data: tuple[ImageDataset, list[np.ndarray]], **options
) -> torch.Tensor:
    """Return the noised sum of one round, up to the model it started from."""
    train, clients = data
    done = fedquilt.run(
        model, train, world(SAMPLES)[0], clients, output_dir=None, mode="certified", noise_seed=1,
        num_rounds=1, clients_per_round=1.0, availability="always", clip_norm=1.0, epsilon=6.0,
        policy="worst_case", learning_rate=1.0, local_epochs=2, batch_size=4, server_lr=1.0,
        **options,
    )  # fmt: skip
    assert done.model is not None
    weights = torch.cat([p.detach().flatten() for p in done.model.parameters() if p.requires_grad])
    return weights.to(torch.float64) * CLIENTS


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


WAYS = {
    "batched, dropout": (Dropping, {"engine": "batched"}),
    "sequential, dropout": (Dropping, {"engine": "sequential"}),
    "heterofl, log-softmax": (LogSoftmax, {"method": "heterofl", "tiers": "1,1/2"}),
    "batched heterofl, log-softmax": (
        LogSoftmax, {"method": "heterofl", "tiers": "1,1/2", "engine": "batched"}
    ),
    "frozen parameter": (Teacher, {}),
    "attribute": (Attribute, {}),
    "late buffer": (Late, {}),
}  # fmt: skip
# (the victim's samples, their value) in two worlds, and by how much the sum may move
NEIGHBOURS = [
    ((SAMPLES, None), (1, NAN), 1.0),
    ((SAMPLES, None), (SAMPLES, HUGE), 2.0),  # a replacement: one clip out, another in
    ((SAMPLES, HUGE), (1, NAN), 1.0),
    ((SAMPLES, NAN), (1, NAN), 0.0),
    ((SAMPLES, NAN), (2, NAN), 0.0),
]


@pytest.mark.parametrize("way", WAYS)
def test_the_sum_moves_by_no_more_than_the_clip(way: str) -> None:
    kind, options = WAYS[way]
    for ours, theirs, allowed in NEIGHBOURS:
        one, other = (released(seeded(kind), world(*held), **options) for held in (ours, theirs))
        moved = float((one - other).norm())
        # The model is kept in float32, 2**-24 of each weight; times the divisor.
        rounding = 2**-22 * float(one.norm())
        assert moved <= allowed + rounding, (ours, theirs)
        if allowed == 0:
            assert torch.equal(one, other)


@pytest.mark.parametrize("value", [NAN, float("inf"), HUGE])
def test_bad_samples_of_a_protected_client_refuse_nothing(value: float) -> None:
    train, clients = world(SAMPLES, value)
    pair = (train.images, train.targets)
    options = {"mode": "certified", "num_rounds": 1, "output_dir": None, "availability": "always"}
    done = fedquilt.run(seeded(LogSoftmax), pair, world(SAMPLES)[0], clients, **options)
    assert done.statement.is_bounded


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_an_empty_client_joins_contributes_nothing_and_is_charged(engine: str) -> None:
    train, clients = world(SAMPLES)
    empty = [[], *clients[1:]]
    done = fedquilt.run(
        seeded(Dropping), train, train, empty, mode="certified", num_rounds=2, output_dir=None,
        availability="always", clients_per_round=1.0, engine=engine,
    )  # fmt: skip
    assert [0 in cohort for cohort in done.result["cohorts"]] == [True, True]
    assert done.statement.epsilon_median == done.statement.epsilon_max
    assert done.final_accuracy >= 0


def test_the_classes_are_the_models_not_the_largest_label_of_somebody() -> None:
    train, clients = world(SAMPLES)
    labels = train.targets.clamp(max=2)
    done = fedquilt.run(
        seeded(LogSoftmax), (train.images, labels), train, clients,
        mode="certified", num_rounds=1, output_dir=None,
    )  # fmt: skip
    assert done.result["metadata"]["num_classes"] == 4


def test_the_largest_label_of_somebody_is_no_number_of_classes_of_a_data_set() -> None:
    """`as_dataset` counts classes by the largest label; one that no score is for stops nothing."""
    train, clients = world(SAMPLES)
    labels = train.targets.clamp(max=2)
    told = []
    for label in (2, 3, 7):
        labels[int(clients[0][0])] = label
        own = as_dataset((train.images, labels.clone()))
        done = fedquilt.run(
            seeded(LogSoftmax), own, (train.images, train.targets), clients,
            mode="certified", num_rounds=1, output_dir=None,
        )  # fmt: skip
        told.append(done.result["metadata"]["num_classes"])
    assert told == [4, 4, 4]


class Schedule(torch.optim.SGD):
    """Its rate falls after so many steps, counted in its class, or wherever `count` keeps them."""

    steps = 0

    def __init__(self, params, lr, count=None) -> None:  # type: ignore[no-untyped-def]
        super().__init__(params, lr)
        self._count = count or self._by_class

    def _by_class(self) -> int:
        Schedule.steps += 1
        return Schedule.steps

    def step(self, closure=None) -> None:  # type: ignore[no-untyped-def, override]
        rate = self.param_groups[0]["lr"]
        self.param_groups[0]["lr"] = rate * 0.1 if self._count() > 100 else rate
        super().step()
        self.param_groups[0]["lr"] = rate


def counting_in_a_closure():  # type: ignore[no-untyped-def]
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return steps

    return lambda params, lr: Schedule(params, lr, count)


class CountingFactory:
    """Makes optimisers that count their steps in it."""

    steps = 0

    def count(self) -> int:
        self.steps += 1
        return self.steps

    def __call__(self, params, lr) -> Schedule:  # type: ignore[no-untyped-def]
        return Schedule(params, lr, self.count)


@pytest.mark.parametrize(
    "factory",
    [lambda: Schedule, lambda: partial(Schedule), counting_in_a_closure, CountingFactory],
    ids=["class", "partial", "closure", "object"],
)
def test_the_state_of_an_own_optimizer_does_not_survive_clients(factory) -> None:  # type: ignore[no-untyped-def]
    sums = []
    for held in ((SAMPLES, None), (1, NAN), (SAMPLES, NAN)):
        Schedule.steps = 0
        sums.append(released(seeded(LogSoftmax), world(*held), optimizer=factory()))
    rounding = 2**-22 * float(sums[0].norm())
    assert float((sums[0] - sums[1]).norm()) <= 1 + rounding
    assert torch.equal(sums[1], sums[2])


class OfClass(nn.Module):
    """Centres its outputs by a mean that its class keeps."""

    centre = torch.zeros(4)

    def __init__(self) -> None:
        super().__init__()
        type(self).centre = torch.zeros(4)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.fc(x.flatten(1))
        if self.training:
            type(self).centre = 0.5 * self.centre + 2 * out.detach().mean(0)
        return out - self.centre


def centring():  # type: ignore[no-untyped-def]
    """Return a forward hook that keeps the mean in its closure."""
    centre = torch.zeros(4)

    def hook(module: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
        nonlocal centre
        if module.training:
            centre = 0.5 * centre + 2 * out.detach().mean(0)
        return out - centre

    return hook


class Closed(nn.Module):
    """Calls a function with the mean in its closure."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.centred = nn.Linear(16, 4), centring()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.centred(self, (), self.fc(x.flatten(1)))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    model[1].register_forward_hook(centring())
    return model


class Defaulted(nn.Linear):
    """Keeps the mean in a default argument."""

    def forward(self, x: torch.Tensor, centre: list[float] = [0.0]) -> torch.Tensor:  # noqa: B006
        out = super().forward(x.flatten(1))
        if self.training:
            centre[0] = 0.5 * centre[0] + 2 * float(out.mean())
        return out * (1 + centre[0])


def hooked_within() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    model[3].register_forward_hook(centring())
    return model


LEFT_BEHIND: dict[str, Callable[[], nn.Module]] = {
    "class": OfClass,
    "closure": Closed,
    "hook": hooked,
    "default": lambda: Defaulted(16, 4),
}


def looked_at(kind: Callable[[], nn.Module], change: str, **options) -> list[dict[str, object]]:
    """Return what every round of a run says, the last of 12 clients having this data."""
    draws = np.random.default_rng(1)
    inputs = torch.from_numpy(draws.standard_normal((12 * 8, 1, 4, 4)).astype(np.float32))
    labels = torch.from_numpy(draws.integers(0, 4, 12 * 8))
    test = inputs[:40].flip(0).clone() + 0.5, labels[:40].flip(0).clone()
    clients = [np.arange(8 * k, 8 * k + 8) for k in range(12)]
    if change == "nothing":
        clients[-1] = clients[-1][:0]
    elif change == "shifted":
        inputs[-8:] += 100
    elif change == "nan":
        inputs[-1] = NAN
    lines: list[dict[str, object]] = []
    done = fedquilt.run(
        seeded(kind), (inputs, labels), test, clients, output_dir=None, mode="certified",
        noise_seed=1, num_rounds=2, clients_per_round=1.0, availability="always", clip_norm=1e-30,
        epsilon=6.0, learning_rate=0.5, batch_size=4, eval_every=1, **options,
        observer=lambda _, line: lines.append(dict(line)),
    )  # fmt: skip
    looked = ("test_loss", "test_accuracy", "tiers")
    measured = [{k: v for k, v in line.items() if k in looked} for line in lines]
    assert len(measured) == 2
    assert all(math.isfinite(line["test_loss"]) for line in measured)
    # What is handed out is in the same state: its outputs are those that were measured.
    with torch.no_grad():
        loss = nn.functional.cross_entropy(done.model(test[0]), test[1])
    assert float(loss) == pytest.approx(measured[-1]["test_loss"], rel=1e-5)
    return measured


WORLDS = ["data", "nothing", "shifted", "nan"]


@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize("where", LEFT_BEHIND)
def test_what_is_measured_is_not_what_the_last_client_left_behind(where: str, engine: str) -> None:
    found = [looked_at(LEFT_BEHIND[where], change, engine=engine) for change in WORLDS]
    assert found == [found[0]] * len(WORLDS)


def test_worker_processes_leave_nothing_behind_either() -> None:
    shifted = looked_at(OfClass, "shifted", engine="processes")
    assert shifted == looked_at(OfClass, "data", engine="sequential")


@pytest.mark.parametrize("where", LEFT_BEHIND)
def test_a_stack_of_clients_refuses_state_that_they_would_share(where: str) -> None:
    with pytest.raises(InvalidValueError, match="engine='batched' cannot train this model"):
        looked_at(LEFT_BEHIND[where], "data", engine="batched")


@pytest.mark.parametrize("method", ["heterofl", "fjord"])
def test_slices_leave_nothing_behind_in_one_another(method: str) -> None:
    """Hooks are cut with their layers: narrow models share what the whole one holds."""
    options = {"method": method, "tiers": "1,1/2"}
    found = [looked_at(hooked_within, change, **options) for change in WORLDS]
    assert found == [found[0]] * len(WORLDS)


class AlwaysDropping(nn.Sequential):
    """Drops out when it is evaluated, too (Monte Carlo dropout), by everybody's generators."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, True) * np.random.rand()


def bootstrapped(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    some = torch.randint(len(targets), (len(targets),))
    return float((outputs[some].argmax(1) == targets[some]).float().mean()) * random.random()


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_client_s_evaluation_draws_no_number_of_somebody_else_s(share: float) -> None:
    draws = np.random.default_rng(1)
    inputs = torch.from_numpy(draws.standard_normal((12 * 8, 1, 4, 4)).astype(np.float32))
    labels = torch.from_numpy(draws.integers(0, 4, 12 * 8))
    told = []
    for held in (8, 5, 0):
        clients = [np.arange(8 * k, 8 * k + (held if k == 0 else 8)) for k in range(12)]
        lines: list[dict[str, object]] = []
        done = fedquilt.run(
            seeded(AlwaysDropping), (inputs, labels), (inputs[:40], labels[:40]), clients,
            output_dir=None, num_rounds=3, clip_norm=1e-30, eval_every=1, engine="sequential",
            client_test_fraction=0.5, evaluation_share=share,
            metrics={"accuracy": "accuracy", "mine": bootstrapped},
            observer=lambda _, line, to=lines: to.append(dict(line)),
        )  # fmt: skip
        measured = [[v for k, v in line.items() if k.startswith("test_")] for line in lines]
        told.append((measured, done.client_metrics[1:]))
    assert told[0][0] == told[1][0] == told[2][0]
    assert told[0][1] == told[1][1] == told[2][1]


class Front(nn.Module):
    """A frozen front of one's own, which looks at more than the sample."""

    num_features = 16

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen = how, torch.zeros(16)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(1)
        if self.how == "modules":
            return self.drop(self.norm(rows))
        if self.how == "draws":
            return nn.functional.dropout(rows, 0.5, True)
        if self.how == "batch":
            return rows - rows.mean(0)
        self.seen = 0.5 * self.seen + rows.mean(0)
        return rows - self.seen


def test_the_layers_of_an_own_front_stay_in_evaluation_mode() -> None:
    """In training BatchNorm would mix clients' samples, and keep what their mean is."""
    sums = []
    for held in ((SAMPLES, None), (1, 0.0), (0, None)):
        model = seeded(lambda: FeatureModel(Front("modules"), 4).train())
        sums.append(released(model, world(*held)))
        assert [model.training, model.front.norm.training] == [True, False]
        assert torch.equal(model.front.norm.running_mean, torch.zeros(16))
    assert float((sums[0] - sums[2]).norm()) <= 1 + 2**-22 * float(sums[0].norm())
    assert float((sums[1] - sums[2]).norm()) <= 1 + 2**-22 * float(sums[0].norm())


@pytest.mark.parametrize("how", ["draws", "batch", "memory"])
def test_an_own_front_that_looks_at_more_than_the_sample_is_refused(how: str) -> None:
    with pytest.raises(InvalidValueError, match="the same of a sample whatever stands beside it"):
        released(FeatureModel(Front(how), 4), world(SAMPLES))


class Augmented:
    """A client's data set whose transformation draws from everybody's generators, as usual."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        flipped = self.inputs[place].flip(-1) if torch.rand(1) < 0.5 else self.inputs[place]
        return flipped * (1 + 0.1 * np.random.rand() * random.random()), int(self.labels[place])


def test_what_a_client_s_data_set_draws_is_not_drawn_from_the_next_one_s() -> None:
    whole, parts = world(SAMPLES)
    sent = []
    for held in (SAMPLES, SAMPLES - 5, 0):
        clients = [Augmented(whole.images[part], whole.targets[part]) for part in parts]
        clients[0] = Augmented(whole.images[:held], whole.targets[:held])
        own: dict[int, bytes] = {}

        class Seen(Certified):
            def receive(self, plan, client, delta, num_examples, to=own):  # type: ignore[no-untyped-def]
                to[client] = delta.numpy().tobytes()
                return super().receive(plan, client, delta, num_examples)

        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        fedquilt.run(
            seeded(LogSoftmax), clients, whole, num_rounds=1, output_dir=None, mechanism=Seen
        )
        sent.append({client: update for client, update in own.items() if client})
    assert sent[0] == sent[1] == sent[2]
