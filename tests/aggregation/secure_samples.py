"""Rounds of secure aggregation in this process, with clients that drop out where a test says."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.aggregation.secure.client import MaskingClient, Member, SumOrder
from fedquilt.aggregation.secure.primitives import new_signing_key, verifying_key
from fedquilt.aggregation.secure.server import Server
from fedquilt.common.quorum import fewest

STEPS = ("advertise", "share", "mask", "agree", "unmask")


@dataclasses.dataclass(eq=False)
class Party:
    """Everybody of a federation: members that know one another's keys."""

    members: dict[int, Member]

    @classmethod
    def of(cls, count: int, **policy: Any) -> Party:
        keys = {client: new_signing_key() for client in range(count)}
        known = {client: verifying_key(key) for client, key in keys.items()}
        return cls({c: Member(c, known, key, **policy) for c, key in keys.items()})

    def order(self, **changes: Any) -> SumOrder:
        """Return an order for all of them."""
        known = next(iter(self.members.values())).known
        usual: dict[str, Any] = {
            "run": "run", "round_index": 0, "task": b"model", "roster": known,
            "least": fewest(len(known), 0.7), "colluding": 0, "size": 40, "bits": 18,
        }  # fmt: skip
        return SumOrder(**{**usual, **changes})

    def clients(self, order: SumOrder) -> dict[int, MaskingClient]:
        return {client: MaskingClient(self.members[client], order) for client in order.roster}


def hashed(number: int, size: int) -> bytes:
    """Return bytes that follow from a number."""
    return hashlib.shake_256(str(number).encode()).digest(size)


def integers(count: int, size: int, seed: int = 0) -> dict[int, NDArray[np.int64]]:
    """Return a vector of each client, some of it near the ends of the range."""
    draws = np.random.default_rng(seed)
    return {client: draws.integers(-3000, 3000, size) for client in range(count)}


def play(
    order: SumOrder,
    clients: Mapping[int, MaskingClient],
    vectors: Mapping[int, NDArray[np.int64]],
    lost: Mapping[str, Collection[int]] | None = None,
    watch: Callable[[str, Any], None] = lambda step, seen: None,
) -> NDArray[np.int64]:
    """Run a round with an honest server; clients in `lost[step]` answer no more from there on."""
    gone: set[int] = set()
    lost = lost or {}

    def here(step: str, told: Collection[int] = clients.keys()) -> list[int]:
        gone.update(lost.get(step, ()))
        return [client for client in told if client not in gone]

    server = Server(order)
    adverts = server.take_adverts({c: clients[c].advertise() for c in here("advertise")})
    written = server.take_letters({c: clients[c].share(adverts) for c in here("share", adverts)})
    for client in here("mask", written):
        packed = clients[client].mask(server.letters_to(client), vectors[client])
        watch("mask", packed)
        server.add(client, packed)
    survivors = server.survivors()
    signatures = server.take_signatures(
        {c: clients[c].agree(survivors) for c in here("agree", survivors)}
    )
    answers = {c: clients[c].unmask(signatures) for c in here("unmask", signatures)}
    watch("unmask", answers)
    return server.open(answers)
