"""`docs/papers.md` says what is true of the package: every name in its lists is looked up."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import papers
from papers import Row, attribute, faults, look_up

LISTED = [
    (name, row) for name in papers.names() for section in papers.read(name) for row in section.rows
]
SHOWN = "tests/test_papers.py::test_what_works_the_same_is_shown_by_a_test"


def test_every_promise_is_where_the_list_says() -> None:
    assert len(LISTED) > 200
    found = [f"{name}: {row.promise}: {fault}" for name, row in LISTED for fault in faults(row)]
    assert not found, "\n".join(found)


def test_the_page_shows_the_lists() -> None:
    page = papers.PAGE.read_text()
    assert papers.written(page) == page, "run  python tests/papers.py"


@pytest.mark.parametrize("lost", papers.DOCUMENTS)
def test_a_missing_list_is_an_error(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(papers.DOCUMENTS) - {lost}:
        shutil.copy(papers.LISTS / f"{name}.toml", tmp_path)
    monkeypatch.setattr(papers, "LISTS", tmp_path)
    with pytest.raises(LookupError, match=lost):
        papers.written(papers.PAGE.read_text())


def test_no_promise_stands_twice() -> None:
    for name in papers.names():
        for section in papers.read(name):
            promises = [row.promise for row in section.rows]
            assert len(promises) == len(set(promises)), section.title


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("fedquilt.framework.QuAPServer", "no attribute"),
        ("fedquilt.nothing.here", "no attribute"),
        ("fedquilt.framework.QuantileClipper(quantil)", "takes no quantil"),
        ("fedquilt.config.HYPERPARAMETERS['alfa']", "alfa"),
        ("fedquilt.config.HYPERPARAMETERS['alpha'] = 0.6", "is 0.5"),
        ("fedquilt walk --seed", "no command"),
        ("fedquilt run --sed", "no option"),
        ("docs/nothing.md", "No such file"),
        ("docs/papers.md#nothing", "no heading"),
        ("tests/test_papers.py::test_nothing", "has no test_nothing"),
        ("something else", "none of the forms"),
    ],
)
def test_a_name_that_is_not_there_is_noticed(reference: str, reason: str) -> None:
    row = Row("a promise", (reference,), "same", test=SHOWN)
    (fault,) = faults(row)
    assert reason in fault


def test_what_can_be_looked_up() -> None:
    for reference in (
        "fedquilt.framework.QuantileClipper(quantile, momentum)",
        "fedquilt.config.HYPERPARAMETERS['alpha'] = 0.5",
        "fedquilt.config.EXPECTED_MILESTONES['mnist']['round_10']",
        "fedquilt.config.RunConfig.epsilon",
        "fedquilt run --seed --budget-alpha",
        "fedquilt ledger show",
        "docs/papers.md#the-papers",
        "tests/test_papers.py::test_what_can_be_looked_up",
    ):
        look_up(reference)
    assert attribute("fedquilt.config.RunConfig.epsilon").default == 3.0


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("", "shows nothing"),
        ("tests/test_papers.py", "must be a file of tests and a test in it"),
        ("tests/papers.py::faults", "must be a file of tests and a test in it"),
        ("tests/test_papers.py::LISTED", "must be a file of tests and a test in it"),
    ],
)
def test_what_works_the_same_is_shown_by_a_test(test: str, reason: str) -> None:
    assert list(faults(Row("x", ("fedquilt.run",), "same", test=SHOWN))) == []
    assert reason in "; ".join(faults(Row("x", ("fedquilt.run",), "same", test=test)))
    assert list(faults(Row("x", ("fedquilt.run",), "differs", "because"))) == []


def test_a_row_must_say_why() -> None:
    assert list(faults(Row("x", ("fedquilt.run",), "differs"))) != []
    assert list(faults(Row("x", (), "same"))) != []
    assert list(faults(Row("x", ("fedquilt.run",), "absent", "because"))) != []
    assert list(faults(Row("x", (), "absent", "because"))) == []
