"""What clients measure on their own samples, for the owner: spread over clients and groups."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.common.errors import RunFolderError
from fedquilt.common.formatting import four_digits, text_table
from fedquilt.common.spread import LOWER_IS_BETTER, client_spread, grouped
from fedquilt.report import style
from fedquilt.report.runs import series_of
from fedquilt.report.series import ROUND, in_title, run_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
Metrics = Mapping[int, Rows]
_SHARES = frozenset({"accuracy", "auroc", "f1"})
RAW = "raw measures of the clients: for the owner's eyes only"


def headline_of_clients(rows: Rows, metrics: Sequence[str] = ()) -> str:
    """Return what clients are judged by: accuracy, the run's first other metric, or the loss."""
    for name in ("accuracy", *metrics):
        if any(row.get(name) is not None for row in rows):
            return name
    return "loss"


def client_groups(
    rows: Rows, joins: Sequence[int], key: str = "accuracy"
) -> dict[str, dict[str, float]]:
    """Return the spread of a measure over groups of clients, and of accuracy over classes.

    By participation: never joined, and the rest in thirds by how often; by width, each
    client on its own slice; by class, each client's share of that class.
    """
    found = grouped(rows, _by_joins(rows, joins), key)
    widths: dict[str, list[int]] = {}
    for row in rows:
        if "width" in row:
            widths.setdefault(f"own slice, width {row['width']}", []).append(row["client"])
    found |= grouped(rows, widths, "own_accuracy")
    classes = sorted({name for row in rows for name in row.get("classes", {})}, key=_as_class)
    for name in classes:
        held = [row["classes"][name] for row in rows if name in row.get("classes", {})]
        values = [one["accuracy"] for one in held]
        if name:
            found[f"class {name}"] = client_spread(values, "mean")
    return found


def _as_class(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (-1, name)


def _by_joins(rows: Rows, joins: Sequence[int]) -> dict[str, list[int]]:
    clients = [row["client"] for row in rows if row["client"] < len(joins)]
    joined = sorted((c for c in clients if joins[c] > 0), key=lambda c: (joins[c], c))
    thirds = [part.tolist() for part in np.array_split(np.asarray(joined, dtype=np.int64), 3)]
    names = ("joined least", "joined more", "joined most")
    groups = {"never joined": [c for c in clients if joins[c] == 0]}
    return groups | dict(zip(names, thirds, strict=True))


def client_tables(result: Mapping[str, Any], metrics: Metrics, worst: int = 5) -> str:
    """Return tables of a run's last evaluation by its clients, 80 columns wide or less.

    Parameters
    ----------
    result : mapping
        The content of result.json.
    metrics : mapping
        The clients' rows, by the number of rounds before: what
        `RunFolder.read_client_metrics` returns.
    worst : int
        How many of the clients that are worst off are listed.
    """
    rounds = _last(metrics)
    rows = metrics[rounds]
    key = _headline(result, rows)
    table = {"all clients": _spread(rows, key)}
    table |= client_groups(rows, result.get("joins", []), key)
    lines = [
        (name, *(f"{value:.4f}" for value in values.values())) for name, values in table.items()
    ]
    falls, name = key in LOWER_IS_BETTER, _in_words(key)
    known = [row for row in rows if row.get(key) is not None]
    known.sort(key=lambda row: -row[key] if falls else row[key])
    columns = list(dict.fromkeys((key, "loss")))
    lowest = [
        (_name(row)[:40], row["examples"], *(four_digits(row.get(one)) for one in columns))
        for row in known[:worst]
    ]
    parts = [
        f"{_title(result)}, after round {rounds}",
        f"{RAW}\n",
        text_table(
            ["group", f"mean {name}", "worst decile", "Gini"],
            [line for line in lines if len(line) > 1],
        ),
        f"\nclients with the {'highest' if falls else 'lowest'} {name}",
        text_table(["client", "samples", *map(_in_words, columns)], lowest),
    ]
    return "\n".join(parts)


def _headline(result: Mapping[str, Any], rows: Rows) -> str:
    return headline_of_clients(rows, result["metadata"].get("metrics", ()))


def _spread(rows: Rows, key: str) -> dict[str, float]:
    falls = key in LOWER_IS_BETTER
    return client_spread([row.get(key) for row in rows], "mean", lower_is_better=falls)


def _in_words(key: str) -> str:
    """Return a metric's name within a sentence."""
    name = in_title(key)
    return name if name.isupper() else name.lower()


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("name", row["client"]))


def _title(result: Mapping[str, Any]) -> str:
    metadata = result["metadata"]
    return f"{str(metadata['dataset']).upper()}, {run_label(metadata['hyperparameters'])}"


def _last(metrics: Metrics) -> int:
    if not metrics:
        raise RunFolderError(
            "the run must hold what clients measured, and you be allowed to read it: run with "
            "client_test_fraction (--client-test-fraction), or client_tests"
        )
    return max(metrics)


def plot_clients(
    result: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    metrics: Metrics | Sequence[Metrics],
    save_path: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Draw what clients are judged by, by round (mean, worst decile) and by group.

    Accuracy, or the run's first metric where there is none.  Return the path.

    Several results, and as many metrics, are drawn together, a colour a run.
    """
    if not isinstance(result, Mapping) or not isinstance(metrics, Mapping):
        return _plot_several(list(result), list(metrics), save_path, config)  # type: ignore[arg-type]
    rows = metrics[_last(metrics)]
    key = _headline(result, rows)
    groups = client_groups(rows, result.get("joins", []), key)
    settings = style.figure_settings(config, (12.0, max(4.5, 1.8 + 0.36 * len(groups))))
    path = style.figure_path(save_path, "clients", settings)
    with style.drawing(settings) as figure:
        left, right = figure.subplots(1, 2)
        figure.suptitle(f"What clients measure: {_title(result)}")
        _draw_rounds(left, metrics, key)
        _draw_groups(right, groups, key)
        return style.save_figure(figure, path, settings, 0o600)


def _plot_several(
    results: Sequence[Mapping[str, Any]],
    measured: Sequence[Metrics],
    save_path: str | os.PathLike[str] | None,
    config: Mapping[str, Any] | None,
) -> str:
    key = _headline(results[0], measured[0][_last(measured[0])])
    groups = [
        client_groups(metrics[_last(metrics)], result.get("joins", []), key)
        for result, metrics in zip(results, measured, strict=True)
    ]
    names = list(dict.fromkeys(name for found in groups for name in found))
    series = series_of(results)
    labels = {
        member: style.as_drawn(f"{one.label}, seed {entry.seed}")
        for one in series
        for member, entry in zip(one.members, one.entries, strict=True)
    }
    settings = style.figure_settings(config, (12.0, max(4.5, 1.8 + 0.36 * len(names))))
    path = style.figure_path(save_path, "clients", settings)
    with style.drawing(settings) as figure:
        left, right = figure.subplots(1, 2)
        figure.suptitle(f"What clients measure: {len(results)} runs")
        rounds = [np.asarray(sorted(metrics), dtype=np.float64) for metrics in measured]
        for index, (at, metrics) in enumerate(zip(rounds, measured, strict=True)):
            told = [_spread(metrics[int(r)], key) for r in at]
            color = style.PALETTE[index % len(style.PALETTE)]
            for part, dash, name in (
                ("mean", "-", labels[index]),
                ("mean_worst_decile", "--", None),
            ):
                values = [found.get(part, np.nan) for found in told]
                left.plot(at, values, dash, color=color, marker="o", markersize=4, label=name)
            means = [groups[index].get(name, {}).get("mean", np.nan) for name in names]
            right.plot(means, np.arange(len(names)), "o", color=color, alpha=0.8)
        _name_axis(left, key)
        style.whole_rounds(left, np.concatenate(rounds), ROUND)
        style.panel_title(left, "Over all clients", [RAW, "line: mean; dashed: worst decile"])
        right.set_yticks(np.arange(len(names)), names)
        right.invert_yaxis()
        _name_axis(right, key, of_groups=True)
        style.panel_title(right, "By group", ["dots: mean of the group, a colour a run"])
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        return style.save_figure(figure, path, settings, 0o600)


def _name_axis(axes: Axes, key: str, *, of_groups: bool = False) -> None:
    """Say what is drawn; shares are drawn on the whole scale."""
    is_share = key in _SHARES or key.startswith("top")
    if of_groups:
        axes.set_xlim(0, 1 if is_share else None)
        axes.set_xlabel(f"{in_title(key)} at the end of the run")
        return
    if is_share:
        axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel(f"{in_title(key)} on the clients' own samples")


def _draw_rounds(axes: Axes, metrics: Metrics, key: str) -> None:
    rounds = sorted(metrics)
    told = [_spread(metrics[r], key) for r in rounds]
    at = np.asarray(rounds, dtype=np.float64)
    for part, color, label in (
        ("mean", style.BLUE, "mean"),
        ("mean_worst_decile", style.VERMILION, "worst decile"),
    ):
        values = [values.get(part, np.nan) for values in told]
        axes.plot(at, values, color=color, marker="o", markersize=4, label=label)
    _name_axis(axes, key)
    style.whole_rounds(axes, at, ROUND)
    gini = told[-1].get("mean_gini")
    above, below = ("worst decile", "mean") if key in LOWER_IS_BETTER else ("mean", "worst decile")
    notes = [RAW, f"upper line: {above}; lower line: {below}"]
    notes += [] if gini is None else [f"Gini at the end: {gini:.3f}"]
    style.panel_title(axes, "Over all clients", notes)


def _draw_groups(axes: Axes, groups: Mapping[str, Mapping[str, float]], key: str) -> None:
    places = np.arange(len(groups))
    axes.barh(places, [values["mean"] for values in groups.values()], color=style.GREEN, alpha=0.45)
    worst = [values["mean_worst_decile"] for values in groups.values()]
    axes.plot(worst, places, "D", color=style.VERMILION, markersize=5, clip_on=False)
    axes.set_yticks(places, list(groups))
    axes.invert_yaxis()
    _name_axis(axes, key, of_groups=True)
    style.panel_title(axes, "By group", ["bar: mean; diamond: worst decile of the group"])
