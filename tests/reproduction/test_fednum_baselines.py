"""`python -m reproduction fednum-baselines`: what stands beside a finished condensation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import Said
from fedquilt.config import build_config
from fedquilt.experiment.api import run_config
from fedquilt.report import condensation_row
from run_samples import contents

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {
    "method": "condense",
    "num_clients": 2,
    "model": "convnet-32",
    "num_rounds": 1,
    "eval_every": 1,
    "ipc": 1,
    "dc_iterations": 3,
    "model_epochs": 2,
    "model_n": 1,
}
BOUNDED: dict[str, Any] = {
    "method": "condense",
    "mode": "certified",
    "num_clients": 2,
    "num_rounds": 2,
    "mean_rounds": 1,
    "eval_every": 2,
    "ipc": 1,
    "synthetic_images": 20,
    "model_epochs": 2,
    "epsilon": 6,
}
Again = Callable[..., Said]
ROW = {"name", "accuracy", "loss", "bytes_up", "bytes_down", "rounds", "seconds", "raw", "note"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small condensation, which tests copy."""
    config = build_config(SMALL)
    return run_config(config.replace(output_dir=str(tmp_path_factory.mktemp("f")))).folder  # type: ignore[return-value]


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of a small condensation."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        pytest.param([], ["coreset", "fedavg"], marks=pytest.mark.slow),
        (["--baselines", "all"], ["coreset", "dm", "feddm", "fedavg"]),
        pytest.param(["--baselines", " dm , fedavg"], ["dm", "fedavg"], marks=pytest.mark.slow),
    ],
)
def test_rows_below_that_of_the_condensation(
    again: Again, folder: Path, asked: list[str], names: list[str]
) -> None:
    record = again("fednum-baselines", folder, *asked, "--json").json()
    assert [row["name"] for row in record["table"]] == ["fednum", *names]
    assert all(set(row) == ROW for row in record["table"])
    assert list(json.loads((folder / "baselines.json").read_text())["rows"]) == names


def test_they_are_computed_once(
    again: Again, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = again("fednum-baselines", folder, "--baselines", "coreset").out
    assert [line.split()[0] for line in first.splitlines()[2:4]] == ["fednum", "coreset"]
    before = contents(folder)
    monkeypatch.setattr("reproduction.baselines.run_baseline", pytest.fail)
    assert again("fednum-baselines", folder, "--baselines", "coreset").out == first
    assert contents(folder) == before


def test_what_an_older_version_was_asked_for_is_computed(again: Again, folder: Path) -> None:
    kept = folder / "baselines.json"
    kept.write_text(json.dumps({"schema_version": 1, "wanted": ["coreset"], "rows": {}}))
    record = again("fednum-baselines", folder, "--json").json()
    assert [row["name"] for row in record["table"]] == ["fednum", "coreset"]


@pytest.mark.slow
def test_beside_a_claim_there_is_the_released_head(again: Again, here: Path) -> None:
    done = run_config(build_config(BOUNDED))
    said = again("fednum-baselines", done.folder)
    assert said.code == 0, said.err
    assert "head: the released head itself" in said.out
    assert "Not covered" not in said.out
    # Options that only a baseline uses; such rows are not kept.
    changed = ["--set", "dc_iterations=2", "--set", "image_lr=0.5", "--baselines", "dm"]
    said = again("fednum-baselines", done.folder, *changed)
    assert "with real ones, 4 steps with a new random model each" in said.out
    assert "Not covered by the claim of the run, computed from raw data: dm" in said.out
    assert done.folder is not None
    assert set(json.loads((done.folder / "baselines.json").read_text())["rows"]) == {"head"}
    assert condensation_row(done.result)["name"] == "certified"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--baselines", "corset"], ["baselines='corset'", "'coreset'"]),
        (["--baselines", "head"], ["baselines='head'"]),
        (["--baselines", "coreset,coreset"], ["must not repeat"]),
        (["--baselines", ""], ["baselines=''"]),
        (["--set", "ipcs=2"], ["ipcs"]),
        (["--set", "ipc=1,2"], ["must be one key=value"]),
    ],
    ids=" ".join,
)
def test_mistakes_are_named(
    again: Again, folder: Path, arguments: list[str], words: list[str]
) -> None:
    said = again("fednum-baselines", folder, *arguments)
    assert said.code == 2
    assert all(word in said.err for word in words), said.err
    assert not (folder / "baselines.json").exists()


def test_what_is_no_condensation_is_refused(again: Again, here: Path) -> None:
    done = run_config(
        build_config({"mode": "fedavg", "num_rounds": 1, "num_clients": 3, "local_epochs": 1})
    )
    said = again("fednum-baselines", done.folder)
    assert (said.code, "must be a finished condensation" in said.err) == (2, True)
    assert "must be a folder" in again("fednum-baselines", "nowhere").err


@pytest.mark.parametrize(
    ("rows", "words"),
    [([1, 2], "rows"), ({"coreset": {"name": 3}}, "name must be a text")],
    ids=str,
)
def test_spoilt_rows_are_named(again: Again, folder: Path, rows: object, words: str) -> None:
    (folder / "baselines.json").write_text(json.dumps({"schema_version": 1, "rows": rows}))
    said = again("fednum-baselines", folder)
    assert said.code == 2
    assert "baselines.json" in said.err
    assert words in said.err


def test_ctrl_c_says_how_to_go_on(
    again: Again, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("reproduction.baselines.baseline_row", interrupt)
    said = again("fednum-baselines", folder)
    assert (said.code, said.err) == (130, "interrupted: the same command goes on from here\n")
