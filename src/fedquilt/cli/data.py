"""`fedquilt data`: which data sets are here, and fetching one."""

from __future__ import annotations

from typing import Annotated

import typer

from fedquilt.cli.run import say
from fedquilt.common.formatting import printable
from fedquilt.common.text_table import text_table, wrapped


def data(
    name: Annotated[str | None, typer.Argument(help="Data set to fetch and verify.")] = None,
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", help="Data folders, several joined by ':'.")
    ] = None,
    no_download: Annotated[
        bool, typer.Option("--no-download", help="Only verify what is there.")
    ] = False,
) -> None:
    """List the data sets and where they were found, or fetch and verify one."""
    from fedquilt.data import DATASETS, dataset_status, load_dataset

    if name is not None:
        train, test = load_dataset(name, data_dir, download=not no_download, progress=True)
        shape = "x".join(str(size) for size in train.images.shape[1:])
        print(f"{name}: {len(train)} training and {len(test)} test samples of {shape}, verified")
        return
    found = {key: dataset_status(key, data_dir) for key in DATASETS}
    rows = [(key, printable(status.summary())) for key, status in found.items()]
    say(text_table(["data set", "status"], rows))
    absent = [key for key, status in found.items() if status.missing]
    if absent:
        places = ", ".join(str(folder.absolute()) for folder in found[absent[0]].searched)
        order = "the folders of --data-dir, then of FEDQUILT_DATA, else ./data"
        say("\n" + wrapped(f"looked in {places} ({order})"))
        say(f"fetch one with  fedquilt data {absent[0]}")
