"""Tables of runs: summary, slices, condensation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedquilt.common.formatting import format_bound, text_table
from fedquilt.report.series import (
    as_number,
    column,
    entries,
    headline,
    in_title,
    is_absent,
    per_evaluation,
    target_accuracy,
)

_RULE = "=" * 70
_WIDTHS = (23, 19, 18)
_NOTHING = "-"

Row = tuple[str, str, str]


def generate_summary_table(
    final_accuracy: float | None,
    final_loss: float | None,
    dataset_name: str,
    seed: int,
    history: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    method: str = "QuAP-FL",
    statement: object = None,
) -> str:
    """Return the table of one run; what was not recorded is shown as "-".

    The total privacy budget is the sum of the nominal epsilons of the rounds.
    It is not a guarantee; what the run may claim is in the row above it.

    Parameters
    ----------
    final_accuracy, final_loss : float or None
        Of the model at the end of the run.
    dataset_name, seed
        Named in the title; the data set also decides the target.
    history : mapping
        What the run recorded.
    config : mapping, optional
        `target_accuracy` replaces the data set's target; `num_clients` serves
        when the history has no participation statistics; with `include_table` off (a key of
        VISUALIZATION_CONFIG) there is no table, and the text is empty.
    method : str
        Named in the title.
    statement : Statement or mapping, optional
        What the run may claim; a history that `QuAPFLServer.train` returned has it.  Where
        nobody says, the table does not either.
    """
    settings = config or {}
    if settings.get("include_table") is False:
        return ""
    accuracy = [
        _final_accuracy(as_number(final_accuracy), target_accuracy(dataset_name, settings)),
        _best_accuracy(history),
    ]
    measured = _other_metrics(history)
    shown = not is_absent(history, "test_accuracy") or headline(history) == "test_accuracy"
    rows = [
        *(accuracy if shown else ()),
        *measured,
        ("Final Loss", _fixed(as_number(final_loss)), _NOTHING),
        *_best_loss(history),
        *_privacy(history, _claim(history, statement)),
        ("Average Clipping", _average_clip(history), _NOTHING),
        _participation(history, settings),
    ]
    title = f"{method} Experiment Results - {str(dataset_name).upper()} (seed={seed})"
    return "\n".join([_RULE, title, _RULE, _render(rows), _RULE])


def _render(rows: list[Row]) -> str:
    """Return the table in a frame, at least as wide as the rules above and below it."""
    lines = [("Metric", "Value", "Status"), *rows]
    widths = [max(least, *map(len, cells)) for least, *cells in zip(_WIDTHS, *lines, strict=True)]

    def rule(left: str, bar: str, middle: str, right: str) -> str:
        return left + middle.join(bar * (width + 2) for width in widths) + right

    body = [f"│ {' │ '.join(map(str.ljust, line, widths))} │" for line in lines]
    return "\n".join(
        [
            rule("╒", "═", "╤", "╕"),
            body[0],
            rule("╞", "═", "╪", "╡"),
            *body[1:],
            rule("╘", "═", "╧", "╛"),
        ]
    )


def _accuracy(value: float) -> str:
    return f"{value:.4f} ({value:.2%})" if math.isfinite(value) else _NOTHING


def _fixed(value: float) -> str:
    if not math.isfinite(value):
        return _NOTHING
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4e}"


def _final_accuracy(value: float, target: float | None) -> Row:
    if target is None:
        return "Final Accuracy", _accuracy(value), _NOTHING
    status = "Achieved" if value >= target else "Not achieved"
    return "Final Accuracy", _accuracy(value), status


def _best_accuracy(history: Mapping[str, Any]) -> Row:
    series = per_evaluation(history, "test_accuracy")
    if not series.finite.any():
        return "Best Accuracy", _NOTHING, _NOTHING
    best = int(np.nanargmax(series.values))
    where = f"{series.axis} {series.positions[best]:.0f}"
    return "Best Accuracy", _accuracy(float(series.values[best])), where


def _other_metrics(history: Mapping[str, Any]) -> list[Row]:
    """Return what a run measured beside accuracy and loss, as it stood at the end."""
    keys = [key for key in history if key.startswith("test_")]
    rows = []
    for key in keys:
        values = column(history, key)
        if key not in ("test_accuracy", "test_loss") and np.isfinite(values).any():
            rows.append((f"Final {in_title(key)}", _fixed(float(values[-1])), _NOTHING))
    return rows


def _best_loss(history: Mapping[str, Any]) -> list[Row]:
    series = per_evaluation(history, "test_loss")
    if not series.finite.any():
        return []
    best = int(np.nanargmin(series.values))
    where = f"{series.axis} {series.positions[best]:.0f}"
    return [("Best Loss", _fixed(float(series.values[best])), where)]


def _claim(history: Mapping[str, Any], statement: object) -> Mapping[str, Any] | None:
    """Return the record of what is claimed: the one given, or the one a history has."""
    claim: Any = getattr(history, "statement", None) if statement is None else statement
    found: Mapping[str, Any] | None = claim.as_json() if hasattr(claim, "as_json") else claim
    return found


def _privacy(history: Mapping[str, Any], statement: Mapping[str, Any] | None) -> list[Row]:
    total = _total_budget(history)
    if statement is None:
        if total == _NOTHING:
            return [("Total Privacy Budget", total, _NOTHING)]
        unknown = ("Privacy Claim", "not given", "pass statement=")
        return [unknown, ("Total Privacy Budget", total, "nominal, no bound")]
    worst, delta = as_number(statement.get("epsilon_max")), as_number(statement.get("delta"))
    claim = ("Privacy Claim", "none (ε = ∞)", "no guarantee")
    if math.isfinite(worst):
        claim = ("Privacy Claim", f"each: ε ≤ {format_bound(worst)}", f"δ = {delta:g}")
    nominal = ("Total Privacy Budget", total, "nominal, no bound")
    return [claim] if total == _NOTHING else [claim, nominal]


def _total_budget(history: Mapping[str, Any]) -> str:
    budgets = column(history, "privacy_budgets")
    if not np.isfinite(budgets).any():
        return _NOTHING
    total = float(np.nansum(budgets))
    text = f"{total:.2f}" if total >= 0.01 or total == 0 else f"{total:.2g}"
    return "ε = " + (text.removesuffix("0") if text[-3:-2] == "." else text)


def _average_clip(history: Mapping[str, Any]) -> str:
    clips = column(history, "clip_values")
    return _fixed(float(np.nanmean(clips))) if np.isfinite(clips).any() else _NOTHING


def _participation(history: Mapping[str, Any], config: Mapping[str, Any]) -> Row:
    """Return the mean rate over all clients, and how many took part at least once."""
    stats = [item for item in entries(history, "participation_stats") if isinstance(item, Mapping)]
    if stats:
        rate = as_number(stats[-1].get("mean_participation_rate"))
        joined = as_number(stats[-1].get("participating_clients"))
    else:
        rate, joined = _counted_participation(history, as_number(config.get("num_clients")))
    return (
        "Mean Participation Rate",
        f"{rate:.3f}" if math.isfinite(rate) else _NOTHING,
        f"{joined:.0f} clients" if math.isfinite(joined) else _NOTHING,
    )


def _counted_participation(history: Mapping[str, Any], num_clients: float) -> tuple[float, float]:
    """Return mean rate and number of participants from the cohorts themselves."""
    cohorts = [set(() if ids is None else ids) for ids in entries(history, "client_participation")]
    if not cohorts:
        return math.nan, math.nan
    joined = float(len(set().union(*cohorts)))
    return float(np.mean([len(cohort) for cohort in cohorts])) / num_clients, joined


_COLUMNS = {
    "parameters": "parameters",
    "bytes_up": "bytes up",
    "bytes_down": "bytes down",
    "multiply_adds": "multiply-adds",
}


def tier_metric(record: Mapping[str, Any]) -> str:
    """Return the name of the metric that tiers are judged by: the first that was measured."""
    measured: dict[str, Any] = next((t["test"] for t in record["tiers"] if t.get("test")), {})
    return next(iter(measured), "accuracy")


def tier_scores(record: Mapping[str, Any]) -> dict[str, float]:
    """Return what each width's own small model reaches on the test data, where it was measured."""
    name = tier_metric(record)
    found = {str(tier["width"]): (tier.get("test") or {}).get(name) for tier in record["tiers"]}
    return {width: score for width, score in found.items() if score is not None}


def slices_table(record: Mapping[str, Any]) -> str:
    """Return what a run on slices has recorded, one line a width and the mean over clients.

    Bytes are those of a round that the client joins; multiply-adds are those of one
    example, forward; the last column is what the width's own small model reaches on the test
    data, by the headline metric.
    """
    scores = tier_scores(record)
    rows = [
        (
            *(tier["width"], tier["clients"], *(f"{tier[key]:,}" for key in _COLUMNS)),
            *([f"{scores[tier['width']]:.4f}" if tier["width"] in scores else "-"] * bool(scores)),
        )
        for tier in record["tiers"]
    ]
    total = sum(tier["clients"] for tier in record["tiers"])
    rows.append(("mean", total, *(f"{record['mean'][key]:,.0f}" for key in _COLUMNS)))
    head = ["width", "clients", *_COLUMNS.values()]
    if scores:
        mean = sum(t["clients"] * scores.get(t["width"], math.nan) for t in record["tiers"]) / total
        rows[-1] = (*rows[-1], f"{mean:.4f}")
        head.append(f"test {tier_metric(record)}")
    table = text_table(head, rows, right=range(1, len(head)))
    return f"What a client holds ({record['method']})\n{table}"


def condensation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one line a method: accuracy, megabytes both ways, rounds, seconds.

    Each row has `name`, `accuracy`, `bytes_up`, `bytes_down`, `rounds`, `seconds`,
    `raw` (whether clients' own images leave them) and `note`.
    """
    lines = [
        (
            row["name"],
            "-" if row["accuracy"] is None else f"{row['accuracy']:.4f}",
            _megabytes(row["bytes_up"]),
            _megabytes(row["bytes_down"]),
            str(row["rounds"]),
            "-" if row["seconds"] is None else f"{row['seconds']:.0f}",
            "yes" if row["raw"] else "no",
        )
        for row in rows
    ]
    head = ("method", "accuracy", "MB up", "MB down", "rounds", "seconds", "raw images leave")
    table = text_table(head, lines, right=range(1, 6))
    notes = [f"{row['name']}: {row['note']}" for row in rows if row.get("note")]
    return "\n".join([table, *([""] if notes else []), *notes])


def condensation_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a finished condensation for `condensation_table`."""
    record, metadata = result["condensation"], result["metadata"]
    settings = metadata["hyperparameters"]
    return {
        "name": result["mode"],
        "accuracy": metadata["final_accuracy"],
        "loss": metadata["final_loss"],
        "bytes_up": record["bytes_up"],
        "bytes_down": record["bytes_down"],
        "rounds": result["rounds"],
        "seconds": record["seconds"],
        "raw": settings.get("init_method") == "real_sample",
        "note": _certified_note(result)
        if result["mode"] == "certified"
        else _missing_classes(record, settings.get("min_group")),
    }


def _certified_note(result: Mapping[str, Any]) -> str:
    """Say what the accuracy of a certified condensation is of."""
    settings = result["metadata"]["hyperparameters"]
    gaps = [gap for gap in result["history"].get("matching_loss", []) if gap is not None]
    left = f"; the images leave {gaps[-1]:.0%} of the head's condition unmet" if gaps else ""
    return (
        f"the model {settings.get('model')}, trained on the images alone; a head needs the public "
        f"front as well{left}"
    )


def _missing_classes(record: Mapping[str, Any], min_group: int | None) -> str:
    """Say which classes are missing, and why."""
    missing = record["classes_not_sent"]
    if not missing:
        return ""
    too_small = record.get("classes_too_small")
    if too_small is None:
        because = [(missing, f"nobody who joined holds min_group={min_group} samples of them")]
    else:
        small = [label for label in missing if label in too_small]
        because = [
            (small, f"no client holds min_group={min_group} samples of them"),
            ([c for c in missing if c not in small], "no client that holds enough of them joined"),
        ]
    reasons = "; ".join(
        f"nobody sent the classes {', '.join(map(str, labels))}: {why}"
        for labels, why in because
        if labels
    )
    return f"{reasons}; they are left out of the images and of training"


def _megabytes(count: int | None) -> str:
    """Return bytes in megabytes; traffic of seeds alone is not zero."""
    if count is None:
        return "-"
    return f"{count / 1e6:.1f}" if count == 0 or count >= 50_000 else "< 0.1"
