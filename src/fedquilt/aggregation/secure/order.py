"""What a round of secure aggregation is about, and what a client demands of it.

The server writes the `SumOrder`; every client checks it against what it knows by itself (`Member`)
before it does anything else, and its digest is in every key that the client derives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedquilt.aggregation.secure.primitives import ProtocolError, SigningKey, digest, verifying_key
from fedquilt.common.quorum import fewest
from fedquilt.common.randomness import secret_bytes


@dataclass(frozen=True, eq=False)
class SumOrder:
    """One round, as the server announces it; all of it is public.

    Parameters
    ----------
    run, round_index
        Which round of which run.
    task : bytes
        Digest of what clients are asked to do: the model they start from, the plan of the round.
        A client computes it by itself, from what it was sent.
    roster : mapping
        The clients of the round, each with its public key (`verifying_key`).
    least : int
        The fewest clients whose sum may be opened.
    colluding : int
        How many clients may side with the server without learning more than it.
    size, bits : int
        The length of a vector, and of each of its numbers.
    """

    run: str
    round_index: int
    task: bytes
    roster: Mapping[int, bytes]
    least: int
    colluding: int
    size: int
    bits: int

    @property
    def digest(self) -> bytes:
        """Of everything above."""
        known = (part for client in sorted(self.roster) for part in (client, self.roster[client]))
        numbers = (self.round_index, self.least, self.colluding, self.size, self.bits)
        return digest("fedquilt secure aggregation 2", self.run, self.task, *numbers, *known)


@dataclass(eq=False)
class Member:
    """One client over many rounds: its key, whom it knows, and what it insists on.

    It plays a round of a run once.  How many rounds and runs there are it does not count.

    Parameters
    ----------
    client : int
        Its place in rosters.
    known : mapping
        The public key of every client it may meet, itself included, from elsewhere than the
        server: whoever could add one could sit on both sides of a mask.
    smallest : int
        The fewest clients of a round that it takes part in.
    share : float
        The share of a round's clients whose sum may be opened, at least.
    colluding : int
        How many clients may side with the server.
    newest : dict
        The newest round that it has played, by run: what a member of long life writes down.
    """

    client: int
    known: Mapping[int, bytes]
    signing: SigningKey
    smallest: int = 2
    share: float = 0.5
    colluding: int = 0
    newest: dict[str, int] = field(default_factory=dict)

    def accept(self, order: SumOrder) -> None:
        """Take part in a round once, or say why not."""
        if order.roster.get(self.client) != verifying_key(self.signing):
            raise ProtocolError(f"the roster must have the key of client {self.client}")
        strangers = [c for c, key in order.roster.items() if self.known.get(c) != key]
        if strangers:
            raise ProtocolError(
                f"the roster must have known keys only, not another one for client {strangers[0]}"
            )
        count = len(order.roster)
        if count < self.smallest:
            raise ProtocolError(f"the roster has {count} clients and must have {self.smallest}")
        if order.colluding < self.colluding:
            raise ProtocolError(f"colluding={order.colluding} must be at least {self.colluding}")
        least = fewest(count, self.share, order.colluding)
        if not least <= order.least <= count:
            raise ProtocolError(f"least={order.least} must be from {least} to {count}")
        if not (1 <= order.bits <= 32 and order.size >= 1):
            raise ProtocolError(f"bits={order.bits} must be from 1 to 32, size={order.size} >= 1")
        if order.round_index <= self.newest.get(order.run, -1):
            raise ProtocolError(
                f"round {order.round_index} must be after round {self.newest[order.run]}: "
                "a round that is repeated may be opened twice"
            )
        self.newest.pop(order.run, None)  # the run that was last heard of stands last
        self.newest[order.run] = order.round_index


def new_signing_key() -> Ed25519PrivateKey:
    """Return a new key of a client."""
    return Ed25519PrivateKey.from_private_bytes(secret_bytes(32))
