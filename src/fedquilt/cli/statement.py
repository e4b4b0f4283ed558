"""`fedquilt statement RUN`: what may be claimed about a finished run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedquilt.cli.run import JSON, say
from fedquilt.common.errors import RunFolderError
from fedquilt.common.text_table import screen_width


def statement(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Print the privacy statement of a finished run."""
    from fedquilt.privacy.statement import Statement
    from fedquilt.record.folder import RunFolder

    result = RunFolder.open(run).read_result()
    if result is None:
        raise RunFolderError(f"run folder {run!r} is not finished: there is no statement yet")
    if as_json:
        print(json.dumps(result["statement"]))
    else:
        say(Statement.from_json(result["statement"]).as_text(screen_width()))
