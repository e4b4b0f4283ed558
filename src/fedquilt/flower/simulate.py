"""`fedquilt run --engine flower` (nodes in this process) and `flower-ray` (Flower's simulation).

One process has all the data here, as in every simulation, and deals them out; the server's
side of the run gets none of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid, ServerApp

from fedquilt.common import optional
from fedquilt.common.errors import InvalidValueError, NotReadyError
from fedquilt.common.observer import Observers, as_observer
from fedquilt.config import RunConfig, plain_config
from fedquilt.experiment.api import resume_run, run_config, run_in_memory
from fedquilt.experiment.loop import Watching
from fedquilt.flower import internals, wire
from fedquilt.flower.client_registry import PlaceRegistry, key_fingerprint
from fedquilt.flower.keeper import Identity, Keeper, SecureNode
from fedquilt.flower.masked_engine import engine_of
from fedquilt.flower.node import Node, app_of
from fedquilt.flower.server import NodesFile, served_problem, without_data
from fedquilt.flower.settings import FlowerSettings
from fedquilt.privacy.noise import NoiseSource, noise_source
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import RunResult, load
from fedquilt.setup.build_task import build_task
from fedquilt.setup.task import FederatedTask

OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Nothing calls home, and nothing is installed behind an operator's back."""


class OneForAll:
    """All nodes of this process work with one method, whose task has everybody's samples."""

    def __init__(self, config: RunConfig, problem: FederatedTask) -> None:
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
    return OneForAll(*build_task(plain_config(json.loads(settings))))


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
    nodes_file = NodesFile()
    watch = Observers(nodes_file, as_observer(observer))

    def prepare(config: RunConfig, problem: FederatedTask) -> FederatedTask:
        count = len(problem.task.clients)
        here = grid or _nodes_here(config, problem, count)
        everybody = dataclasses.replace(settings, min_nodes=count)
        places = PlaceRegistry(here, count)
        engine = engine_of(here, places, config, everybody, report=nodes_file.write)
        return served_problem(without_data(problem), engine)

    if resume is not None:
        return resume_run(resume, watch, prepare)
    return (run_in_memory if in_memory else run_config)(config, watch, prepare)


def _nodes_here(config: RunConfig, problem: FederatedTask, count: int) -> InProcessGrid:
    """Return the nodes of this process, for masked rounds with keys that they all know."""
    node_of = OneForAll(config, problem)
    if config.secure_aggregation != "protocol":
        return InProcessGrid(app_of(node_of), count)
    nodes, public = secure_nodes(count, noise_source(config.noise_seed))
    app = app_of(node_of, lambda context: nodes[int(context.node_config["partition-id"])])
    return InProcessGrid(app, count, public_keys=public)


def secure_nodes(
    count: int, noise: NoiseSource | None = None
) -> tuple[list[SecureNode], list[bytes]]:
    """Return nodes that know one another's new keys, and the keys as a SuperLink has them."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from fedquilt.aggregation.secure.primitives import new_signing_key

    keys = [new_signing_key() for _ in range(count)]
    public = [k.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) for k in keys]
    names = {key_fingerprint(key): f"node{place}" for place, key in enumerate(public)}
    keepers = [Keeper(Identity(key, lambda: names)) for key in keys]
    return [SecureNode(keeper, noise) for keeper in keepers], public


def _with_ray(config: RunConfig, run: Any) -> RunResult:
    """Run beside Flower's simulation, whose nodes are Ray's actors."""
    optional.require("ray", "engine='flower-ray'")
    count = config.num_clients or len(build_task(config)[1].task.clients)
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


_RAISED = 2
_FIRST_NODE = 1000


class InProcessGrid(Grid):
    """Runs a `ClientApp` for nodes of this process, one message at a time, without Ray.

    Parameters
    ----------
    client_app : ClientApp
        What every node runs.
    num_nodes : int
        How many nodes there are; the node of place i has `partition-id` i.
    run_config : mapping, optional
        The run configuration that nodes see.
    public_keys : sequence of bytes, optional
        The key that the SuperLink would know of each node.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        run_config: Mapping[str, Any] | None = None,
        public_keys: list[bytes] | None = None,
        run_id: int = 1,
    ) -> None:
        self._app = client_app
        self._keys = public_keys or [b""] * num_nodes
        self.run_id_here = run_id
        self._orders: dict[str, tuple[Message, float]] = {}
        self._numbers = itertools.count(1)
        self.contexts = {
            _FIRST_NODE + place: Context(
                run_id=run_id,
                node_id=_FIRST_NODE + place,
                node_config={"partition-id": place, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for place in range(num_nodes)
        }

    def set_run(self, run: Any) -> None:
        """Accept any run: there is one."""

    @property
    def run(self) -> Any:
        """There is no run of a SuperLink here."""
        raise NotReadyError("a grid in this process has no run of a SuperLink")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message of this run."""
        with internals.acting_as(self.run_id_here, internals.SERVER_NODE):
            return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the numbers of all nodes."""
        return list(self.contexts)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return all nodes, with their keys."""
        return [
            NodeInfo(node_id=node, public_key=key, status="online")
            for node, key in zip(self.contexts, self._keys, strict=True)
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store orders; return their numbers, an empty text for a node that is not there."""
        numbers = []
        for message in messages:
            there = message.metadata.dst_node_id in self.contexts
            number = f"message-{next(self._numbers)}" if there else ""
            numbers.append(number)
            if there:
                internals.name_message(message, number)
                self._orders[number] = (message, time.monotonic() + message.metadata.ttl)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let the first of these orders that is open be answered, and return the answer."""
        for number in message_ids:
            message, until = self._orders.pop(number, (None, 0.0))
            if message is None or time.monotonic() > until:
                continue
            replies = self._answer(message)
            for reply in replies:
                internals.name_message(reply, f"reply-{next(self._numbers)}")
            if replies:
                return replies
        return []

    def _answer(self, message: Message) -> list[Message]:
        node = message.metadata.dst_node_id
        with internals.acting_as(self.run_id_here, node):
            try:
                return [self._app(message, self.contexts[node])]
            except Exception as error:  # as Flower's own process does: it goes to the server
                reason = f"{type(error)}:<'{error}'>"
                return [Message(Error(_RAISED, reason), reply_to=message)]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and return all replies."""
        waiting = [number for number in self.push_messages(messages) if number]
        until = time.monotonic() + (timeout if timeout is not None else float("inf"))
        replies: list[Message] = []
        while waiting and time.monotonic() < until:
            came = list(self.pull_messages(waiting))
            if not came:
                break
            done = {reply.metadata.reply_to_message_id for reply in came}
            waiting = [number for number in waiting if number not in done]
            replies += came
        return replies
