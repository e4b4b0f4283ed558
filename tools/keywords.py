"""Write `src/fedquilt/config/keywords.pyi`, the keywords of `fedquilt.run` for type checkers.

python tools/keywords.py
"""

from __future__ import annotations

import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
STUB = SOURCE / "fedquilt" / "config" / "keywords.pyi"

_HEAD = '''"""Written by tools/keywords.py from the declarations of options; a test compares."""

from collections.abc import Iterator
from typing import TypedDict

from fedquilt.config.run import RunConfig

def keywords(config: type[RunConfig]) -> Iterator[tuple[str, str]]:
    """Yield the keywords that are options of a configuration, each with the option's name."""

class RunSettings(TypedDict, total=False):
    """Settings of a run, all optional: see `RunConfig`."""

'''
_OF_CONDENSATION = '''
class Settings(RunSettings, total=False):
    """The same and those of a condensation (`method="condense"`): see `CondenseConfig`."""

'''


def stub() -> str:
    """Return the text of the stub."""
    from fedquilt.config import CondenseConfig, RunConfig, option_fields
    from fedquilt.config.keywords import keywords

    fields = {**option_fields(CondenseConfig), **option_fields(RunConfig)}
    whole = {key: f"    {key}: {fields[name].type}\n" for key, name in keywords(CondenseConfig)}
    shared = [key for key, _ in keywords(RunConfig)]
    own = "".join(line for key, line in whole.items() if key not in shared)
    return _HEAD + "".join(whole[key] for key in shared) + _OF_CONDENSATION + own


if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE))
    STUB.write_text(stub())
