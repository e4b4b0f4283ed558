"""Several runs as one page: with their images and, for the owner, what clients hold."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt._version import __version__
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.config import RunConfig
from fedquilt.data import DATASETS
from fedquilt.record.folder import RunFolder
from fedquilt.report.views.claim import together_view
from fedquilt.report.views.class_accuracy import class_accuracy_view
from fedquilt.report.views.run import run_view
from fedquilt.setup.build_task import build_task

SCHEMA_VERSION = 1
_SWEEP = "sweep.json"
MOST_FRAMES = 24
_MOST_A_CLASS = 10
_GAP = 1
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
    folders = find_runs(paths)
    runs = [_one(path, private, look) for path in folders]
    together = together_view(runs, sweeps_of(folders))
    return {**empty_view(private=private), "runs": runs, "together": together}


def sweeps_of(folders: Sequence[Path]) -> dict[str, list[int]]:
    """Return which of the run folders are points of a sweep, by the sweep's name."""
    found: dict[Path, list[int]] = {}
    for index, folder in enumerate(folders):
        parents = folder.resolve().parents
        if len(parents) > 2 and parents[1].name == "points" and (parents[2] / _SWEEP).exists():
            found.setdefault(parents[2], []).append(index)
    return {place.name: members for place, members in found.items()}


def empty_view(*, private: bool = False) -> dict[str, Any]:
    """Return a page on which nothing is drawn yet."""
    made: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "fedquilt": __version__}
    return {**made, "private": private, "runs": [], "together": []}


def _one(path: Path, private: bool, look: bool) -> dict[str, Any]:
    folder = RunFolder.open(path)
    view = run_view(path, private=private)
    view["images"] = images_view(folder)
    view["look"] = class_accuracy_view(path) if look and view["finished"] else None
    view["holdings"] = holdings_view(folder.read_config()) if private else None
    view["measured"] = measured_view(folder) if private else None
    view["baselines"] = (folder.read_baselines() or None) if private else None
    return view


def holdings_view(config: RunConfig) -> dict[str, Any] | None:
    """Return how many samples of each class every client holds; None for somebody's own data.

    The data set is dealt out again as the run did, from the same options and seed.
    """
    if config.dataset not in DATASETS:
        return None
    try:
        _, problem = build_task(config.replace(no_download=True, device="cpu"))
    except (FedquiltError, OSError) as error:
        return {"missing": str(error)}
    labels = problem.task.targets.numpy()
    counts = [
        np.bincount(labels[part], minlength=problem.num_classes).tolist()
        for part in problem.task.clients
    ]
    return {"classes": problem.num_classes, "counts": counts}


def measured_view(folder: RunFolder) -> dict[str, Any] | None:
    """Return what each client measured last on samples of its own, None where nobody did."""
    measured = folder.read_client_metrics()
    if not measured:
        return None
    rounds = max(measured)
    return {"rounds": rounds, "rows": measured[rounds]}


def images_view(folder: RunFolder) -> list[dict[str, Any]]:
    """Return one PNG for each kept round, at most `MOST_FRAMES` of them, evenly chosen.

    They are grown from releases alone and are in files that anybody may have (`record`).
    """
    paths = sorted((folder.path / "synthetic").glob("round_*.safetensors"))
    if len(paths) > MOST_FRAMES:
        chosen = np.unique(np.linspace(0, len(paths) - 1, MOST_FRAMES).round().astype(int))
        paths = [paths[index] for index in chosen]
    frames = [_frame(path) for path in paths]
    grown = folder.synthetic_path()
    if not frames and grown.exists():
        frames = [_frame(grown)]
    return frames


def _frame(path: Path) -> dict[str, Any]:
    from PIL import Image

    from fedquilt.data import condensed_info, load_condensed

    made, info = load_condensed(path, whole=True), condensed_info(path)
    scale = np.asarray(info["std"]).reshape(-1, 1, 1), np.asarray(info["mean"]).reshape(-1, 1, 1)
    pixels = np.clip(made.images.numpy() * scale[0] + scale[1], 0, 1)
    sheet = _sheet((255 * pixels).round().astype(np.uint8), made.targets.numpy())
    picture = Image.fromarray(sheet[..., 0] if sheet.shape[-1] == 1 else sheet)
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    return {
        "round": int(info["about"].get("rounds", 0)),
        "width": picture.width,
        "height": picture.height,
        "classes": sorted({int(label) for label in made.targets}),
        "png": base64.b64encode(stream.getvalue()).decode("ascii"),
    }


def _sheet(pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Lay the images out, the longer way across: a row a class, or a column; [H, W, C]."""
    _, channels, height, width = pixels.shape
    classes = np.unique(labels)
    each = min(_MOST_A_CLASS, max(int(np.sum(labels == label)) for label in classes))
    upright = _is_upright(len(classes), each)
    rows, columns = (len(classes), each) if upright else (each, len(classes))
    shape = (rows * (height + _GAP) + _GAP, columns * (width + _GAP) + _GAP)
    sheet = np.full((*shape, 1 if channels == 1 else 3), 128, dtype=np.uint8)
    for place, label in enumerate(classes):
        for number, index in enumerate(np.flatnonzero(labels == label)[:each]):
            row, column = (place, number) if upright else (number, place)
            top, left = row * (height + _GAP) + _GAP, column * (width + _GAP) + _GAP
            image = pixels[index][: sheet.shape[2]].transpose(1, 2, 0)
            sheet[top : top + height, left : left + width] = image
    return sheet


def _is_upright(classes: int, each: int) -> bool:
    """Tell whether a class is a row: where there are at least as many images of one as classes."""
    return each >= classes
