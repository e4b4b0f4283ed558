"""What is declared is what is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import fedquilt

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(fedquilt.__file__).resolve().parent
# Packages whose name on the index is another than the one that is imported.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "mlflow": "mlflow-skinny",
    "absl": "absl-py",
    "dp_accounting": "dp-accounting",
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
}
REQUIRE = re.compile(r"optional\.require")
EXTRAS = ("flower", "flower-sim", "monitor", "gpu", "trackers")
TOOLS = ("dev", "docs")
"""Extras that the package itself does not import."""


def imported(source: str) -> set[str]:
    """Return the packages that a module imports, also by `optional.require("name", ...)`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Call) and REQUIRE.fullmatch(ast.unparse(node.func)):
            names |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
    packages = {str(name).split(".")[0] for name in names}
    return packages - sys.stdlib_module_names - {"fedquilt"}


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def distributions(requirements: list[str]) -> set[str]:
    """Return the names of requirements, without versions."""
    return {re.split(r"[\[<>=!~; ]", one)[0].lower() for one in requirements}


def test_declared_is_imported() -> None:
    found = set().union(*(imported(path.read_text()) for path in SOURCE.rglob("*.py")))
    needed = {DISTRIBUTIONS.get(name, name) for name in found}
    optional = project()["optional-dependencies"]
    extra = set().union(*(distributions(optional[name]) for name in EXTRAS))
    core = distributions(project()["dependencies"])
    assert not core & extra
    assert needed == core | extra


def test_the_wheel_holds_the_package_and_nothing_beside_it() -> None:
    """Experiments, benchmarks and hostile models stay in the repository."""
    from setuptools import find_packages

    where = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert where == {"find": {"where": ["src"]}}
    found = find_packages(str(ROOT / "src"))
    assert {name.split(".")[0] for name in found} == {"fedquilt"}
    gone = {"reproduce", "bench", "papers.fednum.baselines"}
    assert not gone & {name.removeprefix("fedquilt.") for name in found}
    for name in ("reproduction", "benchmarks", "tests"):
        assert (ROOT / name).is_dir()
        for module in SOURCE.rglob("*.py"):
            assert name not in imported(module.read_text()), f"{module} imports {name}"


def test_every_extra_is_known_here() -> None:
    assert set(project()["optional-dependencies"]) == {*EXTRAS, *TOOLS}


def test_imports_in_all_their_forms_are_found() -> None:
    lazy = "def f():\n    from d.e import g\n    optional.require('h.i', 'x')\n"
    source = f"import a.b, c\n{lazy}import os"
    assert imported(source) == {"a", "c", "d", "h"}


def test_whatever_is_declared_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    optional = project()["optional-dependencies"]
    wanted = distributions(project()["dependencies"])
    wanted |= set().union(*(distributions(optional[name]) for name in optional if name != "gpu"))
    assert wanted - {"fedquilt"} <= pinned
