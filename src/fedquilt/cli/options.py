"""The options of a run, made from the fields of `RunConfig`.

One list of names, defaults and help texts serves the command line, the TOML
file and the Python keywords.  Every option's real default is "not given", so
that a preset or a file is only overridden by what was typed.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import typer

from fedquilt.common.errors import InvalidValueError
from fedquilt.config import RunConfig, option_fields

_KINDS: dict[str, type] = {"str": str, "bool": bool}


def takes_run_options(
    *left_out: str,
    kind: type[RunConfig] = RunConfig,
    also: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every option of a configuration except those named.

    `also` gives options of numbers a second name: {"second_name": "name"}.

    The command receives the options that were typed as one dictionary, each under the
    name that was typed, in its parameter `settings`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = option_fields(kind)
        names = [name for name in fields if name not in left_out]
        second = also or {}

        def wrapper(**given: Any) -> None:
            typed = {name: given.pop(name) for name in (*names, *second)}
            command(settings={k: v for k, v in typed.items() if v is not None}, **given)

        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "settings"
        ]
        parameters = [*own, *(_parameter(fields[name]) for name in names)]
        parameters += [_second_name(other, fields[name]) for other, name in second.items()]
        wrapper.__name__ = command.__name__
        wrapper.__doc__ = command.__doc__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _parameter(item: dataclasses.Field[Any]) -> inspect.Parameter:
    """Return the command-line option of a field."""
    name = item.name
    flag = _flag(name)
    choices = item.metadata["rule"].get("choices")
    shown = item.metadata["help"] + (f" One of {', '.join(choices)}." if choices else "")
    common: dict[str, Any] = {
        "help": shown,
        "rich_help_panel": item.metadata["panel"],
        "show_default": False
        if item.default is None or item.default is False
        else str(item.default),
    }
    annotation: Any = Any
    if "int | float" in str(item.type):
        option = typer.Option(None, flag, parser=parse_count, metavar="COUNT", **common)
    elif "int" in str(item.type):
        option = typer.Option(None, flag, parser=_parser(name, int), metavar="NUMBER", **common)
    elif "float" in str(item.type):
        option = typer.Option(None, flag, parser=_parser(name, float), metavar="NUMBER", **common)
    else:
        option = typer.Option(None, flag, **common)
        annotation = _KINDS[str(item.type).split(" |")[0]] | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
    )


def _second_name(name: str, item: dataclasses.Field[Any]) -> inspect.Parameter:
    """Return an option of its own for a field of numbers.

    Where the field takes a count or a share, the second name is that of the share.
    """
    kind = float if "float" in str(item.type) else int
    option = typer.Option(
        None,
        _flag(name),
        parser=_parser(name, kind),
        metavar="NUMBER",
        help=f"{_flag(item.name)} by another name" + (" (1: all)." if kind is float else "."),
        rich_help_panel=item.metadata["panel"],
        show_default=False,
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
            raise InvalidValueError(f"{name}={_short(text)} must be {wanted}") from None

    parse.__name__ = kind.__name__
    return parse


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


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
            f"clients_per_round={_short(text)} must be a whole number, "
            "or a fraction with a decimal point"
        ) from None
