"""What is declared is what is imported."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

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
EXTRAS = ("flower", "flower-sim", "secure", "monitor", "gpu", "trackers")
TOOLS = ("dev", "docs", "hf")
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


def test_the_citation_is_of_this_version() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == fedquilt.__version__
    assert cited["license"] == project()["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited)  # what the schema asks for


WITHOUT_FCNTL = """
import sys
sys.modules["fcntl"] = None
from fedquilt.cli import program
sys.argv = ["fedquilt", *{arguments!r}]
program()
"""
SMALL = (
    *("--dataset", "digits", "--model", "linear", "--num-clients", "10", "--num-rounds", "1"),
    *("--clients-per-round", "4", "--availability", "always", "--local-epochs", "1"),
)


def test_a_run_is_made_where_there_is_no_fcntl(tmp_path: Path) -> None:
    """Windows has none: nothing is locked there, and it is said."""
    arguments = ["run", *SMALL, "--mode", "fedavg", "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FCNTL.format(arguments=arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "has no fcntl" in done.stderr


def needed_distributions() -> set[str]:
    """Return what the package needs without extras, and what that needs, as installed here."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    wanted = [Requirement(line) for line in project()["dependencies"]]
    while wanted:
        one = wanted.pop()
        name = one.name.lower().replace("_", "-")
        if name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        wanted += [Requirement(line) for line in metadata.requires(name) or ()]
    return found


def linked(names: set[str], place: Path) -> None:
    """Put the modules of installed distributions, and nothing else, into a folder."""
    for name in names:
        found = metadata.distribution(name)
        for file in found.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (place / top).exists():
                (place / top).symlink_to(Path(str(found.locate_file(top))))


@pytest.mark.slow
@pytest.mark.processes
def test_the_wheel_works_in_an_environment_without_extras(tmp_path: Path) -> None:
    """Built, installed beside the declared packages only, and used outside of the clone."""
    clone, place = tmp_path / "clone", tmp_path / "elsewhere"
    shutil.copytree(ROOT / "src", clone / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    place.mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}

    def call(*command: object, expect: int = 0) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=place,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    call(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, clone)
    (wheel,) = tmp_path.glob("*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    linked(needed_distributions(), packages)
    call(*pip, "--python", tmp_path / "env" / "bin" / "python", "install", "-q", "--no-deps", wheel)
    command = tmp_path / "env" / "bin" / "fedquilt"
    call(command, "run", *SMALL, "--mode", "certified", "--output-dir", "runs")
    (run,) = (place / "runs").iterdir()
    assert "every client" in call(command, "statement", run)
    call(command, "report", run)
    assert (run / "report.html").is_file()
    said = call(command, "run", *SMALL, "--engine", "flower", "--output-dir", "other", expect=2)
    assert "pip install 'fedquilt[flower]'" in said
