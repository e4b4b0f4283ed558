"""Small federations on Flower nodes of this process, and nodes that misbehave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from torch import nn

from fedquilt.flower import internals, wire
from fedquilt.flower.client_registry import PlaceRegistry
from fedquilt.flower.node import client_app
from fedquilt.flower.server import run_on_grid
from fedquilt.flower.settings import FlowerSettings
from fedquilt.flower.simulate import InProcessGrid
from fedquilt.privacy.ledger import Ledger
from fedquilt.record.result import RunResult

SIZE, CLASSES, COUNT = 6, 3, 4


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, CLASSES))


def samples(seed: int, count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, SIZE, generator=generator)
    return x, x[:, :CLASSES].argmax(dim=1)


def client_data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    return samples(int(context.node_config["partition-id"]))


def test_data() -> tuple[torch.Tensor, torch.Tensor]:
    return samples(99, 60)


test_data.__test__ = False  # type: ignore[attr-defined]

Change = Callable[[Message, Message], Iterable[Message]]
"""Makes what a node sends from its order and its honest reply."""


class Tampered(InProcessGrid):
    """A grid whose node of place `place` sends what `change` makes, in the rounds `rounds`."""

    def __init__(
        self, change: Change, place: int = 0, rounds: Iterable[int] = (0,), **given: Any
    ) -> None:
        super().__init__(client_app(make_model, client_data), COUNT, **given)
        self._change, self._place, self._rounds = change, place, set(rounds)
        self.orders: list[Message] = []

    def _answer(self, message: Message) -> list[Message]:
        replies = super()._answer(message)
        if message.metadata.message_type != "train":
            return replies
        self.orders.append(message)
        place = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
        index = message.content["config"]["round_index"]
        if place != self._place or index not in self._rounds:
            return replies
        return list(self._change(message, replies[0]))


def with_arrays(reply: Message, **arrays: np.ndarray[Any, Any]) -> Message:
    """Exchange the arrays of a reply."""
    record = ArrayRecord({name: wire.as_array(array) for name, array in arrays.items()})
    reply.content["arrays"] = record
    return reply


def with_token(reply: Message, token: str) -> Message:
    reply.content["config"] = ConfigRecord({"token": token, "failed": False})
    return reply


def from_node(reply: Message, node: int) -> Message:
    reply.metadata.__dict__["_src_node_id"] = node
    return reply


def answering(reply: Message, number: str) -> Message:
    reply.metadata.__dict__["_reply_to_message_id"] = number
    return reply


def error(order: Message, code: int, reason: str = "", node: int | None = None) -> Message:
    with internals.acting_as(1, order.metadata.dst_node_id):
        reply = Message(Error(code, reason), reply_to=order)
    return reply if node is None else from_node(reply, node)


def counts(reply: Message, value: Any) -> Message:
    reply.content["metrics"] = MetricRecord({"num-examples": value})
    return reply


def content_of(reply: Message) -> RecordDict:
    return reply.content


def run_federation(
    grid: InProcessGrid, folder: Path | None, settings: FlowerSettings | None = None, **options: Any
) -> RunResult:
    """Run a few rounds with every node in every one."""
    few = {
        "num_rounds": 2,
        "local_epochs": 1,
        "clients_per_round": 1.0,
        "eval_every": 1,
        "mode": "certified",
        **options,
    }
    if few["mode"] == "certified":
        few = {"epsilon": 8.0, "policy": "worst_case", **few}
    how = settings or FlowerSettings()
    how = dataclasses.replace(how, poll=0.01)
    return run_on_grid(
        grid,
        PlaceRegistry(grid, COUNT),
        make_model,
        test_data,
        few,
        how,
        client_ids=[f"client {place}" for place in range(COUNT)],
        output_dir=None if folder is None else str(folder),
    )


def honest() -> InProcessGrid:
    return InProcessGrid(client_app(make_model, client_data), COUNT)


def spent(result: RunResult) -> np.ndarray[Any, Any]:
    """Return what the run's own ledger says that each client has spent."""
    assert result.folder is not None
    with Ledger.open(result.folder / "ledger.sqlite") as ledger:
        (population,) = ledger.populations()
        return np.asarray(population.spent())
