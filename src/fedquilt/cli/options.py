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

from fedquilt.config import RunConfig, option_fields
from fedquilt.errors import InvalidValueError

_KINDS: dict[str, type] = {"str": str, "bool": bool}


def takes_run_options(
    *left_out: str,
    kind: type[RunConfig] = RunConfig,
    also: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every option of a configuration except those named.

    `also` gives options a second name: {"second_name": "name"}.

    The command receives the options that were typed as one dictionary, in its
    parameter `settings`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = option_fields(kind)
        names = [name for name in fields if name not in left_out]
        second = {name: other for other, name in (also or {}).items()}

        def wrapper(**given: Any) -> None:
            typed = {name: given.pop(name) for name in names}
            command(settings={k: v for k, v in typed.items() if v is not None}, **given)

        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "settings"
        ]
        parameters = [*own, *(_parameter(fields[name], second.get(name)) for name in names)]
        wrapper.__name__ = command.__name__
        wrapper.__doc__ = command.__doc__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _parameter(item: dataclasses.Field[Any], second: str | None) -> inspect.Parameter:
    """Return the command-line option of a field."""
    name = item.name
    flags = [f"--{one.replace('_', '-')}" for one in (name, second) if one is not None]
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
        option = typer.Option(None, *flags, parser=parse_count, metavar="COUNT", **common)
    elif "int" in str(item.type):
        option = typer.Option(None, *flags, parser=_parser(name, int), metavar="NUMBER", **common)
    elif "float" in str(item.type):
        option = typer.Option(None, *flags, parser=_parser(name, float), metavar="NUMBER", **common)
    else:
        option = typer.Option(None, *flags, **common)
        annotation = _KINDS[str(item.type).split(" |")[0]] | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
    )


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
