"""Draw the diagrams of the documentation as SVG, for light and dark pages.

    python tools/diagrams.py           # writes docs/images/*.svg
    python tools/diagrams.py --check   # says which of them differ from what is written there

Figures in them (what two runs of epsilon 3 come to) are computed by the package's accounting.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
IMAGES = ROOT / "docs" / "images"

STYLE = """
  text { font: 15px system-ui, sans-serif; fill: #1f2933 }
  .small { font-size: 13px } .title { font-weight: 600 } .quiet { fill: #52606d }
  .box { fill: #ffffff; stroke: #52606d; stroke-width: 1.5 }
  .zone { fill: #eef2f5; stroke: none } .on { fill: #b9dcf2; stroke: #00527f; stroke-width: 1.5 }
  .warm { fill: #f9dfc4; stroke: #9a4a00; stroke-width: 1.5 }
  .good { fill: #c5e8da; stroke: #00644b; stroke-width: 1.5 }
  .off { fill: none; stroke: #9aa5b1; stroke-width: 1.2; stroke-dasharray: 4 4 }
  .line { stroke: #52606d; stroke-width: 1.8; fill: none } .head { fill: #52606d }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb } .quiet { fill: #cbd2d9 }
    .box { fill: #1f2933; stroke: #9aa5b1 } .zone { fill: #2b333d }
    .on { fill: #17486b; stroke: #6cb8e6 } .warm { fill: #5c3a15; stroke: #f0a35e }
    .good { fill: #14503f; stroke: #5fcfa6 } .off { stroke: #7b8794 }
    .line { stroke: #9aa5b1 } .head { fill: #9aa5b1 }
  }"""


class Drawing:
    """An SVG that grows by boxes, texts and arrows; places are pixels from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = (width, height)
        self.title = title
        self.parts: list[str] = []

    def box(self, x: float, y: float, wide: float, high: float, kind: str = "box") -> None:
        """Draw a box."""
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="6"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        """Write a line of text."""
        style = f' class="{kind}"' if kind else ""
        self.parts.append(
            f'<text{style} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def label(
        self, x: float, y: float, wide: float, high: float, lines: Sequence[str], kind: str = "box"
    ) -> None:
        """Draw a box with lines of text in its middle, the first of them its title."""
        self.box(x, y, wide, high, kind)
        first = y + high / 2 + 5 - 10 * (len(lines) - 1)
        for number, words in enumerate(lines):
            style = "title" if number == 0 else "small quiet"
            self.text(x + wide / 2, first + 20 * number, words, style)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw an arrow."""
        far = math.hypot(to_x - x, to_y - y)
        across, down = (to_x - x) / far, (to_y - y) / far
        end_x, end_y = to_x - 9 * across, to_y - 9 * down
        self.parts.append(
            f'<path class="line" d="M{x:g} {y:g} L{end_x:.1f} {end_y:.1f}"/>'
            f'<path class="head" d="M{to_x:g} {to_y:g} '
            f"L{end_x - 5 * down:.1f} {end_y + 5 * across:.1f} "
            f'L{end_x + 5 * down:.1f} {end_y - 5 * across:.1f} Z"/>'
        )

    def svg(self) -> str:
        """Return the file."""
        wide, high = self.size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" '
            f'aria-label="{escape(self.title)}">\n<title>{escape(self.title)}</title>\n'
            f"<style>{STYLE}\n</style>\n" + "\n".join(self.parts) + "\n</svg>\n"
        )


def one_round() -> Drawing:
    """Draw a round of `certified`, and who sees what of it."""
    it = Drawing(960, 410, "One round: clients train, the server clips, sums, noises, charges")
    zones = ((10, 250, "Each client"), (270, 430, "The server, trusted"), (710, 240, "Anybody"))
    for x, wide, name in zones:
        it.box(x, 10, wide, 390, "zone")
        it.text(x + wide / 2, 36, name, "title")
    for row, name in enumerate(("clinic-01", "clinic-02", "clinic-03")):
        y = 60 + 90 * row
        it.label(30, y, 120, 70, (name, "own data"), "on")
        it.text(200, y + 30, "trains", "small")
        it.arrow(150, y + 40, 290, y + 40)
    it.text(135, 345, "its samples never leave it", "small quiet")
    it.text(135, 385, "sees: its data, the model", "small")
    it.label(290, 70, 110, 220, ("Clip", "every update", "to its bound"), "warm")
    it.arrow(400, 180, 425, 180)
    it.label(425, 140, 80, 80, ("Sum",))
    it.arrow(505, 180, 530, 180)
    it.label(530, 140, 150, 80, ("Noise", "on the sum"), "warm")
    it.arrow(680, 180, 730, 180)
    it.label(425, 60, 255, 56, ("Select", "and reserve in the ledger"))
    it.label(425, 250, 255, 50, ("Settle the charge, on disk",), "good")
    it.arrow(605, 220, 605, 250)
    it.text(485, 345, "the ledger holds every client's spend", "small quiet")
    it.text(485, 385, "sees: single updates, the sum", "small")
    it.label(730, 140, 200, 80, ("New model", "epsilon holds for it"), "good")
    it.label(730, 250, 200, 50, ("Statement",), "good")
    it.text(830, 345, "who took part is public", "small quiet")
    it.text(830, 385, "sees: every released model", "small")
    return it


def epsilons() -> Drawing:
    """Draw why two runs of epsilon 3 do not cost 6: squares of mu add up."""
    from fedquilt.privacy.accounting import gaussian_epsilon, gaussian_mu

    delta, each = 1e-5, 3.0
    mu = gaussian_mu(each, delta)
    both = gaussian_epsilon(math.sqrt(2) * mu, delta)
    it = Drawing(760, 300, f"Two runs of epsilon 3 cost a client {both:.2f}, not 6")
    it.text(20, 34, "Epsilons do not add up", "title", "start")
    scale = 100.0
    for row, (name, value, kind) in enumerate(
        (("run 1", each, "on"), ("run 2", each, "on"), ("both", both, "good"))
    ):
        y = 52 + 34 * row
        it.text(20, y + 19, name, "small", "start")
        it.box(80, y, scale * value, 26, kind)
        it.text(88 + scale * value, y + 19, f"ε = {value:.3g}", "small", "start")
    it.box(80, 120, scale * 2 * each, 26, "off")
    it.text(76 + scale * 2 * each, 113, "6 would be the sum", "small quiet", "end")
    it.text(20, 190, "Their squares do: μ² is what the ledger adds", "title", "start")
    square = mu**2
    wide = 300.0
    for number in range(2):
        it.box(80 + wide * number, 206, wide, 26, "on")
        middle = 80 + wide * (number + 0.5)
        it.text(middle, 224, f"run {number + 1}: μ² = {square:.3f}", "small")
    it.box(80, 240, 2 * wide, 26, "good")
    it.text(80 + wide, 258, f"both: μ² = {2 * square:.3f}, which is ε = {both:.3g}", "small")
    it.text(20, 288, "at δ = 10⁻⁵; shares of a lifetime are shares of μ²", "small quiet", "start")
    return it


def network_slices() -> Drawing:
    """Draw a network whose layers are cut to the width that a client can hold."""
    it = Drawing(900, 290, "A network cut to widths 1, 1/2 and 1/4")
    for number, (share, name) in enumerate(((1.0, "1"), (0.5, "1/2"), (0.25, "1/4"))):
        left = 20 + 290 * number
        it.text(left + 130, 30, f"client of width {name}", "title")
        layers = ((0, 4, False), (1, 8, True), (2, 8, True), (3, 3, False))
        for column, units, cut in layers:
            kept = max(1, round(units * share)) if cut else units
            for unit in range(units):
                y = 52 + 26 * unit + 13 * (8 - units)
                it.box(left + 74 * column, y, 40, 20, "on" if unit < kept else "off")
            if column < 3:
                it.arrow(left + 74 * column + 46, 156, left + 74 * column + 70, 156)
    it.text(
        450,
        280,
        "inputs and classes stay whole; a unit is averaged over the clients that hold it",
        "small quiet",
    )
    return it


def deployment() -> Drawing:
    """Draw the processes of a deployment."""
    it = Drawing(960, 330, "The processes of a deployment: two nodes, a proxy, the server")
    for x, wide, name in ((10, 230, "clinic A"), (290, 380, "server"), (720, 230, "clinic B")):
        it.box(x, 10, wide, 310, "zone")
        it.text(x + wide / 2, 36, name, "title")
    for left, door in ((25, 0), (735, 1)):
        it.label(left, 60, 200, 60, ("SuperNode", "its own key"))
        it.label(left, 150, 200, 60, ("client app", "one process a task"), "on")
        it.label(left, 240, 200, 60, ("data", "never leave"), "on")
        it.arrow(left + 100, 120, left + 100, 150)
        it.arrow(left + 100, 240, left + 100, 210)
        x = 225 if door == 0 else 735
        it.arrow(x, 90, 305 if door == 0 else 655, 90)
        it.text(265 if door == 0 else 695, 80, "TLS", "small")
    it.label(305, 60, 350, 60, ("proxy :443", "passes on the nodes' requests alone"), "warm")
    it.label(305, 150, 165, 60, ("SuperLink", "loopback"))
    it.label(490, 150, 165, 60, ("server app", "rounds, noise"))
    it.label(305, 240, 165, 60, ("roster", "whose keys count"), "good")
    it.label(490, 240, 165, 60, ("ledger, results", "what each has spent"), "good")
    it.arrow(387, 120, 387, 150)
    it.arrow(470, 180, 490, 180)
    it.arrow(572, 210, 572, 240)
    it.arrow(490, 200, 470, 255)
    return it


def secure_sum() -> Drawing:
    """Draw who sees what under secure aggregation."""
    it = Drawing(960, 300, "Secure aggregation: what a client, the server and anybody sees")
    zones = ((10, 340, "client i"), (400, 330, "server"), (780, 170, "anybody"))
    for x, wide, name in zones:
        it.box(x, 10, wide, 280, "zone")
        it.text(x + wide / 2, 36, name, "title")
    steps = (
        (("update", "clipped to c_i"), "on"),
        (("rounded to integers", "a vector of length D_i at most"), "on"),
        (("+ its share of the noise", "Skellam, variance V / M"), "warm"),
        (("+ masks", "its own, and one with every peer"), "warm"),
    )
    for number, (lines, kind) in enumerate(steps):
        it.label(25, 46 + 62 * number, 310, 50, lines, kind)
        if number:
            it.arrow(180, 34 + 62 * number, 180, 46 + 62 * number)
    it.arrow(335, 257, 415, 257)
    it.label(415, 232, 300, 50, ("uniform numbers modulo 2^b", "one vector of each client"), "off")
    it.label(415, 138, 300, 60, ("shares of the survivors' masks", "open the sum, no single one"))
    it.label(415, 50, 300, 60, ("noised sum of all clients", "the one thing it learns"), "good")
    it.arrow(565, 232, 565, 198)
    it.arrow(565, 138, 565, 110)
    it.arrow(715, 80, 795, 80)
    it.label(795, 50, 140, 60, ("model", "and its charges"), "good")
    return it


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "one_round": one_round,
    "epsilons": epsilons,
    "network_slices": network_slices,
    "deployment": deployment,
    "secure_sum": secure_sum,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for name, draw in DRAWINGS.items():
        path, drawn = IMAGES / f"{name}.svg", draw().svg()
        if not path.exists() or path.read_text() != drawn:
            stale.append(path.name)
        if not check:
            path.write_text(drawn)
    print(*(stale or ["nothing changed"]), sep="\n")
    return bool(stale) and check


if __name__ == "__main__":
    sys.exit(main())
