"""Several runs as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedquilt._version import __version__
from fedquilt.common.errors import InvalidValueError
from fedquilt.record.folder import RunFolder
from fedquilt.report.views.holdings import holdings_view, measured_view
from fedquilt.report.views.look import look_view
from fedquilt.report.views.pictures import images_view
from fedquilt.report.views.run import run_view

SCHEMA_VERSION = 1


_INSIDE = ("*/config.toml", "points/*/*/config.toml")
"""Where runs lie in a folder of runs, and in that of a sweep."""


def runs_inside(path: Path) -> list[Path]:
    """Return the run folders in a folder of runs or of a sweep, none where it is no such."""
    return sorted(found.parent for pattern in _INSIDE for found in path.glob(pattern))


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Return the run folders that the paths mean: themselves, or those inside them."""
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        inside = runs_inside(path)
        if (path / "config.toml").exists() or not inside:
            inside = [RunFolder.open(path).path]
        found += [one for one in inside if one not in found]
    if not found:
        raise InvalidValueError("name at least one run folder")
    return found


def page_view(
    paths: Sequence[str | Path], *, private: bool = False, look: bool = True
) -> dict[str, Any]:
    """Return all there is to draw of some runs, as plain data that fits in JSON.

    Parameters
    ----------
    paths
        Run folders, or folders of run folders.
    private
        Show also what is for the owner only: raw measurements, what clients hold, paths.
    look
        Test the models of finished runs once more: accuracy by class and by tier.
    """
    runs = [_one(path, private, look) for path in find_runs(paths)]
    return {**empty_view(private=private), "runs": runs}


def empty_view(*, private: bool = False) -> dict[str, Any]:
    """Return a page on which nothing is drawn yet."""
    made: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "fedquilt": __version__}
    return {**made, "private": private, "runs": []}


def _one(path: Path, private: bool, look: bool) -> dict[str, Any]:
    folder = RunFolder.open(path)
    view = run_view(path, private=private)
    view["images"] = images_view(folder)
    view["look"] = look_view(path) if look and view["finished"] else None
    view["holdings"] = holdings_view(folder.read_config()) if private else None
    view["measured"] = measured_view(folder) if private else None
    return view
