"""The two halves of a Flower app: `client_app` on nodes, `server_app` beside the SuperLink.

    # client_app.py
    app = fedquilt.flower.client_app(make_model, client_data)
    # server_app.py
    app = fedquilt.flower.server_app(make_model, test_data)

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

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.observer import Observer
from fedquilt.config import CondenseConfig, package_names
from fedquilt.config.option import Flag
from fedquilt.config.run import option_names
from fedquilt.flower.directory import KeyDirectory, NodeRoster, PlaceDirectory
from fedquilt.flower.node import ClientData, MakeModel, NodeOf, OwnData, answer
from fedquilt.flower.server import run_on_grid
from fedquilt.flower.settings import split_settings
from fedquilt.observe.tracked import tracked
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import RunResult
from fedquilt.setup.task import Own
from fedquilt.training.objective import OwnLoss
from fedquilt.training.optimizers import Factory

_PREFIX = "FEDQUILT_FLOWER_"
_UNBOUNDED = ("ALLOW_UNBOUNDED", "SPEND_EVERYTHING")  # the latter of versions before


def client_app(
    make_model: MakeModel,
    client_data: ClientData,
    *,
    loss: OwnLoss | None = None,
    optimizer: Factory | None = None,
) -> ClientApp:
    """Return the app that a node runs.

    Parameters
    ----------
    make_model : callable
        Returns the model, the same as on the server.
    client_data : callable
        Takes Flower's `Context` (with `node_config`, what this node was started with) and
        returns this client's samples: a pair (x, y), or a data set.  They stay there.
    loss, optimizer : callable, optional
        Objects of your own, as `fedquilt.run` takes them; the server's app gets the same.
        Those that have a name stand in the run configuration.
    """
    return app_of(OwnData(make_model, client_data, Own(loss=loss, optimizer=optimizer)))


def app_of(node_of: NodeOf) -> ClientApp:
    """Return the app of nodes that are made in some way."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(message, context, node_of)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        place = context.node_config.get("partition-id", -1)
        content = RecordDict({"config": ConfigRecord({"partition-id": int(place)})})
        return Message(content, reply_to=message)

    return app


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
    own = Own(loss=loss, optimizer=optimizer, metrics=metrics)

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
    own: Own | None = None,
) -> RunResult:
    """Run what a run configuration and the operator's environment describe."""
    options, settings = split_settings(run_config)
    options = package_names(CondenseConfig, options, warns=True)
    count = options.pop("num_clients", None)
    named = sorted(set(options) & set(option_names(Flag.OPERATOR)))
    if named:
        raise InvalidValueError(
            f"{named[0]} must not stand in a run configuration: the server's operator decides it "
            f"({_PREFIX}...)"
        )
    output_dir = os.environ.get(_PREFIX + "OUTPUT", "./results")
    roster_file = os.environ.get(_PREFIX + "ROSTER")
    client_ids = None
    directory: KeyDirectory | PlaceDirectory
    resume = _to_resume(output_dir) if settings.resume else None
    if roster_file:
        roster = _roster_of_run(roster_file, resume)
        directory, client_ids = KeyDirectory(grid, roster, roster_file), roster.client_ids
    else:
        directory = PlaceDirectory(grid, int(count or len(list(grid.get_node_ids()))))
    for name in ("ledger", "population"):
        value = os.environ.get(_PREFIX + name.upper())
        if value:
            options[name] = value
    if "yes" in (os.environ.get(_PREFIX + name) for name in _UNBOUNDED):
        options["allow_unbounded"] = True
    with tracked(os.environ.get(_PREFIX + "TRACKER") or "none", ServerLog()) as observer:
        return run_on_grid(
            grid,
            directory,
            make_model,
            test_data,
            options,
            settings,
            client_ids=client_ids,
            output_dir=output_dir,
            resume=resume,
            observer=observer,
            own=own,
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

    def expects(self, config: Any, lines: Sequence[str]) -> None:
        """Say what the noise will do, before anything is spent."""
        for line in lines:
            print(line, flush=True)

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        """Say how far the run is."""
        accuracy = line.get("test_accuracy")
        shown = "" if accuracy is None else f", accuracy {accuracy:.4f}"
        missing = f", {len(line['absent'])} absent" if line.get("absent") else ""
        print(f"round {line['round'] + 1} of {config.num_rounds}{missing}{shown}", flush=True)
