"""Orders and replies, as the records that Flower carries.

An order says which client of the run a node is, what to compute, and a random token.  The
reply returns the token: Flower checks the key behind a request, but not that the node of
the key is the one whose answer it claims to be.

Vectors are sent as raw little-endian numbers of an allowed type.  Nothing that arrives is
unpickled or evaluated, and its size is compared before it is read.

How updates are compressed is in `training/compression.py`.

Of secure aggregation the first message of a round is an order as any other (`Order`) with a record
`secure` beside it; those of later steps hold their token, the step and one body.  A body is a list
of entries, each a client's number and some bytes.

    step        to a node                                  back
    advertise   order, model, roster of public keys        its keys of the round, signed
    share       everybody's keys                           a sealed letter to each peer, with tags
    mask        the letters to it                          its integers under all masks
    agree       who survived                               its signature under that list
    unmask      the signatures                             of each peer one share
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedquilt import __version__
from fedquilt.aggregation.secure.client import Advert, Opened, SumOrder
from fedquilt.aggregation.secure.primitives import SHARE_BYTES, digest
from fedquilt.common.errors import DataError, InvalidValueError
from fedquilt.common.schema import (
    ANY_NUMBER,
    COUNT,
    NAME,
    MapOf,
    Object,
    Scalar,
    Schema,
    check,
    maybe,
)
from fedquilt.common.untrusted import parse_json
from fedquilt.config import RunConfig, plain_config
from fedquilt.config.option import Flag
from fedquilt.config.run import option_names
from fedquilt.privacy.secure import LEAST_VARIANCE, MOST_VARIANCE, skellam_mu
from fedquilt.slices.selection import is_table, one_for_each
from fedquilt.training.compression import Arrays, UnreadableError
from fedquilt.training.compression import bounded as bounded
from fedquilt.training.compression import compress as compress
from fedquilt.training.compression import decompress as decompress

_RAW = "fedquilt.raw"
_TYPES = ("float32", "float64", "int8", "int16", "int32")
_MOST_ARRAYS = 4
_LONGEST_REASON = 300
_LONGEST_ROW = 1 << 16
_SHARE = maybe(Scalar("a number from 0 to 1", frozenset({int, float}), least=0, most=1))
_ROW: dict[str, Schema] = {
    "accuracy": _SHARE,
    "own_accuracy": _SHARE,
    "loss": ANY_NUMBER,
    "own_loss": ANY_NUMBER,
    "examples": COUNT,
    "width": NAME,
    "classes": MapOf(Object({"examples": COUNT, "accuracy": _SHARE})),
}
_PLAIN = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class Order:
    """What a node is asked to do: the facts of one client's part of a round.

    `size` is how many numbers it shall send; 0: as many as it has.  Where the server promises
    noise, `clip` is the client's bound in this round, `noise_std` the noise on the sum and
    `charge` what the server's ledger has reserved for it, in squared GDP units of zero-out;
    0: nothing is promised.  `cohort` is how many are asked, and `roster` the names and accounts
    of the run's clients, as JSON, in the order of their numbers ("" in a simulation).  `run` is
    what the server's ledger calls the run.
    """

    token: str
    round_index: int
    client: int
    num_clients: int
    learning_rate: float
    settings: str
    frozen: str
    compression: str
    topk: float
    monitor: bool
    size: int = 0
    clip: float = 0.0
    noise_std: float = 0.0
    charge: float = 0.0
    cohort: int = 0
    roster: str = ""
    run: str = ""
    version: str = __version__

    def members(self) -> list[tuple[str, str]]:
        """Return the name and the account of every client of the run."""
        named = json.loads(self.roster or "{}")
        if not isinstance(named, dict) or not all(isinstance(x, str) for x in named.values()):
            raise InvalidValueError("the roster of an order must be names and accounts")
        return list(named.items())


@dataclass(frozen=True, eq=False)
class Reply:
    """What a node answered, as it arrived: nothing in it has been checked but its form."""

    token: str
    failed: bool
    refusal: str
    row: str
    arrays: Arrays
    num_examples: int | None
    loss: float | None
    monitor: dict[str, float]


def settings_text(config: RunConfig, widths: Sequence[Fraction] | None = None) -> str:
    """Return what clients must know of a configuration: options that differ from the usual.

    Only options that are declared with `Flag.NODES` are among them.  Clients are told the
    `widths` of a table of tiers, not where it lies on the server's disk.
    """
    # What is usual differs by kind of run, so these are always said.
    kind = {"mode": config.mode, "method": config.method}
    usual = read_settings(json.dumps(kind)).as_dict()
    told = config.as_dict()
    if is_table(config.tiers):
        told["tiers"] = usual["tiers"] if widths is None else one_for_each(widths)
    chosen = {
        name: told[name]
        for name in option_names(Flag.NODES, type(config))
        if told[name] != usual[name]
    }
    return json.dumps({**chosen, **kind}, sort_keys=True)


def read_settings(text: str) -> RunConfig:
    """Read what `settings_text` wrote."""
    return plain_config({"dataset": "custom", "model": "custom", **json.loads(text)})


def pack_order(order: Order, vector: Array | None) -> RecordDict:
    """Return an order as the content of a message; `vector` may be shared by many."""
    facts = {field.name: getattr(order, field.name) for field in fields(order)}
    content = RecordDict({"config": ConfigRecord(facts)})
    if vector is not None:
        content["arrays"] = ArrayRecord({"vector": vector})
    return content


def unpack_order(content: RecordDict) -> tuple[Order, torch.Tensor]:
    """Read what `pack_order` wrote, on the node."""
    facts = dict(content["config"])
    if facts.get("version") != __version__:
        raise InvalidValueError(
            f"fedquilt of the server is {facts.get('version')!r} and must be {__version__!r}, "
            "as on this node"
        )
    kinds = {field.name: _PLAIN[str(field.type)] for field in fields(Order)}
    wrong = sorted(facts.keys() ^ kinds.keys()) or [
        name for name, kind in kinds.items() if type(facts[name]) is not kind
    ]
    if wrong:
        raise InvalidValueError(f"an order must have {wrong[0][:40]!r} as its protocol says")
    arrays = read_arrays(content.array_records.get("arrays", ArrayRecord()), 1 << 40)
    vector = torch.from_numpy(arrays["vector"].copy()) if "vector" in arrays else torch.zeros(0)
    return Order(**facts), vector  # type: ignore[arg-type]


def pack_reply(
    token: str,
    arrays: Arrays | None,
    *,
    num_examples: int | None = None,
    loss: float | None = None,
    monitor: Mapping[str, float] | None = None,
    refusal: str = "",
    row: Mapping[str, Any] | None = None,
) -> RecordDict:
    """Return a reply; None for the arrays: the node failed, and says no more about it.

    `refusal` is why a site does not take the order, in words that follow from the order, the
    site's policy and its account alone.  `row` is what a client measures of the model.
    """
    facts: dict[str, Any] = {"token": token, "failed": arrays is None}
    if refusal:
        facts["refusal"] = refusal
    if row is not None:
        facts["row"] = json.dumps(row)
    content = RecordDict({"config": ConfigRecord(facts)})
    if arrays is not None:
        # An empty array has no place in a message; that it is missing says the same.
        full = {name: as_array(array) for name, array in arrays.items() if len(array)}
        content["arrays"] = ArrayRecord(full)
    metrics: dict[str, Any] = {} if num_examples is None else {"num-examples": num_examples}
    if loss is not None and np.isfinite(loss):
        metrics["loss"] = loss
    if metrics:
        content["metrics"] = MetricRecord(metrics)
    if monitor:
        content["monitor"] = MetricRecord({name: float(x) for name, x in monitor.items()})
    return content


def unpack_reply(content: RecordDict, limit: int) -> Reply:
    """Read a reply of at most `limit` bytes of arrays; raise `UnreadableError` or a misfit's own.

    It was written by a node: whatever is in it may be wrong.
    """
    config = content.config_records.get("config", ConfigRecord())
    metrics = content.metric_records.get("metrics", MetricRecord())
    count, loss = metrics.get("num-examples"), metrics.get("loss")
    if count is not None and not (type(count) is int and 0 <= count < 2**31):
        raise UnreadableError(f"num-examples={count!r} must be a whole number")
    readings = content.metric_records.get("monitor", MetricRecord())
    return Reply(
        token=str(config.get("token", "")),
        failed=config.get("failed") is True,
        refusal=str(config.get("refusal", ""))[:_LONGEST_REASON],
        row=str(config.get("row", ""))[:_LONGEST_ROW],
        arrays=read_arrays(content.array_records.get("arrays", ArrayRecord()), limit),
        num_examples=count,
        loss=loss if isinstance(loss, float) else None,
        monitor={
            str(name)[:40]: value
            for name, value in list(readings.items())[:16]
            if isinstance(value, float) and np.isfinite(value)
        },
    )


def read_row(text: str) -> dict[str, Any]:
    """Return what a client says that it measures; raise `UnreadableError` for anything else."""
    whose = "what a client measures"
    try:
        row = parse_json(text.encode(errors="replace"), whose, DataError)
        check(row, Object({"examples": COUNT}, _ROW), whose, DataError)
    except DataError as error:
        raise UnreadableError(str(error)[:_LONGEST_REASON]) from None
    return {name: row[name] for name in _ROW if name in row}


def token_of(message: Message) -> str:
    """Return the token of a message; an empty text of one that holds an error and nothing else."""
    return reply_token(message.content) if message.has_content() else ""


def reply_token(content: RecordDict) -> str:
    """Return the token of a reply without looking at anything else in it."""
    return str(content.config_records.get("config", ConfigRecord()).get("token", ""))


def as_array(array: NDArray[Any]) -> Array:
    """Return a vector as Flower's array of raw little-endian numbers."""
    raw = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return Array(str(array.dtype), tuple(array.shape), _RAW, raw.tobytes())


def read_arrays(record: ArrayRecord, limit: int) -> Arrays:
    """Return the arrays of a record; raise `UnreadableError` for what is none or too much."""
    if len(record) > _MOST_ARRAYS:
        raise UnreadableError(f"{len(record)} arrays must be at most {_MOST_ARRAYS}")
    size = sum(len(array.data) for array in record.values())
    if size > limit:
        raise UnreadableError(f"{size} bytes must be at most {limit}")
    return {name: _numbers(name, array) for name, array in record.items()}


def _numbers(name: str, array: Array) -> NDArray[Any]:
    if array.stype != _RAW or array.dtype not in _TYPES or len(array.shape) != 1:
        raise UnreadableError(f"array {name[:40]!r} must be a vector of raw numbers")
    kind = np.dtype(array.dtype).newbyteorder("<")
    if len(array.data) != array.shape[0] * kind.itemsize:
        raise UnreadableError(f"array {name[:40]!r} must hold as many bytes as its shape says")
    return np.frombuffer(array.data, dtype=kind).astype(np.dtype(array.dtype), copy=False)


RECORD = "secure"
STEPS = ("advertise", "share", "mask", "agree", "unmask")
_HEAD = struct.Struct("<II")
_KEY = 32


@dataclass(frozen=True, eq=False)
class MaskedOrder:
    """What a node is asked for under masks: an order, the round's sum, and the noise of it."""

    order: Order
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


def task_digest(order: Order, model: torch.Tensor, variance: int, normalise: bool) -> bytes:
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
    order, model = unpack_order(content)
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
    content["arrays"] = ArrayRecord({"body": as_array(as_numbers(body))})
    return content


def as_numbers(body: bytes) -> np.ndarray[Any, np.dtype[np.int8]]:
    """Return a body as the numbers that a message carries."""
    return np.frombuffer(body, dtype=np.int8)


def body_of(content: RecordDict, limit: int) -> bytes:
    """Return the body of a message."""
    arrays = read_arrays(content.array_records.get("arrays", ArrayRecord()), limit)
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
