"""Which node is which client.

A node's number changes with a new database of the SuperLink, and at every start of a node
without a key.  Its key stays.  So a client is known by the SHA-256 of its public key (the
DER form), and its account in the ledger has the fingerprint of its first key for a name:
whoever comes back, under whatever number, finds the same account, and nobody else's.

A run names its clients in the ledger when it begins, and the ledger lets it charge nobody
else.  So whoever is to join a run that goes on needs an account that the run has named: a
*reserved slot* (`fedquilt flower seats` adds some), which has a random name until a client
takes it, and keeps that name for ever.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.common.schema import TEXT, ListOf, MapOf, Object, check
from fedquilt.common.storage import write_file
from fedquilt.common.untrusted import read_json

log = logging.getLogger(__name__)

_PREFIX, _SLOT = "key:", "seat:"
_ASK_SECONDS = 60.0
_ROSTER = Object({"clients": MapOf(ListOf(TEXT))}, {"revoked": ListOf(TEXT)})
_ROSTER_BYTES = 1 << 26


def key_fingerprint(public_key: bytes) -> str:
    """Return what stands for a public key: `key:` and the SHA-256 of its DER form.

    The key may be PEM, or a line of an OpenSSH `.pub` file.
    """
    return der_fingerprint(public_der(public_key))


def der_fingerprint(der: bytes) -> str:
    """Return what stands for a public key in its DER form."""
    return _PREFIX + base64.b16encode(hashlib.sha256(der).digest()).decode().lower()


def public_der(public_key: bytes) -> bytes:
    """Return the DER form of a public key, which may be PEM or of OpenSSH."""
    from cryptography.hazmat.primitives import serialization

    text = bytes(public_key).strip()
    try:
        if text.startswith(b"-----BEGIN"):
            key = serialization.load_pem_public_key(text)
        else:
            key = serialization.load_ssh_public_key(text)
    except (ValueError, TypeError) as error:
        raise InvalidValueError(f"a public key cannot be read: {error}") from error
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_bytes(serialization.Encoding.DER, form))


@dataclass(frozen=True)
class NodeRoster:
    """The clients of a federation: a name for people, and the fingerprints of its keys.

    The first entry of a client is its account in the ledger for ever: the fingerprint of its
    first key, or the slot that it has taken.  A new key is added behind it (`fedquilt flower
    rotate`), so that it is no new allowance.

    Parameters
    ----------
    keys
        The account and the further keys of every client, in the order of their numbers.
    revoked
        Fingerprints of keys that no longer count; an account may be among them.
    """

    keys: Mapping[str, tuple[str, ...]]
    revoked: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        if not self.keys:
            raise InvalidValueError("a roster must name at least one client")
        for name, prints in self.keys.items():
            if not prints:
                raise InvalidValueError(f"client {name!r} of the roster must have a fingerprint")
            for place, value in enumerate(prints):
                _check_form(name, value, first=place == 0)
                if seen.setdefault(value, name) != name:
                    raise InvalidValueError(
                        f"fingerprint {value!r} must be of one client, not of {seen[value]!r} "
                        f"and {name!r}"
                    )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the clients, in the order of their numbers in a run."""
        return tuple(self.keys)

    @property
    def client_ids(self) -> tuple[str, ...]:
        """What each client is called in the ledger."""
        return tuple(prints[0] for prints in self.keys.values())

    @property
    def reserved_slots(self) -> tuple[str, ...]:
        """The names of the reserved slots that nobody has taken."""
        return tuple(
            name
            for name, prints in self.keys.items()
            if len(prints) == 1 and prints[0].startswith(_SLOT)
        )

    def client_of(self) -> dict[str, int]:
        """Return the number of the client behind each key that counts."""
        return {
            value: number
            for number, prints in enumerate(self.keys.values())
            for value in prints
            if value not in self.revoked
        }

    def with_key(self, name: str, value: str) -> NodeRoster:
        """Return the roster with a client's new key, or with a new client."""
        prints = tuple(p for p in self.keys.get(name, ()) if p != value)
        first = value == (self.keys.get(name) or (None,))[0]
        kept = {**self.keys, name: (value, *prints) if first else (*prints, value)}
        return replace(self, keys=kept)

    def rotated(self, name: str, value: str) -> NodeRoster:
        """Return the roster with a client's new key, and none of its others any more."""
        if name not in self.keys or name in self.reserved_slots:
            raise InvalidValueError(
                f"client {name!r} must be one of {', '.join(map(repr, self.names))}, and no "
                "free slot"
            )
        self._check_unused(value)
        old = frozenset(self._keys_of(name))
        return replace(self.with_key(name, value), revoked=self.revoked | old)

    def without_keys_of(self, name: str) -> NodeRoster:
        """Return the roster in which no key of a client counts; its account stays."""
        if name not in self.keys or name in self.reserved_slots:
            raise InvalidValueError(
                f"client {name!r} must be one of {', '.join(map(repr, self.names))}, and no "
                "free slot"
            )
        return replace(self, revoked=self.revoked | frozenset(self._keys_of(name)))

    def is_revoked(self, name: str) -> bool:
        """Tell whether a client that had a key has none any more that counts."""
        keys = self._keys_of(name)
        return bool(keys) and self.revoked.issuperset(keys)

    def current_key(self, name: str) -> str:
        """Return the newest key of a client; the account of a free slot."""
        return (self._keys_of(name) or self.keys[name])[-1]

    def _keys_of(self, name: str) -> tuple[str, ...]:
        return tuple(value for value in self.keys[name] if value.startswith(_PREFIX))

    def with_client(self, name: str, value: str) -> NodeRoster:
        """Return the roster with a new client, at a free slot where there is one."""
        if name in self.keys:
            raise InvalidValueError(
                f"client {name!r} must be new: it is in the roster, with an account of its own "
                "(a new key: `fedquilt flower rotate`)"
            )
        self._check_unused(value)
        if not self.reserved_slots:
            return self.with_key(name, value)
        slot = self.reserved_slots[0]
        taken = {
            name if other == slot else other: (*prints, value) if other == slot else prints
            for other, prints in self.keys.items()
        }
        return replace(self, keys=taken)

    def with_reserved_slots(self, count: int) -> NodeRoster:
        """Return the roster with so many more accounts for clients that are yet to come."""
        new = [_SLOT + secrets.token_hex(32) for _ in range(count)]
        slots = {f"seat-{value[len(_SLOT) :][:8]}": (value,) for value in new}
        return replace(self, keys={**self.keys, **slots})

    def first(self, count: int) -> NodeRoster:
        """Return the roster of the first clients: those of a run that began before others came."""
        return replace(self, keys=dict(itertools.islice(self.keys.items(), count)))

    def _check_unused(self, value: str) -> None:
        if value in self.revoked or any(value in prints for prints in self.keys.values()):
            raise InvalidValueError(f"key {value!r} must be new: the roster has it already")

    @classmethod
    def read(cls, path: str | Path) -> NodeRoster:
        """Read a roster file: JSON, {"clients": {name: [account, key, ...]}, "revoked": [key]}."""
        record = read_json(Path(path), InvalidValueError, _ROSTER_BYTES)
        check(record, _ROSTER, path, InvalidValueError)
        keys = {name: tuple(prints) for name, prints in record["clients"].items()}
        return cls(keys, frozenset(record.get("revoked", ())))

    def write(self, path: str | Path) -> None:
        """Write the roster, whole or not at all, for its owner alone.

        What root writes is the folder's owner's: the user whose server reads it.
        """
        record: dict[str, Any] = {"clients": {name: list(v) for name, v in self.keys.items()}}
        if self.revoked:
            record["revoked"] = sorted(self.revoked)
        path = Path(path)
        write_file(path, (json.dumps(record, indent=2) + "\n").encode(), 0o600)
        if os.geteuid() == 0:
            folder = path.parent.stat()
            os.chown(path, folder.st_uid, folder.st_gid)


def _check_form(name: str, value: str, *, first: bool) -> None:
    for prefix in (_PREFIX, _SLOT) if first else (_PREFIX,):
        if re.fullmatch(f"{prefix}[0-9a-f]{{64}}", value):
            return
    raise InvalidValueError(
        f"fingerprint {value[:80]!r} of client {name[:80]!r} must be {_PREFIX!r} and 64 "
        "hexadecimal digits"
    )


class ClientRegistry(Protocol):
    """Who is connected."""

    num_clients: int
    roster_text: str
    """Names and accounts of the run's clients, as orders tell them; "" where there are none."""

    def nodes(self) -> dict[int, int]:
        """Return the node of every client that can be asked now."""


class KeyRegistry:
    """Finds clients by the keys of their nodes; a node without one of these is nobody.

    Parameters
    ----------
    roster : NodeRoster
        The clients of the run; it has these and no others.
    path : path, optional
        The roster's file.  When it changes, new keys of these clients count from the next
        round, revoked ones no longer, and a client whose line is gone is not asked.
    """

    def __init__(self, grid: Grid, roster: NodeRoster, path: str | Path | None = None) -> None:
        self._grid = grid
        self._number = {account: place for place, account in enumerate(roster.client_ids)}
        self._client_of = roster.client_of()
        self.names = list(roster.names)
        self._path = None if path is None else Path(path)
        self._read_at: int | None = None
        self._prints: dict[bytes, str | None] = {}
        self.num_clients = len(roster.keys)
        self.roster_text = json.dumps(dict(zip(roster.names, roster.client_ids, strict=True)))

    @property
    def accounts(self) -> dict[str, str]:
        """What people call the clients of the run, by their ids in the ledger."""
        return {account: self.names[place] for account, place in self._number.items()}

    def nodes(self) -> dict[int, int]:
        """Return the newest node of every client that is connected."""
        self._read_again()
        found: dict[int, Any] = {}
        for node in self._grid.get_nodes():
            client = self._client_of.get(self._fingerprint(bytes(node.public_key)) or "")
            if client is None or (node.status and node.status != "online"):
                continue
            if client not in found or node.online_until >= found[client].online_until:
                found[client] = node
        return {client: int(node.node_id) for client, node in sorted(found.items())}

    def _read_again(self) -> None:
        """Learn of new keys; a file that cannot be read changes nothing."""
        if self._path is None:
            return
        try:
            changed = self._path.stat().st_mtime_ns
            if changed == self._read_at:
                return
            roster = NodeRoster.read(self._path)
        except (OSError, FedquiltError) as error:
            log.warning("the roster cannot be read, and its keys stay as they were: %s", error)
            return
        self._read_at = changed
        accounts = roster.client_ids
        for account, name in zip(accounts, roster.names, strict=True):
            if account in self._number:  # whoever takes a seat gives it a name
                self.names[self._number[account]] = name
        self._client_of = {
            value: self._number[accounts[place]]
            for value, place in roster.client_of().items()
            if accounts[place] in self._number
        }

    def _fingerprint(self, public_key: bytes) -> str | None:
        if public_key not in self._prints:
            try:
                self._prints[public_key] = key_fingerprint(public_key) if public_key else None
            except InvalidValueError:
                self._prints[public_key] = None
        return self._prints[public_key]


class PlaceRegistry:
    """Asks every node of a simulation for its `partition-id`, once.

    Anybody can claim a place: this is for simulations, where all nodes are of one process.
    """

    roster_text = ""

    def __init__(self, grid: Grid, num_clients: int, poll: float = 0.05) -> None:
        self._grid = grid
        self._poll = poll
        self._places: dict[int, int] = {}
        self.num_clients = num_clients

    def nodes(self) -> dict[int, int]:
        """Return the node of every place."""
        present = set(self._grid.get_node_ids())
        new = sorted(present - self._places.keys())
        if new:
            self._ask(new)
        return {place: node for node, place in self._places.items() if node in present}

    def _ask(self, nodes: Sequence[int]) -> None:
        content = RecordDict({"config": ConfigRecord({"ask": "partition-id"})})
        orders = [Message(content, node, MessageType.QUERY, ttl=_ASK_SECONDS) for node in nodes]
        waiting = {key for key in self._grid.push_messages(orders) if key}
        until = time.monotonic() + _ASK_SECONDS
        while waiting and time.monotonic() < until:
            replies = list(self._grid.pull_messages(waiting))
            for reply in replies:
                waiting.discard(reply.metadata.reply_to_message_id)
                self._take(reply)
            if not replies:
                time.sleep(self._poll)

    def _take(self, reply: Message) -> None:
        if reply.has_error():
            log.warning("a node could not say which place it has")
            return
        place = reply.content["config"].get("partition-id")
        if isinstance(place, int) and 0 <= place < self.num_clients:
            self._places[reply.metadata.src_node_id] = place


def roster_of_keys(keys: Iterable[tuple[str, bytes]]) -> NodeRoster:
    """Return the roster of named public keys."""
    return NodeRoster({name: (key_fingerprint(key),) for name, key in keys})


# Their earlier names, which programs of others may import.
KeyDirectory, PlaceDirectory = KeyRegistry, PlaceRegistry
