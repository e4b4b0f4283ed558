"""The options of a run, made from the fields of `RunConfig`.

One list of names, defaults and help texts serves the command line, the TOML
file and the Python keywords.  Every option's real default is "not given", so
that a preset or a file is only overridden by what was typed.

`--help` lists what most people need (`Flag.COMMON`), `--help-all` the rest.  Names of versions
before are taken, and listed nowhere.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import typer

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import shortened
from fedquilt.config import CondenseConfig, RunConfig, option_fields
from fedquilt.config.condense import CERTIFIED_DEFAULTS, COLOUR_DEFAULTS, FEDNUM_DEFAULTS
from fedquilt.config.modes import DEFAULT_MODE, MODE_TABLE
from fedquilt.config.option import Flag, kinds_of
from fedquilt.config.run import old_names, option_names
from fedquilt.config.uses import modes_of


def takes_run_options(
    *left_out: str, kind: type[RunConfig] = RunConfig, also: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every option of a configuration except those named.

    `also` gives options of numbers a second name: {"second_name": "name"}.

    The command receives the options that were typed as one dictionary, each under the
    name that was typed, in its parameter `settings`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = option_fields(kind)
        condenses = kind is CondenseConfig
        refused = {*left_out, *(option_names(Flag.NOT_CONDENSE, kind) if condenses else ())}
        names = [name for name in fields if name not in refused]
        second, old = also or {}, old_names(kind)

        def wrapper(**given: Any) -> None:
            given.pop(_HELP_ALL)
            typed = {name: given.pop(name) for name in (*names, *second, *old)}
            command(settings={k: v for k, v in typed.items() if v is not None}, **given)

        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "settings"
        ]
        shown = option_names(Flag.COMMON_CONDENSE if condenses else Flag.COMMON, kind)
        parameters = [*own, _help_all(old)]
        parameters += [_parameter(fields[name], kind, hidden=name not in shown) for name in names]
        parameters += [
            _parameter(fields[name], kind, hidden=True, called=other) for other, name in old.items()
        ]
        kinds = kinds_of(kind)
        parameters += [
            _second_name(other, fields[name], float if float in kinds[name] else int)
            for other, name in second.items()
        ]
        wrapper.__name__ = command.__name__
        wrapper.__doc__ = command.__doc__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


_HELP_ALL = "help_all"


def _help_all(left_out: Collection[str]) -> inspect.Parameter:
    """Return the option that lists every option but these."""

    def show(context: typer.Context, asked: bool) -> None:
        if not asked:
            return
        listed = [item for item in context.command.params if item.name not in left_out]
        hidden = [item for item in listed if getattr(item, "hidden", False)]
        try:
            for item in hidden:
                item.hidden = False  # type: ignore[attr-defined]
            print(context.get_help())
        finally:
            for item in hidden:
                item.hidden = True  # type: ignore[attr-defined]
        raise typer.Exit

    option = typer.Option(
        False,
        "--help-all",
        callback=show,
        is_eager=True,
        metavar="",
        help="List every option, those of other modes too.",
    )
    return inspect.Parameter(
        _HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=bool
    )


def _panel(item: dataclasses.Field[Any], kind: type[RunConfig]) -> str:
    """Return the panel of an option; those of no use in the default mode have their own."""
    modes = modes_of(item.name)
    if kind is CondenseConfig or DEFAULT_MODE in modes:
        return str(item.metadata["panel"])
    return "Only in the modes of the QuAP-FL papers"


def _shown_default(item: dataclasses.Field[Any], kind: type[RunConfig]) -> str:
    """Say what an option is when nobody names it; in the papers' modes it may differ."""
    if kind is CondenseConfig:
        return _shown_of_condensation(item)
    document = item.default
    usual = MODE_TABLE[DEFAULT_MODE].defaults.get(item.name, document)
    if usual is None or usual is False:
        return ""
    if usual == document:
        return f" \\[{usual}]"
    other = "off" if document is False else document
    return f" \\[{'on' if usual is True else usual}; other modes {other}]"


def _shown_of_condensation(item: dataclasses.Field[Any]) -> str:
    """Say what an option of a condensation is, and what it is where that differs."""
    usual = FEDNUM_DEFAULTS.get(item.name, item.default)
    others = {"certified": CERTIFIED_DEFAULTS, "colour images": COLOUR_DEFAULTS}
    said = [
        f"{where} {_word(defaults[item.name])}"
        for where, defaults in others.items()
        if item.name in defaults and defaults[item.name] != usual
    ]
    nothing = usual is None or usual is False
    first = [] if nothing and not said else [_word(usual)]
    return f" \\[{'; '.join(first + said)}]" if first else ""


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "absent" if value is None else str(value)


def _parameter(
    item: dataclasses.Field[Any], kind: type[RunConfig], *, hidden: bool, called: str = ""
) -> inspect.Parameter:
    """Return the command-line option of a field, which may be called otherwise."""
    name = called or item.name
    flag = _flag(name)
    if any(mode.defaults.get(name) is True for mode in MODE_TABLE.values()):
        flag = f"{flag}/--no-{flag[2:]}"  # on by default somewhere, so that off can be said
    choices = item.metadata["rule"].get("choices", ())
    words = item.metadata["help"]
    if not all(choice in words for choice in choices):
        words = f"{words[:-1]}: {', '.join(choices)}."
    common: dict[str, Any] = {
        "help": words + _shown_default(item, kind),
        "rich_help_panel": _panel(item, kind),
        "show_default": False,
        "hidden": hidden,
    }
    annotation: Any = Any
    kinds = kinds_of(kind)[item.name]
    if kinds >= {int, float}:
        option = typer.Option(None, flag, parser=parse_count, metavar="COUNT", **common)
    elif number := kinds & {int, float}:
        parser = _parser(name, *number)
        option = typer.Option(None, flag, parser=parser, metavar="NUMBER", **common)
    else:
        annotation = (bool if bool in kinds else str) | None
        metavar = "" if bool in kinds else "NAME" if choices else "TEXT"
        option = typer.Option(None, flag, metavar=metavar, **common)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
    )


def _second_name(
    name: str, item: dataclasses.Field[Any], kind: type[int] | type[float]
) -> inspect.Parameter:
    """Return an option of its own for a field of numbers.

    Where the field takes a count or a share, the second name is that of the share.
    """
    option = typer.Option(
        None,
        _flag(name),
        parser=_parser(name, kind),
        metavar="NUMBER",
        help=f"{_flag(item.name)} by another name" + (" (1: all)." if kind is float else "."),
        rich_help_panel=item.metadata["panel"],
        show_default=False,
        hidden=True,
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=Any)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parser(name: str, kind: type[int] | type[float]) -> Callable[[str], int | float]:
    """Return a reader of numbers whose error names option and text."""
    wanted = "a whole number" if kind is int else "a number"

    def parse(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            raise InvalidValueError(f"{name}={shortened(text)} must be {wanted}") from None

    parse.__name__ = kind.__name__
    return parse


def parse_count(text: str) -> int | float:
    """Read a cohort size: a decimal point makes it a fraction.

    >>> parse_count("30"), parse_count("0.3"), parse_count("1.")
    (30, 0.3, 1.0)
    """
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise InvalidValueError(
            f"clients_per_round={shortened(text)} must be a whole number, "
            "or a fraction with a decimal point"
        ) from None
