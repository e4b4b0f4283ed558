"""A figure that cannot be written: a warning, and everything else as it would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fedquilt.errors import StorageError
from run_samples import flags

Cli = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("one_thread")
WRITERS = ("style", "images")
SMALL = "--num-clients 2 --model convnet-32 --num-rounds 1 --ipc 1 --dc-iterations 1 --model-n 1"


@pytest.fixture(
    params=[StorageError("the disk is full"), OSError(28, "the disk is full")], ids=repr
)
def full_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every figure fail, and nothing else."""

    def fails(*arguments: object, **options: object) -> None:
        raise request.param

    for name in WRITERS:
        monkeypatch.setattr(f"fedquilt.report.{name}.write_file", fails)


@pytest.mark.usefixtures("full_disk")
def test_a_run_is_finished_all_the_same(cli: Cli) -> None:
    said = cli("run", *flags(mode="certified"), "--quiet")
    assert said.code == 0
    assert "claim     epsilon: inf, no guarantee" in said.out
    assert "warning: training.png could not be drawn: " in said.err
    assert "the disk is full" in said.err
    assert cli("run", *flags(), "--json").json()["rounds"] == 4


@pytest.mark.usefixtures("full_disk")
def test_a_comparison_prints_its_table(cli: Cli) -> None:
    asked = ("compare", *flags(mode="fedavg")[2:], "--modes", "fedavg", "--seeds", "0")
    said = cli(*asked, "--quiet")
    assert said.code == 0
    assert "fedavg" in said.out
    assert "figure: " not in said.out
    assert "warning: comparison.png could not be drawn: " in said.err
    assert cli(*asked, "--json").json()["figure"] is None


@pytest.mark.usefixtures("full_disk")
def test_a_condensation_goes_on(cli: Cli) -> None:
    said = cli("condense", *SMALL.split(), "--model-epochs", 1, "--quiet")
    assert said.code == 0
    assert "What may be claimed (" in said.out
    assert "pictures  " not in said.out
    assert "warning: the pictures could not be drawn: " in said.err
    assert "the disk is full" in said.err


@pytest.mark.parametrize(
    "error", [RuntimeError("no font can be read"), ImportError("a module is half there")], ids=repr
)
def test_a_run_has_its_statement_whatever_kept_the_figure_from_being_drawn(
    cli: Cli, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("fedquilt.cli.run.draw_history", fails)
    said = cli("run", *flags(mode="certified"), "--quiet")
    assert said.code == 0
    assert "claim     epsilon: inf, no guarantee" in said.out
    cause = f"{type(error).__name__}: {error}"
    assert said.err == f"warning: training.png could not be drawn: {cause}\n"
