"""A real offline run of wandb, read back from its file."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tracker_files import wandb_files, wandb_records, wandb_rows, wandb_stamped_rows

from fedquilt.errors import InvalidValueError
from fedquilt.observe.trackers import open_trackers
from run_processes import environment

pytest.importorskip("wandb")

LINES: list[dict[str, Any]] = [
    {"round": 0, "cohort": [1], "train_loss": 2.5, "epsilon": math.inf, "seconds": 0.5},
    {"round": 1, "train_loss": 1.25, "test_accuracy": 0.75, "seconds": 0.25},
    {"round": 2, "participation_stats": {"mean": 1.5, "gini": None}, "seconds": 0.125},
]
ROWS = {
    1: {"train_loss": 2.5, "epsilon": math.inf, "seconds": 0.5},
    2: {"train_loss": 1.25, "accuracy": 0.75, "seconds": 0.25},
    3: {"participation_stats/mean": 1.5, "seconds": 0.125},
}
CONFIG = {"seed": 7, "layers": [1, 2], "model": {"name": "mlp"}, "target": None}


@dataclass(frozen=True)
class Tracked:
    """A folder with a run, the run resumed, and a run that withholds its seconds."""

    run: Path
    withheld: Path
    visits: int
    variables: set[str]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    folder = tmp_path_factory.mktemp("tracked")
    naming: dict[str, Any] = {"project": "digits", "run_name": "seed 7", "config": CONFIG}
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as server:
        isolate(patch, folder, server)
        before = set(os.environ)
        with open_trackers("wandb", folder / "run", **naming) as trackers:
            for line in LINES:
                print("what the program says is not part of a run")
                trackers.log(line)
        trackers.close()
        with open_trackers("wandb", folder / "run", **naming) as trackers:
            trackers.log({"round": 2, "train_loss": 8.0, "seconds": 1.0})
            trackers.log({"round": 3, "train_loss": 9.0, "seconds": 1.0})
        with open_trackers("wandb", folder / "withheld", **naming) as trackers:
            for index in range(3):
                trackers.log({"round": index, "train_loss": 1.0, "seconds": None})
                time.sleep(0.15)
        yield Tracked(folder / "run", folder / "withheld", visits(server), set(os.environ) - before)


def isolate(patch: pytest.MonkeyPatch, folder: Path, server: socket.socket) -> None:
    """Let whatever wandb would send arrive at `server`, and no setting of ours count."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        patch.delenv(name)
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    for name in ("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY"):
        patch.setenv(name, address)
    patch.setenv("WANDB_CACHE_DIR", str(folder / "cache"))
    patch.setenv("WANDB_CONFIG_DIR", str(folder / "config"))


def visits(server: socket.socket) -> int:
    """Return how many connections wait at a server."""
    server.settimeout(0.1)
    count = 0
    try:
        while True:
            server.accept()[0].close()
            count += 1
    except TimeoutError:
        return count


def test_steps_and_values_are_those_of_the_rounds(tracked: Tracked) -> None:
    assert wandb_rows(wandb_files(tracked.run)[0]) == ROWS


def test_project_name_and_settings_are_stored(tracked: Tracked) -> None:
    (run,) = [r.run for r in wandb_records(wandb_files(tracked.run)[0]) if r.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.project, run.display_name) == ("digits", "seed 7")
    assert {key: value for key, value in config.items() if key != "_wandb"} == CONFIG


def test_a_resumed_run_goes_on_under_the_same_id(tracked: Tracked) -> None:
    first, second = wandb_files(tracked.run)
    runs = [next(r.run for r in wandb_records(f) if r.HasField("run")) for f in (first, second)]
    written = (tracked.run / "wandb" / "run-id.txt").read_text().strip()
    assert [run.run_id for run in runs] == [written, written]
    assert [run.resume for run in runs] == [False, True]
    assert wandb_rows(second) == {
        3: {"train_loss": 8.0, "seconds": 1.0},
        4: {"train_loss": 9.0, "seconds": 1.0},
    }


def test_withheld_rounds_are_written_at_the_end(tracked: Tracked) -> None:
    (file,) = wandb_files(tracked.withheld)
    rows = wandb_stamped_rows(file)
    assert [(step, row["train_loss"]) for step, row in rows.items()] == [(1, 1), (2, 1), (3, 1)]
    # The rounds themselves were 0.3 s apart.
    assert rows[3]["_runtime"] - rows[1]["_runtime"] < 0.1
    assert rows[3]["_timestamp"] - rows[1]["_timestamp"] < 0.1


def test_nothing_is_sent_and_the_environment_is_left_as_it_was(tracked: Tracked) -> None:
    assert tracked.visits == 0
    # wandb itself leaves the address of its process for child processes.
    assert tracked.variables <= {"WANDB_SERVICE"}


def test_nothing_but_the_rounds_is_collected(tracked: Tracked) -> None:
    kinds = {
        record.WhichOneof("record_type") for record in wandb_records(wandb_files(tracked.run)[0])
    }
    assert {"run", "history", "exit"} <= kinds
    assert not kinds & {"output", "output_raw", "stats", "files", "artifact", "environment"}
    files = wandb_files(tracked.run)[0].parent / "files"
    assert list(files.iterdir()) == []


def test_a_run_of_the_callers_own_goes_on(tmp_path: Path, tracked: Tracked) -> None:
    import wandb

    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    own = wandb.init(mode="offline", dir=str(tmp_path), settings=settings)
    naming: dict[str, Any] = {"project": "p", "run_name": "n", "config": {}}
    with open_trackers("wandb", tmp_path / "run", **naming) as trackers:
        trackers.log(LINES[0])
    assert wandb.run is own
    own.log({"mine": 1.0})
    own.finish()
    (file,) = wandb_files(tmp_path)
    assert wandb_rows(file) == {0: {"mine": 1.0}}
    assert wandb_rows(wandb_files(tmp_path / "run")[0]) == {1: ROWS[1]}


def test_an_unreadable_id_is_replaced(tmp_path: Path, tracked: Tracked) -> None:
    from fedquilt.observe.trackers import _run_id

    file = tmp_path / "wandb" / "run-id.txt"
    file.parent.mkdir()
    file.write_bytes(b"../\xff\n")
    run_id, resumed = _run_id(file)
    assert not resumed
    assert _run_id(file) == (run_id, True)


def test_the_user_decides_on_the_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with open_trackers("wandb", tmp_path, project="p", run_name="n", config={}) as trackers:
        trackers.log(LINES[0])
        assert trackers.names == ("wandb",)
    assert wandb_files(tmp_path) == []


def test_a_mode_that_wandb_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(InvalidValueError, match=r"WANDB_MODE='ofline' .*did you mean 'offline'"):
        open_trackers("wandb", tmp_path / "run", project="p", run_name="n", config={})
    assert list(tmp_path.iterdir()) == []


def test_wandb_that_cannot_start_is_an_error(tmp_path: Path, tracked: Tracked) -> None:
    with pytest.raises(InvalidValueError, match="trackers='wandb' cannot start"):
        open_trackers("wandb", tmp_path, project="a/b", run_name="n", config={})
    assert not (tmp_path / "wandb" / "run-id.txt").exists()


SCRIPT = """
import json, logging, os, signal, sys, threading, time
from multiprocessing import get_context
import psutil
from fedquilt.observe.trackers import open_trackers

def worker(trackers):
    trackers.log({"round": 1, **line})
    trackers.close()

def core():
    return [c for c in psutil.Process().children(recursive=True) if "wandb-core" in c.name()]

warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("fedquilt.trackers").addHandler(handler)
line = {"train_loss": 1.0, "seconds": 0.5}
with open_trackers("wandb", sys.argv[1], project="p", run_name="n", config={}) as trackers:
    command = core()[0].cmdline()
    trackers.log({"round": 0, **line})
    child = get_context("fork").Process(target=worker, args=(trackers,))
    child.start()
    child.join()
    thread = threading.Thread(target=trackers.log, args=({"round": 2, **line},))
    thread.start()
    thread.join()
    try:
        os.killpg(0, signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        trackers.log({"round": 3, **line})
with open_trackers("wandb", sys.argv[1], project="p", run_name="n", config={}) as trackers:
    trackers.log({"round": 4, **line})
print("so far", file=sys.stderr)
names = []
with open_trackers("wandb", sys.argv[2], project="p", run_name="n", config={}) as trackers:
    trackers.log({"round": 0, **line})
    for process in core():
        process.kill()
        process.wait()
    for index in range(1, 50):
        trackers.log({"round": index, **line})
        time.sleep(0.02)
        names.append(trackers.names)
print(json.dumps({"command": command, "warnings": warnings, "left": names[-1]}))
"""


@pytest.mark.slow
def test_forks_threads_ctrl_c_and_the_death_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psutil")
    with socket.create_server(("127.0.0.1", 0)) as server:
        isolate(monkeypatch, tmp_path, server)
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "whole"), str(tmp_path / "killed")],
            env=environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            start_new_session=True,
            check=False,
        )
        assert visits(server) == 0
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines()[0] == "so far"
    said = json.loads(ended.stdout)
    assert "--no-observability" in said["command"]
    assert said["left"] == []
    (warning,) = said["warnings"]
    assert "tracker wandb stopped" in warning
    row = {"train_loss": 1.0, "seconds": 0.5}
    assert wandb_rows(wandb_files(tmp_path / "whole")[0]) == {1: row, 3: row, 4: row}
