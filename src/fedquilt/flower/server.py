"""A run on a grid, by a server that holds no training data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid
from torch import nn

from fedquilt.assemble import Own, Problem, problem_from
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.observer import Observer, as_observer
from fedquilt.common.storage import append_line
from fedquilt.config import RunConfig, build_config
from fedquilt.data import as_dataset
from fedquilt.experiment import Watching, run_problem
from fedquilt.flower.directory import Directory
from fedquilt.flower.engine import FlowerEngine
from fedquilt.flower.node import MakeModel, frozen_digest, new_model
from fedquilt.flower.settings import FlowerSettings
from fedquilt.learning import Task, public_inputs
from fedquilt.record import RunResult
from fedquilt.run_folder import RunFolder

NODES_FILE = "nodes.jsonl"
"""What happened with every node, and what it reported of itself; for the owner alone."""


class NodesFile(Observer):
    """Writes an engine's reports into the run's folder, and passes everything else on."""

    def __init__(self, watching: Watching | None) -> None:
        self._inner = as_observer(watching)
        self._path: Path | None = None

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; its file can be read by the owner alone."""
        if self._path is not None:
            append_line(self._path, json.dumps(line, allow_nan=False), 0o600)

    def opened(self, config: Any, folder: Path) -> None:
        """Learn where the run's folder is."""
        self._path = folder / NODES_FILE
        self._inner.opened(config, folder)

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        """Pass a round's line on."""
        self._inner(config, line)

    def working(self, what: str, share: float) -> None:
        """Pass progress on."""
        self._inner.working(what, share)

    def kept(self, path: Path) -> None:
        """Pass a file's name on."""
        self._inner.kept(path)


def without_data(problem: Problem) -> Problem:
    """Return a problem whose clients' samples are nowhere here."""
    public = problem.task.public()
    nobody = [np.zeros(0, dtype=np.int64)] * len(problem.task.clients)
    task = Task(public.inputs, public.targets, nobody, elsewhere=True)
    return dataclasses.replace(problem, task=task)


def served_problem(problem: Problem, engine: FlowerEngine) -> Problem:
    """Return a problem whose clients are the nodes of an engine."""
    engine.frozen = frozen_digest(problem)
    return dataclasses.replace(problem, own=Own(remote=engine))


def run_on_grid(
    grid: Grid,
    directory: Directory,
    make_model: MakeModel,
    test_data: Callable[[], object] | object,
    options: Mapping[str, Any],
    settings: FlowerSettings,
    *,
    client_ids: Sequence[str] | None = None,
    output_dir: str | None = None,
    resume: str | Path | None = None,
    observer: Watching | None = None,
) -> RunResult:
    """Run a user's model on nodes that hold the data.

    Parameters
    ----------
    make_model
        Returns the model; called with torch's generator at the run's seed.
    test_data
        What the server evaluates on, or a function that returns it.  Its samples say which
        shape the clients' have.
    options
        Options of the run, as in a TOML file.
    client_ids
        What clients are called in the ledger.
    resume
        A run's folder to continue.
    """
    config = _config(options, resume)
    test = as_dataset(test_data() if callable(test_data) else test_data)
    model = new_model(make_model, config.seed)
    config, problem = _problem(config, model, test, directory.num_clients, client_ids)
    nodes_file = NodesFile(observer)
    engine = FlowerEngine(grid, directory, config, settings, report=nodes_file.write)
    return run_problem(
        config,
        served_problem(problem, engine),
        output_dir=None if resume is not None else output_dir,
        resume=resume,
        observer=nodes_file,
    )


def _config(options: Mapping[str, Any], resume: str | Path | None) -> RunConfig:
    """Return the run's settings: those of the folder that is resumed, or new ones."""
    if resume is not None:
        return RunFolder.open(resume).read_config()
    own = {"dataset": "custom", "model": "custom"}
    usual = {} if options.get("availability") else {"availability": "always"}
    # Who is there is known here: it is not drawn.
    return build_config({**own, **usual, **options, "engine": "custom"})


def _problem(
    config: RunConfig,
    model: nn.Module,
    test: Any,
    num_clients: int,
    client_ids: Sequence[str] | None,
) -> tuple[RunConfig, Problem]:
    """Build the problem of a server: public samples in the place of data nobody has here."""
    if config.num_clients not in (None, num_clients):
        raise InvalidValueError(
            f"num_clients={config.num_clients} must be {num_clients}, the number of clients in "
            "the roster"
        )
    unseen = (public_inputs(test.images, 2), torch.zeros(2, dtype=torch.int64))
    nobody = [np.zeros(0, dtype=np.int64)] * num_clients
    config, problem = problem_from(config, model, unseen, test, nobody, client_ids)
    return config, without_data(problem)
