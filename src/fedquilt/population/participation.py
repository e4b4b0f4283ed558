"""The participation history: who joined how often.

`ParticipationTracker` is the class of the QuAP-FL API document, with the moving average of
the QuAP-FL paper (eq. 3).  It is an array of counters, so a population of a million clients
costs a few megabytes and a round costs the size of its cohort.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError


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
