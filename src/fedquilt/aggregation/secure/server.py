"""The server's side of one round of secure aggregation, without a transport.

It sorts letters, adds up, and removes the masks that the clients have opened.  Nothing rests on
its honesty: what it must not do, the clients refuse (`client.py`).

And little rests on that of single clients.  What a client sends that all others would refuse
(a key that it has not signed, a signature under another list) is left out here, and the client
with it.  A share counts if it has the tag that its dealer gave, so whoever answers with nothing,
or with anything else, changes nothing as long as `least` others answer.  What was opened is
compared with what its owner had signed before.  Where the sum stays closed for it, those who
have dealt shares of something else, or answered with others than they were dealt, are named.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedquilt.aggregation.secure.client import (
    Advert,
    Opened,
    SumOrder,
    agreement,
    commitment,
    is_advert_of,
    pair_mask,
    story,
)
from fedquilt.aggregation.secure.primitives import (
    SEALED_BYTES,
    TAG_BYTES,
    ProtocolError,
    combine,
    is_point,
    is_signed,
    key_stream,
    own_key,
    public_of,
    tag_of,
    unpack,
)


class FalseSharesError(ProtocolError):
    """Some clients have answered with false shares, or dealt them: the sum stays closed.

    Those of whose shares fewer than half are what their dealers gave have answered falsely, as
    long as most clients keep to the protocol.  Where enough others have answered, it is dealers:
    of shares of another secret, or of letters that nobody can open.
    """

    def __init__(self, clients: set[int]) -> None:
        self.clients = frozenset(clients)
        names = ", ".join(map(str, sorted(clients)))
        super().__init__(f"shares of client {names} must be of the secrets that were signed for")


class Server:
    """One round; each step takes what has arrived, from at least `order.least` clients."""

    def __init__(self, order: SumOrder) -> None:
        self.order = order
        self._salt = b""
        self.adverts: Mapping[int, Advert] = {}
        self.letters: Mapping[int, Mapping[int, bytes]] = {}
        self._total: NDArray[np.uint32] = np.zeros(order.size, dtype=np.uint32)
        self._senders: set[int] = set()

    def _enough(self, what: str, count: int) -> None:
        if count < self.order.least:
            raise ProtocolError(
                f"{what} of {count} clients must be of {self.order.least} at least: nothing of "
                "this round can be opened"
            )

    def take_adverts(self, adverts: Mapping[int, Advert]) -> Mapping[int, Advert]:
        """Return the list that everybody is sent: of those that nobody has to refuse."""
        self.adverts = {c: a for c, a in adverts.items() if self._is_usable(c, a)}
        self._enough("adverts", len(self.adverts))
        self._salt = story(self.order, self.adverts)
        return self.adverts

    def _is_usable(self, client: int, advert: Advert) -> bool:
        signed = client in self.order.roster and is_advert_of(self.order, client, advert)
        return signed and is_point(advert.letters) and is_point(advert.masks)

    def take_letters(self, letters: Mapping[int, Mapping[int, bytes]]) -> frozenset[int]:
        """Take the letters of each sender; return who has written to all others."""

        def is_whole(sender: int, written: Mapping[int, bytes]) -> bool:
            sizes = {c: 2 * TAG_BYTES + SEALED_BYTES * (c != sender) for c in self.adverts}
            return {c: len(letter) for c, letter in written.items()} == sizes

        self.letters = {c: w for c, w in letters.items() if c in self.adverts and is_whole(c, w)}
        self._enough("letters", len(self.letters))
        return frozenset(self.letters)

    def letters_to(self, client: int) -> dict[int, bytes]:
        """Return the letters that a client is sent: those of all who have written."""
        others = (sender for sender in self.letters if sender != client)
        return {sender: self.letters[sender][client][2 * TAG_BYTES :] for sender in others}

    def add(self, client: int, packed: bytes) -> None:
        """Add a masked vector to the sum; nothing of it is kept."""
        if client not in self.letters or client in self._senders:
            raise ProtocolError(f"client {client} must send one vector, after its letters")
        self._total += unpack(packed, self.order.size, self.order.bits)
        self._senders.add(client)

    @property
    def masked(self) -> NDArray[np.uint32]:
        """The sum under its masks: nothing to whoever cannot remove them."""
        return self._total

    def survivors(self) -> frozenset[int]:
        """Return the list that everybody is asked to sign."""
        self._enough("masked vectors", len(self._senders))
        return frozenset(self._senders)

    def take_signatures(self, signatures: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return those that everybody will accept."""
        message, roster = agreement(self._salt, self.letters, self._senders), self.order.roster
        return {
            client: signature
            for client, signature in signatures.items()
            if client in self._senders and is_signed(roster[client], signature, message)
        }

    def open(self, answers: Mapping[int, Opened]) -> NDArray[np.int64]:
        """Remove all masks; return the sum, from -2^(bits - 1) to 2^(bits - 1) - 1."""
        order, salt, adverts = self.order, self._salt, self.adverts
        given = {c: self._dealt(c, answer) for c, answer in answers.items() if c in self._senders}
        self._enough("shares", len(given))
        false = {c for c, shares in given.items() if 2 * len(shares) < len(self.letters)}
        if len(given) - len(false) < order.least:
            raise FalseSharesError(false)
        secrets = self._secrets(given)
        if closed := self.letters.keys() - secrets.keys():
            raise FalseSharesError(closed)
        total = self._total
        for sender in self._senders:
            total = total - key_stream(own_key(secrets[sender], salt), order.size, order.bits)
        for gone in self.letters.keys() - self._senders:
            for client in self._senders:
                public, pair = adverts[client].masks, (client, gone)
                mask = pair_mask(order, salt, secrets[gone], public, pair)
                total = total - mask if client < gone else total + mask
        return centred(total, order.bits)

    def _dealt(self, client: int, answer: Opened) -> dict[int, bytes]:
        """Return the shares of an answer that are what their dealers gave to its client."""
        found = {}
        for dealer, letters in self.letters.items():
            survived = dealer in self._senders
            kind, start = ("seeds", 0) if survived else ("keys", TAG_BYTES)
            share = (answer.seeds if survived else answer.keys).get(dealer, b"")
            if tag_of(share, dealer, kind) == letters[client][start : start + TAG_BYTES]:
                found[dealer] = share
        return found

    def _secrets(self, given: Mapping[int, Mapping[int, bytes]]) -> dict[int, bytes]:
        """Return the secrets of dealers: those that are what their dealer had signed for."""
        found, place = {}, {client: k for k, client in enumerate(sorted(self.adverts), start=1)}
        for dealer in self.letters:
            having = [client for client in sorted(given) if dealer in given[client]]
            if len(having) < self.order.least:
                continue
            secret = combine({place[c]: given[c][dealer] for c in having[: self.order.least]})
            if secret is not None and self._is_right(dealer, secret):
                found[dealer] = secret
        return found

    def _is_right(self, dealer: int, secret: bytes) -> bool:
        advert = self.adverts[dealer]
        if dealer in self._senders:
            return commitment(secret) == advert.seed
        return public_of(secret) == advert.masks


def centred(numbers: NDArray[np.uint32], bits: int) -> NDArray[np.int64]:
    """Return numbers modulo 2^bits as the nearest to zero."""
    half = 1 << (bits - 1)
    wrapped = (numbers.astype(np.int64) + half) & ((1 << bits) - 1)
    return np.asarray(wrapped - half)
