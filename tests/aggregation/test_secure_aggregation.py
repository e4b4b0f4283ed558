"""Secure aggregation: exact sums whoever drops out, and every trick of a server refused.

The flaws are those of other implementations: masks of 28-bit keys, a client that is named as a
survivor and as lost, keys that nobody has signed, a server that tells clients different stories,
shares of both kinds.  Each test takes the check out, too, and sees the attack succeed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sympy
from scipy import stats
from secure_samples import STEPS, Party, hashed, integers, play

from fedquilt.aggregation.secure import client as client_module
from fedquilt.aggregation.secure import primitives
from fedquilt.aggregation.secure import server as server_module
from fedquilt.aggregation.secure.client import (
    Advert,
    MaskingClient,
    Member,
    Opened,
    SumOrder,
    story,
)
from fedquilt.aggregation.secure.primitives import (
    PRIME,
    ProtocolError,
    combine,
    new_signing_key,
    share,
    verifying_key,
)
from fedquilt.aggregation.secure.server import Server
from fedquilt.common.quorum import fewest, protocol_bytes

KEYS = {client: new_signing_key() for client in range(6)}
KNOWN = {client: verifying_key(key) for client, key in KEYS.items()}


def total(vectors: dict[int, Any], who: set[int], bits: int) -> np.ndarray[Any, Any]:
    """Sum in Python's integers, modulo 2^bits, nearest to zero."""
    half, modulus = 1 << (bits - 1), 1 << bits
    sums = [sum(int(vectors[c][k]) for c in who) for k in range(len(vectors[0]))]
    return np.array([(value + half) % modulus - half for value in sums])


@pytest.mark.parametrize("step", STEPS)
def test_six_of_twenty_clients_may_drop_out_at_any_step(step: str) -> None:
    party, vectors = Party.of(20), integers(20, 40)
    order, lost = party.order(), {1, 4, 5, 11, 18, 19}
    found = play(order, party.clients(order), vectors, {step: lost})
    # Whoever had sent its masked vector is in the sum, though it has gone since.
    before = step in ("advertise", "share", "mask")
    assert np.array_equal(found, total(vectors, set(range(20)) - (lost if before else set()), 18))


def test_clients_may_drop_out_at_every_step_of_one_round() -> None:
    party, vectors = Party.of(20), integers(20, 40)
    order = party.order()
    lost = {"advertise": {0}, "share": {3}, "mask": {7, 8}, "agree": {12}, "unmask": {19}}
    found = play(order, party.clients(order), vectors, lost)
    assert np.array_equal(found, total(vectors, set(range(20)) - {0, 3, 7, 8}, 18))


@pytest.mark.parametrize("step", STEPS)
def test_below_the_fewest_nothing_is_opened(step: str) -> None:
    party, opened = Party.of(20), []
    order = party.order()
    clients = party.clients(order)

    def watch(name: str, seen: Any) -> None:
        if name == "unmask" and seen:
            opened.append(seen)

    with pytest.raises(ProtocolError, match="must be of 14 at least"):
        play(order, clients, integers(20, 40), {step: set(range(7))}, watch)
    # Of those who had gone as far as to open shares there are too few to combine.
    assert all(len(answers) < order.least for answers in opened)


def test_sums_wrap_modulo_two_to_the_bits() -> None:
    party = Party.of(3)
    order = party.order(least=2, size=3, bits=5)
    vectors = {0: np.array([15, -16, 7]), 1: np.array([15, -16, 1]), 2: np.array([1, -1, 8])}
    found = play(order, party.clients(order), vectors)
    assert found.tolist() == [-1, -1, -16]  # 31, -33 and 16 modulo 32


@pytest.mark.parametrize("bits", [1, 7, 8, 17, 31, 32])
def test_numbers_are_packed_in_as_few_bytes_as_they_need(bits: int) -> None:
    numbers = np.random.default_rng(bits).integers(0, 2**bits, 77, dtype=np.uint32)
    packed = primitives.pack(numbers, bits)
    assert len(packed) == (77 * bits + 7) // 8
    assert np.array_equal(primitives.unpack(packed, 77, bits), numbers)
    value = int.from_bytes(packed, "little")
    assert [value >> bits * k & 2**bits - 1 for k in range(77)] == numbers.tolist()
    with pytest.raises(ProtocolError, match="must have"):
        primitives.unpack(packed + b"0", 77, bits)


def test_shares_are_shamirs() -> None:
    assert sympy.isprime(PRIME)
    assert sympy.nextprime(2**256) == PRIME
    secret = bytes(range(224, 256))
    shares = dict(zip(range(1, 8), share(secret, range(1, 8), 4), strict=True))
    assert combine({x: shares[x] for x in (1, 4, 6, 7)}) == secret
    assert combine({x: shares[x] for x in (7, 2, 3, 5)}) == secret
    # Three shares exclude no secret: some fourth one makes any of them.
    three = {x: shares[x] for x in (1, 4, 6)}
    *weights, last = primitives._weights((1, 4, 6, 7))
    known = sum(w * int.from_bytes(v, "big") for w, v in zip(weights, three.values(), strict=True))
    for guess in (0, 2**255 + 12345):
        fourth = (guess - known) * pow(last, -1, PRIME) % PRIME
        assert combine({**three, 7: fourth.to_bytes(33, "big")}) == guess.to_bytes(32, "big")
    assert combine(three) != secret


def uniform(packed: bytes, order: SumOrder) -> float:
    """Return the p-value of the server's view of one vector against uniform numbers."""
    numbers = primitives.unpack(packed, order.size, order.bits) >> (order.bits - 6)
    return float(stats.chisquare(np.bincount(numbers, minlength=64)).pvalue)


def test_one_masked_update_looks_uniform_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    party = Party.of(4)
    order = party.order(least=3, size=20_000)
    vectors = {client: np.full(order.size, 7) for client in range(4)}
    seen: list[bytes] = []
    play(order, party.clients(order), vectors, watch=lambda s, v: s == "mask" and seen.append(v))
    assert min(uniform(packed, order) for packed in seen) > 1e-4
    # Power: masks of sixteen of the eighteen bits are noticed.
    real = primitives.key_stream
    monkeypatch.setattr(
        client_module, "key_stream", lambda key, size, bits: real(key, size, bits - 2)
    )
    seen.clear()
    again = party.order(least=3, size=20_000, round_index=1)
    play(again, party.clients(again), vectors, watch=lambda s, v: s == "mask" and seen.append(v))
    assert max(uniform(packed, again) for packed in seen) < 1e-6


def begun(
    count: int = 6, **changes: Any
) -> tuple[Party, SumOrder, dict[int, MaskingClient], Server]:
    """Return a round whose masked vectors have arrived, but for those of the clients from 4 on."""
    party = Party.of(count)
    order = party.order(**{"least": 4, **changes})
    clients, server = party.clients(order), Server(order)
    adverts = server.take_adverts({c: x.advertise() for c, x in clients.items()})
    server.take_letters({c: x.share(adverts) for c, x in clients.items()})
    vectors = integers(count, order.size)
    for client in range(4):
        server.add(client, clients[client].mask(server.letters_to(client), vectors[client]))
    return party, order, clients, server


def test_a_client_opens_of_each_peer_one_share_and_once() -> None:
    _, _, clients, server = begun()
    survivors = server.survivors()
    signed = {c: clients[c].agree(survivors) for c in range(4)}
    held = [clients[0]._letter_key, clients[0]._mask_key, clients[0]._seed]
    held += clients[0]._held.values()
    assert all(any(secret) for secret in held)
    answer = clients[0].unmask(signed)
    assert set(answer.seeds) == {0, 1, 2, 3}
    assert set(answer.keys) == {4, 5}
    with pytest.raises(ProtocolError, match="unmask must come at its turn"):
        clients[0].unmask(signed)
    with pytest.raises(ProtocolError, match="agree must come at its turn"):
        clients[0].agree(frozenset({0, 1, 2, 4}))
    assert not clients[0]._held
    assert not any(any(secret) for secret in held), "all of it is overwritten"


def test_a_refusal_ends_the_part_of_a_client() -> None:
    _, _, clients, _ = begun()
    with pytest.raises(ProtocolError, match="survivors of 2 clients must be of 4 at least"):
        clients[0].agree(frozenset({0, 1}))
    with pytest.raises(ProtocolError, match="must come at its turn"):
        clients[0].agree(frozenset({0, 1, 2, 3}))
    assert not clients[0]._held
    assert not any(clients[0]._seed)
    assert not any(clients[0]._mask_key)


STORIES: dict[str, dict[str, Any]] = {
    "model": {"task": b"another model"},
    "run": {"run": "another run"},
    "round": {"round_index": 7},
    "fewest": {"least": 5},
}


@pytest.mark.parametrize("what", STORIES)
def test_a_server_that_tells_two_stories_gets_nothing(what: str) -> None:
    party = Party.of(6)
    ours = party.order(least=4)
    theirs = party.order(**{"least": 4, **STORIES[what]})
    clients = {c: MaskingClient(party.members[c], ours if c < 3 else theirs) for c in range(6)}
    adverts = {c: x.advertise() for c, x in clients.items()}
    with pytest.raises(ProtocolError, match="must have its signature"):
        clients[0].share(adverts)


def test_two_stories_are_garbage_also_where_signatures_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The story is in every key: letters cannot be read, and masks do not cancel.
    monkeypatch.setattr(client_module, "is_signed", lambda *args: True)

    monkeypatch.setattr(server_module, "is_signed", lambda *args: True)
    real = client_module.unseal

    def summed(told: dict[int, bytes]) -> np.ndarray[Any, Any]:
        party = Party.of(4)
        clients = {
            c: MaskingClient(party.members[c], party.order(least=3, task=told[c])) for c in told
        }
        seeds = {c: bytes(client._seed) for c, client in clients.items()}
        monkeypatch.setattr(  # let the server have the seeds of all, which it could not open
            Server, "_secrets", lambda self, given: seeds
        )
        return play(party.order(least=3, task=told[0]), clients, integers(4, 40))

    two = {0: b"a", 1: b"a", 2: b"b", 3: b"b"}
    with pytest.raises(ProtocolError, match="letters of 2 clients can be opened"):
        summed(two)

    def lenient(key: bytes, sealed: bytes, about: bytes) -> bytes:
        try:
            return real(key, sealed, about)
        except ProtocolError:
            return bytes(66)

    monkeypatch.setattr(client_module, "unseal", lenient)
    one = dict.fromkeys(two, b"a")
    assert np.array_equal(summed(one), total(integers(4, 40), {0, 1, 2, 3}, 18))
    wrong = summed(two)
    assert not np.array_equal(wrong, total(integers(4, 40), {0, 1, 2, 3}, 18))
    assert stats.chisquare(np.histogram(wrong, 4, (-(2**17), 2**17))[0]).pvalue > 1e-4


def test_letters_of_another_story_are_not_read() -> None:
    party = Party.of(3)
    order = party.order(least=2)
    clients = party.clients(order)
    adverts = {c: x.advertise() for c, x in clients.items()}
    fewer = {c: adverts[c] for c in (0, 1)}  # client 1 hears of two clients, client 0 of three
    sent = {0: clients[0].share(adverts), 1: clients[1].share(fewer)}
    assert story(order, adverts) != story(order, fewer)
    with pytest.raises(ProtocolError, match="letters of 1 clients can be opened, and those of 2"):
        clients[0].mask({1: sent[1][0][32:]}, np.zeros(40, dtype=np.int64))


TOLD: dict[str, Any] = {
    "run": "another run", "round_index": 1, "task": b"another model", "least": 3, "colluding": 1,
    "size": 41, "bits": 17, "roster": {0: KNOWN[0], 1: KNOWN[1], 2: KNOWN[3]},
}  # fmt: skip


@pytest.mark.parametrize("what", [*TOLD, *(x.name for x in dataclasses.fields(Advert)[:-1])])
def test_every_key_follows_from_all_that_its_owner_was_told(what: str) -> None:
    party = Party({c: Member(c, KNOWN, KEYS[c]) for c in range(3)})
    usual = {"least": 2, "roster": {c: KNOWN[c] for c in range(3)}}
    order = party.order(**usual)
    clients = party.clients(order)
    adverts = {c: x.advertise() for c, x in clients.items()}
    if what in TOLD:
        salts = [story(one, adverts) for one in (order, party.order(**{**usual, what: TOLD[what]}))]
    else:  # another key, or seed, of one client
        other = {**adverts, 2: dataclasses.replace(adverts[2], **{what: hashed(7, 32)})}
        salts = [story(order, told) for told in (adverts, other)]
    made: list[bytes] = []
    for salt in salts:
        mine, yours = clients[0], adverts[1]
        mine._adverts, mine._salt = adverts, salt
        made += [
            client_module.pair_mask(order, salt, mine._mask_key, yours.masks, (0, 1)).tobytes(),
            client_module.own_key(mine._seed, salt),
            mine._letter_to(1, 0, 1),
            mine._letter_to(1, 1, 0),
            client_module.agreement(salt, {0, 1, 2}, {0, 1}),
        ]
    assert len(set(made)) == len(made), "no two are the same, in one story or in two"


def test_a_signature_is_of_one_list_of_one_client_and_round() -> None:
    order = Party({c: Member(c, KNOWN, KEYS[c]) for c in range(3)}).order(least=2)
    keys = [hashed(k, 32) for k in range(4)]
    signed = [
        client_module.agreement(b"salt", *lists)
        for lists in (({1, 2, 3}, {1, 2}), ({1, 2, 3}, {1, 3}), ({1, 2}, {1, 2}), ({12}, {3}),
                      ({1}, {2, 3}), ({1}, {23}))
    ] + [
        client_module.advert_message(order, client, *parts)
        for client, parts in ((0, keys[:3]), (1, keys[:3]), (0, keys[1:]), (0, keys[2::-1]),
                              (0, [*keys[:2], keys[3]]))
    ]  # fmt: skip
    assert len(set(signed)) == len(signed)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a shrunken cohort": ({"least": 2}, "the roster has 3 clients and must have 5"),
    "a low threshold": ({"least": 3}, "least=3 must be from 5 to 6"),
    "a high threshold": ({"least": 7}, "least=7 must be from 5 to 6"),
    "wide numbers": ({"least": 5, "bits": 33}, "bits=33 must be from 1 to 32"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_client_checks_what_the_server_orders(what: str) -> None:
    changes, message = REFUSED[what]
    party = Party.of(6, smallest=5, share=0.7)
    order = party.order(**changes)
    if what == "a shrunken cohort":
        order = dataclasses.replace(order, roster={c: order.roster[c] for c in range(3)})
    with pytest.raises(ProtocolError, match=message):
        MaskingClient(party.members[0], order)
    MaskingClient(party.members[0], party.order(least=5))


def test_more_may_collude_than_a_client_allows_for_is_refused() -> None:
    party = Party.of(6, colluding=1)
    with pytest.raises(ProtocolError, match="colluding=0 must be at least 1"):
        MaskingClient(party.members[0], party.order(least=5))
    with pytest.raises(ProtocolError, match="least=5 must be from 6 to 6"):
        MaskingClient(party.members[0], party.order(least=5, colluding=4))


def test_a_key_that_nobody_knows_is_refused() -> None:
    party = Party.of(4)
    order = party.order(least=3)
    server_key = verifying_key(new_signing_key())
    forged = dataclasses.replace(order, roster={**order.roster, 2: server_key})
    with pytest.raises(ProtocolError, match="known keys only, not another one for client 2"):
        MaskingClient(party.members[0], forged)
    added = dataclasses.replace(order, roster={**order.roster, 9: server_key})
    with pytest.raises(ProtocolError, match="not another one for client 9"):
        MaskingClient(party.members[0], added)
    with pytest.raises(ProtocolError, match="the roster must have the key of client 2"):
        MaskingClient(party.members[2], forged)


def same_twice(share_checked: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many bytes of two rounds' masked vectors of one client are the same."""
    party = Party.of(3)
    if not share_checked:  # a client whose keys are not fresh
        monkeypatch.setattr(client_module, "secret_bytes", lambda size: bytes(range(size)))
        monkeypatch.setattr(MaskingClient, "_check_adverts", lambda self, adverts: None)
        monkeypatch.setattr(client_module, "story", lambda order, adverts: b"the same")
        monkeypatch.setattr(server_module, "story", lambda order, adverts: b"the same")
    seen: list[bytes] = []
    for index in (0, 1):
        order = party.order(least=2, round_index=index, size=2000)
        play(
            order,
            party.clients(order),
            integers(3, 2000),
            watch=lambda step, packed: step == "mask" and seen.append(packed),
        )
    return sum(a == b for a, b in zip(seen[0], seen[3], strict=True))


def test_masks_are_fresh_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_sent = 2000 * 18 // 8
    assert same_twice(True, monkeypatch) < bytes_sent * 0.02  # one in 256 by chance
    assert same_twice(False, monkeypatch) == bytes_sent, "the test sees a mask that is used twice"


def lying(answer: Opened) -> Opened:
    """Return an answer whose shares are all other numbers."""

    def other(shares: Any) -> dict[int, bytes]:
        return {c: bytes([value[0], value[1] ^ 1]) + value[2:] for c, value in shares.items()}

    return Opened(other(answer.seeds), other(answer.keys))


class Cheating(MaskingClient):
    """A client that does not keep to the protocol in one thing."""

    def __init__(self, member: Member, order: SumOrder, how: str) -> None:
        member.newest.clear()
        super().__init__(member, order)
        self.how = how

    def advertise(self) -> Advert:
        advert = super().advertise()
        if self.how == "keys under no signature":
            return dataclasses.replace(advert, signature=advert.signature[::-1])
        if self.how != "a key of small order":
            return advert
        keys = (advert.letters, bytes(32), advert.seed)
        message = client_module.advert_message(self._order, self.client, *keys)
        return Advert(*keys, primitives.sign(self._signing, message))

    def share(self, adverts: Any) -> dict[int, bytes]:
        letters = super().share(adverts)
        least = min(c for c in letters if c != self.client)
        if self.how in ("one garbage letter", "garbage letters"):
            who = [least] if self.how == "one garbage letter" else list(letters)
            return letters | {c: letters[c][:32] + bytes(len(letters[c]) - 32) for c in who}
        if self.how == "a letter is short":
            return letters | {least: letters[least][:-1]}
        if self.how == "no letter for one":
            return {c: letter for c, letter in letters.items() if c != least}
        return letters

    def agree(self, survivors: frozenset[int]) -> bytes:
        signature = super().agree(survivors)
        return bytes(len(signature)) if self.how == "a signature under nothing" else signature

    def unmask(self, signatures: Any) -> Opened:
        answer = super().unmask(signatures)
        if self.how == "an empty answer":
            return Opened({}, {})
        if self.how == "one false share":
            first, *_ = answer.seeds
            return Opened({**answer.seeds, first: lying(answer).seeds[first]}, answer.keys)
        return lying(answer) if self.how == "false shares" else answer


LEFT_OUT = (
    "keys under no signature",
    "a key of small order",
    "a letter is short",
    "no letter for one",
)
SUMMED = (
    "one garbage letter", "a signature under nothing", "an empty answer", "one false share",
    "false shares",
)  # fmt: skip


@pytest.mark.parametrize("who", [0, 9])
@pytest.mark.parametrize("how", [*LEFT_OUT, *SUMMED])
def test_one_client_that_cheats_costs_nobody_the_round(how: str, who: int) -> None:
    party, vectors = Party.of(10), integers(10, 40)
    order = party.order()
    clients = party.clients(order)
    clients[who] = Cheating(party.members[who], order, how)
    # One more is lost, so that keys are opened, too; 8 answer where 7 must.
    found = play(order, clients, vectors, {"mask": {4}})
    summed = set(range(10)) - {4} - ({who} if how in LEFT_OUT else set())
    assert np.array_equal(found, total(vectors, summed, 18))


@pytest.mark.parametrize("who", [0, 9])
@pytest.mark.parametrize("lost", [True, False])
def test_who_has_dealt_false_shares_is_named_and_its_sum_stays_closed(
    who: int, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = Party.of(10)
    order = party.order()
    clients = party.clients(order)
    real = clients[who].share

    def share_another(adverts: Any) -> dict[int, bytes]:
        kind = "_mask_key" if lost else "_seed"
        own, other = getattr(clients[who], kind), bytes(range(32))
        setattr(clients[who], kind, other)
        monkeypatch.setattr(clients[who], "_check_adverts", lambda adverts: None)
        letters = real(adverts)
        setattr(clients[who], kind, own)
        return letters

    monkeypatch.setattr(clients[who], "share", share_another)
    with pytest.raises(server_module.FalseSharesError, match=f"shares of client {who} must") as e:
        play(order, clients, integers(10, 40), {"mask": {who if lost else 4}})
    assert e.value.clients == {who}


@pytest.mark.parametrize("how", ["an empty answer", "false shares"])
def test_who_answers_falsely_where_nobody_more_may_be_lost_is_named_and_nobody_else(
    how: str,
) -> None:
    # All dealers lack a share then: were they named, one client would end a run for all.
    party = Party.of(10)
    order = party.order()
    clients = party.clients(order)
    clients[2] = Cheating(party.members[2], order, how)
    with pytest.raises(server_module.FalseSharesError, match="shares of client 2 must") as e:
        play(order, clients, integers(10, 40), {"mask": {4, 5, 6}})
    assert e.value.clients == {2}


def test_garbage_letters_for_everybody_name_their_sender() -> None:
    party = Party.of(10)
    order = party.order()
    clients = party.clients(order)
    clients[3] = Cheating(party.members[3], order, "garbage letters")
    with pytest.raises(server_module.FalseSharesError, match="shares of client 3 must be of"):
        play(order, clients, integers(10, 40))


def test_a_letter_that_cannot_be_opened_changes_nothing_that_a_client_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = itertools.count()
    monkeypatch.setattr(client_module, "secret_bytes", lambda n: hashed(next(drawn), n))
    monkeypatch.setattr(primitives, "secret_bytes", lambda n: hashed(next(drawn), n))
    seen: list[tuple[bytes, bytes, Opened]] = []
    for spoilt in (False, True):
        drawn = itertools.count()
        party = Party({c: Member(c, KNOWN, key) for c, key in KEYS.items()})
        order = party.order(least=4)
        clients, server = party.clients(order), Server(order)
        adverts = server.take_adverts({c: x.advertise() for c, x in clients.items()})
        server.take_letters({c: x.share(adverts) for c, x in clients.items()})
        letters = server.letters_to(0)
        if spoilt:
            letters[3] = bytes(len(letters[3]))
        sent = clients[0].mask(letters, np.arange(order.size))
        for client in range(1, 5):
            clients[client].mask(server.letters_to(client), np.zeros(order.size, dtype=np.int64))
        agreed = {c: clients[c].agree(frozenset(range(5))) for c in range(5)}
        seen.append((sent, agreed[0], clients[0].unmask(agreed)))
    honest, other = seen
    assert other[:2] == honest[:2], "the same vector under the same masks, the same signature"
    assert other[2].seeds == {c: s for c, s in honest[2].seeds.items() if c != 3}
    assert other[2].keys == honest[2].keys


def test_a_client_that_can_open_too_few_letters_sends_no_vector() -> None:
    _, _, clients, server = begun()
    letters = server.letters_to(5)
    for peer, counts in ((0, True), (1, True), (2, False)):
        letters[peer] = bytes(len(letters[peer]))
        if counts:
            continue
        with pytest.raises(ProtocolError, match="letters of 3 clients can be opened, and those"):
            clients[5].mask(letters, np.zeros(40, dtype=np.int64))
    letters = server.letters_to(4) | {0: b"", 1: b""}
    clients[4].mask(letters, np.zeros(40, dtype=np.int64))  # four are enough


@pytest.mark.parametrize("size", [1, 39, 41])
def test_a_vector_of_another_length_is_not_masked(size: int) -> None:
    _, _, clients, server = begun()
    with pytest.raises(ProtocolError, match=f"a vector of {size} numbers must have 40"):
        clients[5].mask(server.letters_to(5), np.zeros(size, dtype=np.int64))


def test_points_of_small_order_are_refused() -> None:
    with pytest.raises(ProtocolError, match="small order"):
        primitives.pair_key(b"1" * 32, bytes(32), b"salt", "mask")


def test_a_server_takes_one_vector_of_each_client() -> None:
    _, order, clients, server = begun()
    packed = clients[4].mask(server.letters_to(4), np.zeros(order.size, dtype=np.int64))
    server.add(4, packed)
    with pytest.raises(ProtocolError, match="client 4 must send one vector"):
        server.add(4, packed)


@pytest.mark.parametrize(("count", "colluding"), [(5, 0), (20, 0), (20, 6), (21, 3), (2, 0)])
def test_no_two_lists_of_survivors_can_be_signed(count: int, colluding: int) -> None:
    least = fewest(count, 0.5, colluding)
    # Honest ones sign one of two lists, those who collude both.
    honest = count - colluding
    best = max(min(k + colluding, honest - k + colluding) for k in range(honest + 1))
    assert best < least, "two lists cannot both have enough signatures"
    assert best + 1 >= least - (count - colluding) % 2, "and the bound is not far from tight"


def lists(of: set[int], least: int, own: set[int]) -> list[set[int]]:
    """Return all lists of at least so many that have `own` in them."""
    others = sorted(of - own)
    counts = range(max(0, least - len(own)), len(others) + 1)
    return [own | set(more) for k in counts for more in itertools.combinations(others, k)]


def missing_noise(count: int, colluding: int, least: int) -> int:
    """Return of how many honest survivors the noise can be missing in what a server opens.

    It tells every client another list of who has written letters, as it likes, and has one list
    of survivors signed, by clients that were told the same.  It can take away the survivors' own
    masks and all that they share with those who were called lost or side with it.  A mask of two
    other clients stays, but where both are summed and each has masked for the other.
    """
    everybody, bad, worst = set(range(count)), set(range(count - colluding, count)), 0
    for told in lists(everybody, least, set()):
        for survivors in lists(told, least, set()):
            honest = survivors - bad
            for signing in lists(honest, max(0, least - len(survivors & bad)), set()):
                rest = sorted(honest - signing)
                others = [[w for w in lists(everybody, least, {c}) if w != told] for c in rest]
                for stories in itertools.product(*others):
                    masked = dict.fromkeys(signing, told) | dict(zip(rest, stories, strict=True))
                    for group in groups(masked, bad | (told - survivors)):
                        worst = max(worst, len(survivors) - len(bad) - len(group))
    return worst


def groups(masked: dict[int, set[int]], known: set[int]) -> list[set[int]]:
    """Return the smallest sets of clients whose masks cancel among themselves."""
    left, found = set(masked), []
    while left:
        group, new, closed = set[int](), {min(left)}, True
        while new:
            pairs = [(c, peer) for c in new for peer in masked[c] - known - {c}]
            mutual = [(c, peer) for c, peer in pairs if c in masked.get(peer, ())]
            closed = closed and mutual == pairs
            group |= new
            new = {peer for _, peer in mutual} - group
        left -= group
        found += [group] if closed else []
    return found


@pytest.mark.parametrize(("count", "colluding"), [(3, 0), (4, 0), (4, 1), (5, 0), (5, 1), (5, 2)])
def test_whoever_has_signed_is_in_all_that_can_be_opened(count: int, colluding: int) -> None:
    least = fewest(count, 0.5, colluding)
    assert missing_noise(count, colluding, least) == 0
    assert missing_noise(count, colluding, least - 1) > 0, "with one less somebody is not"


def test_a_threshold_of_half_would_let_two_lists_be_signed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_accepted() -> bool:
        party = Party.of(6)
        try:
            party.clients(party.order(least=3))
        except ProtocolError:
            return False
        return True

    assert not is_accepted()
    half: Callable[..., int] = lambda count, share, colluding: count // 2  # noqa: E731
    monkeypatch.setattr(client_module, "fewest", half)
    assert is_accepted()


def test_members_know_only_keys_that_they_were_given() -> None:
    key = new_signing_key()
    public = verifying_key(key)
    lonely = Member(0, {0: public}, key, smallest=1)
    with pytest.raises(ProtocolError, match="not another one for client 1"):
        lonely.accept(Party.of(2).order(roster={0: public, 1: public}, least=2))


def test_a_plan_says_how_many_bytes_a_client_sends_and_receives() -> None:
    order = (party := Party.of(6)).order()
    clients, vector, server = party.clients(order), integers(6, 40)[0], Server(order)
    adverts = server.take_adverts({c: clients[c].advertise() for c in clients})
    letters = {c: clients[c].share(adverts) for c in clients}
    server.take_letters(letters)
    for c in clients:
        clients[c].mask(server.letters_to(c), vector)
    signatures = {c: clients[c].agree(frozenset(clients)) for c in clients}
    opened = clients[0].unmask(signatures)
    one = adverts[0]
    keys = len(one.letters + one.masks + one.seed + one.signature)
    received = [*server.letters_to(0).values(), *signatures.values()]
    assert protocol_bytes(6) == {
        "keys": keys,
        "letters": sum(map(len, letters[0].values())),
        "shares": len(signatures[0]) + sum(map(len, opened.seeds.values())),
        "received": 6 * keys + sum(map(len, received)),
    }
