"""What every run repeats to the same end, done once in a process of tests."""

from __future__ import annotations

import copy
import functools

import typer.main

from fedquilt.data import ImageDataset, load
from fedquilt.data.specs import DatasetSpec


def read_digits_once() -> None:
    """Let every run of this process have a copy of the embedded digits that the first one read."""
    read = functools.cache(load.load_digits)

    def copied(spec: DatasetSpec) -> tuple[ImageDataset, ImageDataset]:
        return copy.deepcopy(read(spec))

    load.load_digits = copied


def build_commands_once() -> None:
    """Keep the parser of the command line, which takes longer to build than to use."""
    typer.main.get_command = functools.cache(typer.main.get_command)
