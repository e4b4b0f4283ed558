"""Configuration files: round trips, precedence, and errors that name their place."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from config_samples import written
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.config import (
    PRESETS,
    RunConfig,
    build_config,
    option_fields,
    read_config_file,
)
from fedquilt.errors import InvalidValueError

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


def unusual(name: str) -> Any:
    """Another valid value than the default of a field."""
    field = option_fields()[name]
    choices = field.metadata["rule"].get("choices")
    if choices:
        return next(choice for choice in choices if choice not in (field.default, "certified"))
    if isinstance(field.default, bool):
        return not field.default
    kinds = str(field.type)
    if "float" in kinds:
        return 0.123456789012345678 if name not in ("max_clip", "clip_cap") else 12.5
    if name == "dataset":
        return "my-data_2.0"
    return 3 if "int" in kinds else 'a "quoted" \\ näme\n\tß \x7f 日本'


def test_every_field_survives_the_file(tmp_path: Path) -> None:
    for name in option_fields():
        config = RunConfig(**{"mode": "fedavg", name: unusual(name)})
        path = tmp_path / "config.toml"
        path.write_text(written(config), encoding="utf-8")
        assert build_config(file=path) == config
    path.write_text(written(RunConfig()), encoding="utf-8")
    assert build_config(file=path) == RunConfig()


@given(text=texts, number=st.floats(1e-300, 1e4), seed=st.integers(0, 2**63 - 1))
def test_any_text_and_number_survives(text: str, number: float, seed: int) -> None:
    config = RunConfig(population=text, epsilon=number, seed=seed)
    content = tomllib.loads(written(config))
    assert (content["population"], content["epsilon"], content["seed"]) == (text, number, seed)


def test_absent_values_are_left_out_and_the_schema_is_there() -> None:
    content = tomllib.loads(written(RunConfig()))
    assert content["schema_version"] == 1
    assert "num_clients" not in content
    assert content["clients_per_round"] == 0.3


def test_later_sources_win(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('preset = "paper-mnist"\nnum_rounds = 7\nseed = 5\n')
    config = build_config({"seed": 6}, file=path)
    assert config.epsilon == PRESETS["paper-mnist"]["epsilon"] == 6.0
    assert (config.num_rounds, config.seed, config.dataset) == (7, 6, "mnist")
    assert (build_config().mode, build_config().epsilon) == ("certified", 6.0)


def test_a_preset_given_beside_the_file_replaces_the_files(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('preset = "paper-mnist"\nseed = 5\n')
    config = build_config(preset="paper-cifar10", file=path)
    assert (config.dataset, config.seed) == ("cifar10", 5)


@pytest.mark.parametrize("preset", ["paper-mnis", "", 3])
def test_an_unknown_preset_is_refused(tmp_path: Path, preset: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"preset=.* must be one of 'paper-mnist'"):
        build_config(preset=preset)
    path = tmp_path / "c.toml"
    path.write_text(f"preset = {preset!r}\n")
    with pytest.raises(InvalidValueError, match=r"preset=.* must be one of 'paper-mnist'"):
        build_config(file=path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "batchsize = 3\n",
            r"unknown key 'batchsize' in .*c\.toml \(did you mean 'batch_size'\?\)",
        ),
        ("[privacy]\nepsilon = 3\n", r"unknown key 'privacy' in .*c\.toml"),
        ("epsilon = 'x\n", r"c\.toml' is not a TOML file"),
        ("schema_version = 2\n", r"schema_version=2 must be 1 \(in .*c\.toml\)"),
        ("epsilon = -1.0\n", r"epsilon=-1\.0 must be > 0 \(in .*c\.toml\)"),
        ("epsilon = 'high'\n", r"epsilon='high' must be a number \(in .*c\.toml\)"),
        ("epsilon = nan\n", r"epsilon=nan must be > 0 \(in"),
        ("seed = 1.0\n", r"seed=1\.0 must be a whole number \(in"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=message):
        build_config(file=path)


def test_a_bad_keyword_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("epsilon = 2.0\nseed = 1\n")
    with pytest.raises(InvalidValueError) as caught:
        build_config({"epsilon": -1}, file=path)
    assert str(caught.value) == "epsilon=-1 must be > 0"
    with pytest.raises(InvalidValueError, match=r"unknown key 'epsilo' in configuration"):
        build_config({"epsilo": 1})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="cannot be read: No such file"):
        read_config_file(tmp_path / "none.toml")
    with pytest.raises(InvalidValueError, match="cannot be read"):
        read_config_file(tmp_path)
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidValueError, match="is not a TOML file"):
        read_config_file(path)
