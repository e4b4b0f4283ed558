"""Which node is which client.

A node's number changes with a new database of the SuperLink, and at every start of a node
without a key.  Its key stays.  So a client is known by the SHA-256 of its public key (the
DER form), and its account in the ledger has the fingerprint of its first key for a name:
whoever comes back, under whatever number, finds the same account, and nobody else's.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.storage import write_file
from fedquilt.common.untrusted import read_json

log = logging.getLogger(__name__)

_PREFIX = "key:"
_ASK_SECONDS = 60.0


def fingerprint(public_key: bytes) -> str:
    """Return what stands for a public key: `key:` and the SHA-256 of its DER form.

    The key may be PEM, or a line of an OpenSSH `.pub` file.
    """
    from cryptography.hazmat.primitives import serialization

    text = bytes(public_key).strip()
    try:
        if text.startswith(b"-----BEGIN"):
            key = serialization.load_pem_public_key(text)
        else:
            key = serialization.load_ssh_public_key(text)
    except (ValueError, TypeError) as error:
        raise InvalidValueError(f"a public key cannot be read: {error}") from error
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return _PREFIX + base64.b16encode(hashlib.sha256(der).digest()).decode().lower()


@dataclass(frozen=True)
class NodeRoster:
    """The clients of a federation: a name for people, and the fingerprints of its keys.

    The first fingerprint is the client's account in the ledger for ever; a new key is added
    behind it (`fedquilt flower rotate`), so that it is no new allowance.
    """

    keys: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        if not self.keys:
            raise InvalidValueError("a roster must name at least one client")
        for name, prints in self.keys.items():
            if not prints:
                raise InvalidValueError(f"client {name!r} of the roster must have a fingerprint")
            for value in prints:
                if not value.startswith(_PREFIX) or len(value) != len(_PREFIX) + 64:
                    raise InvalidValueError(
                        f"fingerprint {value!r} of client {name!r} must be {_PREFIX!r} and "
                        "64 hexadecimal digits"
                    )
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

    def client_of(self) -> dict[str, int]:
        """Return the number of the client behind each fingerprint."""
        return {
            value: number for number, prints in enumerate(self.keys.values()) for value in prints
        }

    def with_key(self, name: str, value: str) -> NodeRoster:
        """Return the roster with a client's new key, or with a new client."""
        prints = tuple(p for p in self.keys.get(name, ()) if p != value)
        first = value == (self.keys.get(name) or (None,))[0]
        return NodeRoster({**self.keys, name: (value, *prints) if first else (*prints, value)})

    @classmethod
    def read(cls, path: str | Path) -> NodeRoster:
        """Read a roster file: JSON, {"clients": {name: [fingerprint, ...]}}."""
        record = read_json(Path(path), InvalidValueError)
        clients = record.get("clients")
        if not isinstance(clients, dict):
            raise InvalidValueError(f"roster {str(path)!r} must hold a table 'clients'")
        return cls({str(name): tuple(map(str, prints)) for name, prints in clients.items()})

    def write(self, path: str | Path) -> None:
        """Write the roster, whole or not at all."""
        record = {"clients": {name: list(prints) for name, prints in self.keys.items()}}
        write_file(Path(path), (json.dumps(record, indent=2) + "\n").encode())


class Directory(Protocol):
    """Who is connected."""

    num_clients: int

    def nodes(self) -> dict[int, int]:
        """Return the node of every client that can be asked now."""


class KeyDirectory:
    """Finds clients by the keys of their nodes; a node without one of these is nobody."""

    def __init__(self, grid: Grid, roster: NodeRoster) -> None:
        self._grid = grid
        self._client_of = roster.client_of()
        self._prints: dict[bytes, str | None] = {}
        self.num_clients = len(roster.keys)

    def nodes(self) -> dict[int, int]:
        """Return the newest node of every client that is connected."""
        found: dict[int, Any] = {}
        for node in self._grid.get_nodes():
            client = self._client_of.get(self._fingerprint(bytes(node.public_key)) or "")
            if client is None or (node.status and node.status != "online"):
                continue
            if client not in found or node.online_until >= found[client].online_until:
                found[client] = node
        return {client: int(node.node_id) for client, node in sorted(found.items())}

    def _fingerprint(self, public_key: bytes) -> str | None:
        if public_key not in self._prints:
            try:
                self._prints[public_key] = fingerprint(public_key) if public_key else None
            except InvalidValueError:
                self._prints[public_key] = None
        return self._prints[public_key]


class PlaceDirectory:
    """Asks every node of a simulation for its `partition-id`, once.

    Anybody can claim a place: this is for simulations, where all nodes are of one process.
    """

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
    return NodeRoster({name: (fingerprint(key),) for name, key in keys})
