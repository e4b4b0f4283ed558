"""A finished run in a notebook: the claim, the accuracy as a small chart, what was run.

Everything is text or inline SVG, escaped; no script.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedquilt.privacy.statement import Statement

_WIDTH, _HEIGHT = 360, 120
_GOOD, _BAD = "#00694d", "#b00020"


def result_as_html(result: Mapping[str, Any], statement: Statement) -> str:
    """Return the HTML of a result and its statement."""
    metadata, history = result["metadata"], result["history"]
    bounded = statement.is_bounded
    claim, *others = statement.as_text().splitlines()
    head = html.escape(claim.removeprefix("claim").strip())
    facts = [
        ("run", f"{metadata['dataset']}, {result['mode']}, seed {metadata['seed']}"),
        (
            "rounds",
            f"{result['rounds']}" + (f" ({result['stopped']})" if result.get("stopped") else ""),
        ),
        ("final accuracy", _number(metadata["final_accuracy"])),
        *((line[:11].strip(), line[11:]) for line in others),
    ]
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in facts
    )
    chart = _chart(history.get("evaluation_rounds") or (), history.get("test_accuracy") or ())
    color = _GOOD if bounded else _BAD
    return (
        f"<div><p style='border-left:5px solid {color};padding-left:.6em'><strong>{head}</strong>"
        f"</p>{chart}<table>{rows}</table></div>"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _chart(rounds: Sequence[float], values: Sequence[float | None]) -> str:
    """Return the accuracy by round as an SVG; nothing where there is nothing to draw."""
    points = [
        (float(x), float(y))
        for x, y in zip(rounds, values, strict=False)
        if y is not None and math.isfinite(y)
    ]
    if not points:
        return ""
    last = max(x for x, _ in points)
    first = min(x for x, _ in points)
    span = last - first or 1.0
    placed = " ".join(
        f"{30 + (x - first) / span * (_WIDTH - 40):.1f},{_HEIGHT - 20 - y * (_HEIGHT - 30):.1f}"
        for x, y in points
    )
    label = f"test accuracy from round {first:.0f} to {last:.0f}, at last {points[-1][1]:.4f}"
    return (
        f"<svg role='img' aria-label='{label}' width='{_WIDTH}' height='{_HEIGHT}' "
        f"viewBox='0 0 {_WIDTH} {_HEIGHT}'>"
        f"<line x1='30' x2='{_WIDTH - 10}' y1='{_HEIGHT - 20}' y2='{_HEIGHT - 20}' stroke='#888'/>"
        f"<polyline points='{placed}' fill='none' stroke='#0072b2' stroke-width='2'/>"
        f"<text x='0' y='16' font-size='11' fill='#888'>1</text>"
        f"<text x='0' y='{_HEIGHT - 16}' font-size='11' fill='#888'>0</text>"
        f"<text x='{_WIDTH // 2}' y='{_HEIGHT - 4}' font-size='11' fill='#888' "
        f"text-anchor='middle'>accuracy by round</text></svg>"
    )
