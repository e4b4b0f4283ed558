"""Configuration from files, presets and keywords, and back to a file.

Later sources win: defaults, then the preset, then the file, then keywords.  Defaults follow
the mode (`fedquilt.config.modes`), which is `certified` unless somebody names another; a
preset stands in their place.  A method on slices has defaults of its own: `fedavg` where nobody
named a mode, and those of `method_defaults`.  Your own clients are all there and all join; those
dealt from a named data set come and go.

What somebody says and what then does nothing is refused (`fedquilt.config.uses`); a default
never is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedquilt.common import checks, untrusted
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.common.formatting import shortened
from fedquilt.common.storage import os_reason
from fedquilt.config.choices import EXIT_METHODS
from fedquilt.config.condense import (
    ALIASES,
    COLOUR_DEFAULTS,
    COLOURED,
    CONDENSE_PRESETS,
    DEFAULTS_BY_MODE,
    CondenseConfig,
    package_names,
)
from fedquilt.config.documents import PRESETS
from fedquilt.config.modes import (
    DEFAULT_MODE,
    MODE_TABLE,
    OWN_CLIENT_DEFAULTS,
    RECIPE_KEYS,
    recipe,
)
from fedquilt.config.option import CLIENTS, OWN_CLIENTS, SPLIT, Flag
from fedquilt.config.run import RunConfig, old_names, option_fields, option_names
from fedquilt.config.uses import is_effective, reject_unused

SCHEMA_VERSION = 1
BESIDE = ("preset", "tracker", "quiet")
"""Keys of a file that are no part of a configuration."""


def build_config(
    settings: Mapping[str, Any] | None = None,
    *,
    preset: str | None = None,
    file: str | Path | None = None,
    own: bool = False,
    brought: bool = False,
    arms: Sequence[Mapping[str, Any]] = (),
    like: str | None = None,
) -> RunConfig:
    """Merge defaults, preset, file and keyword settings into a checked configuration.

    Parameters
    ----------
    settings
        What was said in the call or typed.
    preset, file
        A name of `PRESETS`; a TOML file.
    own
        The data and the clients are the user's.
    brought
        The method or the mechanism is the user's: what it uses is its own affair.
    arms
        What differs between runs that are compared: an option must do something in one of
        them.  Where they differ in the mode, all share the defaults of the default mode, and
        only one of that very mode follows the recipe, with the model that all share.
    like
        The named model that the user's own was made as, for the recipe.
    """
    said = dict(settings or {})
    method = said.get("method")
    from_file = read_config_file(file, method) if file is not None else {}
    if preset is None:
        preset = from_file.get("preset")
    from_file = {key: value for key, value in from_file.items() if key not in BESIDE}
    method = method or from_file.get("method")
    kind = CondenseConfig if method == CondenseConfig.method else RunConfig
    presets = CONDENSE_PRESETS if kind is CondenseConfig else PRESETS
    base = {} if preset is None else dict(presets[checks.choice("preset", preset, presets)])
    if own:  # what a preset says of its data is not about yours
        of_data = {*option_names(Flag.APP, kind), *option_names(Flag.OPERATOR, kind)}
        base = {key: value for key, value in base.items() if key not in of_data}
    # Whoever wrote a file may change it; a run has written down what it was given.
    by_hand = not _is_record(from_file, kind)
    from_file = package_names(kind, from_file, warns=by_hand)
    said = package_names(kind, said, warns=True)
    check_keys(from_file, str(file), kind)
    check_keys(said, "configuration", kind)
    given = {**from_file, **said}
    shared_modes = any("mode" in arm for arm in arms)
    usual = _usual(kind, given, base, own, shared_modes)
    own_mode = "mode" in said or not shared_modes
    varied = set() if shared_modes else {key for arm in arms for key in arm} - RECIPE_KEYS
    if usual.get("mode") == DEFAULT_MODE and own_mode and not (base or brought or varied):
        known = given if like is None else {**given, "model": like}
        known = {"model": usual.get("model"), **known} if shared_modes else known
        usual |= recipe(known, usual, given.get("dataset", RunConfig.dataset))
    rest = {key: value for key, value in from_file.items() if key not in said}
    config = _made(kind, {**usual, **given}, file, rest)
    if not own:
        require_two_clients(config)
    if brought:
        return config
    whole = {**config.as_dict(), CLIENTS: OWN_CLIENTS if own else SPLIT}
    runs = [{**whole, **arm} for arm in arms] or [whole]
    reject_unused(said, runs)
    if by_hand:
        # A file that names no mode, or another than was typed, is meant for several.
        shared = "mode" in said and from_file.get("mode") != said["mode"]
        try:
            reject_unused(rest, [{**whole, "mode": m} for m in MODE_TABLE] if shared else runs)
        except InvalidValueError as error:
            raise InvalidValueError(f"{error} (in {file})") from error
    idle = [key for key in base if key not in given and not is_effective(key, whole)]
    fields = option_fields(kind)
    return config if arms else config.replace(**{key: fields[key].default for key in idle})


def kind_of(settings: Mapping[str, Any], file: str | Path | None = None) -> type[RunConfig]:
    """Return which kind of configuration settings and a file are for."""
    method = settings.get("method")
    if method is None and file is not None:
        method = read_config_file(file).get("method")
    return CondenseConfig if method == CondenseConfig.method else RunConfig


def require_two_clients(config: RunConfig) -> None:
    """Raise where noise would have to hide the only client of a data set."""
    if config.mode == DEFAULT_MODE and config.num_clients == 1:
        raise InvalidValueError(
            f"num_clients=1 must be at least 2 with mode={config.mode!r}: noise that hides the "
            "only client hides everything"
        )


def plain_config(
    settings: Mapping[str, Any] | None = None, *, file: str | Path | None = None
) -> RunConfig:
    """Return a configuration in which what is absent has the value of the API document.

    So are the files of runs read, whichever version wrote them: they name every option
    that there was.
    """
    content = dict(settings or {})
    if file is not None:
        content = {**read_config_file(file), **content}
        content = {key: value for key, value in content.items() if key not in BESIDE}
    condenses = content.get("method") == CondenseConfig.method
    kind = CondenseConfig if condenses else RunConfig
    content = package_names(kind, content)
    check_keys(content, "configuration" if file is None else str(file), kind)
    # A record names every option that there was: what it lacks did not exist yet.
    record = _is_record(content, kind)
    usual = {} if record else _usual_of_condensation(content)
    if not condenses:
        method = content.get("method", "full")
        usual = {"mode": "quap_fl" if method == "full" else "fedavg"}
        usual |= {} if record else method_defaults(method, content.get("mode", usual["mode"]))
    return _made(kind, {**usual, **content}, file, {} if file is None else content)


def _made(
    kind: type[RunConfig],
    settings: Mapping[str, Any],
    file: str | Path | None,
    from_file: Mapping[str, Any],
) -> RunConfig:
    """Make a configuration; an error about what a file says names the file."""
    try:
        return kind(**settings)
    except InvalidValueError as error:
        if str(error).split("=", 1)[0] not in from_file:
            raise
        raise InvalidValueError(f"{error} (in {file})") from error


def _usual(
    kind: type[RunConfig], given: Mapping[str, Any], preset: dict[str, Any], own: bool, shared: bool
) -> dict[str, Any]:
    """Return the defaults of a run for which this was said."""
    if kind is CondenseConfig:
        return {**_usual_of_condensation(given), **preset}
    whole = given.get("method", "full") == "full"
    mode = given.get("mode")
    if mode is None:
        mode = preset.get("mode", DEFAULT_MODE) if whole else "fedavg"
    usual: dict[str, Any] = dict(OWN_CLIENT_DEFAULTS) if own else {}
    if preset:
        usual |= _fitting(preset, given)
    elif isinstance(mode, str) and mode in MODE_TABLE:
        row = MODE_TABLE[DEFAULT_MODE if shared else mode]
        usual = {**row.defaults, **(row.own_defaults if own else {}), **usual}
        if shared:
            usual["noise_layers"] = "all"  # one model for all, whatever its layers are called
        if not whole:
            usual.pop("model", None)
        if given.get("clipping") == "quantile":
            usual.pop("normalise_updates", None)  # every norm would be the clip
    return {**usual, **method_defaults(given.get("method"), mode), "mode": mode}


def method_defaults(method: Any, mode: Any) -> dict[str, Any]:
    """Return what a method on slices is, where nobody says otherwise.

    HeteroFL leaves rows of absent classes out of the mean, as its authors do, where nothing is
    claimed; DepthFL and ScaleFL need exits; in HeFlwr's MFL every client holds a half.
    """
    if method == "heterofl":
        return {"absent_classes": "leave_out" if mode == "fedavg" else "average"}
    own = {**{name: {"model": "exits"} for name in EXIT_METHODS}, "mfl": {"tiers": "1/2"}}
    return dict(own.get(method, {})) if isinstance(method, str) else {}


def _fitting(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset with a cohort of at most as many clients as there are."""
    most, cohort = given.get("num_clients"), preset["clients_per_round"]
    few = isinstance(most, int) and 1 <= most < cohort
    return {**preset, "clients_per_round": most if few else cohort}


def _usual_of_condensation(given: Mapping[str, Any]) -> dict[str, Any]:
    mode = given.get("mode", CondenseConfig.mode)
    usual = DEFAULTS_BY_MODE.get(mode, {}) if isinstance(mode, str) else {}
    if mode == CondenseConfig.mode and given.get("dataset") in COLOURED:
        usual = {**usual, **COLOUR_DEFAULTS}
    if given.get("dataset") == "custom" or given.get("partition") == "writer":
        usual = {key: value for key, value in usual.items() if key != "num_clients"}
    return dict(usual)


_OF_THE_FIRST = 40
"""Fewer options than the first version had: a run of any version names more."""


def _is_record(from_file: Mapping[str, Any], kind: type[RunConfig]) -> bool:
    """Tell whether a file was written by a run: those name every option, people a few."""
    return len(from_file) > min(_OF_THE_FIRST, len(option_fields(kind)) // 2)


def read_config_file(path: str | Path, method: str | None = None) -> dict[str, Any]:
    """Read a TOML file of flat keys; the keys are checked, the values not yet.

    `method` is what the file is read for, where that does not stand in it.
    """
    try:
        content = untrusted.parse_toml(untrusted.read_named(path, untrusted.TOML_BYTES))
    except OSError as error:
        raise InvalidValueError(
            f"config={str(path)!r} cannot be read: {os_reason(error)}"
        ) from error
    except ValueError as error:  # not TOML, not text, or beyond the limits
        raise InvalidValueError(f"config={str(path)!r} is not a TOML file: {error}") from error
    version = content.pop("schema_version", SCHEMA_VERSION)
    if type(version) is not int or version != SCHEMA_VERSION:
        raise InvalidValueError(
            f"schema_version={shortened(version)} must be {SCHEMA_VERSION} (in {path}); "
            "it was written by another version of fedquilt"
        )
    if (method or content.get("method")) != CondenseConfig.method:
        check_keys(content, str(path), extra=BESIDE)
    return content


def read_beside(path: str | Path | None, method: str | None = None) -> dict[str, Any]:
    """Return what a file for a method says beside the configuration: `tracker`, `quiet`."""
    if path is None:
        return {}
    found = {key: value for key, value in read_config_file(path, method).items() if key in BESIDE}
    if not isinstance(found.get("quiet", False), bool):
        raise InvalidValueError(f"quiet={found['quiet']!r} must be true or false (in {path})")
    if not isinstance(found.get("tracker", ""), str):
        raise InvalidValueError(f"tracker={found['tracker']!r} must be a text (in {path})")
    return found


def check_keys(
    settings: Mapping[str, Any],
    where: str,
    kind: type[RunConfig] = RunConfig,
    extra: tuple[str, ...] = (),
) -> None:
    """Raise for a key that no option has, naming the nearest one, or the method that has it."""
    words = [*option_fields(kind), *extra]
    known = {*words, *old_names(kind)}
    if issubclass(kind, CondenseConfig):
        words += ALIASES
    for key in settings:
        if key not in known:
            hint = checks.did_you_mean(key, words)
            if isinstance(settings[key], dict):
                hint = ": options stand in no section, but on lines of their own"
            if key in option_fields(CondenseConfig) or key in ALIASES:
                hint = f": it is an option of method={CondenseConfig.method!r}"
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
