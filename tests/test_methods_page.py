"""Pages of the parts of a round against the package: what is kept and what is refused, and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from whole_cases import QUICK, ROADMAP, whole_cases

from fedquilt.audit.cases import CASES
from fedquilt.common.errors import InvalidValueError
from fedquilt.config import build_config
from fedquilt.config.choices import (
    AGGREGATIONS,
    ATTACKS,
    COLLUDING_ATTACKS,
    COMPRESSIONS,
    CORRECTIONS,
    PERSONAL,
    SECURE_AGGREGATION,
)
from fedquilt.experiment.api import run_in_memory
from fedquilt.training.attacks import poisoned
from run_samples import tiny

DOCS = Path(__file__).parents[1] / "docs"

_POISON = ("label_flip", "backdoor")
_OWN_KINDS = [name for name in ATTACKS if name not in ("none", *COLLUDING_ATTACKS, *_POISON)]
REFUSED: dict[str, list[dict[str, Any]]] = {
    **{f"`--correction {name}`": [{"correction": name}] for name in CORRECTIONS if name != "none"},
    "`--compression --secure-aggregation`": [
        {"compression": name, "secure_aggregation": how}
        for name in COMPRESSIONS
        for how in SECURE_AGGREGATION
        if name != "none" and how != "off"
    ],
    "`--aggregation`": [{"aggregation": name} for name in AGGREGATIONS if name != "mean"],
}
KEPT: dict[str, dict[str, Any]] = {
    **{f"`--personal {name}`": {"personal": name} for name in PERSONAL if name != "none"},
    **{f"`--compression {name}`": {"compression": name} for name in COMPRESSIONS if name != "none"},
    **{f"`--attack {name}`": {"attack": name} for name in _OWN_KINDS},
    **{f"`--method {name}`": {"method": name, "model": "exits"} for name in ("fiarse", "scalefl")},
    "`--selection energy`": {"selection": "energy"},
    "`--energy`": {"energy": "ENERGY"},
    "`--buffer-size`": {"buffer_size": 3},
}
WAIVED: dict[str, dict[str, Any]] = {
    f"`--attack {name}`": {"attack": name} for name in COLLUDING_ATTACKS
}
POISONED = {f"`--attack {name}`": name for name in _POISON}


ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "`--amplification`": {
        "amplification": True, "selection": "poisson", "policy": "worst_case"},
    "`--rounds-per-release`": {"rounds_per_release": 2},
    "`--secure-aggregation`": {"secure_aggregation": "simulated"},
    "`--selection` other than `uniform`": {"selection": "energy"},
    "`--method` on slices": {"method": "heterofl"},
    "`--correction`": {"mode": "fedavg", "correction": "fednova"},
    "`--personal`": {"personal": "ditto"},
    "`--energy`": {"energy": "ENERGY"},
}  # fmt: skip


def rows() -> dict[str, str]:
    """What the page says of each part under `certified`."""
    section = (DOCS / "methods.md").read_text().split("## Under `certified`")[1]
    found = re.findall(r"^\| (`--[^|]+`) \| ([^|]+) \|$", section, re.MULTILINE)
    return dict(found)


def test_the_table_has_a_row_for_every_part() -> None:
    assert set(rows()) == {*REFUSED, *KEPT, *WAIVED, *POISONED}


@pytest.mark.parametrize("part", REFUSED)
def test_what_is_refused_is_refused_for_the_reason_of_the_table(part: str) -> None:
    assert rows()[part].startswith("refused: ")
    for settings in REFUSED[part]:
        with pytest.raises(InvalidValueError) as refused:
            build_config({"mode": "certified", **settings})
        assert rows()[part].removeprefix("refused: ") in str(refused.value).split(": ", 1)[1]


@pytest.mark.parametrize("part", KEPT)
def test_what_keeps_the_claim_names_cases_that_have_it_and_are_replayed(part: str) -> None:
    build_config({"mode": "certified", **KEPT[part]})
    whole = whole_cases()
    # `test_audit.py` replays all of `CASES`, `test_audit_whole.py` those of `ROADMAP` and `QUICK`.
    replayed = {name: case.settings for name, case in CASES.items()}
    replayed |= {name: whole[name].settings for name in (*ROADMAP, *QUICK)}
    names = re.findall(r"“([^”]+)”", rows()[part])
    assert rows()[part].startswith("kept")
    assert names
    option = next(iter(KEPT[part]))
    for name in names:
        assert replayed[name][option] == KEPT[part][option]


@pytest.mark.parametrize("part", WAIVED)
def test_what_claims_nothing_says_so_in_its_statement(part: str) -> None:
    assert rows()[part].startswith("claims nothing: ")
    run = tiny(mode="certified", noise_seed=None, num_clients=8, attackers=0.5, **WAIVED[part])
    assert not run_in_memory(run).statement.is_bounded


@pytest.mark.parametrize("part", POISONED)
def test_poisoned_samples_of_one_client_follow_from_its_own(part: str) -> None:
    """Before a round begins, so that to the claim they are the client's data like any other."""
    assert rows()[part].startswith("kept: ")
    inputs, held = torch.rand(12, 1, 8, 8), [np.arange(4), np.arange(4, 12)]
    labels = torch.arange(12) % 3
    other = inputs.clone()
    other[4:] *= 100
    seen = [poisoned(POISONED[part], x, labels, 3, held) for x in (inputs, other)]
    assert not torch.equal(seen[0][1], labels), "somebody is poisoned"
    for ours, theirs in zip(*seen, strict=True):
        assert torch.equal(ours[:4], theirs[:4])


def test_what_cannot_be_asynchronous_is_refused_for_the_reason_of_its_page() -> None:
    section = (DOCS / "asynchronous.md").read_text().split("## With a claim")[1]
    said = dict(re.findall(r"^\| (`--[^|]+) \| ([^|]+) \|$", section, re.MULTILINE))
    assert set(said) == set(ASYNCHRONOUS)
    for part, settings in ASYNCHRONOUS.items():
        with pytest.raises(InvalidValueError) as refused:
            build_config({"mode": "certified", "buffer_size": 3, **settings})
        assert said[part] in str(refused.value).split(": ", 1)[1], part
