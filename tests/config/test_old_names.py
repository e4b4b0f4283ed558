"""Options that have a new name: the old one is understood for one version, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from config_samples import written

import fedquilt
from fedquilt.config import CondenseConfig, RunConfig, build_config, plain_config
from fedquilt.config.run import old_names
from fedquilt.errors import InvalidValueError
from fedquilt.sweep.plan import parse_axis

OLD = {
    "on_short": ("if_exhausted", "sit_out", {"ledger": "l.sqlite"}),
    "spend_everything": ("allow_unbounded", True, {"ledger": "l.sqlite"}),
    "front": ("feature_extractor", "scatter-linear", {"method": "condense", "mode": "certified"}),
    "drawings": ("synthetic_images", 77, {"method": "condense", "mode": "certified"}),
}


def test_these_are_all() -> None:
    assert old_names(CondenseConfig) == {old: new for old, (new, _, _) in OLD.items()}


@pytest.mark.parametrize("old", OLD)
def test_a_keyword_and_a_file(old: str, tmp_path: Path) -> None:
    new, value, beside = OLD[old]
    with pytest.warns(FutureWarning, match=f"^{old} is now {new}") as said:
        config = build_config({**beside, old: value})
    assert len(said) == 1
    assert getattr(config, new) == value
    path = tmp_path / "mine.toml"
    toml = {True: "true"}.get(value, repr(value)) if value is True else repr(value)
    lines = [f"{k} = {v!r}" for k, v in beside.items()]
    path.write_text("\n".join([*lines, f"{old} = {toml}"]))
    with pytest.warns(FutureWarning, match=f"^{old} is now {new}"):
        assert build_config(file=path) == config


@pytest.mark.parametrize("old", OLD)
def test_the_file_of_a_run_is_read_without_a_word_and_written_with_the_new_name(
    old: str, tmp_path: Path
) -> None:
    new, value, beside = OLD[old]
    config = build_config({**beside, new: value})
    text = written(config)
    assert f"\n{new} = " in text
    assert f"\n{old} = " not in text
    path = tmp_path / "config.toml"
    path.write_text(text.replace(f"\n{new} = ", f"\n{old} = "))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plain_config(file=path) == config
        assert build_config(file=path) == config


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="they are one option"):
        build_config({"ledger": "l", "if_exhausted": "refuse", "on_short": "sit_out"})


def test_of_a_run_from_python(tmp_path: Path) -> None:
    data = torch.randn(8, 2), torch.arange(8) % 2
    parts = [[0, 1], [2, 3], [4, 5], [6, 7]]
    run: list[Any] = [torch.nn.Linear(2, 2), data, data, parts]
    ledger = str(tmp_path / "l.sqlite")
    with pytest.warns(FutureWarning, match="^on_short is now if_exhausted"):
        done = fedquilt.run(
            *run,
            num_rounds=1,
            output_dir=None,
            quiet=True,
            ledger=ledger,
            population="ours",
            new_population=True,
            on_short="sit_out",
        )
    assert done.result["metadata"]["hyperparameters"]["if_exhausted"] == "sit_out"


def test_on_the_command_line(cli: Callable[..., Any], tmp_path: Path) -> None:
    told = cli("run", "--help-all").out
    assert "--if-exhausted" in told
    assert "--on-short" not in told
    with pytest.warns(FutureWarning, match="^on_short is now if_exhausted"):
        said = cli("run", "--on-short", "sit_out")
    assert "if_exhausted='sit_out' must be left out of this run" in said.words


def test_in_a_sweep() -> None:
    assert parse_axis("on_short=refuse,sit_out").key == "if_exhausted"
    assert parse_axis("drawings=20,30", CondenseConfig).values == (20, 30)


def test_hints_name_the_new_ones() -> None:
    with pytest.raises(InvalidValueError, match="if_exhausted"):
        build_config({"if_exhauste": "refuse"})
    assert "on_short" not in RunConfig.__dataclass_fields__
