"""Every trick of a server is refused, and succeeds on a version with that check taken out.

Below the table the flaws of other implementations, each shown on ours with the same flaw put in:
Flower's masks of 28-bit keys, keys that nobody has signed, and lists of active and dead clients
that overlap; OpenFL's one number for a whole model, and its private keys at the aggregator;
FedML's public keys that are secret keys, from a generator seeded by rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from secure_samples import Party, hashed, integers, play

from fedquilt.aggregation.secure import client as client_module
from fedquilt.aggregation.secure import primitives
from fedquilt.aggregation.secure.client import (
    MaskingClient,
    Member,
    Opened,
    SumOrder,
    pair_mask,
    story,
)
from fedquilt.aggregation.secure.primitives import (
    ProtocolError,
    combine,
    key_stream,
    new_signing_key,
    own_key,
    public_of,
    unpack,
    verifying_key,
)
from fedquilt.aggregation.secure.server import Server, centred
from mutants import take_out


class Careless(Server):
    """A server that does not care how many there are."""

    def _enough(self, what: str, count: int) -> None:
        pass


def replayed() -> bool:
    """Open the sum of one round twice, with other noise."""
    party, vectors = Party.of(3), integers(3, 40)
    sums = [play(o, party.clients(o), vectors) for o in (party.order(least=2) for _ in range(2))]
    return np.array_equal(*sums)


def of_fewer(party: Party, who: range, **changes: Any) -> bool:
    """Open a sum of few; all others are not asked or have gone."""
    order = party.order(**changes)
    if len(who) < len(order.roster) and "least" in changes and changes["least"] < 3:
        order = dataclasses.replace(order, roster={c: order.roster[c] for c in who})
    clients, vectors = party.clients(order), integers(6, 40)
    found = play(order, clients, vectors, {"mask": set(order.roster) - set(who)})
    return np.array_equal(found, sum(vectors[c] for c in who))


def sybil(place: int) -> bool:
    """Let the server be client `place`, under a key of its own."""
    party, own = Party.of(4), new_signing_key()
    honest = party.order(least=3)
    order = dataclasses.replace(honest, roster={**honest.roster, place: verifying_key(own)})
    clients = {c: MaskingClient(party.members[c], order) for c in range(4) if c != place}
    clients[place] = MaskingClient(Member(place, order.roster, own), order)
    play(order, clients, integers(5, 40))
    return True


def begun(count: int = 3, **changes: Any) -> tuple[SumOrder, dict[int, MaskingClient], Any]:
    party = Party.of(count)
    order = party.order(**{"least": 2, **changes})
    clients = party.clients(order)
    return order, clients, {c: x.advertise() for c, x in clients.items()}


def man_in_between() -> bool:
    """Read a letter by a key of the server's in the place of client 1's."""
    order, clients, adverts = begun()
    private = hashed(1, 32)
    forged = {**adverts, 1: dataclasses.replace(adverts[1], letters=public_of(private))}
    sealed = clients[0].share(forged)[1][2 * primitives.TAG_BYTES :]
    salt = story(order, forged)
    key = primitives.pair_key(private, adverts[0].letters, salt, "letter 0 1")
    return len(primitives.unseal(key, sealed, primitives.digest(salt, 0, 1))) == 66


def old_transcript() -> bool:
    """Let client 0 mask with a key of client 2 that was opened in the round before."""
    party, opened = Party.of(3), list[dict[int, Opened]]()
    first, second = party.order(least=2), party.order(least=2, round_index=1)
    clients = party.clients(first)
    old: Any = {}
    for c, client in clients.items():
        old[c] = advert = client.advertise()
        client.advertise = lambda advert=advert: advert  # type: ignore[method-assign, misc]
    watch: Callable[[str, Any], None] = lambda s, seen: s == "unmask" and opened.append(seen)  # type: ignore[assignment, return-value]  # noqa: E731
    play(first, clients, integers(3, 40), {"mask": {2}}, watch)
    private = combine({c + 1: answer.keys[2] for c, answer in opened[0].items()})
    assert private is not None
    again = party.clients(second)
    adverts = {0: again[0].advertise(), 1: again[1].advertise(), 2: old[2]}
    again[0].share(adverts)
    salt = story(second, adverts)
    mine = pair_mask(second, salt, again[0]._mask_key, old[2].masks, (0, 2))
    return np.array_equal(mine, pair_mask(second, salt, private, adverts[0].masks, (0, 2)))


def not_its_own() -> bool:
    """Tell client 0 of keys that it had in a life before."""
    party = Party.of(3)
    order = party.order(least=2)
    adverts = {c: x.advertise() for c, x in party.clients(order).items()}
    party.members[0].newest.clear()
    now = MaskingClient(party.members[0], order)
    now.advertise()
    return bool(now.share(adverts))


def to_oneself() -> bool:
    order, clients, adverts = begun()
    written = {c: x.share(adverts) for c, x in clients.items()}
    letters = {c: written[c][0][2 * primitives.TAG_BYTES :] for c in (1, 2)}
    return bool(clients[0].mask({**letters, 0: letters[1]}, np.zeros(order.size, dtype=np.int64)))


def masked(order: SumOrder, clients: dict[int, MaskingClient], adverts: Any) -> Server:
    server = Careless(order)
    server.take_adverts(adverts)
    server.take_letters({c: x.share(adverts) for c, x in clients.items()})
    for c, client in clients.items():
        server.add(c, client.mask(server.letters_to(c), integers(6, order.size)[c]))
    return server


def masked_twice() -> bool:
    """Learn the difference of two vectors under the same masks."""
    order, clients, adverts = begun()
    server = masked(order, {c: clients[c] for c in (0, 1, 2)}, adverts)
    views = [
        unpack(clients[0].mask(server.letters_to(0), vector), order.size, order.bits)
        for vector in (np.arange(order.size), np.zeros(order.size, dtype=np.int64))
    ]
    return np.array_equal(centred(views[0] - views[1], order.bits), np.arange(order.size))


def told_of(who: set[int]) -> bool:
    """Let client 0 sign a list of survivors."""
    order, clients, adverts = begun(5, least=3)
    masked(order, clients, adverts)
    return bool(clients[0].agree(frozenset(who)))


def active_and_dead() -> bool:
    """Open both secrets of client 3: some hear that it survived, some that it did not."""
    order, clients, adverts = begun(5, least=3)
    masked(order, clients, adverts)
    stories = {0: {0, 1, 2, 3}, 1: {0, 1, 2, 3}, 2: {0, 1, 2}, 3: {0, 1, 2, 3}}
    signed = {c: clients[c].agree(frozenset(told)) for c, told in stories.items()}
    answers = [
        clients[c].unmask({k: v for k, v in signed.items() if k in stories[c]}) for c in (0, 1, 2)
    ]
    return any(3 in a.seeds for a in answers) and any(3 in a.keys for a in answers)


def unsigned() -> bool:
    """Open shares for signatures of too few."""
    order, clients, adverts = begun(5, least=3)
    masked(order, clients, adverts)
    signed = {c: clients[c].agree(frozenset(range(5))) for c in (0, 1)}
    return bool(clients[0].unmask(signed).seeds)


ATTACKS: dict[str, tuple[Callable[[], bool], ModuleType, str, str]] = {
    # what the server does, and the check: where, its words in the source, what the client says
    "a round is repeated": (
        replayed, client_module, "must be after round", "must be after round 0",
    ),
    "the cohort is shrunken": (
        lambda: of_fewer(Party.of(6, smallest=5), range(3), least=2),
        client_module, "clients and must have", "has 3 clients and must have 5",
    ),
    "the minimum is lowered": (
        lambda: of_fewer(Party.of(6), range(3), least=3),
        client_module, "least={order.least}", "least=3 must be from 4",
    ),
    "fewer may collude": (
        lambda: of_fewer(Party.of(6, colluding=1), range(6), least=5),
        client_module, "colluding={order.colluding}", "colluding=0 must be at least 1",
    ),
    "a key is forged": (
        lambda: sybil(2), client_module, "known keys only", "not another one for client 2",
    ),
    "a client is added": (
        lambda: sybil(4), client_module, "known keys only", "not another one for client 4",
    ),
    "a key without a signature": (
        man_in_between, client_module, "must have its signature", "client 1 must have its sig",
    ),
    "an old transcript": (
        old_transcript, client_module, "must have its signature", "client 2 must have its sig",
    ),
    "another advert in its name": (
        not_its_own, client_module, "must be its own", "must be its own",
    ),
    "a letter to itself": (
        to_oneself, client_module, "nobody writes letters", "nobody writes letters to itself",
    ),
    "a vector is masked twice": (
        masked_twice, client_module, "must come at its turn", "must come at its turn",
    ),
    "a survivor is called lost to its face": (
        lambda: told_of({1, 2, 3}), client_module, "must include this client",
        "survivors must include this client, 0",
    ),
    "a stranger survives": (
        lambda: told_of({0, 1, 2, 9}), client_module, "of clients of the step before", "not of 9",
    ),
    "few survive": (
        lambda: told_of({0, 1}), client_module, "clients must be of", "survivors of 2 clients must",
    ),
    "few have signed": (
        unsigned, client_module, "clients must be of", "signatures of 2 clients must",
    ),
    "active and dead": (
        active_and_dead, client_module, "must have signed the list", "must have signed the list",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_and_succeeds_without_its_check(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, module, check, words = ATTACKS[name]
    with pytest.raises(ProtocolError, match=words):
        attack()
    take_out(monkeypatch, module, check)
    assert attack()


FIELD = 2**255 - 19
TWINS: dict[str, Callable[[int], int]] = {
    # whose shared secrets are those of a public key, with every private one
    "the same": lambda u: u,
    "another sign bit": lambda u: u + 2**255,
    "plus the point of order 2": lambda u: pow(u, -1, FIELD),
}


def lies_open(twin: Callable[[int], int]) -> bool:
    """Let client 2, with the server, hold a twin of client 0's key: is client 1 masked by nobody?

    Of three clients one may side with the server.  Client 1 takes away what it shares with 0 and
    adds what it shares with 2, and its own mask's seed is opened with every sum.
    """
    party = Party.of(3, colluding=1)
    order = party.order(least=3, colluding=1)
    clients = party.clients(order)
    adverts = {c: x.advertise() for c, x in clients.items()}
    of_two = twin(int.from_bytes(adverts[0].masks, "little")).to_bytes(32, "little")
    keys = (adverts[2].letters, of_two, adverts[2].seed)
    message = client_module.advert_message(order, 2, *keys)
    adverts[2] = client_module.Advert(*keys, primitives.sign(party.members[2].signing, message))
    clients[2]._check_adverts = lambda adverts: None  # type: ignore[method-assign]
    letters = {c: x.share(adverts)[1][2 * primitives.TAG_BYTES :] for c, x in clients.items()}
    del letters[1]
    vector = integers(2, order.size)[1]
    packed = clients[1].mask(letters, vector)
    own = key_stream(own_key(clients[1]._seed, story(order, adverts)), order.size, order.bits)
    view = unpack(packed, order.size, order.bits) - own
    return np.array_equal(centred(view, order.bits), vector)


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_of_anothers_key_takes_no_mask_away(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not lies_open(TWINS[name])
    real = client_module.pair_mask

    def of_the_secret_alone(*told: Any) -> Any:
        return real(*told[:-1], (0, 0))

    monkeypatch.setattr(client_module, "pair_mask", of_the_secret_alone)
    assert lies_open(TWINS[name]), "masks that follow from X25519's secret alone cancel"


# -- the flaws of others


def repeated_views(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many views that a server has of one update show the mask of another view.

    The view is what client 0 sent in a round with one other client, less its own mask, whose seed
    is opened: its update, of 12 bits, and the mask of the pair.  Two with the same mask differ by
    less than 2^13, so their highest bits are the same, but where one of four numbers carries.
    """
    order, clients, adverts = begun(2, size=4, bits=32)
    client, draws, seen = clients[0], np.random.default_rng(0), set[bytes]()
    for c, secret in enumerate((client._mask_key, clients[1]._mask_key)):
        secret[:] = hashed(c, 32)
    client._adverts = {1: dataclasses.replace(adverts[1], masks=public_of(hashed(1, 32)))}
    client._adverts[0] = adverts[0]  # type: ignore[index]
    client._order = dataclasses.replace(order, least=1)
    monkeypatch.setattr(MaskingClient, "_open_letter", lambda *args: None)
    client._held[0] = bytearray(66)
    for k in range(count):
        client._next, client._salt = "mask", k.to_bytes(8, "big")  # another round, another story
        packed = client.mask({1: b""}, draws.integers(-2048, 2048, 4))
        own = key_stream(own_key(client._seed, client._salt), 4, 32)
        seen.add(((unpack(packed, 4, 32) - own) >> np.uint32(16)).tobytes())
    return count - len(seen)


@pytest.mark.parametrize(
    ("bits", "count"), [(22, 9_000), pytest.param(28, 66_000, marks=pytest.mark.slow)]
)
def test_flowers_short_keys_show_in_what_the_server_sees(
    bits: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert repeated_views(count, monkeypatch) == 0
    real = client_module.pair_key

    def folded(*args: Any) -> bytes:  # as who reads base64 as numbers of 32 bits
        return (int.from_bytes(real(*args), "big") % 2**bits).to_bytes(32, "big")

    monkeypatch.setattr(client_module, "pair_key", folded)
    # Of n masks from 2^bits keys n^2 / 2^(bits + 1) are another one's: some ten, or eight.
    assert repeated_views(count, monkeypatch) >= 3


def view_of(vector: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what a server sees of one update, its own mask removed."""
    order, clients, adverts = begun(3, size=len(vector))
    server = Careless(order)
    server.take_adverts(adverts)
    server.take_letters({c: x.share(adverts) for c, x in clients.items()})
    packed = clients[0].mask(server.letters_to(0), vector)
    own = client_module.key_stream(
        own_key(clients[0]._seed, story(order, adverts)), order.size, order.bits
    )
    return centred(unpack(packed, order.size, order.bits) - own, order.bits)


def test_openfls_one_number_for_a_model_shows_all_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = np.arange(200) * 7
    assert (np.diff(view_of(vector, monkeypatch)) == 7).mean() < 0.05
    real = client_module.key_stream
    monkeypatch.setattr(
        client_module, "key_stream", lambda key, size, bits: np.repeat(real(key, 1, bits), size)
    )
    assert (np.diff(view_of(vector, monkeypatch)) == 7).mean() > 0.95


def test_openfls_private_keys_are_not_at_our_aggregator() -> None:
    opened: list[Any] = []
    party = Party.of(6)
    order = party.order(least=4)
    watch: Any = lambda step, seen: step == "unmask" and opened.append(seen)  # noqa: E731
    play(order, party.clients(order), integers(6, 40), {"mask": {5}}, watch)
    keys = [c for answer in opened[0].values() for c in answer.keys]
    assert set(keys) == {5}, "of no survivor, not a single share"
    assert len(keys) == 5


def test_fedmls_keys_by_rank_are_anybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    def guessed() -> int:
        _, clients, adverts = begun(4, least=3)
        ours = [a.letters for a in adverts.values()] + [a.masks for a in adverts.values()]
        secrets = set[bytes]()
        for x in clients.values():
            secrets |= {bytes(x._letter_key), bytes(x._mask_key), bytes(x._seed)}
        assert not secrets & {*ours, *(a.seed for a in adverts.values())}, "no public key is secret"
        return len({public_of(hashed(rank, 32)) for rank in range(12)} & set(ours))

    assert guessed() == 0
    ranks = iter(range(100))
    monkeypatch.setattr(client_module, "secret_bytes", lambda size: hashed(next(ranks), size))
    assert guessed() == 8
