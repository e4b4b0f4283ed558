"""What a benchmark prints and writes."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import torch

from benchmarks.bench.measure import Measured
from benchmarks.bench.work import Work
from fedquilt.training.hardware import usable_cores


def table(work: Work, rows: list[Measured]) -> str:
    """Return a table: seconds a round, samples a second, accuracy, and how often the best peer."""
    best = min((row.median for row in rows if _is_peer(row) and row.seconds), default=None)
    head = ["way", "s a round", "fastest", "samples/s", "accuracy", "x best peer"]
    lines = [head]
    for row in rows:
        if not row.seconds:
            lines.append([row.name, "-", "-", "-", "-", "-"])
            continue
        accuracy = "-" if row.accuracy is None else f"{row.accuracy:.4f}"
        ratio = "-" if best is None else f"{best / row.median:.2f}"
        speed = f"{row.samples_a_second:,.0f}"
        lines.append(
            [row.name, f"{row.median:.4f}", f"{min(row.seconds):.4f}", speed, accuracy, ratio]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [work.what]
    for line in lines:
        first, *others = (cell.ljust(w) for cell, w in zip(line, widths, strict=True))
        text.append("  ".join([first, *(c.strip().rjust(len(c)) for c in others)]))
    text += [f"{row.name}: {row.note}" for row in rows if row.note]
    return "\n".join(text)


def floors() -> dict[str, Any]:
    """Measure what bounds a round here: products of large and of small matrices on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            "large_product_gflops": _product_rate(1024, 1024, 1024),
            "small_product_gflops": _product_rate(32, 784, 64),
        }
    finally:
        torch.set_num_threads(threads)


def _product_rate(rows: int, inner: int, columns: int) -> float:
    """Return the best rate of float32 products, in units of 10^9 operations a second."""
    a, b, out = torch.rand(rows, inner), torch.rand(inner, columns), torch.empty(rows, columns)
    operations = 2 * rows * inner * columns
    repeats = max(1, int(2e8 / operations))
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b, out=out)
        best = min(best, (time.perf_counter() - began) / repeats)
    return operations / best / 1e9


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_before": load,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            named = [line.split(":", 1)[1] for line in file if line.startswith("model name")]
    except OSError:
        named = []
    return named[0].strip() if named else platform.processor()


def as_json(work: Work, rows: list[Measured]) -> dict[str, Any]:
    """Return the figures of a work as plain data."""
    return {
        "work": work.what,
        "rows": [
            {
                "way": row.name,
                "seconds": row.seconds,
                "samples": row.samples,
                "accuracy": row.accuracy,
                "note": row.note,
            }
            for row in rows
        ],
    }


def _is_peer(row: Measured) -> bool:
    return not row.name.startswith(("engine ", "plain loop"))
