"""Nothing of one client reaches another's update, on any engine: not counts, values or state."""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import itertools
import math
import random
import re
from collections.abc import Iterator
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fedquilt
from fedquilt.errors import InvalidValueError
from fedquilt.privacy.certified import Certified
from fedquilt.training import Engine, FlatModel, LocalSettings, Task, fit, make_engine
from fedquilt.training.draws import seeded_layers
from fedquilt.training.task import client_seed
from fedquilt.training.trainers.stack import ProgramShapes

HOW = LocalSettings(epochs=2, batch_size=8, fedprox_mu=0.1, seed=3)
SIZES = (20, 5, 9, 17, 1, 30)
ENGINES = ("sequential", "batched")


def task_of(sizes: tuple[int, ...] = SIZES, victim: int = 0, value: float | None = None) -> Task:
    """Return clients with samples of their own; those of the victim may all be one value."""
    inputs, targets, parts, start = [], [], [], 0
    for client, size in enumerate(sizes):
        draws = torch.Generator().manual_seed(client)
        samples = torch.randn(200, 1, 8, 8, generator=draws)[:size]
        if client == victim and value is not None:
            samples = torch.full_like(samples, value)
        inputs.append(samples)
        targets.append(torch.randint(0, 10, (200,), generator=draws)[:size])
        parts.append(np.arange(start, start + size))
        start += size
    return Task(torch.cat(inputs), torch.cat(targets), parts)


def updates(engine: Engine, model: nn.Module, cohort: tuple[int, ...] = (0, 1, 2, 3, 4, 5)):
    start = FlatModel(model).read().clone()
    try:
        return {u.client: u.delta.clone() for u in engine.train(start, cohort, 0, 0.3)}
    finally:
        engine.close()


class Dropping(nn.Module):
    """Random layers of every kind that the engines draw themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.maps = nn.Dropout2d(0.25)
        self.fc = nn.Linear(4 * 36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maps(self.conv(x).relu()).flatten(1)
        x = functional.dropout(x, 0.5, self.training)
        return self.fc(x + 0.1 * torch.randn_like(x) * torch.rand_like(x))


def warming_up():  # type: ignore[no-untyped-def]
    """Return a hook whose state is in its closure, and shows late."""
    seen, calls = torch.zeros(10), 0

    def hook(module, inputs, output):  # type: ignore[no-untyped-def]
        nonlocal calls, seen
        calls += 1
        seen = seen + output.detach().mean(0)
        return output - seen if calls > 20 else output

    return hook


class Slotted:
    """Keeps one thing in a slot and others in its dictionary."""

    __slots__ = ("__dict__", "held")

    def __init__(self) -> None:
        self.held = torch.zeros(10)


class Listed(list):  # type: ignore[type-arg]
    """A list with an attribute."""

    held = torch.zeros(10)


class Numbered(float):
    """A number with an attribute."""


class Array(np.ndarray):  # type: ignore[type-arg]
    """An array whose class keeps something."""

    held = torch.zeros(10)


class Clearing:
    """Has a method of the name that cached functions have, and keeps more than a cache."""

    held = torch.zeros(10)

    def cache_clear(self) -> None:
        """Clear nothing."""


@functools.lru_cache(maxsize=0)
def behind_a_cache(seen: str, kept: list[torch.Tensor] = []) -> list[torch.Tensor]:  # noqa: B006
    return kept


class Meta(type):
    """A class of classes that keeps something itself."""

    held = torch.zeros(10)


class Helper(metaclass=Meta):
    """Keeps its state in its class, and in defaults of its methods."""

    held = torch.zeros(10)
    __dunder__ = torch.zeros(10)

    def __call__(self, value: torch.Tensor | None, seen: list[torch.Tensor] = []) -> list:  # noqa: B006  # type: ignore[type-arg]
        seen += [] if value is None else [value]
        return seen

    def _all(self, seen: list[torch.Tensor] = []) -> list[torch.Tensor]:  # noqa: B006
        return seen

    all = property(_all)
    del _all


class Hidden(nn.Module):
    """Keeps what it saw of a batch in places that no list of a module's tensors shows."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls = where, 0
        self.fc = nn.Linear(64, 10)
        self.slotted, self.listed, self.number = Slotted(), Listed(), Numbered(0)
        self.helper, self.bytes = Helper(), io.BytesIO()
        self.register_buffer("constant", torch.zeros(10))
        self.ones, self.clearing = np.ones(1).view(Array), Clearing()
        self.named, self.cached = functools.partial(len, ()), behind_a_cache
        self.array = np.empty(1, dtype=object)
        self.array[0] = torch.zeros(10)

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006
        out = self.fc(x.flatten(1))
        self.calls += 1
        late = self.training and self.calls > 2
        mean = out.detach().mean(0)
        before = self.held(seen)
        if late:
            self.keep(before + mean, seen)
        return out - before

    def held(self, seen: list[torch.Tensor]) -> torch.Tensor:
        """Return what was kept last."""
        none = torch.zeros(10)
        places = {
            "slot": lambda: self.slotted.held,
            "list attribute": lambda: getattr(self.listed, "own", none),
            "number attribute": lambda: getattr(self.number, "own", none),
            "class of a helper": lambda: Helper.held,
            "new attribute of the class": lambda: getattr(Hidden, "own", none),
            "default": lambda: seen[-1] if seen else none,
            "gradient of a buffer": lambda: (
                none if self.constant.grad is None else self.constant.grad
            ),
            "object array": lambda: self.array[0],
            "bytes": lambda: none + self.bytes.tell() / 100,
            "metaclass": lambda: Meta.held,
            "dunder attribute": lambda: Helper.__dunder__,
            "default of a call": lambda: (self.helper(None) or [none])[-1],
            "default of a property": lambda: (self.helper.all or [none])[-1],
            "class of a list": lambda: type(self.listed).held,
            "class of an array": lambda: type(self.ones).held,
            "attribute of a partial": lambda: getattr(self.named, "own", none),
            "behind a cache": lambda: (self.cached("") or [none])[-1],
            "beside a cache_clear": lambda: self.clearing.held,
        }
        return places[self.where]()

    def keep(self, value: torch.Tensor, seen: list[torch.Tensor]) -> None:
        """Keep something until the next batch."""
        places = {
            "slot": lambda: setattr(self.slotted, "held", value),
            "list attribute": lambda: setattr(self.listed, "own", value),
            "number attribute": lambda: setattr(self.number, "own", value),
            "class of a helper": lambda: setattr(Helper, "held", value),
            "new attribute of the class": lambda: setattr(Hidden, "own", value),
            "default": lambda: seen.append(value),
            "gradient of a buffer": lambda: setattr(self.constant, "grad", value),
            "object array": lambda: self.array.__setitem__(0, value),
            "bytes": lambda: self.bytes.write(b"x" * int(10 * value.abs().sum())),
            "metaclass": lambda: setattr(Meta, "held", value),
            "dunder attribute": lambda: setattr(Helper, "__dunder__", value),
            "default of a call": lambda: self.helper(value),
            "default of a property": lambda: self.helper.all.append(value),
            "class of a list": lambda: setattr(type(self.listed), "held", value),
            "class of an array": lambda: setattr(type(self.ones), "held", value),
            "attribute of a partial": lambda: setattr(self.named, "own", value),
            "behind a cache": lambda: self.cached("").append(value),
            "beside a cache_clear": lambda: setattr(self.clearing, "held", value),
        }
        places[self.where]()


HIDDEN = (
    *("slot", "list attribute", "number attribute", "class of a helper", "default", "bytes"),
    *("new attribute of the class", "gradient of a buffer", "object array", "metaclass"),
    *("dunder attribute", "default of a call", "default of a property", "class of a list"),
    *("class of an array", "attribute of a partial", "behind a cache", "beside a cache_clear"),
)


class Stateful(nn.Module):
    """A model with something that its forward pass moves, in a given way."""

    shared: ClassVar[list[float]] = []

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.fc = nn.Linear(64, 10)
        self.centre = nn.Parameter(torch.zeros(10), requires_grad=False)
        self.attribute = torch.zeros(10)
        self.register_buffer("late", torch.zeros(10))
        self.register_buffer("with_gradients", torch.zeros(10))
        self.calls = 0
        self.notes: list[float] = []
        self.source = random.Random(0)
        self.turns = itertools.cycle(range(3))
        self.target = nn.Linear(64, 10).requires_grad_(False)
        if how == "hook":
            self.fc.register_forward_hook(warming_up())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.fc(x.flatten(1))
        mean = out.detach().mean(0)
        self.calls += 1
        if self.how == "frozen parameter":
            self.centre.data.mul_(0.5).add_(mean)
            return out - self.centre
        if self.how == "attribute":
            self.attribute = 0.5 * self.attribute + mean
            return out - self.attribute
        if self.how == "late buffer":
            if self.calls > 4:
                self.late.mul_(0.5).add_(mean)
            return out - self.late
        if self.how == "buffer with gradients":
            if torch.is_grad_enabled() and self.calls > 4:
                self.with_gradients.add_(mean)
            return out - self.with_gradients
        if self.how == "list":
            self.notes.append(float(mean[0]))
            return out * (1 + sum(self.notes))
        if self.how == "counter":
            return out * self.calls
        if self.how == "iterator":
            return out * (1 + next(self.turns))
        if self.how == "class":
            if len(x) > 2:
                Stateful.shared.append(float(mean[0]))
            return out * (1 + sum(Stateful.shared))
        if self.how == "aliased target":
            if self.calls % 3 == 0:
                self.target.weight.data = self.fc.weight.data
            return out - self.target(x.flatten(1)).detach()
        return out * (1 + self.source.random() + random.random() + np.random.rand())


STATES = (
    *("frozen parameter", "attribute", "late buffer", "buffer with gradients"),
    *("list", "counter", "generators", "iterator", "class", "aliased target", "hook"),
)


def make(kind: type[nn.Module], *arguments: str) -> nn.Module:
    torch.manual_seed(0)
    return kind(*arguments)


@pytest.mark.parametrize("engine", ENGINES)
def test_sizes_and_values_of_one_client_leave_all_others_alone(engine: str) -> None:
    model = make(Dropping)
    reference = updates(make_engine(engine, model, task_of(), HOW), model)
    for size in (0, 1, 19, 21, 40, 100):
        changed = updates(make_engine(engine, model, task_of((size, *SIZES[1:])), HOW), model)
        for client in range(1, len(SIZES)):
            assert torch.equal(changed[client], reference[client]), (size, client)
    for value in (float("nan"), float("inf"), 3e38, 0.0):
        changed = updates(make_engine(engine, model, task_of(value=value), HOW), model)
        for client in range(1, len(SIZES)):
            assert torch.equal(changed[client], reference[client]), (value, client)


def test_a_row_is_the_same_whoever_stands_beside_it() -> None:
    model, rows = make(Dropping), LocalSettings(2, 8, 0.0, 3, group_rows=6)
    whole = updates(make_engine("batched", model, task_of(), rows), model)
    for cohort in ((3,), (3, 0), (5, 3, 1), (0, 2, 3, 4), (3, 4, 5, 0, 1)):
        some = updates(make_engine("batched", model, task_of(), rows), model, cohort)
        for client in cohort:
            assert torch.equal(some[client], whole[client]), (cohort, client)


def test_batch_sizes_that_mean_all_samples() -> None:
    model = make(Dropping)
    everything = LocalSettings(1, 10**6, 0.0, 3)
    for sizes in (SIZES, (200, *SIZES[1:])):
        task = task_of(sizes)
        alone = updates(make_engine("sequential", model, task, everything), model)
        many = updates(make_engine("batched", model, task, everything), model)
        for client, update in alone.items():
            assert torch.allclose(many[client], update, atol=1e-6)


@pytest.mark.parametrize("how", STATES)
def test_state_of_a_module_does_not_survive_from_client_to_client(how: str) -> None:
    model = make(Stateful, how)
    together = updates(make_engine("sequential", model, task_of(), HOW), model)
    for client in range(len(SIZES)):
        alone = updates(make_engine("sequential", model, task_of(), HOW), model, (client,))
        assert torch.equal(alone[client], together[client]), client


@pytest.mark.parametrize("where", HIDDEN)
def test_hidden_state_does_not_survive_from_client_to_client(where: str) -> None:
    model = make(Hidden, where)
    together = updates(make_engine("sequential", model, task_of(), HOW), model)
    for client in (1, 3, 5):
        alone = updates(make_engine("sequential", model, task_of(), HOW), model, (client,))
        assert torch.equal(alone[client], together[client]), client


@pytest.mark.parametrize("where", ["class of a helper", "default", "metaclass"])
def test_an_engine_that_is_made_later_sees_nothing_of_earlier_clients(where: str) -> None:
    """As slices of a model and nodes of a simulation are: one process, engines when needed."""
    model = make(Hidden, where)
    alone = updates(make_engine("sequential", model, task_of(), HOW), model, (3,))
    earlier = make_engine("auto", model, task_of(), HOW)
    assert len(list(earlier.train(FlatModel(model).read(), (5, 0), 0, 0.3))) == 2
    later = updates(make_engine("sequential", model, task_of(), HOW), model, (3,))
    assert torch.equal(later[3], alone[3])


class Recast(nn.Module):
    """Changes the type of its weights, or cuts them, in a client's later steps."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.training and self.calls == 6 and self.how == "double":
            self.double()
        out = functional.linear(x.flatten(1).to(self.fc.weight.dtype), self.fc.weight)
        if self.training and self.calls == 6 and self.how == "shared":
            self.fc.weight.data = torch.zeros_like(self.fc.weight)
        return out


@pytest.mark.parametrize("how", ["double", "shared"])
def test_parameters_come_home_before_every_client(how: str) -> None:
    model = make(Recast, how)
    together = updates(make_engine("sequential", model, task_of(), HOW), model)
    for client in (1, 3, 5):
        alone = updates(make_engine("sequential", model, task_of(), HOW), model, (client,))
        assert torch.equal(alone[client], together[client]), client


class WideOnly(nn.Module):
    """Counts its steps, but only those with wide batches."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.count = how, 0
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.fc(x.flatten(1))
        if self.training and len(x) > 4:
            if self.how == "counter":
                self.count += 1
                return out * self.count
            return out * random.random()
        return out


@pytest.mark.parametrize("how", ["counter", "random"])
def test_batched_refuses_side_effects_that_only_wide_batches_have(how: str) -> None:
    with pytest.raises(InvalidValueError, match=r"a forward pass changes (count|the generators)"):
        make_engine("batched", make(WideOnly, how), task_of(), HOW)


def test_batched_refuses_embeddings_that_renormalise_themselves() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 6, max_norm=1.0)
            self.fc = nn.Linear(6 * 64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.table((x.flatten(1) * 10).long().abs() % 8).flatten(1))

    torch.manual_seed(0)
    with pytest.raises(InvalidValueError, match=r"changes its own weights|vmap cannot run it"):
        make_engine("batched", Words(), task_of(), HOW)


class Counting(nn.Module):
    """Moves a frozen parameter, the same way for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.centre = nn.Parameter(torch.zeros(10), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.fc(x.flatten(1)) - self.centre
        self.centre.data.add_(1e-9)
        return out


def test_batched_refuses_state_that_a_forward_pass_moves() -> None:
    with pytest.raises(InvalidValueError, match="a forward pass changes centre"):
        make_engine("batched", make(Counting), task_of(), HOW)
    for how in ("frozen parameter", "attribute"):
        with pytest.raises(InvalidValueError, match="depends on the other samples"):
            make_engine("batched", make(Stateful, how), task_of(), HOW)


SEEN = [0.0]


class Worldly(nn.Module):
    """Keeps its state where no module can see it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN[0] += 0.01
        return self.fc(x.flatten(1)) * (1 + SEEN[0])


@pytest.mark.parametrize("engine", ["sequential", "batched", "processes"])
def test_state_that_cannot_be_put_back_is_refused(engine: str) -> None:
    with pytest.raises(InvalidValueError, match=r"cannot be put back .a global|depends on"):
        make_engine(engine, make(Worldly), task_of(), HOW)


class Counted(nn.Linear):
    """Its class holds something of which no copy can be kept."""

    numbers: ClassVar[Iterator[int]] = (number for number in range(10**9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1)) * (0.1 if next(self.numbers) > 10**6 else 1.0)


def test_a_generator_of_a_class_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidValueError, match=r"cannot be put back .numbers\)"):
        make_engine("sequential", make(Counted, 64, 10), task_of(), HOW)


ABSENT = object()


class Ordinary(nn.Module):
    """Holds what models of other libraries hold: nothing of it has a state."""

    pattern = re.compile("x")

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.kinds = (list[int], int | None, Fraction(1, 3), Path("x"), datetime.date(2020, 1, 1))

    @torch.no_grad()
    @contextlib.contextmanager
    def quiet(self, *, given: object = ABSENT) -> Iterator[None]:
        yield

    @quiet(None)
    def forward(
        self, x: torch.Tensor, mask: object = ABSENT, how: object = (..., math, len, Enum)
    ) -> torch.Tensor:
        assert mask is ABSENT
        with torch.enable_grad():
            return self.fc(x.flatten(1))


@pytest.mark.parametrize("engine", ENGINES)
def test_sentinels_and_other_values_that_cannot_change_are_no_state(engine: str) -> None:
    model = make(Ordinary)
    assert all(
        delta.norm() > 0
        for delta in updates(make_engine(engine, model, task_of(), HOW), model).values()
    )


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_batched_refuses_generators_that_clients_would_share(draw) -> None:  # type: ignore[no-untyped-def]
    class Skipping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(1)) * (1 + draw())

    with pytest.raises(InvalidValueError, match=r"generators of Python or NumPy|depends on"):
        make_engine("batched", Skipping(64, 10), task_of(), HOW)


def test_batched_refuses_a_forward_pass_that_changes_weights() -> None:
    class Bounded(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.05, 0.05)
            return super().forward(x.flatten(1))

    with pytest.raises(InvalidValueError, match=r"changes its own weights|vmap cannot run it"):
        make_engine("batched", Bounded(64, 10), task_of(), HOW)


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_rows_that_are_not_alike_do_not_move_one_another(mu: float, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Where a row's place matters, clients stay in the cohort's order, finished ones between."""
    monkeypatch.setattr(ProgramShapes, "rows_are_alike", lambda self, rows, columns: False)
    model, how = make(Dropping), LocalSettings(2, 5, mu, 3)
    reference = updates(make_engine("batched", model, task_of(), how), model)
    sequential = updates(make_engine("sequential", model, task_of(), how), model)
    for client, update in reference.items():
        assert torch.allclose(update, sequential[client], atol=1e-5)
    nan = float("nan")
    for size, value in ((0, None), (150, None), (150, nan), (10, nan), (150, 3e38)):
        task = task_of((*SIZES[:5], size), victim=5, value=value)
        changed = updates(make_engine("batched", model, task, how), model)
        for client in range(5):
            assert torch.equal(changed[client], reference[client]), (size, value, client)


def test_a_secret_coin_moves_no_row_where_places_matter(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(ProgramShapes, "rows_are_alike", lambda self, rows, columns: False)
    model, rows = make(Dropping), LocalSettings(2, 8, 0.0, 3, group_rows=6)
    whole = updates(make_engine("batched", model, task_of(), rows), model)
    some = updates(make_engine("batched", model, task_of(), rows), model, (1, 3, 4))
    for client, update in some.items():
        assert torch.equal(update, whole[client])


class Recomputing(nn.Module):
    """Runs its dropout again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._part, x, use_reentrant=False)

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.fc(x.flatten(1)), 0.5, self.training)


def test_checkpointed_layers_draw_the_same_in_both_passes() -> None:
    model, one = make(Recomputing), LocalSettings(1, 30, 0.0, 3)
    plain = updates(make_engine("sequential", model, task_of(), one), model)[5]
    # A gradient with the forward pass's mask is zero exactly where the outputs were dropped:
    # every sample's row of the bias gradient is then (p - y) * mask, whose mean is the update.
    assert torch.isfinite(plain).all()
    flat = FlatModel(model)
    task, seed = task_of(), client_seed(one, 0, 5)
    with seeded_layers(torch.device("cpu"), seed):
        order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
        batch = task.index(5)[order]
        kept = functional.dropout(torch.ones(30, 10), 0.5, True)
    outputs = flat.module.fc(task.inputs[batch].flatten(1)) * kept
    loss = functional.cross_entropy(outputs, task.targets[batch])
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, flat.parameters)])
    assert torch.allclose(plain, -0.3 * wanted, atol=1e-6)


class Noisy(nn.Module):
    """Draws in a way that only torch's own generators know."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.flatten(1)) + torch.randn(10)


def test_batched_refuses_draws_that_are_not_the_clients_own() -> None:
    with pytest.raises(InvalidValueError, match=r"vmap cannot run it.*random"):
        make_engine("batched", make(Noisy), task_of(), HOW)


def test_no_engine_looks_at_data_before_it_trains() -> None:
    model, empty = make(Dropping), task_of()
    empty.inputs.fill_(float("nan"))
    for name in ENGINES:
        make_engine(name, model, empty, HOW).close()


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 33).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 3, bias=False), nn.Linear(3, 33, bias=False)
        self.head = nn.Linear(33, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.head(functional.gelu(self.base(x) + self.up(self.down(x))))


class Attending(nn.Module):
    """One head of attention over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(8, 3 * 18), nn.Linear(18, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1).reshape(-1, 8, 8)
        q, k, v = self.all(x).chunk(3, -1)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.head(self.norm(x + self.out(mixed)).flatten(1))


def normed() -> nn.Module:
    layers = (nn.Linear(64, 18), nn.LayerNorm(18), nn.Tanh(), nn.Linear(18, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def grouped() -> nn.Module:
    layers = (nn.Conv2d(1, 2, 3, padding=1), nn.GroupNorm(2, 2), nn.GELU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(128, 10))


STACKED = {"adapter": Adapted, "attention": Attending, "layer norm": normed, "group norm": grouped}
COMPANIES = (  # sizes, whose changes, batch size, epochs
    ((37, 30, 31, 10, 53), 4, 8, 1),
    ((6, 44, 13), 0, 33, 2),
    ((44, 13, 53, 52, 8, 18, 42, 6, 34), 5, 7, 2),
    ((52, 39, 30, 58, 35, 59, 7), 1, 8, 2),
)


@pytest.mark.parametrize("kind", STACKED)
def test_a_protected_stack_gives_the_same_bits_whatever_somebody_else_holds(kind: str) -> None:
    """Rare last bits: kernels compute the last numbers of a tensor in another way than the rest."""
    torch.manual_seed(1)
    model = STACKED[kind]()
    start = FlatModel(model).read().clone()
    for sizes, victim, batch_size, epochs in COMPANIES:
        how = LocalSettings(epochs, batch_size, 0.1, 3, silent=True)
        engine = make_engine("batched", model, task_of(sizes), how)
        worlds = []
        for count in (sizes[victim], sizes[victim] - 1, 0, 1, 90):
            engine.task = task_of((*sizes[:victim], count, *sizes[victim + 1 :]))
            trained = engine.train(start, range(len(sizes)), 0, 0.3)
            worlds.append({u.client: u.delta.clone() for u in trained})
        others = [client for client in range(len(sizes)) if client != victim]
        for world in worlds[1:]:
            assert [c for c in others if not torch.equal(world[c], worlds[0][c])] == []


class Coded(nn.Module):
    """Looks up a row by a number among its inputs, which are of no whole type."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5000, 4), nn.Linear(7, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        coded = self.table(rows[:, 0].abs().long())
        return self.head(torch.cat([coded, rows[:, 1:]], dim=1))


class ManyTables(nn.Module):
    """A table for each of so many columns that their ranges are not tried."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2 + k, 2) for k in range(4))
        self.head = nn.Linear(2, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(sum(table(rows[:, k]) for k, table in enumerate(self.tables)))


@pytest.mark.parametrize("model", [Coded, ManyTables])
def test_a_code_that_no_table_has_reads_no_other_clients_rows(
    model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a stack the row after a client's last one is the next client's first."""
    monkeypatch.setattr(fit, "_MOST_COLUMNS", 3)
    draws = torch.Generator().manual_seed(0)
    codes, labels = torch.randint(0, 2, (24, 4), generator=draws), torch.arange(24) % 3
    settings = {"num_rounds": 1, "local_epochs": 1, "output_dir": None, "device": "cpu"}

    def told(code: int, engine: str) -> tuple[str, dict[int, bytes]]:
        inputs = codes.clone() if model is ManyTables else codes.float()
        inputs[5, 0] = code
        held = [range(4 * client, 4 * client + 4) for client in range(6)]
        seen: dict[int, bytes] = {}

        class Seen(Certified):
            def receive(self, plan, client, delta, num_examples):  # type: ignore[no-untyped-def]
                if client != 1:  # who holds the code
                    seen[client] = delta.numpy().tobytes()
                return super().receive(plan, client, delta, num_examples)

        torch.manual_seed(0)
        own = {"engine": engine, "mechanism": Seen, "quiet": True}
        tests = (inputs[8:12], labels[8:12])
        try:
            fedquilt.run(model(), (inputs, labels), tests, held, **own, **settings)
        except InvalidValueError as error:
            return str(error), seen
        return "", seen

    for engine in ENGINES:
        base = told(0, engine)
        assert "whose range is not known" in base[0] or len(base[1]) == 5
        for code in (-1, 5000, 10**6):
            assert told(code, engine) == base, (engine, code)
