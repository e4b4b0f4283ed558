"""Masked rounds on Flower nodes: exact sums, drop-outs at every step, charges, crashes."""

from __future__ import annotations

import base64
import contextlib
import copy
import ctypes
import dataclasses
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from flwr.app import Array, ConfigRecord, Context, Message

from fedquilt.aggregation.secure import client as client_module
from fedquilt.aggregation.secure import primitives
from fedquilt.aggregation.secure.client import Member, SumOrder, is_advert_of
from fedquilt.aggregation.secure.primitives import ProtocolError, new_signing_key, verifying_key
from fedquilt.aggregation.secure.server import Server
from fedquilt.common.errors import DataError, InvalidValueError
from fedquilt.config import build_config
from fedquilt.experiment.api import run_config
from fedquilt.flower import keeper as keeper_module
from fedquilt.flower import keys, prefork, wire
from fedquilt.flower import policy as policy_module
from fedquilt.flower.client_registry import der_fingerprint, public_der, roster_of_keys
from fedquilt.flower.keeper import Identity, Keeper, KeeperProcess
from fedquilt.flower.masked_engine import MaskedArrivals, MaskedEngine, engine_of
from fedquilt.flower.policy import policy_text, read_policy
from fedquilt.flower.settings import FlowerSettings
from fedquilt.flower.simulate import secure_nodes, simulate
from fedquilt.flower.site import Site, account_path, site_account
from fedquilt.flower.wire import STEPS
from fedquilt.privacy.ledger import Ledger
from fedquilt.training.compression import UnreadableError
from flower_samples import error
from masked_nodes import Masked, charged, masked_run
from mutants import take_out
from run_samples import same_tensors, tiny


@pytest.mark.parametrize("kind", ["protocol", "simulated"])
def test_nodes_release_to_the_bit_what_was_simulated(tmp_path: Path, kind: str) -> None:
    usual = {"mode": "certified", "noise_seed": 5, "num_rounds": 2}
    here = tiny(**usual, secure_aggregation="simulated", output_dir=str(tmp_path / "here"))
    there = tiny(
        **usual, secure_aggregation=kind, engine="flower", output_dir=str(tmp_path / "there")
    )
    first, second = run_config(here), simulate(there)
    assert same_tensors(first.model.state_dict(), second.model.state_dict())
    notes = " ".join(second.statement.notes)
    assert "there is no secure aggregation" not in notes
    assert ("protects nothing in this run" in notes) == (kind == "simulated")
    assert ("so nothing was protected in it" in notes) == (kind == "simulated")


def test_nodes_elsewhere_do_not_simulate() -> None:
    config = tiny(mode="certified", secure_aggregation="simulated")
    with pytest.raises(InvalidValueError, match="must be 'protocol' or 'off' on nodes elsewhere"):
        engine_of(object(), None, config, FlowerSettings())  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_condensation_under_masks_releases_to_the_bit_what_was_simulated(tmp_path: Path) -> None:
    usual = {
        "method": "condense", "mode": "certified", "dataset": "digits", "noise_seed": 5,
        "num_clients": 6, "num_rounds": 2, "mean_rounds": 1, "ipc": 1, "synthetic_images": 10,
        "model_epochs": 1, "eval_every": 2, "clients_per_round": 1.0, "availability": "always",
        "epsilon": 50.0,
    }  # fmt: skip
    runs = []
    for name, how in (
        ("here", {"secure_aggregation": "simulated"}),
        ("there", {"secure_aggregation": "protocol", "engine": "flower"}),
    ):
        config = build_config({**usual, **how, "output_dir": str(tmp_path / name)})
        runs.append(simulate(config) if name == "there" else run_config(config))
    assert same_tensors(*(run.model.state_dict() for run in runs))


def test_everybody_takes_five_steps_and_the_statement_says_who_is_trusted(tmp_path: Path) -> None:
    grid = Masked(5)
    result = masked_run(grid, tmp_path)
    assert result.folder is not None
    assert (charged(result.folder) > 0).all()
    steps = [step for step, *_ in grid.seen]
    assert {step: steps.count(step) for step in STEPS} == dict.fromkeys(STEPS, 10)
    assert grid.refusals() == []
    stated = " ".join((result.folder / "result.json").read_text().split())
    assert "the server saw numbers under masks and the sums of rounds" in stated
    assert "the server need not be trusted with updates and noise" in stated
    assert "the server sees every client's update by itself" not in stated


def opened_sums(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray[Any, Any]]:
    """Note every sum that the server opens."""
    sums = []
    real = Server.open

    def noting(self: Server, answers: Any) -> Any:
        sums.append(real(self, answers))
        return sums[-1]

    monkeypatch.setattr(Server, "open", noting)
    return sums


def sent_vectors(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], np.ndarray[Any, Any]]:
    """Note what every client hands to its keeper, by round and client."""
    vectors: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
    real = Keeper._step

    def noting(self: Keeper, request: str, held: Any, body: bytes) -> bytes:
        if request == "advertise":
            vectors[held.round_index, held.client.client] = np.frombuffer(body, "<i8").copy()
        return real(self, request, held, body)

    monkeypatch.setattr(Keeper, "_step", noting)
    return vectors


@pytest.mark.parametrize("step", STEPS)
def test_whoever_is_lost_at_a_step_the_sum_of_the_others_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    sums, vectors = opened_sums(monkeypatch), sent_vectors(monkeypatch)
    lost = {1, 4, 7}
    result = masked_run(Masked(10, {(0, step): lost}), tmp_path)
    before_the_vector = step in STEPS[:3]
    survivors = set(range(10)) - (lost if before_the_vector else set())
    np.testing.assert_array_equal(sums[0], sum(vectors[0, client] for client in survivors))
    np.testing.assert_array_equal(sums[1], sum(vectors[1, client] for client in range(10)))
    assert result.folder is not None
    spent = charged(result.folder)
    # Who survived has noised the sum: a round of ten costs as much less than one of seven.
    second = spent[0] / (1 + 10 / len(survivors))
    expected = [second if c not in survivors else spent[0] for c in range(10)]
    np.testing.assert_allclose(spent, expected, rtol=1e-3)


@pytest.mark.parametrize("step", STEPS)
def test_below_the_fewest_nothing_is_released_and_before_the_shares_nobody_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    sums = opened_sums(monkeypatch)
    result = masked_run(Masked(10, {(0, step): {0, 1, 2, 3}}), tmp_path, num_rounds=1)
    assert sums == []
    assert result.folder is not None
    # Shares may still come late, and open it: what was asked for is charged.
    assert (charged(result.folder) > 0).all() == (step == "unmask")


def test_who_is_silent_until_the_deadline_is_lost_and_not_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = opened_sums(monkeypatch)
    grid = Masked(5, {(0, "share"): {1}}, silent=True)
    settings = FlowerSettings(poll=0.01, step_deadline=2.0)
    result = masked_run(grid, tmp_path, num_rounds=1, settings=settings)
    assert len(sums) == 1
    assert result.folder is not None
    assert (charged(result.folder) > 0).tolist() == [True, False, True, True, True]


class Late(Masked):
    """Place 1 is given up at one step of round 0, and answers when the next one is asked for."""

    def __init__(self, at: str) -> None:
        super().__init__(5)
        self.at, self.late = at, list[Message]()

    def _answer(self, message: Message) -> list[Message]:
        came = super()._answer(message)
        if message.metadata.message_type == "query":
            return came
        step, place, *_ = self.seen[-1]
        if (step, place, self.round_of(message)) == (self.at, 1, 0):
            self.late = came
            return [error(message, 3, node=1)]
        if step == self.at:
            return came
        came, self.late = [*came, *self.late], []
        return came


@pytest.mark.parametrize("at", STEPS[1:])
def test_an_answer_that_comes_after_its_node_was_given_up_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    sums, vectors = opened_sums(monkeypatch), sent_vectors(monkeypatch)
    result = masked_run(Late(at), tmp_path, num_rounds=2)
    assert result.folder is not None
    lost = at in STEPS[:3]
    summed = [vectors[0, client] for client in range(5) if client != 1 or not lost]
    np.testing.assert_array_equal(sums[0], sum(summed))
    assert (result.folder / "nodes.jsonl").read_text().count("not asked for") == 1
    spent = charged(result.folder)
    second = spent[0] / (1 + 5 / 4)  # in which all five have noised the sum
    assert spent[1] == pytest.approx(second if lost else spent[0], rel=1e-3)


class KilledError(BaseException):
    """Stands for the end of the server's process: nothing of the round is cleaned up."""


@pytest.mark.parametrize("step", [*STEPS, "over"])
def test_a_server_that_is_killed_at_a_step_goes_on_with_fresh_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    nodes = secure_nodes(5)
    killed = []

    def change(at: str, place: int, message: Message) -> Message:
        if at == step and Masked.round_of(message) == 1 and place == 2:
            killed.append(at)
            raise KilledError
        return message

    first = Masked(5, change=change, nodes=nodes, run_id=1)
    if step == "over":
        monkeypatch.setattr(MaskedArrivals, "total", property(lambda self: dying(killed)))
    with contextlib.suppress(KilledError):
        masked_run(first, tmp_path, num_rounds=3)
    monkeypatch.undo()
    assert killed
    (folder,) = (path.parent for path in tmp_path.glob("*/config.toml"))
    before = charged(folder)
    # From the shares on a round counts; one that runs again is another release, charged again.
    assert charged_rounds(folder) == ([0, 1] if step == "unmask" else [0])
    second = Masked(5, nodes=nodes, run_id=2)
    result = masked_run(second, tmp_path, num_rounds=3, resume=folder)
    assert second.refusals() == []
    assert (charged(folder) > before).all()
    # Where it was charged twice, nothing is left for the last round: worst_case pays for three.
    again = {"unmask": [0, 1, 1], "over": [0, 0, 1]}.get(step, [0, 1, 2])
    assert charged_rounds(folder) == again
    adverts = [bytes_of(m) for grid in (first, second) for m in replies(grid, "advertise")]
    assert len({a[:32] for a in adverts}) == len(adverts), "no key twice"
    assert result.folder == folder


def charged_rounds(folder: Path) -> list[int]:
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        (population,) = ledger.populations()
        (run,) = population.runs()
        return sorted(charge.round_index for charge in population.charges(run))


def dying(killed: list[str]) -> Any:
    killed.append("over")
    raise KilledError


def replies(grid: Masked, step: str) -> list[Message]:
    return [reply for at, _, _, reply in grid.seen if at == step and reply is not None]


def bytes_of(message: Message) -> bytes:
    return wire.body_of(message.content, 1 << 30)


def test_the_charge_is_on_disk_before_anybody_is_asked_for_a_share(tmp_path: Path) -> None:
    spent_then: list[float] = []

    def change(at: str, place: int, message: Message) -> Message:
        if at in ("agree", "unmask") and place == 0:
            (path,) = tmp_path.glob("*/ledger.sqlite")
            with Ledger.open(path, read_only=True) as ledger:
                (population,) = ledger.populations()
                spent_then.append(float(population.spent()[0]))
        return message

    masked_run(Masked(5, change=change), tmp_path, num_rounds=1)
    assert spent_then[0] == 0
    assert spent_then[1] > 0


def of_type(kind: str) -> Callable[[Message], object]:
    """Return what writes another type over the vector of an app's reply."""

    def write(reply: Message) -> None:
        array = reply.content["arrays"]["vector"]
        reply.content["arrays"]["vector"] = Array(kind, array.shape, array.stype, array.data)

    return write


def numbered(value: float) -> Callable[[Message], object]:
    """Return what writes one number over all of an app's reply."""

    def write(reply: Message) -> None:
        size = reply.content["arrays"]["vector"].shape[0]
        reply.content["arrays"]["vector"] = wire.as_array(np.full(size, value, "<f4"))

    return write


def ending(error: BaseException) -> Callable[[Message], object]:
    def end_so(reply: Message) -> None:
        raise error

    return end_so


FAILURES: dict[str, Callable[[Message], object]] = {
    "an error": ending(ValueError("a secret of the data")),
    "its end": ending(SystemExit("a secret of the data")),
    "too deep": ending(RecursionError("a secret of the data")),
    "not a number": numbered(math.nan),
    "infinite": numbered(math.inf),
    "no type": of_type("a secret of the data,,"),
    "texts": of_type("<U1"),
    "whole numbers": of_type("int32"),
    "nothing": lambda reply: reply.content["arrays"].clear(),
}


@pytest.mark.parametrize("how", FAILURES)
def test_an_app_that_fails_sends_zeros_and_nobody_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    grid, vectors = Masked(5), sent_vectors(monkeypatch)
    real = grid.inner

    def failing(message: Message, context: Context) -> Message:
        reply = real(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 3:
            FAILURES[how](reply)
        return reply

    grid.inner = failing  # type: ignore[assignment]
    masked_run(grid, tmp_path, num_rounds=1, epsilon=3000.0)
    assert grid.refusals() == []
    assert not any("a secret" in str(reply.content) for *_, reply in grid.seen if reply)
    # A clip is many times the noise here: who trained is loud, who failed is noise alone.
    lengths = [float(np.linalg.norm(vectors[0, place])) for place in range(5)]
    assert 0 < 3 * lengths[3] < min(lengths[:3] + lengths[4:]), lengths


# -- a client that deviates


def spoil(grid: Masked, place: int, at: str, spoilt: Callable[[bytes], bytes]) -> None:
    """Let a node answer a step with something else."""
    keeper = grid.nodes[place]._call

    def call(request: str, *parts: bytes) -> bytes:
        answer = keeper(request, *parts)
        return spoilt(answer) if request == at else answer

    grid.nodes[place]._call = call


@pytest.mark.parametrize("at", STEPS)
def test_what_two_nodes_answer_falsely_costs_them_and_not_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    sums, vectors = opened_sums(monkeypatch), sent_vectors(monkeypatch)
    grid = Masked(10)
    spoil(grid, 0, at, lambda answer: b"")
    # Not its vector: whatever has the right length is one.
    spoil(grid, 9, "agree" if at == "mask" else at, lambda answer: answer[:-1] + b"!")
    masked_run(grid, tmp_path, num_rounds=1)
    before = {"advertise": {0, 9}, "share": {0}, "mask": {0}}.get(at, set())
    np.testing.assert_array_equal(
        sums[0], sum(vectors[0, client] for client in set(range(10)) - before)
    )
    assert grid.refusals() == []


def test_a_long_list_takes_as_much_longer_to_read_as_it_is() -> None:
    def seconds(entries: int) -> float:
        body, best = wire.write_map(dict.fromkeys(range(entries), b"")), math.inf
        for _ in range(3):
            began = time.process_time()
            assert len(wire.read_map(body)) == entries
            best = min(best, time.process_time() - began)
        return best

    assert seconds(16_000) < 32 * seconds(2_000), "eight times as long, not sixty-four"


def test_who_deals_false_shares_spoils_one_round_and_is_not_asked_again(tmp_path: Path) -> None:
    grid = Masked(5)

    def garbage(letters: bytes) -> bytes:
        tags = {c: letter[:32] for c, letter in wire.read_map(letters).items()}
        return wire.write_map({c: t + bytes(82) if c != 4 else t for c, t in tags.items()})

    spoil(grid, 4, "share", garbage)
    result = masked_run(grid, tmp_path, num_rounds=3)
    assert result.folder is not None
    assert charged_rounds(result.folder) == [0, 1, 2]
    text = (result.folder / "nodes.jsonl").read_text()
    assert text.count("shares of client 4 must be of the secrets") == 1
    lines = [json.loads(line) for line in (result.folder / "rounds.jsonl").read_text().splitlines()]
    assert [line["noise_std"] is not None for line in lines] == [False, True, True]
    assert [p for at, p, *_ in grid.seen if at == "advertise"].count(4) == 1


def test_a_sum_that_no_honest_clients_have_is_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = Masked(10)
    sums, real, draws = opened_sums(monkeypatch), Keeper._step, np.random.default_rng(1)

    def step(self: Keeper, request: str, held: Any, body: bytes) -> bytes:
        if request == "advertise" and held.client.client == 3:  # it has not clipped
            body = draws.integers(-(2**31), 2**31, len(body) // 8).astype("<i8").tobytes()
        return real(self, request, held, body)

    monkeypatch.setattr(Keeper, "_step", step)
    result = masked_run(grid, tmp_path, num_rounds=1)
    assert result.folder is not None
    assert len(sums) == 1
    assert (charged(result.folder) > 0).all(), "it was opened, so it is charged"
    assert "a sum of norm" in (result.folder / "nodes.jsonl").read_text()
    assert json.loads((result.folder / "rounds.jsonl").read_text())["noise_std"] is None


# -- a server that deviates


def test_another_model_for_one_client_ends_the_round(tmp_path: Path) -> None:
    def change(at: str, place: int, message: Message) -> Message:
        if at == "advertise" and place in (1, 2, 3, 4):  # four of ten: six are too few
            array = message.content["arrays"]["vector"]
            other = np.frombuffer(array.data, dtype="<f4") + 1
            message.content["arrays"]["vector"] = wire.as_array(other)
        return message

    grid = Masked(10, change=change)
    result = masked_run(grid, tmp_path, num_rounds=1)
    assert not [1 for at, *_ in grid.seen if at == "mask"]
    assert result.folder is not None
    assert (charged(result.folder) == 0).all()
    assert "its keys are not signed for this order" in (result.folder / "nodes.jsonl").read_text()


ATTACKS: dict[str, tuple[Callable[[dict[str, Any], Masked], dict[str, Any]], str]] = {
    "a stranger's key": (
        lambda facts, grid: {
            "roster": wire.write_map(
                {**wire.read_map(facts["roster"]), 9: verifying_key(new_signing_key())}
            )
        },
        "known keys only",
    ),
    "one client twice": (
        lambda facts, grid: {
            "roster": wire.write_map(
                {**(known := wire.read_map(facts["roster"])), 9: known[8]}
            )
        },
        "known keys only",
    ),
    "a shrunken cohort": (
        lambda facts, grid: {
            "roster": wire.write_map(
                {(own := facts["place"]): wire.read_map(facts["roster"])[own]}
            ),
            "least": 1,
        },
        "has 1 clients and must have 2",
    ),
    "fewer survivors": (lambda facts, grid: {"least": 5}, "least=5 must be from 6"),
    "another run": (lambda facts, grid: {"run": "flower-77"}, "must be flower-1"),
    "less noise": (lambda facts, grid: {"variance": 1}, "must name a clip, noise"),
    "fewer than none collude": (
        lambda facts, grid: {"colluding": -60}, "must name a clip, noise",
    ),
    "no bits": (lambda facts, grid: {"bits": 0}, "bits=0"),
}  # fmt: skip
Checks = tuple[tuple[ModuleType, str], ...]
CHECKS: dict[str, Checks] = {  # where each is, and its words in the source
    "a stranger's key": ((client_module, "known keys only"),),
    "one client twice": ((client_module, "known keys only"),),
    "a shrunken cohort": ((client_module, "clients and must have"),),
    "fewer survivors": ((client_module, "least={order.least}"),),
    "another run": ((keeper_module, "must be {wire.run_name"),),
    "less noise": ((wire, "must name a clip, noise"),),
    "fewer than none collude": (
        (wire, "must name a clip, noise"), (client_module, "colluding={order.colluding}"),
    ),
    "no bits": ((client_module, "bits={order.bits}"),),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_nodes_refuse_what_a_server_must_not_order_and_do_it_without_the_check(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    attack, words = ATTACKS[name]

    def change(at: str, place: int, message: Message) -> Message:
        if at == "advertise":  # the record is the same one for all: changed for this node alone
            facts = dict(message.content["secure"])
            changed = attack({**facts, "place": place}, grid)
            message.content["secure"] = ConfigRecord({**facts, **changed})
        return message

    grid = Masked(10, change=change)
    masked_run(grid, None, num_rounds=1)
    asked_first = [text for text in grid.refusals() if words in text]
    assert len(asked_first) >= 9, grid.refusals()
    assert not [1 for at, *_ in grid.seen if at == "share"]
    for module, check in CHECKS[name]:
        take_out(monkeypatch, module, check)
    grid = Masked(10, change=change)
    masked_run(grid, None, num_rounds=1)
    adverts = [bytes_of(reply) for reply in replies(grid, "advertise")]
    signed = [wire.read_advert(advert) for advert in adverts if advert]
    assert len(signed) >= 9, grid.refusals()  # a client whose key is another's has no part in it


def test_a_step_that_is_asked_twice_or_out_of_turn_ends_the_round_for_the_node(
    tmp_path: Path,
) -> None:
    held: dict[str, Message] = {}

    def change(at: str, place: int, message: Message) -> Message:
        if place == 0:
            held.setdefault(at, copy.deepcopy(message))
            if at == "agree":
                message.content["secure"]["step"] = "mask"
                message.content["arrays"] = held["mask"].content["arrays"]
        return message

    grid = Masked(10, change=change)
    masked_run(grid, tmp_path, num_rounds=1)
    assert "a vector is masked once" in grid.refusals()


def test_a_round_is_not_played_again(tmp_path: Path) -> None:
    held: list[Message] = []

    def change(at: str, place: int, message: Message) -> Message:
        if at == "advertise" and place == 0:
            held.append(copy.deepcopy(message))
            token = message.content["config"]["token"]
            for part in ("config", "secure", "arrays"):
                message.content[part] = copy.deepcopy(held[0].content[part])
            message.content["config"]["token"] = token
        return message

    grid = Masked(10, change=change)
    masked_run(grid, tmp_path, num_rounds=2)
    assert any("round 0 must be after round 0" in text for text in grid.refusals())


def test_no_noise_seed_comes_from_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for _ in range(2):
        vectors = sent_vectors(monkeypatch)

        def change(at: str, place: int, message: Message) -> Message:
            if at == "advertise":
                config = message.content["config"]
                told = {**json.loads(str(config["settings"])), "noise_seed": 1}
                config["settings"] = json.dumps(told)
            return message

        masked_run(Masked(5, change=change), None, num_rounds=1)
        seen.append(vectors[0, 0])
        monkeypatch.undo()
    assert (seen[0] != seen[1]).mean() > 0.5


def test_compressed_updates_are_refused(tmp_path: Path) -> None:
    engine = MaskedEngine(None, None, tiny(mode="certified"), FlowerSettings(compression="int8"))  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="must be 'none' under secure_aggregation"):
        engine.serve(None)  # type: ignore[arg-type]


# -- the keeper, and a site's policy


def test_a_keeper_in_a_process_of_its_own_answers_and_forgets_when_it_ends(tmp_path: Path) -> None:
    public = [keys.make_node_key(tmp_path / f"node{place}") for place in range(3)]
    roster = tmp_path / "roster.json"
    roster_of_keys((f"node{place}", key) for place, key in enumerate(public)).write(roster)
    identities = [Identity.of_files(tmp_path / f"node{place}", roster) for place in range(3)]
    known = {place: verifying_key(one.signing) for place, one in enumerate(identities)}
    assert all(der_fingerprint(key) in identities[0].names() for key in known.values())
    keeper = KeeperProcess(identities[0], prefork.fork)
    try:
        note = {"run": "flower-1", "round_index": 0, "client": 0, "least": 2, "colluding": 0,
                "size": 4, "bits": 16}  # fmt: skip
        told = json.dumps(note).encode()
        keeper("accept", told, wire.write_map(known), b"task", told)
        assert keeper("note", told) == told
        advert = wire.read_advert(keeper("advertise", told, np.arange(4).tobytes()))
        order = SumOrder("flower-1", 0, b"task", known, 2, 0, 4, 16)
        assert is_advert_of(order, 0, advert)
        with pytest.raises(ProtocolError, match="must be after round 0"):
            keeper("accept", told, wire.write_map(known), b"task", told)
        os.kill(keeper.pid, signal.SIGKILL)
        os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProtocolError, match="does not answer"):
            keeper("note", told)
        keeper.start()
        with pytest.raises(ProtocolError, match="nothing is known of round 0"):
            keeper("note", told)
        # Whoever kills a keeper, or the prefork server above it, gains no second turn at a round.
        with pytest.raises(ProtocolError, match="must be after round 0"):
            keeper("accept", told, wire.write_map(known), b"task", told)
        end(keeper)
        keeper = KeeperProcess(Identity.of_files(tmp_path / "node0", roster), prefork.fork)
        with pytest.raises(ProtocolError, match="must be after round 0"):
            keeper("accept", told, wire.write_map(known), b"task", told)
        later = json.dumps({**note, "round_index": 1}).encode()
        keeper("accept", later, wire.write_map(known), b"task", later)
    finally:
        end(keeper)
    assert json.loads((tmp_path / "node0.rounds").read_text()) == {"flower-1": 1}


def end(keeper: KeeperProcess) -> None:
    os.kill(keeper.pid, signal.SIGKILL)
    os.waitpid(keeper.pid, 0)


def test_a_node_remembers_the_runs_that_it_heard_of_last(tmp_path: Path) -> None:
    turns = tmp_path / "node.rounds"
    identity = Identity(new_signing_key(), dict, turns=turns)
    assert identity.played() == {}
    newest = {f"flower-{run}": run for run in range(1003)}
    identity.remember(newest)
    assert identity.played() == newest == {f"flower-{run}": run for run in range(3, 1003)}
    member = Member(0, {}, identity.signing, newest=identity.played())
    public = verifying_key(identity.signing)
    member.known = {0: public, 1: verifying_key(new_signing_key())}
    order = SumOrder("flower-3", 4, b"", member.known, 2, 0, 4, 16)
    member.accept(order)
    assert list(member.newest)[-1] == "flower-3", "a run that goes on is not the next to be dropped"
    turns.write_text('{"flower-1": "0"}')
    with pytest.raises(DataError, match="must hold the newest round of each run"):
        identity.played()


def test_a_keeper_takes_no_order_when_its_turns_cannot_be_read(tmp_path: Path) -> None:
    (node, *_), public = secure_nodes(2)
    keeper = node._call
    assert isinstance(keeper, Keeper)
    turns = tmp_path / "node.rounds"
    keeper._identity = dataclasses.replace(keeper._identity, turns=turns)
    turns.write_text("{")
    known = dict(enumerate(map(public_der, public)))
    note = {"run": "flower-1", "round_index": 0, "client": 0, "least": 2, "colluding": 0,
            "size": 4, "bits": 16}  # fmt: skip
    told = json.dumps(note).encode()
    with pytest.raises(DataError):
        keeper("accept", told, wire.write_map(known), b"task", told)
    turns.unlink()
    keeper("accept", told, wire.write_map(known), b"task", told)


def test_a_round_that_nobody_goes_on_with_leaves_no_secret() -> None:
    (node, *_), public = secure_nodes(2)
    keeper = node._call
    assert isinstance(keeper, Keeper)
    roster = wire.write_map(dict(enumerate(map(public_der, public))))

    def begin(run: str, index: int) -> Any:
        facts = {"run": run, "round_index": index, "client": 0, "least": 2, "colluding": 0,
                 "size": 4, "bits": 16}  # fmt: skip
        told = json.dumps(facts).encode()
        keeper("accept", told, roster, b"task", told)
        keeper("advertise", told, np.arange(1, 5).astype("<i8").tobytes())
        held = keeper._open[run]
        client = held.client
        return told, [held.vector, client._letter_key, client._mask_key, client._seed]

    _, first = begin("flower-1", 0)
    assert all(any(part) for part in first)
    told, second = begin("flower-1", 1)
    assert not any(any(part) for part in first), "the next round of its run has come"
    with pytest.raises(UnreadableError):
        keeper("share", told, b"nonsense")
    assert not any(any(part) for part in second), "it was refused"
    many = [begin(f"flower-{run}", 0)[1] for run in range(2, 11)]
    assert not any(any(part) for part in many[0]), "eight others are newer"
    assert all(all(any(part) for part in parts) for parts in many[1:])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a process of somebody else's")
def test_nobody_but_root_looks_into_a_keeper_and_it_leaves_no_core(tmp_path: Path) -> None:
    def as_nobody(work: Callable[[], object]) -> int:
        def there() -> None:
            os.setuid(65534)
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # a change of the user has cleared it
            os.write(told, b"?")
            os.read(go, 1)
            work()

        return prefork.fork(there)

    began, told = os.pipe()
    go, let = os.pipe()
    (node, *_), _public = secure_nodes(2)
    keeper = KeeperProcess(node._call._identity, as_nobody)  # type: ignore[attr-defined]
    try:
        os.read(began, 1)
        memory = Path(f"/proc/{keeper.pid}/mem")
        assert memory.stat().st_uid == 65534
        os.write(let, b"!")
        with pytest.raises(ProtocolError, match="nothing is known"):  # it serves
            keeper("note", b'{"run": "flower-1", "round_index": 0}')
        assert memory.stat().st_uid == 0
        limits = Path(f"/proc/{keeper.pid}/limits").read_text().splitlines()
        (core,) = [line.split()[4:6] for line in limits if line.startswith("Max core")]
        assert core == ["0", "0"]
    finally:
        end(keeper)


def recognisable(number: int) -> bytes:
    return b"FQSECRET" + os.getpid().to_bytes(8, "big") + number.to_bytes(16, "big")


def found_in(places: Mapping[str, bytes]) -> set[str]:
    """Return the places that hold a recognisable secret, as it is or in a usual spelling."""
    secret = b"FQSECRET"
    shifted = [base64.b64encode(b"\0" * k + secret)[k and 4 : 11] for k in range(3)]
    spellings = [secret, secret.hex().encode(), str(list(secret))[1:-1].encode(), *shifted]
    return {name for name, data in places.items() if any(one in data for one in spellings)}


def test_secrets_are_in_no_file_no_log_no_message_and_no_state_of_flower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, capfd: Any
) -> None:
    caplog.set_level(0)
    drawn = itertools.count()
    for module in (client_module, primitives):
        monkeypatch.setattr(
            module, "secret_bytes",
            lambda size: recognisable(next(drawn)) if size == 32 else os.urandom(size),
        )  # fmt: skip
    grid = Masked(5)
    keepers = []
    for place, node in enumerate(grid.nodes):
        own = dataclasses.replace(node._call._identity, turns=tmp_path / f"node{place}.rounds")  # type: ignore[attr-defined]
        keepers.append(KeeperProcess(own, prefork.fork))
        node._call = keepers[-1]
    try:
        masked_run(grid, tmp_path, num_rounds=2)
        assert grid.refusals() == []
    finally:
        for keeper in keepers:
            end(keeper)
    first = [wire.read_advert(bytes_of(reply)) for reply in replies(grid, "advertise")[:5]]
    assert all(b"FQSECRET" not in part.letters + part.masks + part.seed for part in first)
    owners = [int.from_bytes(recognisable(0)[8:16], "big")] + [one.pid for one in keepers]
    drawn_there = {
        primitives.public_of(b"FQSECRET" + pid.to_bytes(8, "big") + k.to_bytes(16, "big"))
        for pid in owners for k in range(20)
    }  # fmt: skip
    assert {advert.letters for advert in first} <= drawn_there, "these were the secrets of nodes"
    places = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    said = capfd.readouterr()
    places |= {"log": caplog.text.encode(), "out": said.out.encode(), "err": said.err.encode()}
    for node, context in grid.contexts.items():
        places[f"state of {node}"] = repr(context.state).encode()
    for number, (at, place, told, reply) in enumerate(grid.seen):
        for message in (told, reply):
            if message is not None and message.has_content():
                content = message.content
                arrays = (a for r in content.array_records.values() for a in r.values())
                data = b"".join(array.data for array in arrays) + repr(content).encode()
                places[f"{number} {at} {place} {message is told}"] = data
    assert found_in(places) == set()
    assert sum(len(data) for data in places.values()) > 100_000
    for leak in (b"seed " + recognisable(0), repr(recognisable(0)).encode(),
                 base64.b64encode(b"xy" + recognisable(0))):  # fmt: skip
        assert found_in({"leak": leak}) == {"leak"}


APP = "ab" * 32


class Sited(Masked):
    """Masked nodes each of which has a site before its app."""

    def __init__(self, folder: Path, count: int, **policy: Any) -> None:
        super().__init__(count)
        self.sites = []
        for place in range(count):
            path = folder / f"site{place}" / "site.toml"
            path.parent.mkdir(parents=True)
            usual = {"apps": (APP,), "epsilon": 9.0, "secure_aggregation": "required"}
            path.write_text(policy_text(**{**usual, **policy}))
            self.sites.append(Site(path, None, self.nodes[place]))

    def _masked(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query":
            return self.inner(message, context)
        site = self.sites[int(context.node_config["partition-id"])]
        return site.answer(message, context, APP, lambda: self.inner)


def given_away(site: Site) -> float:
    policy = read_policy(site.path)
    if not account_path(site.path, policy).exists():
        return 0.0
    ledger, population = site_account(account_path(site.path, policy), policy, read_only=True)
    with ledger:
        return float(population.spent()[0])


def test_a_site_charges_itself_what_its_own_computation_says(tmp_path: Path) -> None:
    grid = Sited(tmp_path / "sites", 5, min_survivors=4)
    result = masked_run(grid, tmp_path / "runs", num_rounds=2)
    assert grid.refusals() == []
    assert result.folder is not None
    own = [given_away(site) for site in grid.sites]
    asked = [wire.read_first(m.content)[0] for at, p, m, _ in grid.seen if at == STEPS[0] and not p]
    for order in asked:
        grid_step = order.order.noise_std / order.variance**0.5
        square = (order.order.clip / grid_step) ** 2 + order.total.size / 4
        per_unit = (1 + 1 / (6 * order.variance)) ** 2 / order.variance
        assert order.charge == pytest.approx(square * per_unit, rel=1e-3)
    # Five answer where four must: what that saves comes off the next charge, not the last one.
    first, last = (order.charge for order in asked)
    assert own == pytest.approx([0.8 * first + last] * 5, rel=1e-4)
    assert charged(result.folder) == pytest.approx([0.8 * (first + last)] * 5, rel=1e-3)


def test_a_site_takes_nothing_off_before_it_has_seen_who_survived(tmp_path: Path) -> None:
    for step, saved in (("agree", False), ("unmask", False), ("", True)):
        grid = Sited(tmp_path / f"at-{step}", 5)
        grid.lost = {(0, step): {1}}
        result = masked_run(grid, tmp_path / f"{step}-runs", num_rounds=4, policy="worst_case")
        first, *last = (
            wire.read_first(m.content)[0].charge
            for at, place, m, _ in grid.seen
            if at == STEPS[0] and place == 1
        )
        own = given_away(grid.sites[1])
        paid = 0.8 * first + 0.8 * sum(last[:2]) + last[2]
        if not saved:  # what it has paid too much once, it has not left for the last round
            paid = first + 0.8 * last[0] + last[1]
            assert any("used up" in text for text in grid.refusals())
        assert own == pytest.approx(paid, rel=1e-3)
        assert result.folder is not None
        assert own >= charged(result.folder)[1]


def test_a_site_is_charged_from_when_its_vector_has_left(tmp_path: Path) -> None:
    for step, is_charged in (("share", False), ("mask", False), ("agree", True)):
        grid = Sited(tmp_path / step, 5)
        grid.lost = {(0, step): {1}}
        masked_run(grid, tmp_path / f"{step}-runs", num_rounds=1)
        assert (given_away(grid.sites[1]) > 0) == is_charged
        assert given_away(grid.sites[0]) > 0


def test_another_run_of_the_same_server_charges_a_site_for_no_round(tmp_path: Path) -> None:
    grid, told = Sited(tmp_path / "sites", 5), list[tuple[str, float]]()
    site = grid.sites[0]

    def change(at: str, place: int, message: Message) -> Message:
        if at == "mask" and place == 0:
            own = grid.contexts[message.metadata.dst_node_id]
            other = dataclasses.replace(own, run_id=77)
            reply = site.answer(copy.deepcopy(message), other, APP, lambda: grid.inner)
            told.append((wire.unpack_reply(reply.content, 0).refusal, given_away(site)))
        return message

    grid.change = change
    masked_run(grid, tmp_path / "runs", num_rounds=1)
    assert told == [("run 'flower-1' must be this one", 0.0)]
    assert grid.refusals() == [], "and its own run goes on"
    assert given_away(site) > 0


SITE_REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "plain updates": ({}, {"secure_aggregation": "off"}, "under masks only"),
    "simulated masks": ({}, {"secure_aggregation": "simulated"}, "under masks only"),
    "too few survivors": ({"min_survivors": 5}, {}, "survivors=4 is fewer than 5"),
    "no room for traitors": ({"colluding_clients": 1}, {}, "colluding=0 must be at least 1"),
    "a small cohort": ({"min_cohort": 6}, {}, "cohort=5 is fewer than 6"),
    "a dearer round": ({"round_epsilon": 0.5}, {}, "the round costs"),
}
SITE_CHECKS: dict[str, Checks] = {
    "plain updates": ((policy_module, "under masks only"),),
    "simulated masks": ((policy_module, "under masks only"),),
    "too few survivors": ((policy_module, "survivors={survivors}"),),
    "no room for traitors": ((client_module, "colluding={order.colluding}"),),
    "a small cohort": (
        (policy_module, "{name}={value} is fewer"), (client_module, "clients and must have"),
    ),
    "a dearer round": ((policy_module, "the round costs"),),
}  # fmt: skip


@pytest.mark.parametrize("name", SITE_REFUSALS)
def test_a_site_refuses_what_its_policy_does_not_allow_and_does_it_without_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    policy, options, words = SITE_REFUSALS[name]
    grid = Sited(tmp_path / "sites", 5, **policy)
    masked_run(grid, tmp_path / "runs", num_rounds=1, **options)
    assert len(grid.refusals()) == 5
    assert all(words in text for text in grid.refusals()), grid.refusals()
    assert [given_away(site) for site in grid.sites] == [0] * 5
    for module, check in SITE_CHECKS[name]:
        take_out(monkeypatch, module, check)
    grid = Sited(tmp_path / "others", 5, **policy)
    masked_run(grid, tmp_path / "runs", num_rounds=1, **options)
    assert grid.refusals() == []
    assert all(given_away(site) > 0 for site in grid.sites), "it has let out what it must not"
