"""The direction of imports, read from the source, and what loads when.

`ORDER` is total: a part may import itself and what stands on an earlier line, never a
neighbour on its own line or anything later.  Imports inside functions and for types count
like any other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedquilt
from run_processes import environment

ROOT = Path(fedquilt.__file__).resolve().parent
LEAVES = {"population", "privacy", "training", "aggregation", "data", "models"}
DOCUMENTS = {"errors", "framework", "utils", "nn", "fed", "monitor", "log"}
"""The module names of the published documents: re-exports, and the log."""

ORDER: tuple[set[str], ...] = (
    {"_version"},
    {"common"},
    {"config", "observe"},
    LEAVES,
    {"record.schema"},
    {"record.checkpoint"},
    {"record.folder"},
    {"method"},
    {"slices", "condense"},
    {"federation"},
    {"round"},
    {"setup"},
    {"record"},
    {"experiment"},
    {"report"},
    {"report.views", "papers", "flower"},
    {"report.watch", "audit", "sweep"},
    DOCUMENTS,
    {"cli"},
    {"", "__main__"},  # the package itself loads what it names when it is asked for
)
PLACE = {part: place for place, parts in enumerate(ORDER) for part in parts}
# The FedNum document has its classes in `fedquilt.condense`, which names them when asked.
EXCEPTIONS = {("fedquilt.condense.__init__", "papers")}
NARROW = {"report": {"config", "common"}, "observe": {"common"}}
"""Parts that stay usable alone: they may import less than the order allows."""
OPTIONAL = (
    *("scipy", "sklearn", "dp_accounting", "matplotlib", "rich", "typer"),
    *("pooch", "safetensors", "flwr", "wandb", "tensorboard"),
)


def imports(source: str, module: str) -> Iterator[tuple[str, int, bool]]:
    """Yield (imported module, line, whether at the top) for every import of a module."""
    tree = ast.parse(source)
    at_top = {id(node) for node in tree.body}
    package = module if module.endswith("__init__") else module.rpartition(".")[0]
    package = package.removesuffix(".__init__")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in at_top
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            name = ".".join(part for part in (base, node.module or "") if part)
            for alias in node.names:
                # `from fedquilt import learning` names a module, not a member.
                whole = f"{name}.{alias.name}"
                yield (whole if name == "fedquilt" else name), node.lineno, id(node) in at_top


def part_of(module: str) -> str:
    """Return the part of the package a module belongs to; "" is the package itself."""
    names = [name for name in module.split(".")[1:] if name != "__init__"]
    inner = ".".join(names[:2])
    return inner if inner in PLACE else "".join(names[:1])


def allowed(module: str, there: str) -> bool:
    """Tell whether a module may import something of a part."""
    here = part_of(module)
    if here in NARROW:
        return there in NARROW[here]
    return PLACE.get(there, len(ORDER)) < PLACE[here] or (module, there) in EXCEPTIONS


def wrong_imports(source: str, module: str) -> list[str]:
    """Return what a module imports against the direction, with the line."""
    found = []
    for name, line, _ in imports(source, module):
        there = part_of(name)
        if name.split(".")[0] != "fedquilt" or there in (part_of(module), "", "__version__"):
            continue
        if not allowed(module, there):
            found.append(f"{module}:{line} imports {name}")
    return found


def modules() -> dict[str, str]:
    """Return the source of every module of the package, by dotted name."""
    return {
        ".".join(("fedquilt", *path.relative_to(ROOT).with_suffix("").parts)): path.read_text()
        for path in sorted(ROOT.rglob("*.py"))
    }


def test_every_part_has_its_place() -> None:
    parts = {part_of(module) for module in modules()}
    assert {"round", "experiment", "cli", *LEAVES, *DOCUMENTS} <= parts
    assert parts <= set(PLACE), f"no place for {sorted(parts - set(PLACE))}"


def test_the_direction_of_imports() -> None:
    found = [wrong for module, text in modules().items() for wrong in wrong_imports(text, module)]
    assert found == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fedquilt.privacy.bad", "from fedquilt.training import FlatModel"),
        ("fedquilt.privacy.bad", "import fedquilt.training.flat"),
        ("fedquilt.privacy.bad", "import numpy, fedquilt.population"),
        ("fedquilt.privacy.bad", "from fedquilt import learning"),
        ("fedquilt.privacy.ledger.bad", "from ...learning import flat"),
        ("fedquilt.privacy.bad", "from .. import round"),
        ("fedquilt.privacy.__init__", "from ..data import digits"),
        ("fedquilt.training.bad", "def f():\n    from fedquilt.privacy.clip import norm"),
        ("fedquilt.training.bad", "class A:\n    def f(self):\n        import fedquilt.round"),
        ("fedquilt.training.bad", "if TYPE_CHECKING:\n    from fedquilt.experiment.api import run"),
        ("fedquilt.data.bad", "from fedquilt.models import make_model"),
        ("fedquilt.slices.bad", "from fedquilt.condense import Embeds"),
        ("fedquilt.slices.bad", "from fedquilt.round import run_round"),
        ("fedquilt.condense.bad", "from fedquilt.papers.fednum import FedNumServer"),
        ("fedquilt.condense.bad", "from fedquilt.setup.federation import FederatedTask"),
        ("fedquilt.observe.bad", "from fedquilt.config import RunConfig"),
        ("fedquilt.report.bad", "from fedquilt.experiment.api import run"),
        ("fedquilt.report.bad", "from fedquilt.privacy.statement import Statement"),
        ("fedquilt.round", "from fedquilt.experiment.api import run"),
        ("fedquilt.round", "from fedquilt.setup.federation import FederatedTask"),
        ("fedquilt.setup.bad", "from fedquilt.record.result import load"),
        ("fedquilt.setup.federation", "from fedquilt.experiment.api import run"),
        ("fedquilt.experiment.api", "from fedquilt.cli import main"),
        ("fedquilt.experiment.api", "from fedquilt.papers.quapfl import QuAPFLServer"),
        ("fedquilt.experiment.api", "from fedquilt.report import plot_comparison"),
        ("fedquilt.config.bad", "from fedquilt.privacy import clip"),
        ("fedquilt.common.errors", "from fedquilt import config"),
        ("fedquilt.record.folder", "from fedquilt.round import run_round"),
        ("fedquilt.privacy.bad", "from fedquilt.errors import InvalidValueError"),
    ],
)
def test_a_wrong_direction_is_noticed(module: str, source: str) -> None:
    assert len(wrong_imports(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fedquilt.privacy.good", "from fedquilt.privacy.clip import norm\nimport numpy"),
        ("fedquilt.privacy.good", "from fedquilt.common import checks"),
        ("fedquilt.privacy.good", "from .clip import norm"),
        ("fedquilt.slices.good", "from fedquilt.training import Task"),
        ("fedquilt.round", "from fedquilt.privacy.mechanism import Mechanism"),
        ("fedquilt.experiment.api", "from fedquilt.round import run_round"),
        ("fedquilt.cli.good", "from fedquilt.report import plot_comparison"),
    ],
)
def test_a_right_direction_passes(module: str, source: str) -> None:
    assert wrong_imports(source, module) == []


def test_only_numpy_and_torch_load_at_the_top() -> None:
    """Everything else is imported where it is used; the command line may load typer."""
    found = [
        f"{module}:{line} imports {name}"
        for module, text in modules().items()
        for name, line, at_top in imports(text, module)
        if at_top and name.split(".")[0] in OPTIONAL
        if not (part_of(module) == "cli" and name.split(".")[0] == "typer")
        and part_of(module) != "flower"
    ]
    assert found == []


COMPILER = ("torch._dynamo", "torch._inductor", "sympy", "triton")
"""What torch compiles with: a thousand modules that training on a CPU has no use for."""

TRAIN = """
import sys, torch
import fedquilt
assert "torch" in sys.modules and "fedquilt.experiment.api" not in sys.modules
x = torch.randn(40, 4)
y = x[:, :2].argmax(dim=1)
for mode, layers in {modes!r}:
    options = dict(num_rounds=2, availability="always")
    options |= dict(noise_layers=layers) if layers else dict()
    layers = torch.nn.Linear(4, 4), torch.nn.Dropout(), {layer}, torch.nn.Linear(4, 2)
    fedquilt.run(torch.nn.Sequential(*layers), (x, y), (x, y), [range(0, 20), range(20, 40)],
                 mode=mode, output_dir=None, **options)
print(*sorted(name for name in {optional!r} if name in sys.modules))
"""


@pytest.mark.parametrize("layer", ["torch.nn.ReLU()", "torch.nn.CELU()"])
def test_training_needs_torch_and_numpy_only(layer: str, tmp_path: Path) -> None:
    """A model that draws, with steps by hand and, where a layer is not known there, without."""
    modes = [
        *(("fedavg", None), ("fixed_dp", "all"), ("quap_fl", "all"), ("quap_fl_client", None)),
        ("certified", None),
    ]
    script = TRAIN.format(modes=modes, optional=(*OPTIONAL, *COMPILER), layer=layer)
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == []
    assert list(tmp_path.iterdir()) == []


def test_the_public_names_are_there_and_nothing_else() -> None:
    assert set(fedquilt.__all__) == {
        *("RunConfig", "RunResult", "Statement", "__version__", "load", "run"),
        "register_dataset",
        *("Method", "MethodParts", "WholeModel", "Mechanism", "MechanismParts", "Certified"),
        *("Engine", "ClientUpdate", "Observer"),
    }
    for name in fedquilt.__all__:
        assert getattr(fedquilt, name) is not None
    assert set(fedquilt.__all__) <= set(dir(fedquilt))
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = fedquilt.nonesuch  # type: ignore[attr-defined]
