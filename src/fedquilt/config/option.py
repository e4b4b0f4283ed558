"""One option: how it is declared, and how its value is checked against its type and rule.

A declaration says everything that others ask of an option.  The command line, the keywords of
`fedquilt.run`, the refusal of options without effect, the orders to Flower nodes and the
grouping of runs have no lists of their own: they ask for a `Flag`.
"""

from __future__ import annotations

import enum
import numbers
import re
import typing
from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError

OWN = "custom"
"""Stands for a part that somebody brought as an object, from Python."""

Case = Mapping[str, tuple[Any, ...] | None]
"""Settings that must hold together: option -> what it may be; None: anything but absent."""

CLIENTS = "clients"
"""Stands in a case for whose clients a run has: dealt from a named data set, or your own."""
SPLIT, OWN_CLIENTS = "dealt from a data set", "your own"

# Larger numbers are slips of the keyboard, and would overflow in float32 or in an index.
_LARGEST_NUMBER = 1e30
_LARGEST_COUNT = 2**31 - 1


class AnyBut(tuple[Any, ...]):
    """All values but these."""

    def __contains__(self, value: object) -> bool:
        return not super().__contains__(value)


class Flag(enum.Flag):
    """What others want to know of an option.  Without a flag none of it holds."""

    NODES = enum.auto()
    """Flower nodes are told its value: their work depends on it, or it is promised to them.
    Never a place on the server's disk."""
    EXECUTION = enum.auto()
    """It says where and how fast a run computes, not what: no other experiment."""
    REPETITION = enum.auto()
    """It tells runs of one experiment apart: seeds, the account, the target that reports show."""
    COMMON = enum.auto()
    """The short help of `fedquilt run` lists it; `--help-all` lists the others too."""
    COMMON_CONDENSE = enum.auto()
    """The short help of `fedquilt condense` lists it."""
    NOT_CONDENSE = enum.auto()
    """No condensation takes it."""
    PARAMETER = enum.auto()
    """A parameter of `fedquilt.run` by itself, which takes objects too."""
    OPERATOR = enum.auto()
    """In a Flower app the operator of the server decides it, not the run configuration."""
    APP = enum.auto()
    """It follows from your own model and data, where they are yours: in a Flower app, in Python."""


_NO_FLAG = Flag(0)


def declare(
    default: Any,
    panel: str,
    help: str,
    flags: Flag = _NO_FLAG,
    *,
    uses: tuple[Case, ...] = (),
    was: str = "",
    limit: float | None = None,
    floor: float = 0.0,
    **rule: Any,
) -> Any:
    """Declare a field of a configuration.

    Parameters
    ----------
    default, panel, help
        Its value where nobody says otherwise, the panel of the help it is listed under, its help.
    flags
        What else there is to know of it.
    uses
        The cases in which it has an effect, of which one is enough; empty: every run.
    was
        Its name in the version before, which files, keywords and the command line may still use.
    limit, floor
        The largest number it may be, where that is not the usual one; the smallest above 0.
    rule
        Either `choices=...` (and `pattern=...` for others that are allowed, `own=True` for an
        object from Python), or bounds for `checks.number` and `checks.integer`, or empty for
        free text.
    """
    known = {"panel": panel, "help": help, "flags": flags, "uses": uses, "was": was}
    known |= {"limit": limit, "floor": floor, "rule": rule}
    return field(default=default, metadata=known)


def declare_again(item: Field[Any], default: Any, panel: str, help: str, **rule: Any) -> Any:
    """Declare an inherited field with another default and rule; what else is known of it stays."""
    known = {**item.metadata, "panel": panel, "help": help, "rule": rule}
    return field(default=default, metadata=known)


_KINDS: dict[type, dict[str, frozenset[type]]] = {}


def kinds_of(config: type) -> dict[str, frozenset[type]]:
    """Return which types the fields of a configuration may have; looked up once."""
    if config not in _KINDS:
        hints = typing.get_type_hints(config)
        _KINDS[config] = {
            item.name: frozenset(typing.get_args(hints[item.name]) or (hints[item.name],))
            for item in fields(config)
        }
    return _KINDS[config]


def checked(item: Field[Any], value: Any, kinds: frozenset[type]) -> Any:
    """Return `value` in the field's type when its rule holds, or raise."""
    name, rule, limit = item.name, item.metadata["rule"], item.metadata["limit"]
    if value is None and type(None) in kinds:
        return None
    if bool in kinds:
        if not isinstance(value, bool):
            raise InvalidValueError(f"{name}={value!r} must be true or false")
        return value
    if kinds >= {int, float}:
        if isinstance(value, numbers.Integral):
            return checks.integer(name, value)
        return checks.number(name, value, **rule)
    if int in kinds:
        whole = checks.integer(name, value, **rule)
        return checks.integer(name, whole, at_most=int(limit or _LARGEST_COUNT))
    if float in kinds:
        real, floor = checks.number(name, value, **rule), item.metadata["floor"]
        if 0 < real < floor:
            raise InvalidValueError(
                f"{name}={value!r} must be >= {floor:g}: float32, in which updates are "
                "clipped, keeps too few digits of anything smaller"
            )
        return checks.number(name, real, at_most=limit or _LARGEST_NUMBER)
    if rule.get("own") and value == OWN:
        return value
    if "pattern" in rule and isinstance(value, str) and re.fullmatch(rule["pattern"], value):
        return value
    if "choices" in rule:
        return checks.choice(name, value, rule["choices"])
    if not isinstance(value, str) or not value or not _is_text(value):
        raise InvalidValueError(f"{name}={value!r} must be a non-empty text")
    if name == "dataset" and not re.fullmatch(r"[\w][\w.+-]*", value):
        raise InvalidValueError(
            f"dataset={value!r} must be letters, digits, '.', '_', '+' and '-': it names a folder"
        )
    return value


def _is_text(value: str) -> bool:
    """Tell whether a text can be written to a file; bytes that were no text cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value
