"""All inequalities at once: who holds how much, who comes when, who has spent what, who has what.

Every pair and every triple of what a run can be told about them is run for two releases on clients
with skewed classes, and held against figures of its own; or it is refused, before anybody is
charged, for a reason that stands in `REFUSED`.
"""

from __future__ import annotations

import functools
import itertools
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_models import MODELS
from numpy.typing import NDArray
from torch import nn

import fedquilt
from certified_samples import memory_folder, refine_in_few_steps
from fedquilt.audit.canary import CLASSES, HIDDEN, SIDE, drawn_model
from fedquilt.common.quorum import fewest
from fedquilt.config.choices import (
    AVAILABILITIES,
    COMPRESSIONS,
    METHODS,
    PERSONAL,
    POLICIES,
    SECURE_AGGREGATION,
    SELECTIONS,
    WHOLE_METHODS,
)
from fedquilt.config.modes import MODES
from fedquilt.config.run import RunConfig
from fedquilt.errors import InvalidValueError
from fedquilt.experiment import api
from fedquilt.federation import Federation
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.ledger import Ledger
from fedquilt.privacy.mechanism import Contribution, RoundPlan, RoundTally
from fedquilt.privacy.run_account import RunAccount
from fedquilt.privacy.secure import SecureCertified, skellam_mu
from fedquilt.record.result import RunResult
from fedquilt.slices.method import Slices
from fedquilt.training.trainers import autograd
from gaussian_oracle import exact_epsilon
from tiers import rest_is_slow

pytestmark = pytest.mark.usefixtures("one_thread")

CLIENTS, EACH, EPSILON, DELTA, EARLIER, LIFETIME = 10, 6, 6.0, 1e-5, 2.0, 9.0
BASE: dict[str, Any] = {
    "mode": "certified", "engine": "sequential", "num_rounds": 2, "clients_per_round": 4,
    "availability": "always", "epsilon": EPSILON, "local_epochs": 1, "batch_size": EACH,
    "learning_rate": 0.1, "clip_norm": 0.05, "normalise_updates": False, "eval_every": 2,
}  # fmt: skip
SLICED = tuple(name for name in METHODS if name not in WHOLE_METHODS)
TIERS = {"tiers": "1,1/2"}
Settings = dict[str, Any]
DIMENSIONS: dict[str, dict[str, Settings]] = {
    "method": {
        **{name: {"method": name, **TIERS} for name in METHODS if name != "full"},
        "condense": {
            "method": "condense", "mean_rounds": 1, "ipc": 1, "synthetic_images": 4,
            "model_epochs": 1,
        },
    },
    "mode": {
        **{name: {"policy": name} for name in POLICIES if name not in ("adaptive", "cap")},
        "cap": {"policy": "cap", "max_joins": 1},
        "coin": {"amplification": True, "selection": "poisson", "policy": "worst_case"},
        **{name: {"mode": name} for name in MODES if name != "certified"},
    },
    "availability": {
        **{name: {"availability": name} for name in AVAILABILITIES if name != "always"},
        "trace": {"availability": "TRACE"},
    },
    "windows": {"windows": {"rounds_per_release": 2, "num_rounds": 3}},
    "sums": {k: {"secure_aggregation": k} for k in SECURE_AGGREGATION if k != "off"},
    "ledger": {"ledger": {"ledger": "LEDGER", "population": "people", "allowance": LIFETIME}},
    "personal": {name: {"personal": name} for name in PERSONAL if name != "none"},
    "compression": {name: {"compression": name} for name in COMPRESSIONS if name != "none"},
    "buffer": {"buffer": {"buffer_size": 3, "in_flight": 5}},
    "evaluation": {
        "tests": {"client_test_fraction": 0.3},
        "share": {"client_test_fraction": 0.3, "evaluation_share": 0.2},
    },
    "selection": {
        name: {"selection": name} for name in SELECTIONS if name not in ("uniform", "energy")
    } | {"energy": {"selection": "energy", "energy": "ENERGY"}},
}  # fmt: skip
"""What a run may be told, by dimension; what stands in `BASE` is what it is told nothing of."""

OPTIONS = {name: told for values in DIMENSIONS.values() for name, told in values.items()}
_PARTS = (*(name for name in METHODS if name != "full"), "condense")
_UNCLAIMED = ("quap_fl", "quap_fl_client", "fedavg")
_OTHER_MODES = ("fixed_dp", *_UNCLAIMED)


def _of(dimension: str) -> tuple[str, ...]:
    return tuple(DIMENSIONS[dimension])


_WHOLE = "clients must train the whole model"
_BY_LAYER = "its noise and clip are those of whole models"
_CERTIFIED_ONLY = "it would do nothing: it is for mode 'certified'"
_SILENT = "must be left out of a condensation, where it says nothing"
_TOGETHER = "clients of one sum must be there together"
_TOSSED = "whom a secret coin kept in a window decides whether it is tossed again"
_DEALT = "its noise is dealt by layers, of which some would stay with clients"
_ALL_GIVEN = "claims nothing, so that whoever joins gives away everything"
_FIXED = "what is left out belongs to fixed places"
REFUSED: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (_PARTS[:-1], ("fixed_dp", "quap_fl", "quap_fl_client"), _BY_LAYER),
    (("condense",), _OTHER_MODES, "clients of a condensation do not train"),
    (SLICED, _of("sums"), "vectors must be whole"),
    (_PARTS[:-1], _of("personal"), _WHOLE),
    (_PARTS[:-1], _of("compression"), _FIXED),
    (_PARTS[:-1], _of("buffer"), _WHOLE),
    (("condense",), _of("windows") + _of("personal") + _of("compression"), _SILENT),
    (("condense",), (*_of("buffer"), "energy"), _SILENT),
    (("condense",), _of("evaluation"), "its clients send statistics and evaluate no model"),
    (("coin",), _of("windows"), _TOSSED),
    (("coin",), _of("sums"), "the server would know whom its coin kept"),
    (("coin",), _of("ledger"), "such a run takes a client's whole allowance"),
    (("coin",), _of("buffer"), "a secret coin keeps who comes by itself"),
    (("coin",), ("share",), "it is a part of a budget that noise protects"),
    (("coin",), ("weighted", "energy"), "only an independent secret coin amplifies"),
    (_OTHER_MODES, (*_of("sums"), "share"), _CERTIFIED_ONLY),
    (_UNCLAIMED, _of("ledger"), _ALL_GIVEN),
    (("fixed_dp", "quap_fl", "quap_fl_client"), _of("personal"), _DEALT),
    (_of("windows"), _of("sums"), f"{_TOGETHER}, to take back masks of who left"),
    (_of("windows"), _of("buffer"), "a buffer is a window already"),
    (_of("sums"), _of("compression"), "masks take all their bits"),
    (_of("sums"), _of("buffer"), _TOGETHER),
    (_of("sums"), ("share",), "its noise is the server's own"),
    (_of("personal"), _of("buffer"), "what clients keep follows one model"),
    (_of("buffer"), _of("selection"), "who begins is drawn among who is there"),
)
"""Which cannot go with which, and the words that say why."""


def reasons(names: Sequence[str]) -> list[str]:
    """Return why a run of these options is refused; nothing where it is not."""
    told = set(names)
    return [why for some, others, why in REFUSED if told & set(some) and told & set(others)]


# What the runs are of: clients with two classes at most, a table of batteries, a trace.
_DRAWN = torch.Generator().manual_seed(0)
LABELS = torch.arange(CLIENTS * EACH) * CLASSES // (CLIENTS * EACH)
IMAGES = {side: torch.randn(len(LABELS), 1, side, side, generator=_DRAWN) for side in (SIDE, 8)}
PARTS = [list(range(EACH * k, EACH * (k + 1))) for k in range(CLIENTS)]
_MODEL_OF = {
    "depthfl": "exits", "scalefl": "exits", "hetlora": "ranks", "flexlora": "ranks",
    "fedsb": "cores", "condense": "condensed",
}  # fmt: skip


@functools.cache
def model_of(method: str) -> nn.Module:
    return drawn_model(MODELS[_MODEL_OF.get(method, "plain")], 0)


@dataclass
class Watched:
    """What a run did, seen from outside: plans, what moved the model, what its ledger has."""

    federations: list[Federation] = field(default_factory=list)
    plans: list[RoundPlan] = field(default_factory=list)
    held: list[dict[int, torch.Tensor]] = field(default_factory=list)
    lengths: list[dict[int, float]] = field(default_factory=list)
    updates: list[torch.Tensor] = field(default_factory=list)
    reservations: int = 0
    in_run: NDArray[np.float64] | None = None
    epsilons: NDArray[np.float64] | None = None
    lifetime: NDArray[np.float64] | None = None


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        rows = [f"{t},{c}" for t in range(3) for c in range(t, 7)]
        (path / "trace.csv").write_text("\n".join(["round,client", *rows]))
        rows = [f"{c},{10 + c},{15 + c},3" for c in range(CLIENTS)]
        (path / "energy.csv").write_text("\n".join(["client,joules,battery,charge", *rows]))
        earlier = {**BASE, **OPTIONS["ledger"], "epsilon": EARLIER}
        earlier["ledger"] = str(path / "earlier.sqlite")
        _run(earlier)
        yield path


def held_in(federation: Federation, plan: RoundPlan) -> dict[int, torch.Tensor]:
    """Return which numbers each client of a round holds, where they hold parts."""
    method, held = federation.method, {}
    if isinstance(method, Slices) and method.holds_parts:
        for client in plan.clients.tolist():
            held[client] = torch.zeros(federation.weights.numel())
            method.slicing.place(client, plan.round_index).cover_(held[client])
    return held


def _run(settings: Settings) -> RunResult:
    method = settings.get("method", "full")
    images = IMAGES[8 if method == "condense" else SIDE]
    train, test = (images, LABELS), (images[::EACH], LABELS[::EACH])
    return fedquilt.run(
        model_of(method), train, test, PARTS, output_dir=None, quiet=True, **settings
    )


def settings_of(names: Sequence[str], folder: Path) -> Settings:
    """Return the settings of a run, without what would do nothing in it."""
    settings = dict(BASE)
    for name in names:
        settings |= OPTIONS[name]
    mode = settings["mode"]
    idle = {"normalise_updates"} if mode != "certified" else set()
    idle |= {"clip_norm"} if mode in _UNCLAIMED else set()
    idle |= {"epsilon"} if mode == "fedavg" and "ledger" not in settings else set()
    idle |= {"local_epochs", "learning_rate"} if settings.get("method") == "condense" else set()
    settings |= {"noise_layers": "all"} if mode in ("fixed_dp", "quap_fl") else {}
    files = {"TRACE": folder / "trace.csv", "ENERGY": folder / "energy.csv"}
    if "ledger" in settings:
        files["LEDGER"] = shutil.copy(folder / "earlier.sqlite", folder / "now.sqlite")
    placed = {key: str(files.get(str(value), value)) for key, value in settings.items()
              if str(value) in files}  # fmt: skip
    return {key: value for key, value in {**settings, **placed}.items() if key not in idle}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Watched]:
    """Return what begins to watch anew: only what the package does is looked at."""
    seen = [Watched()]
    build, reserve, close = api.build_federation, RunAccount.reserve, RunAccount.close

    def building(*given: Any, **named: Any) -> Federation:
        made = build(*given, **named)
        seen[0].federations.append(made)
        opened, clip = made.mechanism.open_round, made.mechanism.clip
        step = made.method.server.step

        def opening(plan: RoundPlan) -> None:
            seen[0].plans.append(plan)
            seen[0].held.append(held_in(made, plan))
            seen[0].lengths.append({})
            opened(plan)

        def clipping(plan: RoundPlan, sent: Contribution, tally: RoundTally) -> Contribution:
            clipped = clip(plan, sent, tally)
            seen[0].lengths[-1][sent.client] = float(clipped.vector.norm())
            return clipped

        def stepping(weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
            seen[0].updates.append(update.clone())
            return step(weights, update)

        made.mechanism.open_round = opening  # type: ignore[method-assign]
        made.mechanism.clip = clipping  # type: ignore[method-assign]
        made.method.server.step = stepping  # type: ignore[method-assign]
        return made

    def reserving(account: RunAccount, *given: Any) -> Any:
        seen[0].reservations += 1
        return reserve(account, *given)

    def closing(account: RunAccount) -> None:
        seen[0].in_run, seen[0].epsilons = account.spent(), account.epsilons()
        seen[0].lifetime = account.population.spent()
        close(account)

    monkeypatch.setattr(api, "build_federation", building)
    monkeypatch.setattr(RunAccount, "reserve", reserving)
    monkeypatch.setattr(RunAccount, "close", closing)
    # Whether a model hides state is tried anew for every run, and these models are known.
    monkeypatch.setattr(autograd, "refuse_hidden_state", lambda *given: None)
    refine_in_few_steps(monkeypatch)

    def anew() -> Watched:
        seen[0] = Watched()
        return seen[0]

    return anew


def look(names: Sequence[str], folder: Path, watch: Callable[[], Watched]) -> str | None:
    """Run a combination; return what is wrong with it, None where nothing is."""
    settings, why, seen = settings_of(names, folder), reasons(names), watch()
    try:
        result = _run(settings)
    except InvalidValueError as refused:
        said = str(refused)
        if not any(reason in said for reason in why):
            return f"refused for no reason of the table: {said}"
        if sum(names_option(name, said) for name in names) < 2:
            return f"the refusal names no two options: {said}"
        if seen.reservations or ("ledger" in settings and not untouched(folder)):
            return "refused after somebody was charged"
        return None
    except Exception as crashed:  # a crash is what this looks for
        return f"{type(crashed).__name__}: {crashed}"
    if why:
        return f"not refused, and the table says: {why[0]}"
    try:
        check(settings, seen, result)
    except AssertionError as wrong:
        return f"AssertionError: {wrong}"
    return None


def names_option(name: str, said: str) -> bool:
    """Tell whether a refusal names what was told; the method of a condensation by that word."""
    return any(key in said for key in OPTIONS[name]) or (
        name == "condense" and "condensation" in said
    )


def untouched(folder: Path) -> bool:
    """Tell whether a copy of the ledger has the entries that the original has."""
    heads = []
    for name in ("earlier", "now"):
        with Ledger.open(folder / f"{name}.sqlite", read_only=True) as ledger:
            heads.append(ledger.export()["head"])
    return heads[0] == heads[1]


def check(settings: Settings, seen: Watched, result: RunResult) -> None:
    """Hold a run against figures of its own."""
    check_tensors(settings, result)
    check_presence(settings, result)
    if settings.get("method") in SLICED:
        check_coverage(settings, seen)
    statement = result.statement
    if settings["mode"] in _UNCLAIMED:
        assert statement.epsilon_max == math.inf
        assert seen.in_run is None
        return
    assert len(seen.federations) == 1
    assert seen.in_run is not None
    assert seen.epsilons is not None
    if settings["mode"] == "certified":
        for plan, lengths in zip(seen.plans, seen.lengths, strict=True):
            longer = [client for client, length in lengths.items() if length > plan.clips[client]]
            assert not longer, "longer than its clip"
    fewest_summed = 2 if "secure_aggregation" in settings else 1
    cohorts = [x for x in result.result["cohorts"] if len(x) >= fewest_summed]
    joined = {client for cohort in cohorts for client in cohort}
    spent = expected_spent(settings, seen)
    if settings.get("evaluation_share"):
        # A fifth of the budget pays for as many means as there are evaluations.
        most = 2 if "rounds_per_release" in settings else 1
        times = (seen.in_run - spent) / (each := 0.2 * budget(EPSILON) / most)
        np.testing.assert_allclose(times, np.round(times), atol=1e-5)
        assert set(np.round(times)) <= set(range(most + 1))
        assert times.max() > 0.5
        joined |= set(np.flatnonzero(np.round(times)).tolist())
        spent = spent + each * np.round(times)
    np.testing.assert_allclose(seen.in_run, spent, rtol=2e-6, atol=0)
    assert joined == set(np.flatnonzero(seen.in_run).tolist()), "who did not join pays nothing"
    ours = np.array([exact_epsilon(math.sqrt(mu2), DELTA) if mu2 else 0.0 for mu2 in spent])
    np.testing.assert_allclose(seen.epsilons, ours, rtol=1e-5, atol=1e-9)
    assert statement.is_bounded
    assert statement.epsilon_max <= EPSILON
    if settings.get("amplification"):
        assert seen.epsilons.max() <= EPSILON
        assert statement.epsilon_max > 0
    else:
        assert statement.epsilon_max == seen.epsilons.max()
        assert statement.epsilon_median == np.median(seen.epsilons)
    check_lifetime(settings, seen, result)


def check_presence(settings: Settings, result: RunResult) -> None:
    """Who is in a cohort was there: round t of the trace has clients t to 6."""
    if settings["availability"].endswith(".csv") and "buffer_size" not in settings:
        window = settings.get("rounds_per_release", 1)
        for release, cohort in enumerate(result.result["cohorts"]):
            assert set(cohort) <= set(range(release * window, 7))


def check_lifetime(settings: Settings, seen: Watched, result: RunResult) -> None:
    """What the ledger says of all runs together is their sum, and within the allowance."""
    if "ledger" not in settings:
        return
    assert seen.lifetime is not None
    earlier = seen.lifetime - seen.in_run
    assert 0 < earlier.max() <= budget(EARLIER) * (1 + 1e-9)
    worst = exact_epsilon(math.sqrt(seen.lifetime.max()), DELTA)
    assert result.result["ledger"]["lifetime_epsilon_max"] == pytest.approx(worst, rel=1e-5)
    assert worst <= LIFETIME


@functools.cache
def budget(epsilon: float) -> float:
    """Return mu^2 of an epsilon, by bisection on its definition."""
    low, high = 1e-6, 6.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if exact_epsilon(middle, DELTA) < epsilon else (low, middle)
    return low**2


def expected_spent(settings: Settings, seen: Watched) -> NDArray[np.float64]:
    """Return what each client gave away: by clips and noise as they were applied."""
    spent = np.zeros(CLIENTS)
    mechanism = seen.federations[-1].mechanism
    for plan in seen.plans:
        for client in plan.clients.tolist():
            if settings.get("amplification"):
                spent[client] = budget(EPSILON)  # all of it, at the first exposure
            elif settings["mode"] == "fixed_dp":
                ratio = math.sqrt(2 * math.log(1.25 / DELTA)) * len_releases(settings) / EPSILON
                spent[client] += ratio**-2
            elif isinstance(mechanism, SecureCertified):
                spent[client] += masked_cost(mechanism, plan, plan.clips[client])
            else:
                spent[client] += (plan.clips[client] / plan.noise_std) ** 2
    return spent


def len_releases(settings: Settings) -> int:
    return -(-settings["num_rounds"] // settings.get("rounds_per_release", 1))


def masked_cost(mechanism: SecureCertified, plan: RoundPlan, clip: float) -> float:
    """Return D^2 m(V_n)^2, all n having answered; the sum of one is opened by nobody."""
    secure, count = mechanism.secure, len(plan.clients)
    if count < 2:
        return 0.0
    grid = plan.noise_std / math.sqrt(secure.variance)
    needed = fewest(count, secure.share, secure.colluding)
    square = (clip / grid) ** 2 + secure.size / 4
    return square * skellam_mu(secure.variance * count // needed) ** 2


def check_tensors(settings: Settings, result: RunResult) -> None:
    """What a statement covers is what was released, and nothing else has moved."""
    method, statement = settings.get("method", "full"), result.statement
    if method == "condense":
        assert statement.uncovered == ()
        return
    begun = model_of(method)
    trained = {name for name, tensor in begun.named_parameters() if tensor.requires_grad}
    own = {name for name in trained if name.startswith("last")}
    released = trained - own if settings.get("personal") in ("fedper", "fedrep") else trained
    assert set(statement.covered) | set(statement.uncovered) == released
    assert not set(statement.covered) & set(statement.uncovered)
    if settings["mode"] in ("certified", "fixed_dp"):
        assert set(statement.covered) == released
    before, after = begun.state_dict(), result.state_dict
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved <= released


def check_coverage(settings: Settings, seen: Watched) -> None:
    """What clients hold is what their method says, and what nobody holds does not move."""
    (federation,) = seen.federations
    method = federation.method
    assert isinstance(method, Slices)
    name = settings["method"]
    for plan, parts, update in zip(seen.plans, seen.held, seen.updates, strict=True):
        if name == "flexlora":
            assert plan.coverage is None  # everybody's products are whole
            continue
        holders = torch.zeros(update.numel())
        for client, mine in parts.items():
            size = size_held(name, method.client_widths[client])
            assert size is None or int(mine.sum()) == size
            if name == "heterofl":
                units = int(HIDDEN * method.client_widths[client])
                assert torch.equal(mine[: HIDDEN * SIDE**2] > 0, first_units(units))
            holders += mine
        if name == "hetlora":  # everybody counts on what anybody holds
            holders = torch.where(holders > 0, float(len(plan.clients)), 0.0)
        assert plan.coverage is not None
        shares = (holders / len(plan.clients)).to(plan.coverage)
        torch.testing.assert_close(plan.coverage, shares)
        assert not update[holders == 0].any(), "nobody holds it"
        if settings["mode"] == "certified":
            assert (update[holders > 0] != 0).all(), "noise on all that is released"


def first_units(units: int) -> torch.Tensor:
    """Return which weights of the first layer belong to its first units."""
    held = torch.zeros(HIDDEN, SIDE**2, dtype=torch.bool)
    held[:units] = True
    return held.flatten()


def size_held(method: str, width: Fraction) -> int | None:
    """Return how many numbers a client of a width holds, of the methods' own description."""
    if method in _MODEL_OF:
        tensors = dict(model_of(method).named_parameters())
        if width == 1:
            return sum(tensor.numel() for tensor in tensors.values() if tensor.requires_grad)
        if _MODEL_OF[method] == "exits":
            return None
        share = {"core": width**2, "lora_A": width, "lora_B": width}
        return sum(
            int(tensor.numel() * next((s for k, s in share.items() if k in name), Fraction(1)))
            for name, tensor in tensors.items()
            if tensor.requires_grad
        )
    units = HIDDEN if method == "largest" else int(HIDDEN * width)
    return units * (SIDE**2 + 1 + CLASSES) + CLASSES


def wrong(
    dimensions: Sequence[str], kept: Callable[[Sequence[str]], bool], folder: Path, watch: Any
) -> list[str]:
    """Return what is wrong with the combinations of some dimensions."""
    combined = filter(kept, itertools.product(*(DIMENSIONS[one] for one in dimensions)))
    found = ((names, look(names, folder, watch)) for names in combined)
    return [f"{' + '.join(names)}: {problem}" for names, problem in found if problem is not None]


QUICK = {
    name
    for dimension, few in {
        "method": ("heterofl", "condense"),
        "mode": ("worst_case", "coin", "fixed_dp", "fedavg"),
        "availability": ("beta", "trace"),
        "personal": ("fedper", "ditto"),
        "compression": ("int8", "topk"),
        "selection": ("poisson", "energy"),
    }.items()
    for name in few
} | {name for one in ("windows", "sums", "ledger", "buffer", "evaluation") for name in _of(one)}
"""What the first tier combines: of what is alike one or two."""
PAIRS = list(itertools.combinations(DIMENSIONS, 2))
METHOD_THIRDS = [set(list(DIMENSIONS["method"])[part::3]) for part in range(3)]
TRIPLES = [
    (triple, part)
    for triple in itertools.combinations(DIMENSIONS, 3)
    for part in (range(3) if "method" in triple else (None,))
]
"""Three dimensions and, so that no test takes minutes, which third of the methods."""


def are_quick(names: Sequence[str]) -> bool:
    return set(names) <= QUICK


@pytest.mark.parametrize("name", rest_is_slow(list(OPTIONS), QUICK))
def test_each_alone_runs(name: str, folder: Path, watch: Any) -> None:
    assert not reasons([name])
    assert look([name], folder, watch) is None


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_pair_runs_or_is_refused_with_the_reason(
    pair: tuple[str, str], folder: Path, watch: Any
) -> None:
    assert wrong(pair, are_quick, folder, watch) == []


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_so_does_every_other_pair(pair: tuple[str, str], folder: Path, watch: Any) -> None:
    assert wrong(pair, lambda names: not are_quick(names), folder, watch) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("triple", "part"),
    TRIPLES,
    ids=lambda told: "-".join(told) if isinstance(told, tuple) else str(told),
)
def test_every_triple_runs_or_is_refused_with_the_reason(
    triple: tuple[str, str, str], part: int | None, folder: Path, watch: Any
) -> None:
    def kept(names: Sequence[str]) -> bool:
        return part is None or names[triple.index("method")] in METHOD_THIRDS[part]

    assert wrong(triple, kept, folder, watch) == []


_RESERVE = RunAccount.reserve


def half_charged(account: RunAccount, index: int, clients: Any, charges: Any) -> Any:
    """Enter half of a round's charges, and grant all of them."""
    _RESERVE(account, index, clients, charges / 2)
    return charges


@pytest.mark.parametrize(
    ("names", "owner", "name", "broken", "found"),
    [
        (["ledger"], RunAccount, "reserve", half_charged, "Not equal to tolerance"),
        (["beta"], Certified, "clip", lambda self, plan, sent, tally: sent, "longer than its clip"),
        (["heterofl"], Slices, "coverage", lambda *given: None, "coverage=None"),
        (["fedper", "heterofl"], RunConfig, "_check_personal", lambda self: None, "not refused"),
        (["full"], RunConfig, "_check_steps", lambda self: 1 // 0, "ZeroDivisionError"),
    ],
    ids=["charge", "clip", "coverage", "refusal", "crash"],
)
def test_what_is_broken_is_found(
    names: list[str],
    owner: type,
    name: str,
    broken: Callable[..., Any],
    found: str,
    folder: Path,
    watch: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OPTIONS, "full", {})
    monkeypatch.setattr(owner, name, broken)
    assert found in str(look(names, folder, watch) or "nothing was found")


def test_the_page_has_every_reason_and_no_other_and_counts_right() -> None:
    page = (Path(__file__).parents[1] / "docs" / "unequal.md").read_text()
    section = page.split("## What goes with what")[1].split("\n## ")[0]
    told = [row.split(" | ")[-1].removesuffix(" |") for row in section.splitlines()
            if row.startswith("| ")][1:]  # fmt: skip
    assert len(set(told)) == len(told)
    assert set(told) == {why for _, _, why in REFUSED}
    sizes = [len(values) for values in DIMENSIONS.values()]
    counts = [sum(map(math.prod, itertools.combinations(sizes, k))) for k in (2, 3)]
    assert f"{counts[0]:,} pairs and {counts[1]:,} triples" in " ".join(section.split())
