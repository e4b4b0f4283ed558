"""What a value read from JSON must be, said once and checked before anybody uses it.

>>> line = Object({"round": COUNT, "cohort": ListOf(COUNT)}, {"loss": maybe(NUMBER)})
>>> line.fault({"round": 3, "cohort": [1, 4], "anything": "else"}, "line 4")
>>> line.fault({"round": 3, "cohort": [1, -4]}, "line 4")
'line 4: cohort must be a list, each entry a whole number >= 0'
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, Protocol

from fedquilt.common.errors import FedquiltError
from fedquilt.common.formatting import printable, shortened


class Schema(Protocol):
    """A kind of value."""

    @property
    def words(self) -> str:
        """What such a value is, in words."""

    def fault(self, value: Any, where: str) -> str | None:
        """Return what is wrong with a value, None when it is of this kind."""


def check(value: Any, schema: Schema, where: object, error: type[FedquiltError]) -> None:
    """Raise `error`, which names `where` the value was read, unless it is of this kind."""
    fault = schema.fault(value, printable(where))
    if fault is not None:
        raise error(fault)


def fits(schema: Schema, value: Any) -> bool:
    """Tell whether a value is of a kind."""
    return schema.fault(value, "") is None


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A text, a number, a truth value or null.

    Parameters
    ----------
    words
        What it is, for the message.
    types
        The exact types allowed: a truth value is no number.
    least, most
        The bounds of a number, which is finite in any case.
    texts
        The only texts allowed; None allows all.
    longest
        How many characters a text may have.
    """

    words: str
    types: frozenset[type]
    least: float | None = None
    most: float | None = None
    texts: tuple[str, ...] | None = None
    longest: int | None = None

    def fault(self, value: Any, where: str) -> str | None:
        """Return what is wrong with a value, None when it is of this kind."""
        if self.all_hold((value,)):
            return None
        return f"{where} must be {self.words}; it is {shortened(value)}"

    def all_hold(self, values: Iterable[Any]) -> bool:
        """Tell whether every one of the values is of this kind; fast for long lists."""
        given = list(values)
        found = set(map(type, given))
        if not found <= self.types:
            return False
        if str in found and not self._texts_hold([v for v in given if type(v) is str]):
            return False
        if not found & {int, float}:
            return True
        if not found <= {int, float}:
            given = [value for value in given if type(value) in (int, float)]
        if not all(map(math.isfinite, given)):
            return False
        above = self.least is None or min(given) >= self.least
        return above and (self.most is None or max(given) <= self.most)

    def _texts_hold(self, given: list[str]) -> bool:
        if self.texts is not None and not set(given) <= {*self.texts}:
            return False
        return self.longest is None or max(map(len, given)) <= self.longest


def maybe(scalar: Scalar) -> Scalar:
    """Return the same kind, or null."""
    return dataclasses.replace(
        scalar, words=f"{scalar.words} or null", types=scalar.types | {NoneType}
    )


_LARGEST = 2**63 - 1

TEXT = Scalar("a text", frozenset({str}))
NAME = Scalar("a text of at most 200 characters", frozenset({str}), longest=200)
NUMBER = Scalar("a finite number", frozenset({int, float}))
COUNT = Scalar("a whole number >= 0", frozenset({int}), least=0, most=_LARGEST)
POSITIVE = Scalar("a whole number >= 1", frozenset({int}), least=1, most=_LARGEST)
ANY_NUMBER = maybe(NUMBER)
ANY_TEXT = maybe(TEXT)


@dataclasses.dataclass(frozen=True)
class Anything:
    """Any value: nobody computes with it."""

    words: str = "anything"

    def fault(self, value: Any, where: str) -> str | None:
        """Return None."""
        return None


@dataclasses.dataclass(frozen=True)
class Nullable:
    """A value of one kind, or null."""

    of: Schema

    @property
    def words(self) -> str:
        """What such a value is, in words."""
        return f"{self.of.words}, or null"

    def fault(self, value: Any, where: str) -> str | None:
        """Return what is wrong with a value, None when it is of this kind."""
        return None if value is None else self.of.fault(value, where)


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list whose entries are all of one kind; `length` says how many there must be."""

    of: Schema
    length: int | None = None

    @property
    def words(self) -> str:
        """What such a value is, in words."""
        size = "" if self.length is None else f" of {self.length}"
        return f"a list{size}, each entry {self.of.words}"

    def fault(self, value: Any, where: str) -> str | None:
        """Return what is wrong with a value, None when it is of this kind."""
        if not isinstance(value, list) or self.length not in (None, len(value)):
            return f"{where} must be {self.words}"
        if isinstance(self.of, Scalar):
            return None if self.of.all_hold(value) else f"{where} must be {self.words}"
        for place, item in enumerate(value):
            fault = self.of.fault(item, f"{where}, entry {place},")
            if fault is not None:
                return fault
        return None


@dataclasses.dataclass(frozen=True)
class Object:
    """An object with the keys `needed`, perhaps those of `known`, and perhaps others."""

    needed: Mapping[str, Schema]
    known: Mapping[str, Schema] = dataclasses.field(default_factory=dict)
    words: str = "an object"

    def fault(self, value: Any, where: str) -> str | None:
        """Return what is wrong with a value, None when it is of this kind."""
        if not isinstance(value, dict):
            return f"{where} must be an object; it is a {type(value).__name__}"
        for key in self.needed:
            if key not in value:
                return f"{where} lacks {key!r}"
        for key, schema in (*self.needed.items(), *self.known.items()):
            fault = schema.fault(value[key], f"{where}: {key}") if key in value else None
            if fault is not None:
                return fault
        return None


@dataclasses.dataclass(frozen=True)
class MapOf:
    """An object with any keys, all of whose values are of one kind."""

    of: Schema
    words: str = "an object"

    def fault(self, value: Any, where: str) -> str | None:
        """Return what is wrong with a value, None when it is of this kind."""
        if not isinstance(value, dict):
            return f"{where} must be an object; it is a {type(value).__name__}"
        for key, item in value.items():
            fault = self.of.fault(item, f"{where}: {printable(key)[:60]}")
            if fault is not None:
                return fault
        return None
