"""Series can be told apart, by whatever eyes, in colour and in grey."""

from __future__ import annotations

import re
import sys
from itertools import combinations
from pathlib import Path

import pytest

from fedquilt.common.colors import DARK, DASHES, LIGHT, identities
from fedquilt.config.modes import MODE_TABLE, mode_colors
from fedquilt.report.html_page import html_page
from fedquilt.report.style import COLORS, looks_of
from fedquilt.report.views.page import empty_view

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from color_distances import BACKGROUNDS, PALETTES, VISION, contrast, distance, seen

DEMO = ["fedavg", "fixed_dp", "quap_fl", "quap_fl_client", "certified:worst_case", "certified"]


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("background", PALETTES)
def test_colours_are_apart_for_all_eyes(background: str, vision: str) -> None:
    palette = PALETTES[background]
    for first, second in combinations(palette, 2):
        assert distance(palette[first], palette[second], vision) > 10, (first, second)


@pytest.mark.parametrize("background", PALETTES)
def test_colours_stand_out_from_their_background(background: str) -> None:
    for name, color in PALETTES[background].items():
        assert contrast(color, BACKGROUNDS[background]) >= 3, name


@pytest.mark.parametrize("background", PALETTES)
@pytest.mark.parametrize("modes", [DEMO, ["certified"] * 7, ["certified", "fedavg", "my own"]])
def test_in_grey_series_differ_in_dash_or_lightness(modes: list[str], background: str) -> None:
    palette, looks = PALETTES[background], identities(modes, mode_colors())
    for first, second in combinations(looks, 2):
        grey = abs(seen(palette[first.color], "full")[0] - seen(palette[second.color], "full")[0])
        assert first.dash != second.dash or grey > 15, (first, second)
        assert first.marker != second.marker


def test_a_mode_keeps_its_colour_in_any_company() -> None:
    for modes in (DEMO, [*DEMO, "certified"], ["certified"]):
        looks = identities(modes, mode_colors())
        for mode in set(modes) & set(MODE_TABLE):
            assert looks[modes.index(mode)].color == MODE_TABLE[mode].color


def test_many_series_have_looks_of_their_own() -> None:
    looks = identities(["certified"] * 30, mode_colors())
    assert len({(one.color, one.dash) for one in looks}) == 30
    assert len(DASHES) == 5


def test_pages_and_figures_have_one_table() -> None:
    assert COLORS == LIGHT
    style = html_page(empty_view())
    for name in LIGHT:
        found = set(re.findall(rf"--{name}: (#[0-9a-f]{{6}})", style))
        assert found == {LIGHT[name], DARK[name]}
    assert looks_of([]) == []
