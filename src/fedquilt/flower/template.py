"""The app that `fedquilt flower new` writes, ready to run, and the hash by which nodes know one."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import shlex
import tomllib
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

FILES: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""The app's files by their paths; those of `_FILLED` have places for names and options."""
_FILLED = ("README.md", "pyproject.toml")


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
    written = {**FILES, **(files or {}), "pyproject.toml": FILES["pyproject.toml"]}
    for path, text in written.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        known = {"name": name, "table": table, "folder": shlex.quote(called)}
        filled = text.format(**known) if path in _FILLED else text
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
