"""The lists behind `docs/papers.md`: what each published document promises, and where it is here.

One file a document, `docs/papers/<name>.toml`:

    [[section]]
    title = "QuantileClipper (API document)"

    [[section.row]]
    promise = "`clip_gradients(gradients_list)`"   # in the document's words; Markdown
    here = ["fedquilt.framework.QuantileClipper.clip_gradients(gradients_list)"]
    works = "same"                                 # same, differs or absent
    why = ""                                       # needed unless it works the same
    test = "tests/test_document_examples.py::test_quantile_clipper"   # needed where it is the same

Every entry of `here`, and `test`, is looked up, so that a name that vanishes fails:

| form | what must be there |
|---|---|
| `fedquilt.a.b.C.d` | that name, imported; `C.d` may be a field of a dataclass |
| `fedquilt.a.f(x, y)` | a function or class that takes the arguments x and y |
| `fedquilt.a.T['k'] = 3` | a table with that key, and that value where one is given |
| `fedquilt run --seed` | that command, and every option named after it |
| `python -m reproduction --only` | every option of it; `fednum-baselines` may stand before |
| `docs/page.md#some-heading` | that file, and that heading |
| `tests/test_x.py::test_y` | that file, and a function or class of that name in it |

    python tests/papers.py      # write the tables into docs/papers.md

The page has one heading for each document; its table stands between `<!-- list: name -->` and
`<!-- end: name -->`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "papers.md"
LISTS = ROOT / "docs" / "papers"
DOCUMENTS = ("fednum", "heflwr", "quap_fl")
"""The documents, each of which has a list."""
WORKS = {"same": "yes", "differs": "differs", "absent": "no"}
"""What may stand under `works`, and its cell."""

_KEYED = re.compile(r"^(?P<name>[\w.]+)(?P<keys>(?:\[[^\]]+\])+)(?: = (?P<value>.+))?$")
_CALLED = re.compile(r"^(?P<name>[\w.]+)\((?P<arguments>[^)]*)\)$")
_TEST = re.compile(r"^tests/[\w/]*test_\w+\.py::[tT]est\w+$")
_FILE = re.compile(r"^(?P<path>[\w./-]+\.\w+)(?:::(?P<name>\w+)|#(?P<heading>[\w-]+))?$")


@dataclass(frozen=True)
class Row:
    """One promise of a document."""

    promise: str
    here: tuple[str, ...]
    works: str
    why: str = ""
    test: str = ""


@dataclass(frozen=True)
class Section:
    """The promises of one part of a document."""

    title: str
    rows: tuple[Row, ...]


def names() -> list[str]:
    """Return the names of the lists, which are those of the documents."""
    found = sorted(path.stem for path in LISTS.glob("*.toml"))
    if found != sorted(DOCUMENTS):
        raise LookupError(
            f"{LISTS} must hold one list for each of {', '.join(DOCUMENTS)}, not {found}"
        )
    return found


def read(name: str) -> list[Section]:
    """Return the sections of a list; a key that is none is an error."""
    written = tomllib.loads((LISTS / f"{name}.toml").read_text())
    return [
        Section(
            part["title"], tuple(Row(**row | {"here": tuple(row["here"])}) for row in part["row"])
        )
        for part in written["section"]
    ]


def faults(row: Row) -> Iterator[str]:
    """Yield what is wrong with a row."""
    if row.works not in WORKS:
        yield f"works={row.works!r} must be one of {', '.join(WORKS)}"
    if row.works != "same" and not row.why:
        yield "why must be said unless it works the same"
    if bool(row.here) == (row.works == "absent"):
        yield "here must name something, unless it is absent"
    if row.works == "same" and not row.test:
        yield "test must show what works the same: that a name is there shows nothing"
    if row.test and not _TEST.match(row.test):
        yield f"test={row.test!r} must be a file of tests and a test in it"
    for reference in (*row.here, *filter(None, [row.test])):
        try:
            look_up(reference)
        except (LookupError, AttributeError, ImportError, OSError, ValueError) as error:
            yield f"{reference}: {error}"


def look_up(reference: str) -> None:
    """Raise unless a reference leads somewhere."""
    if reference.startswith("fedquilt "):
        _look_up_command(reference.split()[1:])
    elif reference.startswith("python -m reproduction "):
        _look_up_experiments(reference.split()[3:])
    elif found := _KEYED.match(reference):
        _look_up_key(found["name"], found["keys"], found["value"])
    elif found := _CALLED.match(reference):
        _look_up_arguments(found["name"], found["arguments"])
    elif reference.startswith(("fedquilt.", "reproduction.")) or reference == "fedquilt":
        attribute(reference)
    elif found := _FILE.match(reference):
        _look_up_file(found["path"], found["name"], found["heading"])
    else:
        raise ValueError("is none of the forms that can be looked up")


def attribute(dotted: str) -> Any:
    """Return what a dotted name stands for; a field of a dataclass stands for itself."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name is None or not dotted.startswith(error.name):
                raise  # a package that the module needs is not there
            continue
        for part in parts[end:]:
            declared = getattr(thing, "__dataclass_fields__", {})
            thing = declared[part] if part in declared else getattr(thing, part)
        return thing
    raise ImportError("no such module")


def _look_up_arguments(name: str, listed: str) -> None:
    taken = inspect.signature(attribute(name)).parameters
    wanted = [part.strip() for part in listed.split(",") if part.strip()]
    if lacking := [part for part in wanted if part not in taken]:
        raise LookupError(f"takes no {', '.join(lacking)}")


def _look_up_key(name: str, keys: str, value: str | None) -> None:
    found = attribute(name)
    for key in re.findall(r"\[([^\]]+)\]", keys):
        found = found[ast.literal_eval(key)]
    if value is not None and found != ast.literal_eval(value):
        raise LookupError(f"is {found!r}")


def _look_up_command(words: list[str]) -> None:
    import typer.main

    from fedquilt.cli.app import app

    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            raise LookupError(f"no command {' '.join(words[:1])!r}")
        command = command.commands[words.pop(0)]
    known = {option for item in command.params for option in (*item.opts, *item.secondary_opts)}
    for option in (word for word in words if word.startswith("--")):
        if option not in known:
            raise LookupError(f"no option {option!r}")


def _look_up_experiments(words: list[str]) -> None:
    from reproduction.__main__ import baselines_parser, paper_parser

    parser = baselines_parser() if words[0] == "fednum-baselines" else paper_parser()
    known = {option for action in parser._actions for option in action.option_strings}
    for option in (word for word in words if word.startswith("--")):
        if option not in known:
            raise LookupError(f"no option {option!r}")


def _look_up_file(path: str, name: str | None, heading: str | None) -> None:
    text = (ROOT / path).read_text()
    if name is not None and not re.search(rf"^\s*(?:def|class) {name}\b", text, re.MULTILINE):
        raise LookupError(f"has no {name}")
    if heading is not None and heading not in map(_anchor, re.findall(r"^#+ (.+)$", text, re.M)):
        raise LookupError(f"has no heading #{heading}")


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def table(name: str) -> str:
    """Return the tables of one list, and how many rows work the same, differ, are absent."""
    sections = read(name)
    rows = [row for section in sections for row in section.rows]
    counted = {key: sum(row.works == key for row in rows) for key in WORKS}
    lines = [
        f"{len(rows)} promises: {counted['same']} work as written, {counted['differs']} differ, "
        f"{counted['absent']} are not here.",
    ]
    for section in sections:
        lines += ["", f"### {section.title}", ""]
        lines += ["| promised | here | as written | if not, why |", "|---|---|---|---|"]
        lines += [_line(row) for row in section.rows]
    return "\n".join(lines)


def _line(row: Row) -> str:
    shown = [*row.here, *([f"shown by {row.test}"] if row.test else [])]
    here = "<br>".join(_reference(one) for one in shown)
    cells = [row.promise, here, WORKS[row.works], row.why]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |".replace("  |", " |")


def _reference(text: str) -> str:
    words, _, name = text.rpartition("shown by ")
    return f"{'shown by ' if _ else words}`{name}`"


def written(page: str) -> str:
    """Return a page with every table that has a list as it should be."""
    for name in names():
        begin, end = f"<!-- list: {name} -->\n", f"\n<!-- end: {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise LookupError(f"{PAGE.name} must have {begin.strip()} and {end.strip()} once")
        head, rest = page.split(begin)
        page = f"{head}{begin}\n{table(name)}\n{end}{rest.split(end, 1)[1]}"
    return page


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    PAGE.write_text(written(PAGE.read_text()))
