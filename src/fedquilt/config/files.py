"""Configuration from files, presets and keywords, and back to a file.

Later sources win: defaults, then the preset, then the file, then keywords.  Where
nobody named a mode or a model, a method on slices has defaults of its own: `fedavg`,
and for `depthfl` the model `exits`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.common import checks, untrusted
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.common.printable import shortened
from fedquilt.config.condense import (
    ALIASES,
    DEFAULTS_BY_MODE,
    CondenseConfig,
    with_package_names,
)
from fedquilt.config.documents import PRESETS
from fedquilt.config.run import RunConfig, option_fields

SCHEMA_VERSION = 1


def build_config(
    settings: Mapping[str, Any] | None = None,
    *,
    preset: str | None = None,
    file: str | Path | None = None,
) -> RunConfig:
    """Merge preset, file and keyword settings into a checked `RunConfig`."""
    merged: dict[str, Any] = {}
    method = (settings or {}).get("method")
    from_file = read_config_file(file, method) if file is not None else {}
    named_in_file = from_file.pop("preset", None)
    preset = named_in_file if preset is None else preset
    if preset is not None:
        merged.update(PRESETS[checks.choice("preset", preset, PRESETS)])
    method = from_file.get("method", merged.get("method")) if method is None else method
    if method == CondenseConfig.method:
        return _build(CondenseConfig, merged, from_file, settings or {}, file)
    return _build(RunConfig, merged, from_file, settings or {}, file)


def _build(
    kind: type[RunConfig],
    merged: dict[str, Any],
    from_file: dict[str, Any],
    settings: Mapping[str, Any],
    file: str | Path | None,
) -> RunConfig:
    """Merge the sources, later ones over earlier ones, into a configuration of class `kind`."""
    if kind is CondenseConfig:
        from_file, settings = with_package_names(from_file), with_package_names(settings)
    check_keys(from_file, str(file), kind)
    merged.update(from_file)
    merged.update(settings)
    check_keys(merged, "configuration", kind)
    if kind is CondenseConfig:
        mode = merged.get("mode", CondenseConfig.mode)
        usual = DEFAULTS_BY_MODE.get(mode, {}) if isinstance(mode, str) else {}
        if merged.get("dataset") == "custom" or merged.get("partition") == "writer":
            usual = {key: value for key, value in usual.items() if key != "num_clients"}
        merged = {**usual, **merged}
    if kind is RunConfig and merged.get("method", "full") != "full":
        merged.setdefault("mode", "fedavg")
    if merged.get("method") == "depthfl":
        merged.setdefault("model", "exits")
    try:
        return kind(**merged)
    except InvalidValueError as error:
        if file is None or not _comes_from_file(str(error), from_file, settings):
            raise
        raise InvalidValueError(f"{error} (in {file})") from error


def read_config_file(path: str | Path, method: str | None = None) -> dict[str, Any]:
    """Read a TOML file of flat keys; the keys are checked, the values not yet.

    `method` is what the file is read for, where that does not stand in it.
    """
    try:
        content = untrusted.parse_toml(untrusted.read_named(path, untrusted.TOML_BYTES))
    except OSError as error:
        raise InvalidValueError(f"config={str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, not text, or beyond the limits
        raise InvalidValueError(f"config={str(path)!r} is not a TOML file: {error}") from error
    version = content.pop("schema_version", SCHEMA_VERSION)
    if type(version) is not int or version != SCHEMA_VERSION:
        raise InvalidValueError(
            f"schema_version={shortened(version)} must be {SCHEMA_VERSION} (in {path}); "
            "it was written by another version of fedquilt"
        )
    if (method or content.get("method")) != CondenseConfig.method:
        check_keys(content, str(path), extra=("preset",))
    return content


def check_keys(
    settings: Mapping[str, Any],
    where: str,
    kind: type[RunConfig] = RunConfig,
    extra: tuple[str, ...] = (),
) -> None:
    """Raise for a key that no option has, naming the nearest one."""
    known = [*option_fields(kind), *extra]
    words = [*known, *ALIASES] if issubclass(kind, CondenseConfig) else known
    for key in settings:
        if key not in known:
            hint = checks.did_you_mean(key, words)
            raise InvalidValueError(f"unknown key {key!r} in {where}{hint}")


def write_config_file(config: RunConfig, stream: Any) -> None:
    """Write every set field as TOML; absent optional fields are left out."""
    stream.write(f"schema_version = {SCHEMA_VERSION}\n")
    for key, value in config.as_dict().items():
        if value is not None:
            stream.write(f"{key} = {_toml(value)}\n")


def _toml(value: Any) -> str:
    """Return a scalar as TOML; JSON writes booleans, numbers and text the same way.

    One character differs: TOML wants the control character DEL escaped too.
    """
    if isinstance(value, bool | int | float | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise FedquiltError(f"cannot write {value!r} to a configuration file")


def _comes_from_file(
    message: str, from_file: Mapping[str, Any], settings: Mapping[str, Any]
) -> bool:
    """Tell whether the key at the head of an error message was set by the file."""
    key = message.split("=", 1)[0]
    return key in from_file and key not in settings
