"""Secure aggregation on the wire: what the messages of its five steps hold.

The first message of a round is an order as any other (`wire.Order`) with a record `secure`
beside it; those of later steps hold their token, the step and one body.  A body is a list of
entries, each a client's number and some bytes.

    step        to a node                                  back
    advertise   order, model, roster of public keys        its keys of the round, signed
    share       everybody's keys                           a sealed letter to each peer, with tags
    mask        the letters to it                          its integers under all masks
    agree       who survived                               its signature under that list
    unmask      the signatures                             of each peer one share
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedquilt.aggregation.secure.client import Advert, Opened
from fedquilt.aggregation.secure.order import SumOrder
from fedquilt.aggregation.secure.primitives import SHARE_BYTES, digest
from fedquilt.common.errors import InvalidValueError
from fedquilt.flower import wire
from fedquilt.privacy.skellam import LEAST_VARIANCE, MOST_VARIANCE, skellam_mu
from fedquilt.training.compression import UnreadableError

RECORD = "secure"
STEPS = ("advertise", "share", "mask", "agree", "unmask")
_HEAD = struct.Struct("<II")
_KEY = 32


@dataclass(frozen=True, eq=False)
class MaskedOrder:
    """What a node is asked for under masks: an order, the round's sum, and the noise of it."""

    order: wire.Order
    total: SumOrder
    variance: int
    normalise: bool

    @property
    def grid(self) -> float:
        """The step of the integers, in the update's units."""
        return float(self.order.noise_std / self.variance**0.5)

    @property
    def share(self) -> Fraction:
        """The variance of this client's noise: M of them have all that is charged."""
        return Fraction(self.variance, self.total.least - self.total.colluding)

    @property
    def charge(self) -> float:
        """What the round costs the client by its own computation, in squared GDP units."""
        square = (self.order.clip / self.grid) ** 2 + self.total.size / 4.0
        return square * skellam_mu(self.variance) ** 2

    def paid(self, share: float) -> MaskedOrder:
        """Return the order with the clip that a share of its charge pays for.

        At the very end of an allowance a hair less is granted than was asked.
        """
        if share >= 1:
            return self
        square = (self.order.clip / self.grid) ** 2 + self.total.size / 4.0
        left = max(0.0, square * share - self.total.size / 4.0)
        return replace(self, order=replace(self.order, clip=self.grid * left**0.5))


def run_name(run_id: int) -> str:
    """Return what a run is called in its rounds: nodes compare it with what Flower says."""
    return f"flower-{run_id}"


def task_digest(order: wire.Order, model: torch.Tensor, variance: int, normalise: bool) -> bytes:
    """Return what stands for all that is asked of everybody alike: model, settings, noise."""
    vector = model.detach().cpu().contiguous().numpy()
    return digest(
        "task", order.version, order.settings, order.frozen, repr(order.learning_rate),
        order.num_clients, order.cohort, repr(order.noise_std), variance, int(normalise),
        str(vector.dtype), hashlib.sha256(vector.tobytes()).digest(),
    )  # fmt: skip


def first_record(total: SumOrder, variance: int, normalise: bool) -> ConfigRecord:
    """Return what stands beside the order of a masked round."""
    facts: dict[str, Any] = {
        "step": STEPS[0], "run": total.run, "least": total.least, "colluding": total.colluding,
        "bits": total.bits, "variance": variance, "normalise": normalise,
        "roster": write_map(total.roster),
    }  # fmt: skip
    return ConfigRecord(facts)


def read_first(content: RecordDict) -> tuple[MaskedOrder, torch.Tensor]:
    """Read an order under masks; the digest of what it asks for is this node's own."""
    order, model = wire.unpack_order(content)
    facts: dict[str, Any] = dict(content.config_records[RECORD])
    kinds = {"step": str, "run": str, "least": int, "colluding": int, "bits": int,
             "variance": int, "normalise": bool, "roster": bytes}  # fmt: skip
    if {name: type(value) for name, value in facts.items()} != kinds:
        raise InvalidValueError("an order under masks must be as its protocol says")
    least, colluding, variance = facts["least"], facts["colluding"], facts["variance"]
    usable = 0 <= colluding < least and LEAST_VARIANCE <= variance <= MOST_VARIANCE
    if not usable or not 0 < order.noise_std < float("inf") or not 0 <= order.clip < float("inf"):
        raise InvalidValueError("an order under masks must name a clip, noise and who may collude")
    total = SumOrder(
        run=facts["run"],
        round_index=order.round_index,
        task=task_digest(order, model, variance, facts["normalise"]),
        roster=read_map(facts["roster"]),
        least=least,
        colluding=colluding,
        size=order.size,
        bits=facts["bits"],
    )
    return MaskedOrder(order, total, variance, facts["normalise"]), model


def later_content(token: str, step: str, round_index: int, run: str, body: bytes) -> RecordDict:
    """Return the message of a later step."""
    told = ConfigRecord({"step": step, "run": run, "round_index": round_index})
    content = RecordDict({"config": ConfigRecord({"token": token}), RECORD: told})
    content["arrays"] = ArrayRecord({"body": wire.as_array(as_numbers(body))})
    return content


def as_numbers(body: bytes) -> np.ndarray[Any, np.dtype[np.int8]]:
    """Return a body as the numbers that a message carries."""
    return np.frombuffer(body, dtype=np.int8)


def body_of(content: RecordDict, limit: int) -> bytes:
    """Return the body of a message."""
    arrays = wire.read_arrays(content.array_records.get("arrays", ArrayRecord()), limit)
    return arrays["body"].astype(np.int8).tobytes() if "body" in arrays else b""


def write_map(entries: Mapping[int, bytes]) -> bytes:
    """Return entries one after the other, in the order of their clients."""
    return b"".join(_HEAD.pack(c, len(entries[c])) + entries[c] for c in sorted(entries))


def read_map(body: bytes) -> dict[int, bytes]:
    """Read what `write_map` wrote; refuse anything else."""
    entries: dict[int, bytes] = {}
    place, last = 0, -1
    while place < len(body):
        if len(body) - place < _HEAD.size:
            raise UnreadableError("a body must hold whole entries")
        client, size = _HEAD.unpack_from(body, place)
        place += _HEAD.size
        if size > len(body) - place or client <= last:
            raise UnreadableError("a body must hold whole entries, clients ascending")
        entries[client] = body[place : place + size]
        place, last = place + size, client
    return entries


def write_advert(advert: Advert) -> bytes:
    """Return the keys of a client as bytes."""
    return advert.letters + advert.masks + advert.seed + advert.signature


def read_advert(data: bytes) -> Advert:
    """Read what `write_advert` wrote."""
    if not 3 * _KEY < len(data) <= 3 * _KEY + 160:
        raise UnreadableError(f"an advert of {len(data)} bytes must have two keys and a signature")
    parts = (data[:_KEY], data[_KEY : 2 * _KEY], data[2 * _KEY : 3 * _KEY])
    return Advert(*parts, data[3 * _KEY :])


def write_opened(opened: Opened) -> bytes:
    """Return shares as bytes: of seeds (0) and of keys (1)."""
    return write_map(
        {**{c: b"\0" + s for c, s in opened.seeds.items()},
         **{c: b"\1" + s for c, s in opened.keys.items()}}
    )  # fmt: skip


def read_opened(body: bytes) -> Opened:
    """Read what `write_opened` wrote."""
    entries = read_map(body)
    for entry in entries.values():
        if len(entry) != 1 + SHARE_BYTES or entry[0] > 1:
            raise UnreadableError(f"a share must have {1 + SHARE_BYTES} bytes, and its kind")
    return Opened(
        {c: entry[1:] for c, entry in entries.items() if entry[0] == 0},
        {c: entry[1:] for c, entry in entries.items() if entry[0] == 1},
    )
