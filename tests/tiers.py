"""The two tiers: `make test` leaves out what is marked `slow`, `make test-all` runs everything.

Of many cases of one kind the first tier has some, the second one all:

    @pytest.mark.parametrize("moment", rest_is_slow(MOMENTS, one_of_each(MOMENTS, event)))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import pytest


def rest_is_slow(cases: Sequence[Any], quick: Collection[Any], names: int = 1) -> list[Any]:
    """Return the cases of a parametrization, those that are not `quick` marked `slow`.

    A case is the value of one name, or a tuple of the values of so many `names`.
    """
    strangers = [case for case in quick if case not in cases]
    assert quick, "nothing would be left in the first tier"
    assert not strangers, f"no such cases: {strangers}"
    return [
        case
        if case in quick
        else pytest.param(*([case] if names == 1 else case), marks=pytest.mark.slow)
        for case in cases
    ]


def one_of_each(cases: Sequence[Any], kind: Callable[[Any], Hashable]) -> list[Any]:
    """Return of each kind of cases the one in the middle."""
    kinds: dict[Hashable, list[Any]] = {}
    for case in cases:
        kinds.setdefault(kind(case), []).append(case)
    return [alike[len(alike) // 2] for alike in kinds.values()]
