"""One option: how it is declared, and how its value is checked against its type and rule."""

from __future__ import annotations

import numbers
import re
from dataclasses import field
from typing import Any

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError

OWN = "custom"
"""Stands for a part that somebody brought as an object, from Python."""

# Larger numbers are slips of the keyboard, and would overflow in float32 or in an index.
LARGEST_NUMBER = 1e30
LARGEST_COUNT = 2**31 - 1

_CEILINGS: dict[str, float] = {
    "seed": 2**63 - 1,
    "noise_seed": 2**63 - 1,
    "epsilon": 1e4,
    "allowance": 1e4,
    "server_lr": 1e300,
    "noise_bands": 10_000,
}

# Squares and quotients of smaller bounds leave the range in which float32 has all its digits.
_FLOORS: dict[str, float] = dict.fromkeys(("clip_norm", "min_clip", "max_clip"), 1e-30)


def declare(default: Any, panel: str, help: str, **rule: Any) -> Any:
    """Declare a field: its help, the panel it is listed under, and its rule.

    `rule` is either `choices=...` (and `pattern=...` for others that are allowed), or bounds
    for `checks.number` and `checks.integer`, or empty for free text.
    """
    return field(default=default, metadata={"panel": panel, "help": help, "rule": rule})


def checked(name: str, value: Any, rule: dict[str, Any], annotation: Any) -> Any:
    """Return `value` in the field's type when its rule holds, or raise."""
    kinds = {part.strip() for part in str(annotation).split("|")}
    if value is None and "None" in kinds:
        return None
    if "bool" in kinds:
        if not isinstance(value, bool):
            raise InvalidValueError(f"{name}={value!r} must be true or false")
        return value
    if kinds >= {"int", "float"}:
        if isinstance(value, numbers.Integral):
            return checks.integer(name, value)
        return checks.number(name, value, **rule)
    if "int" in kinds:
        whole = checks.integer(name, value, **rule)
        return checks.integer(name, whole, at_most=int(_CEILINGS.get(name, LARGEST_COUNT)))
    if "float" in kinds:
        real = checks.number(name, value, **rule)
        if 0 < real < _FLOORS.get(name, 0):
            raise InvalidValueError(
                f"{name}={value!r} must be >= {_FLOORS[name]:g}: float32, in which updates are "
                "clipped, keeps too few digits of anything smaller"
            )
        return checks.number(name, real, at_most=_CEILINGS.get(name, LARGEST_NUMBER))
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
