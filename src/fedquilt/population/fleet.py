"""A fleet of devices: who fills the server's buffer when, in asynchronous rounds; what that costs.

FedBuff (Nguyen et al. 2022): some clients are always at work.  Who is done hands its update to the
server's buffer, and another one begins at the model of that moment; when the buffer holds K
updates, the server releases them and the model moves.  A round is one such flush, whose cohort are
its K contributions, each from the model of tau releases ago.

The clock is simulated.  Client i takes s_i seconds, s_i = exp(spread z_i) with z_i normal and
drawn once: half of all devices are slower than one second.  Who begins is drawn among those who
are available in the round of that moment, who are neither at work nor in the buffer.  All of it
follows from options and the seed and nothing from data, as participation does: so cohorts, ages
and times are public, and a claim about rounds holds for these as it stands.

A table (`--energy FILE.csv`) says of each client what one round costs it in joules, and, where it
has a battery, how much that holds and how much a charger puts into it in a round:

    client,joules,battery,charge
    0,120,4000,30

Batteries begin full.  With less in it than a round costs, a client is not there.  All of it
follows from the table and from who took part, both public: no client's data decide anything.
"""

from __future__ import annotations

import csv
import heapq
import io
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.common import untrusted
from fedquilt.common.errors import DataError, InvalidValueError
from fedquilt.common.formatting import shortened
from fedquilt.common.randomness import generator
from fedquilt.population import Cohort, CohortSelector, ParticipationTracker, checked_ids

MOST_STALE = 10
"""Releases after which a contribution is thrown away: the server keeps so many models."""


def device_seconds(num_clients: int, spread: float, seed: int) -> NDArray[np.float64]:
    """Return how long each client takes for a round."""
    return np.exp(spread * generator(seed, "devices").standard_normal(num_clients))


@dataclass(frozen=True, eq=False)
class Flush:
    """The contributions of a buffer: who, how many releases ago they began, and when it is full."""

    clients: NDArray[np.int64]
    ages: dict[int, int]
    seconds: float


class BufferedSelector(CohortSelector):
    """Step 1 of asynchronous rounds."""

    def __init__(
        self,
        *given: Any,
        buffer_size: int,
        in_flight: int,
        seconds: NDArray[np.float64],
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self.size, self._in_flight, self._seconds = buffer_size, in_flight, seconds
        self.arrived: Callable[[int], Sequence[int]] | None = None
        self._flushes: list[Flush] = []
        self._clock = 0.0
        self._at_work: list[tuple[float, int, int]] = []  # done at, client, begun at release

    @property
    def expected_cohort(self) -> float:
        """A full buffer."""
        return float(self.size)

    mean_cohort = expected_cohort

    def select(
        self, round_index: int, allowed: NDArray[np.bool_] | None = None, *, gather: bool = True
    ) -> Cohort:
        """Return who is in the buffer of a round; of those, who may be."""
        if self.arrived is None:
            clients = self.flush(round_index).clients
        else:
            clients = np.array(self.arrived(round_index), dtype=np.int64)
        picked = clients if allowed is None else clients[allowed[clients]]
        return Cohort(picked, picked)

    def flush(self, round_index: int) -> Flush:
        """Return the buffer of a round."""
        while len(self._flushes) <= round_index:
            self._flushes.append(self._fill(len(self._flushes)))
        return self._flushes[round_index]

    def _fill(self, now: int) -> Flush:
        """Simulate until the buffer of release `now` is full, or nobody is at work."""
        draws = generator(self.seed, "arrivals", now)
        there = self.available(now)
        ages: dict[int, int] = {}
        while len(ages) < self.size:
            busy = {client for _, client, _ in self._at_work} | set(ages)
            for client in self.beginning(draws, there, busy, len(self._at_work)):
                done = self._clock + float(self._seconds[client])
                heapq.heappush(self._at_work, (done, client, now))
            if not self._at_work:
                break
            self._clock, client, begun = heapq.heappop(self._at_work)
            if now - begun <= MOST_STALE:
                ages[client] = now - begun
        return Flush(np.array(sorted(ages), dtype=np.int64), ages, self._clock)

    def beginning(
        self,
        draws: np.random.Generator,
        there: NDArray[np.int64],
        busy: Collection[int],
        at_work: int,
    ) -> list[int]:
        """Draw who begins now, of those who are there and not busy, beside so many at work."""
        waiting = np.array([one for one in there.tolist() if one not in busy], dtype=np.int64)
        room = max(0, min(self._in_flight - at_work, len(waiting)))
        picked: list[int] = draws.choice(waiting, size=room, replace=False).tolist()
        return picked


@dataclass(frozen=True, eq=False)
class EnergyTable:
    """Of each client the joules of a round, of its battery (inf: mains), and a round's charge."""

    joules: NDArray[np.float64]
    battery: NDArray[np.float64]
    charge: NDArray[np.float64]


def load_energy(path: str | Path | None, num_clients: int) -> EnergyTable:
    """Read a table of energy; without one a round costs everybody one joule, from the mains."""
    ones = np.ones(num_clients)
    table = EnergyTable(ones.copy(), np.full(num_clients, math.inf), 0.0 * ones)
    if path is None:
        return table
    seen: set[int] = set()
    try:
        content = untrusted.read_named(path, untrusted.TABLE_BYTES).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(content, newline=""))
        if not {"client", "joules"} <= set(reader.fieldnames or ()):
            raise DataError(f"{path}: expected a header with 'client' and 'joules'")
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            client = _number(row["client"], "client", where)
            if client != int(client) or client >= num_clients or int(client) in seen:
                raise DataError(f"{where}: client={client:g} must be a new one < {num_clients}")
            seen.add(int(client))
            for name in ("joules", "battery", "charge"):
                if row.get(name):
                    getattr(table, name)[int(client)] = _number(row[name], name, where)
    except OSError as error:
        raise InvalidValueError(f"energy={str(path)!r} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV text file: {error}") from error
    if len(seen) != num_clients:
        raise DataError(f"{path}: {len(seen)} clients must be all {num_clients}")
    return table


def _number(text: str | None, name: str, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e12:
        raise DataError(f"{where}: {name}={shortened(text)} must be a number from 0 to 1e12")
    return value


class EnergyTracker(ParticipationTracker):
    """Counts joins and what they cost: `spent` joules of each client, `level` of batteries."""

    def __init__(self, table: EnergyTable, ema: float | None = None) -> None:
        self.table = table
        super().__init__(len(table.joules), ema)

    def reset(self) -> None:
        """Forget all rounds: batteries are full."""
        super().reset()
        self.spent: NDArray[np.float64] = np.zeros(self.num_clients)
        self.level: NDArray[np.float64] = self.table.battery.copy()

    def update(self, participating_clients: Iterable[int]) -> None:
        """Count a round: who joined spends, then all chargers charge."""
        ids = checked_ids(participating_clients, self.num_clients)
        super().update(ids)
        self.spent[ids] += self.table.joules[ids]
        self.level[ids] -= self.table.joules[ids]
        self.level = np.minimum(self.level + self.table.charge, self.table.battery)

    @property
    def ready(self) -> NDArray[np.bool_]:
        """Who has enough for a round."""
        return self.level >= self.table.joules

    def report(self) -> dict[str, Any]:
        """Return the joules of all clients so far."""
        return {"joules": float(self.spent.sum())}

    def state(self) -> dict[str, NDArray[Any]]:
        """Return counters, what was spent and what batteries hold."""
        finite = np.where(np.isfinite(self.level), self.level, -1.0)  # -1: mains
        return {**super().state(), "spent": self.spent.copy(), "level": finite}

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Take over what `state` returned."""
        for name in ("spent", "level"):
            if state[name].shape != (self.num_clients,):
                raise InvalidValueError(f"{name} must have one entry for each client")
        super().load_state(state)
        self.spent = np.array(state["spent"], dtype=np.float64)
        self.level = np.where(state["level"] < 0, math.inf, state["level"])
