"""The pauses of a SuperNode: short while a run goes on, Flower's own when none does."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedquilt.flower import internals, supernode


class Clock:
    """A clock that only moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_node_asks_often_for_a_minute_after_an_order_and_then_as_flower_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(supernode, "time", clock)
    pauses = supernode.Pauses()
    pauses.sleep(3)
    assert clock.slept == [3], "no order yet"
    pauses.sleep(0.5)
    assert clock.slept.pop() <= 0.05, "its app is at work: it looks again at once"
    began, asked = clock.now, []
    while clock.now < began + 120:
        asked.append(clock.now - began)
        pauses.sleep(3)
    assert sum(at < 60 for at in asked) == 60 / 0.25
    assert sum(at >= 60 for at in asked) == 60 / 3


def test_flowers_loop_gets_the_pauses_and_nothing_else_of_the_module_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop of this version calls nothing of `time` but `sleep`, above and below a second."""
    names = ("supernode.start_client_internal", "supernode.fleet_http_connection")
    loop, link, beats = [
        importlib.import_module(f"flwr.{name}") for name in (*names, "supercore.heartbeat")
    ]
    source = inspect.getsource(loop)
    assert set(re.findall(r"\btime\.(\w+)", source)) == {"sleep"}
    assert {float(x) for x in re.findall(r"time\.sleep\(([\d.]+)\)", source)} == {3.0, 0.5}
    for module, name in ((loop, "time"), (loop, "pull_objects"), (link, _BEAT), (beats, _BEAT)):
        monkeypatch.setattr(module, name, getattr(module, name))
    command = importlib.import_module("flwr.supernode.cli.flower_supernode")
    ran: list[Any] = []
    monkeypatch.setattr(command, "flower_supernode", lambda: ran.append(loop.time))
    pauses = supernode.Pauses()
    internals.run_supernode(pauses, supernode.HEARTBEAT_SECONDS)
    assert ran == [pauses]
    constants = importlib.import_module("flwr.common.constant")
    assert getattr(link, _BEAT) == getattr(beats, _BEAT) == constants.HEARTBEAT_MIN_INTERVAL


_BEAT = "HEARTBEAT_DEFAULT_INTERVAL"
