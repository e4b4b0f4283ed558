"""Who is there in a round.

Availability is the client's doing, not the server's: it is modelled here as a
coin per client and round, independent over both, and is never a source of
privacy amplification.

| kind | client i is available in round t |
|---|---|
| `beta` | with probability q_i, where q_i ~ Beta(2, 5) is drawn once: a long tail |
| `uniform` | with probability 2/7, the mean of Beta(2, 5), the same for everybody |
| `always` | in every round |
| a trace | when the trace file lists it |
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedquilt.common import checks, untrusted
from fedquilt.common.errors import DataError, InvalidValueError
from fedquilt.common.printable import shortened
from fedquilt.config.choices import AVAILABILITIES

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
