"""All ways of a work in turns."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.bench.ways import EngineWay, PeerWay, PlainLoop, Way, python_of
from benchmarks.bench.work import Work
from fedquilt.common.errors import FedquiltError, InvalidValueError

ENGINES = ("sequential", "batched", "processes", "auto")
PEERS = {
    "pfl-research, one process": ("pfl", "pfl_research.py", ["1"]),
    "pfl-research, two processes": ("pfl", "pfl_research.py", ["2"]),
    "Flower's simulation": ("flower", "flower_simulation.py", ["2"]),
    "fluke": ("fluke", "fluke_federation.py", []),
    "FedLab": ("fedlab", "fedlab_serial.py", []),
}
"""Other frameworks: environment, script in `benchmarks/peers`, options."""


@dataclass
class Measured:
    """What one way took: seconds of each round but the first, accuracy after all of them."""

    name: str
    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    accuracy: float | None = None
    note: str = ""

    @property
    def median(self) -> float:
        """The median of the rounds' seconds."""
        return statistics.median(self.seconds)

    @property
    def samples_a_second(self) -> float:
        """The median of the rounds' samples a second."""
        pairs = zip(self.samples, self.seconds, strict=True)
        return statistics.median(samples / seconds for samples, seconds in pairs)


def measure(
    work: Work,
    *,
    peers: Path | None = None,
    scripts: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    only: tuple[str, ...] = (),
) -> list[Measured]:
    """Let all ways take turns over the rounds of a work.

    Parameters
    ----------
    peers : Path, optional
        The folder of the other frameworks' environments; `benchmarks/peers/install.py` makes it.
    scripts : Path, optional
        The folder of their scripts, `benchmarks/peers`.
    say : callable
        Told how far it has come.
    only : tuple of str
        The names of the ways; all by default.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = work.write(folder)
        makers = _makers(work, file, peers, scripts)
        unknown = set(only) - set(makers)
        if unknown:
            raise InvalidValueError(
                f"only={min(unknown)!r} must be one of {', '.join(map(repr, makers))}"
            )
        ways: dict[str, Way] = {}
        rows: list[Measured] = []
        for name, make in makers.items():
            if only and name not in only:
                continue
            say(f"{work.name}: {name} begins")
            row = Measured(name)
            rows.append(row)
            try:
                ways[name] = make()
            except FedquiltError as error:
                row.note = f"left out: {error}"
                continue
            stack.callback(ways[name].close)
            row.note = getattr(ways[name], "note", "")
        _take_turns(work, ways, {row.name: row for row in rows}, say)
    return rows


# Threads of the way before may still wait for work on a core, each library for as long as it likes.
_PAUSE = 0.05


def _take_turns(
    work: Work, ways: dict[str, Way], rows: dict[str, Measured], say: Callable[[str], None]
) -> None:
    for index in range(len(work.cohorts)):
        say(f"{work.name}: round {index + 1} of {len(work.cohorts)}")
        for name, way in list(ways.items()):
            time.sleep(_PAUSE)
            try:
                seconds = way.round(index)
            except FedquiltError as error:
                rows[name].note = f"ended: {error}"
                del ways[name]
                continue
            if index:
                rows[name].seconds.append(seconds)
                rows[name].samples.append(work.samples(index))
    for name, way in ways.items():
        try:
            rows[name].accuracy = way.accuracy()
        except FedquiltError as error:  # the others' figures are not lost
            rows[name].note = f"no accuracy: {error}"


def _makers(
    work: Work, file: Path, peers: Path | None, scripts: Path | None
) -> dict[str, Callable[[], Way]]:
    threads = torch.get_num_threads()
    makers: dict[str, Callable[[], Way]] = {
        f"plain loop, one process of {threads} thread(s)": lambda: PlainLoop(work, file, 1),
        "plain loop, two processes": lambda: PlainLoop(work, file, 2),
    }
    for name in ENGINES:
        makers[f"engine {name}"] = lambda name=name: EngineWay(name, work)  # type: ignore[misc]
    if peers is None:
        return makers
    place = Path("benchmarks/peers") if scripts is None else scripts
    for name, (environment, script, options) in PEERS.items():
        python = python_of(peers / environment)
        if python.exists():
            makers[name] = lambda python=python, script=script, options=options: PeerWay(  # type: ignore[misc]
                python, place / script, file, options
            )
    return makers
