"""Replies as a SuperLink hands them out, object by object: one node never costs another."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from fedquilt.flower import internals
from fedquilt.flower.node import client_app
from fedquilt.flower.settings import FlowerSettings
from flower_samples import COUNT, client_data, make_model, run_federation, spent, with_token

HOSTILE = 1001
NUMBERS = 6 * 3 + 3
Objects = dict[str, bytes]
Spoil = Callable[[Message, Objects], Objects]


class FakeSuperLink:
    """The Runtime calls of a SuperLink, in memory; the node `HOSTILE` sends what `spoil` makes."""

    def __init__(self, spoil: Spoil) -> None:
        self.spoil = spoil
        self.objects: Objects = {}
        self.orders: dict[str, tuple[Message, Any]] = {}
        self.confirmed: list[str] = []
        self.pulled = 0
        app = client_app(make_model, client_data)
        self.contexts = {
            1000 + place: Context(1, 1000 + place, {"partition-id": place}, RecordDict(), {})
            for place in range(COUNT)
        }
        self._app = app

    def GetNodes(self, request: Any) -> Any:  # noqa: N802
        nodes = [NodeInfo(node_id=node, status="online") for node in self.contexts]
        return SimpleNamespace(nodes=nodes)

    def PushMessages(self, request: Any) -> Any:  # noqa: N802
        self._asked = dict(zip(_ids(request), request.messages_list, strict=True))
        return SimpleNamespace(
            message_ids=list(self._asked),
            session_id="s",
            objects_to_push=[i for t in request.message_object_trees for i in _all(t)],
        )

    def PushObject(self, request: Any) -> Any:  # noqa: N802
        self.objects[request.object_id] = request.object_content
        return SimpleNamespace(stored=True)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        answers = [
            self._answer(number, self._asked.pop(number))
            for number in list(request.message_ids)
            if number in self._asked
        ]
        return SimpleNamespace(
            messages_list=[message for message, _ in answers],
            message_object_trees=[tree for _, tree in answers],
        )

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        content = self.objects.get(request.object_id, b"")
        self.pulled += len(content)
        return SimpleNamespace(
            object_found=True, object_available=content != b"", object_content=content
        )

    def ConfirmMessageReceived(self, request: Any) -> Any:  # noqa: N802
        self.confirmed.append(request.message_object_id)

    def close(self) -> None:
        """Nothing is open."""

    def _answer(self, number: str, asked: Any) -> Any:
        order = inflate_object_from_contents(number, dict(self.objects))
        assert isinstance(order, Message)
        internals.name_message(order, number)
        node = order.metadata.dst_node_id
        with internals.acting_as(1, node):
            reply = self._app(order, self.contexts[node])
        hostile = node == HOSTILE and order.metadata.message_type == "train"
        if hostile and self.spoil is nonascii:
            with_token(reply, "é" * 32)
        if hostile and self.spoil is bomb:
            chunks = Array("float32", (NUMBERS,), "fedquilt.raw", b"x" * 100_000)
            reply.content["arrays"] = ArrayRecord({"vector": chunks})
        if hostile and self.spoil is huge:
            big = Array("float32", (10**6,), "fedquilt.raw", np.arange(10**6, dtype="f4").tobytes())
            reply.content["arrays"] = ArrayRecord({"vector": big})
        internals.name_message(reply, reply.object_id)
        made = {i: o.deflate() for i, o in get_all_nested_objects(reply).items()}
        tree = get_object_tree(reply)
        self.objects.update(self.spoil(reply, made) if hostile else made)
        return message_to_proto(_bare(reply)), tree


def _bare(message: Message) -> Message:
    from flwr.app.message import remove_content_from_message

    return remove_content_from_message(message)


def _ids(request: Any) -> list[str]:
    return [tree.object_id for tree in request.message_object_trees]


def _all(tree: ObjectTree) -> list[str]:
    return [tree.object_id, *(i for child in tree.children for i in _all(child))]


def grid_of(spoil: Spoil) -> tuple[Any, FakeSuperLink]:
    link = FakeSuperLink(spoil)
    grid: Any = HttpGrid(token="t")
    grid._client = link
    grid.set_run(Run.create_empty(1))
    grid.run_id_here = 1
    return grid, link


def nonascii(reply: Message, made: Objects) -> Objects:
    return made


def huge(reply: Message, made: Objects) -> Objects:
    return made


def never_uploaded(reply: Message, made: Objects) -> Objects:
    """Announce all of it, upload half."""
    return dict(list(made.items())[: len(made) // 2])


def _array(made: Objects, change: Callable[[dict[str, Any]], bytes]) -> Objects:
    for number, content in made.items():
        head, _, body = content.partition(b"\x00")
        if head.startswith(b"Array "):
            new = change(json.loads(body))
            kind, children, _ = head.split(b" ")
            made[number] = b"%s %s %d\x00" % (kind, children, len(new)) + new
    return made


def malformed(reply: Message, made: Objects) -> Objects:
    return _array(made, lambda body: b'{"dtype": 7')


def bomb(reply: Message, made: Objects) -> Objects:
    """One chunk of 100 kB, named 20,000 times: 2 GB where somebody puts it together."""
    return _array(made, lambda body: json.dumps({**body, "arraychunk_ids": [0] * 20_000}).encode())


def lines(result: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.folder / "nodes.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("spoil", "reason", "is_charged"),
    [
        (nonascii, "forged: another token", False),
        (never_uploaded, "announced and never uploaded", False),
        (malformed, "the message cannot be read", True),
        (bomb, "bytes must be at most", True),
        (huge, "bytes must be at most", True),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_honest_clients_are_summed_and_charged_as_if_the_attacker_were_absent(
    spoil: Spoil, reason: str, is_charged: bool, tmp_path: Path
) -> None:
    grid, link = grid_of(spoil)
    began = time.monotonic()
    result = run_federation(grid, tmp_path, FlowerSettings(deadline=1.5), num_rounds=2)
    assert time.monotonic() - began < 60, "no pull waits for a node past the deadline"
    refused = [line for line in lines(result) if "refused" in line]
    assert [line["client"] for line in refused] == [1, 1], "the culprit is named"
    assert all(reason in line["refused"] for line in refused)
    asked = [line for line in lines(result) if "asked" in line]
    assert [line["answered"] for line in asked] == [COUNT - 1] * 2
    assert [line["absent"] for line in asked] == [[] if is_charged else [1]] * 2
    charges = spent(result)
    assert np.allclose(np.delete(charges, 1), charges[0])
    assert charges[0] > 0
    assert charges[1] == (pytest.approx(charges[0]) if is_charged else 0)
    assert len(link.confirmed) >= 2 * COUNT, "what every reply took on disk is given back"


def test_the_model_is_the_one_without_the_attacker(tmp_path: Path) -> None:
    """Bit for bit: the release sums the same three honest vectors, whatever the fourth sent."""
    states = []
    for spoil in (never_uploaded, nonascii):
        grid, _ = grid_of(spoil)
        how = FlowerSettings(deadline=1.5)
        states.append(run_federation(grid, None, how, num_rounds=1, noise_seed=4).state_dict)
    for name, tensor in states[0].items():
        assert bool((tensor == states[1][name]).all())


def test_a_reply_is_fetched_no_further_than_its_limit(tmp_path: Path) -> None:
    grid, link = grid_of(huge)
    run_federation(grid, tmp_path, FlowerSettings(deadline=1.5), num_rounds=1)
    assert link.pulled < 5_000_000


def test_a_reply_whose_inside_is_anothers_is_refused_and_named(tmp_path: Path) -> None:
    def inside(reply: Message, made: Objects) -> Objects:
        reply.metadata.__dict__["_reply_to_message_id"] = "f" * 64
        made[reply.metadata.message_id] = reply.deflate()
        return made

    grid, link = grid_of(inside)
    answer = link._answer

    def outside(number: str, asked: Any) -> Any:
        message, tree = answer(number, asked)
        message.metadata.reply_to_message_id = number
        return message, tree

    link._answer = outside  # type: ignore[method-assign]
    result = run_federation(grid, tmp_path, FlowerSettings(deadline=1.5), num_rounds=1)
    (refused,) = [line for line in lines(result) if "refused" in line]
    assert (refused["client"], refused["refused"]) == (1, "the message cannot be read")
