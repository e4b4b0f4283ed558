"""Whether a run is bounded, and whether it claims something: one answer each, at every place."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from fedquilt.config import MODE_TABLE, plain_config
from fedquilt.experiment.api import run_config
from fedquilt.record.folder import RunFolder
from fedquilt.setup.account import is_bounded, needs_account, open_account
from fedquilt.setup.build_task import build_task
from fedquilt.setup.federation import build_federation
from run_samples import TINY

CONDENSED = {"method": "condense", "dataset": "digits", "num_clients": 3, "num_rounds": 1, "ipc": 1}
# settings, whether charges are known in advance, whether something is claimed
CASES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "fedavg": ({"mode": "fedavg"}, False, False),
    "fixed_dp, all": ({"mode": "fixed_dp", "noise_layers": "all"}, True, True),
    "fixed_dp, some": ({"mode": "fixed_dp", "noise_layers": "fc.weight"}, False, False),
    "fixed_dp, seeded": (
        {"mode": "fixed_dp", "noise_layers": "all", "noise_seed": 1},
        False,
        False,
    ),
    "quap_fl, all": ({"mode": "quap_fl", "noise_layers": "all"}, False, False),
    "quap_fl_client": ({"mode": "quap_fl_client"}, False, False),
    "certified": ({"mode": "certified"}, True, True),
    "certified, seeded": ({"mode": "certified", "noise_seed": 1}, True, False),
    "sliced": ({"mode": "certified", "method": "heterofl", "model": "mlp"}, True, True),
}


@pytest.mark.parametrize("name", CASES)
def test_everybody_gives_the_same_answer(name: str, tmp_path: Path) -> None:
    settings, bounded, claims = CASES[name]
    merged = {**TINY, "noise_seed": None, "output_dir": str(tmp_path), **settings}
    config, problem = build_task(plain_config(merged))
    assert is_bounded(config, problem) == needs_account(config, problem) == bounded
    account = open_account(config, problem, tmp_path / "ledger.sqlite", "run") if bounded else None
    federation = build_federation(config, problem, account)
    assert federation.mechanism.is_bounded == bounded
    assert federation.mechanism.claims == claims
    if account is not None:
        assert account.is_bounded
        account.close()
    done = run_config(config)
    assert done.statement.is_bounded == claims
    assert done.folder is not None
    assert (done.folder / "private.jsonl").exists() == bounded


def test_every_mode_is_among_the_cases() -> None:
    met = {settings["mode"] for settings, _, _ in CASES.values()}
    assert met == {name for name, mode in MODE_TABLE.items() if mode.trains}


@pytest.mark.parametrize("mode", ["certified", "fednum"])
def test_baselines_beside_a_bounded_run_are_the_owner_s(mode: str, tmp_path: Path) -> None:
    config = plain_config({**CONDENSED, "mode": mode})
    folder = RunFolder.create(config, str(tmp_path))
    folder.write_baselines({}, [])
    folder.close()
    found = stat.S_IMODE((folder.path / "baselines.json").stat().st_mode)
    (tmp_path / "plain").touch()
    usual = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert found == (0o600 if mode == "certified" else usual)
    assert config.is_bounded(covered=True) == (mode == "certified")
