"""One allowance for the same people: runs on one ledger under other options.

A lifetime allowance is worth what recognising people is worth.  Two runs whose clients
hold the same samples must share one account, whatever else their options say, or the
second must be refused; two runs whose clients hold different samples must not.

The data sets are made up, so that nothing is downloaded: the loader is exchanged, and
splits, names, ledger and runs are the real ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fedquilt.audit.findings import ReplayFinding, scratch_folder
from fedquilt.common import checks
from fedquilt.common.errors import FedquiltError
from fedquilt.common.randomness import generator
from fedquilt.config import RunConfig, plain_config
from fedquilt.data import ImageDataset
from fedquilt.experiment import api as experiment
from fedquilt.privacy.ledger import Ledger
from fedquilt.setup import build_task as assemble_problem
from fedquilt.training.task import one_thread

PREFIX = "people: "
"""What the names of these cases begin with in a table."""
_ROOM = 9.0
_WRITERS, _SAMPLES, _CLASSES = 6, 8, 3


@dataclass(frozen=True)
class People:
    """Two runs that may be about the same people."""

    first: dict[str, Any]
    second: dict[str, Any]


_IID = {"dataset": "digits", "partition": "iid", "num_clients": 4}
_WRITER = {"dataset": "mnist-writers", "partition": "writer"}
_SKEWED = {"dataset": "digits", "partition": "dirichlet", "num_clients": 4}
_STOP = {"early_stopping": True, "target_accuracy": 1.0}

PEOPLE: dict[str, People] = {
    "the same run again": People(_IID, _IID),
    "iid, another alpha": People(_IID, {**_IID, "dirichlet_alpha": 0.9}),
    "iid, other classes a client": People(_IID, {**_IID, "classes_per_client": 3}),
    "dirichlet, other classes a client": People(_SKEWED, {**_SKEWED, "classes_per_client": 3}),
    "iid, another learning rate": People(_IID, {**_IID, "learning_rate": 0.3}),
    "writers, another seed": People(_WRITER, {**_WRITER, "seed": 1}),
    "writers, another alpha": People(_WRITER, {**_WRITER, "dirichlet_alpha": 0.9}),
    "iid, another seed": People(_IID, {**_IID, "seed": 1}),
    "dirichlet, another alpha": People(_SKEWED, {**_SKEWED, "dirichlet_alpha": 5.0}),
    "iid, a validation split": People(_IID, {**_IID, **_STOP}),
    "another validation split": People(
        {**_IID, **_STOP, "validation_fraction": 0.1}, {**_IID, **_STOP, "validation_fraction": 0.4}
    ),
}


def replay_people(cases: Sequence[str] | None = None) -> list[ReplayFinding]:
    """Run pairs of runs on one ledger; return one finding a pair.

    Declared is the allowance in squared GDP units and measured what the most charged
    person has given away in both runs together; for different people, how many accounts
    they should have and do have.
    """
    names = list(PEOPLE) if cases is None else [checks.choice("case", c, PEOPLE) for c in cases]
    return [_replayed(name, PEOPLE[name]) for name in names]


def _replayed(name: str, pair: People) -> ReplayFinding:
    with (
        one_thread(),
        tempfile.TemporaryDirectory(dir=scratch_folder()) as folder,
        patch.object(assemble_problem, "load_dataset", _made_up),
    ):
        path = Path(folder) / "ledger.sqlite"
        first, second = (_config(settings, path) for settings in (pair.first, pair.second))
        same = _split(first) == _split(second)
        if not same:  # room for both: a refusal would hide that they share an account
            first, second = (config.replace(allowance=_ROOM) for config in (first, second))
        experiment.run_in_memory(first)
        refused = _refusal(second)
        with Ledger.open(path, read_only=True) as ledger:
            populations = list(ledger.populations())
            spent = [population.spent() for population in populations]
            allowance = max(population.info.allowance_mu2 for population in populations)
    if refused is not None:
        return ReplayFinding(PREFIX + name, allowance, allowance, True, f"refused: {refused}")
    if same:
        measured = float(np.sum(spent, axis=0).max())
        ok = measured <= allowance * (1 + 1e-9)
        detail = f"the same people in {len(spent)} account(s)"
        return ReplayFinding(PREFIX + name, allowance, measured, ok, detail)
    count = float(len(populations))
    return ReplayFinding(PREFIX + name, 2.0, count, count == 2.0, "other people, by account")


def _config(settings: dict[str, Any], ledger: Path) -> RunConfig:
    shared = {
        "mode": "certified",
        "model": "linear",
        "num_rounds": 1,
        "local_epochs": 1,
        "clients_per_round": 1.0,
        "availability": "always",
        "device": "cpu",
        "epsilon": 3.0,
        "ledger": str(ledger),
        "if_exhausted": "sit_out",
    }
    return plain_config({**shared, **settings})


def _refusal(config: RunConfig) -> str | None:
    try:
        experiment.run_in_memory(config)
    except FedquiltError as error:
        return str(error).split("\n")[0][:80]
    return None


def _split(config: RunConfig) -> list[list[int]]:
    """Return who holds which samples."""
    _, built = assemble_problem.build_task(config)
    return [sorted(int(i) for i in part) for part in built.task.clients]


def _made_up(name: str, *given: object, **options: object) -> tuple[ImageDataset, ImageDataset]:
    """Return a small data set in the place of the one that is named."""
    random = generator(0, "audit people")
    total = _WRITERS * _SAMPLES
    images = torch.from_numpy(random.standard_normal((total, 1, 4, 4))).float()
    labels = torch.arange(total) % _CLASSES
    writers = np.repeat(np.arange(_WRITERS), _SAMPLES) if name == "mnist-writers" else None
    whole = ImageDataset(images, labels, name, _CLASSES, writers)
    return whole, whole
