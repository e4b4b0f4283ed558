"""Draw the house and one round from the source: docs/images/house.svg and round.svg.

    python tools/house.py --svg

The house: its parts with their files and lines, in the order of imports that
`tests/test_imports.py` holds them to.  The round: the steps that the comments of `round.py` number,
what each calls and how far that reaches, in a round of the mode `certified` that is followed.
"""

from __future__ import annotations

import ast
import html
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from house import CO_OPTIMIZED, ROOT, ROUNDS, Module, follow, read_modules

IMAGES = ROOT / "docs" / "images"
WIDTH = 1000
STYLE = """
  text { font: 12px system-ui, sans-serif; }
  .ground { fill: #ffffff; } .box { fill: #f1f5f4; stroke: #9db3af; } .bar { fill: #1f8a76; }
  .title { fill: #12201d; font-size: 17px; font-weight: 600; }
  .name { fill: #12201d; font-size: 15px; font-weight: 600; }
  .code { fill: #12201d; font-family: ui-monospace, monospace; }
  .said { fill: #2b3b37; } .size { fill: #4b5d59; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #15191c; } .box { fill: #20282b; stroke: #4f625e; } .bar { fill: #3fb59d; }
    .name, .title, .code { fill: #eef4f2; } .said { fill: #cfdad7; } .size { fill: #a9bab6; }
  }
"""
STEP = re.compile(r"^\s*# (\d[\d, ]*) (.+)$")
"""A comment that begins a step: its numbers, and its name."""


# The house


@dataclass(frozen=True)
class Part:
    """A part of the package: one package or module, or several that are drawn as one."""

    name: str
    files: int
    lines: int
    says: str


def import_order() -> list[set[str]]:
    """Return the parts on each line of the order of imports, the first being imported most."""
    wanted = ("LEAVES", "DOCUMENTS", "ORDER")
    tree = ast.parse((ROOT / "tests" / "test_imports.py").read_text())
    found: dict[str, object] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id in wanted:
            value = getattr(node, "value", None)
            assert value is not None
            found[target.id] = eval(ast.unparse(value), {}, found)  # sets of names
    return [*found["ORDER"]]  # type: ignore[misc]


def parts_of(modules: Mapping[str, Module], order: Iterable[set[str]]) -> list[list[Part]]:
    """Return the parts of the package by line of the order, the first line being imported first."""
    lines = [{part for part in line if part and not part.startswith("_")} for line in order]
    names = {part for line in lines for part in line}
    files: dict[str, list[Module]] = defaultdict(list)
    for dotted, module in modules.items():
        path = dotted.split(".")[1:]
        inner, outer = ".".join(path[:2]), ".".join(path[:1])
        files[inner if inner in names else outer].append(module)
    drawn = []
    for line in lines:
        row = [_part(name, files[name]) for name in sorted(line) if files[name]]
        if any(part.name == "framework" for part in row):  # the names of the documents
            whole = [module for part in row for module in files[part.name]]
            named = ", ".join(part.name for part in row)
            row = [
                Part(named, len(whole), sum(m.num_lines for m in whole), "Names of the documents")
            ]
        if row:
            drawn.append(row)
    return drawn


def _part(name: str, modules: list[Module]) -> Part:
    first = min(modules, key=lambda module: (len(module.name), module.name))
    says = (ast.get_docstring(ast.parse(first.text)) or "").splitlines()[0].replace("`", "")
    return Part(name, len(modules), sum(module.num_lines for module in modules), says)


def draw_house(rows: list[list[Part]]) -> str:
    """Return the house as a picture: what is imported by everything at the bottom."""
    most = max(part.lines for row in rows for part in row)
    files = sum(part.files for row in rows for part in row)
    lines = sum(part.lines for row in rows for part in row)
    gap, y = 8, 46
    title = f"The house: {files} files, {lines:,} lines. A part may import those below it."
    drawn = [_text(20, 30, title, "title")]
    for row in reversed(rows):
        width = (WIDTH - 40 - gap * (len(row) - 1)) / len(row)
        height = 40 if len(row) == 1 else 120 if len(row) > 3 else 88
        for number, part in enumerate(row):
            x = 20 + number * (width + gap)
            drawn.append(_rect("box", x, y, width, height))
            drawn += _wide(x, y, part) if len(row) == 1 else _narrow(x, y, width, height, part)
            drawn.append(_rect("bar", x, y + height - 4, width * part.lines / most, 4, 0))
        y += height + gap
    return _picture(y + 8, "The parts of fedquilt in the order of imports", drawn)


def _wide(x: float, y: float, part: Part) -> Iterator[str]:
    yield _text(x + 12, y + 24, part.name, "name")
    at = max(180, 30 + 8.6 * len(part.name))
    yield _text(x + at, y + 24, _wrapped(part.says, int((760 - at) / 6.1), 1)[0], "said")
    yield _text(WIDTH - 32, y + 24, _size(part), "size", "end")


def _narrow(x: float, y: float, width: float, height: int, part: Part) -> Iterator[str]:
    yield _text(x + 10, y + 22, part.name, "name")
    for number, line in enumerate(
        _wrapped(part.says, int((width - 16) / 6.6), (height - 58) // 15)
    ):
        yield _text(x + 10, y + 40 + 15 * number, line, "said")
    yield _text(x + 10, y + height - 13, _size(part), "size")


def _size(part: Part) -> str:
    return f"{part.files} file{'s' * (part.files != 1)}, {part.lines:,} lines"


# The round


@dataclass
class Step:
    """A step of the round: what it is called, what it calls itself, and how far that reaches."""

    name: str
    says: str
    calls: list[tuple[str, str]] = field(default_factory=list)
    reaches: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def read_steps(text: str) -> dict[int, Step]:
    """Return the steps that comments of `round.py` begin, by their line."""
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if said := STEP.match(line):
            name, *rest = re.split(r": |, (?!\d)", re.sub(r" \([^)]*\)", "", said[2]), maxsplit=1)
            found[number] = Step(f"{said[1]} {name}", "".join(rest))
    return found


class StepTrace:
    """The functions that each step of a run's second round enters, by `sys.setprofile`.

    A call belongs to the step in which `finish_round` names it, for updates are made while they
    are summed; where it names it in none or in several, to the step that is running.
    """

    def __init__(self, source: Path) -> None:
        self.source, self.round = str(source), str(source / "round.py")
        text = Path(self.round).read_text()
        self.steps = read_steps(text)
        self.named = self._named_in(ast.parse(text))
        self.measures = _evaluates(source / "experiment")
        self.steps[sys.maxsize] = Step("9 evaluate", "the loop, after the round")
        self.rounds = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Take note of a call."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self.source):
            return
        self.rounds += code.co_filename == self.round and code.co_name == "begin_round"
        if not code.co_flags & CO_OPTIMIZED or code.co_name.startswith("<"):
            return
        if code.co_filename == self.round or (found := self._step_of(frame)) is None:
            return
        step, is_direct = found
        where = str(Path(code.co_filename).relative_to(self.source))
        if is_direct and (code.co_qualname, where) not in step.calls:
            step.calls.append((code.co_qualname, where))
        step.reaches[where].add(code.co_qualname)

    def _step_of(self, frame: FrameType | None) -> tuple[Step, bool] | None:
        """Return the step that a call is made in, and whether the round itself makes it."""
        between: list[CodeType] = []  # of the house, from the call outwards
        while frame is not None:
            code = frame.f_code
            if (code.co_filename, code.co_name) == self.measures:
                return (self.steps[sys.maxsize], len(between) == 1) if between else None
            if code.co_filename == self.round and code.co_name in ("begin_round", "finish_round"):
                if self.rounds != 2 or not between:  # what is made once is there in the second
                    return None
                step = self.steps[self._line_of(between[-1], frame.f_lineno)]
                return step, all(other.co_filename == self.round for other in between[1:])
            if code.co_filename.startswith(self.source):
                between.append(code)
            frame = frame.f_back
        return None

    def _line_of(self, code: CodeType, line: int) -> int:
        """Return the line at which the step begins that names a function."""
        names = {code.co_name, *_users(Path(code.co_filename), code.co_name)}
        homes = {self.named[name] for name in names if name in self.named}
        return homes.pop() if len(homes) == 1 else self._begin(line)

    def _begin(self, line: int) -> int:
        begun = [begin for begin in self.steps if begin <= line]
        return max(begun, default=min(self.steps))

    def _named_in(self, tree: ast.Module) -> dict[str, int]:
        """Return the steps of what is called, or handed on to be called, in one step alone."""
        (function,) = [n for n in tree.body if getattr(n, "name", "") == "finish_round"]
        homes: dict[str, set[int]] = defaultdict(set)
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            for node in (call.func, *call.args):
                if name := getattr(node, "attr", None) or getattr(node, "id", None):
                    homes[name].add(self._begin(call.lineno))
        return {name: steps.pop() for name, steps in homes.items() if len(steps) == 1}


@cache
def _users(path: Path, name: str) -> frozenset[str]:
    """Return the functions of a file that name another one."""
    return frozenset(
        function.name
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        and any(getattr(node, "id", None) == name for node in ast.walk(function))
    )


def _evaluates(folder: Path) -> tuple[str, str]:
    """Return file and name of the function that says of itself that it is step 9."""
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if said and said.startswith("Step 9"):
                return str(path), node.name  # type: ignore[attr-defined]
    raise LookupError(f"no function below {folder} says that it is step 9")


def follow_steps(source: Path) -> list[Step]:
    """Return the steps of a round, with what they call in the mode `certified`."""
    trace = StepTrace(source)
    follow(ROUNDS["certified"], trace)
    return [trace.steps[line] for line in sorted(trace.steps)]


def draw_round(steps: list[Step]) -> str:
    """Return one round as a picture: a row for each step."""
    functions = {
        (where, name) for step in steps for where in step.reaches for name in step.reaches[where]
    }
    files = {where for where, _ in functions}
    title = (
        f"A certified round and its evaluation: {len(functions)} functions in {len(files)} files. "
        "What each step calls, how far that reaches."
    )
    drawn, y = [_text(20, 30, title, "title")], 46
    for step in steps:
        says = _wrapped(step.says, 36, 4)
        reach = _wrapped(_reach(step), 29, 6)
        height = 22 + 16 * max(len(step.calls), 1 + len(says), len(reach))
        drawn.append(_rect("box", 20, y, WIDTH - 40, height))
        drawn.append(_text(34, y + 24, step.name, "name"))
        drawn += [_text(34, y + 42 + 16 * n, line, "said") for n, line in enumerate(says)]
        for number, (name, where) in enumerate(step.calls):
            drawn.append(_text(290, y + 24 + 16 * number, name, "code"))
            drawn.append(_text(560, y + 24 + 16 * number, where, "size"))
        drawn += [_text(770, y + 24 + 16 * n, line, "size") for n, line in enumerate(reach)]
        y += height + 8
    return _picture(y + 8, "The steps of one round and what they call", drawn)


def _reach(step: Step) -> str:
    """Say how many functions and files a step goes through, by quarter."""
    parts: dict[str, int] = defaultdict(int)
    for where in step.reaches:
        parts[where.split("/")[0].removesuffix(".py")] += 1
    functions = sum(len(names) for names in step.reaches.values())
    said = ", ".join(f"{part} {count}" for part, count in sorted(parts.items()))
    return f"{functions} functions in {len(step.reaches)} files: {said}"


# Both


def _wrapped(text: str, width: int, most: int) -> list[str]:
    return textwrap.wrap(text.rstrip("."), width, max_lines=most, placeholder=" ...") or [""]


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    said = html.escape(text, quote=False)
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{said}</text>'


def _rect(kind: str, x: float, y: float, width: float, height: float, radius: int = 6) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" rx="{radius}"'
    return f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" {size}/>'


def _picture(height: float, title: str, drawn: Iterable[str]) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
    ground = f'<rect class="ground" width="{WIDTH}" height="{height:.0f}"/>'
    lines = [head, f"<title>{title}</title>", f"<style>{STYLE}</style>", ground, *drawn, "</svg>"]
    return "\n".join(lines) + "\n"


def write_pictures(source: Path, package: str) -> None:
    """Write both pictures for the documentation."""
    rows = parts_of(read_modules(source), import_order())
    (IMAGES / "house.svg").write_text(draw_house(rows))
    (IMAGES / "round.svg").write_text(draw_round(follow_steps(source / package)))
