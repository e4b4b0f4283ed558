"""One look for each series: a colour, a dash and a marker, for pages, figures and notebooks.

The hues are those of Okabe and Ito, moved until every two of them are apart for readers with any
of the three kinds of colour blindness, and each stands at least 3:1 against its background
(`tools/color_distances.py` prints the figures).  In grey, colours of one dash differ in lightness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LIGHT = {
    "blue": "#0e327d",
    "vermilion": "#c63603",
    "green": "#197b62",
    "purple": "#9f27bc",
    "orange": "#cc832f",
    "sky": "#249bbf",
    "grey": "#1f2421",
}
"""On white, which is also paper."""
DARK = {
    "blue": "#3372fb",
    "vermilion": "#de300a",
    "green": "#b2efbe",
    "purple": "#955aa1",
    "orange": "#f6a522",
    "sky": "#67c2fb",
    "grey": "#9e9d97",
}
"""On a dark page."""
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 3), (2, 3), (9, 3, 2, 3), (12, 4, 2, 3, 2, 3))
_OWN = {
    "green": (0, "circle"),
    "vermilion": (2, "square"),
    "blue": (1, "diamond"),
    "orange": (1, "up"),
    "purple": (3, "down"),
    "sky": (4, "plus"),
    "grey": (0, "cross"),
}
"""Place of the dash, and the marker, of each colour; in this order they are given out."""


@dataclass(frozen=True)
class Identity:
    """How one series looks, wherever it is drawn."""

    color: str
    dash: tuple[float, ...]
    marker: str


def identities(modes: Sequence[str], colors: Mapping[str, str]) -> list[Identity]:
    """Give each series a look of its own: the first of a mode has the mode's colour.

    `colors` names the colour of each mode; a mode may carry a variant behind a colon.  With
    more series than colours, a colour comes again with another dash.
    """
    wanted = [colors.get(mode.partition(":")[0]) for mode in modes]
    exact = [place for place, mode in enumerate(modes) if mode in colors]
    others = [place for place in range(len(modes)) if place not in exact]
    firsts: dict[str, int] = {}
    for place in (*exact, *others):
        color = wanted[place]
        if color is not None:
            firsts.setdefault(color, place)
    free = [color for color in _OWN if color not in firsts]
    found: list[Identity] = []
    for place, color in enumerate(wanted):
        if color is not None and firsts[color] == place:
            own = color
        else:
            own = free.pop(0) if free else list(_OWN)[place % len(_OWN)]
        dash, marker = _OWN[own]
        turn = sum(one.color == own for one in found)
        found.append(Identity(own, DASHES[(dash + turn) % len(DASHES)], marker))
    return found
