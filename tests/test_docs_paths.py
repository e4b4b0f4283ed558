"""Files that README.md, CONTRIBUTING.md and docs/ name are there, with what is said to be in them.

A path is what stands in backticks and looks like one, relative to the repository or to
`src/fedquilt`; `file.py` alone may be anywhere.  Names in brackets behind a file are in it:
`round.py` (`begin_round`, `finish_round`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from test_imports import DOCUMENTS, ORDER

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fedquilt"
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"),
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "architecture.md"),
]
OURS = {
    *(path.name for path in SOURCE.iterdir() if path.is_dir()),
    *("src", "tests", "tools", "benchmarks", "reproduction", "deploy", "docs", "examples"),
}
ELSEWHERE = {"main.py", "myapp/quiltapp/task.py"}
"""Files of other people: of the published code, of a new Flower app."""
QUOTED = re.compile(r"`([^`\n]+)`")
INSIDE = re.compile(r"`([\w/]+\.(?:py|js))` \(((?:`[\w.]+`(?:, | and )?)+)\)")
"""A file, and in brackets names that are in it."""


@cache
def names_of_files() -> frozenset[str]:
    folders = (SOURCE, *(ROOT / name for name in OURS if (ROOT / name).is_dir()))
    return frozenset(
        path.name for folder in folders for path in folder.rglob("*") if path.is_file()
    )


def paths(text: str) -> Iterator[str]:
    """Yield what a page says is a file or folder of this repository."""
    for quoted in QUOTED.findall(text):
        is_file = re.fullmatch(r"[\w/-]+\.(py|js)", quoted)
        is_folder = re.fullmatch(r"[\w-]+(/[\w.-]+)*/?", quoted) and quoted.split("/")[0] in OURS
        if (is_file or (is_folder and "/" in quoted)) and quoted not in ELSEWHERE:
            yield quoted


def is_there(path: str) -> bool:
    if "/" not in path:
        return path in names_of_files()
    return any((folder / path).exists() for folder in (ROOT, SOURCE, SOURCE.parent))


def missing_names(text: str) -> Iterator[str]:
    """Yield the names that a page looks for in files that do not have them."""
    for path, names in INSIDE.findall(text):
        found = [f for f in (SOURCE / path, SOURCE.parent / path, ROOT / path) if f.is_file()] or [
            f for f in SOURCE.rglob(path) if f.is_file()
        ]
        source = "\n".join(file.read_text() for file in found)
        for name in QUOTED.findall(names):
            if not re.search(rf"\b{re.escape(name.split('.')[-1])}\b", source):
                yield f"{name} in {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    assert [path for path in paths(text) if not is_there(path)] == []
    assert list(missing_names(text)) == []


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def section(title: str) -> str:
    """Return the first block of code of a section of the architecture."""
    return ARCHITECTURE.split(f"## {title}\n")[1].split("```text\n")[1].split("```")[0]


def test_the_home_page_lists_every_page_of_the_site() -> None:
    nav = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    home = (ROOT / "docs" / "README.md").read_text()
    listed = re.findall(r"\]\(([\w/-]+\.md)\)", home.partition("## All pages")[2])
    assert len(nav) > 30
    assert set(listed) == set(nav) - {"README.md"}


def test_the_architecture_shows_the_order_of_imports() -> None:
    shown = [set(line.split(", ")) for line in section("The order of imports").splitlines()]
    assert shown == [line for line in ORDER if line.isdisjoint({"", "_version"})]


def test_the_tree_has_every_part() -> None:
    tree = section("The house").split("\n\n")[0]
    words = set(re.findall(r"[\w.]+", tree))
    parts = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name[0] != "_"}
    modules = {path.name for path in SOURCE.glob("[a-z]*.py")}
    assert parts <= words
    assert {name for name in modules if name not in words} <= {f"{name}.py" for name in DOCUMENTS}
    assert words >= DOCUMENTS


def test_what_is_not_there_is_noticed() -> None:
    text = "`learning/flat.py`, `training/flat.py`, `nothing.py`, `round.py` (`run_round`, `sing`)"
    assert [path for path in paths(text) if not is_there(path)] == [
        *("learning/flat.py", "nothing.py")
    ]
    assert list(missing_names(text)) == ["sing in round.py"]
    assert list(paths("`privacy/nothing.py` and `5 / 3`, `a/b`, `tests/`")) == [
        *("privacy/nothing.py", "tests/")
    ]
