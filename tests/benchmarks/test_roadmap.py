"""Tables of the roadmap's parts: pages show what was measured, and no part is left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import attacks, byzantine, kept, roadmap
from fedquilt.config.choices import AGGREGATIONS, ATTACKS, COMPRESSIONS, CORRECTIONS, PERSONAL

PAGES = {name: (kept.DOCS / f"{name}.md").read_text() for name in ("methods", "robust", "attack")}
SEEDS = {0, 1, 2}


def test_pages_show_what_was_measured() -> None:
    assert roadmap.table(kept.read(roadmap.FILE)) in PAGES["methods"]
    for share in (0.2, 0.4):
        assert byzantine.table(kept.read(byzantine.FILE), share) in PAGES["robust"]
    lines = kept.read(attacks.FILE)
    assert attacks.inversions(lines) in PAGES["attack"]
    assert attacks.memberships(lines) in PAGES["attack"]


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (roadmap.FILE, ("part",)),
        (byzantine.FILE, ("attackers", "rule", "attack")),
        (attacks.FILE, ("kind", "run")),
    ],
    ids=["roadmap", "robust", "attack"],
)
def test_every_row_was_measured_at_three_seeds_once(path: Path, key: tuple[str, ...]) -> None:
    lines = kept.read(path)
    seen = Counter((*(line[name] for name in key), line["seed"]) for line in lines)
    assert set(seen.values()) == {1}
    assert seen.keys() == {(*row[:-1], seed) for row in seen for seed in SEEDS}


def test_every_part_has_a_row() -> None:
    options = (CORRECTIONS, COMPRESSIONS, PERSONAL, AGGREGATIONS)
    named = {name for choices in options for name in choices} - {"none", "mean", "bf16", "int8"}
    others = {"fedbuff", "energy", "fiarse", "scalefl", "certified", "invert", "membership"}
    assert set(roadmap.PARTS) == named | others
    assert {line["part"] for line in kept.read(roadmap.FILE)} == set(roadmap.PARTS)


def test_every_rule_met_every_attack_and_every_mode_both_attacks_on_itself() -> None:
    shares = {(line["attackers"], line["rule"], line["attack"]) for line in _lines(byzantine)}
    assert shares == {(s, rule, name) for s in (0.2, 0.4) for rule in byzantine.ARMS
                      for name in ATTACKS}  # fmt: skip
    seen = {(line["kind"], line["run"]) for line in _lines(attacks)}
    assert {("inversion", run) for run in attacks.INVERTED} <= seen
    assert {("membership", run) for run in attacks.ARMS} <= seen


def _lines(module: Any) -> list[kept.Line]:
    return kept.read(module.FILE)


def test_rows_of_hostile_clients_and_attacks_are_those_of_their_own_files() -> None:
    own = {(x["rule"], x["seed"]): x["accuracy"] for x in _lines(byzantine)
           if (x["attackers"], x["attack"]) == (0.2, "sign_flip")}  # fmt: skip
    for line in _lines(roadmap):
        if line["part"] in (*AGGREGATIONS[1:], "certified") and line["part"] != "majority":
            assert line["plain"] == own["mean", line["seed"]]
            assert line["with"] == own[line["part"], line["seed"]]


@pytest.mark.parametrize("part", ["scaffold", "topk", "fedrep", "energy", "fiarse", "fedbuff"])
def test_a_row_can_be_measured(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {"num_rounds": 2, "local_epochs": 1}
    train = roadmap.trained
    monkeypatch.setattr(roadmap, "trained", lambda seed, **more: train(seed, **{**more, **quick}))
    found = roadmap.measure({"part": part, "seed": 0})
    assert set(found) == {"plain", "with"}
    assert all(value >= 0 for value in found.values())


def test_what_a_file_has_is_not_measured_again(tmp_path: Path) -> None:
    path, asked = tmp_path / "file.jsonl", []

    def measure(key: kept.Line) -> kept.Line:
        asked.append(key["seed"])
        return {"figure": 2.0 * key["seed"]}

    kept.fill(path, [{"seed": 1}], measure)
    lines = kept.fill(path, [{"seed": 1}, {"seed": 2}], measure)
    assert asked == [1, 2]
    assert lines == kept.read(path) == [{"seed": s, "figure": 2.0 * s} for s in (1, 2)]
    assert kept.cell([1.0, 2.0, 3.0]) == "2.0 ± 1.0"
