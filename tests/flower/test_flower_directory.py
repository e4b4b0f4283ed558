"""Who is who: fingerprints of keys, rosters, nodes under new numbers, the ledger's accounts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives import serialization

from fedquilt.common.errors import InvalidValueError
from fedquilt.flower import keys
from fedquilt.flower.apps import client_app, run_from
from fedquilt.flower.directory import KeyDirectory, NodeRoster, fingerprint, roster_of_keys
from fedquilt.flower.grid import InProcessGrid
from fedquilt.privacy.ledger import Ledger
from flower_samples import COUNT, client_data, make_model, test_data


def pem(public: bytes) -> bytes:
    key = serialization.load_ssh_public_key(public)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, form)


@pytest.fixture
def public(tmp_path: Path) -> list[bytes]:
    return [keys.make_node_key(tmp_path / f"node{i}") for i in range(COUNT + 1)]


def test_a_key_has_one_fingerprint_in_every_form(public: list[bytes]) -> None:
    assert fingerprint(public[0]) == fingerprint(pem(public[0]))
    assert len({fingerprint(key) for key in public}) == COUNT + 1
    with pytest.raises(InvalidValueError, match="cannot be read"):
        fingerprint(b"ssh-rsa nonsense")


def test_a_known_key_has_a_known_fingerprint(tmp_path: Path) -> None:
    """The SHA-256 of the DER form, as `openssl pkey -pubin -outform DER | sha256sum` has it."""
    import hashlib

    public = keys.make_node_key(tmp_path / "node")
    key = serialization.load_ssh_public_key(public)
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert fingerprint(public) == "key:" + hashlib.sha256(der).hexdigest()


def test_a_new_key_is_added_behind_the_account(public: list[bytes], tmp_path: Path) -> None:
    roster = roster_of_keys([("a", public[0]), ("b", public[1])])
    rotated = roster.with_key("a", fingerprint(public[2]))
    assert rotated.client_ids == roster.client_ids
    assert rotated.client_of()[fingerprint(public[2])] == 0
    rotated.write(tmp_path / "roster.json")
    assert NodeRoster.read(tmp_path / "roster.json") == rotated


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({}, "at least one client"),
        ({"a": ()}, "must have a fingerprint"),
        ({"a": ("key:12",)}, "64 hexadecimal digits"),
        ({"a": ("key:" + "0" * 64,), "b": ("key:" + "0" * 64,)}, "must be of one client"),
    ],
)
def test_rosters_that_would_mix_accounts_are_refused(
    clients: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        NodeRoster(clients)


def grid_of(held: list[bytes]) -> InProcessGrid:
    return InProcessGrid(client_app(make_model, client_data), len(held), public_keys=held)


def test_nodes_without_a_key_of_the_roster_are_nobody(public: list[bytes]) -> None:
    roster = roster_of_keys([("a", public[0]), ("b", public[1])])
    grid = grid_of([pem(public[1]), b"", pem(public[4]), b"nonsense", pem(public[0])])
    assert KeyDirectory(grid, roster).nodes() == {0: 1004, 1: 1000}


def run(
    held: list[bytes],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    roster: NodeRoster,
    **given: Any,
) -> Any:
    roster.write(folder / "roster.json")
    for name, value in {
        "ROSTER": folder / "roster.json",
        "OUTPUT": folder / "results",
        "LEDGER": folder / "ledger.sqlite",
        "POPULATION": "wards",
    }.items():
        monkeypatch.setenv(f"FEDQUILT_FLOWER_{name}", str(value))
    options = {"mode": "certified", "epsilon": 2.0, "num_rounds": 1, "local_epochs": 1}
    more = {"clients_per_round": 1.0, "allowance": 10.0, "flower_poll": 0.01}
    return run_from(grid_of(held), {**options, **more, **given}, make_model, test_data)


def test_accounts_follow_keys_over_restarts_new_numbers_and_new_keys(
    public: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roster = roster_of_keys([(f"ward {i}", public[i]) for i in range(COUNT)])
    held = [pem(key) for key in public[:COUNT]]
    run(held, tmp_path, monkeypatch, roster)
    run(held[::-1], tmp_path, monkeypatch, roster)  # every node has another number
    rotated = roster.with_key("ward 1", fingerprint(public[4]))
    run([held[0], pem(public[4]), *held[2:]], tmp_path, monkeypatch, rotated)
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        (population,) = ledger.populations()
        assert tuple(population.ids()) == roster.client_ids
        spent = population.spent()
    assert len(set(spent.tolist())) == 1, "everybody has joined three times"
    assert spent[0] > 0


def test_a_joining_node_is_enrolled_and_a_leaving_one_keeps_its_account(
    public: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = roster_of_keys([(f"ward {i}", public[i]) for i in range(3)])
    run([pem(key) for key in public[:3]], tmp_path, monkeypatch, three)
    four = three.with_key("ward 3", fingerprint(public[3]))
    result = run([pem(key) for key in public[1:4]], tmp_path, monkeypatch, four)
    assert result.result["ledger"]["enrolled"] == 1
    assert any("1 clients joined with this run" in note for note in result.statement.notes)
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        (population,) = ledger.populations()
        spent = dict(zip(population.ids(), population.spent().tolist(), strict=True))
    first, *_, last = four.client_ids
    assert spent[first] > 0, "it was away, and its account is there"
    assert spent[last] == pytest.approx(spent[first])


def test_only_the_operator_lets_a_run_end_the_bounds_of_a_ledger(
    public: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roster = roster_of_keys([(f"ward {i}", public[i]) for i in range(COUNT)])
    held = [pem(key) for key in public[:COUNT]]
    run(held, tmp_path, monkeypatch, roster)
    with pytest.raises(InvalidValueError, match=f"{COUNT} of {COUNT} clients .* have a bound"):
        run(held, tmp_path, monkeypatch, roster, mode="fedavg")
    monkeypatch.setenv("FEDQUILT_FLOWER_SPEND_EVERYTHING", "yes")
    run(held, tmp_path, monkeypatch, roster, mode="fedavg")
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        (population,) = ledger.populations()
        assert np.isinf(population.spent()).all()


def test_a_run_cannot_choose_the_operators_places(
    public: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ledger", "output_dir", "population", "data-dir", "spend_everything"):
        with pytest.raises(InvalidValueError, match="must not stand in a run configuration"):
            run_from(grid_of([b""]), {name: "/tmp/elsewhere"}, make_model, test_data)
