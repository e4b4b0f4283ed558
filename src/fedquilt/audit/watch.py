"""A whole run through the public entry, watched from inside and seen from outside.

`fedquilt.run` does what it always does: engine, ledger, folder, observer.  Two things are
exchanged while it runs.  The operating system's random bytes come from a seed, so that
noise and secret coins are the same in two worlds, and still count as secret.  And after
every round the run is watched: what it released, what that was charged as; then it takes
over what the base world has released, so that all worlds have the same public history and
everything that is computed from releases is the same in them.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt import experiment
from fedquilt.audit import checks
from fedquilt.audit.public import Recorder, Values, folder_values, renamed
from fedquilt.audit.worlds import Witness, World
from fedquilt.errors import FedquiltError
from fedquilt.randomness import generator
from fedquilt.round import Federation, RoundRecord


@dataclass(frozen=True, eq=False)
class WatchedRound:
    """One round: the sum it released in the units of the clip, and what it declared.

    `declared` is how far each client may move the sum, `fraction` what a private
    quantile has released, None without one, `spoilt` whose updates were not finite and
    counted as nothing.  The rest is what another world takes over.
    """

    released: torch.Tensor | None
    declared: NDArray[np.float64]
    fraction: float | None
    fraction_declared: float
    spoilt: tuple[int, ...]
    shown: dict[str, Any]
    weights: torch.Tensor
    mechanism: dict[str, NDArray[Any]]
    server: dict[str, NDArray[Any]]


@dataclass(eq=False)
class Seen:
    """A run as anybody saw it, and the rounds as only the audit did.

    `error` is the message a run ended with, which is as public as its files.
    """

    rounds: list[WatchedRound] = field(default_factory=list)
    public: Values = field(default_factory=dict)
    from_release: Values = field(default_factory=dict)
    error: str | None = None


def watched_run(
    arguments: tuple[Any, ...],
    settings: dict[str, Any],
    seed: int,
    base: Seen | None = None,
    ledger: Path | None = None,
) -> Seen:
    """Run `fedquilt.run(*arguments, **settings)` and return all that was seen of it."""
    seen, recorder, printed = Seen(), Recorder(), io.StringIO()
    watch = _Watch(seen.rounds, [] if base is None else base.rounds)
    result = None
    with (
        known_entropy(seed),
        swapped(experiment, "run_round", watch.run_round),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        try:
            result = experiment.run(*arguments, observer=recorder, **settings)
        except FedquiltError as error:
            seen.error = f"{type(error).__name__}: {error}"
    told: Values = {
        "observer": recorder.told,
        "printed": printed.getvalue(),
        "warnings": [str(warning.message) for warning in warned],
        "error": seen.error,
        "rounds": [one.shown for one in seen.rounds],
    }
    folder = None
    if result is not None:
        folder = result.folder
        told |= {"summary": result.summary(), "statement": result.statement.as_text()}
        told["model"] = {
            name: tensor.cpu().numpy().tobytes() for name, tensor in result.state_dict.items()
        }
    if folder is not None:
        seen.public, seen.from_release = folder_values(folder, ledger)
    seen.public |= renamed(told, folder)
    return seen


class _Watch:
    """Stands in the place of `run_round` and calls it."""

    def __init__(self, rounds: list[WatchedRound], base: list[WatchedRound]) -> None:
        self._rounds = rounds
        self._base = base
        self._world: World | None = None

    def run_round(self, federation: Federation, round_index: int) -> RoundRecord:
        """Run a round, note it, and take over what the base world has released."""
        if self._world is None:
            if federation.account is None:
                raise FedquiltError("a run without an account declares nothing to audit")
            federation.server = server = Witness(federation.server)
            self._world = World(federation, server, federation.account, None, 1.0)
        self._world.run(round_index)
        self._rounds.append(_note(self._world))
        if round_index < len(self._base):
            before = self._base[round_index]
            federation.weights = before.weights.clone()
            federation.mechanism.load_state(before.mechanism)
            federation.server.load_state(before.server, federation.weights.device)
        return self._world.record


def _note(world: World) -> WatchedRound:
    federation, cohort = world.federation, world.record.cohort
    declared = np.zeros(len(world.charges))
    for client in cohort:
        declared[client] = checks.declared_clip(world, client)
    fraction, fraction_declared = checks.released_fraction(world)
    return WatchedRound(
        released=checks.released_sum(world),
        declared=declared,
        fraction=fraction,
        fraction_declared=fraction_declared,
        spoilt=tuple(world.record.non_finite),
        shown=world.public(),
        weights=federation.weights.clone(),
        mechanism=_copied(federation.mechanism.state()),
        server=_copied(federation.server.state()),
    )


def _copied(state: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {key: np.array(value) for key, value in state.items()}


@contextlib.contextmanager
def known_entropy(seed: int) -> Iterator[None]:
    """Let `os.urandom` return bytes from a seed.

    Noise and secret coins are then drawn by the code that always draws them.
    """
    bits = generator(seed, "audit entropy").bit_generator

    def known(size: int) -> bytes:
        return np.random.Generator(bits).bytes(size)

    with swapped(os, "urandom", known):
        yield


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Put something in the place of a function for a while."""
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


@contextlib.contextmanager
def swapped_entry(mapping: MutableMapping[str, str], key: str, value: str) -> Iterator[None]:
    """Put another value under a key for a while."""
    real = mapping.get(key)
    mapping[key] = value
    try:
        yield
    finally:
        if real is None:
            del mapping[key]
        else:
            mapping[key] = real


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: on tensors as small as these, more take longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
