"""A Grid in this process: the nodes are contexts, their work is done when a reply is asked for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedquilt.common.errors import NotReadyError
from fedquilt.flower import internals

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
