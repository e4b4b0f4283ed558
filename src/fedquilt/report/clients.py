"""What clients measure on their own samples, for the owner: spread over clients and groups."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.common.errors import RunFolderError
from fedquilt.common.spread import client_spread, grouped
from fedquilt.common.text_table import text_table
from fedquilt.report.runs import series_of
from fedquilt.report.series import ROUND, run_label
from fedquilt.report.style import (
    BLUE,
    GREEN,
    PALETTE,
    VERMILION,
    as_drawn,
    drawing,
    figure_path,
    figure_settings,
    panel_title,
    save_figure,
    whole_rounds,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
Metrics = Mapping[int, Rows]
RAW = "raw measures of the clients: for the owner's eyes only"


def client_groups(rows: Rows, joins: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the spread of accuracy over groups of clients, and over classes.

    By participation: never joined, and the rest in thirds by how often; by width, each
    client on its own slice; by class, each client's share of that class.
    """
    found = grouped(rows, _by_joins(rows, joins))
    widths: dict[str, list[int]] = {}
    for row in rows:
        if "width" in row:
            widths.setdefault(f"own slice, width {row['width']}", []).append(row["client"])
    found |= grouped(rows, widths, "own_accuracy")
    classes = sorted({name for row in rows for name in row.get("classes", {})}, key=_as_class)
    for name in classes:
        values = [row["classes"][name]["accuracy"] for row in rows if name in row["classes"]]
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
        How many of the clients with the lowest accuracy are listed.
    """
    rounds = _last(metrics)
    rows = metrics[rounds]
    table = {"all clients": client_spread([row["accuracy"] for row in rows], "mean")}
    table |= client_groups(rows, result.get("joins", []))
    lines = [
        (name, *(f"{value:.4f}" for value in values.values())) for name, values in table.items()
    ]
    known = sorted(
        (row for row in rows if row["accuracy"] is not None), key=lambda row: row["accuracy"]
    )
    lowest = [
        (_name(row)[:40], row["examples"], f"{row['accuracy']:.4f}", f"{row['loss']:.4f}")
        for row in known[:worst]
    ]
    parts = [
        f"{_title(result)}, after round {rounds}",
        f"{RAW}\n",
        text_table(
            ["group", "mean accuracy", "worst decile", "Gini"],
            [line for line in lines if len(line) > 1],
        ),
        "\nclients with the lowest accuracy",
        text_table(["client", "samples", "accuracy", "loss"], lowest),
    ]
    return "\n".join(parts)


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
    """Draw accuracy by round (mean, worst decile) and by group; return the path.

    Several results, and as many metrics, are drawn together, a colour a run.
    """
    if not isinstance(result, Mapping) or not isinstance(metrics, Mapping):
        return _plot_several(list(result), list(metrics), save_path, config)  # type: ignore[arg-type]
    groups = client_groups(metrics[_last(metrics)], result.get("joins", []))
    settings = figure_settings(config, (12.0, max(4.5, 1.8 + 0.36 * len(groups))))
    path = figure_path(save_path, "clients", settings)
    with drawing(settings) as figure:
        left, right = figure.subplots(1, 2)
        figure.suptitle(f"What clients measure: {_title(result)}")
        _draw_rounds(left, metrics)
        _draw_groups(right, groups)
        return save_figure(figure, path, settings, 0o600)


def _plot_several(
    results: Sequence[Mapping[str, Any]],
    measured: Sequence[Metrics],
    save_path: str | os.PathLike[str] | None,
    config: Mapping[str, Any] | None,
) -> str:
    groups = [
        client_groups(metrics[_last(metrics)], result.get("joins", []))
        for result, metrics in zip(results, measured, strict=True)
    ]
    names = list(dict.fromkeys(name for found in groups for name in found))
    series = series_of(results)
    labels = {
        member: as_drawn(f"{one.label}, seed {entry.seed}")
        for one in series
        for member, entry in zip(one.members, one.entries, strict=True)
    }
    settings = figure_settings(config, (12.0, max(4.5, 1.8 + 0.36 * len(names))))
    path = figure_path(save_path, "clients", settings)
    with drawing(settings) as figure:
        left, right = figure.subplots(1, 2)
        figure.suptitle(f"What clients measure: {len(results)} runs")
        rounds = [np.asarray(sorted(metrics), dtype=np.float64) for metrics in measured]
        for index, (at, metrics) in enumerate(zip(rounds, measured, strict=True)):
            told = [client_spread([row["accuracy"] for row in metrics[int(r)]], "mean") for r in at]
            color = PALETTE[index % len(PALETTE)]
            for key, dash, name in (
                ("mean", "-", labels[index]),
                ("mean_worst_decile", "--", None),
            ):
                values = [found.get(key, np.nan) for found in told]
                left.plot(at, values, dash, color=color, marker="o", markersize=4, label=name)
            means = [groups[index].get(name, {}).get("mean", np.nan) for name in names]
            right.plot(means, np.arange(len(names)), "o", color=color, alpha=0.8)
        left.set_ylim(-0.02, 1.02)
        left.set_ylabel("Accuracy on the clients' own samples")
        whole_rounds(left, np.concatenate(rounds), ROUND)
        panel_title(left, "Over all clients", [RAW, "line: mean; dashed: worst decile"])
        right.set_yticks(np.arange(len(names)), names)
        right.invert_yaxis()
        right.set_xlim(0, 1)
        right.set_xlabel("Accuracy at the end of the run")
        panel_title(right, "By group", ["dots: mean of the group, a colour a run"])
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        return save_figure(figure, path, settings, 0o600)


def _draw_rounds(axes: Axes, metrics: Metrics) -> None:
    rounds = sorted(metrics)
    told = [client_spread([row["accuracy"] for row in metrics[r]], "mean") for r in rounds]
    at = np.asarray(rounds, dtype=np.float64)
    for key, color, label in (
        ("mean", BLUE, "mean"),
        ("mean_worst_decile", VERMILION, "worst decile"),
    ):
        values = [values.get(key, np.nan) for values in told]
        axes.plot(at, values, color=color, marker="o", markersize=4, label=label)
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("Accuracy on the clients' own samples")
    whole_rounds(axes, at, ROUND)
    gini = told[-1].get("mean_gini")
    notes = [RAW, "upper line: mean; lower line: worst decile"]
    notes += [] if gini is None else [f"Gini at the end: {gini:.3f}"]
    panel_title(axes, "Over all clients", notes)


def _draw_groups(axes: Axes, groups: Mapping[str, Mapping[str, float]]) -> None:
    places = np.arange(len(groups))
    axes.barh(places, [values["mean"] for values in groups.values()], color=GREEN, alpha=0.45)
    worst = [values["mean_worst_decile"] for values in groups.values()]
    axes.plot(worst, places, "D", color=VERMILION, markersize=5, clip_on=False)
    axes.set_yticks(places, list(groups))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("Accuracy at the end of the run")
    panel_title(axes, "By group", ["bar: mean; diamond: worst decile of the group"])
