"""Progress: a bar where somebody looks, plain lines elsewhere, no times where they are private."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import TimeRemainingColumn
from torch import nn

import fedquilt
from fedquilt.common.observer import Observer
from fedquilt.config import RunConfig
from fedquilt.experiment.api import run_config
from fedquilt.observe import progress
from fedquilt.observe.progress import Progress, StepsProgress, draws_bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test moves."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def line(index: int, seconds: float | None, accuracy: float | None = None) -> dict[str, Any]:
    found = {} if accuracy is None else {"test_accuracy": accuracy}
    return {"round": index, "seconds": seconds, **found}


def test_a_plain_line_every_so_many_seconds(clock: list[float]) -> None:
    out, config = io.StringIO(), RunConfig(mode="fedavg", num_rounds=100)
    with Progress("digits fedavg", out) as shown:
        shown.expects(config, ["all 4 clients join every round"])
        for index in range(10):
            clock[0] += 7.0
            shown(config, line(index, 7.0, 0.5 if index == 4 else None))
    assert out.getvalue().splitlines() == [
        "digits fedavg: all 4 clients join every round",
        "digits fedavg: round 3 of 100",
        "digits fedavg: round 6 of 100, accuracy 0.5000",
        "digits fedavg: round 9 of 100, accuracy 0.5000",
    ]


def test_a_long_round_is_not_silent(clock: list[float]) -> None:
    out, config = io.StringIO(), RunConfig(mode="fedavg", num_rounds=8)
    with Progress("mnist fednum", out) as shown:
        shown.expects(config, [])
        for step in range(100):
            clock[0] += 1.0
            shown.working("matching", step / 100)
    said = out.getvalue().splitlines()
    assert len(said) == 5
    assert said[0] == "mnist fednum: round 1, matching 19%"


def test_lines_of_a_bounded_run_do_not_tell_the_time(clock: list[float]) -> None:
    """Whatever its rounds took, the same lines come at the same rounds."""
    said = []
    for pace in (0.0, 7.0, 1000.0):
        out, config = io.StringIO(), RunConfig(mode="certified", num_rounds=40)
        with Progress("run", out) as shown:
            shown.expects(config, [])
            for index in range(40):
                clock[0] += pace
                shown.working("training", 0.5)
                shown(config, line(index, None))
        said.append(out.getvalue())
    assert said[0] == said[1] == said[2]
    assert len(said[0].splitlines()) == 10


@pytest.mark.parametrize(("seconds", "shown"), [(None, False), (1.5, True)])
def test_a_bar_hides_the_time_left_where_seconds_are_private(
    seconds: float | None, shown: bool
) -> None:
    """How long rounds take tells how much clients hold, or how many a secret coin kept."""
    out = Terminal()
    with Progress("run", out) as bar:
        bar(RunConfig(num_rounds=4), line(0, seconds))
        kinds = {type(column) for column in bar._bar.columns}
    assert (TimeRemainingColumn in kinds) == shown
    assert "1/4" in out.getvalue()


def test_where_a_bar_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert draws_bars(Terminal())
    assert not draws_bars(io.StringIO())
    kernel = type("ZMQInteractiveShell", (), {})()
    shell = types.SimpleNamespace(get_ipython=lambda: kernel)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    for found in (True, False):  # with and without the widgets it needs
        monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name, f=found: f or None)
        assert draws_bars(io.StringIO()) == found


@pytest.mark.parametrize(
    ("settings", "expected", "lines"),
    [({}, True, True), ({"progress": False}, True, False), ({"quiet": True}, False, False)],
    ids=str,
)
def test_python_shows_it(
    capfd: pytest.CaptureFixture[str], settings: dict[str, bool], expected: bool, lines: bool
) -> None:
    data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    clients = [[0, 1], [2, 3]]
    model = nn.Linear(2, 2)
    fedquilt.run(model, data, data, clients, num_rounds=3, output_dir=None, **settings)  # type: ignore[arg-type]
    said = capfd.readouterr()
    assert said.out == ""
    assert ("all 2 clients join every round" in said.err) == expected
    assert ("round 3 of 3, accuracy " in said.err) == lines  # the noise is secret


def test_python_draws_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    heard: list[int] = []
    fedquilt.run(
        *(nn.Linear(2, 2), data, data, [[0, 1], [2, 3]]),
        num_rounds=3,
        output_dir=None,
        observer=lambda config, line: heard.append(line["round"]),
    )
    assert "3/3" in terminal.getvalue()
    assert heard == [0, 1, 2]


def test_steps_say_how_many_are_done_and_the_time_left(clock: list[float]) -> None:
    out = io.StringIO()
    with StepsProgress("audit: case", 10, out) as steps:
        steps.start_at(4)
        for _ in range(6):
            clock[0] += 15.0
            steps.end()
    assert out.getvalue().splitlines() == [
        "audit: case 6 of 10 done, about 60 s left",
        "audit: case 8 of 10 done, about 30 s left",
        "audit: case 10 of 10 done",
    ]


def test_steps_are_one_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with StepsProgress("audit: case", 67, out) as steps:
        steps.start_at(12)
        steps.begin("even clips")
    assert "12/67" in out.getvalue()
    assert "even clips" in out.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    assert not draws_bars(Terminal())
    with StepsProgress("audit: case", 67, Terminal(), shown=False) as steps:
        steps.end()


def test_features_are_a_step_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    config = RunConfig(mode="certified", model="hog-linear", num_rounds=40)
    with Progress("digits certified", out) as shown:
        shown.working("features", 0.62)
        shown._bar.refresh()
        assert "62/100" in out.getvalue()
        assert "features" in out.getvalue()
        shown(config, line(0, None))
        shown._bar.refresh()
        assert "1/40" in out.getvalue()
        assert "features" not in out.getvalue().splitlines()[-1]


def test_features_are_told_where_no_bar_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a dumb terminal and in a pipe too, in every mode: the first round may be far."""
    monkeypatch.setattr("fedquilt.observe.progress.SECONDS", 0.0)
    monkeypatch.setenv("TERM", "dumb")
    for out in (Terminal(), io.StringIO()):
        config = RunConfig(mode="certified", model="hog-linear", num_rounds=40)
        with Progress("digits certified", out) as shown:
            shown.working("features", 0.62)
            assert out.getvalue() == "digits certified: features 62%\n"
            shown.expects(config, [])
            shown.working("matching", 0.5)
            assert "matching" not in out.getvalue(), "within a round its time is withheld"


def test_a_run_tells_of_its_features(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []

    class Watch(Observer):
        def working(self, what: str, share: float) -> None:
            told.append((what, share))

    settings = {"mode": "fedavg", "dataset": "digits", "model": "hog-linear", "num_rounds": 1}
    config = RunConfig(**settings, num_clients=5, output_dir=str(tmp_path))
    run_config(config, Watch())
    assert {what for what, _ in told} == {progress.FEATURES}
    assert told[-1][1] == 1.0
