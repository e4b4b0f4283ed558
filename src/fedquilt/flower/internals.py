"""The private parts of Flower that have to be touched, in one place (1.41 and 1.42).

| what | why |
|---|---|
| `TaskIdentity` | a `Message` asks it for the run's number, which only Flower's processes have |
| `Metadata._message_id` | a Grid gives messages their numbers |
| `exit_handler.registered_exit_handlers` | a fork must not close what is its parent's |
| `run_superexec.get_executor` | the parent that forks is an executor of its own |
| `RuntimeHttpClient` | a ServerApp that was killed cannot say so itself |
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from flwr.supercore.task_identity import TaskIdentity

log = logging.getLogger(__name__)

SERVER_NODE = 1
"""The node number that Flower's server side has."""


@contextlib.contextmanager
def acting_as(run_id: int, node_id: int) -> Iterator[None]:
    """Let messages that are made within be of this run and this node."""
    names = ("_task_id", "_run_id", "_node_id")
    before = [getattr(TaskIdentity, name) for name in names]
    for name, value in zip(names, (0, run_id, node_id), strict=True):
        setattr(TaskIdentity, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(TaskIdentity, name, value)


@contextlib.contextmanager
def acting_as_server(grid: Any) -> Iterator[None]:
    """Let messages be the server's; in Flower's own processes they are already."""
    run_id = getattr(grid, "run_id_here", None)
    if run_id is None:
        yield
        return
    with acting_as(run_id, SERVER_NODE):
        yield


def name_message(message: Any, message_id: str) -> None:
    """Give a message its number."""
    message.metadata.__dict__["_message_id"] = message_id


def forget_exit_handlers() -> None:
    """Drop what a parent wanted done at its own end; for a child that was forked."""
    exits: Any = importlib.import_module("flwr.supercore.exit.exit_handler")
    exits.registered_exit_handlers.clear()


def run_superexec_with(executor: Any, **arguments: Any) -> None:
    """Run Flower's loop that takes up tasks, with an executor of our own."""
    superexec: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
    usual = superexec.get_executor
    superexec.get_executor = lambda *args, **kwargs: executor
    try:
        superexec.run_superexec(**arguments)
    finally:
        superexec.get_executor = usual


def report_killed(spec: Any) -> None:
    """Tell the SuperLink that a task's process was killed, in its place."""
    runtime: Any = importlib.import_module("flwr.supercore.runtime")
    interceptors: Any = importlib.import_module("flwr.supercore.interceptors")
    messages: Any = importlib.import_module("flwr.proto.runtime_pb2")
    certificates = spec.root_certificates_path
    client = runtime.RuntimeHttpClient.from_server_address(
        server_address=spec.runtime_api_address,
        insecure=spec.insecure,
        root_certificates=None if certificates is None else Path(certificates).read_bytes(),
        interceptors=[
            interceptors.RuntimeVersionHttpInterceptor(component_name="flwr-serverapp"),
            interceptors.RuntimeTokenHttpInterceptor(spec.token),
        ],
    )
    try:
        client.PushTaskOutput(
            messages.PushTaskOutputRequest(sub_status="failed", details="its process was killed")
        )
    except httpx.HTTPError as error:  # the SuperLink is away: it will notice by itself
        log.warning("the SuperLink was not told of a killed ServerApp: %s", error)
    finally:
        client.close()
