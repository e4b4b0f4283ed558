"""The node's side of secure aggregation: who it is, what it keeps in memory, what it answers.

A node's process lives for one message, and the secrets of a round for five.  So the prefork
server starts a *keeper* before it takes up tasks: a process with the node's key and, for as long
as a round lasts, its secrets and its noised vector.  Forks reach it over a socket that they have
inherited; there is no name by which anybody else could.  What it holds is never written: not to
disk, not to Flower's state of a node, not to a log, not to a core dump.  It ends with its parent,
and with it the rounds that were open: a node that was killed does not go on with a round, and
takes the next.  Which one that is, is no secret: the newest round of each run lies in a file beside
the node's key, and is on disk before a round's keys are handed out, so that whoever kills a keeper
gains no second turn at a round.

The keeper knows other clients by a roster file of the node's own (`NodeRoster`), read anew for
every round.  An order's roster must consist of keys in it that count, each of another client.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import socket
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from numpy.typing import NDArray

from fedquilt.aggregation.secure.client import MaskingClient, Member, SumOrder
from fedquilt.aggregation.secure.primitives import ProtocolError, SigningKey
from fedquilt.common.errors import DataError, FedquiltError, InvalidValueError, StorageError
from fedquilt.common.storage import write_file
from fedquilt.common.untrusted import NOTE_BYTES, read_json, read_named
from fedquilt.flower import internals, wire
from fedquilt.flower.client_registry import NodeRoster, der_fingerprint
from fedquilt.privacy.noise import SecretNoise
from fedquilt.privacy.secure import client_words, clipped, noised_integers, settled_share
from fedquilt.training.compression import decompress

log = logging.getLogger(__name__)

Call = Callable[..., bytes]
"""Asks a keeper: a request, then its parts as bytes; raises `ProtocolError` with its words."""
Train = Callable[[Message, Context], Message]
Names = Callable[[], Mapping[str, str]]

_KEPT = 8  # runs whose rounds are open at the same time
_RUNS = 1000  # whose newest round is known; who can start more runs needs no old one
_SET_DUMPABLE = 4  # of prctl(2), on Linux
_SIZE = struct.Struct("<Q")
_LARGEST = 1 << 40
_PATIENCE = 120.0


@dataclass(frozen=True, eq=False)
class Identity:
    """A node's key, and the fingerprints by which it knows everybody, with their names."""

    signing: SigningKey
    names: Names
    smallest: int = 2
    colluding: int = 0
    turns: Path | None = None

    @classmethod
    def of_files(cls, key: Path, roster: Path) -> Identity:
        """Take the key of a SuperNode, and a roster of the node's own."""
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key

        try:
            signing = load_ssh_private_key(read_named(key, NOTE_BYTES), None)
        except (ValueError, TypeError) as error:
            raise InvalidValueError(f"key={str(key)!r} must be a node's private key") from error
        if not isinstance(signing, EllipticCurvePrivateKey):
            raise InvalidValueError(f"key={str(key)!r} must be an elliptic-curve key")

        def names() -> dict[str, str]:
            known = NodeRoster.read(roster)
            return {value: known.names[place] for value, place in known.client_of().items()}

        one = cls(signing, names, turns=key.with_name(f"{key.name}.rounds"))
        one.remember(one.played())  # a place where nothing can be written is told before any order
        return one

    def played(self) -> dict[str, int]:
        """Return the newest round of each run that this node has played."""
        if self.turns is None or not self.turns.exists():
            return {}
        told = read_json(self.turns)
        if not all(type(index) is int for index in told.values()):
            raise DataError(f"{str(self.turns)!r} must hold the newest round of each run")
        return told

    def remember(self, newest: dict[str, int]) -> None:
        """Write down the newest round of the runs that were last heard of, durable."""
        for run in list(newest)[:-_RUNS]:
            del newest[run]
        if self.turns is not None:
            write_file(self.turns, json.dumps(newest).encode(), 0o600)

    def known(self, roster: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return those of an order's keys that this node knows, no client twice."""
        names, found = self.names(), dict[str, int]()
        known: dict[int, bytes] = {}
        for client, key in roster.items():
            name = names.get(der_fingerprint(key))
            if name is not None and found.setdefault(name, client) == client:
                known[client] = key
        return known


@dataclass(eq=False)
class _Open:
    client: MaskingClient
    round_index: int
    note: bytes
    vector: NDArray[np.int64] | None = None

    def forget(self) -> None:
        """Overwrite what a round holds that nobody goes on with."""
        self.client.forget()
        if self.vector is not None:
            self.vector[:] = 0


class Keeper:
    """The open rounds of one node, in memory."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._member: Member | None = None
        self._credit: dict[str, float] = {}

    def __call__(self, request: str, *parts: bytes) -> bytes:
        """Do a step; whatever is refused ends this node's part of the round."""
        facts = json.loads(parts[0])
        run, index = str(facts["run"]), int(facts["round_index"])
        if request == "accept":
            return self._accept(facts, parts)
        if request == "credit":
            credit = self._credit.pop(run, 0.0)
            if not facts["take"]:
                self._credit[run] = credit
            return repr(credit).encode()
        held = self._open.get(run)
        if held is None or held.round_index != index:
            raise ProtocolError(f"nothing is known of round {index} of {run}, or no more")
        if request == "note":
            return held.note
        try:
            return self._step(request, held, parts[1])
        except BaseException:
            self._drop(run)
            raise
        finally:
            if request == wire.STEPS[-1]:
                self._drop(run)

    def _drop(self, run: str) -> None:
        held = self._open.pop(run, None)
        if held is not None:
            held.forget()

    def _accept(self, facts: dict[str, Any], parts: tuple[bytes, ...]) -> bytes:
        """Check an order before any data are read, and make the keys of its round."""
        roster = wire.read_map(parts[1])
        order = SumOrder(
            run=str(facts["run"]), round_index=int(facts["round_index"]), task=parts[2],
            roster=roster, least=facts["least"], colluding=facts["colluding"],
            size=facts["size"], bits=facts["bits"],
        )  # fmt: skip
        own, identity = int(facts["client"]), self._identity
        if self._member is None:
            self._member = Member(own, {}, identity.signing, newest=identity.played())
        member = self._member
        member.client, member.known = own, identity.known(roster)
        member.smallest = max(identity.smallest, int(facts.get("smallest", 0)))
        member.colluding = max(identity.colluding, int(facts.get("may_collude", 0)))
        self._drop(order.run)
        held = _Open(MaskingClient(member, order), order.round_index, parts[3])
        identity.remember(member.newest)
        self._open[order.run] = held
        while len(self._open) > _KEPT:
            self._drop(next(iter(self._open)))
        return b""

    def _step(self, request: str, held: _Open, body: bytes) -> bytes:
        client = held.client
        if request == "advertise":
            held.vector = np.frombuffer(body, dtype="<i8").astype(np.int64)
            return wire.write_advert(client.advertise())
        entries = wire.read_map(body)
        if request == "share":
            adverts = {c: wire.read_advert(data) for c, data in entries.items()}
            return wire.write_map(client.share(adverts))
        if request == "mask":
            vector, held.vector = held.vector, None
            if vector is None:
                raise ProtocolError("a vector is masked once")
            try:
                return client.mask(entries, vector)
            finally:
                vector[:] = 0
        if request == "agree":
            return client.agree(frozenset(entries))
        if request == "unmask":
            opened = client.unmask(entries)
            self._give_back(held)
            return wire.write_opened(opened)
        raise ProtocolError(f"step {request[:40]!r} must be one of {', '.join(wire.STEPS)}")

    def _give_back(self, held: _Open) -> None:
        """Note what a site has paid too much: who survived is known, and signed by enough.

        Its vector left under the charge of the fewest survivors; the next one's is so much less.
        """
        note = json.loads(held.note)
        if "charge" in note:
            honest = held.client.num_survivors - note["colluding"]
            share = settled_share(note["variance"], honest, note["least"] - note["colluding"])
            run, saved = note["run"], note["charge"] * (1.0 - share)
            self._credit[run] = self._credit.get(run, 0.0) + saved


class SecureNode:
    """Answers the messages of masked rounds; what trains sees an order as any other.

    Parameters
    ----------
    call : Call
        Asks the node's keeper.
    noise : NoiseSource, optional
        For simulations, whose nodes are of one process; never from an order.
    """

    def __init__(self, call: Call, noise: Any = None) -> None:
        self._call = call
        self._noise = noise or SecretNoise()

    def begin(self, asked: wire.MaskedOrder, context: Context, **policy: Any) -> None:
        """Check an order, before any data are read; `policy` is kept with the round."""
        total, order = asked.total, asked.order
        if total.run != wire.run_name(context.run_id):
            raise ProtocolError(f"run {total.run[:40]!r} must be {wire.run_name(context.run_id)}")
        facts = {
            "run": total.run, "round_index": total.round_index, "client": order.client,
            "least": total.least, "colluding": total.colluding, "size": total.size,
            "bits": total.bits, "variance": asked.variance, **policy,
        }  # fmt: skip
        roster, note = wire.write_map(total.roster), json.dumps(facts).encode()
        self._call("accept", note, roster, total.task, note)

    def advertise(self, asked: wire.MaskedOrder, content: RecordDict) -> RecordDict:
        """Clip, round and noise what was trained, leave it to the keeper, return the keys.

        What failed, or is not finite, counts as zeros: nobody learns that it did.
        """
        order, total = asked.order, asked.total
        try:
            reply = wire.unpack_reply(content, 1 << 40)
            vector = decompress("none", reply.arrays, total.size, torch.float64)
        except Exception:  # whatever it is, it may follow from the data
            log.exception("what this node trained cannot be used")
            vector = torch.zeros(total.size, dtype=torch.float64)
        noised = noised_integers(
            clipped(vector, order.clip, normalise=asked.normalise),
            clip=order.clip,
            grid=asked.grid,
            share=asked.share,
            words=client_words(self._noise, order.round_index, order.client),
        )
        facts = {"run": total.run, "round_index": total.round_index}
        return self._reply(order.token, "advertise", facts, noised.astype("<i8").tobytes())

    def later(self, content: RecordDict, context: Context) -> RecordDict:
        """Answer a later step."""
        facts, step = _round_of(content, context), step_of(content) or ""
        if step not in wire.STEPS[1:]:
            raise ProtocolError(f"step {step[:40]!r} must be one of {', '.join(wire.STEPS[1:])}")
        body = wire.body_of(content, _LARGEST)
        return self._reply(wire.reply_token(content), step, facts, body)

    def note(self, content: RecordDict, context: Context) -> dict[str, Any]:
        """Return what was kept with the round of a later step."""
        asked = json.dumps(_round_of(content, context)).encode()
        noted: dict[str, Any] = json.loads(self._call("note", asked))
        return noted

    def credit(self, run: str, *, take: bool = False) -> float:
        """Return what this node has paid too much in the rounds of a run, once if it is taken."""
        asked = {"run": run, "round_index": -1, "take": take}
        return float(self._call("credit", json.dumps(asked).encode()))

    def answer(self, message: Message, context: Context, train: Train) -> RecordDict:
        """Answer a message of a masked round in the name of a node without a policy."""
        content = message.content
        if step_of(content) != wire.STEPS[0]:
            return self.later(content, context)
        asked, _ = wire.read_first(content)
        self.begin(asked, context)
        return self.advertise(asked, trained(message, context, train))

    def _reply(self, token: str, step: str, facts: dict[str, Any], body: bytes) -> RecordDict:
        answer = self._call(step, json.dumps(facts).encode(), body)
        return wire.pack_reply(token, {"body": wire.as_numbers(answer)})


def trained(message: Message, context: Context, train: Train) -> RecordDict:
    """Let an app train by an order as any other, without a word of masks; empty if it fails."""
    del message.content[wire.RECORD]
    try:
        return train(message, context).content
    except (Exception, SystemExit):  # nobody is told that it failed: it counts as zeros
        log.exception("this node could not train")
        return RecordDict()


def _round_of(content: RecordDict, context: Context) -> dict[str, Any]:
    """Return the round that a later step is about: one of the run that asks for it."""
    told = content.config_records[wire.RECORD]
    run, index = told.get("run"), told.get("round_index")
    if type(run) is not str or type(index) is not int:
        raise ProtocolError("a later step must say of which round it is")
    if run != wire.run_name(context.run_id):
        raise ProtocolError(f"run {run[:40]!r} must be this one")
    return {"run": run, "round_index": index}


def step_of(content: RecordDict) -> str | None:
    """Return the step of a message of a masked round; None for any other message."""
    record = content.config_records.get(wire.RECORD)
    return None if record is None else str(record.get("step", ""))


def answered(message: Message, context: Context, node: SecureNode | None, train: Train) -> Message:
    """Let a node answer a message, masked or not; a refusal is told in words about the order."""
    if step_of(message.content) is None:
        return train(message, context)
    token = wire.reply_token(message.content)
    try:
        if node is None:
            raise ProtocolError("this node has no key and roster for masked sums")
        content = node.answer(message, context, train)
    except (FedquiltError, ValueError) as error:
        content = wire.pack_reply(token, None, refusal=str(error)[:200])
    return Message(content, reply_to=message)


class KeeperProcess:
    """A keeper in a process of its own, which this process and its forks can ask."""

    def __init__(self, identity: Identity, fork: Callable[[Callable[[], object]], int]) -> None:
        self._identity, self._fork = identity, fork
        self._near: socket.socket | None = None
        self.pid = 0
        self.start()

    def start(self) -> None:
        """Start the keeper, unless it runs; rounds that were open are lost with the last one."""
        if self.pid and os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            return
        if self._near is not None:
            self._near.close()
        self._near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near, identity = self._near, self._identity

        def serve() -> None:
            near.close()
            _shut()
            _serve(far, Keeper(identity))

        self.pid = self._fork(serve)
        far.close()

    def guard(self) -> None:
        """Let messages of masked rounds be answered before any ClientApp of this process."""
        node = SecureNode(self)
        internals.guard_client_app(
            lambda message, context, app, load: answered(
                message, context, node, lambda m, c: load()(m, c)
            )
        )

    def __call__(self, request: str, *parts: bytes) -> bytes:
        """Ask the keeper over a connection of its own."""
        here, there = socket.socketpair()
        with here:
            here.settimeout(_PATIENCE)
            try:
                with there:
                    if self._near is not None:
                        socket.send_fds(self._near, [b"?"], [there.fileno()])
                _send(here, request.encode(), *parts)
                said, answer = _receive(here)
            except (OSError, ValueError) as error:
                raise ProtocolError("the keeper of this node does not answer") from error
        if said != b"ok":
            raise ProtocolError(answer.decode(errors="replace"))
        return answer


def _shut() -> None:
    """Let no core dump be made of this process, and nobody but root look into its memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def _serve(inbox: socket.socket, keeper: Keeper) -> None:
    while True:
        word, handles, _, _ = socket.recv_fds(inbox, 1, 4)
        if not word:
            return
        for handle in handles:
            with socket.socket(fileno=handle) as asked:
                asked.settimeout(_PATIENCE)
                try:
                    request, *parts = _receive(asked)
                    try:
                        _send(asked, b"ok", keeper(request.decode(), *parts))
                    except (FedquiltError, ValueError, TypeError, KeyError) as error:
                        told = isinstance(error, FedquiltError)
                        own = isinstance(error, (DataError, StorageError))  # names files of its own
                        if own:
                            log.error("this node keeps no account of its rounds: %s", error)
                        words = str(error) if told and not own else "not usable"
                        _send(asked, b"no", words.encode())
                except (OSError, ValueError):  # whoever asked has ended
                    continue


def _send(to: socket.socket, *parts: bytes) -> None:
    to.sendall(b"".join([_SIZE.pack(len(parts)), *(_SIZE.pack(len(p)) + p for p in parts)]))


def _receive(source: socket.socket) -> list[bytes]:
    def exactly(size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = source.recv(min(1 << 20, size - len(data)))
            if not more:
                raise ValueError("the other side has ended")
            data += more
        return bytes(data)

    (count,) = _SIZE.unpack(exactly(_SIZE.size))
    return [exactly(_SIZE.unpack(exactly(_SIZE.size))[0]) for _ in range(min(count, 16))]
