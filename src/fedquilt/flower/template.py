"""The app that `fedquilt flower new` writes, ready to run, and the hash by which nodes know one."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import shlex
import zipfile
from pathlib import Path
from typing import Any

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import printable
from fedquilt.config import RunConfig, option_fields
from fedquilt.config.option import Flag
from fedquilt.config.run import option_names
from fedquilt.flower.settings import PREFIX, FlowerSettings

PACKAGE = "quiltapp"

# What the template changes: what sites accept as they are enrolled, in a minute.
CHOSEN: dict[str, Any] = {
    "mode": "certified",
    "num_rounds": 10,
    "clients_per_round": 1.0,
    "local_epochs": 2,
    "learning_rate": 0.1,
    "eval_every": 1,
    "availability": "always",
}

FILES = {
    "README.md": """# {name}

A Flower app that runs fedquilt's round: `quiltapp/task.py` has the model and the data, and is
the file to change.  In the folder above this one:

    fedquilt flower up {folder} --nodes 4     # a federation on this machine
    fedquilt flower run                     # submit this app to it
    fedquilt flower status
    fedquilt flower down

It runs `certified`, which the policy of a newly enrolled site accepts.  With four clients there is
little to see beside the noise of that promise; what the model learns without one shows
`fedquilt flower run -c 'mode="fedavg"'`, which such a policy refuses.

After a change to the app, tell the nodes that they may run it: `fedquilt flower trust {folder}`.

Every option of `fedquilt run` stands in `pyproject.toml` under `[tool.flwr.app.config]`; an
empty text is an option that is not given, and has the default of the mode.  One run:
`fedquilt flower run -c num_rounds=3`.

Flower's own simulation (`pip install 'fedquilt[flower-sim]'`), in this folder:

    export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1    # use what is installed here
    flwr run . local --stream --federation-config 'num-supernodes=4'

The SuperLink that it starts stays; `flower-superlink` is its name among the processes.
""",
    ".gitignore": "__pycache__/\nresults/\nfederation/\n",
    "quiltapp/__init__.py": '"""A federated app on fedquilt."""\n',
    "quiltapp/client_app.py": '''"""What a node runs."""

from fedquilt.flower import client_app
from quiltapp.task import client_data, make_model

app = client_app(make_model, client_data)
''',
    "quiltapp/server_app.py": '''"""What runs beside the SuperLink; it holds no training data."""

from fedquilt.flower import server_app
from quiltapp.task import make_model, test_data

app = server_app(make_model, test_data)
''',
    "quiltapp/task.py": '''"""Your model and your data: change what is below."""

import numpy as np
from sklearn.datasets import load_digits
from torch import nn


def make_model() -> nn.Module:
    """Return the model: logits or log-probabilities, the same on the server and on nodes."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def client_data(context) -> tuple[np.ndarray, np.ndarray]:
    """Return this node's own samples (x, y); they never leave it.

    A node is told where they are when it is started: --node-config 'data="/srv/data.npz"'.
    Without that, it takes its share of scikit-learn's digits, for trying out.
    """
    path = context.node_config.get("data")
    if path:
        with np.load(str(path), allow_pickle=False) as held:
            return held["x"], held["y"]
    x, y = _digits()
    place = int(context.node_config["partition-id"])
    return x[300 + place :: int(context.node_config["num-partitions"])], y[
        300 + place :: int(context.node_config["num-partitions"])
    ]


def test_data() -> tuple[np.ndarray, np.ndarray]:
    """Return what the server evaluates on: samples that no node trains on."""
    x, y = _digits()
    return x[:300], y[:300]


def _digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    return (x[order] / 16.0).astype(np.float32), y[order].astype(np.int64)
''',
}

_PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "1.0.0"
description = "A federated app on fedquilt"
license = "Apache-2.0"
dependencies = ["fedquilt[flower]"]

[tool.flwr.app]
publisher = "fedquilt"
# What is sent to every node: your code.  Results and keys in this folder must not be.
fab-include = ["/quiltapp/**/*.py"]

[tool.flwr.app.components]
serverapp = "quiltapp.server_app:app"
clientapp = "quiltapp.client_app:app"

# Options of the run, as in a TOML file of `fedquilt run`; "" is an option that is not given,
# and has the default of the mode.
[tool.flwr.app.config]
{table}
"""


def run_configuration(**chosen: Any) -> dict[str, Any]:
    """Return every option that a run configuration may hold: those chosen, and "" for the rest.

    Defaults follow the mode, and an option that does nothing in it is refused; so what
    nobody chose is not given.
    """
    elsewhere = {*option_names(Flag.OPERATOR), *option_names(Flag.APP)}
    values: dict[str, Any] = {
        name: None for name in ("preset", *option_fields(RunConfig)) if name not in elsewhere
    }
    own = {PREFIX + field.name: field.default for field in dataclasses.fields(FlowerSettings)}
    merged = {**values, **CHOSEN, **own}
    unknown = sorted(chosen.keys() - merged.keys())
    if unknown:
        raise InvalidValueError(f"{unknown[0]} must be an option of a run configuration")
    return {name: "" if value is None else value for name, value in {**merged, **chosen}.items()}


def write_app(folder: str | Path, files: dict[str, str] | None = None, **chosen: Any) -> Path:
    """Write the app into a new folder; `chosen` are options, `files` replace some of its own."""
    folder = Path(folder)
    called = folder.resolve().name
    name = re.sub(r"[^a-z0-9]+", "-", called.lower()).strip("-") or "quiltapp"
    if folder.exists() and any(folder.iterdir()):
        raise InvalidValueError(f"{str(folder)!r} must be a new or empty folder")
    table = "\n".join(
        f"{key} = {json.dumps(value)}" for key, value in run_configuration(**chosen).items()
    )
    written = {**FILES, **(files or {}), "pyproject.toml": _PROJECT}
    for path, text in written.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        known = {"name": name, "table": table, "folder": shlex.quote(called)}
        filled = text.format(**known) if path in ("README.md", "pyproject.toml") else text
        target.write_text(filled)
    return folder


def fab_hash(app: str | Path) -> str:
    """Return the hash of an app as Flower packs it: what nodes are told to trust.

    An app is sent to every node.  One that would take the files of runs along is refused.
    """
    from flwr.cli.build import build_fab_from_disk

    from fedquilt.flower.processes import CONFIG, ROSTER

    private = {"nodes.jsonl", "clients.json", CONFIG, ROSTER}  # their owner's alone
    try:
        packed = build_fab_from_disk(Path(app))
    except Exception as error:  # of many kinds, by what is wrong with the app
        raise InvalidValueError(
            f"app={str(app)!r} must be a Flower app, and is none: {printable(error)[:300]}"
        ) from error
    with zipfile.ZipFile(io.BytesIO(packed)) as content:
        taken = [name for name in content.namelist() if Path(name).name in private]
    if taken:
        raise InvalidValueError(
            f"the app {str(app)!r} must not take {taken[0]!r} to every node: put results and "
            "the federation elsewhere, or name them in the app's .gitignore"
        )
    return hashlib.sha256(packed).hexdigest()
