"""The private parts of Flower that have to be touched, in one place (1.41 and 1.42).

| what | why |
|---|---|
| `TaskIdentity` | a `Message` asks it for the run's number, which only Flower's processes have |
| `Metadata._message_id` | a Grid gives messages their numbers |
| `exit_handler.registered_exit_handlers` | a fork must not close what is its parent's |
| `run_superexec.get_executor` | the parent that forks is an executor of its own |
| `flower_superlink.uvicorn` | who may ask a SuperLink (`fedquilt.flower.superlink`) |
| the app's `user_middleware` | a layer of one API costs time in requests to the others |
| `start_client_internal.time`, heartbeats | a SuperNode with shorter pauses (`supernode`) |
| `run_clientapp`'s install and loader | a site looks at an order before an app is unpacked |
| `RuntimeHttpClient` | a ServerApp that was killed cannot say so itself |
| `HttpGrid._runtime_client` | replies are fetched one by one (`fedquilt.flower.replies`) |
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from flwr.app import Array
from flwr.supercore.task_identity import TaskIdentity

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.05
_LAYERS = {
    "Control": "/v1/control/",
    "Fleet": "/v1/fleet/",
    "NodeAuth": "/v1/fleet/",
    "Runtime": "/v1/runtime/",
}
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
    if is_elsewhere(grid):
        yield
        return
    with acting_as(run_number(grid), SERVER_NODE):
        yield


def is_elsewhere(grid: Any) -> bool:
    """Tell whether the nodes of a grid are reached over Flower, not in this process."""
    return getattr(grid, "run_id_here", None) is None


def run_number(grid: Any) -> int:
    """Return the number of the run that a grid belongs to."""
    return int(grid.run.run_id if is_elsewhere(grid) else grid.run_id_here)


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


def run_superlink(guard: Callable[[Any], Any], pragmas: Mapping[str, object]) -> None:
    """Be `flower-superlink`, its app behind `guard`, its SQLite connections with these settings."""
    command: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    sqlalchemy: Any = importlib.import_module("sqlalchemy")
    usual = command.uvicorn.run

    def set_pragmas(connection: Any, _: Any) -> None:
        for name, value in pragmas.items():
            connection.execute(f"PRAGMA {name} = {value}")

    def run(app: Any, **options: Any) -> None:
        for layer in app.user_middleware:
            layer.cls = for_its_own_api(layer.cls)
        # A header may not say who asks: the connection does.
        usual(app=guard(app), **{**options, "proxy_headers": False})

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", set_pragmas)
    command.uvicorn = SimpleNamespace(run=run)
    command.flower_superlink()


def for_its_own_api(layer: Any) -> Any:
    """Let requests to another API of the SuperLink pass by a layer that concerns one alone.

    Each of Flower's layers looks at the path and passes on what is not its API's, but a pass
    through one costs as much as half of what is left to do for a request.
    """
    name = getattr(layer, "__name__", "")
    own = next((path for start, path in _LAYERS.items() if name.startswith(start)), None)
    if own is None:
        return layer
    others = tuple(path for path in _LAYERS.values() if path != own)

    def made(app: Any, *args: Any, **options: Any) -> Any:
        through = layer(app, *args, **options)

        async def passed(scope: Any, receive: Any, send: Any) -> None:
            elsewhere = scope["type"] == "http" and scope["path"].startswith(others)
            await (app if elsewhere else through)(scope, receive, send)

        return passed

    return made


def run_supernode(pauses: Any, heartbeat: int) -> None:
    """Be `flower-supernode`, with other pauses and signs of life every so many seconds at most."""
    command: Any = importlib.import_module("flwr.supernode.cli.flower_supernode")
    names = ("supernode.start_client_internal", "supernode.fleet_http_connection")
    loop, link, beats = map(_flwr, (*names, "supercore.heartbeat"))
    loop.time = pauses
    _retry_soon(loop, "pull_objects")
    link.HEARTBEAT_DEFAULT_INTERVAL = beats.HEARTBEAT_DEFAULT_INTERVAL = heartbeat
    command.flower_supernode()


def retry_soon_in_client_app() -> None:
    """Let a ClientApp's process look again soon for parts of an order that are on their way."""
    _retry_soon(_flwr("supernode.runtime.run_clientapp"), "pull_and_inflate_object_from_tree")


def _retry_soon(module: Any, name: str) -> None:
    """Who asks often finds orders whose parts are not there yet; Flower then waits a second."""
    usual = getattr(module, name)
    setattr(module, name, functools.partial(usual, initial_backoff=_RETRY_SECONDS))


def _flwr(name: str) -> Any:
    return importlib.import_module(f"flwr.{name}")


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


def guard_client_app(answer: Callable[..., Any]) -> None:
    """Let `answer(message, context, app_hash, load)` stand before any ClientApp of this process.

    An app is unpacked and loaded when `load` is called, and otherwise never.
    """
    module: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    usual_install, usual_loader = module.install_from_fab, module.get_load_client_app_fn
    packed: list[tuple[Any, Any]] = []

    def loader(*given: Any, **options: Any) -> Callable[..., Any]:
        def load_app(fab_id: str, version: str, app_hash: str) -> Callable[..., Any]:
            def load() -> Any:
                for arguments, keywords in packed:
                    usual_install(*arguments, **keywords)
                return usual_loader(*given, **options)(fab_id, version, app_hash)

            return lambda message, context: answer(message, context, app_hash, load)

        return load_app

    module.install_from_fab = lambda *given, **options: packed.append((given, options))
    module.get_load_client_app_fn = loader


def runtime_of(grid: Any) -> Any:
    """Return the client behind a SuperLink's grid; None for another grid."""
    http: Any = importlib.import_module("flwr.superlink.grid.http_grid")
    return grid._runtime_client if isinstance(grid, http.HttpGrid) else None


def announced(runtime: Any, numbers: list[str]) -> list[tuple[Any, list[str]]]:
    """Return the metadata of replies to these orders, and the objects each is made of."""
    if not numbers:
        return []
    messages: Any = importlib.import_module("flwr.proto.runtime_pb2")
    objects: Any = importlib.import_module("flwr.supercore.inflatable.inflatable_object")
    said = runtime.PullMessages(messages.PullAppMessagesRequest(message_ids=numbers))
    return [
        (message.metadata, [part.object_id for part in objects.iterate_object_tree(tree)])
        for message, tree in zip(said.messages_list, said.message_object_trees, strict=True)
    ]


def object_of(grid: Any, runtime: Any, object_id: str) -> bytes | None:
    """Return an object's content; None while it is not there."""
    messages: Any = importlib.import_module("flwr.proto.message_pb2")
    asked = messages.PullObjectRequest(node=grid.node, run_id=grid.run.run_id, object_id=object_id)
    said = runtime.PullObject(asked)
    return said.object_content if said.object_found and said.object_available else None


def confirm(grid: Any, runtime: Any, object_id: str) -> None:
    """Tell the SuperLink that a message was received, so that it is deleted."""
    messages: Any = importlib.import_module("flwr.proto.message_pb2")
    runtime.ConfirmMessageReceived(
        messages.ConfirmMessageReceivedRequest(
            node=grid.node, run_id=grid.run.run_id, message_object_id=object_id
        )
    )


def inflated_size(contents: Mapping[str, bytes]) -> int:
    """Return how many bytes the arrays among objects become: a chunk counts as often as named."""
    objects: Any = importlib.import_module("flwr.supercore.inflatable.inflatable_object")
    size = 0
    for content in contents.values():
        kind, children, _ = objects.get_object_head_values_from_object_content(content)
        if kind == "Array":
            body = json.loads(objects.get_object_body(content, Array))
            chunks = (contents[children[place]] for place in body["arraychunk_ids"])
            size += sum(len(chunk) - chunk.index(b"\0") - 1 for chunk in chunks)  # without heads
    return size


def inflate(object_id: str, contents: dict[str, bytes]) -> Any:
    """Return the message that objects make."""
    utils: Any = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    message = utils.inflate_object_from_contents(object_id, contents)
    name_message(message, object_id)
    return message
