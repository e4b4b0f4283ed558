"""The QuAP-FL paper's figures: the accuracy curve, a mode over seeds, who consumes the budget.

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
from fedquilt.report import style
from fedquilt.report.runs import RunSeries, series_of
from fedquilt.report.series import (
    ROUND,
    Array,
    Series,
    aligned,
    column,
    entries,
    headline,
    in_title,
    is_absent,
    no_budget_in_words,
    per_evaluation,
    target_accuracy,
)
from fedquilt.report.training_figure import draw_accuracy, spend_by_round

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    settings = style.figure_settings(config, _PAPER_SIZE)
    if not isinstance(history, Mapping):
        path = style.figure_path(save_path, f"{dataset_name or 'runs'}_privacy_by_group", settings)
        with style.drawing(settings) as figure:
            _groups(figure.subplots(), series_of(history), history, fraction)
            return style.save_figure(figure, path, settings)
    path = style.figure_path(save_path, f"{dataset_name or 'run'}_privacy_by_group", settings)
    most, least = consumption_by_group(history, num_clients, fraction)
    with style.drawing(settings) as figure:
        axes = figure.subplots()
        title = ": ".join(filter(None, ["Nominal epsilon by participation", dataset_name.upper()]))
        if not most.mean.size or is_absent(history, "privacy_budgets"):
            style.in_words(axes, _missing(history), title)
        else:
            _draw_groups(axes, title, most, least, fraction)
        return style.save_figure(figure, path, settings)


def _missing(history: Mapping[str, Any]) -> str:
    if is_absent(history, "privacy_budgets"):
        return no_budget_in_words(history)
    return "the history does not say who took part in which round"


def _draw_groups(
    axes: Axes, title: str, most: GroupConsumption, least: GroupConsumption, fraction: float
) -> None:
    rounds = np.arange(1.0, most.mean.size + 1)
    for name, group, color in (("most", most, style.BLUE), ("least", least, style.VERMILION)):
        label = (
            f"{name} frequent {fraction:.0%}: {group.members.size} clients, "
            f"{group.attended:.1f} rounds each"
        )
        marker = "o" if rounds.size == 1 else ""
        axes.plot(rounds, group.mean, color=color, label=label, marker=marker)
        axes.fill_between(rounds, group.low, group.high, color=color, alpha=0.2, linewidth=0)
    axes.set_ylim(bottom=0)
    style.whole_rounds(axes, rounds, ROUND, "nominal epsilon")
    axes.legend(loc="upper left")
    style.panel_title(
        axes, title, [_ATTENDED, "line: mean of the group; band: lowest to highest client"]
    )


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
    settings = style.figure_settings(config, _PAPER_SIZE)
    folder = Path(save_dir)
    consumption_by_group(history, num_clients)  # refuses bad ids before anything is written
    with style.drawing(settings) as figure:
        draw_accuracy(figure.subplots(), history, target_accuracy(dataset_name, config))
        path = folder / f"{dataset_name}_accuracy_curve.{settings.format}"
        accuracy = style.save_figure(figure, path, settings)
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
    settings = style.figure_settings(config, _PAPER_SIZE)
    series = series_of(results)
    paths = []
    for stem, draw in (("figure2_accuracy", _accuracy), ("figure3_privacy_by_group", _groups)):
        with style.drawing(settings) as figure:
            draw(figure.subplots(), series, results)
            path = Path(save_dir) / f"{stem}.{settings.format}"
            paths.append(style.save_figure(figure, path, settings))
    return paths


def _accuracy(
    axes: Axes, series: Sequence[RunSeries], results: Sequence[Mapping[str, Any]]
) -> None:
    title = f"Test {series[0].metric_name.lower()} by round"
    if style.draw_metric(axes, series, style.looks_of(series), with_seeds=True):
        style.panel_title(axes, title, ["line: mean of the seeds; band: lowest to highest seed"])
    else:
        style.in_words(axes, "no evaluation was recorded", title)


def _groups(
    axes: Axes,
    series: Sequence[RunSeries],
    results: Sequence[Mapping[str, Any]],
    fraction: float = _FRACTION,
) -> None:
    title = "Nominal epsilon by participation"
    longest = 0
    for look, one in zip(style.looks_of(series), series, strict=True):
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
        style.in_words(axes, no_budget_in_words(results[0]["history"]), title)
        return
    axes.set_ylim(bottom=0)
    style.whole_rounds(axes, np.arange(1.0, longest + 1), ROUND, "nominal epsilon")
    axes.legend(fontsize=9)
    notes = ["summed over the rounds a client attended (not a guarantee)"]
    style.panel_title(
        axes, title, [*notes, "line: mean of the group and the seeds; band: all seeds"]
    )


def _draw_group(axes: Axes, groups: Sequence[GroupConsumption], color: str, dash: str) -> int:
    length = min(group.mean.size for group in groups)
    rounds = np.arange(1.0, length + 1)
    means = np.asarray([group.mean[:length] for group in groups])
    axes.plot(rounds, means.mean(axis=0), color=color, ls=dash)
    style.draw_band(axes, rounds, means, color)
    return length


Histories = Sequence[Mapping[str, Any]]
_NAMED_SEEDS = len(style.PALETTE)
_THIN = {"linewidth": 1.0, "alpha": 0.8, "markersize": 2.5}
_THICK = {"linewidth": 2.0, "markersize": 3, "zorder": 3}


def plot_multi_seed_comparison(
    results: Histories,
    seeds: Sequence[int],
    dataset_name: str,
    config: Mapping[str, Any] | None = None,
    save_path: str | os.PathLike[str] | None = None,
) -> str:
    """Draw several seeds of one experiment in four panels; return the path.

    `results` are histories, or whole result dictionaries that hold one.  Seeds
    that were evaluated at different rounds, or that stopped early, are averaged
    over the rounds they share.  The mean is drawn only where every seed has a
    finite value: leaving a diverged seed out would flatter the others.
    """
    histories = [_history(index, result) for index, result in enumerate(results)]
    if not histories or len(histories) != len(seeds):
        raise InvalidValueError(
            f"results ({len(histories)}) and seeds ({len(seeds)}) must match, at least one"
        )
    settings = style.figure_settings(config)
    path = style.figure_path(save_path, f"{dataset_name}_multi_seed_comparison", settings)
    key = headline(histories[0])
    target = target_accuracy(dataset_name, config) if key == "test_accuracy" else None
    with style.drawing(settings) as figure:
        ((top_left, top_right), (bottom_left, bottom_right)) = figure.subplots(2, 2)
        figure.suptitle(f"Multi-seed comparison: {str(dataset_name).upper()}, {_count(histories)}")
        _draw_metric(top_left, histories, key)
        _draw_metric(top_right, histories, "test_loss", log=True)
        _draw_budgets(bottom_left, histories)
        _draw_final(bottom_right, histories, key, target)
        _name_seeds(figure, seeds)
        return style.save_figure(figure, path, settings)


def _history(index: int, result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the history in a result, which may be the history itself."""
    inner = result.get("history", result) if isinstance(result, Mapping) else None
    if not isinstance(inner, Mapping):
        raise InvalidValueError(f"results[{index}]={result!r:.60} must be a history dictionary")
    return inner


def _count(items: Sequence[object]) -> str:
    return "1 seed" if len(items) == 1 else f"{len(items)} seeds"


def _color(index: int, count: int) -> str:
    """Return the colour of a seed; with more seeds than colours all are grey."""
    return style.PALETTE[index] if count <= _NAMED_SEEDS else style.GREY


def _name_seeds(figure: Figure, seeds: Sequence[int]) -> None:
    if len(seeds) > _NAMED_SEEDS:
        return
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=_color(i, len(seeds)), label=f"seed {seed}")
        for i, seed in enumerate(seeds)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(seeds), frameon=False)


def _draw_each(axes: Axes, histories: Histories, key: str, positive: bool) -> Array:
    """Draw one thin line per seed; return the positions reached, none without data."""
    reached = [np.zeros(0)]
    for index, history in enumerate(histories):
        series = per_evaluation(history, key)
        keep = series.finite & ((series.values > 0) | (not positive))
        if keep.any():
            values = np.where(keep, series.values, np.nan)
            color = _color(index, len(histories))
            style.line(axes, Series(series.positions, values, series.axis), color, **_THIN)
            reached.append(series.positions)
    return np.concatenate(reached)


def _mean_over_seeds(histories: Histories, key: str) -> tuple[Series, Array, list[str]]:
    """Return the mean over the seeds, the sample deviation, and notes to print."""
    positions, values, axis = aligned(histories, key)
    mean = values.mean(axis=0) if values.size else np.zeros(positions.size)
    spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.full(positions.size, np.nan)
    notes = []
    if not positions.size:
        notes.append("no mean: the seeds share no evaluation round")
    elif len(values) < len(histories):
        notes.append(f"mean over the {len(values)} seeds that recorded it")
    elif not np.isfinite(mean).all():
        notes.append("no mean where a seed is not finite")
    return Series(positions, mean, axis), spread, notes


def _draw_metric(axes: Axes, histories: Histories, key: str, *, log: bool = False) -> None:
    """Draw a test metric of every seed, and the mean with its deviation; losses on a log scale."""
    name, title = _plain(key), f"Test {in_title(key)}"
    reached = _draw_each(axes, histories, key, positive=log)
    if not reached.size:
        style.in_words(axes, f"no finite {'positive ' if log else ''}{name} was recorded", title)
        return
    mean, spread, notes = _mean_over_seeds(histories, key)
    shown = np.where(mean.values > 0, mean.values, np.nan) if log else mean.values
    style.line(axes, Series(mean.positions, shown, mean.axis), style.text_color(), **_THICK)
    legend = "thick: mean"
    if log:
        style.logarithmic(axes)
    else:
        if np.isfinite(spread).any():
            low, high = mean.values - spread, mean.values + spread
            axes.fill_between(mean.positions, low, high, color=style.GREY, alpha=0.25, linewidth=0)
            legend = "thick: mean; band: ± one standard deviation"
        if key == "test_accuracy":
            style.accuracy_limits(
                axes, np.concatenate([column(history, key) for history in histories])
            )
    style.whole_rounds(
        axes, reached, mean.axis, f"Test {name} (log scale)" if log else f"Test {name}"
    )
    style.panel_title(axes, title, [f"{legend}; thin: one seed", *notes])


def _plain(key: str) -> str:
    return key.removeprefix("test_").replace("_", " ")


def _draw_budgets(axes: Axes, histories: Histories) -> None:
    """Draw the histogram of the nominal epsilon of single rounds, over all seeds.

    Runs with a bound have no nominal budgets: what the worst client has spent is drawn.
    """
    from matplotlib.ticker import MaxNLocator

    title = "Privacy Budget Distribution"
    values = np.concatenate([column(history, "privacy_budgets") for history in histories])
    values = values[np.isfinite(values)]
    spent = [spend_by_round(history) for history in histories]
    if not values.size and all(spent):
        _draw_spent(axes, [found["worst"] for found in spent])
        return
    if not values.size:
        absent = all(is_absent(history, "privacy_budgets") for history in histories)
        why = no_budget_in_words(histories[0]) if absent else "no finite value was recorded"
        style.in_words(axes, why, title)
        return
    axes.hist(values, bins=_bins(values, most=30), color=style.GREEN, alpha=0.8)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("nominal epsilon of one round (not a guarantee)")
    axes.set_ylabel("Rounds, over all seeds")
    style.panel_title(axes, title, [f"{values.size} rounds, mean {values.mean():.4g}"])


def _draw_spent(axes: Axes, worst: Sequence[Array]) -> None:
    for index, values in enumerate(worst):
        rounds = np.arange(1.0, values.size + 1)
        style.line(axes, Series(rounds, values, ROUND), _color(index, len(worst)), marker="")
    axes.set_ylim(bottom=0)
    style.whole_rounds(
        axes,
        np.arange(1.0, max(values.size for values in worst) + 1),
        ROUND,
        "epsilon of the worst client",
    )
    style.panel_title(axes, "Privacy Spent", ["each line: one seed"])


def _bins(values: Array, most: int) -> list[float]:
    """Return bin edges; values that are all equal get one narrow bin around them."""
    low, high = float(values.min()), float(values.max())
    if high - low <= 1e-9 * max(abs(high), 1e-12):
        half = 0.02 * abs(high) or 0.5
        return [low - half, high + half]
    count = int(min(np.ceil(np.sqrt(values.size)), most))
    edges: list[float] = np.linspace(low, high, count + 1).tolist()
    return edges


def _draw_final(axes: Axes, histories: Histories, key: str, target: float | None) -> None:
    """Draw the histogram of the last values, with a tick for every seed."""
    from matplotlib.ticker import MaxNLocator

    title = f"Final {in_title(key)} Distribution"
    lasts = [column(history, key)[-1:] for history in histories]
    finals = np.concatenate(lasts)
    finals = finals[np.isfinite(finals)]
    if not finals.size:
        style.in_words(axes, f"no finite final {_plain(key)}", title)
        return
    axes.hist(finals, bins=_bins(finals, most=20), color=style.BLUE, alpha=0.35)
    for index, last in enumerate(lasts):
        axes.plot(
            last,
            [0.04] * last.size,
            "|",
            ms=14,
            mew=2,
            color=_color(index, len(lasts)),
            transform=axes.get_xaxis_transform(),
        )
    if target is not None:
        axes.axvline(target, color=style.VERMILION, linestyle="--", linewidth=1.2, alpha=0.8)
    if key == "test_accuracy":
        axes.set_xlim(*style.padded(np.append(finals, np.nan if target is None else target)))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"Test {_plain(key)} at the end of the run")
    axes.set_ylabel("Seeds")
    style.panel_title(axes, title, _final_notes(finals, len(histories), target))


def _final_notes(finals: Array, count: int, target: float | None) -> list[str]:
    spread = f" ± {finals.std(ddof=1):.4f}" if finals.size > 1 else ""
    notes = [f"mean {finals.mean():.4f}{spread} over {finals.size} of {count} (ticks: seeds)"]
    return notes if target is None else [*notes, f"dashed: target {target:g}"]
