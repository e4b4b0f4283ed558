"""The validators: what passes, in which type, and what the message says."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from fedquilt.common import checks
from fedquilt.errors import FedquiltError, InvalidValueError


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.int16(3), np.float64(3), Fraction(3)])
def test_numbers_of_every_kind_become_floats(value: object) -> None:
    result = checks.number("x", value, above=0, at_most=3)
    assert type(result) is float
    assert result == 3.0


@pytest.mark.parametrize("value", ["3", None, True, np.bool_(True), 3j, [3.0], np.array([3.0])])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(InvalidValueError, match=r"x=.* must be a number"):
        checks.number("x", value)


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (0.0, {"above": 0}, "x=0.0 must be > 0"),
        (-1, {"at_least": 0}, "x=-1 must be >= 0"),
        (1.0, {"above": 0, "below": 1}, "x=1.0 must be > 0 and < 1"),
        (2.5, {"at_least": 0, "at_most": 1}, "x=2.5 must be >= 0 and <= 1"),
        (float("nan"), {"above": 0}, "x=nan must be > 0"),
        (float("nan"), {}, "x=nan must be finite"),
        (float("inf"), {"above": 0}, "x=inf must be finite and > 0"),
        (float("-inf"), {"above": 0}, "x=-inf must be > 0"),
        (float("inf"), {"at_most": 1234567.5}, "x=inf must be <= 1234567.5"),
    ],
)
def test_a_number_outside_its_bounds_is_named_with_the_rule(
    value: float, bounds: dict[str, float], message: str
) -> None:
    with pytest.raises(InvalidValueError) as caught:
        checks.number("x", value, **bounds)
    assert str(caught.value) == message


def test_a_whole_number_beyond_the_floats_is_an_error_of_ours() -> None:
    with pytest.raises(InvalidValueError, match="must be finite and > 0"):
        checks.number("x", 10**400, above=0)


@pytest.mark.parametrize(
    "value",
    [7, np.int64(7), np.uint8(7), np.array(7), torch.tensor(7), torch.tensor(7, dtype=torch.int8)],
)
def test_whole_numbers_of_every_kind_become_ints(value: object) -> None:
    result = checks.integer("n", value, at_least=7, at_most=7)
    assert type(result) is int
    assert result == 7


@pytest.mark.parametrize(
    "value", [7.0, np.float64(7), "7", None, True, np.bool_(True), torch.tensor(7.0), [7]]
)
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(InvalidValueError, match=r"n=.* must be a whole number"):
        checks.integer("n", value)


def test_bounds_of_whole_numbers_are_exact_and_written_out() -> None:
    assert checks.integer("n", 2**53 + 1, at_most=2**53 + 1) == 2**53 + 1
    with pytest.raises(InvalidValueError):
        checks.integer("n", 2**53 + 1, at_most=2**53)
    with pytest.raises(InvalidValueError, match=r"n=1234568 must be >= 0 and <= 1234566$"):
        checks.integer("n", 1234568, at_least=0, at_most=1234566)
    assert checks.integer("n", 10**400, at_least=0) == 10**400


def test_choices_name_the_nearest() -> None:
    assert checks.choice("mode", "fedavg", ("fedavg", "quap_fl")) == "fedavg"
    with pytest.raises(InvalidValueError) as caught:
        checks.choice("mode", "quapfl", ("fedavg", "quap_fl"))
    assert str(caught.value) == (
        "mode='quapfl' must be one of 'fedavg', 'quap_fl' (did you mean 'quap_fl'?)"
    )
    with pytest.raises(InvalidValueError, match=r"one of 'a', 'b'$"):
        checks.choice("mode", 3, ("a", "b"))
    with pytest.raises(InvalidValueError):
        checks.choice("mode", ["a"], ("a", "b"))


def test_errors_are_of_the_family_and_of_the_builtin_kind() -> None:
    assert issubclass(InvalidValueError, FedquiltError)
    assert issubclass(InvalidValueError, ValueError)


@pytest.mark.parametrize(
    "given",
    [
        [0, 4, 2],
        (0, 4, 2),
        np.array([0, 4, 2], dtype=np.uint8),
        torch.tensor([0, 4, 2]),
        [np.int64(0), torch.tensor(4), 2],
        (number for number in (0, 4, 2)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_indices_of_any_kind(given: object) -> None:
    checked = checks.indices("clients", given, 5, unique=True)
    assert checked.dtype == np.int64
    assert checked.tolist() == [0, 4, 2]


def test_indices_may_be_none_at_all_or_repeated() -> None:
    assert checks.indices("clients", [], 0).shape == (0,)
    assert checks.indices("clients", np.zeros(0), 5).dtype == np.int64
    assert checks.indices("clients", [1, 1], 2).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([0, 5], "clients holds 5, every number must be >= 0 and < 5"),
        ([2, -1], "clients holds -1, every number must be >= 0 and < 5"),
        ([3, 1, 3], "clients holds 3 more than once"),
        ([1.0], "clients=[1.0] must be a flat list of whole numbers"),
        ([1, True], "clients=[1, True] must be a flat list of whole numbers"),
        ([[1]], "clients=[[1]] must be a flat list of whole numbers"),
        ([[1], [2, 3]], "clients=[[1], [2, 3]] must be a flat list of whole numbers"),
        (["a"], "clients=['a'] must be a flat list of whole numbers"),
        ([2**70], f"clients=[{2**70}] must be a flat list of whole numbers"),
        (4, "clients=4 must be a flat list of whole numbers"),
        (None, "clients=None must be a flat list of whole numbers"),
    ],
)
def test_indices_that_are_refused(given: object, told: str) -> None:
    with pytest.raises(InvalidValueError) as raised:
        checks.indices("clients", given, 5, unique=True)
    assert str(raised.value) == told
