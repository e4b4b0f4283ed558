"""A run on a grid, by a server that holds no training data.

Whoever can start a run chooses its configuration.  So the server's operator, not the run,
says where results and the ledger are and who may take part:

| environment of the server | what |
|---|---|
| `FEDQUILT_FLOWER_OUTPUT` | folder that receives the run's folder (default `./results`) |
| `FEDQUILT_FLOWER_LEDGER` | the ledger; runs cannot name another |
| `FEDQUILT_FLOWER_POPULATION` | what the clients are called in it |
| `FEDQUILT_FLOWER_ALLOW_UNBOUNDED` | `yes`: runs that claim nothing may end bounds in the ledger |
| `FEDQUILT_FLOWER_TRACKER` | trackers of runs (`wandb,tensorboard,mlflow`); default none |
| `FEDQUILT_FLOWER_ROSTER` | the roster file; absent: a simulation, by `partition-id` |

A run that was stopped is continued by a run with `flower_resume = true`: the last one in the
operator's folder that is not finished.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.observer import Observer, Observers, as_observer
from fedquilt.common.storage import append_line
from fedquilt.config import RunConfig, build_config, package_names
from fedquilt.config.files import kind_of
from fedquilt.config.option import Flag
from fedquilt.config.run import option_names
from fedquilt.data import Samples, as_samples
from fedquilt.experiment.api import run_task
from fedquilt.experiment.loop import Watching
from fedquilt.flower import internals, journal
from fedquilt.flower.buffered_engine import BufferedEngine
from fedquilt.flower.client_registry import ClientRegistry, KeyRegistry, NodeRoster, PlaceRegistry
from fedquilt.flower.engine import FlowerEngine
from fedquilt.flower.masked_engine import engine_of
from fedquilt.flower.node import (
    CUSTOM,
    MakeModel,
    frozen_digest,
    new_model,
)
from fedquilt.flower.run_notes import RUNNING, RunNotes
from fedquilt.flower.settings import FlowerSettings, split_settings
from fedquilt.observe.progress import headline_of
from fedquilt.observe.trackers import tracked
from fedquilt.population.fleet import BufferedSelector
from fedquilt.privacy.ledger.files import write_names
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import RunResult
from fedquilt.setup.build_task import task_from
from fedquilt.setup.task import FederatedTask, UserComponents
from fedquilt.training import Objective, Task
from fedquilt.training.objective import OwnLoss
from fedquilt.training.optimizers import Factory

_PREFIX = "FEDQUILT_FLOWER_"
_UNBOUNDED = ("ALLOW_UNBOUNDED", "SPEND_EVERYTHING")  # the latter of versions before


NODES_FILE = "nodes.jsonl"
"""What happened with every node, and what it reported of itself; for the owner alone."""


_NOTED = ("round", "client", "name", "refused")


class NodesFile(Observer):
    """Writes an engine's reports into the run's folder.

    `registry` says what people call the clients; beside the ledger their names are kept for them.
    """

    def __init__(
        self, registry: ClientRegistry | None = None, notes: RunNotes | None = None
    ) -> None:
        self._path: Path | None = None
        self._registry, self._notes = registry, notes
        self._kept: dict[str, str] = {}
        self._said: set[str] = set()
        self._run = ""

    def run_name(self) -> str:
        """Return what the ledger calls the run; an empty text where nothing is kept."""
        return self._run

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; its file can be read by the owner alone."""
        if self._path is not None:
            client = line.get("client")
            name = None if client is None else self.name_of(client)
            named = line if name is None else {**line, "name": name}
            append_line(self._path, json.dumps(named, allow_nan=False), 0o600)
            if "refused" in line:
                kept = {key: named[key] for key in _NOTED if key in named}
                folder = self._path.parent
                journal.note(folder.parent, "refused", run=folder.name, **kept)
                said = f"{name or 'a client'} stays away: refused {line['refused']}"
                follows_data = not str(line["refused"]).startswith("by its site")
                if self._notes is not None and not follows_data and said not in self._said:
                    self._said.add(said)
                    self._notes.say(said)

    def name_of(self, client: int) -> str | None:
        """Return what people call a client; None where nobody has said."""
        names: Sequence[str] = getattr(self._registry, "names", ())
        return names[client] if client < len(names) else None

    def opened(self, config: Any, folder: Path) -> None:
        """Learn where the run's folder is."""
        self._path = folder / NODES_FILE
        self._run = (RunFolder.open(folder).read_account() or {"run_id": ""})["run_id"]
        if self._notes is not None:
            self._notes.write(RUNNING, folder=folder)
        self._keep_names()

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        """Keep names that are new."""
        self._keep_names()

    def _keep_names(self) -> None:
        """Write what clients are called beside the ledger, when that has changed."""
        names: dict[str, str] = getattr(self._registry, "accounts", {})
        if names == self._kept or self._path is None:
            return
        entered = RunFolder.open(self._path.parent).read_account()
        if entered is not None:
            write_names(entered["ledger"], names)
        self._kept = dict(names)


def without_data(problem: FederatedTask) -> FederatedTask:
    """Return a problem in whose task no client has samples.

    Of a simulation `problem.data` stays: resumed with other data it is refused.
    """
    nobody = [np.zeros(0, dtype=np.int64)] * len(problem.task.clients)
    task = dataclasses.replace(problem.task.public(), clients=nobody, is_remote=True)
    tests = None if problem.client_tests is None else nobody
    return dataclasses.replace(problem, task=task, client_tests=tests)


def served_problem(problem: FederatedTask, engine: FlowerEngine) -> FederatedTask:
    """Return a problem whose clients are the nodes of an engine."""
    engine.frozen = frozen_digest(problem)
    if isinstance(engine, BufferedEngine) and isinstance(problem.selector, BufferedSelector):
        engine.join(problem.selector)
    return dataclasses.replace(problem, own=dataclasses.replace(problem.own, remote=engine))


def run_on_grid(
    grid: Grid,
    registry: ClientRegistry,
    make_model: MakeModel,
    test_data: Callable[[], object] | object,
    options: Mapping[str, Any],
    settings: FlowerSettings,
    *,
    client_ids: Sequence[str] | None = None,
    output_dir: str | None = None,
    resume: str | Path | None = None,
    observer: Watching | None = None,
    own: UserComponents | None = None,
    notes: RunNotes | None = None,
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
    notes
        Where the run says how it stands, and its operator that it shall stop.
    """
    own = own or UserComponents()
    config = _config(options, resume, own)
    test = as_samples(test_data() if callable(test_data) else test_data, "test")
    model = new_model(make_model, config.seed)
    nodes_file = NodesFile(registry, notes)
    engine = engine_of(
        grid,
        registry,
        config,
        settings,
        report=nodes_file.write,
        check_stop=None if notes is None else notes.check_stop,
        run_name=nodes_file.run_name,
    )
    own = dataclasses.replace(own, remote=engine)
    config, problem = _problem(config, model, test, engine, client_ids, own)
    return run_task(
        config,
        served_problem(problem, engine),
        output_dir=None if resume is not None else output_dir,
        resume=resume,
        observer=Observers(nodes_file, as_observer(observer)),
    )


def settings_of_app(run_config: Mapping[str, Any]) -> RunConfig:
    """Return the settings of a run that an app's configuration asks for."""
    options, _ = split_settings(run_config)
    options = package_names(kind_of(options), options, warns=False)
    options.pop("num_clients", None)
    return _config(options, None, UserComponents())


def _config(
    options: Mapping[str, Any], resume: str | Path | None, own: UserComponents
) -> RunConfig:
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
    own: UserComponents,
) -> tuple[RunConfig, FederatedTask]:
    """Build the problem of a server: public samples in the place of data nobody has here."""
    num_clients = engine.registry.num_clients
    if config.num_clients not in (None, num_clients):
        raise InvalidValueError(
            f"num_clients={config.num_clients} must be {num_clients}, the number of clients in "
            "the roster"
        )
    form = Objective(ignore_index=config.ignore_index)
    public = Task(test.inputs, test.targets, [], objective=form).public()
    unseen = Samples(public.inputs, public.targets, "train", test.num_classes)
    nobody = [np.zeros(0, dtype=np.int64)] * num_clients
    config, problem = task_from(config, model, unseen, test, nobody, client_ids, own)
    return config, without_data(problem)


def server_app(
    make_model: MakeModel,
    test_data: Callable[[], object],
    *,
    loss: OwnLoss | None = None,
    optimizer: Factory | None = None,
    metrics: Any = None,
    finished: Callable[[RunResult], None] | None = None,
) -> ServerApp:
    """Return the app that runs beside the SuperLink.

    Parameters
    ----------
    make_model : callable
        Returns the model, the same as on the nodes.
    test_data : callable
        Returns what the server evaluates on; it needs no training data.
    loss, optimizer, metrics : optional
        Objects of your own, as `fedquilt.run` takes them; the first two are the nodes' too.
    finished : callable, optional
        Given the result.
    """
    app = ServerApp()
    own = UserComponents(loss=loss, optimizer=optimizer, metrics=metrics)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        result = run_from(grid, context.run_config, make_model, test_data, own)
        if finished is not None:
            finished(result)

    return app


def run_from(
    grid: Grid,
    run_config: Mapping[str, Any],
    make_model: MakeModel,
    test_data: Callable[[], object],
    own: UserComponents | None = None,
) -> RunResult:
    """Run what a run configuration and the operator's environment describe."""
    output_dir = os.environ.get(_PREFIX + "OUTPUT", "./results")
    notes = RunNotes(output_dir, internals.run_number(grid))
    with notes.kept():
        return _run_from(grid, run_config, make_model, test_data, own, output_dir, notes)


def _run_from(
    grid: Grid,
    run_config: Mapping[str, Any],
    make_model: MakeModel,
    test_data: Callable[[], object],
    own: UserComponents | None,
    output_dir: str,
    notes: RunNotes,
) -> RunResult:
    options, settings = split_settings(run_config)
    options = package_names(kind_of(options), options, warns=True)
    count = options.pop("num_clients", None)
    named = sorted(set(options) & set(option_names(Flag.OPERATOR)))
    if named:
        raise InvalidValueError(
            f"{named[0]} must not stand in a run configuration: the server's operator decides it "
            f"({_PREFIX}...)"
        )
    roster_file = os.environ.get(_PREFIX + "ROSTER")
    client_ids = None
    registry: KeyRegistry | PlaceRegistry
    resume = _to_resume(output_dir) if settings.resume else None
    if roster_file:
        roster = _roster_of_run(roster_file, resume)
        registry, client_ids = KeyRegistry(grid, roster, roster_file), roster.client_ids
        notes.names = registry.accounts
    else:
        registry = PlaceRegistry(grid, int(count or len(list(grid.get_node_ids()))))
    for name in ("ledger", "population"):
        value = os.environ.get(_PREFIX + name.upper())
        if value:
            options[name] = value
    if "yes" in (os.environ.get(_PREFIX + name) for name in _UNBOUNDED):
        options["allow_unbounded"] = True
    trackers, log = os.environ.get(_PREFIX + "TRACKER") or "none", ServerLog(notes, registry)
    about = {"mode": options.get("mode"), **({} if resume is None else {"of": resume.name})}
    began = "started" if resume is None else "resumed"
    noted = journal.noting(output_dir, began, notes.run_id, **about)
    with noted, tracked(trackers, log) as observer:
        return run_on_grid(
            grid,
            registry,
            make_model,
            test_data,
            options,
            settings,
            client_ids=client_ids,
            output_dir=output_dir,
            resume=resume,
            observer=observer,
            own=own,
            notes=notes,
        )


def _roster_of_run(path: str, resume: Path | None) -> NodeRoster:
    """Return the clients of a run; those of one that is resumed are who they were."""
    roster = NodeRoster.read(path)
    if resume is None:
        return roster
    count = RunFolder.open(resume).read_config().num_clients
    return roster if count is None else roster.first(count)


def _to_resume(output_dir: str) -> Path:
    """Return the last run of the operator's folder that is not finished."""
    unfinished = [
        folder
        for folder in Path(output_dir).glob("*/")
        if (folder / "config.toml").exists() and not (folder / "result.json").exists()
    ]
    if not unfinished:
        raise InvalidValueError(f"{output_dir!r} must hold a run that is not finished; none is")
    return max(unfinished, key=lambda folder: (folder / "config.toml").stat().st_mtime)


class ServerLog(Observer):
    """Says what a run may expect and how far it is, from what is public alone."""

    def __init__(self, notes: RunNotes, registry: ClientRegistry) -> None:
        self._notes, self._registry = notes, registry

    def expects(self, config: Any, lines: Sequence[str]) -> None:
        """Say what the noise will do, and what a new ledger fixes, before anything is spent."""
        for line in lines:
            self._notes.say(line)
        if config.ledger and config.is_bounded(covered=True) and not Path(config.ledger).exists():
            life = f"epsilon {config.allowance or config.epsilon:g} in its life (`allowance`)"
            takes = f"this run may take {config.epsilon:g} of it"
            self._notes.say(f"the ledger is new: every client may give away {life}, and {takes}")

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        """Say how far the run is, with the task's own measure."""
        measured = headline_of(line)
        shown = f", {measured}" if measured else ""
        names: Sequence[str] = getattr(self._registry, "names", ())
        absent = line.get("absent") or ()
        who = ", ".join(names[client] for client in absent if client < len(names))
        missing = f", {len(absent)} absent{f' ({who})' if who else ''}" if absent else ""
        self._notes.say(f"round {line['round'] + 1} of {config.num_releases}{missing}{shown}")
