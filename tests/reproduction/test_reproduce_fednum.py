"""`python -m reproduction fednum`: a condensation beside what it is compared with."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from fedquilt.config import build_config
from fedquilt.config.condense import CONDENSE_PRESETS
from fedquilt.errors import DataError
from fedquilt.record.folder import RunFolder
from reproduction import (
    PAPERS,
    Wanted,
    cells,
    fednum,
    fednum_page,
    kept_cells,
    reproduce,
    run_cells,
)
from reproduction.cells import Cell, Kept, _completed

DOCS = Path(__file__).resolve().parents[2] / "docs"
TINY: dict[str, Any] = {
    "num_clients": 4,
    "model": "convnet-32",
    "num_rounds": 1,
    "dc_iterations": 1,
    "model_epochs": 1,
    "max_samples": 4,
    "min_group": 2,
    "ipc": 1,
}


def test_the_cells_are_the_comparison() -> None:
    full = {cell.name: cell for cell in fednum.cells("full")}
    assert len(full) == 2 * 2 * 3 + 2 * 3
    default = full["default-cifar10-seed0"].config()
    assert (default["num_clients"], default["dirichlet_alpha"], default["ipc"]) == (50, 0.1, 10)
    assert full["default-mnist-seed1"].baselines == ("coreset", "dm", "feddm", "fedavg")
    document = full["document-cifar10-seed0"].config()
    preset = CONDENSE_PRESETS["fednum-document"]
    assert {key: document[key] for key in preset} == preset


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_baselines_stand_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dataclasses.replace(
        fednum.SIZES["small"], datasets={"digits": TINY}, seeds=(0,), document=TINY
    )
    monkeypatch.setitem(fednum.SIZES, "small", tiny)
    text = reproduce("fednum", Wanted(jobs=1))
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[2:]] == [
        "| FedNum, defaults here",
        *(f"| {title}" for title in fednum.BASELINES.values()),
        "| FedNum, published settings",
    ]
    assert [row[-1] for row in rows[2:]] == ["no |", "yes |", "yes |", "no |", "no |", "yes |"]
    kept = json.loads(Path("reproduced/fednum/small/default-digits-seed0.json").read_text())
    assert set(kept["beside"]) == set(fednum.BASELINES)
    assert kept["bytes_up"] > kept["bytes_down"] > 0
    assert kept["claimed_epsilon"] == "inf"


def test_a_kept_file_is_checked(tmp_path: Path) -> None:
    cell = fednum.cells("small", ["default"])[0]
    path = DOCS / "reproduction" / "fednum" / "small" / f"{cell.name}.json"
    record = json.loads(path.read_text())
    copy = tmp_path / path.name

    def found(**changes: Any) -> bool:
        copy.write_text(json.dumps({**record, **changes}))
        return cell.name in kept_cells(tmp_path, [cell])

    assert found()
    without = {name: row for name, row in record["beside"].items() if name != "dm"}
    assert not found(beside=without), "a baseline that is wanted now is computed"
    for changes in ({"bytes_up": "many"}, {"beside": {"dm": {"accuracy": 1.0}}}, {"seconds": "x"}):
        with pytest.raises(DataError, match=path.name):
            found(**changes)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_kill_before_the_baselines_goes_on_with_them() -> None:
    settings = {"method": "condense", "mode": "fednum", "dataset": "digits", **TINY}
    cell, work = Cell("one", settings, 0, ("coreset",)), Path("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "_run_baselines", lambda *given: {0: "killed"})
        with pytest.raises(DataError, match="1 cells could not run: one: killed"):
            run_cells(Path("kept"), [cell], work, {})
    assert not Path("kept").exists()
    kept = run_cells(Path("kept"), [cell], work, {})
    assert set(kept["one"].record["beside"]) == {"coreset"}
    (run,) = work.rglob("result.json")  # no second run
    assert set(RunFolder(run.parent).read_baselines()) == {"coreset"}


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_baselines_that_fail_say_why() -> None:
    settings = {"method": "condense", "mode": "fednum", "dataset": "digits", **TINY}
    cell = Cell("one", settings, 0, ("corset",))
    with pytest.raises(DataError, match=r"one: its baselines ended with code 2: .*'corset' must"):
        run_cells(Path("kept"), [cell], Path("work"), {})


def test_a_row_says_over_how_many_seeds_it_is() -> None:
    sent = {"accuracy": 0.5, "rounds": 1, "bytes_up": 10, "bytes_down": 0}
    beside = {name: {**sent, "raw": False} for name in fednum.BASELINES}
    every = fednum.rows("full")
    kept = {every["mnist", "default"][0].name: Kept({**sent, "beside": beside})}
    kept |= {cell.name: Kept(sent) for cell in every["mnist", "document"]}
    text = fednum_page.markdown("full", kept)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[0][2] == "n"
    assert [row[2] for row in rows[2:]] == ["1 of 3"] * (1 + len(fednum.BASELINES)) + ["3"]


@pytest.mark.parametrize("scale", fednum.SCALES)
def test_the_page_shows_what_is_kept(scale: str) -> None:
    text = PAPERS["fednum"].markdown(scale, DOCS / "reproduction" / "fednum" / scale, "")
    assert text in (DOCS / "reproduction.md").read_text()


def test_an_older_run_did_not_have_what_a_data_set_makes_of_later_options() -> None:
    cell = next(cell for cell in fednum.cells("full") if cell.name == "default-cifar10-seed0")
    now = cell.config()
    assert (now["row_bits"], now["model_families"]) == (8, 3)
    before = {key: now[key] for key in now if key not in ("row_bits", "model_families")}
    assert _completed(before) == {**now, "row_bits": 32, "model_families": 1}


def test_the_cells_of_colour_are_the_command_of_the_page() -> None:
    text = (DOCS / "condense.md").read_text()
    block = next(
        b for b in text.split("```bash\n") if b.startswith("fedquilt condense --dataset cifar")
    )
    words = shlex.split(block.split("```")[0].replace("\\\n", " "))[2:]
    given = {
        key[2:].replace("-", "_"): value for key, value in zip(*[iter(words)] * 2, strict=True)
    }
    cell = fednum.colour("full")[50][0]
    config = {**cell.config(), "precision": "bf16"}
    assert {key: str(config[key]) for key in given} == given
    whole = build_config({**cell.settings, "seed": 0}).as_dict()
    assert {key: whole[key] for key in cell.config()} == cell.config(), "the defaults of now"
    ipcs = {
        ipc: (len(cells), cells[0].config()["model_epochs"])
        for ipc, cells in fednum.colour("full").items()
    }
    assert ipcs == {10: (3, 1000), 50: (3, 800)}
    assert fednum.colour("small") == {}


def test_a_colour_row_is_what_its_cells_say() -> None:
    cells = fednum.colour("full")[10]
    values = (0.603, 0.599, 0.605)
    kept = {
        cell.name: Kept({"accuracy": v, "bytes_up": 233_000_000, "bytes_down": 1, "rounds": 6})
        for cell, v in zip(cells, values, strict=True)
    }
    text = fednum_page.colour_table("full", kept)
    assert "| 10 | 3 | 60.23 ± 0.31 | 60.3, 59.9, 60.5 | 233 to 233 |" in text
    assert fednum_page.colour_table("full", {}) == ""
