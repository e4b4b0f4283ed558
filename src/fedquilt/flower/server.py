"""A run on a grid, by a server that holds no training data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from torch import nn

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.observer import Observer, as_observer
from fedquilt.common.storage import append_line
from fedquilt.config import RunConfig, build_config
from fedquilt.data import Samples, as_samples
from fedquilt.experiment.api import run_problem
from fedquilt.experiment.loop import Watching
from fedquilt.flower.directory import Directory
from fedquilt.flower.engine import FlowerEngine
from fedquilt.flower.node import CUSTOM, MakeModel, frozen_digest, new_model
from fedquilt.flower.settings import FlowerSettings
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import RunResult
from fedquilt.setup.build_task import problem_from
from fedquilt.setup.task import Own, Problem
from fedquilt.training import Objective, Task

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

    def expects(self, config: Any, lines: Sequence[str]) -> None:
        """Pass on what the run may expect."""
        self._inner.expects(config, lines)

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
    """Return a problem in whose task no client has samples.

    Of a simulation `problem.data` stays: resumed with other data it is refused.
    """
    nobody = [np.zeros(0, dtype=np.int64)] * len(problem.task.clients)
    task = dataclasses.replace(problem.task.public(), clients=nobody, is_remote=True)
    return dataclasses.replace(problem, task=task)


def served_problem(problem: Problem, engine: FlowerEngine) -> Problem:
    """Return a problem whose clients are the nodes of an engine."""
    if problem.client_tests is not None:
        raise InvalidValueError(
            "client_test_fraction must be 0 where clients are Flower nodes: the server evaluates, "
            "and it has none of the samples that they would hold back"
        )
    engine.frozen = frozen_digest(problem)
    return dataclasses.replace(problem, own=dataclasses.replace(problem.own, remote=engine))


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
    own: Own | None = None,
) -> RunResult:
    """Run a user's model on nodes that hold the data.

    Parameters
    ----------
    make_model
        Returns the model; called with torch's generator at the run's seed.
    test_data
        What the server evaluates on, or a function that returns it, in any form that
        `fedquilt.run` takes.  Its samples say which form the clients' have.
    options
        Options of the run, as in a TOML file.  What is absent has the default of the mode.
    client_ids
        What clients are called in the ledger.
    resume
        A run's folder to continue.
    own
        A loss, an optimiser and metrics that are objects; the nodes' app has the same.
    """
    own = own or Own()
    config = _config(options, resume, own)
    test = as_samples(test_data() if callable(test_data) else test_data, "test")
    model = new_model(make_model, config.seed)
    nodes_file = NodesFile(observer)
    engine = FlowerEngine(grid, directory, config, settings, report=nodes_file.write)
    own = dataclasses.replace(own, remote=engine)
    config, problem = _problem(config, model, test, engine, client_ids, own)
    return run_problem(
        config,
        served_problem(problem, engine),
        output_dir=None if resume is not None else output_dir,
        resume=resume,
        observer=nodes_file,
    )


def _config(options: Mapping[str, Any], resume: str | Path | None, own: Own) -> RunConfig:
    """Return the run's settings: those of the folder that is resumed, or new ones."""
    if resume is not None:
        return RunFolder.open(resume).read_config()
    brought = {
        name: CUSTOM for name in ("loss", "optimizer", "metrics") if getattr(own, name) is not None
    }
    named = next((name for name in brought if options.get(name, CUSTOM) != CUSTOM), None)
    if named is not None:
        raise InvalidValueError(
            f"{named}={options[named]!r} must be left out of the run configuration: the app "
            "brings its own"
        )
    data = {"dataset": CUSTOM, "model": CUSTOM}
    # Who is there is known here: it is not drawn.
    usual = {} if options.get("availability") else {"availability": "always"}
    given = {**data, **usual, **options, "engine": CUSTOM, **brought}
    preset = given.pop("preset", None)
    return build_config(given, preset=preset, own=True)


def _problem(
    config: RunConfig,
    model: nn.Module,
    test: Samples,
    engine: FlowerEngine,
    client_ids: Sequence[str] | None,
    own: Own,
) -> tuple[RunConfig, Problem]:
    """Build the problem of a server: public samples in the place of data nobody has here."""
    num_clients = engine.directory.num_clients
    if config.num_clients not in (None, num_clients):
        raise InvalidValueError(
            f"num_clients={config.num_clients} must be {num_clients}, the number of clients in "
            "the roster"
        )
    form = Objective(ignore_index=config.ignore_index)
    public = Task(test.inputs, test.targets, [], objective=form).public()
    unseen = Samples(public.inputs, public.targets, "train", test.num_classes)
    nobody = [np.zeros(0, dtype=np.int64)] * num_clients
    config, problem = problem_from(config, model, unseen, test, nobody, client_ids, own)
    return config, without_data(problem)
