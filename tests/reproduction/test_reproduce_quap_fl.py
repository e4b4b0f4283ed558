"""`python -m reproduction quap-fl`: the paper's cells, kept, beside what it prints."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedquilt
from command_line import Said
from fedquilt.config import PRESETS
from fedquilt.errors import DataError, InvalidValueError
from reproduction import (
    PAPERS,
    Wanted,
    cells,
    kept_cells,
    quap_fl,
    quap_fl_page,
    reproduce,
    run_cells,
    write_page,
)
from reproduction.cells import HOW, Cell, Kept
from reproduction.command import _cells
from reproduction.papers import BYTES_FILE
from reproduction.tables import mean, origin
from run_processes import environment

TINY = {"num_rounds": 2, "eval_every": 1, "local_epochs": 1, "num_clients": 6}
Again = Callable[..., Said]
PLACE = Path("reproduced/quap-fl/small")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of six clients, one seed."""
    for name in ("paper-mnist", "paper-cifar10"):
        monkeypatch.setitem(PRESETS, name, {**PRESETS[name], **TINY, "clients_per_round": 3})
    one = quap_fl.Scale({"mnist": "digits"}, (0,), (0,))
    monkeypatch.setitem(quap_fl.SIZES, "small", one)
    monkeypatch.setattr(quap_fl, "bytes_sent", lambda mode: 44_695_848)


def test_the_cells_are_the_papers_experiments() -> None:
    full = {cell.name: cell for cell in quap_fl.cells("full")}
    assert len(full) == 102
    assert len([name for name in full if name.startswith("table2")]) == 2 * 2 * 3 * 3
    cell = full["table2-mnist-quap_fl-seed0"]
    assert {key: cell.config()[key] for key in PRESETS["paper-mnist"]} == PRESETS["paper-mnist"]
    assert not cell.config()["early_stopping"]
    rows = quap_fl.table3("full")
    assert len(rows) == 8
    assert set(quap_fl.TABLE_3) <= set(rows)
    plain = rows[False, False, False][0].config()
    assert (plain["budget_alpha"], plain["min_clip"], plain["noise_layers"]) == (0.0, 1.0, "all")
    assert rows[True, True, True][0].name == "table2-mnist-quap_fl-seed0"
    configs = [json.dumps(cell.config(), sort_keys=True) for cell in full.values()]
    assert len(configs) == len(set(configs)), "no run is done twice"


def test_table_2_is_run_as_the_published_code_and_as_the_documents_have_it() -> None:
    def used(name: str) -> dict[str, Any]:
        return next(c for c in quap_fl.cells("full", ["table2", name]) if c.name == one).config()

    one = "table2-cifar10-fedavg-seed0"
    code = used("table2")
    assert (code["learning_rate"], code["local_epochs"], code["lr_decay"]) == (0.005, 3, 0.995)
    one = "table2-documents-cifar10-fedavg-seed0"
    document = used("table2-documents")
    # The API document's list of HYPERPARAMETERS; it names no decay.
    assert (document["learning_rate"], document["local_epochs"]) == (0.01, 5)
    changed = {key for key in code if code[key] != document[key]}
    assert changed == {"learning_rate", "local_epochs", "lr_decay"}
    rows = quap_fl.table2("full")["cifar10", "fedavg"]
    others = quap_fl.table2("full", "table2-documents")["cifar10", "fedavg"]
    kept = {c.name: Kept({"accuracy": 0.5}) for c in rows}
    kept |= {c.name: Kept({"accuracy": 0.7}) for c in others}
    text = quap_fl_page.markdown("full", kept, {}, "")
    row = next(line for line in text.splitlines() if line.startswith("| CIFAR-10 | FedAvg"))
    assert row.split(" | ")[3::2] == ["50.00 ± 0.00", "70.00 ± 0.00"]


def test_what_secret_noise_moves_is_printed_to_a_tenth() -> None:
    rows = quap_fl.table2("full")
    values = (0.86640, 0.86620, 0.86624)
    for mode, shown in (("quap_fl", "86.6 (86.6 to 86.6)"), ("fedavg", "86.63 ± 0.01")):
        row = rows["mnist", mode]
        kept = {c.name: Kept({"accuracy": v}) for c, v in zip(row, values, strict=True)}
        assert mean(row, kept) == shown


def test_a_table_says_from_which_code_its_cells_come() -> None:
    row = quap_fl.table2("full")["mnist", "fedavg"]
    first = {"accuracy": 0.9, "commit": "a" * 40, "source": "1" * 64}
    other = {"accuracy": 0.9, "commit": "b" * 40 + "-dirty", "source": "2" * 64}

    def said(*records: dict[str, Any]) -> str:
        kept = {c.name: Kept(record) for c, record in zip(row, records, strict=False)}
        return origin(row, kept)

    assert said(first, first) == f"Code: {'a' * 12} (source {'1' * 12})."
    assert said(first, other) == (
        f"Cells of 2 states of the code: {'a' * 12} (source {'1' * 12}); "
        f"{'b' * 12}-dirty (source {'2' * 12})."
    )
    assert said({"accuracy": 0.9}) == "Code: commit not recorded."
    assert "2 states" in said({"accuracy": 0.9}, first)
    assert said() == ""


def test_the_code_of_a_cell_can_be_checked_against_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "fedquilt"
    package.mkdir(parents=True)
    (tmp_path / "reproduction").mkdir()
    files = {"fedquilt/__init__.py": b"1\n", "reproduction/cells.py": b"2\n"}
    (package / "__init__.py").write_bytes(files["fedquilt/__init__.py"])
    (tmp_path / "reproduction/cells.py").write_bytes(files["reproduction/cells.py"])
    (package / "notes.txt").write_text("no code")
    monkeypatch.setattr(fedquilt, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(cells, "__file__", str(tmp_path / "reproduction" / "cells.py"))
    wanted = hashlib.sha256(
        b"".join(n.encode() + b"\0" + hashlib.sha256(files[n]).digest() for n in sorted(files))
    ).hexdigest()
    assert cells.source_origin() == {"commit": None, "source": wanted}
    assert cells.source_origin("abc") == {"commit": "abc", "source": wanted}

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        run = subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)
        return run.stdout.decode().strip()

    git("init", "--quiet")
    assert cells.source_origin()["commit"] is None, "not a part of this checkout"
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    assert cells.source_origin()["commit"] == git("rev-parse", "HEAD")
    (package / "__init__.py").write_bytes(b"3\n")
    changed = cells.source_origin()
    assert changed["commit"] == git("rev-parse", "HEAD") + "-dirty"
    assert changed["source"] != wanted


@pytest.mark.slow
@pytest.mark.usefixtures("tiny", "here")
def test_a_table_with_ours_beside_theirs(again: Again) -> None:
    said = again("quap-fl", "--only", "table1,table2", "--jobs", "1", "--quiet")
    assert said.code == 0, said.err
    assert "| digits for MNIST | QuAP-FL | 93.30 ± 0.10 | " in said.out
    assert "| FedAvg | 44.6 MB, 1.00x | 44.7 MB, 1.00x |" in said.out
    assert "at the first evaluation on the test set" in said.out
    names = {f"table2-digits-{mode}-seed0.json" for mode in quap_fl.MODES}
    assert {path.name for path in PLACE.iterdir()} == {"figures.png", BYTES_FILE, *names}
    record = json.loads((PLACE / "table2-digits-quap_fl-seed0.json").read_text())
    assert record["config"]["num_rounds"] == record["rounds"] == 2
    assert {key: record[key] for key in ("commit", "source")} == cells.source_origin()
    assert record["claimed_epsilon"] == "inf"
    assert record["curve"]["rounds"] == [1, 2]
    assert record["noise_to_signal"] > 1
    assert len((PLACE / "table2-digits-quap_fl-seed0.json").read_bytes()) < 20_000
    # Finished cells are kept: nothing is left to run, wherever the runs have gone.
    shutil.rmtree("results")
    twice = again("quap-fl", "--only", "table2", "--jobs", "1", "--quiet")
    assert twice.code == 0
    assert not Path("results").exists()
    assert "| digits for MNIST | QuAP-FL |" in twice.out


def small_cell(**changes: Any) -> Cell:
    settings = {**quap_fl.settings("small", "mnist", "fedavg"), **TINY, "clients_per_round": 2}
    return Cell("one", {**settings, **changes}, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_kept_cell_counts_only_for_its_configuration() -> None:
    folder, work = Path("kept"), Path("work")
    cell = small_cell()
    assert set(run_cells(folder, [cell], work, {})) == {"one"}
    assert set(kept_cells(folder, [cell])) == {"one"}
    assert kept_cells(folder, [small_cell(learning_rate=0.5)]) == {}
    assert {"device", "engine"} <= set(HOW)
    assert not set(HOW) & set(cell.config())
    path = folder / "one.json"
    path.write_text(path.read_text().replace('"accuracy"', '"acuracy"'))
    with pytest.raises(DataError, match="accuracy"):
        kept_cells(folder, [cell])


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_finished_run_of_other_defaults_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, whole = small_cell(), Cell.config
    run_cells(Path("kept"), [cell], Path("work"), {})
    # As if a newer fedquilt meant something else by what the cell leaves unsaid.
    monkeypatch.setattr(Cell, "config", lambda self: {**whole(self), "lr_decay": 0.5})
    assert kept_cells(Path("kept"), [cell]) == {}
    run_cells(Path("kept"), [cell], Path("work"), {})
    assert len(list(Path("work").rglob("result.json"))) == 2


@pytest.mark.usefixtures("here")
def test_a_cell_that_cannot_run_says_why() -> None:
    with pytest.raises(DataError, match=r"1 cells could not run: one: .*nowhere"):
        run_cells(Path("kept"), [small_cell()], Path("work"), {"data_dir": "nowhere"})


def test_a_cell_whose_process_dies_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = tmp_path / "sitecustomize.py"
    lost.write_text(
        "import sys\nif 'fedquilt.sweep.worker' in sys.orig_argv: sys.exit('no memory left')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(DataError, match=r"ended with code 1: .*no memory left"):
        run_cells(tmp_path / "kept", [small_cell()], tmp_path / "work", {})


@pytest.mark.slow
@pytest.mark.usefixtures("tiny", "here")
def test_some_of_the_cells_and_a_trial() -> None:
    lines: list[str] = []
    some = Wanted(only="table2", seeds="0", datasets="digits", jobs=1, rounds=1)
    text = reproduce("quap-fl", some, lines.append)
    assert len(text.splitlines()) == 3
    assert all("cpu" in line and "float32" in line for line in text.splitlines())
    # A trial is kept apart, in no table, and the whole form does not take it for its own.
    assert not PLACE.exists()
    trial = PLACE.with_name("small-1-rounds")
    assert len(list(trial.glob("table2-*.json"))) == 3
    assert kept_cells(trial, quap_fl.cells("small")) == {}
    assert lines[0].startswith("3 runs, 1 at a time; 0 of them are kept in ")
    assert lines[1].startswith("1 of 3 runs after ")
    assert re.search(r"3 runs are kept in \S+; \d+ s with 1 at a time on cpu", lines[-1])


def test_a_seed_after_the_other() -> None:
    every, chosen = _cells(PAPERS["quap-fl"], Wanted(scale="full", only="table2"))
    assert [cell.seed for cell in chosen] == [0] * 6 + [1] * 6 + [2] * 6
    assert {cell.dataset for cell in chosen[:6]} == {"mnist", "cifar10"}
    assert len(every) == 102


@pytest.mark.slow
def test_the_command_needs_little_beside_torch(tmp_path: Path) -> None:
    """Neither typer nor matplotlib: machines with a GPU may have neither."""
    hidden = "import sys\nfor name in {names!r}: sys.modules[name] = None\n{program}"
    names = ["typer", "rich", "matplotlib", "safetensors", "sklearn", "pooch", "PIL"]
    program = (
        "from reproduction.__main__ import main\n"
        "sys.argv = ['reproduce', 'quap-fl', '--scale', 'full', '--seeds', '7']\nsys.exit(main())"
    )
    run = subprocess.run(
        [sys.executable, "-c", hidden.format(names=names, program=program)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=Path(__file__).resolve().parents[2],
    )
    assert run.returncode == 2
    assert "seeds='7' must be one of '0', '1', '2'" in run.stderr


def test_sections_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n<!-- results: quap-fl small -->\nold\n<!-- end: quap-fl small -->\nB\n")
    write_page(page, "quap-fl", "small", "new")
    text = page.read_text()
    assert "old" not in text
    assert text.endswith("new\n<!-- end: quap-fl small -->\nB\n")
    with pytest.raises(InvalidValueError, match="each once"):
        write_page(page, "quap-fl", "full", "new")


def test_mistakes_are_found_before_anything_runs(again: Again) -> None:
    for arguments, words in (
        (["quapfl"], "paper='quapfl' must be"),
        (["quap-fl", "--scale", "huge"], "scale='huge' must be"),
        (["quap-fl", "--only", "table9"], "only='table9' must be"),
        (["quap-fl", "--engine", "steam"], "engine='steam' must be"),
        (["quap-fl", "--seeds", "0,7"], "seeds='7' must be"),
        (["quap-fl", "--datasets", "imagenet"], "datasets='imagenet' must be"),
        (["quap-fl", "--rounds", "0"], "rounds=0 must be"),
        (["quap-fl", "--page", "nowhere.md"], "page='nowhere.md' must have"),
        (["quap-fl", "--page", "nowhere.md", "--rounds", "1"], "must be left out of a trial"),
        (["quap-fl", "--jobs", "-1"], "jobs=-1 must be"),
        (["quap-fl", "--device", "cpu", "--precision", "bf16"], "precision='bf16' must be"),
    ):
        said = again(*arguments)
        assert said.code == 2
        assert words in said.err
    assert "quap-fl" in PAPERS


@pytest.mark.parametrize("scale", quap_fl.SCALES)
def test_the_page_shows_what_is_kept(scale: str) -> None:
    root = Path(__file__).resolve().parents[2] / "docs"
    folder = root / "reproduction" / "quap-fl" / scale
    figure = f"reproduction/quap-fl/{scale}/figures.png" if folder.is_dir() else ""
    text = PAPERS["quap-fl"].markdown(scale, folder, figure)
    assert text in (root / "reproduction.md").read_text()


def test_readme_prints_what_is_kept_of_the_papers_own_networks() -> None:
    root = Path(__file__).resolve().parents[2]
    text = " ".join((root / "README.md").read_text().split())
    said = re.search(r"`quap_fl` reaches ([\d.]+) % on MNIST and ([\d.]+) % on CIFAR-10", text)
    assert said is not None
    rows = quap_fl.table2("full")
    kept = kept_cells(root / "docs" / "reproduction" / "quap-fl" / "full", quap_fl.cells("full"))
    for dataset, shown in zip(("mnist", "cifar10"), said.groups(), strict=True):
        values = [kept[cell.name].accuracy for cell in rows[dataset, "quap_fl"]]
        assert shown == f"{100 * sum(values) / len(values):.1f}"
