"""Whether the folder of a run holds the run that a `FedNumServer` is about to go on with.

`fedquilt.run_folder` knows the folder's files; it stands above this package, and the
server hands over what it has read.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.condense.fednum_arguments import Client
from fedquilt.config import CondenseConfig, RunConfig, write_config_file
from fedquilt.errors import RunFolderError


def write_settings(path: Path, config: CondenseConfig) -> None:
    """Make the folder of a run that begins, with its configuration in it."""
    text = io.StringIO()
    write_config_file(config, text)
    path.mkdir(parents=True, exist_ok=True)
    (path / ".config.toml.tmp").write_text(text.getvalue(), encoding="utf-8")
    os.replace(path / ".config.toml.tmp", path / "config.toml")


def check_settings(path: Path, there: RunConfig, here: CondenseConfig) -> None:
    """Refuse a folder whose run has other settings."""
    found = there.as_dict()
    for key, value in here.as_dict().items():
        if found.get(key) != value:
            raise RunFolderError(
                f"output_dir={str(path)!r} must be another folder: the run in it has "
                f"{key}={found.get(key)!r}, not {value!r}"
            )


def fingerprint(clients: Sequence[Client], weights: torch.Tensor) -> NDArray[np.uint8]:
    """Return what tells a run from another with the same settings, as it begins."""
    held = [
        (client.cid, list(client.classes), len(client) if isinstance(client, Sized) else None)
        for client in clients
    ]
    digest = hashlib.sha256(repr(held).encode())
    digest.update(weights.cpu().numpy().tobytes())
    return np.frombuffer(digest.digest(), dtype=np.uint8)


def check_fingerprint(
    path: Path, state: Mapping[str, NDArray[Any]], expected: NDArray[np.uint8]
) -> None:
    """Refuse a checkpoint of a run that began otherwise."""
    if not np.array_equal(state.get("fingerprint", []), expected):
        raise RunFolderError(
            f"output_dir={str(path)!r} must be another folder: the run in it began "
            "with other weights of the global model, or with other clients"
        )
