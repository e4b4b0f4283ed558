"""The tables of docs/unequal.md: what was measured, and what the page says of it."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from benchmarks import kept, unequal

LINES = kept.read(unequal.FILE)
PAGE = (kept.DOCS / "unequal.md").read_text()


def mean(name: str, coming: str, arm: str, figure: str) -> float:
    """Return the mean over seeds of a figure."""
    return statistics.mean(
        float(line[figure])
        for line in LINES
        if (line["set"], line["coming"], line["arm"]) == (name, coming, arm)
    )


def test_the_page_shows_what_was_measured() -> None:
    for name in unequal.SETS:
        assert unequal.table(LINES, name) in PAGE


def test_every_row_was_measured_at_three_seeds_once() -> None:
    seen = Counter((x["set"], x["coming"], x["arm"], x["seed"]) for x in LINES)
    assert set(seen.values()) == {1}
    rows = [(s, c, a) for s in unequal.SETS for c in unequal.COMING for a in unequal.ARMS]
    assert seen.keys() == {(*row, seed) for row in rows for seed in (0, 1, 2)}


def test_every_statement_keeps_to_its_epsilon() -> None:
    for line in LINES:
        if line["arm"] == "fedavg":
            assert line["stated"] == "inf"
        else:
            assert max(line["epsilons"]) <= line["stated"] + 1e-3 <= 6.001


def test_what_the_page_says_of_groups_is_what_was_measured() -> None:
    def of(coming: str, arm: str, figure: str) -> float:
        return mean("mnist", coming, arm, figure)

    said = PAGE.split("On MNIST:")[1]
    for arm in unequal.ARMS:
        thirds = [of("regardless", arm, third) for third in unequal.THIRDS]
        assert max(thirds) - min(thirds) < 1
        least, most = (of("by class", arm, f"joined {how}") for how in ("least", "most"))
        assert f"{most - least:.1f}" in said
    for how in ("least", "most"):
        gained = [of("by class", arm, f"joined {how}") for arm in ("adaptive", "worst case")]
        assert f"{gained[0] - gained[1]:.1f}" in said
    narrow = [
        of(coming, arm, "own slice, width 1") - of(coming, arm, "own slice, width 1/4")
        for arm in unequal.ARMS
        for coming in unequal.COMING
    ]
    every_round = narrow[2:6]
    told = (*narrow[:2], min(every_round), max(every_round), *narrow[6:])
    assert all(f"{points:.1f}" in said for points in told)


@pytest.mark.parametrize("arm", unequal.ARMS)
def test_a_row_can_be_measured(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(unequal.SHARED, "num_rounds", 5)
    found = unequal.measure({"set": "digits", "coming": "by class", "arm": arm, "seed": 0})
    assert found.keys() >= {"test", *unequal.THIRDS, *unequal.WIDTHS, "stated"}
    assert ("epsilons" in found) == (arm != "fedavg")
