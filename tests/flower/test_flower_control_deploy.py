"""Control of a federation on loopback: exit codes, Ctrl-C, stop, the dead, the revoked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedquilt.flower.control import going_on, stop
from fedquilt.flower.federation import LocalFederation, rounds_of
from fedquilt.flower.run_notes import submitted
from fedquilt.flower.template import write_app
from run_processes import environment

pytestmark = [pytest.mark.deploy, pytest.mark.processes, pytest.mark.timeout(300)]

LONG = {"num_rounds": 200}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    folder = tmp_path_factory.mktemp("control")
    app = write_app(folder / "app", num_rounds=6, flower_min_nodes=1, flower_deadline=30.0)
    federation = LocalFederation(folder / "here")
    federation.prepare(app, ["clinic-03", "clinic-07"])
    try:
        federation.up()
        yield federation
    finally:
        federation.down()


def until(holds: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


class Following(threading.Thread):
    """Follows a run as `fedquilt flower run` does; `code` is its exit code."""

    def __init__(self, federation: LocalFederation, options: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.federation, self.said, self.code = federation, [], -1
        self.notes = federation.submit(options)
        self.start()

    def run(self) -> None:
        self.code = self.federation.control().follow(self.notes, self.said.append)

    def after(self, rounds: int) -> Following:
        until(lambda: sum(line.startswith("round") for line in self.said) >= rounds)
        return self


def pid_of(federation: LocalFederation, name: str) -> int:
    return int((federation.status() or {})["processes"][name]["pid"])


def test_a_run_that_finishes_while_the_superlink_is_killed_ends_with_0(
    federation: LocalFederation,
) -> None:
    following = Following(federation, {}).after(2)
    os.kill(pid_of(federation, "superlink"), signal.SIGKILL)
    following.join(90)
    assert following.code == 0, following.said
    assert following.said[-3].startswith("finished: ")


def test_a_killed_server_app_ends_with_1_and_a_killed_node_is_dead_at_once(
    federation: LocalFederation,
) -> None:
    following = Following(federation, LONG).after(1)
    os.kill(pid_of(federation, "clinic-07"), signal.SIGKILL)
    until(lambda: federation.node_states()["clinic-07"] == "dead", 5.0)
    os.kill((following.notes.read() or {})["pid"], signal.SIGKILL)
    following.join(30)
    assert following.code == 1
    assert "error: its process was killed" in following.said
    until(lambda: federation.node_states()["clinic-07"] == "connected")


def test_ctrl_c_stops_the_run_and_a_resumed_one_stops_after_its_round(
    federation: LocalFederation,
) -> None:
    told = [sys.executable, "-c", "from fedquilt.cli import program; program()", "flower"]
    process = subprocess.Popen(
        [*told, "run", "-c", "num_rounds=200", "--folder", str(federation.folder)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    output = federation.config()["output"]
    until(lambda: any(n.is_alive() and "round 2 of" in str(n.words()) for n in submitted(output)))
    notes = going_on(output)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "stopped by its operator" in said
    assert not notes.is_alive()
    folder = Path((notes.read() or {})["folder"])
    done = rounds_of(folder)
    following = Following(federation, {"flower_resume": True}).after(1)
    assert stop(following.notes, now=False)
    following.join(30)
    assert following.code == 1
    assert 200 > rounds_of(folder) > done


def test_a_revoked_node_is_shown_as_such_and_comes_back_with_a_new_key(
    federation: LocalFederation,
) -> None:
    before = federation.roster().client_ids
    federation.revoke("clinic-07")
    assert federation.node_states() == {"clinic-03": "connected", "clinic-07": "revoked"}
    key = federation.roster().current_key("clinic-07")
    assert federation.keys_seen()[key] == "unregistered"
    assert federation.join("clinic-07", "partition-id=1 num-partitions=2"), "on its own account"
    until(lambda: federation.node_states()["clinic-07"] == "connected")
    assert federation.roster().client_ids == before
