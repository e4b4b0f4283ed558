"""Optional packages: loaded when they are there, named when they are not."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from fedquilt.common import optional
from fedquilt.errors import FedquiltError, MissingPackageError


def test_a_module_that_is_there_is_returned() -> None:
    assert optional.require("psutil", "metrics") is psutil
    core = optional.require("prometheus_client.core", "metrics")
    assert core.__name__ == "prometheus_client.core"


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("psutil", "x needs the package psutil, which is not installed: "),
        ("prometheus_client", "x needs the package prometheus-client, which is not installed: "),
        ("PIL", "x needs the package pillow, which is not installed: pip install 'pillow'"),
        ("flwr", "x needs the package flwr, .*: pip install 'fedquilt\\[flower\\]'"),
    ],
)
def test_a_module_that_is_not_there_is_named(
    module: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=f"^{told}") as raised:
        optional.require(f"{module}.part", "x")
    assert isinstance(raised.value, FedquiltError)
    assert isinstance(raised.value, ImportError)


def test_a_folder_is_not_taken_for_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingPackageError, match="needs the package wandb"):
        optional.require("wandb", "a tracker")
    sys.modules.pop("wandb", None)


def test_figures_and_pictures_ask_before_they_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedquilt.report import plot_training_history

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match="a figure needs the package matplotlib"):
        plot_training_history({}, "mnist", 1, {}, tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []
