"""One federated round, top to bottom.

The nine steps of the seed documents, in their order; the order is part of the
contract.  Every way of running fedquilt - the command line, `fedquilt.run`, the
seed's `QuAPFLServer` - goes through `run_round`.  The leaves it joins know
nothing of one another:

    population   who takes part and how often they did
    learning     what a client does with its data
    privacy      what happens to an update before anybody else sees it
    aggregation  how the mean update moves the model
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.aggregation import RunningMean, ServerOptimizer
from fedquilt.learning import ClientUpdate, Engine
from fedquilt.population import ParticipationTracker
from fedquilt.privacy.mechanism import Contribution, Mechanism, NoiseReport, RoundFacts

Select = Callable[[int], NDArray[np.int64]]


@dataclass
class Federation:
    """The parts of a federation and its state between two rounds."""

    select: Select
    tracker: ParticipationTracker
    engine: Engine
    mechanism: Mechanism
    server: ServerOptimizer
    learning_rate_at: Callable[[int], float]
    weights: torch.Tensor

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the next round needs beside the weights, as arrays; never noise."""
        parts = {
            "tracker": self.tracker.state(),
            "mechanism": self.mechanism.state(),
            "server": self.server.state(),
        }
        return {f"{part}.{key}": value for part, s in parts.items() for key, value in s.items()}

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Take over what `state` returned."""

        def part(name: str) -> dict[str, NDArray[Any]]:
            prefix = f"{name}."
            return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}

        self.tracker.load_state(part("tracker"))
        self.mechanism.load_state(part("mechanism"))
        self.server.load_state(part("server"), self.weights.device)


@dataclass
class RoundRecord:
    """What happened in a round."""

    round: int
    cohort: list[int]
    train_loss: float | None = None
    clip_value: float | None = None
    noise: NoiseReport = field(default_factory=NoiseReport)
    non_finite: list[int] = field(default_factory=list)


def run_round(federation: Federation, round_index: int) -> RoundRecord:
    """Run steps 1 to 8 and move `federation` on; the caller evaluates (step 9)."""
    # 1 select
    cohort = federation.select(round_index)

    # 2 participation: the history counts the cohort before any noise depends on it
    federation.tracker.update(cohort)
    record = RoundRecord(round_index, [int(client) for client in cohort])
    if len(cohort) == 0:
        return record  # nobody was there: the model stays as it is

    learning_rate = federation.learning_rate_at(round_index)
    mechanism = federation.mechanism
    mechanism.open_round(
        RoundFacts(round_index, learning_rate, cohort, federation.tracker.rates(cohort))
    )

    # 3 local training, one client at a time unless the clip bound needs them all
    losses: list[float] = []
    updates = federation.engine.train(federation.weights, cohort, round_index, learning_rate)
    received: Iterable[Contribution] = _receive(mechanism, updates, losses)
    if mechanism.needs_whole_cohort:
        received = list(received)

    # 4 clip bound
    record.clip_value = mechanism.clip_bound(received)

    # 5 clip, 6 noise (where a mode noises each client), 7 sum
    total = RunningMean(federation.weights.numel(), federation.weights.device)
    for contribution in received:
        if not contribution.finite:
            record.non_finite.append(contribution.client)
        noised = mechanism.noise_client(mechanism.clip(contribution))
        if noised.weight:
            total.add(noised.vector, noised.weight)

    # 6, 7 noise on the sum, division by the number of clients
    update, record.noise = mechanism.release(total.total, total.weight)

    # 8 update
    federation.weights = federation.server.step(federation.weights, update)
    record.train_loss = float(np.mean(losses))
    return record


def _receive(
    mechanism: Mechanism, updates: Iterable[ClientUpdate], losses: list[float]
) -> Iterator[Contribution]:
    """Hand each update to the mechanism as it arrives, noting its training loss."""
    for update in updates:
        losses.append(update.loss)
        yield mechanism.receive(update.client, update.delta, update.num_examples)
