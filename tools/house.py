"""Measure the house: how many files, how long, who imports whom, how far one round reaches.

    python tools/house.py                  # src/fedquilt of this repository
    python tools/house.py --no-rounds      # only what can be read without running anything
    python tools/house.py --details        # the names behind the figures
    python tools/house.py --svg            # draw the house and one round: docs/images

An importer is a module with an import of another one anywhere in it, functions included.
A cycle is a set of modules that reach one another through imports of any kind.
A list of options is a literal of five and more names, nearly all of them options of a run, outside
of the declarations in `config/`: somebody has to keep it by hand.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeGuard

ROOT = Path(__file__).resolve().parents[1]

TINY = {
    "dataset": "digits",
    "model": "linear",
    "num_clients": 10,
    "availability": "always",
    "num_rounds": 3,
}
TRAINED = {**TINY, "clients_per_round": 4, "local_epochs": 1}
CERTIFIED = {**TRAINED, "mode": "certified", "noise_seed": 11}
SMALL = {"ipc": 1, "dc_iterations": 3, "model_epochs": 2, "model_n": 2, "min_group": 4}
ROUNDS: dict[str, dict[str, Any]] = {
    "fedavg": {**TRAINED, "mode": "fedavg"},
    "certified": CERTIFIED,
    "certified, heterofl": {**CERTIFIED, "method": "heterofl", "model": "mlp"},
    "condense": {**TINY, "method": "condense", "model": "convnet", **SMALL},
}
"""The runs of which one round is followed, by the name of their line in the table."""

ENTRANCES = ("run_round", "begin_round", "finish_round")
"""Where the loop enters `round.py`: a round is one call, or its beginning and its end."""

CO_OPTIMIZED = 1  # set for functions, not for the bodies of modules and classes


@dataclass(frozen=True)
class Module:
    """A module as it lies on disk."""

    name: str
    path: Path
    text: str

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")


def read_modules(source: Path) -> dict[str, Module]:
    """Return the modules below a source folder, by dotted name."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, path.read_text())
    return modules


def imported(module: Module, known: Mapping[str, Module]) -> set[str]:
    """Return the modules of the house that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(module.text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else node.module or "")
    return (found & set(known)) - {module.name}


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the sets of two and more modules that reach one another (Tarjan 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], index[other])
        if lowest[name] == index[name]:
            place = stack.index(name)
            members = stack[place:]
            del stack[place:]
            if len(members) > 1:
                found.append(sorted(members))

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return found


def packages_of(edges: Mapping[str, set[str]], package: str) -> dict[str, set[str]]:
    """Return the imports between the parts one level below a package."""

    def part(name: str) -> str:
        return ".".join(name.split(".")[:2])

    between: dict[str, set[str]] = defaultdict(set)
    for name, others in edges.items():
        between[part(name)] |= {part(other) for other in others} - {part(name), package}
    return dict(between)


@dataclass
class RoundTrace:
    """The functions of the house that one round enters, the second one of a run."""

    source: str
    which: int = 1
    calls: int = 0
    depth: int = 0
    seen: dict[tuple[str, int], int] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Take note of a call, as `sys.setprofile` reports it."""
        code = frame.f_code
        if not code.co_filename.startswith(self.source):
            return
        # The loop has a method of the same name around it.
        if code.co_name in ENTRANCES and Path(code.co_filename).name == "round.py":
            begins = code.co_name != "finish_round" and not self.depth
            self.calls += event == "call" and begins
            self.depth += {"call": 1, "return": -1}.get(event, 0)
        if not self.depth or self.calls != self.which + 1 or event != "call":
            return
        if code.co_flags & CO_OPTIMIZED and not code.co_name.startswith("<"):
            lines = [line for _, _, line in code.co_lines() if line is not None]
            place = (code.co_filename, code.co_firstlineno)
            self.seen[place] = max(lines) - min(lines) + 1

    @property
    def num_functions(self) -> int:
        return len(self.seen)

    @property
    def num_files(self) -> int:
        return len({name for name, _ in self.seen})

    @property
    def num_lines(self) -> int:
        return sum(self.seen.values())


def trace_round(settings: Mapping[str, Any], source: Path) -> RoundTrace:
    """Run what a configuration describes and return what its second round went through."""
    trace = RoundTrace(str(source))
    follow(settings, trace)
    return trace


def follow(settings: Mapping[str, Any], trace: Callable[[FrameType, str, Any], None]) -> None:
    """Run what a configuration describes, and tell `trace` of every call."""
    from fedquilt.config import build_config
    from fedquilt.experiment.api import run_config

    with tempfile.TemporaryDirectory() as folder:
        config = build_config({**settings, "output_dir": folder})
        with _profiled(trace):
            run_config(config)


@contextlib.contextmanager
def _profiled(trace: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(None)


def one_importer(edges: Mapping[str, set[str]], modules: Mapping[str, Module]) -> list[str]:
    """Return the modules, packages aside, that exactly one other module imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, others in edges.items():
        for other in others:
            importers[other].add(name)
    return [name for name in modules if len(importers[name]) == 1 and not modules[name].is_package]


def public_names(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Return the public classes and functions that more than one module defines, and where."""
    homes: dict[str, list[str]] = defaultdict(list)
    for name, module in modules.items():
        for node in ast.parse(module.text).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    return {name: found for name, found in homes.items() if len(found) > 1 and name != "main"}


def option_names(modules: Mapping[str, Module], package: str) -> set[str]:
    """Return the options that `config` declares: fields whose default is a call of `declare`."""
    found = set()
    for name, module in modules.items():
        if not name.startswith(f"{package}.config"):
            continue
        for node in ast.walk(ast.parse(module.text)):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Call):
                continue
            if getattr(node.value.func, "id", "") == "declare":
                found.add(getattr(node.target, "id", ""))
    return found


def option_lists(modules: Mapping[str, Module], package: str) -> dict[str, list[str]]:
    """Return where options are listed by hand, beside their declarations, and which ones."""
    options = option_names(modules, package)
    found = {}
    for name, module in modules.items():
        inner: set[int] = set()  # literals that are a part of a longer one
        for node in ast.walk(ast.parse(module.text)):
            if id(node) in inner:
                continue
            words = [word for word in _words_of(node, inner) if word in options]
            if len(words) >= 5 and len(words) >= 0.8 * len(_words_of(node, inner)):
                found[f"{name}:{getattr(node, 'lineno', 0)}"] = words
    return found


def listed_twice(modules: Mapping[str, Module], package: str) -> list[str]:
    """Return the options that stand in more than one list that is kept by hand."""
    seen: dict[str, int] = defaultdict(int)
    for words in option_lists(modules, package).values():
        for word in set(words):
            seen[word] += 1
    return sorted(word for word, count in seen.items() if count > 1)


def _words_of(node: ast.AST, inner: set[int]) -> list[str]:
    """Return the texts that a literal lists, or the names that a typed dictionary has."""
    if isinstance(node, ast.ClassDef):
        if not any(getattr(base, "id", "") == "TypedDict" for base in node.bases):
            return []
        return [getattr(part.target, "id", "") for part in node.body if _is_field(part)]
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return []  # a dictionary of options is a run's settings
    words = []
    for part in node.elts:
        if isinstance(part, ast.Starred):
            inner.add(id(part.value))
            words += _words_of(part.value, inner)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            words.append(part.value)
    return words


def _is_field(part: ast.stmt) -> TypeGuard[ast.AnnAssign]:
    return isinstance(part, ast.AnnAssign)


def measured(source: Path, package: str) -> dict[str, int]:
    """Return what the ceilings of tests/test_house.py are about, without running anything."""
    modules = read_modules(source)
    edges = {name: imported(module, modules) for name, module in modules.items()}
    top = [name for name in modules if name.count(".") == 1 and not modules[name].is_package]
    return {
        "files": len(modules),
        "lines": sum(module.num_lines for module in modules.values()),
        "modules with one importer": len(one_importer(edges, modules)),
        "cycles of modules": len(cycles(edges)),
        "modules at the top": len(top) + 1,  # and the package itself
        "lines of round.py": modules[f"{package}.round"].num_lines,
        "options in several lists": len(listed_twice(modules, package)),
        "public names in several modules": len(public_names(modules)),
    }


def measure(source: Path, package: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of the table that need no run."""
    modules = read_modules(source)
    edges = {name: imported(module, modules) for name, module in modules.items()}
    lengths = {name: module.num_lines for name, module in modules.items()}
    longest = max(lengths, key=lengths.__getitem__)
    for name, value in measured(source, package).items():
        yield name, f"{value:,}"
    yield "median file", f"{statistics.median(lengths.values()):g} lines"
    yield "longest file", f"{lengths[longest]} lines ({longest})"
    yield "below 60 lines", f"{sum(length < 60 for length in lengths.values())} files"
    yield from _cycle_lines("cycle of modules", cycles(edges))
    yield from _cycle_lines("cycle of parts", cycles(packages_of(edges, package)))


def _cycle_lines(name: str, found: list[list[str]]) -> Iterator[tuple[str, str]]:
    for members in found:
        shown = ", ".join(members[:8]) + (", ..." if len(members) > 8 else "")
        yield name, f"{len(members)}: {shown}"


def measure_rounds(source: Path) -> Iterator[tuple[str, str]]:
    """Yield one line for each kind of round."""
    for name, settings in ROUNDS.items():
        trace = trace_round(settings, source)
        reach = f"{trace.num_functions} functions, {trace.num_files} files, {trace.num_lines} lines"
        yield f"one round, {name}", reach


def print_details(source: Path, package: str) -> None:
    """Print the modules with one importer, the lists of options, the names in several modules."""
    modules = read_modules(source)
    edges = {name: imported(module, modules) for name, module in modules.items()}
    importer = {other: name for name, others in edges.items() for other in others}
    for name in one_importer(edges, modules):
        print(f"one importer: {name} ({modules[name].num_lines} lines) <- {importer[name]}")
    for place, words in option_lists(modules, package).items():
        print(f"list of options: {place}: {', '.join(words)}")
    for name, homes in sorted(public_names(modules).items()):
        print(f"in several modules: {name}: {', '.join(homes)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    parser.add_argument("--package", default="fedquilt")
    parser.add_argument("--no-rounds", action="store_true")
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--svg", action="store_true")
    given = parser.parse_args()
    source = given.source.resolve()
    sys.path.insert(0, str(source))
    if given.svg:
        from house_pictures import write_pictures

        write_pictures(source, given.package)
        return
    for name, value in measure(source, given.package):
        print(f"{name:32} {value}")
    if given.details:
        print_details(source, given.package)
    if not given.no_rounds:
        for name, value in measure_rounds(source / given.package):
            print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
