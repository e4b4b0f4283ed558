"""`fedquilt run --engine flower` (nodes in this process) and `flower-ray` (Flower's simulation).

One process has all the data here, as in every simulation, and deals them out; the server's
side of the run gets none of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedquilt.common import optional
from fedquilt.common.errors import InvalidValueError
from fedquilt.config import RunConfig, plain_config
from fedquilt.experiment.api import resume_run, run_config, run_in_memory
from fedquilt.experiment.loop import Watching
from fedquilt.flower import wire
from fedquilt.flower.apps import app_of
from fedquilt.flower.directory import PlaceDirectory
from fedquilt.flower.engine import FlowerEngine
from fedquilt.flower.grid import InProcessGrid
from fedquilt.flower.node import Node
from fedquilt.flower.server import NodesFile, served_problem, without_data
from fedquilt.flower.settings import FlowerSettings
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import RunResult, load
from fedquilt.setup.build_task import build_problem
from fedquilt.setup.task import Problem

OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Nothing calls home, and nothing is installed behind an operator's back."""


class OneForAll:
    """All nodes of this process work with one method, whose task has everybody's samples."""

    def __init__(self, config: RunConfig, problem: Problem) -> None:
        task = dataclasses.replace(problem.task, is_remote=True)
        local = dataclasses.replace(problem, task=task)
        self._node = Node(config, local)

    def __call__(self, context: Context, order: wire.Order) -> Node:
        """Return the node of everybody, for the client that this one is."""
        place = context.node_config.get("partition-id")
        if place != order.client:
            raise InvalidValueError(f"order of client {order.client} must not go to {place}")
        return self._node


class FromSettings:
    """Makes `OneForAll` from a configuration, once a process: what Ray's actors receive."""

    def __init__(self, settings: str) -> None:
        self._settings = settings

    def __call__(self, context: Context, order: wire.Order) -> Node:
        """Return the node of everybody."""
        return _nodes_of(self._settings)(context, order)


@functools.lru_cache(maxsize=1)
def _nodes_of(settings: str) -> OneForAll:
    return OneForAll(*build_problem(plain_config(json.loads(settings))))


def simulate(
    config: RunConfig,
    observer: Watching | None = None,
    *,
    resume: str | Path | None = None,
    in_memory: bool = False,
    settings: FlowerSettings | None = None,
) -> RunResult:
    """Run a configuration whose engine is `flower` or `flower-ray`.

    Parameters
    ----------
    resume
        A run's folder to continue; the configuration is the folder's.
    in_memory
        Write nothing.
    """
    if resume is not None:
        config = RunFolder.open(resume).read_config()
        if RunFolder.open(resume).read_result() is not None:
            return load(resume)
    run = functools.partial(_run, config, observer, resume, in_memory)
    if config.engine != "flower-ray":
        return run(None, settings or FlowerSettings())
    return _with_ray(config, lambda grid: run(grid, settings or FlowerSettings()))


def _run(
    config: RunConfig,
    observer: Watching | None,
    resume: str | Path | None,
    in_memory: bool,
    grid: Grid | None,
    settings: FlowerSettings,
) -> RunResult:
    """Run with the nodes of a grid, or with those of this process."""
    watch = NodesFile(observer)

    def prepare(config: RunConfig, problem: Problem) -> Problem:
        count = len(problem.task.clients)
        here = grid or InProcessGrid(app_of(OneForAll(config, problem)), count)
        everybody = dataclasses.replace(settings, min_nodes=count)
        places = PlaceDirectory(here, count)
        engine = FlowerEngine(here, places, config, everybody, report=watch.write)
        return served_problem(without_data(problem), engine)

    if resume is not None:
        return resume_run(resume, watch, prepare)
    return (run_in_memory if in_memory else run_config)(config, watch, prepare)


def _with_ray(config: RunConfig, run: Any) -> RunResult:
    """Run beside Flower's simulation, whose nodes are Ray's actors."""
    optional.load("ray", "engine='flower-ray'")
    count = config.num_clients or len(build_problem(config)[1].task.clients)
    results: list[RunResult] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        results.append(run(grid))

    settings = json.dumps(_all_settings(config))
    with _offline():
        from flwr.simulation import run_simulation

        run_simulation(
            server_app=server,
            client_app=app_of(FromSettings(settings)),
            num_supernodes=count,
            backend_config={
                "init_args": {"include_dashboard": False, "log_to_driver": False},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
    return results[0]


def _all_settings(config: RunConfig) -> dict[str, Any]:
    """Return the options of a run from which its actors deal out the data again."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    given = {k: v for k, v in values.items() if v is not None and k != "noise_seed"}
    return {**given, "engine": "sequential"}


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep Flower and Ray from calling home, and from talking while a run shows itself."""
    before = {name: os.environ.get(name) for name in OFFLINE}
    os.environ.update(OFFLINE)
    loggers = [logging.getLogger(name) for name in ("flwr", "ray")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
