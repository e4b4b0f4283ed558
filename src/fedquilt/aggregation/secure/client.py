"""A client's side of one round of secure aggregation, without a transport: order, then steps.

    advertise   -> its two public keys of this round, signed
    share       -> a sealed letter to each peer, a share of each of its two secrets, and beside
                   it a tag of each share for the server, which forwards none
    mask        -> its vector under all masks
    agree       -> its signature under the list of survivors
    unmask      -> of every peer one share: of the own mask's seed if the peer survived, of the
                   key of its pairwise masks if it did not

Each is called once and in this order.  Whatever is refused ends the client's part: its secrets
are dropped, and it answers nothing more.  One thing is no reason to: a letter that cannot be
opened.  The masks rest on the keys that everybody has signed, not on letters, so the client sends
exactly what it would have sent, and later only has no share of that peer to give: it reveals less,
whoever has spoilt the letter, and can be led to reveal nothing else.

The server writes the `SumOrder`; every client checks it against what it knows by itself (`Member`)
before it does anything else, and its digest is in every key that the client derives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedquilt.aggregation.secure.primitives import (
    SECRET_BYTES,
    SHARE_BYTES,
    ProtocolError,
    Secret,
    SigningKey,
    digest,
    is_signed,
    key_stream,
    listed,
    own_key,
    pack,
    pair_key,
    public_of,
    seal,
    share,
    sign,
    tag_of,
    unseal,
    verifying_key,
)
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


Given = ParamSpec("Given")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Advert:
    """The public keys of a client in one round: for letters, for masks, and its signature.

    `seed` commits it to the seed of its own mask: SHA-256 of 256 random bits hides them.
    """

    letters: bytes
    masks: bytes
    seed: bytes
    signature: bytes


@dataclass(frozen=True)
class Opened:
    """What a client lets the server open: shares by peer, of survivors and of the others."""

    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]


_STEPS = ("advertise", "share", "mask", "agree", "unmask", "over")


def _in_order(
    step: Callable[Concatenate[MaskingClient, Given], Answer],
) -> Callable[Concatenate[MaskingClient, Given], Answer]:
    """Let a step be called once, after the one before it; a refusal is the end."""

    def checked(self: MaskingClient, /, *args: Given.args, **kwargs: Given.kwargs) -> Answer:
        wanted, self._next = self._next, "over"
        try:
            if step.__name__ != wanted:
                raise ProtocolError(f"{step.__name__} must come at its turn, which is {wanted!r}")
            answer = step(self, *args, **kwargs)
        except BaseException:
            self.forget()
            raise
        self._next = _STEPS[_STEPS.index(wanted) + 1]
        if self._next == "over":
            self.forget()
        return answer

    checked.__name__, checked.__doc__ = step.__name__, step.__doc__
    return checked


class MaskingClient:
    """One client in one round.  Its order has been accepted (`Member.accept`)."""

    def __init__(self, member: Member, order: SumOrder) -> None:
        member.accept(order)
        self.client, self._order, self._signing = member.client, order, member.signing
        self._next = _STEPS[0]
        self._letter_key, self._mask_key, self._seed = (
            bytearray(secret_bytes(SECRET_BYTES)) for _ in range(3)
        )
        self._salt = b""
        self._adverts: Mapping[int, Advert] = {}
        self._writers: frozenset[int] = frozenset()
        self._held: dict[int, bytearray] = {}
        self._survivors: frozenset[int] = frozenset()

    @property
    def num_survivors(self) -> int:
        """How many are on the list that this client has signed."""
        return len(self._survivors)

    def forget(self) -> None:
        """Overwrite every secret that lasts from step to step.

        What a step made on its way (keys of pairs, masks, shares as they went out, and what
        libraries hold) is immutable, and freed with the step.
        """
        for secret in (self._letter_key, self._mask_key, self._seed, *self._held.values()):
            secret[:] = bytes(len(secret))
        self._held.clear()

    @_in_order
    def advertise(self) -> Advert:
        """Return the public keys of the round."""
        letters, masks = public_of(self._letter_key), public_of(self._mask_key)
        seed = commitment(self._seed)
        message = advert_message(self._order, self.client, letters, masks, seed)
        return Advert(letters, masks, seed, sign(self._signing, message))

    @_in_order
    def share(self, adverts: Mapping[int, Advert]) -> dict[int, bytes]:
        """Check who takes part; return two tags for each of them, and a sealed letter."""
        self._check_adverts(adverts)
        self._adverts, self._salt = dict(adverts), story(self._order, adverts)
        peers = sorted(adverts)
        places = range(1, len(peers) + 1)
        seeds = share(self._seed, places, self._order.least)
        keys = share(self._mask_key, places, self._order.least)
        letters = {}
        for peer, seed, key in zip(peers, seeds, keys, strict=True):
            letters[peer] = tag_of(seed, self.client, "seeds") + tag_of(key, self.client, "keys")
            if peer == self.client:
                self._held[peer] = bytearray(seed + key)
            else:
                about = digest(self._salt, self.client, peer)
                letters[peer] += seal(self._letter_to(peer, self.client, peer), seed + key, about)
        return letters

    def _check_adverts(self, adverts: Mapping[int, Advert]) -> None:
        order = self._order
        _check_list("adverts", adverts, order.roster, order.least, self.client)
        for peer, advert in adverts.items():
            if not is_advert_of(order, peer, advert):
                raise ProtocolError(f"the advert of client {peer} must have its signature")
        own = adverts[self.client]
        if (own.letters, own.masks) != (public_of(self._letter_key), public_of(self._mask_key)):
            raise ProtocolError("the advert of this client must be its own")

    def _letter_to(self, peer: int, sender: int, receiver: int) -> bytes:
        """Return the key of the one letter from sender to receiver."""
        public = self._adverts[peer].letters
        return pair_key(self._letter_key, public, self._salt, f"letter {sender} {receiver}")

    @_in_order
    def mask(self, letters: Mapping[int, bytes], vector: NDArray[np.int64]) -> bytes:
        """Open the letters of the others, and return the vector under all masks.

        y = x + PRG(own) + sum over peers v of +-PRG(pair), modulo 2^bits: of each pair the
        client with the smaller number adds what the other one subtracts.
        """
        order = self._order
        if self.client in letters:
            raise ProtocolError("nobody writes letters to itself")
        self._writers = frozenset({*letters, self.client})
        _check_list("letters", self._writers, self._adverts, order.least, self.client)
        if vector.shape != (order.size,):
            raise ProtocolError(f"a vector of {vector.size} numbers must have {order.size}")
        for peer, sealed in letters.items():
            self._open_letter(peer, sealed)
        if len(self._held) < order.least:
            raise ProtocolError(
                f"letters of {len(self._held)} clients can be opened, and those of {order.least} "
                "must: the others were told another story"
            )
        total = vector.astype(np.uint32)  # modulo 2^32, hence modulo 2^bits
        total += key_stream(own_key(self._seed, self._salt), order.size, order.bits)
        for peer in letters:
            public, pair = self._adverts[peer].masks, (self.client, peer)
            mask = pair_mask(order, self._salt, self._mask_key, public, pair)
            total = total + mask if self.client < peer else total - mask
        return pack(total & np.uint32(2**order.bits - 1), order.bits)

    def _open_letter(self, peer: int, sealed: bytes) -> None:
        """Hold the shares of a peer; none where its letter does not hold them."""
        key = self._letter_to(peer, peer, self.client)
        try:
            held = unseal(key, sealed, digest(self._salt, peer, self.client))
        except ProtocolError:
            return
        if len(held) == 2 * SHARE_BYTES:
            self._held[peer] = bytearray(held)

    @_in_order
    def agree(self, survivors: frozenset[int]) -> bytes:
        """Check the list of those whose masked vectors arrived, and sign it."""
        order = self._order
        _check_list("survivors", survivors, self._writers, order.least, self.client)
        self._survivors = frozenset(survivors)
        return sign(self._signing, agreement(self._salt, self._writers, survivors))

    @_in_order
    def unmask(self, signatures: Mapping[int, bytes]) -> Opened:
        """Return one share of each peer that has dealt it, if enough have signed the same list.

        Which secret is opened follows from the list that this client has signed: nobody can
        ask for both, or name a client as a survivor and as lost.
        """
        order = self._order
        _check_list("signatures", signatures, self._survivors, order.least, self.client)
        message = agreement(self._salt, self._writers, self._survivors)
        for peer, signature in signatures.items():
            if not is_signed(order.roster[peer], signature, message):
                raise ProtocolError(f"client {peer} must have signed the list of survivors")
        split = {c: (bytes(h[:SHARE_BYTES]), bytes(h[SHARE_BYTES:])) for c, h in self._held.items()}
        alive = {peer: parts[0] for peer, parts in split.items() if peer in self._survivors}
        lost = {peer: parts[1] for peer, parts in split.items() if peer not in self._survivors}
        return Opened(alive, lost)


def _check_list(what: str, given: Any, known: Any, least: int, client: int) -> None:
    """Refuse a list with strangers, with too few, or without this client itself."""
    strangers = sorted(set(given) - set(known))
    if strangers:
        raise ProtocolError(f"{what} must be of clients of the step before, not of {strangers[0]}")
    if len(given) < least:
        raise ProtocolError(f"{what} of {len(given)} clients must be of {least} at least")
    if client not in given:
        raise ProtocolError(f"{what} must include this client, {client}")


def commitment(seed: Secret) -> bytes:
    """Return what commits a client to its seed."""
    return digest("seed", bytes(seed))


def advert_message(
    order: SumOrder, client: int, letters: bytes, masks: bytes, seed: bytes
) -> bytes:
    """Return what a client signs of its keys."""
    return digest("advert", order.digest, client, letters, masks, seed)


def is_advert_of(order: SumOrder, client: int, advert: Advert) -> bool:
    """Tell whether a client has signed these keys for this very order."""
    message = advert_message(order, client, advert.letters, advert.masks, advert.seed)
    return is_signed(order.roster[client], advert.signature, message)


def story(order: SumOrder, adverts: Mapping[int, Advert]) -> bytes:
    """Return the digest of all that a client was told before it derived a key."""
    told = ((c, a.letters, a.masks, a.seed) for c, a in sorted(adverts.items()))
    return digest("story", order.digest, *(part for advert in told for part in advert))


def agreement(salt: bytes, senders: Any, survivors: Any) -> bytes:
    """Return what clients sign of who sent letters and whose vectors arrived."""
    return digest("survivors", salt, listed(senders), listed(survivors))


def pair_mask(
    order: SumOrder, salt: bytes, private: Secret, public: bytes, pair: tuple[int, int]
) -> NDArray[np.uint32]:
    """Return the mask of a pair of clients, from the private key of one of them.

    It is the pair's own: one X25519 secret has several public keys (a point and that point plus
    one of small order, or another sign bit), so a client may hold a twin of another one's key
    without its secret, and masks that followed from the secret alone would cancel in a third.
    """
    key = pair_key(private, public, salt, f"mask {listed(pair)}")
    return key_stream(key, order.size, order.bits)
