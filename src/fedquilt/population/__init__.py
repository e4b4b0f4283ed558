"""Who takes part: availability, selection, participation history.

Availability is the client's doing, not the server's: it is modelled here as a
coin per client and round, independent over both, and is never a source of
privacy amplification.

| kind | client i is available in round t |
|---|---|
| `beta` | with probability q_i, where q_i ~ Beta(2, 5) is drawn once: a long tail |
| `uniform` | with probability 2/7, the mean of Beta(2, 5), the same for everybody |
| `always` | in every round |
| a trace | when the trace file lists it |

`CohortSelector` picks the cohort among those who are available.  `ParticipationTracker` counts
who joined how often; it is the class of the QuAP-FL API document, with the moving average of the
QuAP-FL paper (eq. 3).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.common import checks, untrusted
from fedquilt.common.errors import DataError, InvalidValueError
from fedquilt.common.formatting import shortened
from fedquilt.common.randomness import generator, secret_bytes
from fedquilt.config.choices import AVAILABILITIES, SELECTIONS

__all__ = [
    "Availability",
    "Cohort",
    "CohortSelector",
    "ParticipationTracker",
    "load_trace",
    "poisson_cohort",
    "propensities",
    "select_cohort",
]

_MOST_DIGITS = 18  # of the number of a round or a client

BETA_A, BETA_B = 2.0, 5.0
UNIFORM_PROBABILITY = BETA_A / (BETA_A + BETA_B)


def propensities(
    num_clients: int, rng: np.random.Generator, a: float = BETA_A, b: float = BETA_B
) -> NDArray[np.float64]:
    """Draw how likely each client is to be there, q_i ~ Beta(a, b)."""
    return rng.beta(a, b, size=num_clients)


@dataclass(frozen=True)
class Availability:
    """The availability of a whole population.

    Exactly one of the two fields decides: `trace` when it is given, else the
    coin with the clients' `probabilities` (None: always there).
    """

    num_clients: int
    probabilities: NDArray[np.float64] | None = None
    trace: dict[int, NDArray[np.int64]] | None = field(default=None, repr=False)

    @classmethod
    def make(cls, kind: str, num_clients: int, draws: NDArray[np.float64]) -> Availability:
        """Build it from the `availability` option; `draws` are the propensities."""
        if kind == "always":
            return cls(num_clients)
        if kind == "beta":
            return cls(num_clients, draws)
        if kind == "uniform":
            return cls(num_clients, np.full(num_clients, UNIFORM_PROBABILITY))
        if kind.endswith(".csv"):
            return cls(num_clients, trace=load_trace(kind, num_clients))
        hint = checks.did_you_mean(kind, AVAILABILITIES)
        named = ", ".join(map(repr, AVAILABILITIES))
        raise InvalidValueError(f"availability={kind!r} must be {named} or a FILE.csv{hint}")

    @property
    def expected_rate(self) -> float:
        """The mean presence that an operator expects, from public knowledge.

        For the coins it is the mean of their law, 2/7, not of the drawn
        probabilities, which no server knows.
        """
        if self.trace is not None:
            rounds = 1 + max(self.trace, default=0)
            present = sum(len(clients) for clients in self.trace.values())
            return min(1.0, max(present, 1) / (rounds * self.num_clients))
        return 1.0 if self.probabilities is None else UNIFORM_PROBABILITY

    def expected_within(self, rounds: int, coin: float = 1.0) -> float:
        """Return the share that an operator expects to come at least once in some rounds.

        Of whom a coin keeps each time with probability c: 1 - E[(1 - c q)^w], with q of the
        public law; for Beta(2, 5) and c = 1 that is 1 - 30 / ((w + 5) (w + 6)).  A trace is cut
        into windows of w rounds and counted.
        """
        if rounds == 1:
            return self.expected_rate * coin
        if self.trace is not None:
            windows = -(-(1 + max(self.trace, default=0)) // rounds)
            came = {(t // rounds, i) for t, there in self.trace.items() for i in there.tolist()}
            return min(1.0, max(len(came), 1) / (windows * self.num_clients)) * coin
        if self.probabilities is None:
            return 1.0 - (1.0 - coin) ** rounds
        if self.is_uniform:
            return 1.0 - (1.0 - coin * UNIFORM_PROBABILITY) ** rounds
        q = (np.arange(10_000) + 0.5) / 10_000  # midpoints: right to eight digits
        density = 30.0 * q * (1.0 - q) ** 4
        return 1.0 - float(np.mean(density * (1.0 - coin * q) ** rounds))

    @property
    def is_uniform(self) -> bool:
        """Whether everybody has the same coin."""
        coins = self.probabilities
        return coins is not None and bool(np.all(coins == UNIFORM_PROBABILITY))

    def within(self, rounds: int) -> Availability:
        """Return the availability of windows of so many rounds, by clients' own coins."""
        if rounds == 1:
            return self
        if self.trace is not None:
            windows: dict[int, list[NDArray[np.int64]]] = {}
            for index in sorted(self.trace):
                windows.setdefault(index // rounds, []).append(self.trace[index])
            trace = {k: np.unique(np.concatenate(there)) for k, there in windows.items()}
            return Availability(self.num_clients, trace=trace)
        coins = self.probabilities
        return Availability(self.num_clients, None if coins is None else 1 - (1 - coins) ** rounds)

    def mean_present(self, limit: int) -> float:
        """Return how many are there in a round on average, at most `limit` counted.

        For coins, the sum of many of which is nearly normal with mean m and deviation s:
        E[min(X, L)] = m - s (phi(a) - a (1 - Phi(a))) with a = (L - m) / s.
        """
        if self.trace is not None:
            rounds = 1 + max(self.trace, default=0)
            return sum(min(limit, len(clients)) for clients in self.trace.values()) / rounds
        if self.probabilities is None:
            return float(min(limit, self.num_clients))
        mean = float(self.probabilities.sum())
        deviation = math.sqrt(float(np.sum(self.probabilities * (1 - self.probabilities))))
        if deviation == 0:
            return min(float(limit), mean)
        a = (limit - mean) / deviation
        density = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
        return mean - deviation * (density - a * math.erfc(a / math.sqrt(2)) / 2)

    def available(self, round_index: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the ids of the clients that are there, ascending."""
        if self.trace is not None:
            return self.trace.get(round_index, np.zeros(0, dtype=np.int64))
        if self.probabilities is None:
            return np.arange(self.num_clients, dtype=np.int64)
        return np.flatnonzero(rng.random(self.num_clients) < self.probabilities)


def load_trace(path: str | Path, num_clients: int) -> dict[int, NDArray[np.int64]]:
    """Read a CSV trace: a header `round,client`, then one line per presence.

    Rounds count from 0.  A round without a line has nobody.
    """
    present: dict[int, set[int]] = {}
    try:
        content = untrusted.read_named(path, untrusted.TABLE_BYTES)
        with io.StringIO(content.decode("utf-8-sig"), newline="") as stream:
            reader = csv.DictReader(stream)
            if reader.fieldnames is None or not {"round", "client"} <= set(reader.fieldnames):
                raise DataError(f"{path}: expected a header with 'round' and 'client'")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                round_index = _whole(row["round"], "round", where)
                client = _whole(row["client"], "client", where)
                if client >= num_clients:
                    raise DataError(f"{where}: client={client} must be < num_clients={num_clients}")
                present.setdefault(round_index, set()).add(client)
    except OSError as error:
        raise InvalidValueError(
            f"availability={str(path)!r} cannot be read: {error.strerror}"
        ) from error
    except (ValueError, csv.Error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not a CSV text file: {error}") from error
    return {
        index: np.asarray(sorted(clients), dtype=np.int64) for index, clients in present.items()
    }


def _whole(text: str | None, name: str, where: str) -> int:
    """Return a field of the trace as a number >= 0, or raise naming the line."""
    plain = (text or "").strip()
    if not plain.isdecimal() or len(plain) > _MOST_DIGITS:
        raise DataError(f"{where}: {name}={shortened(text)} must be a whole number >= 0")
    return int(plain)


def select_cohort(
    available: NDArray[np.int64],
    limit: int,
    rng: np.random.Generator,
    weights: NDArray[np.float64] | None = None,
) -> NDArray[np.int64]:
    """Pick at most `limit` of the available clients, without replacement.

    With weights the chance of each next pick is proportional to the weight of
    those left.  Drawing E_i ~ Exp(1) and keeping the smallest E_i / w_i gives
    exactly that law (Efraimidis and Spirakis 2006) in linear time.  The cohort
    is returned in ascending order, so sums over it do not depend on the draw.
    """
    if limit >= available.size:
        return available.copy()
    if weights is None:
        return np.sort(rng.choice(available, size=limit, replace=False, shuffle=False))
    if weights.shape != available.shape or not np.all(weights > 0):
        raise InvalidValueError("weights must be one positive number per available client")
    keys = rng.standard_exponential(available.size) / weights
    picked = np.argpartition(keys, limit - 1)[:limit]
    return np.sort(available[picked])


def poisson_cohort(
    available: NDArray[np.int64], probability: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Keep each available client with an independent coin; the cohort size varies."""
    return available[rng.random(available.size) < probability]


@dataclass(frozen=True, eq=False)
class Cohort:
    """Who trains in a round, and who is publicly known to have been exposed.

    The two are the same unless the server's coin is secret: then `exposed` are the
    available clients, and who of them trained is nobody's business.
    """

    clients: NDArray[np.int64]
    exposed: NDArray[np.int64]

    @property
    def is_secret(self) -> bool:
        """Whether who trains is nobody's business; by the arrays, never by what is in them."""
        return self.clients is not self.exposed


class CohortSelector:
    """Step 1 of a round: availability, then selection, from the run's seed.

    `uniform` and `weighted` pick at most `limit` clients, the latter in
    proportion to the clients' propensities; `energy` picks those that have `spent` least, equal
    ones by a draw; `poisson` keeps each available
    client with the coin limit / num_clients.  A `secret` coin is drawn from the
    operating system, not from the seed, and is the only thing that amplifies
    privacy: `sampling_rate` says by how much, so that whoever accounts for a run
    asks its sampler.

    With `window` w > 1 a cohort is gathered over w rounds of availability and selection, of
    `num_rounds` in all: cohort k holds who was picked in one of the rounds kw to kw + w - 1, and
    nobody twice, as who was picked is not there for the rest of the window.  The model stands
    still meanwhile, so it is one round of the federation, with one plan, one sum and one
    release, and everything that is proved of a round holds for it as it stands: client i has
    one vector within its clip c_i in the one sum of the window, which moves by at most c_i and
    costs (c_i / s)^2, once, however often the client was there.
    """

    def __init__(
        self,
        availability: Availability,
        propensity: NDArray[np.float64],
        *,
        rule: str,
        limit: int,
        seed: int,
        secret: bool = False,
        window: int = 1,
        num_rounds: int | None = None,
    ) -> None:
        if secret and window != 1:
            raise InvalidValueError(f"rounds_per_release={window} must be 1 for amplification")
        if secret and rule != "poisson":
            raise InvalidValueError(
                f"selection={rule!r} must be 'poisson' for amplification: "
                "no other rule is an independent coin"
            )
        self.availability = availability
        self.rule = checks.choice("selection", rule, SELECTIONS)
        self.limit = limit
        self.seed = seed
        self.secret = secret
        self.window = checks.integer("rounds_per_release", window, at_least=1)
        self._num_rounds = num_rounds
        self.spent: Callable[[], NDArray[np.float64]] | None = None
        # A weight of zero would bar a client for ever.
        self._weights = np.maximum(propensity, 1e-9) if rule == "weighted" else None

    @property
    def sampling_rate(self) -> float:
        """The probability of the secret coin; 1 when nothing amplifies."""
        return self._coin if self.secret else 1.0

    @property
    def _coin(self) -> float:
        return self.limit / self.availability.num_clients

    @property
    def expected_cohort(self) -> float:
        """How many clients a round has on average, from public knowledge alone."""
        if self.window > 1:
            coin = self._coin if self.rule == "poisson" else 1.0
            share = self.availability.expected_within(self.window, coin)
            most = float(self.availability.num_clients if coin < 1 else self.window * self.limit)
            return max(1.0, min(share * self.availability.num_clients, most))
        present = self.availability.expected_rate * self.availability.num_clients
        if self.rule == "poisson":
            return max(1.0, present * self._coin)
        return max(1.0, min(present, float(self.limit)))

    @property
    def mean_cohort(self) -> float:
        """How many clients a simulated round has on average: see `Availability.mean_present`.

        Unlike `expected_cohort` it knows the drawn probabilities, which no server does, and
        that a limit only ever takes away; it is for people to read.
        """
        if self.rule != "poisson":
            return self.availability.within(self.window).mean_present(self.window * self.limit)
        everybody = self.availability.num_clients
        if self.window == 1 or self.availability.trace is not None:
            return self.availability.within(self.window).mean_present(everybody) * self._coin
        coins = self.availability.probabilities
        kept = np.full(everybody, self._coin) if coins is None else coins * self._coin
        return Availability(everybody, kept).within(self.window).mean_present(everybody)

    def _rounds_of(self, index: int) -> range:
        """Return the rounds of a window; the last one may be shorter."""
        first = index * self.window
        last = first + self.window
        return range(first, last if self._num_rounds is None else min(last, self._num_rounds))

    def available(self, round_index: int) -> NDArray[np.int64]:
        """Return who is there in a round, picked or not; at the end of a window, in its last."""
        last = self._rounds_of(round_index)[-1]
        return self.availability.available(last, generator(self.seed, "select", last))

    def _gather(self, window_index: int, allowed: NDArray[np.bool_] | None) -> Cohort:
        """Return whom the rounds of a window pick, ascending."""
        count = self.availability.num_clients
        waiting = np.ones(count, dtype=np.bool_) if allowed is None else allowed.copy()
        before = waiting.copy()
        for index in self._rounds_of(window_index):
            waiting[self.select(index, waiting, gather=False).clients] = False
        picked = np.flatnonzero(before & ~waiting)
        return Cohort(picked, picked)

    def select(
        self, round_index: int, allowed: NDArray[np.bool_] | None = None, *, gather: bool = True
    ) -> Cohort:
        """Return the cohort of a round or window, ascending; `allowed` masks who may be picked."""
        if self.window > 1 and gather:
            return self._gather(round_index, allowed)
        rng = generator(self.seed, "select", round_index)
        available = self.availability.available(round_index, rng)
        if allowed is not None:
            available = available[allowed[available]]
        if self.secret:
            return Cohort(available[secret_coins(available.size) < self._coin], available)
        if self.rule == "poisson":
            picked = poisson_cohort(available, self._coin, rng)
        elif self.rule == "energy" and self.spent is not None:
            order = np.lexsort((rng.random(available.size), self.spent()[available]))
            picked = np.sort(available[order[: self.limit]])
        else:
            weights = None if self._weights is None else self._weights[available]
            picked = select_cohort(available, self.limit, rng, weights)
        return Cohort(picked, picked)


def secret_coins(size: int) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1) from the operating system's generator."""
    bits = np.frombuffer(secret_bytes(8 * size), dtype=np.uint64) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


class ParticipationTracker:
    """Count joins and turn them into participation rates.

    The rate of client i after t rounds is k_i(t) / t (paper, eq. 2), or with
    `ema=eta` the moving average p_i(t) = eta * [i in S_t] + (1 - eta) * p_i(t - 1)
    with p_i(0) = 0 (eq. 3).

    The moving average decays for everybody in every round.  It is kept lazily:
    the stored value belongs to the round of the client's last join, and the
    factor (1 - eta) ** (rounds since) is applied when it is read.

    Parameters
    ----------
    num_clients : int
        Size of the population; ids are 0 .. num_clients - 1.
    ema : float, optional
        eta in (0, 1] of the moving average; absent means the cumulative rate.
    """

    def __init__(self, num_clients: int, ema: float | None = None) -> None:
        self.num_clients = checks.integer("num_clients", num_clients, at_least=1)
        self.ema = None if ema is None else checks.number("ema", ema, above=0, at_most=1)
        self.reset()

    def reset(self) -> None:
        """Forget all rounds."""
        self.total_rounds = 0
        self.participation_count: NDArray[np.float64] = np.zeros(self.num_clients)
        self._ema_value: NDArray[np.float64] | None = None
        self._ema_round: NDArray[np.int64] | None = None
        if self.ema is not None:
            self._ema_value = np.zeros(self.num_clients)
            self._ema_round = np.zeros(self.num_clients, dtype=np.int64)

    def update(self, participating_clients: Iterable[int]) -> None:
        """Count one round in which exactly these clients joined.

        An id out of range, an id that is no whole number or a repeated id is a
        `ValueError`, and then nobody is counted.
        """
        ids = checked_ids(participating_clients, self.num_clients)
        self.total_rounds += 1
        self.participation_count[ids] += 1.0
        if self.ema is not None:
            assert self._ema_value is not None
            assert self._ema_round is not None
            self._ema_value[ids] = self.ema + (1.0 - self.ema) * self._decayed(
                ids, self.total_rounds - 1
            )
            self._ema_round[ids] = self.total_rounds

    def get_participation_rate(self, client_id: int) -> float:
        """Return the rate of one client; 0.0 before the first round."""
        client = checks.integer("client_id", client_id, at_least=0, at_most=self.num_clients - 1)
        return float(self.rates(np.asarray([client]))[0])

    def get_all_participation_rates(self) -> NDArray[np.float64]:
        """Return the rates of all clients, in id order."""
        return self.rates(slice(None))

    def rates(self, ids: NDArray[np.int64] | slice) -> NDArray[np.float64]:
        """Return the rates of some clients."""
        if self.ema is not None:
            return self._decayed(ids, self.total_rounds)
        counts = self.participation_count[ids]
        return np.array(counts / self.total_rounds if self.total_rounds else counts)

    def get_statistics(self) -> dict[str, Any]:
        """Summarise the rates; the keys are those of the QuAP-FL API document."""
        rates = self.get_all_participation_rates()
        joined = int(np.count_nonzero(self.participation_count))
        return {
            "total_rounds": self.total_rounds,
            "mean_participation_rate": float(rates.mean()),
            "std_participation_rate": float(rates.std()),
            "min_participation_rate": float(rates.min()),
            "max_participation_rate": float(rates.max()),
            "participating_clients": joined,
            "never_participated": self.num_clients - joined,
        }

    def report(self) -> dict[str, Any]:
        """Return what a round's line says of who took part so far, beside the cohort."""
        return {}

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the counters as arrays, for a checkpoint."""
        state: dict[str, NDArray[Any]] = {
            "total_rounds": np.asarray([self.total_rounds], dtype=np.int64),
            "participation_count": self.participation_count.copy(),
        }
        if self._ema_value is not None and self._ema_round is not None:
            state |= {"ema_value": self._ema_value.copy(), "ema_round": self._ema_round.copy()}
        return state

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Take over counters that `state` returned."""
        names = ["participation_count"] + ["ema_value", "ema_round"] * (self.ema is not None)
        for name in names:
            if state[name].shape != (self.num_clients,):
                raise InvalidValueError(
                    f"{name} of shape {state[name].shape} must have one entry for each of "
                    f"{self.num_clients} clients"
                )
        self.total_rounds = int(state["total_rounds"][0])
        self.participation_count = np.array(state["participation_count"], dtype=np.float64)
        if self.ema is not None:
            self._ema_value = np.array(state["ema_value"], dtype=np.float64)
            self._ema_round = np.array(state["ema_round"], dtype=np.int64)

    def _decayed(self, ids: NDArray[np.int64] | slice, now: int) -> NDArray[np.float64]:
        assert self.ema is not None
        assert self._ema_value is not None
        assert self._ema_round is not None
        age = now - self._ema_round[ids]
        return np.array(self._ema_value[ids] * (1.0 - self.ema) ** age)


def checked_ids(clients: Iterable[Any], num_clients: int) -> NDArray[np.int64]:
    """Return client ids as an array, or raise for one that is foreign or listed twice."""
    return checks.indices("clients", clients, num_clients, unique=True)
