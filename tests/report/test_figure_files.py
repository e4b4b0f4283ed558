"""Settings of figures, and how the files come to be."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_samples import FAST, make_history

from fedquilt.config import HYPERPARAMETERS, VISUALIZATION_CONFIG
from fedquilt.errors import InvalidValueError, StorageError
from fedquilt.report import figure_settings, plot_training_history


def test_defaults_are_the_documented_ones_and_given_keys_win() -> None:
    default = figure_settings({})
    assert (default.dpi, default.format, default.style) == (150, "png", "seaborn-v0_8")
    assert default.figsize == (12, 10)
    given = figure_settings({"dpi": 72, "figsize": [4, 3]}, figsize=(6, 5))
    assert (given.dpi, given.figsize) == (72, (4, 3))
    assert figure_settings(None, figsize=(6, 5)).figsize == (6, 5)


def test_keys_of_a_run_may_stand_beside_those_of_a_figure() -> None:
    merged = {**VISUALIZATION_CONFIG, **HYPERPARAMETERS, "epsilon": 3.0}
    assert figure_settings(merged) == figure_settings({})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"style": "seaborn"}, "style='seaborn' must be one of .*did you mean 'seaborn"),
        ({"style": None}, "style=None must be one of"),
        ({"format": "jpg"}, "format='jpg' must be one of 'png', 'pdf', 'svg'"),
        ({"dpi": 0}, "dpi=0 must be >= 10"),
        ({"figsize": (3,)}, r"figsize=\(3,\) must be \(width, height\)"),
        ({"figsize": "12"}, "figsize='12' must be"),
        ({"figsize": (3, -1)}, "figsize=-1 must be > 0"),
        ({"show_plot": "no"}, "show_plot='no' must be True or False"),
        ({"stile": "ggplot"}, "did you mean 'style'"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_written(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        plot_training_history(make_history(), "mnist", 1, config, tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")]
)
def test_the_ending_decides_the_format_and_folders_are_made(
    tmp_path: Path, name: str, start: bytes
) -> None:
    path = plot_training_history(make_history(), "mnist", 1, FAST, tmp_path / "new" / "dir" / name)
    assert path == str(tmp_path / "new" / "dir" / name)
    assert Path(path).read_bytes().startswith(start)
    assert [item.name for item in Path(path).parent.iterdir()] == [name]


def test_a_path_without_ending_gets_the_configured_one(tmp_path: Path) -> None:
    config = FAST | {"format": "svg"}
    path = plot_training_history(make_history(), "mnist", 1, config, str(tmp_path / "figure"))
    assert path == str(tmp_path / "figure.svg")


def test_a_foreign_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"must end in \.png, \.pdf or \.svg"):
        plot_training_history({}, "mnist", 1, FAST, tmp_path / "figure.jpg")


def test_without_a_path_the_figure_goes_to_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = plot_training_history(make_history(), "mnist", 7, FAST)
    assert re.fullmatch(r"results/mnist_seed7_training_\d{8}_\d{6}\.png", path)
    assert (tmp_path / path).is_file()


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("ending", ["pdf", "svg"])
def test_the_same_history_gives_the_same_file(tmp_path: Path, ending: str) -> None:
    first, second = (
        Path(plot_training_history(make_history(), "mnist", 1, FAST, tmp_path / f"{n}.{ending}"))
        for n in "ab"
    )
    assert first.read_bytes() == second.read_bytes()


def test_a_folder_that_cannot_be_used_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot write '.*file/figure\.png'"):
        plot_training_history({}, "mnist", 1, FAST, tmp_path / "file" / "figure.png")


def test_a_full_disk_leaves_the_old_figure_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figure.png"
    path.write_text("old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="the disk is full"):
        plot_training_history({}, "mnist", 1, FAST, path)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["figure.png"]


@pytest.mark.usefixtures("saved")
def test_a_reader_of_the_old_figure_never_sees_half_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    path.write_text("old")
    with path.open() as reader:
        plot_training_history({}, "mnist", 1, FAST, path)
        assert reader.read() == "old"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_show_plot_shows_once_and_leaves_no_open_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib
    from matplotlib import pyplot

    monkeypatch.setitem(matplotlib.rcParams, "backend", "agg")
    pyplot.switch_backend("agg")
    shown: list[int] = []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(len(pyplot.get_fignums())))
    path = tmp_path / "figure.png"
    plot_training_history(make_history(), "mnist", 1, FAST | {"show_plot": True}, path)
    assert path.is_file()
    assert shown == [1]
    assert pyplot.get_fignums() == []


SCRIPT = """
import sys
import fedquilt.report, fedquilt.utils
assert not {"matplotlib", "torch"} & set(sys.modules), "heavy at import"
import matplotlib
def style(): return {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != "backend"}
before = style()
fedquilt.utils.plot_training_history({"test_accuracy": [0.5]}, "mnist", 1, {"dpi": 40}, sys.argv[1])
fedquilt.utils.generate_summary_table(0.5, 1.0, "mnist", 1, {}, {})
assert not {"matplotlib.pyplot", "torch"} & set(sys.modules), "pyplot or torch was loaded"
assert style() == before, "the style leaked"
"""


def test_importing_is_light_and_drawing_leaves_no_global_state(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "figure.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
