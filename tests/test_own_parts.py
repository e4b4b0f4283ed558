"""What a claim rests on when parts of a run are the user's own: the sum, the engine, the rest."""

from __future__ import annotations

import functools
import json
import sqlite3
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt import Certified, ClientUpdate, WholeModel
from fedquilt.aggregation import RunningMean, keeps_vectors, sensitivity_of
from fedquilt.audit.cases import known_entropy
from fedquilt.common.errors import InvalidValueError, RunInterrupted
from fedquilt.common.observer import Observer
from fedquilt.data import ImageDataset
from fedquilt.privacy.accounting import Adjacency, gaussian_mu
from fedquilt.record.result import RunResult
from fedquilt.setup.own_parts import code_digest, held_digest, parts_digest
from fedquilt.slices import Axis

CLIENTS, SIZE = 9, 3
QUIET: dict[str, Any] = {"output_dir": None, "quiet": True}


class Median:
    """n times the median of each coordinate, as a rule against outliers is brought."""

    weight, held = 1.0, None

    def __init__(self, size: int, times: float = 1.0) -> None:
        self.vectors: list[torch.Tensor] = [torch.zeros(size, dtype=torch.float64)][:0]
        self.size, self.times = size, times

    @property
    def total(self) -> torch.Tensor:
        if not self.vectors:
            return torch.zeros(self.size, dtype=torch.float64)
        return self.times * torch.stack(self.vectors).median(dim=0).values

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: object = None) -> None:
        self.vectors.append(vector.to(torch.float64))


class Declared(Median):
    """One vector moves each median by at most its own entry, so `times` bounds the whole."""

    def __init__(self, size: int) -> None:
        super().__init__(size, times=float(CLIENTS))
        self.sensitivity = float(CLIENTS)


class TooLow(Declared):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.sensitivity = 1.5


class Thousandfold(RunningMean):
    """A subclass of the package's own sum is not the package's own."""

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: object = None) -> None:
        super().add(1000.0 * vector, weight)


class Remembering(RunningMean):
    """Adds a tenth of the sum of the round before: one vector is in many sums."""

    sensitivity = 2.0
    before = torch.zeros(SIZE, dtype=torch.float64)

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        super().__init__(size, device)
        self.total += 0.1 * Remembering.before
        Remembering.before = self.total


def method_with(kind: type) -> type[WholeModel]:
    class Own(WholeModel):
        def new_sum(self) -> Any:
            return kind(self._size)

    return Own


class Pulled:
    """Every client sends what its samples say: their mean, times a hundred."""

    def __init__(self, parts: Any) -> None:
        self.task = parts.task

    def train(
        self, start: torch.Tensor, cohort: Any, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        for client in map(int, cohort):
            held = self.task.inputs[self.task.index(client)]
            delta = 100 * held.sum(0) if len(held) else torch.zeros(SIZE)
            yield ClientUpdate(client, delta, len(held), 0.0)

    def close(self) -> None:
        pass


class Plain(nn.Module):
    """Three numbers that travel."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x @ self.w, -(x @ self.w)], dim=1)


def world(*, with_client: bool, **own: Any) -> RunResult:
    """Half of the others pull one way, half the other; client 0 decides where a median lies."""
    signs = [(-1.0) ** k for k in range(CLIENTS)]
    inputs = torch.tensor(signs)[:, None].repeat(1, SIZE)
    parts = [[k] for k in range(CLIENTS)]
    parts[0] = [0] if with_client else []
    data = (inputs, torch.zeros(CLIENTS, dtype=torch.int64))
    test = (inputs[:2], torch.tensor([0, 1]))
    settings = {"mode": "certified", "epsilon": 1.0, "num_rounds": 1, "availability": "always"}
    settings = {"policy": "worst_case", "engine": Pulled, **settings, **QUIET, **own}
    with known_entropy(3):
        return fedquilt.run(Plain(), data, test, parts, **settings)  # type: ignore[arg-type]


def moved(**own: Any) -> float:
    """Return how far the released model moves without client 0, in noise deviations."""
    here, gone = world(with_client=True, **own), world(with_client=False, **own)
    noise = here.result["history"]["noise_levels"][0]
    return float((here.state_dict["w"] - gone.state_dict["w"]).norm() / noise)


@pytest.mark.parametrize("kind", [lambda n: Median(n, CLIENTS), Thousandfold], ids=["median", "x"])
def test_a_sum_of_ones_own_that_declares_nothing_ends_the_claim(kind: Any) -> None:
    method = method_with(kind)
    assert moved(method=method) > 1.5 * gaussian_mu(1.0, 1e-5)  # the claim would be false
    stated = world(with_client=True, method=method).statement
    assert not stated.is_bounded
    name = type(kind(SIZE)).__name__
    assert any(
        f"the sum is made by {name}, whose sensitivity is not known" in n for n in stated.notes
    )
    assert "no guarantee" in stated.as_text()


def test_the_packages_own_sum_moves_by_what_is_charged() -> None:
    assert moved() == pytest.approx(gaussian_mu(1.0, 1e-5), rel=1e-3)
    assert world(with_client=True).statement.is_bounded


def test_a_declared_sensitivity_is_in_the_noise_and_keeps_the_claim() -> None:
    method = method_with(Declared)
    plain, own = world(with_client=True), world(with_client=True, method=method)
    levels = [done.result["history"]["noise_levels"][0] for done in (plain, own)]
    assert levels[1] == pytest.approx(CLIENTS * levels[0])
    assert moved(method=method) == pytest.approx(gaussian_mu(1.0, 1e-5), rel=1e-3)
    assert own.statement.epsilon_max == plain.statement.epsilon_max <= 1.0
    said = "\n".join(own.statement.notes)
    assert "the sum is made by Declared: its sensitivity, 9, is as its author declares" in said
    assert "believed to use of clients' data nothing but the released sums" in said


@pytest.mark.parametrize(
    ("kind", "words"),
    [(TooLow, "must be at least"), (Remembering, "must give the same sum of the same vectors")],
)
def test_a_declaration_that_is_seen_to_be_wrong_is_refused(kind: type, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        world(with_client=True, method=method_with(kind))


class LoudLater(RunningMean):
    """A thousandfold sum that declares itself a plain one."""

    sensitivity = 1.0

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: Any = None) -> None:
        super().add(1000 * vector, weight, place)


@pytest.mark.parametrize("later", [Median, LoudLater])
def test_sums_must_stay_what_the_noise_was_made_for(later: type) -> None:
    class Changing(WholeModel):
        rounds = 0

        def new_sum(self) -> Any:
            Changing.rounds += 1
            return RunningMean(self._size) if Changing.rounds < 6 else later(self._size)

    with pytest.raises(InvalidValueError, match="sums of one kind and sensitivity in all rounds"):
        world(with_client=True, method=Changing, num_rounds=8)


def test_an_own_place_or_coverage_ends_the_claim() -> None:
    class Uncovered(WholeModel):
        def coverage(self, clients: Any, round_index: int) -> torch.Tensor:
            return torch.tensor([1.0, 1.0, 0.0])  # the last coordinate would have no noise

    assert moved(method=Uncovered) > 1.5 * gaussian_mu(1.0, 1e-5)
    stated = world(with_client=True, method=Uncovered).statement
    assert not stated.is_bounded
    assert any("Uncovered.coverage decides what of the sum is noised" in n for n in stated.notes)


def test_a_ledger_that_outlives_the_run_takes_no_charge_that_is_not_true(tmp_path: Path) -> None:
    path = tmp_path / "all.sqlite"
    method = method_with(Thousandfold)
    with pytest.raises(InvalidValueError, match="must be left out: nothing is known"):
        world(with_client=True, method=method, ledger=str(path), population="p", allowance=6.0)
    assert not path.exists()


def test_the_ledger_of_the_run_says_infinity_where_nothing_is_claimed(tmp_path: Path) -> None:
    method = method_with(Thousandfold)
    done = world(with_client=True, method=method, output_dir=str(tmp_path))
    assert done.folder is not None
    result = json.loads((done.folder / "result.json").read_text())
    assert result["statement"]["epsilon_max"] == result["ledger"]["lifetime_epsilon_max"] == "inf"
    with sqlite3.connect(done.folder / "ledger.sqlite") as ledger:
        assert ledger.execute("select count(*) from entries").fetchone()[0] > 0


@pytest.mark.parametrize("second", [0, 77])
def test_an_engine_yields_who_was_asked_and_once(second: int) -> None:
    class Twice(Pulled):
        def train(self, *args: Any) -> Iterator[ClientUpdate]:
            for update in super().train(*args):
                yield update
                if update.client == 3:
                    yield ClientUpdate(second, update.delta, 1, 0.0)

    with pytest.raises(InvalidValueError, match=f"not another one for client {second}"):
        world(with_client=True, engine=Twice)


def test_every_part_of_ones_own_is_named_with_what_is_believed_of_it() -> None:
    class Halved(Certified):
        def bound_vector(self, vector: torch.Tensor, limit: float) -> torch.Tensor:
            return vector / 2

    class Louder(Halved):
        def release(self, *args: Any) -> Any:
            return super().release(*args)

    def slow(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def how_sure(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(outputs.max())

    def distance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    assert not any("believed" in note for note in plain_run().statement.notes)
    own = plain_run(loss=distance, optimizer=slow, metrics=["accuracy", how_sure], mechanism=Halved)
    said = "\n".join(own.statement.notes)
    assert own.statement.is_bounded
    for words in (
        "loss of the user's own, distance: believed to keep nothing of one client",
        "optimizer of the user's own, slow: believed to keep nothing of one client",
        "metrics of the user's own, how_sure: believed to look at nothing but",
        "mechanism Halved bounds updates, which are shortened to the clip",
    ):
        assert words in said
    said = "\n".join(plain_run(mechanism=Louder).statement.notes)
    assert "mechanism Louder has its own release: believed to keep noise and charges" in said
    assert "engine of the user's own, Pulled: believed to make a client's update" in "\n".join(
        world(with_client=True).statement.notes
    )


def plain_run(**own: Any) -> RunResult:
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.standard_normal((24, SIZE))).float()
    data = (inputs, (inputs[:, 0] > 0).long())
    parts = [list(range(4 * k, 4 * k + 4)) for k in range(6)]
    settings = {
        "mode": "certified",
        "num_rounds": 1,
        "availability": "always",
        "engine": "sequential",
    }
    settings = {**settings, **QUIET, **own}
    return fedquilt.run(Plain(), data, data, parts, **settings)  # type: ignore[arg-type]


class Silent(Certified):
    """Adds no noise, whatever it charges."""

    def release(self, plan: Any, summed: Any, tally: Any) -> Any:
        _, report = super().release(plan, summed, tally)
        return summed.total / CLIENTS, report


class Thousand(Thousandfold):
    sensitivity = 1000.0


def told(weight: float) -> Any:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return weight * nn.functional.cross_entropy(outputs, targets)

    return loss


def optimizer_at(rate: float) -> Any:
    return lambda params: torch.optim.SGD(params, lr=rate)


class Other(Pulled):
    pass


def interrupt(config: Any, line: dict[str, Any]) -> None:
    if line["round"] in (1, 2):
        raise KeyboardInterrupt


def stopped(folder: Path, **own: Any) -> Path:
    """Stop a run after 2 of 4 rounds; return its folder."""

    with pytest.raises(RunInterrupted) as interrupted:
        resumable(observer=interrupt, output_dir=str(folder), **own)
    assert interrupted.value.folder is not None
    return Path(interrupted.value.folder)


def resumable(**own: Any) -> RunResult:
    return world(with_client=True, num_rounds=4, **{"epsilon": 6.0, "engine": Pulled} | own)


def without_note(folder: Path) -> None:
    """Make the folder one of an older version."""
    note = json.loads((folder / "ledger.json").read_text())
    note.pop("basis", None)
    (folder / "ledger.json").write_text(json.dumps(note))


SUMS = {"undeclared": Thousandfold, "declared": Thousand, "plain": RunningMean}
PAIRS = [(a, b) for a in SUMS for b in SUMS if a != b]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_resumed_run_has_the_sum_that_it_was_begun_with(
    tmp_path: Path, first: str, second: str
) -> None:
    before, after = (method_with(SUMS[name]) for name in (first, second))
    folder = stopped(tmp_path, method=before)
    with pytest.raises(InvalidValueError, match="sums of one kind and sensitivity"):
        resumable(method=after, resume=folder)
    assert resumable(method=before, resume=folder).statement.is_bounded is (first != "undeclared")


@pytest.mark.parametrize(("first", "second"), [(Silent, None), (None, Silent)])
def test_an_own_mechanism_does_not_come_or_go_when_a_run_is_resumed(
    tmp_path: Path, first: Any, second: Any
) -> None:
    folder = stopped(tmp_path, mechanism=first)
    with pytest.raises(InvalidValueError, match="parts of your own must be those of the run"):
        resumable(mechanism=second, resume=folder)
    said = "\n".join(resumable(mechanism=first, resume=folder).statement.notes)
    assert ("mechanism Silent has its own release" in said) is (first is Silent)


OWN = {
    "engine": (Pulled, Other, "Pulled", "Other"),
    "loss": (told(1.0), told(2.0), "loss", "had changed when the run was resumed"),
    "optimizer": (optimizer_at(0.1), optimizer_at(0.2), "<lambda>", "had changed when the run"),
    "mechanism": (Silent, type("Renamed", (Silent,), {}), "Silent", "Renamed"),
}


@pytest.mark.parametrize("part", OWN)
def test_what_is_believed_of_earlier_rounds_stays_when_parts_are_exchanged(
    tmp_path: Path, part: str
) -> None:
    first, second, *words = OWN[part]
    more = {} if part == "engine" else {"engine": "sequential"}
    folder = stopped(tmp_path, **more, **{part: first})
    with pytest.raises(RunInterrupted):  # the third round, by the second part
        resumable(**more, **{part: second}, resume=folder, observer=interrupt)
    done = resumable(**more, **{part: first}, resume=folder)
    said = "\n".join(done.statement.notes)
    assert done.statement.is_bounded
    assert all(word in said for word in words)
    assert [note for note in done.statement.notes if "had changed" in note]
    plain = resumable(**more, **{part: first})
    assert not [note for note in plain.statement.notes if "had changed" in note]


def test_a_doubt_about_earlier_rounds_stays(tmp_path: Path) -> None:
    class Own(WholeModel):
        pass

    class Uncovered(WholeModel):
        def coverage(self, clients: Any, round_index: int) -> torch.Tensor:
            return torch.tensor([1.0, 1.0, 0.0])

    folder = stopped(tmp_path, method=Uncovered)
    stated = resumable(method=Own, resume=folder).statement
    assert not stated.is_bounded
    assert any("Uncovered.coverage decides" in note for note in stated.notes)


def test_an_older_folder_claims_nothing_where_parts_are_the_users_own(tmp_path: Path) -> None:
    for own, bounded in (({"engine": Pulled}, False), ({"engine": "sequential"}, True)):
        folder = stopped(tmp_path, **own)
        without_note(folder)
        assert resumable(**own, resume=folder).statement.is_bounded is bounded


@pytest.mark.parametrize("brought", [False, True], ids=["the package's", "a user's"])
def test_a_sum_that_keeps_vectors_sees_each_clients_own(
    brought: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates that lie in one memory must not be lent to a median, whosever method it serves."""
    sums: list[Median] = []

    def new_sum(self: WholeModel) -> Any:
        sums.append(Kept(self._size))
        return sums[-1]

    class Kept(Median):
        def add(self, vector: torch.Tensor, weight: float = 1.0, place: object = None) -> None:
            self.vectors.append(vector)  # as it lies: no copy

    method = type("Own", (WholeModel,), {"new_sum": new_sum}) if brought else "full"
    if not brought:
        monkeypatch.setattr(WholeModel, "new_sum", new_sum)
    plain_run(mode="fedavg", method=method)
    (used,) = [total for total in sums if total.vectors]
    assert len(used.vectors) == 6
    assert len({tuple(vector.tolist()) for vector in used.vectors}) == 6
    assert len({vector.data_ptr() for vector in used.vectors}) == 6


@pytest.mark.parametrize("method", ["full", type("Own", (WholeModel,), {})])
def test_a_sum_that_keeps_none_is_lent_the_working_memory(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    add = RunningMean.add

    def noting(self: Any, vector: torch.Tensor, *given: Any) -> None:
        seen.add(vector.data_ptr())
        add(self, vector, *given)

    monkeypatch.setattr(RunningMean, "add", noting)
    plain_run(mode="fedavg", method=method)
    assert len(seen) == 1


def test_a_subclass_of_a_sum_declares_for_itself() -> None:
    class Silent(RunningMean):
        pass

    class Saying(RunningMean):
        sensitivity, keeps_vectors, adds_scaled = 2.0, False, True

    told = [(c.sensitivity, c.keeps_vectors, c.adds_scaled) for c in (RunningMean, Silent, Saying)]
    assert told == [(1.0, False, True), (None, True, False), (2.0, False, True)]


class Wrapped:
    """A sum around the package's own, which has to speak for itself."""

    def __init__(self, size: int) -> None:
        self.inner = RunningMean(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: object = None) -> None:
        self.inner.add(0.5 * vector, weight)


class WrappedSaying(Wrapped):
    sensitivity = 0.5


def test_a_sum_around_another_declares_for_itself() -> None:
    assert sensitivity_of(Wrapped(2)) is None
    assert keeps_vectors(Wrapped(2))
    assert not world(with_client=True, method=method_with(Wrapped)).statement.is_bounded


def test_the_vectors_of_a_sum_around_another_go_through_its_own_add() -> None:
    method = method_with(WrappedSaying)
    assert world(with_client=True, method=method).statement.is_bounded
    assert moved(method=method) == pytest.approx(gaussian_mu(1.0, 1e-5), rel=1e-3)


def test_a_digest_tells_parts_apart_that_are_called_custom_alike() -> None:
    def parts(seed: int = 0, kind: type = RunningMean, bias: bool = False) -> str:
        def made(parts: Any) -> WholeModel:
            return method_with(kind)(parts)

        rng = np.random.default_rng(0)
        inputs = torch.from_numpy(rng.standard_normal((24, SIZE))).float()
        data = (inputs, (inputs[:, 0] > 0).long())
        clients = [list(range(4 * k, 4 * k + 4)) for k in range(6)]
        torch.manual_seed(seed)
        model, options = nn.Linear(SIZE, 2, bias=bias), {"num_rounds": 1, "mode": "fedavg", **QUIET}
        done = fedquilt.run(model, data, data, clients, seed=seed, method=made, **options)
        return str(done.result["metadata"]["parts"])

    assert parts(seed=0) == parts(seed=1), "another seed, other weights: a repetition"
    assert len({parts(), parts(kind=Median), parts(bias=True)}) == 3


def test_methods_by_their_old_names_are_read_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="look is called extra_metrics now"):

        class Old(WholeModel):
            def look(self, weights: Any, round_index: int, looked: Any) -> dict[str, Any]:
                return {**super().look(weights, round_index, looked), "seen": round_index}

            def keep(self, files: Any, rounds: int | None = None) -> None:
                kept.append(rounds)

    kept: list[int | None] = []
    done = plain_run(mode="fedavg", method=Old)
    assert done.result["history"]["test_loss"]
    parts = Old.__new__(Old)
    assert parts.extra_metrics(torch.zeros(1), 3, {}) == {"seen": 3}
    with pytest.warns(DeprecationWarning, match="kept is called on_artifact now"):

        class Watcher(Observer):
            def kept(self, path: Path) -> None:
                kept.append(7)

    Watcher().on_artifact(Path("x"))
    assert kept[-1] == 7


def test_a_digest_holds_nothing_of_samples_in_defaults() -> None:
    def digest(samples: torch.Tensor) -> str:
        def loss(outputs: Any, targets: Any, held: Any = samples) -> Any:
            return nn.functional.cross_entropy(outputs, targets)

        done = world(with_client=True, loss=loss)
        assert done.statement.is_bounded
        return str(done.result["metadata"]["parts"])

    assert digest(torch.zeros(3)) == digest(torch.ones(3))


def test_a_digest_sees_the_code_that_a_method_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As docs/extending.md brings a rule: a method whose `new_sum` makes a class beside it."""
    source = """
import torch
from fedquilt.aggregation import RunningMean
from fedquilt.method import WholeModel

class Rule(RunningMean):
    @property
    def factor(self):
        return helper()

def helper():
    return FACTOR

class Own(WholeModel):
    def new_sum(self):
        return Rule(self._size)
"""
    monkeypatch.syspath_prepend(tmp_path)
    found = set()
    for number, text in enumerate(("1.0", "2.0", "1.0")):
        name = f"own_rule_{number}"
        (tmp_path / f"{name}.py").write_text(source.replace("FACTOR", text))
        found.add(parts_digest(nn.Linear(2, 2), [import_module(name).Own]))
    assert len(found) == 2, "two rules, one of them twice"


def test_a_digest_for_the_owner_tells_constants_objects_and_tensors_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = """
import torch
from torch import nn
POWER = {power}
TABLE = [{power}]
FIXED = 3

def loss(outputs, targets):
    return (outputs - targets).abs().pow(POWER)

def by_table(outputs, targets):
    return (outputs - targets).abs().pow(TABLE[0])

def free(outputs, targets):
    return (outputs - targets).pow(FIXED)

class Focal:
    def __init__(self, gamma):
        self.gamma = gamma

    def __call__(self, outputs, targets):
        return self.gamma * (outputs - targets)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), {power}

    def forward(self, x):
        return self.scale * self.layer(x)
"""
    monkeypatch.syspath_prepend(tmp_path)
    modules = []
    for number, power in enumerate((1, 2, 1)):
        (tmp_path / f"own_loss_{number}.py").write_text(source.format(power=power))
        modules.append(import_module(f"own_loss_{number}"))
    first, second, again = modules
    plain = nn.Linear(2, 2)

    def held(part: Any, model: nn.Module = plain) -> str:
        return held_digest(model, [part])

    for name in ("loss", "by_table"):
        assert held(getattr(first, name)) != held(getattr(second, name))
        assert held(getattr(first, name)) == held(getattr(again, name))
        public = [parts_digest(plain, [getattr(module, name)]) for module in modules]
        assert len(set(public)) == 1, "a constant may come from data, and this digest is public"
    assert held(first.free) == held(second.free), "a constant that it does not use"
    assert held(first.Focal(1.0)) != held(first.Focal(2.0))
    weights = [nn.CrossEntropyLoss(weight=torch.tensor([1.0, w])) for w in (1.0, 2.0, 1.0)]
    assert held(weights[0]) == held(weights[2]) != held(weights[1])
    assert held(None, first.Net()) == held(None, again.Net()) != held(None, second.Net())


def test_a_digest_stays_when_a_module_of_the_package_moves() -> None:
    """The text was computed when these three lay in modules of their own."""
    images = ImageDataset(torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]), "own", 2)
    part = functools.partial(print, images, Adjacency.ZERO_OUT, Axis.full(3))
    assert code_digest([part]) == "56a6710ab2bc8acf"
