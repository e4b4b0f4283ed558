"""The ways through a round that are replayed, in families, and the worlds of a replay.

Worlds are real federations that differ in one client's data.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.aggregation import ServerOptimizer, ServerStep
from fedquilt.common import randomness
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.config import CondenseConfig, RunConfig, plain_config
from fedquilt.federation import Federation
from fedquilt.method import Method
from fedquilt.population import Cohort
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.mechanism import Mechanism
from fedquilt.privacy.noise import NoiseSource, SecretNoise, SeededNoise
from fedquilt.privacy.quap_mechanisms import LayerNoise
from fedquilt.privacy.run_account import RunAccount
from fedquilt.record.result import as_line, split_private
from fedquilt.round import RoundRecord, run_round
from fedquilt.setup.account import open_account
from fedquilt.setup.build_task import task_from
from fedquilt.setup.federation import build_federation, build_method
from fedquilt.setup.task import FederatedTask
from fedquilt.training import ClientIds, ClientUpdate, Engine

CLIENTS = 6
"""The number of clients in every case."""


@dataclass(frozen=True)
class Case:
    """One way through a round.

    Parameters
    ----------
    settings : dict
        Fields of `RunConfig` beside those that all cases share.
    norms : tuple of float
        The norm of each client's update; NaN and Inf stand for updates with such
        entries.  Empty: the clients train for real.
    victims : tuple of int
        The clients whose data are taken away, one in each world.
    present : tuple of tuple of int
        Who is there in each round; empty: everybody, always.
    kept : tuple of tuple of int
        Whom the secret coin keeps in each round, where there is one.
    timed : bool
        Let the victim's missing data show in the wall time, as they do in truth.
    """

    settings: dict[str, Any]
    norms: tuple[float, ...] = (0.5, 3.0, 0.9, 40.0, 5.0, 2.0)
    victims: tuple[int, ...] = (0, 3, 4)
    present: tuple[tuple[int, ...], ...] = ()
    kept: tuple[tuple[int, ...], ...] = ()
    timed: bool = False

    @property
    def num_rounds(self) -> int:
        """How many rounds are replayed."""
        return len(self.present or self.kept) or 4

    @property
    def num_releases(self) -> int:
        """How many releases they have."""
        return -(-self.num_rounds // int(self.settings.get("rounds_per_release", 1)))


_UNEVEN = ((0, 1, 2, 3), (1, 3), (), (0, 1, 3, 5), (1,), (1, 2, 3, 4))
_NONE = math.nan

_CONDENSE = {
    "method": "condense",
    "ipc": 1,
    "synthetic_images": 8,
    "model_epochs": 1,
    "eval_every": 6,
}

CASES: dict[str, Case] = {
    "adaptive clips": Case({"policy": "adaptive"}, present=_UNEVEN),
    "clips at their cap": Case({"clip_cap": 1.2}, present=_UNEVEN),
    "even clips": Case({"policy": "worst_case"}),
    "a cap on joins": Case({"policy": "cap", "max_joins": 2}),
    "the paper's schedule": Case({"policy": "paper"}, present=_UNEVEN),
    "nobody there": Case({}, present=((), (0, 1), (), (), (0, 3))),
    "not finite": Case({}, norms=(_NONE, math.inf, -math.inf, 0.5, 9.0, 1.0), victims=(0, 1, 2, 4)),
    "zero updates": Case({}, norms=(0.0, 0.0, 0.0, 0.0, 1.0, 9.0), victims=(0, 4, 5)),
    # Above 1e154 and below 1e-154 the squares leave the range of float64.
    "tiny and huge": Case({}, norms=(1e-161, 1e-40, 1e30, 1e160, 1e300, 1.0), victims=(0, 1, 2, 3)),
    "normalised updates": Case(
        {"normalise_updates": True},
        norms=(1e-161, 1e-40, _NONE, 1e160, 0.0, 0.5),
        victims=(0, 1, 2, 3, 5),
    ),
    "private quantile": Case({"clipping": "quantile"}),
    "quantile of odd updates": Case(
        {"clipping": "quantile"}, norms=(0.0, _NONE, 1e-40, 1e160, 1.0, 2.0), victims=(0, 1, 3)
    ),
    "windows": Case({"rounds_per_release": 3, "clip_cap": 1.5}, present=_UNEVEN),
    "windows, late models averaged": Case(
        {"rounds_per_release": 2, "average_late": 1.0, "normalise_updates": True}, present=_UNEVEN
    ),
    "windows, correlated noise": Case(
        {"rounds_per_release": 2, "noise_bands": 2, "normalise_updates": True}, present=_UNEVEN
    ),
    "windows of slices": Case(
        {"method": "fedrolex", "tiers": "1/2,1/4", "rounds_per_release": 2}, present=_UNEVEN
    ),
    "correlated noise": Case({"noise_bands": 3, "clients_per_round": 2}),
    "everything at once": Case(
        {"noise_bands": 2, "clipping": "quantile", "normalise_updates": True}, present=_UNEVEN
    ),
    "secret coin": Case(
        {
            "amplification": True,
            "selection": "poisson",
            "policy": "worst_case",
            "clients_per_round": 3,
            "epsilon": 20.0,
        },
        kept=((0, 1, 3), (), (3, 4), (0, 1)),
    ),
    "noise of the clients": Case({"secure_aggregation": "simulated"}, present=_UNEVEN),
    "noise of the clients, odd updates": Case(
        {
            "secure_aggregation": "simulated",
            "colluding_clients": 1,
            "normalise_updates": True,
            "num_rounds": 4,
        },
        norms=(1e-161, 1e-40, _NONE, 1e160, 0.0, 0.5),
        victims=(0, 1, 2, 3, 5),
    ),
    "prefix slices": Case({"method": "heterofl", "tiers": "1,1/2,1/4"}, present=_UNEVEN),
    "rolling slices": Case({"method": "fedrolex", "tiers": "1/2,1/4"}, present=_UNEVEN),
    "random slices": Case(
        {"method": "dropout", "tiers": "1/2,1/4", "noise_bands": 2, "clipping": "quantile"},
        norms=(_NONE, 3.0, 0.0, 1e30, 1.0, 0.2),
    ),
    "slices of important units": Case({"method": "fiarse", "tiers": "1/2,1/4"}, present=_UNEVEN),
    "slices under a secret coin": Case(
        {
            "method": "fedrolex",
            "tiers": "1/2,1/4",
            "amplification": True,
            "selection": "poisson",
            "policy": "worst_case",
            "clients_per_round": 3,
            "epsilon": 20.0,
        },
        present=((0, 1, 3), (3, 4), (0, 1, 2, 3, 4, 5), (1, 3)),
        kept=((0, 3), (), (0, 3, 4), (3,)),
    ),
    "slices, real training": Case(
        {"method": "heterofl", "tiers": "1,1/2,1/4", "clip_norm": 0.01}, norms=()
    ),
    "class statistics": Case(
        {**_CONDENSE, "num_rounds": 6}, norms=(_NONE, 3.0, 0.0, 1e30, 1.0, 0.2), present=_UNEVEN
    ),
    "class statistics, real data": Case({**_CONDENSE, "mean_rounds": 2}, norms=()),
    "fixed_dp over everything": Case(
        {"mode": "fixed_dp", "noise_layers": "all"}, norms=(_NONE, 3.0, 0.0, 1e30, 1.0, 0.2)
    ),
    "real training": Case({"clip_norm": 0.01}, norms=()),
    "compressed updates": Case(
        {"compression": "topk", "compression_share": 0.05, "clip_norm": 0.01}, norms=()
    ),
    "local heads": Case({"personal": "fedper", "clip_norm": 0.01}, norms=()),
    "heads in turns": Case({"personal": "fedrep", "clip_norm": 0.01}, norms=(), present=_UNEVEN),
    "own models": Case({"personal": "ditto", "clip_norm": 0.01}, norms=()),
    "fine-tuned models": Case({"personal": "finetune", "clip_norm": 0.01}, norms=()),
    "energy spent evenly": Case({"selection": "energy", "clients_per_round": 3}, present=_UNEVEN),
    "signs": Case({"compression": "sign", "clip_norm": 0.01}, norms=(), present=_UNEVEN),
    "wall time": Case({}, victims=(3,), timed=True),
}

FAMILIES: dict[str, tuple[str, ...]] = {
    "clips and policies": (
        "adaptive clips",
        "clips at their cap",
        "even clips",
        "a cap on joins",
        "the paper's schedule",
        "nobody there",
    ),
    "updates that are odd": ("not finite", "zero updates", "tiny and huge", "normalised updates"),
    "private quantile": ("private quantile", "quantile of odd updates"),
    "windows": (
        "windows",
        "windows, late models averaged",
        "windows, correlated noise",
        "windows of slices",
    ),
    "correlated noise": ("correlated noise", "everything at once"),
    "secret coin": ("secret coin", "slices under a secret coin"),
    "secure aggregation": ("noise of the clients", "noise of the clients, odd updates"),
    "slices": (
        *("prefix slices", "rolling slices", "random slices", "slices of important units"),
        "slices, real training",
    ),
    "condensation": ("class statistics", "class statistics, real data"),
    "fixed_dp": ("fixed_dp over everything",),
    "energy": ("energy spent evenly",),
    "messages": ("compressed updates", "signs"),
    "personal models": ("local heads", "heads in turns", "own models", "fine-tuned models"),
    "training and time": ("real training", "wall time"),
}
"""Cases that go through the same part of the code."""


_SAMPLES = 4  # of each client
_CONDENSED_SIDE = 8  # images that gradients can be taken of
_FROM_RELEASE = ("matching_loss", "epoch_avg_loss")  # computed from what noise protects
_VOLATILE = ("time", "digest", "hash")  # decided by the clock and the noise


@dataclass
class World:
    """A federation with or without one client's data, and its newest round."""

    federation: Federation
    server: WatchedServer
    account: RunAccount
    victim: int | None
    seconds: float
    record: RoundRecord = field(default_factory=lambda: RoundRecord(-1, []))
    charges: NDArray[np.float64] = field(default_factory=lambda: np.zeros(CLIENTS))

    def run(self, round_index: int) -> None:
        """Run one round and note what it released and charged."""
        self.server.released = None
        before = self.account.population.spent()
        self.record = run_round(self.federation, round_index)
        self.charges = self.account.population.spent() - before

    def follow(self, base: World) -> None:
        """Restore the public state of the base world, so that the next round is comparable."""
        self.federation.weights = base.federation.weights.clone()
        self.federation.mechanism.load_state(base.federation.mechanism.state())
        self.server.load_state(base.server.state(), self.federation.weights.device)
        if self.federation.late is not None and base.federation.late is not None:
            late = base.federation.late.state()
            self.federation.late.load_state(late, self.federation.weights.device)

    def public(self) -> dict[str, Any]:
        """Return what anybody may see of the newest round and no noise protects."""
        mechanism, population = self.federation.mechanism, self.account.population
        line = as_line(self.record, self.seconds)
        shown = split_private(line)[0] if mechanism.is_bounded else line
        shown = {key: value for key, value in shown.items() if key not in _FROM_RELEASE}
        states = {**self.federation.tracker.state(), **mechanism.state()}
        states.pop("quantile_bound", None)  # a release: its move is measured, not forbidden
        return {
            **{f"{key} in the record": value for key, value in shown.items()},
            **{f"{key} in the checkpoint": value.tolist() for key, value in states.items()},
            "charges": self.charges.tolist(),
            "joins in the ledger": population.joins().tolist(),
            "reservations": population.reserved().tolist(),
        }

    def ending(self) -> dict[str, Any]:
        """Return the statement, and what the ledger says but for times and hashes."""
        counts = self.federation.tracker.participation_count
        statement = self.federation.mechanism.statement(counts, self.account.epsilons())
        export = self.account.ledger.export()
        entries = [
            {key: value for key, value in entry.items() if key not in _VOLATILE}
            for entry in export["entries"]
        ]
        return {
            "statement": statement,
            "ledger entries": entries,
            "ledger populations": export["populations"],
        }


class WatchedServer:
    """A server's step that remembers the release it was given."""

    def __init__(self, server: ServerStep) -> None:
        self.released: torch.Tensor | None = None
        self._server = server
        self.report = server.report
        self.state = server.state
        self.load_state = server.load_state

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Note the release and hand it on."""
        self.released = update.detach().to("cpu", torch.float64, copy=True)
        return self._server.step(weights, update)


class Still(ServerOptimizer):
    """A server that leaves the model alone, for releases that are no updates of it."""

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Return the weights."""
        return weights


class Prescribed(Engine):
    """An engine whose updates are known in advance; the victim has none."""

    def __init__(self, update: Callable[[int, int], torch.Tensor], victim: int | None) -> None:
        self._update = update
        self._victim = victim

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the prescribed updates; sizes and losses differ from client to client."""
        for client in map(int, cohort):
            delta = self._update(client, round_index)
            if client == self._victim:
                yield ClientUpdate(client, torch.zeros_like(delta), 0, 0.0)
            else:
                yield ClientUpdate(client, delta, 5 + 7 * client, 0.3 * (1 + client))


class KnownNoise(SeededNoise):
    """The same noise in every world; the mechanism takes it for the secret noise."""

    reproducible = False


class NoNoise(SecretNoise):
    """Zeros."""

    def normal(self, size: int) -> NDArray[np.float64]:
        """Return `size` zeros."""
        return np.zeros(size)

    def words(self, size: int) -> NDArray[np.uint64]:
        """Return one word throughout: both halves of a Skellam number are then the same."""
        return np.full(size, 2**63, dtype=np.uint64)


def known_noise(seed: int) -> KnownNoise:
    """Return the noise of a replay."""
    return KnownNoise(torch_seed(seed, "replay noise"))


def prescribed_update(case: Case, seed: int, size: int, client: int, index: int) -> torch.Tensor:
    """Return the update of a client in a round: a random direction of the case's norm.

    Norms that float32 cannot hold come in float64, as from a float64 model.
    """
    length = case.norms[client]
    direction = generator(seed, "replay", index, client).standard_normal(size)
    if not math.isfinite(length):
        direction[client % size] = length
        return torch.from_numpy(direction).to(torch.float32)
    vector = torch.from_numpy(direction * (length / np.linalg.norm(direction)))
    return vector.to(torch.float32 if 1e-30 < length <= 1e30 or length == 0 else torch.float64)


def prescribed(case: Case, seed: int, method: Method) -> Callable[[int, int], torch.Tensor]:
    """Return the update of each client in each round, of the size of what it holds."""
    size = method.new_sum().total.numel()

    def update(client: int, index: int) -> torch.Tensor:
        place: Any = method.place(client, index)
        return prescribed_update(case, seed, size if place is None else place.size, client, index)

    return update


def make_worlds(
    case: Case, seed: int, folder: Path, stack: contextlib.ExitStack
) -> tuple[World, World, list[World]]:
    """Return the base world, the one without noise, and one for each victim."""
    config, problem = _problem(case, seed, folder)
    first = _account(config, problem, folder / "base", stack)
    pattern = build_federation(config, problem, first)
    if case.kept:
        pattern.select = _keep(pattern.select, case.kept)
    known = known_noise(seed)

    def world(name: str, victim: int | None, noise: NoiseSource) -> World:
        its_problem = _of_its_own(problem, None if case.norms else victim)
        account = _account(config, its_problem, folder / name, stack)
        mechanism = _copied(pattern.mechanism, first, account)
        _give_noise(mechanism, noise)
        method = build_method(config, its_problem)
        server = WatchedServer(_server(case, method))
        if case.norms:
            method.engine = Prescribed(prescribed(case, seed, method), victim)
        method.server = server
        federation = dataclasses.replace(
            pattern,
            tracker=copy.deepcopy(pattern.tracker),
            method=method,
            mechanism=mechanism,
            weights=pattern.weights.clone(),
            account=account,
        )
        seconds = 0.5 if case.timed and victim is not None else 1.0
        return World(federation, server, account, victim, seconds)

    neighbours = [world(f"without {victim}", victim, known) for victim in case.victims]
    return world("whole", None, known), world("silent", None, NoNoise()), neighbours


def _problem(case: Case, seed: int, folder: Path) -> tuple[RunConfig, FederatedTask]:
    """Return the case's configuration and a problem of a few random samples."""
    availability = "always"
    if case.present:
        availability = str(folder / "present.csv")
        with open(availability, "w", newline="", encoding="utf-8") as stream:
            rows = [(t, client) for t, there in enumerate(case.present) for client in there]
            csv.writer(stream).writerows([("round", "client"), *rows])
    shared = {
        "mode": "certified",
        "dataset": "custom",
        "model": "custom",
        "clients_per_round": CLIENTS,
        "availability": availability,
        "num_rounds": case.num_rounds,
        "epsilon": 6.0,
        "seed": seed,
        "device": "cpu",
    }
    if case.settings.get("method") != "condense":
        shared |= {"learning_rate": 0.5, "local_epochs": 1}
    config = plain_config({**shared, **case.settings})
    draws = generator(seed, "replay data")
    side = _CONDENSED_SIDE if isinstance(config, CondenseConfig) else 2
    inputs = torch.from_numpy(draws.standard_normal((CLIENTS * _SAMPLES, 1, side, side))).float()
    labels = torch.from_numpy(draws.integers(0, 3, CLIENTS * _SAMPLES))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "replay model"))
        model = nn.Sequential(nn.Flatten(), nn.Linear(side**2, 4), nn.ReLU(), nn.Linear(4, 3))
    parts = np.arange(CLIENTS * _SAMPLES).reshape(CLIENTS, _SAMPLES)
    return task_from(config, model, (inputs, labels), (inputs, labels), list(parts))


def _of_its_own(problem: FederatedTask, victim: int | None) -> FederatedTask:
    """Return the problem in which the victim holds no sample, with parts of its own."""
    nothing = np.zeros(0, dtype=np.int64)
    held = [nothing if i == victim else part for i, part in enumerate(problem.task.clients)]
    task = dataclasses.replace(problem.task, clients=held)
    return dataclasses.replace(problem, task=task)


def _account(
    config: RunConfig, problem: FederatedTask, path: Path, stack: contextlib.ExitStack
) -> RunAccount:
    account = open_account(config, problem, path, "replay")
    stack.callback(account.close)
    return account


def _copied(mechanism: Mechanism, account: RunAccount, other: RunAccount) -> Mechanism:
    """Return a mechanism before its first round, with another account in place of its own."""
    places = ((account, other), (account.population, other.population), (account.run, other.run))
    return copy.deepcopy(mechanism, {id(old): new for old, new in places})


def _give_noise(mechanism: Mechanism, noise: NoiseSource) -> None:
    if isinstance(mechanism, Certified):
        mechanism.noise.source = noise
    elif isinstance(mechanism, LayerNoise):
        mechanism.noise = noise


def _server(case: Case, method: Method) -> ServerStep:
    """Return the server's plain step, or the method's where clients send no updates."""
    if method.clients_train:
        return ServerOptimizer("sgd", 1.0)
    return Still("sgd", 1.0) if case.norms else method.server


def _keep(
    select: Callable[[int, NDArray[np.bool_] | None], Cohort], kept: tuple[tuple[int, ...], ...]
) -> Callable[[int, NDArray[np.bool_] | None], Cohort]:
    """Return a selection whose secret coins have fallen as prescribed."""

    def selected(index: int, allowed: NDArray[np.bool_] | None) -> Cohort:
        exposed = select(index, allowed).exposed
        return Cohort(np.intersect1d(exposed, np.asarray(kept[index], dtype=np.int64)), exposed)

    return selected


@contextlib.contextmanager
def known_entropy(seed: int) -> Iterator[None]:
    """Let noise and secret coins draw their bytes from a seed instead of `os.urandom`.

    They are drawn by the code that always draws them, wherever it stands: all of it asks
    `fedquilt.common.randomness.secret_bytes`.  Only they: a library that is loaded in the
    first world only, and seeds itself, must not shift the noise of that world.
    """
    bits = generator(seed, "audit entropy").bit_generator

    def known(size: int) -> bytes:
        return np.random.Generator(bits).bytes(size)

    with patch.object(randomness, "os", SimpleNamespace(urandom=known)):
        yield
