"""A progress bar on the error stream: round, accuracy, time left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from fedquilt.config import RunConfig
from fedquilt.experiment import Observer


@contextmanager
def interruptible() -> Iterator[None]:
    """End a command that Ctrl-C stops with one line that says how to go on."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        folder = getattr(stopped, "folder", None)
        said = f"continue with  fedquilt run --resume {folder}" if folder else "nothing was kept"
        print(f"interrupted: {said}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def watch(label: str, shown: bool) -> Iterator[Observer | None]:
    """Yield an observer that draws the progress of a run, or None when not shown."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, accuracy="")

        def observe(config: RunConfig, line: dict[str, Any]) -> None:
            bar.update(task, total=config.num_rounds, completed=line["round"] + 1)
            if line.get("test_accuracy") is not None:
                bar.update(task, accuracy=f"accuracy {line['test_accuracy']:.4f}")

        yield observe
