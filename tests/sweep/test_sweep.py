"""Sweeps: what is planned, what is in the table, what is said of it."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import Said
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.common.formatting import format_bound
from fedquilt.config import build_config, plain_config
from fedquilt.privacy.accounting.gaussian import gaussian_epsilon, gaussian_mu
from fedquilt.privacy.ledger import Ledger
from fedquilt.report.views.page import find_runs
from fedquilt.sweep import make_plan, parse_axis, run_sweep, summarise
from fedquilt.sweep.plan import Plan, SweepAxis, choose
from fedquilt.sweep.run import _Worker
from run_processes import environment
from run_samples import TINY, contents, flags

BASE: dict[str, Any] = plain_config({**TINY, "mode": "fedavg"}).as_dict()


def planned(*axes: str, seeds: tuple[int, ...] = (0, 1), **more: Any) -> Plan:
    base = {**BASE, **more.pop("base", {})}
    return make_plan(base, [parse_axis(axis) for axis in axes], seeds, **more)


def test_a_grid_has_every_combination_and_seed() -> None:
    plan = planned("learning_rate=0.1,0.2", "server_optimizer=sgd,adam")
    assert len(plan.points) == 8
    assert plan.points[2].settings == {"learning_rate": 0.1, "server_optimizer": "adam"}
    assert [point.seed for point in plan.points[:2]] == [0, 1]


def test_draws_are_the_same_for_the_same_seed() -> None:
    axes = ("learning_rate=0.01:1:log", "local_epochs=1:4", "server_optimizer=sgd,adam")
    plan = planned(*axes, samples=20)
    assert plan == planned(*axes, samples=20)
    assert plan != planned(*axes, samples=20, sweep_seed=1)
    rates = [point.settings["learning_rate"] for point in plan.points]
    assert 0.01 <= min(rates) < 0.1 < max(rates) <= 1
    assert {point.settings["local_epochs"] for point in plan.points} == {1, 2, 3, 4}


def test_values_have_the_option_s_type() -> None:
    assert parse_axis("clients-per-round=3,0.5").values == (3, 0.5)
    assert parse_axis("normalise_updates=true,false").values == (True, False)
    assert parse_axis("noise_seed=none,3").values == (None, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat=1", "learning_rate"),
        ("seed=1,2", "key of the sweep"),
        ("learning_rate=", "must be key="),
        ("learning_rate=fast", "must be a number"),
        ("learning_rate=1:0.1", "must rise"),
        ("learning_rate=0:1:log", "begins above 0"),
        ("learning_rate=1,1", "repeat"),
    ],
)
def test_a_mistake_is_said(text: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        parse_axis(text)


def test_a_bad_value_is_found_before_anything_runs() -> None:
    with pytest.raises(FedquiltError, match="local_epochs"):
        planned("local_epochs=1,0")
    with pytest.raises(InvalidValueError, match="samples"):
        planned("learning_rate=0.1:1")


@pytest.mark.parametrize(("samples", "what"), [(10**9, "samples=1000000000"), (None, "points=10")])
def test_too_many_points_are_refused_before_one_is_made(
    samples: int | None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand million draws, or a grid of 10^12, would be made without an end."""

    def none_is_made(*_: object) -> None:
        raise AssertionError("a point is made")

    monkeypatch.setattr(SweepAxis, "draw", none_is_made)
    monkeypatch.setattr("fedquilt.sweep.plan.itertools.product", none_is_made)
    keys = ("learning_rate", "clip_norm", "epsilon", "delta")
    values = ",".join(str(0.001 * (1 + i)) for i in range(1000))
    axes = [parse_axis(f"{key}={values}") for key in keys]
    with pytest.raises(InvalidValueError, match=rf"{what}\d* must be .*100000"):
        choose(axes, samples)


def test_a_sweep_and_its_summary(tmp_path: Path) -> None:
    plan = planned("local_epochs=1,4", base={"learning_rate": 0.1})
    told: list[tuple[int, int]] = []
    table = run_sweep(tmp_path / "s", plan, progress=lambda *n: told.append(n))
    rows = table.rows()
    assert [row["state"] for row in rows] == ["done"] * 4
    assert told[-1] == (4, 4)
    with sqlite3.connect(table.path) as opened:
        (best,) = opened.execute(
            "SELECT max(accuracy) FROM points WHERE local_epochs = 4"
        ).fetchone()
    assert best == max(row["accuracy"] for row in rows[2:])
    found = summarise(plan, rows)
    assert found.settings[0].label == "local_epochs=4"
    assert found.settings[0].spread.count == 2
    label, pair = found.differences[0]
    assert label == "local_epochs=4 minus local_epochs=1"
    assert pair.seeds == (0, 1)
    assert found.looks.runs == 4
    assert "bounded by nothing" in found.looks.text
    assert run_sweep(tmp_path / "s").rows() == rows
    with pytest.raises(FedquiltError, match="holds another sweep"):
        run_sweep(tmp_path / "s", planned("local_epochs=1,2"))


def test_runs_on_a_ledger_are_charged_and_refused_like_any_other(tmp_path: Path) -> None:
    own = {"mode": "certified", "noise_seed": None, "epsilon": 2.0, "allowance": 3.2}
    own |= {"ledger": str(tmp_path / "clients.sqlite"), "population": "people"}
    plan = planned("clip_norm=0.1,0.2,0.4", seeds=(0,), base=own)
    table = run_sweep(tmp_path / "s", plan, jobs=4)
    rows = table.rows()
    assert [row["state"] for row in rows] == ["done", "done", "refused"]
    assert "asks more than" in rows[2]["message"]
    looks = summarise(plan, rows).looks
    assert (looks.runs, looks.charged, looks.refused) == (2, 2, 1)
    assert looks.text.startswith("2 looks were taken")
    assert "all of them are charged" in looks.text
    assert run_sweep(tmp_path / "s").rows() == rows


@pytest.mark.slow
def test_without_a_ledger_all_looks_together_are_told(tmp_path: Path) -> None:
    own = {"mode": "certified", "noise_seed": None, "epsilon": 2.0}
    plan = planned("clip_norm=0.1,0.2", seeds=(0,), base=own)
    looks = summarise(plan, run_sweep(tmp_path / "s", plan).rows()).looks
    assert (looks.runs, looks.charged) == (2, 0)
    assert 2.0 < looks.epsilon < 4.0
    assert f"up to ε = {format_bound(looks.epsilon)} at" in looks.text


def command(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedquilt", "sweep", *map(str, arguments), "--quiet"],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def finished(folder: Path) -> int:
    return len(list(folder.glob("points/*/*/result.json")))


def killed_after(process: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    """Kill a sweep as soon as so many of its runs have ended and another has begun."""
    deadline = time.monotonic() + 120
    while finished(folder) < count or len(list(folder.glob("points/*/*/rounds.jsonl"))) <= count:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.processes
def test_killed_twice_it_ends_with_the_same_table(tmp_path: Path) -> None:
    options = ["--over", "learning_rate=0.05,0.1", "--over", "local_epochs=1,2"]
    options += ["--seeds", "0,1", *flags(mode="certified", num_rounds=25)]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert command(*options, "--jobs", 2, "--folder", whole).wait() == 0
    killed_after(command(*options, "--jobs", 2, "--folder", broken), broken, 2)
    killed_after(command("--resume", broken, "--jobs", 2), broken, 4)
    assert finished(broken) < 8
    assert command("--resume", broken, "--jobs", 1).wait() == 0
    tables = []
    for folder in (whole, broken):
        with sqlite3.connect(folder / "sweep.sqlite") as opened:
            tables.append(opened.execute("SELECT * FROM points ORDER BY point").fetchall())
    assert len(tables[0]) == 8
    assert tables[0] == tables[1]


def test_two_processes_do_not_share_a_sweep(tmp_path: Path) -> None:
    from fedquilt.common.storage import lock_file

    place = tmp_path / "s"
    place.mkdir()
    with lock_file(place / ".lock"), pytest.raises(FedquiltError, match="another process"):
        run_sweep(place, planned("local_epochs=1,2"))


@pytest.mark.slow
def test_a_sweep_over_modes_takes_what_one_of_them_uses(
    cli: Callable[..., Said], here: Path
) -> None:
    options = [*flags(mode="fedavg", num_rounds=2), "--seeds", "0", "--folder", "s", "--json"]
    axis = ("--over", "mode=fedavg,certified")
    said = cli("sweep", *options, "--epsilon", 3, "--clip-norm", 0.5, *axis)
    assert said.json()["looks"]["runs"] == 2
    written = {c.mode: c for c in (plain_config(file=p) for p in Path("s").rglob("config.toml"))}
    assert written.keys() == {"fedavg", "certified"}
    assert (written["certified"].epsilon, written["certified"].clip_norm) == (3.0, 0.5)
    refused = cli("sweep", *options, "--max-clip", 3, *axis)
    assert (refused.code, "max_clip=3.0 must be left out" in refused.err) == (2, True)


@pytest.mark.slow
def test_an_option_may_be_for_one_value_of_another(cli: Callable[..., Said], here: Path) -> None:
    options = [*flags(mode="certified", num_rounds=2), "--seeds", "0", "--folder", "s", "--json"]
    said = cli("sweep", *options, "--max-joins", 2, "--over", "policy=worst_case,cap")
    assert said.json()["looks"]["runs"] == 2


def test_an_axis_must_do_something() -> None:
    with pytest.raises(InvalidValueError, match=r"epsilon=.* must be left out"):
        planned("epsilon=1,2")
    assert len(planned("epsilon=1,2", "mode=fedavg,fixed_dp").points) == 8


def test_no_point_hides_its_only_client() -> None:
    with pytest.raises(InvalidValueError, match="num_clients=1 must be at least 2"):
        planned("num_clients=1,10", base={"mode": "certified", "clients_per_round": 1})


def test_the_command(cli: Callable[..., Said], here: Path) -> None:
    options = flags(mode="fedavg", noise_seed=None, num_rounds=2)
    options += ["--tracker", "tensorboard"]
    said = cli(
        "sweep", *options, "--over", "local_epochs=1,2", "--seeds", "0", "--folder", "s", "--json"
    )
    record = said.json()
    runs = [path.parent for path in Path("s").glob("points/*/*/result.json")]
    assert all((run / "tensorboard").is_dir() for run in runs)
    assert sorted(find_runs(["s"])) == sorted(runs)
    assert [one["values"] for one in record["settings"]]
    assert record["looks"]["runs"] == 2
    assert Path(record["figures"][0]).is_file()
    shown = cli("sweep", "--resume", "s", "--quiet")
    assert "2 looks were taken" in shown.out
    assert cli("sweep", "--resume", "s", "--seed", 1).code == 2
    assert "must be given" in cli("sweep", *options).err
    assert "must be a folder" in cli("sweep", "--resume", "nowhere").err


def test_a_worker_without_a_point_ends_in_order() -> None:
    """What it has made elsewhere, sockets of worker processes, is removed at its end."""
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    with theirs:
        ended = subprocess.run(
            [
                *(sys.executable, "-c"),
                "import atexit; atexit.register(print, 'in order'); "
                "from fedquilt.sweep.worker import main; main()",
                str(theirs.fileno()),
            ],
            env=environment(),
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            text=True,
            check=True,
        )
    assert ended.stdout == "in order\n"


def test_what_a_worker_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is imported there may print, at its start and while a run goes on."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "print('{}', flush=True)\n"
        "import torch\n"
        "real = torch.set_num_threads\n"
        "torch.set_num_threads = lambda n: (real(n), print('not JSON', flush=True))\n"
    )
    path = os.pathsep.join((str(tmp_path), environment()["PYTHONPATH"]))
    monkeypatch.setenv("PYTHONPATH", path)
    table = run_sweep(tmp_path / "s", planned("local_epochs=1,2", seeds=(0,)))
    assert [row["state"] for row in table.rows()] == ["done", "done"]


# What failed, what was refused, and why


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Let no file of this process and its children grow beyond a size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


SECRET = {"mode": "certified", "noise_seed": None, "epsilon": 2.0, "clients_per_round": 10}


@pytest.mark.slow
def test_what_a_full_disk_stops_has_failed_counts_and_runs_again(
    tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    plan = planned("num_rounds=2,30", seeds=(0,), base=SECRET)
    small_files(33_000)  # the ledger of two rounds, and not that of thirty
    table = run_sweep(tmp_path / "s", plan)
    small_files(resource.RLIM_INFINITY)
    done, failed = table.rows()
    assert (done["state"], failed["state"]) == ("done", "failed")
    assert "ledger.sqlite cannot be used" in failed["message"]
    (run,) = (tmp_path / "s" / "points" / "00001").iterdir()
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        (population,) = ledger.populations()
        spent = max(population.spent())
    assert 0 < failed["rounds"] < 30
    found = summarise(plan, table.rows())
    assert [(one.state, one.runs) for one in found.reasons] == [("failed", 1)]
    assert (found.looks.runs, found.looks.unfinished, found.looks.refused) == (2, 1, 0)
    together = gaussian_epsilon(math.sqrt(gaussian_mu(2.0, 1e-5) ** 2 + spent), 1e-5)
    assert found.looks.epsilon == pytest.approx(together, rel=1e-6)
    assert found.looks.epsilon > 2.0
    assert f"up to ε = {format_bound(together)} at" in found.looks.text
    assert "and for 1 that released rounds and did not end" in found.looks.text
    rows = run_sweep(tmp_path / "s").rows()
    assert [(row["state"], row["rounds"], row["message"]) for row in rows] == [
        ("done", 2, None),
        ("done", 30, None),
    ]


@pytest.mark.slow
def test_a_table_of_before_that_calls_a_begun_run_refused_is_mended(tmp_path: Path) -> None:
    plan = planned("local_epochs=1,2", seeds=(0,))
    table = run_sweep(tmp_path / "s", plan)
    (result,) = tmp_path.glob("s/points/00001/*/result.json")
    result.unlink()
    table.refuse(plan.points[1], "the disk is full")
    assert [row["state"] for row in run_sweep(tmp_path / "s").rows()] == ["done", "done"]


@pytest.mark.slow
def test_a_sweep_says_why_runs_were_refused_and_ends_with_1_when_all_were(
    cli: Callable[..., Said], here: Path
) -> None:
    base = {"mode": "fedavg", "model": "hog-linear", "noise_seed": None, "num_rounds": 1}
    options = [*flags(**base), "--seeds", "0,1", "--folder", "s"]
    said = cli("sweep", *options, "--over", "method=heterofl,fedrolex", "--quiet")
    assert said.code == 1
    (line,) = [line for line in said.out.splitlines() if "refused: " in line]
    assert line.startswith("4 runs refused: model=")
    assert "must have an axis that can be cut" in line
    assert cli("sweep", "--resume", "s", "--json").code == 1


# Sweeps that somebody else has packed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with one finished run and one that waits."""
    folder = tmp_path_factory.mktemp("packed") / "s"
    run_sweep(folder, planned("local_epochs=1,2", seeds=(0,)), only=[0])
    return folder


@pytest.fixture
def received(packed: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(packed, tmp_path / "received"))


def refused_without_a_trace(folder: Path, outside: Path, match: str) -> None:
    before = contents(outside)
    with pytest.raises(FedquiltError, match=match):
        run_sweep(folder)
    assert contents(outside) == before


@pytest.mark.parametrize("name", ["sweep.sqlite", "points", "points/00001", "points/00001/run"])
def test_a_sweep_does_not_follow_links(received: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (outside / "00001").mkdir(parents=True)
    with Ledger.open(outside / "ledger.sqlite", create=True):
        pass
    (outside / "config.toml").write_text("num_rounds = 1\n")
    path = received / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(outside / "ledger.sqlite" if name == "sweep.sqlite" else outside)
    refused_without_a_trace(received, outside, r"must be a (regular file|folder of its own)")


@pytest.mark.slow
def test_a_journal_beside_the_table_is_not_played(received: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (received / "sweep.sqlite-journal").symlink_to(victim)
    assert [row["state"] for row in run_sweep(received).rows()] == ["done", "done"]
    assert victim.read_text() == "mine"
    assert not (received / "sweep.sqlite-journal").exists()


@pytest.mark.slow
def test_a_received_sweep_charges_a_ledger_only_when_the_user_names_it(tmp_path: Path) -> None:
    ledger, folder = tmp_path / "clients.sqlite", tmp_path / "received"
    own = {"mode": "fedavg", "ledger": str(ledger), "population": "p", "num_rounds": 1}
    with Ledger.open(ledger, create=True):
        pass
    outside = tmp_path / "before.sqlite"
    shutil.copy(ledger, outside)
    folder.mkdir()
    planned("local_epochs=1,2", seeds=(0,), base={**own, "allow_unbounded": True}).write(folder)
    for word in (None, str(tmp_path / "other.sqlite")):
        with pytest.raises(InvalidValueError, match=r"ledger=.* must be .*clients\.sqlite"):
            run_sweep(folder, ledger=word)
    assert ledger.read_bytes() == outside.read_bytes()
    rows = run_sweep(folder, ledger=str(ledger)).rows()
    assert [(row["state"], row["charged"]) for row in rows] == [("done", 1), ("done", 1)]


ESCAPE = "\x1b[31mred"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema_version": 7}, "schema_version=7 must be 1"),
        ({"axes": ['x" TEXT); DROP TABLE points; --']}, "must be options, each once"),
        ({"axes": ["epsilon", "epsilon"]}, "must be options, each once"),
        ({"axes": "epsilon"}, "axes must be a list"),
        ({"axes": [ESCAPE]}, r"\\x1b"),
        ({"points": []}, "points must be 1 to"),
        ({"points": [5]}, "points, entry 0, must be a list"),
        ({"points": [[{"local_epochs": 1}]]}, "lacks 'seed'"),
        ({"points": [[{}, 0]]}, "settings of all axes"),
        ({"points": [[{"local_epochs": 1}, "0"]]}, "seed must be a whole number"),
        ({"points": [[{"local_epochs": 1}, 0, ["coreset"], 1]]}, "settings of all axes"),
        ({"base": None}, "base must be an object"),
    ],
)
def test_a_plan_of_another_form_is_refused(
    cli: Callable[..., Said], received: Path, change: dict[str, Any], match: str
) -> None:
    path = received / "sweep.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    before = contents(received)
    said = cli("sweep", "--resume", received, "--quiet")
    assert (said.code, said.err.strip().isprintable()) == (2, True)
    assert re.search(match, said.err)
    assert contents(received) == before


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        ("UPDATE points SET state = 'gone'", "state must be a state"),
        ("UPDATE points SET claimed_epsilon = 'x'", "claimed_epsilon must be a number >= 0"),
        ("UPDATE points SET claimed_delta = NULL WHERE point = 0", "claimed_delta must be"),
        ("UPDATE points SET message = x'00'", "message must be a text"),
        ("CREATE TRIGGER t AFTER UPDATE ON points BEGIN SELECT 1; END", "its columns are not"),
        ("DROP TABLE points", "its columns are not"),
        ("PRAGMA journal_mode = WAL", "is no table of this sweep"),
    ],
)
def test_a_table_of_another_form_is_refused(received: Path, edit: str, match: str) -> None:
    with contextlib.closing(sqlite3.connect(received / "sweep.sqlite")) as opened, opened:
        opened.execute(edit)
    refused_without_a_trace(received, received, match)


def test_what_is_printed_of_a_sweep_moves_no_cursor(
    cli: Callable[..., Said], received: Path
) -> None:
    path = received / "sweep.json"
    plan = json.loads(path.read_text())
    plan["points"][1][0]["local_epochs"] = ESCAPE
    path.write_text(json.dumps(plan))
    moved = received.rename(received.with_name(f"{ESCAPE}\n"))
    said = cli("sweep", "--resume", moved, "--quiet")
    assert said.code == 0
    assert r"local_epochs=\x1b[31mred" in said.out
    assert "1 run refused: " in said.out
    assert "\x1b" not in said.out + said.err


def test_a_secret_coin_in_one_point_leaves_no_bound_on_all_of_them() -> None:
    """What such a run releases is not described by one unit, also where the coin is an axis."""
    own = {"mode": "certified", "selection": "poisson", "policy": "worst_case"}
    base = build_config({**own, "num_clients": 20, "num_rounds": 2}).as_dict()
    plan = make_plan(base, [parse_axis("amplification=true,false")], [0])
    row = {"seed": 0, "state": "done", "accuracy": 0.5, "message": None, "charged": 0}
    row |= {"claimed_epsilon": 2.0, "claimed_delta": 1e-5}
    found = summarise(plan, [{**row, "amplification": value} for value in (1, 0)])
    assert found.looks.epsilon == math.inf
    assert "together they are bounded by nothing" in found.looks.text


def test_a_worker_is_ended_while_its_thread_lets_go_of_it() -> None:
    """Ctrl-C: the child ends, its thread sees that first, and nothing fails."""
    worker, closed = _Worker(), []
    worker._child = types.SimpleNamespace(  # type: ignore[assignment]
        pipe=types.SimpleNamespace(send=lambda job: None),
        process=types.SimpleNamespace(wait=lambda timeout: setattr(worker, "_child", None)),
        close=lambda: closed.append(True),
    )
    worker.close()
    assert closed == [True]
