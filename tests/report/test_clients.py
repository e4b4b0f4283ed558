"""What clients measured, in tables and figures for the owner."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from report_samples import FAST, words

from fedquilt.errors import RunFolderError
from fedquilt.experiment.api import run_config
from fedquilt.record.folder import RunFolder
from fedquilt.report.clients import client_groups, client_tables, plot_clients
from run_samples import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def row(client: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    classes = {} if accuracy is None else {"3": {"examples": 2, "accuracy": accuracy}}
    return {"client": client, "examples": 2, "accuracy": accuracy, "classes": classes, **more}


def test_groups_by_participation_width_and_class() -> None:
    widths = [{"width": "1", "own_accuracy": 0.9}, {"width": "1/4", "own_accuracy": 0.3}]
    rows = [row(k, k / 10, **widths[k % 2]) for k in range(7)]
    rows.append(row(7, None))
    groups = client_groups(rows, joins=[0, 5, 1, 4, 2, 3, 6, 1])
    assert groups["never joined"]["mean"] == 0.0
    # in order of joins: 2 and 7 (once each), 4, 5, 3, 1, 6; number 7 measured nothing
    assert groups["joined least"]["mean"] == pytest.approx((0.2 + 0.4) / 2)
    assert groups["joined most"]["mean"] == pytest.approx((0.1 + 0.6) / 2)
    assert groups["own slice, width 1"]["mean"] == pytest.approx(0.9)
    assert groups["own slice, width 1/4"]["mean"] == pytest.approx(0.3)
    assert groups["class 3"]["mean"] == pytest.approx(np.mean([k / 10 for k in range(7)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    config = tiny(
        mode="fedavg", method="heterofl", tiers="1,1/4", model="mlp", noise_seed=None,
        client_test_fraction=0.3, output_dir=str(place),
    )  # fmt: skip
    found = run_config(config).folder
    assert found is not None
    return found


def read(folder: Path) -> tuple[Any, Any]:
    opened = RunFolder.open(folder)
    return opened.read_result(), opened.read_client_metrics()


def test_the_table_says_what_was_measured(folder: Path) -> None:
    text = client_tables(*read(folder), worst=3)
    assert max(map(len, text.splitlines())) <= 80
    metrics = RunFolder.open(folder).read_client_metrics()
    assert sorted(metrics) == [2, 4]
    values = [found["accuracy"] for found in metrics[4]]
    (everybody,) = [line for line in text.splitlines() if line.startswith("all clients")]
    assert f"{np.mean(values):.4f}" in everybody
    assert f"{min(values):.4f}" in everybody, "the worst of ten is the worst decile"
    assert "fedavg, heterofl" in text
    assert "owner's eyes" in text
    assert "own slice, width 1/4" in text


def test_the_figure_shows_what_was_measured(
    folder: Path, saved: list[Figure], tmp_path: Path
) -> None:
    plot_clients(*read(folder), tmp_path / "clients.png", FAST)
    left, right = saved[-1].axes
    metrics = RunFolder.open(folder).read_client_metrics()
    mean, worst = left.lines
    expected = [np.mean([found["accuracy"] for found in metrics[r]]) for r in (2, 4)]
    np.testing.assert_allclose(np.asarray(mean.get_ydata(), dtype=float), expected)
    lowest = [min(found["accuracy"] for found in metrics[r]) for r in (2, 4)]
    np.testing.assert_allclose(np.asarray(worst.get_ydata(), dtype=float), lowest)
    assert "owner's eyes" in words(left)
    labels = [tick.get_text() for tick in right.get_yticklabels()]
    assert "own slice, width 1/4" in labels
    assert len(right.patches) == len(labels)
    assert "heterofl" in saved[-1].get_suptitle()


def test_the_figure_is_the_owners_alone(folder: Path, tmp_path: Path, cli: Any) -> None:
    old = os.umask(0o022)
    try:
        place = tmp_path / "clients.png"
        cli("clients", str(folder), "--figure", str(place))
    finally:
        os.umask(old)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600


def test_several_runs_are_drawn_together(
    folder: Path, saved: list[Figure], tmp_path: Path, cli: Any
) -> None:
    result, metrics = read(folder)
    other = {**result, "metadata": {**result["metadata"], "seed": 9}}
    plot_clients([result, other], [metrics, metrics], tmp_path / "clients.png", FAST)
    left, right = saved[-1].axes
    assert len(left.lines) == 4
    assert len(right.lines) == 2
    labels = [text.get_text() for text in saved[-1].legends[0].get_texts()]
    assert [label.rsplit(", ", 1)[1] for label in labels] == ["seed 0", "seed 9"]
    said = cli("clients", folder, folder, "--json").json()
    assert list(said["evaluations"]) == [str(folder)]


def test_a_run_without_measures_says_how_to_get_them(tmp_path: Path) -> None:
    done = run_config(tiny(mode="fedavg", noise_seed=None, output_dir=str(tmp_path)))
    assert done.folder is not None
    with pytest.raises(RunFolderError, match="client_test_fraction"):
        client_tables(*read(done.folder))


def test_the_command(cli: Any, folder: Path, tmp_path: Path) -> None:
    figure = tmp_path / "drawn.png"
    said = cli("clients", folder, "--figure", figure)
    assert said.code == 0, said.err
    assert figure.is_file()
    assert "all clients" in said.out
    assert sorted(cli("clients", folder, "--json").json()["evaluations"]) == ["2", "4"]
    assert cli("clients", tmp_path / "nowhere").code == 2


@pytest.mark.parametrize(("metric", "word"), [("auroc", "lowest AUROC"), ("mse", "highest MSE")])
def test_without_an_accuracy_the_headline_metric_is_shown(
    folder: Path, metric: str, word: str, saved: list[Figure], tmp_path: Path
) -> None:
    result = dict(read(folder)[0])
    result["metadata"] = {**result["metadata"], "metrics": [metric, "f1"]}
    values = [0.5, 0.75, None, 0.25]
    rows = [
        {"client": k, "examples": 3, "accuracy": None, "loss": 0.1, metric: value}
        for k, value in enumerate(values)
    ]
    text = client_tables(result, {4: rows}, worst=1)
    (everybody,) = [line for line in text.splitlines() if line.startswith("all clients")]
    assert "0.5000" in everybody
    assert f"clients with the {word}" in text
    worst = 0.75 if metric == "mse" else 0.25
    assert f"{worst:.4f}" in everybody
    assert f"{worst:.4f}" in text.splitlines()[-1]
    plot_clients(result, {4: rows}, tmp_path / "clients.png", FAST)
    left, right = saved[-1].axes
    assert left.get_ylabel().startswith(metric.upper())
    assert len(right.patches) > 0
