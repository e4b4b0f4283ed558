"""What a table was made from: one line of JSON a measurement, in a file beside its page.

A file is the measurement: what it has is not measured again, and a test holds the page to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """Return the lines that a file has; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fill(path: Path, wanted: Iterable[Line], measure: Callable[[Line], Line]) -> list[Line]:
    """Measure what a file lacks, a line for each that is wanted, and return all its lines."""
    lines = read(path)
    for key in wanted:
        if not any(key.items() <= line.items() for line in lines):
            lines.append(key | measure(key))
            with path.open("a") as stream:
                stream.write(json.dumps(lines[-1]) + "\n")
            print(json.dumps(lines[-1]), flush=True)
    return lines


def cell(values: Sequence[float], digits: int = 1) -> str:
    """Return mean and standard deviation over seeds."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}"


def arguments(text: str, path: Path) -> argparse.ArgumentParser:
    """Return what every such benchmark is told: seeds, the file, and whether to measure at all."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--file", type=Path, default=path, help="what was measured (%(default)s)")
    parser.add_argument("--table", action="store_true", help="print what the file has")
    return parser
