"""Numbers and names beyond all measure: one message and exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from run_samples import flags

Cli = Callable[..., Any]
LONG = "x" * 300
CERTIFIED = [*flags(mode="certified", noise_seed=None), "--quiet"]


def assert_refused(said: Any, *words: str) -> None:
    """Fail unless a command ended with one message."""
    assert said.code == 2
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err


def test_a_cohort_of_nobody_is_not_planned(cli: Cli) -> None:
    """A run has at least one client in a cohort, and so has its plan."""
    for share in ("1e-300", "0.005"):
        record = cli("plan", "--clients-per-round", share, "--parameters", 9, "--json").json()
        assert record["cohort"] == 1.0


def test_noise_over_more_rounds_than_memory_holds(cli: Cli, here: Path) -> None:
    said = cli("run", *flags(mode="certified", noise_bands=2147483647))
    assert_refused(said, "noise_bands=2147483647 must be <= 10000")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", *flags(), "--quiet", "--output-dir", LONG],
        ["compare", *flags()[2:], "--modes", "quap_fl", "--seeds", "0", "--output-dir", LONG],
        ["run", *CERTIFIED, "--ledger", LONG],
        ["run", *CERTIFIED, "--ledger=a", "--population", LONG],
        ["run", "--resume", LONG, "--quiet"],
        ["condense", "--resume", LONG],
        ["ledger", "show", LONG],
        ["ledger", "verify", LONG],
        ["statement", LONG],
    ],
    ids=lambda arguments: " ".join(part for part in arguments if part.islower())[:12],
)
def test_names_longer_than_a_file_may_have(cli: Cli, here: Path, arguments: list[str]) -> None:
    assert_refused(cli(*arguments), LONG)
    assert list(here.iterdir()) == []
