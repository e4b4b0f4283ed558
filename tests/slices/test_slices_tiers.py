"""The widths of clients: dealt, listed, or from what their devices can hold."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from slices_samples import network, problem

from fedquilt.errors import InvalidValueError
from fedquilt.setup.federation import build_method
from fedquilt.slices.method import Slices
from fedquilt.slices.selection import client_widths


def no_needs(width: Fraction) -> tuple[float, float]:
    raise AssertionError("a list of widths asks for no device")


def device_needs(width: Fraction) -> tuple[float, float]:
    return 100 * float(width), 1e6 * float(width) ** 2


def dealt(tiers: str, count: int, seed: int = 0) -> tuple[Fraction, ...]:
    return client_widths(tiers, count, np.random.default_rng(seed), no_needs)


@pytest.mark.parametrize("count", [1, 4, 10, 101])
def test_clients_are_dealt_evenly_and_at_random(count: int) -> None:
    widths = dealt("1,1/2, 1/4,0.125", count)
    counts = Counter(widths)
    assert set(counts) <= {Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)}
    assert max(counts.values()) - (min(counts.values()) if count >= 4 else 0) <= 1
    assert widths == dealt("1,1/2, 1/4,0.125", count)
    assert count < 10 or widths != dealt("1,1/2, 1/4,0.125", count, seed=1)


@pytest.mark.parametrize("tiers", ["", "0", "1,,1/2", "1,2", "1/0", "half", "-1/2", "1;1/2"])
def test_a_bad_list_is_named(tiers: str) -> None:
    with pytest.raises(InvalidValueError, match="tiers="):
        dealt(tiers, 4)


def table(folder: Path, text: str) -> str:
    path = folder / "devices.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_table_of_widths(tmp_path: Path) -> None:
    path = table(tmp_path, "client,width\n2,1/4\n0,1\n1,0.5\n")
    assert dealt(path, 3) == (Fraction(1), Fraction(1, 2), Fraction(1, 4))


def test_a_table_of_devices_gives_the_largest_width_that_fits(tmp_path: Path) -> None:
    rows = "0,100,1e6\n1,99,1e6\n2,1000,249999\n3,30,1e9\n4,6.25,3907"
    path = table(tmp_path, f"client,memory_mb,flops\n{rows}\n")
    widths = client_widths(path, 5, np.random.default_rng(0), device_needs)
    assert [str(width) for width in widths] == ["1", "1/2", "1/4", "1/4", "1/16"]
    path = table(tmp_path, "client,memory_mb,flops\n0,6,1e9\n")
    with pytest.raises(InvalidValueError, match=r"line 2: memory_mb=6 .* what width 1/16 takes"):
        client_widths(path, 1, np.random.default_rng(0), device_needs)


def test_what_a_width_takes_is_counted_on_the_model(tmp_path: Path) -> None:
    """3 -> 4 -> 4 -> 3: 51 parameters, 40 multiply-adds; at width 1/2 23 and 16."""
    whole, half = 51 * 12 / 2**20, 23 * 12 / 2**20
    rows = [(whole, 80), (whole, 79), (half, 80), (half * 0.99, 80), (half, 32), (half, 31)]
    lines = "".join(f"{client},{mb!r},{flops}\n" for client, (mb, flops) in enumerate(rows))
    path = table(tmp_path, f"client,memory_mb,flops\n{lines}")
    method = build_method(*problem(network(), method="heterofl", tiers=path))
    assert isinstance(method, Slices)
    assert [str(w) for w in method.slicing.widths] == ["1", "1/2", "1/2", "1/4", "1/2", "1/4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,width\n0,1\n", "client 1 is missing"),
        ("client,width\n0,1\n0,1\n", "line 3: client 0 must be listed once"),
        ("client,width\n0,1\n2,1\n", r"client='2' must be a number of 0..1"),
        ("client,width\n0,1\n-1,1\n", "client='-1'"),
        ("client,width\n0,1\n1,3\n", "line 3.*width='3'"),
        ("client,memory_mb,flops\n0,much,1\n", "line 2: memory_mb and flops must be numbers"),
        ("client,speed\n0,1\n", "it has client,speed"),
        ("", "it has none"),
    ],
)
def test_a_bad_table_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        dealt(table(tmp_path, text), 2)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"none\.csv' cannot be read"):
        dealt(str(tmp_path / "none.csv"), 2)
