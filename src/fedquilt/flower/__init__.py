"""The same round on many machines: clients are Flower nodes (needs `fedquilt[flower]`).

| module | what |
|---|---|
| `engine` | step 3 of the round: orders out, replies in, a deadline, refusals |
| `wire` | orders and replies as records of Flower; compressed updates |
| `node` | a client's side: its own data, the method's work on them, `client_app` |
| `site`, `policy` | before a node's app: what the data holder allows, its account, its clip |
| `server` | a run on a grid, by a server that holds no training data; `server_app` |
| `client_registry` | which node is which client: keys, or places in a simulation |
| `simulate` | `fedquilt run --engine flower` (nodes in this process) and `flower-ray` |
| `settings` | what only this engine asks for: deadline, compression, who is waited for |
| `internals` | the private parts of Flower that have to be touched |
| `template`, `demo_data` | the app that `fedquilt flower new` writes, and data to try it |
| `federation`, `processes`, `keys` | a federation on this machine |
| `control`, `run_notes` | the operator's side of a run: submit, follow, stop; how it stands |
| `supernode` | Flower's SuperNode with shorter pauses |
| `superlink` | a SuperLink for its own user |
| `journal`, `metrics` | the audit log; figures for Prometheus |
| `proxy`, `prefork` | `python -m fedquilt.flower.gate` and `python -m fedquilt.flower.warm` |
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedquilt.flower.engine import FlowerEngine
    from fedquilt.flower.node import client_app
    from fedquilt.flower.server import server_app
    from fedquilt.flower.settings import FlowerSettings
    from fedquilt.flower.simulate import InProcessGrid

__all__ = ["FlowerEngine", "FlowerSettings", "InProcessGrid", "client_app", "server_app"]

_MODULES = {
    "client_app": "node",
    "server_app": "server",
    "FlowerEngine": "engine",
    "FlowerSettings": "settings",
    "InProcessGrid": "simulate",
}
COMMANDS = {"gate": "proxy", "warm": "prefork"}
"""The modules behind `python -m fedquilt.flower.NAME`, as installed units call them."""
EARLIER_NAMES = {"trial": "demo_data", "directory": "client_registry"}
"""Modules that apps import which were written for an earlier version."""


def __getattr__(name: str) -> Any:
    """Load a public name when it is asked for; flwr is needed then."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedquilt.common import optional

    optional.require("flwr", f"fedquilt.flower.{name}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


class _OtherNames(MetaPathFinder, Loader):
    """Finds a module of this package under the name of its command, or its earlier name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        known = package == __name__ and module in {**COMMANDS, **EARLIER_NAMES}
        return ModuleSpec(name, self) if known else None

    def exec_module(self, module: ModuleType) -> None:
        """Let the name mean the module itself, not a copy of it."""
        name = module.__name__
        if name.rpartition(".")[2] in EARLIER_NAMES:
            text = f"{name} is now {_now(name)}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        sys.modules[name] = importlib.import_module(_now(name))

    def get_code(self, name: str) -> CodeType | None:
        """Return what `python -m` runs."""
        spec = find_spec(_now(name))
        loader = None if spec is None else spec.loader
        return loader.get_code(_now(name)) if isinstance(loader, InspectLoader) else None


def _now(name: str) -> str:
    package, _, module = name.rpartition(".")
    return ".".join((package, {**COMMANDS, **EARLIER_NAMES}[module]))


sys.meta_path.append(_OtherNames())
