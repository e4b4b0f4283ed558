"""The QuAP-FL paper's tables and figures, ours beside theirs, as Markdown from what is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.report.style import (
    BLUE,
    GREEN,
    VERMILION,
    drawing,
    figure_settings,
    panel_title,
    save_figure,
    whole_rounds,
)
from reproduction import quap_fl
from reproduction.cells import Cell, Kept
from reproduction.quap_fl import MODES, SIZES, TABLE_1_MB, TABLE_2, TABLE_3
from reproduction.tables import (
    NONE_KEPT,
    accuracies,
    is_kept,
    listed,
    mean,
    named,
    origin,
    origin_of,
    preface,
    table,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"fedavg": BLUE, "fixed_dp": VERMILION, "quap_fl": GREEN}

WHY = {
    "table2": (
        "The published code stops, in every mode, at the first evaluation on the test set above "
        "93.2 % (MNIST), and the paper's three figures lie just above that; its curve of QuAP-FL "
        "ends at round 30 of 200. The published network for CIFAR-10 ends in raw scores under a "
        "loss for log-probabilities, which has no lower bound. Here all rounds run, and "
        "test data stop nothing. With the paper's settings the noise on the classifier is many "
        "times the mean update (the column says how many), and the convolutions leave without clip "
        "or noise: no mode of this table has a bound. The paper names neither learning rate nor "
        'epochs. "Code\'s settings" are those of the code published with it (0.005 x 0.995^t, 3 '
        'epochs), "documents\' settings" those of its API document (0.01, 5 epochs, no decay); all '
        "else is alike. At the small rate FedAvg is short of steps on CIFAR-10: it still rises in "
        "round 200, and is no upper bound."
    ),
    "head": (
        "A small form of the CIFAR-10 experiment (`benchmarks/noisy_head.py`, one seed): the mean "
        "of clients without noise, and what noise on the dense layers does at the published rate. "
        "The column on the right says how long the first dense layer is against its start. Noise "
        "makes the dense layers long, and a longer one is a larger step for the convolutions "
        "below; the third arm has the same noise without the length, the fourth the length "
        "without noise."
    ),
    "table3": (
        "The clip follows the 90th percentile between 0.1 and 1, as in the published settings; "
        "updates are divided by the learning rate and longer than 1, so the bound stands at 1 and "
        "adaptive clipping changes nothing: rows that differ in it alone differ by the noise that "
        "was drawn, which is secret. Without layer-wise noise the whole model is noised. Three of "
        "the eight rows are not in the paper."
    ),
    "figure4": (
        "The paper's figure is drawn from a formula, not measured; its text says that QuAP-FL "
        "leads by 5 points at 0.1."
    ),
    "sensitivity": (
        "The paper prints no figures: best near alpha 0.5 and beta 2. alpha moves the budget by "
        "at most a factor 1 + alpha, and with it the noise."
    ),
}


def markdown(
    scale: str,
    kept: Mapping[str, Kept],
    sent: Mapping[str, int],
    figure: str,
    arms: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """Return the section of one scale; a table none of whose cells is kept is left out."""
    if not kept and not sent:
        return NONE_KEPT
    parts = [
        _head(scale, kept),
        _table1(sent),
        _table2(scale, kept),
        _head_arms(arms or {}),
        _table3(scale, kept),
        f"![Figures 2, 3 and 4]({figure})\n" if figure else "",
        _figure4(scale, kept),
        _sensitivity(scale, kept),
    ]
    return "\n".join(part for part in parts if part)


def _head(scale: str, kept: Mapping[str, Kept]) -> str:
    size = SIZES[scale]
    what = (
        "The embedded digits in the place of MNIST, so no figure can be compared in size with the "
        "paper's: it shows the direction of differences, on any machine."
        if scale == "small"
        else "The paper's data sets, networks and rounds; what it does not name is the published "
        "code's."
    )
    seeds = f"Table 2 over {listed(size.seeds)}, the rest over {listed(size.more_seeds)}"
    measured = (
        "Accuracy in percent after the last round, mean and deviation over the seeds; of modes "
        "with noise, which is secret and never drawn twice, mean, least and largest. Where there "
        "is one seed, differences of a few points say nothing: Table 2 shows how far seeds lie "
        "apart."
    )
    return preface(what, kept, quap_fl.cells(scale), seeds, measured)


def _table1(sent: Mapping[str, int]) -> str:
    if not sent:
        return ""
    base = sent["fedavg"]
    rows = [
        (MODES[mode], f"{TABLE_1_MB} MB, 1.00x", f"{size / 1e6:.1f} MB, {size / base:.2f}x")
        for mode, size in sent.items()
    ]
    why = (
        "What a client sends in a round, counted while one trains and sends: here a ResNet-18 for "
        "CIFAR-10 (11,173,962 numbers of four bytes, 44.7 million bytes, 42.6 MiB). The paper says "
        "neither its network's size nor its unit; 44.6 MiB is a ResNet-18 for ImageNet's 1,000 "
        "classes (11,689,512 numbers). That the two figures are close is an accident; what the "
        "table says is that all three methods send the same."
    )
    return table("Table 1: bytes of a round", ("method", "paper", "here"), rows, why)


def _table2(scale: str, kept: Mapping[str, Kept]) -> str:
    code, documents = (quap_fl.table2(scale, name) for name in ("table2", "table2-documents"))
    rows = []
    for (dataset, mode), cells in code.items():
        others = documents[dataset, mode]
        if is_kept([*cells, *others], kept):
            theirs, deviation = TABLE_2[dataset, mode]
            name = named(SIZES[scale].datasets[dataset], dataset)
            ours = [f(some, kept) for some in (cells, others) for f in (mean, _noise)]
            rows.append((name, MODES[mode], f"{theirs:.2f} ± {deviation:.2f}", *ours))
    noise = "noise to signal"
    head = ("data", "method", "paper", "code's settings", noise, "documents' settings", noise)
    why = _why("table2", [*code.values(), *documents.values()], kept)
    return table("Table 2: final accuracy", head, rows, why)


def _head_arms(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what noise on the classifier does by itself, and what its length does."""
    rows = [
        (name, *(f"{arm[key]:.1f}" for key in ("half", "end")), f"{arm['length']:.1f}")
        for name, arm in arms.items()
    ]
    title = "Why noise lifts accuracy where the rate is small"
    head = ("arm", "half way", "end", "length")
    return table(title, head, rows, f"{WHY['head']} {origin_of(list(arms.values()))}")


def _why(part: str, rows: Iterable[Sequence[Cell]], kept: Mapping[str, Kept]) -> str:
    """Return the text below a table, and from which code its cells come."""
    return f"{WHY[part]} {origin([cell for cells in rows for cell in cells], kept)}"


def _table3(scale: str, kept: Mapping[str, Kept]) -> str:
    rows, found = [], quap_fl.table3(scale)
    for parts, cells in found.items():
        if is_kept(cells, kept):
            theirs = TABLE_3.get(parts)
            marks = tuple("yes" if part else "no" for part in parts)
            paper = "-" if theirs is None else f"{theirs:.2f}"
            rows.append((*marks, paper, mean(cells, kept), _noise(cells, kept)))
    head = ("adaptive budget", "adaptive clip", "layer-wise", "paper", "here", "noise to signal")
    return table(
        "Table 3: what each part adds (MNIST)", head, rows, _why("table3", found.values(), kept)
    )


def _figure4(scale: str, kept: Mapping[str, Kept]) -> str:
    found = quap_fl.figure4(scale)
    rows = []
    for alpha in quap_fl.DIRICHLET:
        if any(cell.name in kept for mode in MODES for cell in found[alpha, mode]):
            rows.append((f"{alpha:g}", *(mean(found[alpha, mode], kept) for mode in MODES)))
    head = ("Dirichlet alpha", *MODES.values())
    return table(
        "Figure 4: accuracy over the split", head, rows, _why("figure4", found.values(), kept)
    )


def _sensitivity(scale: str, kept: Mapping[str, Kept]) -> str:
    found = quap_fl.sensitivity(scale)
    rows = [
        (
            f"{key.removeprefix('budget_')} {value:g}",
            mean(cells, kept),
            _noise(cells, kept),
        )
        for (key, value), cells in found.items()
        if is_kept(cells, kept)
    ]
    head = ("budget", "here", "noise to signal")
    return table(
        "Section 5.5: alpha and beta", head, rows, _why("sensitivity", found.values(), kept)
    )


def _noise(cells: Sequence[Cell], kept: Mapping[str, Kept]) -> str:
    ratios = [kept[cell.name].record.get("noise_to_signal") for cell in cells if cell.name in kept]
    known = [ratio for ratio in ratios if ratio is not None]
    if not ratios:
        return "-"
    return f"{np.mean(known):,.3g}" if known else "none"


def draw(scale: str, kept: Mapping[str, Kept], path: Path) -> str:
    """Draw figures 2, 3 and 4 beside one another and return the path; "" without a curve."""
    shown = {
        mode: cells for (data, mode), cells in quap_fl.table2(scale).items() if data == "mnist"
    }
    if not any(cell.name in kept for cells in shown.values() for cell in cells):
        return ""
    look = figure_settings({"dpi": 100}, (13.0, 4.2))
    with drawing(look) as figure:
        left, middle, right = figure.subplots(1, 3)
        _draw_accuracy(left, shown, kept)
        _draw_groups(middle, shown["quap_fl"], kept)
        _draw_split(right, scale, kept)
        return save_figure(figure, path, look)


def _draw_accuracy(
    axes: Axes, shown: Mapping[str, Sequence[Cell]], kept: Mapping[str, Kept]
) -> None:
    for mode, curves in _curves(shown, kept):
        rounds = np.asarray(curves[0]["rounds"], dtype=float)
        values = 100 * np.asarray([curve["accuracy"] for curve in curves], dtype=float)
        axes.plot(rounds, values.mean(0), color=_COLORS[mode], label=MODES[mode])
        axes.fill_between(
            rounds, values.min(0), values.max(0), color=_COLORS[mode], alpha=0.2, linewidth=0
        )
        whole_rounds(axes, rounds, "Round")
    axes.set_ylabel("test accuracy, %")
    axes.legend()
    panel_title(axes, "Figure 2: accuracy by round", ["line: mean; band: all seeds"])


def _curves(
    shown: Mapping[str, Sequence[Cell]], kept: Mapping[str, Kept]
) -> Iterator[tuple[str, list[Mapping[str, list[float]]]]]:
    for mode, cells in shown.items():
        curves = [kept[cell.name].record["curve"] for cell in cells if cell.name in kept]
        if curves:
            yield mode, [one for one in curves if one["rounds"] == curves[0]["rounds"]]


def _draw_groups(axes: Axes, cells: Sequence[Cell], kept: Mapping[str, Kept]) -> None:
    found = [kept[cell.name].record.get("groups") for cell in cells if cell.name in kept]
    groups = next((one for one in found if one), None)
    if groups is not None:
        for key, color in (("most", BLUE), ("least", VERMILION)):
            axes.plot(groups["rounds"], groups[key], color=color, label=f"{key} frequent 20 %")
        axes.legend()
        whole_rounds(axes, np.asarray(groups["rounds"], dtype=float), "Round")
    axes.set_ylabel("nominal epsilon")
    panel_title(axes, "Figure 3: nominal budgets", ["not a guarantee; QuAP-FL, one seed"])


def _draw_split(axes: Axes, scale: str, kept: Mapping[str, Kept]) -> None:
    found = quap_fl.figure4(scale)
    for mode in MODES:
        points = [(alpha, accuracies(found[alpha, mode], kept)) for alpha in quap_fl.DIRICHLET]
        known = [(alpha, float(np.mean(values))) for alpha, values in points if values]
        if known:
            axes.plot(*zip(*known, strict=True), color=_COLORS[mode], label=MODES[mode], marker="o")
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(quap_fl.DIRICHLET, [f"{alpha:g}" for alpha in quap_fl.DIRICHLET])
    axes.set_xlabel("Dirichlet alpha")
    axes.set_ylabel("test accuracy, %")
    if axes.lines:
        axes.legend()
    panel_title(axes, "Figure 4: accuracy over the split", ["measured"])
