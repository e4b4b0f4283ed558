"""Which options have an effect in which run, as their declarations say.

The refusal of options that would do nothing, the help of the command line and `docs/modes.md`
ask here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedquilt.common.errors import InvalidValueError
from fedquilt.config.choices import METHODS
from fedquilt.config.condense import CondenseConfig
from fedquilt.config.keywords import keywords
from fedquilt.config.modes import DEFAULT_MODE, MODE_TABLE, OWN_CLIENT_DEFAULTS
from fedquilt.config.option import CLIENTS, OWN, AnyBut, Case
from fedquilt.config.run import RunConfig, option_fields

USES: dict[str, tuple[Case, ...]] = {
    name: item.metadata["uses"]
    for kind in (RunConfig, CondenseConfig)
    for name, item in option_fields(kind).items()
    if item.metadata["uses"]
}
"""Option -> the cases in which it has an effect; one of them is enough."""

_SLICED = tuple(name for name in METHODS if name != "full")


def is_effective(name: str, settings: Mapping[str, Any]) -> bool:
    """Tell whether an option does anything in a run of these (complete) settings."""
    cases = USES.get(name)
    return cases is None or any(_holds(case, settings) for case in cases)


def _holds(case: Case, settings: Mapping[str, Any]) -> bool:
    for name, allowed in case.items():
        value = settings.get(name)
        # What somebody brings as an object may use whatever it likes.
        if value is None or (allowed is not None and value not in allowed and value != OWN):
            return False
    return True


def reject_unused(given: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """Raise for the first given option that would do nothing.

    Parameters
    ----------
    given
        What somebody said; an option that is None or a flag that is off says nothing anyway.
    runs
        The settings of the runs it is said of, complete: an option must do something in one.
    """
    for name, value in given.items():
        said = value is not None and value is not False
        if said and not any(is_effective(name, run) for run in runs):
            raise InvalidValueError(
                f"{name}={value!r} must be left out of this run, where it would do nothing: "
                f"it is for {uses_in_words(name)}"
            )


def uses_in_words(name: str) -> str:
    """Return the cases of an option in words: `mode 'certified' with policy 'cap'`."""
    return ", or ".join(" with ".join(_in_words(case)) for case in USES[name])


def _in_words(case: Case) -> Iterator[str]:
    for name, allowed in case.items():
        if allowed is None:
            yield f"a {name}"
        elif name == "method" and allowed == _SLICED:
            yield "methods other than 'full'"
        elif name == CLIENTS:
            yield f"clients that are {allowed[0]}"
        elif allowed == (True,):
            yield name
        elif isinstance(allowed, AnyBut):
            yield f"{name} other than {allowed[0]!r}"
        else:
            names = [repr(value) for value in allowed]
            yield f"{name} " + " or ".join([", ".join(names[:-1]), names[-1]][len(names) == 1 :])


def modes_of(name: str) -> tuple[str, ...]:
    """Return the modes of `fedquilt run` in which an option may say something."""
    trained = [mode for mode, row in MODE_TABLE.items() if row.trains]
    cases = USES.get(name, ({},))
    return tuple(
        mode for mode in trained if any(mode in (case.get("mode") or (mode,)) for case in cases)
    )


def uses_table() -> str:
    """Return the table of `docs/modes.md`: where each option that is not everywhere says something.

    Options of condensations only, and those of named data sets, are left out.
    """
    modes = [mode for mode, row in MODE_TABLE.items() if row.trains]
    rows = [["option", *(f"`{mode}`" for mode in modes)], ["---"] * (1 + len(modes))]
    for name, cases in USES.items():
        if name in RunConfig.__dataclass_fields__ and not any(CLIENTS in case for case in cases):
            flag = f"`--{name.replace('_', '-')}`"
            rows.append([flag, *(_cell(cases, mode) for mode in modes)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(cases: tuple[Case, ...], mode: str) -> str:
    """Return what an option needs beside a mode, "yes" for nothing."""
    found = []
    for case in cases:
        if mode in (case.get("mode") or (mode,)):
            rest = {name: allowed for name, allowed in case.items() if name != "mode"}
            found.append(" and ".join(_in_words(rest)).replace("'", "`"))
    return "yes" if "" in found else "; ".join(found)


def shows_settings(function: Callable[..., Any]) -> None:
    """Give a function with `**settings` a signature and a docstring that name every one."""
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {p.name for p in named}
    more = [p for p in _parameters() if p.name not in taken]
    function.__signature__ = signature.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
    described = "\n".join(_described(name) for name in (key for key, _ in keywords(RunConfig)))
    function.__doc__ = (
        f"{inspect.cleandoc(function.__doc__ or '')}\n\nSettings\n--------\n{described}"
    )


def _parameters() -> Iterator[inspect.Parameter]:
    """Yield what a run takes; options of condensations alone are told by their refusal."""
    fields = option_fields(RunConfig)
    for key, name in keywords(RunConfig):
        kind, default = fields[name].type, _default(name)
        yield inspect.Parameter(
            key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
        )


def _described(name: str) -> str:
    item = option_fields(RunConfig)[name]
    choices = item.metadata["rule"].get("choices")
    words = item.metadata["help"] + (f" One of {', '.join(choices)}." if choices else "")
    only = f" Only for {uses_in_words(name)}." if name in USES else ""
    return f"{name} : {item.type}, default {_default(name)!r}\n    {words}{only}"


def _default(name: str) -> Any:
    """Return what an option is in the default mode, with your own model and clients."""
    row = MODE_TABLE[DEFAULT_MODE]
    usual = {**row.defaults, **row.own_defaults, **OWN_CLIENT_DEFAULTS}
    if name in usual:
        return usual[name]
    fields = {**option_fields(CondenseConfig), **option_fields(RunConfig)}
    default = fields[name].default
    return None if default is dataclasses.MISSING else default
