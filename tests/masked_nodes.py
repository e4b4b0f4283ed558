"""Federations of this process whose nodes send their vectors under masks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message

from fedquilt.flower import wire
from fedquilt.flower.client_registry import PlaceRegistry
from fedquilt.flower.keeper import SecureNode, answered, step_of
from fedquilt.flower.node import client_app
from fedquilt.flower.server import run_on_grid
from fedquilt.flower.settings import FlowerSettings
from fedquilt.flower.simulate import InProcessGrid, secure_nodes
from fedquilt.privacy.ledger import Ledger
from fedquilt.record.result import RunResult
from flower_samples import client_data, error, make_model, test_data

Change = Callable[[str, int, Message], Message]


class Masked(InProcessGrid):
    """Nodes in this process; those in `lost[round, step]` never answer from that step on.

    `change` stands between server and nodes, as a server that deviates would: it is given the
    step, the place and the message of every order.
    """

    def __init__(
        self,
        count: int = 10,
        lost: Mapping[tuple[int, str], set[int]] | None = None,
        change: Change | None = None,
        nodes: tuple[list[SecureNode], list[bytes]] | None = None,
        silent: bool = False,
        **given: Any,
    ) -> None:
        self.nodes, public = nodes or secure_nodes(count)
        self.made = (self.nodes, public)
        self.inner = client_app(make_model, client_data)
        self.lost, self.change, self.silent = lost or {}, change, silent
        self.gone: set[tuple[int, int]] = set()
        self.seen: list[tuple[str, int, Message, Message | None]] = []
        super().__init__(self._masked, count, public_keys=public, **given)  # type: ignore[arg-type]

    def _masked(self, message: Message, context: Context) -> Message:
        place = int(context.node_config["partition-id"])
        if message.metadata.message_type == "query":
            return self.inner(message, context)
        return answered(message, context, self.nodes[place], self.inner)

    def _answer(self, message: Message) -> list[Message]:
        place = int(self.contexts[message.metadata.dst_node_id].node_config["partition-id"])
        if message.metadata.message_type == "query":
            return super()._answer(message)
        step = step_of(message.content) or "plain"
        index = self.round_of(message)
        self.gone |= {(index, who) for who in self.lost.get((index, step), ())}
        if (index, place) in self.gone:  # as the SuperLink says it of a node that is gone
            return [] if self.silent else [error(message, 3, node=1)]
        if self.change is not None:
            message = self.change(step, place, message)
        told = copy.deepcopy(message)
        replies = super()._answer(message)
        self.seen.append((step, place, told, replies[0]))
        return replies

    @staticmethod
    def round_of(message: Message) -> int:
        for name in ("secure", "config"):
            record = message.content.config_records.get(name, {})
            if "round_index" in record:
                return int(record["round_index"])  # type: ignore[arg-type]
        raise AssertionError("a message without a round")

    def refusals(self) -> list[str]:
        """Return what nodes have refused, in their words."""
        replies = [r for *_, r in self.seen if r is not None and not r.has_error()]
        said = [wire.unpack_reply(reply.content, 1 << 30).refusal for reply in replies]
        return [text for text in said if text]


def masked_run(grid: InProcessGrid, folder: Path | None, **options: Any) -> RunResult:
    count, resume = len(grid.contexts), options.pop("resume", None)
    settings = options.pop("settings", None) or FlowerSettings(poll=0.01)
    few = {
        "num_rounds": 2, "local_epochs": 1, "clients_per_round": 1.0, "eval_every": 1,
        "mode": "certified", "epsilon": 8.0, "policy": "worst_case",
        "secure_aggregation": "protocol", **options,
    }  # fmt: skip
    return run_on_grid(
        grid,
        PlaceRegistry(grid, count),
        make_model,
        test_data,
        few,
        settings,
        client_ids=[f"client {place}" for place in range(count)],
        output_dir=None if folder is None else str(folder),
        resume=resume,
    )


def charged(folder: Path) -> np.ndarray[Any, Any]:
    """Return what the run's own ledger says that each client has spent."""
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        assert ledger.verify().ok
        (population,) = ledger.populations()
        return np.asarray(population.spent())
