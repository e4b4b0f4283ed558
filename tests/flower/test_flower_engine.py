"""Replies that no node should send, and nodes that send nothing: reasons, charges, the round."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from fedquilt.common.errors import InvalidValueError, NotReadyError
from fedquilt.flower.settings import FlowerSettings
from flower_samples import (
    COUNT,
    Change,
    Tampered,
    answering,
    counts,
    error,
    from_node,
    honest,
    run_federation,
    spent,
    with_arrays,
    with_token,
)

NUMBERS = 6 * 3 + 3
# Some wait for all of it; honest nodes must make it on a machine that is busy.
SHORT = FlowerSettings(deadline=1.2)
FORGED = "0" * 32


def nan(order: Message, reply: Message) -> Iterable[Message]:
    return [with_arrays(reply, vector=np.full(NUMBERS, np.nan, dtype=np.float32))]


def huge(order: Message, reply: Message) -> Iterable[Message]:
    return [with_arrays(reply, vector=np.full(NUMBERS, 1e30, dtype=np.float32))]


def longer(order: Message, reply: Message) -> Iterable[Message]:
    return [with_arrays(reply, vector=np.zeros(NUMBERS + 1, dtype=np.float32))]


def oversized(order: Message, reply: Message) -> Iterable[Message]:
    return [with_arrays(reply, vector=np.zeros(10**6, dtype=np.float32))]


def whole_numbers(order: Message, reply: Message) -> Iterable[Message]:
    return [with_arrays(reply, vector=np.zeros(NUMBERS, dtype=np.int32))]


def no_arrays(order: Message, reply: Message) -> Iterable[Message]:
    del reply.content["arrays"]
    return [reply]


def empty(order: Message, reply: Message) -> Iterable[Message]:
    token = reply.content["config"]["token"]
    for name in list(reply.content):
        del reply.content[name]
    return [with_token(reply, token)]


def lying_shape(order: Message, reply: Message) -> Iterable[Message]:
    reply.content["arrays"]["vector"].shape = (10**12,)
    return [reply]


def bad_count(order: Message, reply: Message) -> Iterable[Message]:
    return [counts(reply, -5)]


def app_error(order: Message, reply: Message) -> Iterable[Message]:
    return [error(order, 2, "patient 17 has a NaN in column 3")]


def forged(order: Message, reply: Message) -> Iterable[Message]:
    return [with_token(reply, FORGED)]


def of_another_node(order: Message, reply: Message) -> Iterable[Message]:
    return [from_node(reply, 1001)]


def unasked(order: Message, reply: Message) -> Iterable[Message]:
    return [answering(reply, "message-of-nobody")]


def unavailable(order: Message, reply: Message) -> Iterable[Message]:
    return [error(order, 5, "node unavailable", node=1)]


def silent(order: Message, reply: Message) -> Iterable[Message]:
    return []


def lines_of(result: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.folder / "nodes.jsonl").read_text().splitlines()]


def refusals(result: Any) -> list[str]:
    return [line["refused"] for line in lines_of(result) if "refused" in line]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (longer, f"array 'vector' of shape ({NUMBERS + 1},) must be ({NUMBERS},)"),
        (oversized, "4000000 bytes must be at most"),
        (whole_numbers, "of type int32 must be float32"),
        (no_arrays, "array 'vector' is missing"),
        (empty, "array 'vector' is missing"),
        (lying_shape, "must hold as many bytes as its shape says"),
        (bad_count, "num-examples=-5 must be a whole number"),
        (app_error, "error 2"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_arrived_and_cannot_be_used_is_refused_and_charged(
    change: Change, reason: str, tmp_path: Path
) -> None:
    result = run_federation(Tampered(change), tmp_path)
    (refused,) = refusals(result)
    assert reason in refused
    assert result.result["rounds"] == 2
    charges = spent(result)
    assert np.allclose(charges, charges[0]), "the refused client pays what the others pay"
    assert result.statement.is_bounded


@pytest.mark.parametrize("change", [nan, huge])
def test_what_is_not_finite_or_far_too_long_is_bounded_by_the_server(
    change: Change, tmp_path: Path
) -> None:
    result = run_federation(Tampered(change), tmp_path, clip_norm=0.1)
    assert np.allclose(spent(result), spent(result)[0])
    for tensor in result.state_dict.values():
        assert bool(tensor.isfinite().all())
        assert float(tensor.abs().max()) < 100, "a clip of 0.1 was kept, whatever was sent"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (forged, "forged: another token"),
        (of_another_node, "from another node"),
        (unasked, "not asked for"),
    ],
)
def test_what_may_be_somebody_elses_is_refused_and_charges_nobody(
    change: Change, reason: str, tmp_path: Path
) -> None:
    result = run_federation(Tampered(change), tmp_path, SHORT)
    assert refusals(result) == [reason]
    charges = spent(result)
    assert charges[0] == pytest.approx(charges[1] / 2), "one of two rounds"
    rounds = [json.loads(x) for x in (result.folder / "rounds.jsonl").read_text().splitlines()]  # type: ignore[operator]
    assert rounds[0]["absent"] == [0]
    assert "absent" not in rounds[1]


@pytest.mark.parametrize("change", [silent, unavailable])
def test_who_never_answers_is_not_charged(change: Change, tmp_path: Path) -> None:
    result = run_federation(Tampered(change, place=2), tmp_path, SHORT)
    charges = spent(result)
    assert charges[2] == pytest.approx(charges[1] / 2)
    assert result.result["joins"] == [2] * COUNT, "who was asked is history"


def test_a_second_answer_changes_nothing(tmp_path: Path) -> None:
    def twice(order: Message, reply: Message) -> Iterable[Message]:
        return [reply, reply]

    once = run_federation(honest(), None, noise_seed=1)
    result = run_federation(Tampered(twice), tmp_path, noise_seed=1)
    assert refusals(result) == ["duplicated"]
    for name, tensor in once.state_dict.items():
        assert bool((tensor == result.state_dict[name]).all())


def test_a_replayed_answer_of_an_earlier_round_is_not_used(tmp_path: Path) -> None:
    kept: list[Message] = []

    def replay(order: Message, reply: Message) -> Iterable[Message]:
        kept.append(reply)
        return [reply] if len(kept) == 1 else [kept[0], reply]

    result = run_federation(Tampered(replay, rounds=(0, 1)), tmp_path)
    assert refusals(result) == ["duplicated"]
    assert np.allclose(spent(result), spent(result)[0])


def test_an_old_answer_under_a_new_orders_number_has_the_wrong_token(tmp_path: Path) -> None:
    kept: list[str] = []

    def replay(order: Message, reply: Message) -> Iterable[Message]:
        kept.append(reply.content["config"]["token"])
        return [reply] if len(kept) == 1 else [with_token(reply, kept[0])]

    result = run_federation(Tampered(replay, rounds=(0, 1)), tmp_path, SHORT)
    assert refusals(result) == ["forged: another token"]


def test_one_message_that_cannot_be_read_spoils_no_other(tmp_path: Path) -> None:
    class Unreadable(Tampered):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            numbers = list(message_ids)
            poisoned = [n for n in numbers if n in self._orders and self._is_hostile(n)]
            if poisoned and len(numbers) >= 1 and poisoned[0] in numbers:
                if len(numbers) == 1:
                    self._orders.pop(numbers[0])
                raise RecursionError("an object that holds itself")
            return super().pull_messages(numbers)

        def _is_hostile(self, number: str) -> bool:
            order = self._orders[number][0]
            return order.metadata.dst_node_id == 1000 and order.metadata.message_type == "train"

    result = run_federation(Unreadable(silent), tmp_path, num_rounds=1)
    assert refusals(result) == ["the message cannot be read"]
    assert np.allclose(spent(result), spent(result)[0])


def test_a_round_to_which_nobody_came_releases_and_charges_nothing(tmp_path: Path) -> None:
    class Nobody(Tampered):
        def _answer(self, message: Message) -> list[Message]:
            replies = super()._answer(message)
            return replies if message.metadata.message_type != "train" else []

    result = run_federation(Nobody(silent), tmp_path, FlowerSettings(deadline=0.2))
    assert (spent(result) == 0).all()
    assert result.statement.epsilon_max == 0.0
    rounds = [json.loads(x) for x in (result.folder / "rounds.jsonl").read_text().splitlines()]  # type: ignore[operator]
    assert [line["absent"] for line in rounds] == [[0, 1, 2, 3]] * 2


def test_under_a_secret_coin_everybody_exposed_pays_whoever_came(tmp_path: Path) -> None:
    result = run_federation(
        Tampered(silent, rounds=range(9)),
        tmp_path,
        FlowerSettings(deadline=0.2),
        amplification=True,
        selection="poisson",
        policy="worst_case",
        clients_per_round=0.5,
    )
    charges = spent(result)
    assert charges[0] > 0
    assert np.allclose(charges, charges[0])
    text = (result.folder / "rounds.jsonl").read_text()  # type: ignore[operator]
    assert "absent" not in text
    assert any("everybody exposed is charged" in note for note in result.statement.notes)


def test_no_text_of_an_error_leaves_a_node(tmp_path: Path) -> None:
    from fedquilt.flower.node import client_app
    from fedquilt.flower.simulate import InProcessGrid
    from flower_samples import client_data, make_model

    def failing(context: Any) -> Any:
        if context.node_config["partition-id"] == 1:
            raise ValueError("patient 17 has a NaN in column 3")
        return client_data(context)

    result = run_federation(InProcessGrid(client_app(make_model, failing), COUNT), tmp_path)
    assert refusals(result) == ["the node failed"] * 2
    assert "patient" not in "".join(
        path.read_text(errors="replace")
        for path in result.folder.iterdir()  # type: ignore[union-attr]
    )
    assert np.allclose(spent(result), spent(result)[0])


@pytest.mark.parametrize(("mode", "sends"), [("certified", False), ("fedavg", True)])
def test_loss_and_counts_leave_only_where_a_mode_needs_them(mode: str, sends: bool) -> None:
    seen: list[Message] = []

    def look(order: Message, reply: Message) -> Iterable[Message]:
        seen.append(reply)
        return [reply]

    result = run_federation(Tampered(look), None, mode=mode)
    assert ("metrics" in seen[0].content) == sends
    if sends:
        assert seen[0].content["metrics"]["num-examples"] == 24
        assert math.isfinite(result.result["history"]["train_loss"][0])


def test_an_order_tells_a_node_nothing_of_the_servers_disk_account_or_noise(
    tmp_path: Path,
) -> None:
    grid = Tampered(silent, rounds=())
    run_federation(grid, tmp_path, noise_seed=7)
    told = json.loads(grid.orders[0].content["config"]["settings"])
    assert told == {
        "mode": "certified",
        "method": "full",
        "epsilon": 8.0,  # what clients are promised
        "num_rounds": 2,
        "local_epochs": 1,
        "clients_per_round": 1.0,
        "policy": "worst_case",
        # what the mode begins with
        "batch_size": 16,
        "clip_norm": 0.2,
    }
    assert len({order.content["config"]["token"] for order in grid.orders}) == len(grid.orders)


def test_the_file_of_the_nodes_is_the_owners(tmp_path: Path) -> None:
    result = run_federation(honest(), tmp_path, FlowerSettings(monitor=True))
    path = result.folder / "nodes.jsonl"  # type: ignore[operator]
    assert path.stat().st_mode & 0o777 == 0o600
    lines = lines_of(result)
    answers = [line for line in lines if "monitor" in line]
    assert len(answers) == 2 * COUNT
    assert {"seconds", "cpu_usage", "memory_usage", "network_bytes_sent"} <= set(
        answers[0]["monitor"]
    )
    (first, _) = [line for line in lines if "asked" in line]
    assert (first["bytes_up"], first["bytes_down"]) == (COUNT * NUMBERS * 4, COUNT * NUMBERS * 4)


def test_a_run_waits_for_its_nodes_and_says_how_many_came() -> None:
    class Nowhere(Tampered):
        def get_node_ids(self) -> Iterable[int]:
            return [1000, 1001]

    with pytest.raises(NotReadyError, match=r"2 clients are connected .* flower_min_nodes=3"):
        run_federation(Nowhere(silent), None, FlowerSettings(min_nodes=3, wait=0.2))
    result = run_federation(Nowhere(silent, rounds=()), None, FlowerSettings(min_nodes=2))
    assert result.result["cohorts"] == [[0, 1]] * 2
    with pytest.raises(InvalidValueError, match="flower_min_nodes=5 must be <= 4"):
        run_federation(honest(), None, FlowerSettings(min_nodes=5))


def test_a_model_that_is_not_the_servers_is_refused(tmp_path: Path) -> None:
    import torch
    from torch import nn

    from fedquilt.flower.node import client_app
    from fedquilt.flower.simulate import InProcessGrid
    from flower_samples import client_data

    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)
            self.register_buffer("scale", torch.tensor([scale]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    grid = InProcessGrid(client_app(lambda: Scaled(2.0), client_data), COUNT)
    result = run_federation(grid, tmp_path, num_rounds=1)
    assert refusals(result) == ["the node failed"] * COUNT
