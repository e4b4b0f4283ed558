"""A condensation's images after its rounds, as small pictures inside a page.

They are grown from releases alone and are in files that anybody may have (`record`).
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.record.folder import RunFolder

MOST_FRAMES = 24
_MOST_A_CLASS = 10
_GAP = 1


def images_view(folder: RunFolder) -> list[dict[str, Any]]:
    """Return one PNG for each kept round, at most `MOST_FRAMES` of them, evenly chosen."""
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
    """Lay the images out, a row a class; [H, W, C]."""
    _, channels, height, width = pixels.shape
    classes = np.unique(labels)
    across = min(_MOST_A_CLASS, max(int(np.sum(labels == label)) for label in classes))
    rows, columns = height + _GAP, width + _GAP
    shape = (len(classes) * rows + _GAP, across * columns + _GAP, 1 if channels == 1 else 3)
    sheet = np.full(shape, 128, dtype=np.uint8)
    for row, label in enumerate(classes):
        for column, index in enumerate(np.flatnonzero(labels == label)[:across]):
            image = pixels[index][: shape[2]].transpose(1, 2, 0)
            top, left = row * rows + _GAP, column * columns + _GAP
            sheet[top : top + height, left : left + width] = image
    return sheet
