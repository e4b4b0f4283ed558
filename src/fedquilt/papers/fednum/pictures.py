"""Pictures of a condensation's folder: each evaluation, the final set, strip, animation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedquilt.common.formatting import printable
from fedquilt.data import condensed_info, load_condensed
from fedquilt.record.folder import RunFolder


def draw_one(path: Path) -> None:
    """Draw the images of one file as a grid beside it.

    A round that ran again with new noise has new images: an older picture is replaced.
    """
    from fedquilt.report import draw_condensed

    made, info = load_condensed(path, whole=True), condensed_info(path)
    about = info["about"]
    stated = [str(about.get(key, "?"))[:80] for key in ("dataset", "mode", "rounds")]
    title = "{}, {}, after round {}".format(*map(printable, stated))
    draw_condensed(
        made.images,
        made.targets,
        path.with_suffix(".png"),
        mean=info["mean"],
        std=info["std"],
        title=title,
    )


def draw_pictures(run_folder: Path | None) -> list[Path]:
    """Draw what is missing: a grid for each evaluation and the final set, strip, animation."""
    from fedquilt.report import animate_condensed, draw_condensed_strip

    if run_folder is None:
        return []
    folder = RunFolder.open(run_folder)
    files = sorted(folder.synthetic_path(0).parent.glob("round_*.safetensors"))
    final = folder.synthetic_path()
    for file in (*files, final):
        if not file.with_suffix(".png").exists():
            draw_one(file)
    pictures = [final.with_suffix(".png")]
    info = condensed_info(final)
    labels = load_condensed(files[-1] if files else final, whole=True).targets
    frames = [
        (_frame_title(condensed_info(file)), load_condensed(file, whole=True).images)
        for file in files
    ]
    for name, draw in (("strip.png", draw_condensed_strip), ("rounds.gif", animate_condensed)):
        path = final.with_name(f"condensed_{name}")
        if not path.exists() and frames:  # somebody may have removed the rounds to save space
            draw(frames, labels, path, mean=info["mean"], std=info["std"])
        if path.exists():
            pictures.append(path)
    return pictures


def _frame_title(info: dict[str, Any]) -> str:
    return f"round {printable(info['about'].get('rounds', '?'))[:80]}"
