"""Who is who: fingerprints of keys, rosters, nodes under new numbers, the ledger's accounts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives import serialization

from command_line import Said
from fedquilt.common.errors import InvalidValueError, NotReadyError
from fedquilt.flower import keys
from fedquilt.flower.client_registry import KeyRegistry, NodeRoster, key_fingerprint, roster_of_keys
from fedquilt.flower.node import client_app
from fedquilt.flower.policy import SitePolicy, read_policy
from fedquilt.flower.server import run_from
from fedquilt.flower.simulate import InProcessGrid
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
    assert key_fingerprint(public[0]) == key_fingerprint(pem(public[0]))
    assert len({key_fingerprint(key) for key in public}) == COUNT + 1
    with pytest.raises(InvalidValueError, match="cannot be read"):
        key_fingerprint(b"ssh-rsa nonsense")


def test_a_known_key_has_a_known_fingerprint(tmp_path: Path) -> None:
    """The SHA-256 of the DER form, as `openssl pkey -pubin -outform DER | sha256sum` has it."""
    import hashlib

    public = keys.make_node_key(tmp_path / "node")
    key = serialization.load_ssh_public_key(public)
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert key_fingerprint(public) == "key:" + hashlib.sha256(der).hexdigest()


def test_a_new_key_is_added_behind_the_account(public: list[bytes], tmp_path: Path) -> None:
    roster = roster_of_keys([("a", public[0]), ("b", public[1])])
    rotated = roster.with_key("a", key_fingerprint(public[2]))
    assert rotated.client_ids == roster.client_ids
    assert rotated.client_of()[key_fingerprint(public[2])] == 0
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
    assert KeyRegistry(grid, roster).nodes() == {0: 1004, 1: 1000}


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
    rotated = roster.with_key("ward 1", key_fingerprint(public[4]))
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
    four = three.with_key("ward 3", key_fingerprint(public[3]))
    result = run([pem(key) for key in public[1:4]], tmp_path, monkeypatch, four)
    assert result.result["ledger"]["enrolled"] == 1
    assert any("1 of the clients were charged in no" in note for note in result.statement.notes)
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
    monkeypatch.setenv("FEDQUILT_FLOWER_ALLOW_UNBOUNDED", "yes")
    run(held, tmp_path, monkeypatch, roster, mode="fedavg")
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        (population,) = ledger.populations()
        assert np.isinf(population.spent()).all()


def test_a_run_cannot_choose_the_operators_places(
    public: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "ledger",
        "output_dir",
        "population",
        "data-dir",
        "allow_unbounded",
        "spend-everything",
    ):
        with pytest.raises(InvalidValueError, match="must not stand in a run configuration"):
            run_from(grid_of([b""]), {name: "/tmp/elsewhere"}, make_model, test_data)


def test_a_client_takes_a_seat_and_keeps_its_account(public: list[bytes], tmp_path: Path) -> None:
    roster = roster_of_keys([("a", public[0])]).with_reserved_slots(2)
    accounts = roster.client_ids
    assert [len(account) for account in accounts[1:]] == [69, 69]
    joined = roster.with_client("b", key_fingerprint(public[1])).with_client(
        "c", key_fingerprint(public[2])
    )
    assert joined.names == ("a", "b", "c")
    assert joined.client_ids == accounts
    assert joined.reserved_slots == ()
    assert joined.client_of()[key_fingerprint(public[2])] == 2
    later = joined.with_client("d", key_fingerprint(public[3]))
    assert later.client_ids[3] == key_fingerprint(public[3]), "there is no seat left"
    joined.write(tmp_path / "roster.json")
    assert NodeRoster.read(tmp_path / "roster.json") == joined
    for name, key in (("a", public[3]), ("d", public[2])):
        with pytest.raises(InvalidValueError, match="must be new"):
            joined.with_client(name, key_fingerprint(key))


def test_an_old_key_counts_no_more(public: list[bytes]) -> None:
    roster = roster_of_keys([("a", public[0]), ("b", public[1])])
    rotated = roster.rotated("a", key_fingerprint(public[2])).rotated(
        "a", key_fingerprint(public[3])
    )
    assert rotated.client_ids == roster.client_ids
    grid = grid_of([pem(public[0]), pem(public[2]), pem(public[3])])
    assert KeyRegistry(grid, rotated).nodes() == {0: 1002}
    with pytest.raises(InvalidValueError, match="must be new"):
        rotated.rotated("b", key_fingerprint(public[2]))
    with pytest.raises(InvalidValueError, match="client 'c' must be one of 'a', 'b'"):
        rotated.rotated("c", key_fingerprint(public[4]))


class Changing(InProcessGrid):
    """A grid during whose second round the roster's file changes."""

    def __init__(self, held: list[bytes], change: Callable[[], None], orders: int = 99) -> None:
        super().__init__(client_app(make_model, client_data), len(held), public_keys=held)
        self._change, self._left = change, orders
        self.asked: list[tuple[int, int]] = []

    def get_nodes(self) -> Any:
        return super().get_nodes() if self._left > 0 else []

    def _answer(self, message: Any) -> Any:
        index = message.content["config"]["round_index"]
        if index == 1 and not any(asked[0] == 1 for asked in self.asked):
            self._change()
        self.asked.append((index, message.metadata.dst_node_id - 1000))
        self._left -= 1
        return super()._answer(message)


def during(grid: InProcessGrid, path: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Any:
    monkeypatch.setenv("FEDQUILT_FLOWER_ROSTER", str(path))
    monkeypatch.setenv("FEDQUILT_FLOWER_OUTPUT", str(path.parent / "results"))
    options = {"mode": "certified", "epsilon": 8.0, "num_rounds": 4, "local_epochs": 1}
    more = {"clients_per_round": 1.0, "flower_poll": 0.01, "flower_wait": 0.2}
    return run_from(grid, {**options, **more, **given}, make_model, test_data)


def test_nodes_join_and_change_keys_while_a_run_goes_on(
    public: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "roster.json"
    roster = roster_of_keys([("a", public[0]), ("b", public[1])]).with_reserved_slots(1)
    roster.write(path)

    def change() -> None:
        new = roster.rotated("b", key_fingerprint(public[2]))
        new.with_client("c", key_fingerprint(public[3])).with_client(
            "too late", key_fingerprint(public[4])
        ).write(path)

    grid = Changing([pem(key) for key in public], change)
    result = during(grid, path, monkeypatch)
    rounds = {index: sorted(n for i, n in grid.asked if i == index) for index in range(4)}
    assert rounds == {0: [0, 1], 1: [0, 1], 2: [0, 2, 3], 3: [0, 2, 3]}
    assert result.result["cohorts"] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    with Ledger.open(result.folder / "ledger.sqlite") as ledger:
        (population,) = ledger.populations()
        assert tuple(population.ids()) == roster.client_ids
        assert population.joins().tolist() == [4, 4, 2]


def test_a_run_is_resumed_with_its_own_clients_after_others_have_joined(
    public: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "roster.json"
    roster = roster_of_keys([("a", public[0]), ("b", public[1])])
    roster.write(path)
    held = [pem(key) for key in public[:3]]
    with pytest.raises(NotReadyError):
        during(Changing(held, lambda: None, orders=4), path, monkeypatch)
    roster.with_client("c", key_fingerprint(public[2])).write(path)
    result = during(grid_of(held), path, monkeypatch, flower_resume=True)
    assert result.result["rounds"] == 4
    assert result.result["cohorts"] == [[0, 1]] * 4


def test_a_roster_that_cannot_be_read_changes_nothing(public: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    roster = roster_of_keys([("a", public[0])])
    path.write_text("{half")
    registry = KeyRegistry(grid_of([pem(public[0])]), roster, path)
    assert registry.nodes() == {0: 1000}
    roster_of_keys([("b", public[1])]).write(path)
    assert registry.nodes() == {}, "its line is gone"


def test_the_commands_of_a_servers_roster(
    cli: Callable[..., Said], public: list[bytes], tmp_path: Path
) -> None:
    path, key = str(tmp_path / "roster.json"), [str(tmp_path / f"node{i}.pub") for i in range(4)]
    assert cli("flower", "enroll", "a", key[0], "--roster", path).code == 0
    assert cli("flower", "seats", "1", "--roster", path).code == 0
    seat = NodeRoster.read(path).client_ids[1]
    assert cli("flower", "enroll", "b", key[1], "--roster", path).code == 0
    handed = read_policy(tmp_path / "node1.site.toml")
    kept = "/var/lib/fedquilt/site.sqlite"
    assert handed == SitePolicy(client=seat, account=kept), "certified runs of this account alone"
    said = cli("flower", "rotate", "b", "--key", key[2], "--roster", path)
    assert said.out.strip() == key_fingerprint(public[2])
    roster = NodeRoster.read(path)
    assert roster.keys["b"] == (seat, key_fingerprint(public[1]), key_fingerprint(public[2]))
    assert roster.revoked == {key_fingerprint(public[1])}
    assert cli("flower", "enroll", "b", key[3], "--roster", path).code == 2
    assert cli("flower", "enroll", "c", str(tmp_path / "none"), "--roster", path).code == 2
    assert cli("flower", "rotate", "b", "--key", key[3]).code == 2
    assert NodeRoster.read(path) == roster
