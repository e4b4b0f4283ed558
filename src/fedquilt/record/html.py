"""A finished run in a notebook: the claim, the accuracy as a small chart, what was run.

Everything is text or inline SVG, escaped; no script.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedquilt.common.colors import LIGHT
from fedquilt.common.formatting import format_bound
from fedquilt.privacy.statement import Statement

_WIDTH, _HEIGHT = 360, 120
_GOOD, _BAD = "#00694d", "#b00020"


def result_as_html(result: Mapping[str, Any], statement: Statement) -> str:
    """Return the HTML of a result and its statement."""
    metadata, history = result["metadata"], result["history"]
    bounded = statement.is_bounded
    claim, *others = statement.as_text().splitlines()
    alone = claim.removeprefix("claim").strip()
    lifetime = _lifetime(result, statement)
    head = html.escape(alone if lifetime is None else lifetime)
    metric, values = _headline(history)
    facts = [
        ("run", f"{metadata['dataset']}, {result['mode']}, seed {metadata['seed']}"),
        (
            "rounds",
            f"{result['rounds']}" + (f" ({result['stopped']})" if result.get("stopped") else ""),
        ),
        (f"final {metric}", _number(values[-1] if values else None)),
        *([] if lifetime is None else [("this run", alone)]),
        *((line[:11].strip(), line[11:]) for line in others),
    ]
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in facts
    )
    chart = _chart(metric, history.get("evaluation_rounds") or (), values)
    color = _GOOD if bounded else _BAD
    return (
        f"<div><p style='border-left:5px solid {color};padding-left:.6em'><strong>{head}</strong>"
        f"</p>{chart}<table>{rows}</table></div>"
    )


def _lifetime(result: Mapping[str, Any], statement: Statement) -> str | None:
    """Say what all runs of a shared ledger have cost; None where this run is all of it."""
    ledger = result.get("ledger") or {}
    settings = result["metadata"].get("hyperparameters") or {}
    worst = float(ledger.get("lifetime_epsilon_max", 0.0))
    shared = settings.get("ledger") is not None and not settings.get("amplification")
    if not shared or worst <= statement.epsilon_max * (1 + 1e-6):
        return None
    return f"every client, over all runs of its ledger: epsilon <= {format_bound(worst)}"


def _headline(history: Mapping[str, Any]) -> tuple[str, Sequence[float | None]]:
    """Return what the run is judged by: the accuracy, or the first metric it has instead."""
    keys = [key for key in history if key.startswith("test_")]
    known = [key for key in keys if any(value is not None for value in history[key] or ())]
    others = [key for key in known if key not in ("test_accuracy", "test_loss")]
    has_accuracy = "test_accuracy" in known or not known
    key = "test_accuracy" if has_accuracy else (*others, "test_loss")[0]
    return key.removeprefix("test_").replace("_", " "), history.get(key) or ()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _chart(metric: str, rounds: Sequence[float], values: Sequence[float | None]) -> str:
    """Return the metric by round as an SVG; nothing where there is nothing to draw."""
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
    top = max(1.0 if metric == "accuracy" else 0.0, max(y for _, y in points)) or 1.0
    placed = " ".join(
        f"{30 + (x - first) / span * (_WIDTH - 40):.1f},"
        f"{_HEIGHT - 20 - y / top * (_HEIGHT - 30):.1f}"
        for x, y in points
    )
    name = html.escape(metric, quote=True)
    label = f"test {name} from round {first:.0f} to {last:.0f}, at last {points[-1][1]:.4f}"
    return (
        f"<svg role='img' aria-label='{label}' width='{_WIDTH}' height='{_HEIGHT}' "
        f"viewBox='0 0 {_WIDTH} {_HEIGHT}'>"
        f"<line x1='30' x2='{_WIDTH - 10}' y1='{_HEIGHT - 20}' y2='{_HEIGHT - 20}' stroke='#888'/>"
        f"<polyline points='{placed}' fill='none' stroke='{LIGHT['blue']}' stroke-width='2'/>"
        f"<text x='0' y='16' font-size='11' fill='#888'>{top:.3g}</text>"
        f"<text x='0' y='{_HEIGHT - 16}' font-size='11' fill='#888'>0</text>"
        f"<text x='{_WIDTH // 2}' y='{_HEIGHT - 4}' font-size='11' fill='#888' "
        f"text-anchor='middle'>{name} by round</text></svg>"
    )
