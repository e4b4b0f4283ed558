"""Asynchronous rounds on Flower's nodes: who is in a buffer, how old, at what charge."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message

from fedquilt.common.errors import InvalidValueError
from fedquilt.flower import buffered_engine, wire
from fedquilt.flower.client_registry import PlaceRegistry
from fedquilt.flower.server import run_on_grid
from fedquilt.flower.settings import FlowerSettings
from fedquilt.flower.simulate import InProcessGrid
from flower_samples import (
    COUNT,
    Tampered,
    honest,
    make_model,
    run_federation,
    spent,
    test_data,
    with_arrays,
)

QUICK = FlowerSettings(deadline=5.0)
BUFFER: dict[str, Any] = {"buffer_size": 2, "in_flight": 3, "num_rounds": 5}


def lines_of(result: Any, key: str) -> list[dict[str, Any]]:
    text = (result.folder / "nodes.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if key in line]


def vector_of(message: Message) -> np.ndarray[Any, Any]:
    return wire.read_arrays(message.content["arrays"], 1 << 20)["vector"].copy()


def ages(result: Any) -> list[dict[int, int]]:
    found = lines_of(result, "ages")
    return [{int(k): age for k, age in line["ages"].items()} for line in found]


def test_a_round_is_whoever_came_first_from_the_model_that_each_began_at(tmp_path: Path) -> None:
    """By hand: orders are answered in their order, three at work, two a release."""
    models: dict[int, torch.Tensor] = {}
    seen: list[tuple[int, int, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    class Watched(InProcessGrid):
        def _answer(self, message: Message) -> list[Message]:
            if message.metadata.message_type != "train":
                return super()._answer(message)
            order, sent = dict(message.content["config"]), vector_of(message)
            replies = super()._answer(message)
            moved = vector_of(replies[0])
            seen.append((int(order["round_index"]), int(order["client"]), sent, moved))
            return replies

    grid = Watched(honest()._app, COUNT)
    result = run_federation(grid, tmp_path, QUICK, mode="fedavg", **BUFFER)
    cohorts = result.result["cohorts"]
    assert [len(cohort) for cohort in cohorts] == [2] * 5
    assert any(age > 0 for one in ages(result) for age in one.values())
    for begun, _, sent, _ in seen:
        assert np.array_equal(models.setdefault(begun, torch.from_numpy(sent)).numpy(), sent)
    answered = iter(seen)
    for index, cohort in enumerate(cohorts[:-1]):
        came = [next(answered) for _ in cohort]
        assert sorted(client for _, client, _, _ in came) == cohort
        scaled = [moved / np.sqrt(1 + index - begun) for begun, _, _, moved in came]
        expected = models[index].numpy() + np.mean(scaled, axis=0)
        if index + 1 in models:
            np.testing.assert_allclose(models[index + 1].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_each_contribution_is_charged_and_a_bound_holds(tmp_path: Path) -> None:
    result = run_federation(honest(), tmp_path, QUICK, **BUFFER)
    joins = np.bincount(np.concatenate(result.result["cohorts"]).astype(int), minlength=COUNT)
    assert joins.sum() == 10
    charges = spent(result)
    assert np.allclose(charges / joins, charges[0] / joins[0])
    assert result.statement.is_bounded
    assert any("rounds are asynchronous" in note for note in result.statement.notes)


def test_a_reply_that_comes_late_is_in_a_later_buffer_and_counts_less(tmp_path: Path) -> None:
    class Slow(Tampered):
        """Client 0's first order is answered when others have answered eight."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            numbers = [number for number in message_ids if number in self._orders]
            heads = {number: self._orders[number][0].metadata for number in numbers}
            trains = [n for n in numbers if heads[n].message_type == "train"]
            first = [n for n in trains if heads[n].dst_node_id == 1000]
            ready = [n for n in numbers if n not in first] if len(self.orders) < 8 else numbers
            return super().pull_messages(ready)

    longer = {**BUFFER, "num_rounds": 7}
    result = run_federation(Slow(lambda order, reply: [reply]), tmp_path, QUICK, **longer)
    late = [one[0] for one in ages(result) if 0 in one]
    assert late[0] >= 2
    assert spent(result)[0] > 0


def test_who_never_answers_is_absent_and_asked_again(tmp_path: Path) -> None:
    class Slow(Tampered):
        """Other rounds last until the deadline of an order is over, however fast the machine."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            time.sleep(0.1)
            return super().pull_messages(message_ids)

    grid = Slow(lambda order, reply: [], rounds=range(9))
    result = run_federation(grid, tmp_path, FlowerSettings(deadline=0.3), **BUFFER)
    assert spent(result)[0] == 0
    assert not any(0 in cohort for cohort in result.result["cohorts"])
    assert sum(0 in line["absent"] for line in lines_of(result, "asked")) >= 1
    asked = [line for line in lines_of(result, "sent") if 0 in line["sent"]]
    assert len(asked) >= 1


def test_what_is_too_old_is_thrown_away_and_charges_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffered_engine, "MOST_STALE", 0)
    result = run_federation(honest(), tmp_path, QUICK, **BUFFER)
    assert all(age == 0 for one in ages(result) for age in one.values())
    refused = [line["client"] for line in lines_of(result, "refused")]
    assert refused
    joins = np.bincount(np.concatenate(result.result["cohorts"]).astype(int), minlength=COUNT)
    charges = spent(result)
    assert np.allclose(charges, joins * charges.max() / joins.max())


def test_an_unusable_reply_fills_a_place_of_the_buffer_and_is_charged(tmp_path: Path) -> None:
    def longer(order: Message, reply: Message) -> Iterable[Message]:
        return [with_arrays(reply, vector=np.zeros(99, dtype=np.float32))]

    result = run_federation(Tampered(longer, rounds=range(9)), tmp_path, QUICK, **BUFFER)
    assert any(0 in cohort for cohort in result.result["cohorts"])
    assert spent(result)[0] > 0
    for tensor in result.state_dict.values():
        assert bool(tensor.isfinite().all())


def test_a_node_is_asked_once_a_release_and_by_one_order_at_a_time(tmp_path: Path) -> None:
    grid = Tampered(lambda order, reply: [reply])
    run_federation(grid, tmp_path, QUICK, **BUFFER)
    orders = [message.content["config"] for message in grid.orders]
    asked = [(order["client"], order["round_index"]) for order in orders]
    assert len(asked) == len(set(asked)), "a site counts each order as a round of its account"
    assert {order["cohort"] for order in orders} == {BUFFER["buffer_size"]}
    assert not any(order.get("clip") for order in orders), "no plan holds for it yet"


def test_a_run_that_is_killed_goes_on_and_old_orders_cost_nothing(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    class Dies(Tampered):
        def _answer(self, message: Message) -> list[Message]:
            if len(self.orders) == 6:
                raise KeyboardInterrupt
            return super()._answer(message)

    with pytest.raises(KeyboardInterrupt):
        run_federation(Dies(lambda order, reply: [reply]), tmp_path, QUICK, **BUFFER)
    (folder,) = tmp_path.glob("*/config.toml")
    grid = honest()
    result = run_on_grid(
        grid, PlaceRegistry(grid, COUNT), make_model, test_data, {}, FlowerSettings(poll=0.01),
        client_ids=[f"client {place}" for place in range(COUNT)], resume=folder.parent,
    )  # fmt: skip
    cohorts = result.result["cohorts"]
    assert [len(cohort) for cohort in cohorts] == [2] * 5
    joins = np.bincount(np.concatenate(cohorts).astype(int), minlength=COUNT)
    charges = spent(result)
    assert np.allclose(charges / joins, charges[0] / joins[0])


def test_a_simulated_run_has_nodes_too(tmp_path: Path) -> None:
    from fedquilt.flower.simulate import simulate
    from run_samples import tiny

    shared = {"mode": "fedavg", "engine": "flower", "num_clients": 8, **BUFFER}
    done = simulate(tiny(output_dir=str(tmp_path), **shared))
    assert [len(cohort) for cohort in done.result["cohorts"]] == [2] * 5
    assert "clock" not in done.result["history"], "no clock is simulated where nodes answer"


def test_an_engine_of_ones_own_begins_at_one_model() -> None:
    import fedquilt
    from flower_samples import samples

    class Mine:
        def train(self, *given: Any) -> Any:
            return iter(())

    clients = [list(range(20)), list(range(20, 40))]
    with pytest.raises(InvalidValueError, match="buffer_size=2 must be left out with an engine"):
        fedquilt.run(
            make_model(), samples(3, 40), test_data(), clients, mode="fedavg", engine=Mine(),
            buffer_size=2, num_rounds=1,
        )  # fmt: skip
