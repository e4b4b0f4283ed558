"""The QuAP-FL paper's figures: the accuracy curve, and who consumes the nominal budget.

Of several runs, seeds of one another make one line with a band from the lowest to the highest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.report.runs import RunSeries, series_of
from fedquilt.report.series import (
    ROUND,
    Array,
    column,
    entries,
    is_absent,
    no_budget_in_words,
    target_accuracy,
)
from fedquilt.report.style import (
    BLUE,
    VERMILION,
    draw_band,
    draw_metric,
    drawing,
    figure_path,
    figure_settings,
    in_words,
    looks_of,
    panel_title,
    save_figure,
    whole_rounds,
)
from fedquilt.report.training_figure import draw_accuracy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PAPER_SIZE = (6.5, 4.5)
_FRACTION = 0.2
_ATTENDED = "nominal epsilon, summed over the rounds a client attended (not a guarantee)"


@dataclass(frozen=True)
class GroupConsumption:
    """Running nominal epsilon of a group: mean, lowest and highest client by round.

    Client i has consumed sum_{s <= t, i in S_s} epsilon_s after round t; its own
    epsilon_{i,s} where every client had a budget of its own (`client_budgets`).
    """

    members: NDArray[np.int64]
    attended: float
    mean: Array
    low: Array
    high: Array


def consumption_by_group(
    history: Mapping[str, Any], num_clients: int, fraction: float = _FRACTION
) -> tuple[GroupConsumption, GroupConsumption]:
    """Return the consumption of the most and the least frequent participants.

    Each group has round(fraction * num_clients) clients, at least one; clients
    with equally many rounds are taken in the order of their ids.
    """
    clients = checks.integer("num_clients", num_clients, at_least=1)
    share = checks.number("fraction", fraction, above=0, at_most=0.5)
    cohorts = _cohorts(history, clients)
    budgets = _budgets(history, cohorts)
    rounds = len(budgets)
    counts = np.zeros(clients, dtype=np.int64)
    for cohort in cohorts[:rounds]:
        counts[cohort] += 1
    size = max(1, round(share * clients))
    top = np.argsort(-counts, kind="stable")[:size]
    bottom = np.argsort(counts, kind="stable")[:size]
    most, least = (
        _consumption(group, counts, budgets, cohorts[:rounds]) for group in (top, bottom)
    )
    return most, least


def _budgets(history: Mapping[str, Any], cohorts: list[NDArray[np.int64]]) -> list[Array]:
    """Return the budget of each client of each cohort: its own, or the round's."""
    by_round = np.nan_to_num(column(history, "privacy_budgets"), nan=0.0)
    own = entries(history, "client_budgets")
    found = []
    for number, (budget, cohort) in enumerate(zip(by_round, cohorts, strict=False)):
        given = own[number] if number < len(own) else None
        if given is None:
            found.append(np.full(cohort.size, budget))
            continue
        values = np.asarray([math.nan if value is None else value for value in given], dtype=float)
        if values.size != cohort.size:
            raise InvalidValueError(
                f"client_budgets of round {number + 1} must hold one budget for each of "
                f"{cohort.size} clients; it holds {values.size}"
            )
        found.append(np.nan_to_num(values, nan=0.0))
    return found


def _cohorts(history: Mapping[str, Any], num_clients: int) -> list[NDArray[np.int64]]:
    """Return the ids of every round; a repeated id changes nothing downstream."""
    recorded = entries(history, "client_participation")
    return [
        checks.indices(
            f"client_participation of round {number}", () if ids is None else ids, num_clients
        )
        for number, ids in enumerate(recorded, start=1)
    ]


def _consumption(
    group: NDArray[np.int64],
    counts: NDArray[np.int64],
    budgets: list[Array],
    cohorts: list[NDArray[np.int64]],
) -> GroupConsumption:
    spent = np.zeros(group.size)
    mean, low, high = (np.zeros(len(budgets)) for _ in range(3))
    for t, (paid, cohort) in enumerate(zip(budgets, cohorts, strict=True)):
        spent += np.where(group[:, None] == cohort[None, :], paid[None, :], 0.0).max(1, initial=0.0)
        mean[t], low[t], high[t] = spent.mean(), spent.min(), spent.max()
    return GroupConsumption(group, float(counts[group].mean()), mean, low, high)


def plot_privacy_consumption_by_group(
    history: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    num_clients: int,
    save_path: str | os.PathLike[str] | None = None,
    dataset_name: str = "",
    config: Mapping[str, Any] | None = None,
    fraction: float = _FRACTION,
) -> str:
    """Draw the nominal epsilon of frequent and rare participants; return the path.

    Several whole results instead of a history are drawn together, each with its own clients.
    """
    settings = figure_settings(config, _PAPER_SIZE)
    if not isinstance(history, Mapping):
        path = figure_path(save_path, f"{dataset_name or 'runs'}_privacy_by_group", settings)
        with drawing(settings) as figure:
            _groups(figure.subplots(), series_of(history), history, fraction)
            return save_figure(figure, path, settings)
    path = figure_path(save_path, f"{dataset_name or 'run'}_privacy_by_group", settings)
    most, least = consumption_by_group(history, num_clients, fraction)
    with drawing(settings) as figure:
        axes = figure.subplots()
        title = ": ".join(filter(None, ["Nominal epsilon by participation", dataset_name.upper()]))
        if not most.mean.size or is_absent(history, "privacy_budgets"):
            in_words(axes, _missing(history), title)
        else:
            _draw_groups(axes, title, most, least, fraction)
        return save_figure(figure, path, settings)


def _missing(history: Mapping[str, Any]) -> str:
    if is_absent(history, "privacy_budgets"):
        return no_budget_in_words(history)
    return "the history does not say who took part in which round"


def _draw_groups(
    axes: Axes, title: str, most: GroupConsumption, least: GroupConsumption, fraction: float
) -> None:
    rounds = np.arange(1.0, most.mean.size + 1)
    for name, group, color in (("most", most, BLUE), ("least", least, VERMILION)):
        label = (
            f"{name} frequent {fraction:.0%}: {group.members.size} clients, "
            f"{group.attended:.1f} rounds each"
        )
        marker = "o" if rounds.size == 1 else ""
        axes.plot(rounds, group.mean, color=color, label=label, marker=marker)
        axes.fill_between(rounds, group.low, group.high, color=color, alpha=0.2, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("nominal epsilon")
    whole_rounds(axes, rounds, ROUND)
    axes.legend(loc="upper left")
    panel_title(axes, title, [_ATTENDED, "line: mean of the group; band: lowest to highest client"])


def plot_paper_figures(
    history: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    num_clients: int,
    dataset_name: str,
    save_dir: str | os.PathLike[str],
    config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Draw the QuAP-FL paper's two figures of one run into `save_dir` and return their paths.

    The accuracy curve (figure 2) and the cumulative epsilon of the 20 % most and
    least frequent participants (figure 3).  Several whole results instead of a history are
    drawn together, seeds of one setting as a band (`plot_paper_figures_of_runs`).
    """
    if not isinstance(history, Mapping):
        return plot_paper_figures_of_runs(history, save_dir, config)
    settings = figure_settings(config, _PAPER_SIZE)
    folder = Path(save_dir)
    consumption_by_group(history, num_clients)  # refuses bad ids before anything is written
    with drawing(settings) as figure:
        draw_accuracy(figure.subplots(), history, target_accuracy(dataset_name, config))
        path = folder / f"{dataset_name}_accuracy_curve.{settings.format}"
        accuracy = save_figure(figure, path, settings)
    groups = plot_privacy_consumption_by_group(
        history,
        num_clients,
        folder / f"{dataset_name}_privacy_by_group.{settings.format}",
        dataset_name,
        config,
    )
    return [accuracy, groups]


def plot_paper_figures_of_runs(
    results: Sequence[Mapping[str, Any]],
    save_dir: str | os.PathLike[str],
    config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Draw figure 2 (accuracy by round) and figure 3 (nominal epsilon by group) of runs.

    Returns the paths of `figure2_accuracy` and `figure3_privacy_by_group` in `save_dir`.
    """
    settings = figure_settings(config, _PAPER_SIZE)
    series = series_of(results)
    paths = []
    for stem, draw in (("figure2_accuracy", _accuracy), ("figure3_privacy_by_group", _groups)):
        with drawing(settings) as figure:
            draw(figure.subplots(), series, results)
            path = Path(save_dir) / f"{stem}.{settings.format}"
            paths.append(save_figure(figure, path, settings))
    return paths


def _accuracy(
    axes: Axes, series: Sequence[RunSeries], results: Sequence[Mapping[str, Any]]
) -> None:
    title = f"Test {series[0].metric_name.lower()} by round"
    if draw_metric(axes, series, looks_of(series), with_seeds=True):
        panel_title(axes, title, ["line: mean of the seeds; band: lowest to highest seed"])
    else:
        in_words(axes, "no evaluation was recorded", title)


def _groups(
    axes: Axes,
    series: Sequence[RunSeries],
    results: Sequence[Mapping[str, Any]],
    fraction: float = _FRACTION,
) -> None:
    title = "Nominal epsilon by participation"
    longest = 0
    for look, one in zip(looks_of(series), series, strict=True):
        color = look.color
        own = [results[member] for member in one.members]
        if any(is_absent(result["history"], "privacy_budgets") for result in own):
            continue
        pairs = [consumption_by_group(r["history"], len(r["joins"]), fraction) for r in own]
        for place, (name, dash) in enumerate((("most", "-"), ("least", "--"))):
            rounds = _draw_group(axes, [pair[place] for pair in pairs], color, dash)
            axes.plot(
                [], [], color=color, ls=dash, label=f"{one.label}: {name} frequent {fraction:.0%}"
            )
            longest = max(longest, rounds)
    if not longest:
        in_words(axes, no_budget_in_words(results[0]["history"]), title)
        return
    axes.set_ylim(bottom=0)
    axes.set_ylabel("nominal epsilon")
    whole_rounds(axes, np.arange(1.0, longest + 1), ROUND)
    axes.legend(fontsize=9)
    notes = ["summed over the rounds a client attended (not a guarantee)"]
    panel_title(axes, title, [*notes, "line: mean of the group and the seeds; band: all seeds"])


def _draw_group(axes: Axes, groups: Sequence[GroupConsumption], color: str, dash: str) -> int:
    length = min(group.mean.size for group in groups)
    rounds = np.arange(1.0, length + 1)
    means = np.asarray([group.mean[:length] for group in groups])
    axes.plot(rounds, means.mean(axis=0), color=color, ls=dash)
    draw_band(axes, rounds, means, color)
    return length
