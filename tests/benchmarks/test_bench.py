"""`python -m benchmarks.bench`: the same work for everybody; who fails takes nobody along."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.bench import as_json, make_work, measure, table
from benchmarks.bench.__main__ import main
from benchmarks.bench.work import Work
from fedquilt.common.errors import WorkerError


class FakeWay:
    """Takes a second a round; fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.closed = fails, False

    def round(self, index: int) -> float:
        if self.fails == "round" and index == 1:
            raise WorkerError("it ended")
        return 1.0

    def accuracy(self) -> float:
        if self.fails == "accuracy":
            raise WorkerError("it has no model")
        return 0.5

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def work() -> Work:
    return make_work("small", rounds=2, clients_a_round=2, dataset="digits", num_clients=4)


def test_who_fails_is_noted_and_the_others_have_their_figures(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {name: FakeWay(name) for name in ("well", "round", "accuracy")}
    makers = {name: lambda way=way: way for name, way in ways.items()}
    module = importlib.import_module("benchmarks.bench.measure")  # the function has its name
    monkeypatch.setattr(module, "_makers", lambda *given: makers)
    well, ended, last = measure(work)
    assert (well.seconds, well.accuracy, well.note) == ([1.0, 1.0], 0.5, "")
    assert (ended.seconds, ended.accuracy, ended.note) == ([], None, "ended: it ended")
    assert (last.accuracy, last.note) == (None, "no accuracy: it has no model")
    assert all(way.closed for way in ways.values())
    assert "it has no model" in table(work, [well, ended, last])
    assert [row["accuracy"] for row in as_json(work, [well, last])["rows"]] == [0.5, None]


def test_the_command_writes_the_figures_of_engines(here: Path) -> None:
    out = here / "bench.json"
    options = ["--dataset", "digits", "--works", "small", "--rounds", "1"]
    ways = ["--only", "engine sequential", "--only", "engine batched"]
    assert main([*options, *ways, "--clients-per-round", "2", "--out", str(out)]) == 0
    (told,) = json.loads(out.read_text())["works"]
    assert [row["way"] for row in told["rows"]] == ["engine sequential", "engine batched"]
    one, other = (row["accuracy"] for row in told["rows"])
    assert one == pytest.approx(other, abs=0.01)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rounds", "0"), "rounds=0 must be"),
        (("--rounds", "-3"), "rounds=-3 must be"),
        (("--clients-per-round", "0"), "clients_per_round=0 must be"),
        (("--peers", "nowhere"), "peers='nowhere' must be a folder"),
    ],
)
def test_a_wrong_value_is_said_before_anything_runs(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert main(["--works", "small", "--dataset", "digits", *options]) == 2
    assert said in capsys.readouterr().err
