"""The same round on many machines: clients are Flower nodes (needs `fedquilt[flower]`).

| module | what |
|---|---|
| `apps` | `client_app` and `server_app`, for the files of a Flower app |
| `engine` | step 3 of the round: orders out, replies in, a deadline, refusals |
| `wire`, `codecs` | orders and replies as records of Flower; compressed updates |
| `node` | a client's side: its own data, the method's work on them |
| `directory` | which node is which client: keys, or places in a simulation |
| `server` | a run on a grid, by a server that holds no training data |
| `grid` | a Grid in this process, without Ray |
| `simulate` | `fedquilt run --engine flower` and `flower-ray` |
| `settings` | what only this engine asks for: deadline, compression, who is waited for |
| `internals` | the private parts of Flower that have to be touched |
| `template` | the app that `fedquilt flower new` writes |
| `trial` | a node's own file, or a share of a public data set to try an app |
| `federation`, `processes`, `gate`, `warm` | a federation on this machine |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedquilt.flower.apps import client_app, server_app
    from fedquilt.flower.engine import FlowerEngine
    from fedquilt.flower.grid import InProcessGrid
    from fedquilt.flower.settings import FlowerSettings

__all__ = ["FlowerEngine", "FlowerSettings", "InProcessGrid", "client_app", "server_app"]

_MODULES = {
    "client_app": "apps",
    "server_app": "apps",
    "FlowerEngine": "engine",
    "FlowerSettings": "settings",
    "InProcessGrid": "grid",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is asked for; flwr is needed then."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    from fedquilt.common import optional

    optional.load("flwr", f"fedquilt.flower.{name}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
