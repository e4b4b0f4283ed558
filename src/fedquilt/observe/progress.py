"""How far a run has come, on the error stream: a bar, or a plain line now and then.

A bar where somebody looks: in a terminal, and in a notebook that has `ipywidgets`.  Elsewhere
(a file, a job of a cluster) a line every so many seconds.  A run that withholds how long its
rounds took says one at every tenth of its rounds instead, and its bar shows no time left:
when lines come would tell what the run does not.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from fedquilt.common.formatting import printable
from fedquilt.common.observer import Observer

SECONDS = 20.0
"""Between two plain lines."""
_LINES = 10
_BESIDE_A_BAR = 75  # columns of a terminal that words and figures take
FEATURES = "features"
"""What a frozen feature extractor makes of all samples, before the first round."""


class _Bar:
    """What owns a bar of rich for as long as a `with` statement lasts."""

    _stream: TextIO
    _bar: Any = None
    _task: Any = None

    def _start(self, label: str, total: int | None, *, in_percent: bool = False) -> None:
        self._bar = _make_bar(self._stream, in_percent=in_percent)
        self._bar.start()
        self._task = self._bar.add_task(label, total=total, accuracy="", doing="")

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Progress(_Bar, Observer):
    """Shows one run; use it in a `with` statement.

    Parameters
    ----------
    label : str
        Names the run.
    stream : text stream, optional
        Where to; the error stream by default.
    every_round : bool
        Say a line after every round where no bar is drawn, with how many took part; not of a
        run that withholds how long its rounds took.
    sink : callable, optional
        Called with every line, which is then not printed; no bar is drawn.
    """

    def __init__(
        self,
        label: str,
        stream: TextIO | None = None,
        *,
        every_round: bool = False,
        sink: Callable[[str], object] | None = None,
    ) -> None:
        self.label = printable(label)
        self._stream = sys.stderr if stream is None else stream
        self._done = 0
        self._accuracy = ""
        self._timed = False
        self._said_at = time.monotonic()
        self._every_round = every_round
        self._sink = sink
        self._limited = False
        self._preparing = self._begun = False

    def __enter__(self) -> Progress:
        if self._sink is None and draws_bars(self._stream):
            self._start(self.label, None)
        return self

    def expects(self, config: Any, lines: Sequence[str]) -> None:
        """Say what the run may expect."""
        self._timed = not config.is_bounded(covered=True)
        self._prepared(config.num_releases)
        for line in lines:
            self._say(line)

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        """Show a finished round; its line holds public values only."""
        self._done, total = line["round"] + 1, config.num_releases
        self._timed = line.get("seconds") is not None
        self._accuracy = headline_of(line) or self._accuracy
        self._say_of_limit(line)
        self._prepared(total)
        if self._bar is not None:
            if not self._timed:
                self._hide_time()
            shown = {"completed": self._done, "total": total, "doing": ""}
            self._bar.update(self._task, accuracy=self._accuracy, **shown)
        elif self._is_due(total):
            found = f", {self._accuracy}" if self._accuracy else ""
            count = len(line.get("cohort", ()))
            joined = f", {count} client{'s' * (count != 1)}" if self._every_round else ""
            self._say(f"round {self._done} of {total}{joined}{found}")

    def working(self, what: str, share: float) -> None:
        """Show what happens within a round, or what is made ready before the first."""
        if self._bar is not None and what == FEATURES:
            self._preparing = True
            self._bar.update(self._task, completed=int(100 * share), total=100, doing=what)
        elif self._bar is not None:
            self._bar.update(self._task, doing=f"{what} {share:4.0%}")
        elif (self._timed or not self._begun) and time.monotonic() - self._said_at >= SECONDS:
            within = f"round {self._done + 1}, " if self._begun else ""
            self._say(f"{within}{what} {share:.0%}")

    def _prepared(self, rounds: int) -> None:
        """Begin the bar anew where it showed what came before the rounds."""
        self._begun = True
        if self._bar is not None and self._preparing:
            self._preparing = False
            fields = {"accuracy": self._accuracy, "doing": ""}
            self._bar.reset(self._task, completed=self._done, total=rounds, **fields)

    def _say_of_limit(self, line: dict[str, Any]) -> None:
        """Say once that max_agg_norm shortens what is applied."""
        scale = line.get("agg_scale")
        if scale is not None and not self._limited:
            self._limited = True
            self._say(
                f"round {self._done}: the noised update is longer than max_agg_norm and is "
                f"shortened to {scale:.2g} of its length, noise and signal alike"
            )

    def _is_due(self, total: int) -> bool:
        if self._timed:
            return self._every_round or time.monotonic() - self._said_at >= SECONDS
        return self._done * _LINES // total > (self._done - 1) * _LINES // total

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        if self._sink is not None:
            self._sink(f"{self.label}: {text}")
        elif self._bar is not None:
            self._bar.console.print(f"{self.label}: {text}", markup=False, highlight=False)
        else:
            print(f"{self.label}: {text}", file=self._stream, flush=True)

    def _hide_time(self) -> None:
        """Show no time left: a run that withholds its seconds would tell them by it."""
        from rich.progress import TimeRemainingColumn

        columns = self._bar.columns
        self._bar.columns = tuple(c for c in columns if not isinstance(c, TimeRemainingColumn))


class RunsProgress(_Bar, Observer):
    """Shows several runs, one after the other: one bar for all, or a line after each.

    Parameters
    ----------
    runs, rounds : int
        How many runs there are, and how many rounds in all of them.
    stream : text stream, optional
        Where to; the error stream by default.
    """

    def __init__(self, runs: int, rounds: int, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._runs, self._rounds = runs, rounds
        self._number = self._done = 0
        self._label = self._measured = ""

    def __enter__(self) -> RunsProgress:
        if draws_bars(self._stream):
            self._start("", self._rounds, in_percent=True)
        return self

    def begin(self, label: str) -> None:
        """Say which run begins."""
        self._number += 1
        self._label, self._measured = printable(label), ""
        if self._bar is not None:
            said = f"run {self._number} of {self._runs}: {self._label}"
            self._bar.update(self._task, description=said, accuracy="")

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        """Show a finished round."""
        self._done += 1
        self._measured = headline_of(line) or self._measured
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, accuracy=self._measured)

    def end(self) -> None:
        """Say that a run has ended."""
        if self._bar is not None:
            return
        found = f": {self._measured}" if self._measured else ""
        line = f"run {self._number} of {self._runs}, {self._label}{found}"
        print(line, file=self._stream, flush=True)


class StepsProgress(_Bar):
    """Shows a work of so many steps with the time left: a bar, or a line every so many seconds.

    Parameters
    ----------
    what : str
        Names the work and its steps, as "audit: case".
    total : int
        How many steps there are.
    stream : text stream, optional
        Where to; the error stream by default.
    shown : bool
        False: say nothing.
    """

    def __init__(
        self, what: str, total: int, stream: TextIO | None = None, *, shown: bool = True
    ) -> None:
        self._what, self._total = printable(what), total
        self._stream = sys.stderr if stream is None else stream
        self._shown = shown
        self._done = self._begun_with = 0
        self._began = self._said_at = time.monotonic()

    def __enter__(self) -> StepsProgress:
        if self._shown and draws_bars(self._stream):
            self._start(self._what, self._total)
        return self

    def start_at(self, done: int) -> None:
        """Say how many steps were done before: they tell nothing about the time left."""
        self._done = self._begun_with = done
        if self._bar is not None:
            self._bar.reset(self._task, completed=done, total=self._total)

    def begin(self, doing: str = "") -> None:
        """Show which step begins."""
        self._show(printable(doing))

    def end(self) -> None:
        """Count a step as done."""
        self._done += 1
        self._show("")

    def _show(self, doing: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, doing=doing)
        elif self._shown and time.monotonic() - self._said_at >= SECONDS:
            self._said_at = time.monotonic()
            now = f" ({doing})" if doing else ""
            said = f"{self._what} {self._done} of {self._total} done{now}{self._time_left()}"
            print(said, file=self._stream, flush=True)

    def _time_left(self) -> str:
        here = self._done - self._begun_with
        if not here or self._done == self._total:
            return ""
        left = (time.monotonic() - self._began) / here * (self._total - self._done)
        return f", about {_duration(left)} left"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min"


def headline_of(line: dict[str, Any]) -> str:
    """Return what a round's line measured of the model, in words; nothing where it did not."""
    measured = [key for key in line if key.startswith("test_") and line[key] is not None]
    if not measured:
        return ""
    first = (*(key for key in measured if key != "test_loss"), *measured)[0]
    return f"{first.removeprefix('test_')} {line[first]:.4f}"


class Expectations(Observer):
    """Shows what a run may expect and nothing after that."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def expects(self, config: Any, lines: Sequence[str]) -> None:
        """Say it."""
        self._progress.expects(config, lines)


def draws_bars(stream: TextIO) -> bool:
    """Tell whether a bar can be drawn: in a terminal, or in a notebook with its widgets."""
    if in_notebook():
        return importlib.util.find_spec("ipywidgets") is not None
    drawn = importlib.util.find_spec("rich") is not None  # python -m fedquilt.audit runs without
    return drawn and stream.isatty() and os.environ.get("TERM") != "dumb"


def in_notebook() -> bool:
    """Tell whether this is a Jupyter kernel."""
    shell = sys.modules.get("IPython")
    found = None if shell is None else shell.get_ipython()
    return type(found).__name__ == "ZMQInteractiveShell"


def _make_bar(stream: TextIO, *, in_percent: bool = False) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(file=stream)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(min(40, max(5, console.width - _BESIDE_A_BAR))),
        TaskProgressColumn() if in_percent else MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TextColumn("{task.fields[doing]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)
