"""The keywords of `fedquilt.run` with their types, made from the declarations of options.

Editors and type checkers read `keywords.pyi`, which `tools/keywords.py` writes from the same
declarations and a test compares.  Options of named data sets (`partition`, `data_dir`, ...) do
nothing to your own data and are left out, like those that `run` has as parameters of its own.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, TypedDict

from fedquilt.config.condense import ALIASES, CondenseConfig
from fedquilt.config.option import CLIENTS, SPLIT, Flag
from fedquilt.config.run import RunConfig, old_names, option_fields


def keywords(config: type[RunConfig]) -> Iterator[tuple[str, str]]:
    """Yield the keywords that are options of a configuration, each with the option's name."""
    fields = option_fields(config)
    for name, item in fields.items():
        cases = item.metadata["uses"]
        of_data = cases and cases[0].get(CLIENTS) == (SPLIT,)
        if not of_data and Flag.PARAMETER not in item.metadata["flags"]:
            yield name, name
    if config is CondenseConfig:
        yield from ALIASES.items()
        yield from old_names(config).items()


def _typed(name: str, config: type[RunConfig]) -> Any:
    hints = typing.get_type_hints(config)
    return TypedDict(name, {key: hints[option] for key, option in keywords(config)}, total=False)


RunSettings = _typed("RunSettings", RunConfig)
Settings = _typed("Settings", CondenseConfig)
