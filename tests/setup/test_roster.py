"""A roster that lives: clients join, leave, hold nothing, come back; nobody's spend is lost."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.errors import InvalidValueError, RunFolderError, RunInterrupted
from fedquilt.experiment.api import RunResult
from fedquilt.privacy.ledger import Ledger, LedgerConflictError
from gaussian_oracle import exact_epsilon

pytestmark = pytest.mark.usefixtures("one_thread")

ALLOWANCE, DELTA = 6.0, 1e-5
SETTINGS: dict[str, Any] = {
    "mode": "certified",
    "availability": "uniform",
    "clients_per_round": 0.5,
    "num_rounds": 6,
    "local_epochs": 1,
    "delta": DELTA,
    "output_dir": None,
}
Parts = dict[str, list[int]]


def data(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.rand(200, 4, generator=draws), torch.arange(200) % 2


def run(folder: Path, clients: Any, samples: Any = None, **changes: Any) -> RunResult:
    torch.manual_seed(0)
    own = {"ledger": str(folder / "hospitals.sqlite"), "population": "hospitals"}
    samples = data() if samples is None else samples
    settings = {**SETTINGS, **own, **changes}
    if settings["mode"] == "fedavg" and settings["ledger"] is None:
        del settings["delta"]  # nothing there says it of anybody
    return fedquilt.run(nn.Linear(4, 2), samples, data(2), clients, **settings)


def balances(folder: Path) -> dict[str, float]:
    with Ledger.open(folder / "hospitals.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok
        found = ledger.population("hospitals")
        return dict(zip(found.ids(), found.spent().tolist(), strict=True))


def charges(folder: Path) -> dict[str, list[float]]:
    """Read every settled charge out of the file, without the code that adds them up."""
    import sqlite3

    from fedquilt.privacy.ledger.entries import decode_charges, decode_clients

    with Ledger.open(folder / "hospitals.sqlite", read_only=True) as ledger:
        ids = ledger.population("hospitals").ids()
    opened = sqlite3.connect(folder / "hospitals.sqlite")
    query = (
        "SELECT r.clients, r.charges FROM entries s JOIN entries r ON s.reservation = r.seq "
        "WHERE s.kind = 'settle'"
    )
    found: dict[str, list[float]] = {name: [] for name in ids}
    for clients, amounts in opened.execute(query):
        who = decode_clients(clients, len(ids))
        for client, charge in zip(who, decode_charges(amounts, who.size), strict=True):
            found[ids[client]].append(float(charge))
    opened.close()
    return found


def hospitals(numbers: Any) -> Parts:
    return {f"hospital {k}": list(range(5 * k, 5 * k + 5)) for k in numbers}


def test_the_story_of_a_roster(tmp_path: Path) -> None:
    """30 clients, a run; five join, two leave, one is empty, the order is shuffled; a run."""
    first = run(tmp_path, hospitals(range(30)), epsilon=3.0, allowance=ALLOWANCE)
    before = balances(tmp_path)
    assert len(before) == 30

    now = hospitals(range(35))
    left = {name: now.pop(name) for name in ("hospital 3", "hospital 17")}
    now["hospital 8"] = []
    shuffled = list(now.items())
    np.random.default_rng(7).shuffle(shuffled)  # type: ignore[arg-type]
    second = run(tmp_path, {str(name): list(part) for name, part in shuffled}, epsilon=4.0)
    after = balances(tmp_path)

    assert set(after) == set(hospitals(range(35)))
    assert list(after)[:30] == list(before), "members keep their places in the ledger"
    assert all(after[name] == before[name] for name in left), "who stayed away pays nothing"
    joined = dict(zip([name for name, _ in shuffled], second.result["joins"], strict=True))
    for name, times in joined.items():
        paid = after[name] - before.get(name, 0.0)
        assert (paid > 0) == (times > 0), name
    assert joined["hospital 8"] > 0, "the empty one is a client like any other"
    assert first.result["ledger"]["created"] == "ledger"
    untouched = sum(not before.get(name) for name in joined)
    assert second.result["ledger"]["enrolled"] == untouched >= 5

    # They come back, in any order, and nobody can be taken above its allowance.
    everybody = hospitals(reversed(range(35)))
    last = run(tmp_path, everybody, epsilon=ALLOWANCE, if_exhausted="sit_out", num_rounds=3)
    check_lifetimes(tmp_path, last)


def check_lifetimes(folder: Path, last: RunResult) -> None:
    """Compare every account with the Gaussian formula over the charges in the file."""
    with Ledger.open(folder / "hospitals.sqlite", read_only=True) as ledger:
        found = ledger.population("hospitals")
        told = dict(zip(found.ids(), found.epsilons().tolist(), strict=True))
    paid = charges(folder)
    assert any(len(amounts) > 6 for amounts in paid.values()), "somebody was in several runs"
    for name, amounts in paid.items():
        true = exact_epsilon(float(np.sqrt(np.sum(amounts))), DELTA) if amounts else 0.0
        assert told[name] == pytest.approx(true, rel=1e-6, abs=1e-9)
        assert true <= ALLOWANCE * (1 + 1e-9)
    assert last.result["ledger"]["lifetime_epsilon_max"] == pytest.approx(max(told.values()))


def test_hospitals_without_names_are_told_how_to_get_them(tmp_path: Path) -> None:
    """The hint once was to use another name, with which 30 clients had two allowances."""
    thirty = list(hospitals(range(30)).values())
    run(tmp_path, thirty, epsilon=3.0, allowance=ALLOWANCE)
    with pytest.raises(LedgerConflictError, match=r"adopt_ids\(\[\.\.\.\]\)"):
        run(tmp_path, list(hospitals(range(35)).values()), epsilon=3.0)
    for clients in (hospitals(range(35)), list(hospitals(range(35)).values())):
        with pytest.raises(InvalidValueError, match="30 clients, known by number, may be among"):
            run(tmp_path, clients, epsilon=3.0, population="another name", allowance=ALLOWANCE)

    with Ledger.open(tmp_path / "hospitals.sqlite") as ledger:
        spent = ledger.population("hospitals").spent().tolist()
        ledger.population("hospitals").adopt_ids(hospitals(range(30)))
    run(tmp_path, hospitals(range(35)), epsilon=3.0)
    after = balances(tmp_path)
    assert len(after) == 35
    assert all(after[f"hospital {k}"] >= amount for k, amount in enumerate(spent))


# Overlap

SHARED = {"north": [0, 1, 2], "south": [3, 2], "east": [4]}


def test_clients_that_share_a_sample_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"'north' and 'south' must not both hold sample 2"):
        run(tmp_path, SHARED, epsilon=3.0)
    with pytest.raises(InvalidValueError, match=r"clients\[0\] and clients\[1\] must not both"):
        run(tmp_path, list(SHARED.values()), epsilon=3.0)
    assert not (tmp_path / "hospitals.sqlite").exists()
    shared = run(tmp_path, SHARED, epsilon=3.0, allow_overlap=True)
    assert any("protected as a group of g" in note for note in shared.statement.notes)


def test_a_sample_twice_at_one_client_is_nobody_elses(tmp_path: Path) -> None:
    result = run(tmp_path, {"north": [0, 0, 1], "south": [2]}, epsilon=3.0)
    assert not any("group of g" in note for note in result.statement.notes)


# Resuming


class Stop:
    """An observer that interrupts the run after its first round."""

    def __call__(self, config: object, line: dict[str, Any]) -> None:
        if line["round"] == 0:
            raise KeyboardInterrupt


def stopped(folder: Path, clients: Any, **changes: Any) -> Path:
    with pytest.raises(RunInterrupted) as interrupted:
        run(folder, clients, observer=Stop(), output_dir=str(folder / "runs"), **changes)
    assert interrupted.value.folder is not None
    return Path(interrupted.value.folder)


@pytest.mark.parametrize("mode", ["certified", "fedavg"])
def test_a_run_is_resumed_with_the_data_it_was_begun_with(tmp_path: Path, mode: str) -> None:
    settings = {"mode": mode, "ledger": None, "population": None}
    clients = hospitals(range(4))
    folder = stopped(tmp_path, clients, **settings)
    inputs, targets = data()
    moved = inputs.clone()
    moved[3, 2] += 1e-3
    for samples in ((torch.rand_like(inputs), targets), (inputs, 1 - targets), (moved, targets)):
        with pytest.raises(RunFolderError, match="begun with other training data"):
            run(tmp_path, clients, samples, resume=folder, **settings)
    with pytest.raises(RunFolderError, match="begun with other clients"):
        run(tmp_path, dict(reversed(clients.items())), resume=folder, **settings)
    assert run(tmp_path, clients, resume=folder, **settings).result["rounds"] == 6


def test_the_digest_of_the_data_is_the_owners_and_salted(tmp_path: Path) -> None:
    clients, kept = hospitals(range(4)), []
    for name in ("one", "two"):
        folder = stopped(tmp_path / name, clients, ledger=None, population=None)
        path = folder / "clients.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        kept.append(json.loads(path.read_text()))
        public = [file for file in folder.iterdir() if file.stat().st_mode & 0o077]
        assert public
        assert not any(kept[-1]["training"].encode() in file.read_bytes() for file in public)
    assert kept[0]["training"] != kept[1]["training"], "the same data, under two salts"


def test_a_folder_of_an_older_version_is_resumed(tmp_path: Path) -> None:
    clients = hospitals(range(4))
    folder = stopped(tmp_path, clients, ledger=None, population=None)
    (folder / "clients.json").unlink()
    assert run(tmp_path, clients, resume=folder, ledger=None, population=None).result["rounds"] == 6
