"""Animations of few colours."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from fedquilt.report.sheet import Pixels

if TYPE_CHECKING:
    from PIL.Image import Image


def encode_gif(pictures: list[Image], durations: list[int], colours: int, grey: bool) -> bytes:
    """Return the GIF whose frames share one palette, all as large as the largest."""
    from PIL import Image

    size = (max(p.width for p in pictures), max(p.height for p in pictures))
    frames = [Image.new("RGB", size, "white") for _ in pictures]
    for frame, picture in zip(frames, pictures, strict=True):
        frame.paste(picture)
    first, *rest = _greys(frames, colours) if grey else _colours(frames, colours)
    stream = io.BytesIO()
    first.save(
        stream, "GIF", save_all=True, append_images=rest, duration=durations, loop=0, disposal=1
    )
    return stream.getvalue()


def _greys(frames: list[Image], count: int) -> list[Image]:
    """Return grey frames in `count` evenly spaced greys, black and white among them."""
    entries = [round(level) for level in np.linspace(0, 255, count) for _ in range(3)]
    nearest = np.rint(np.arange(256) * (count - 1) / 255).astype(np.uint8)
    return [_indexed(nearest[np.asarray(frame.convert("L"))], entries) for frame in frames]


def _colours(frames: list[Image], count: int) -> list[Image]:
    """Return frames in white, ink and the colours that suit the first and the last frame.

    The last one counts twice: it is looked at longest, and noise would claim most colours.
    """
    from PIL import Image

    step = 1 + frames[0].width // 150  # some pixels tell the colours, all would take long
    picked = [np.asarray(frame)[::step, ::step] for frame in (frames[0], frames[-1], frames[-1])]
    sample = Image.fromarray(np.concatenate(picked))
    main = sample.quantize(count - 2, Image.Quantize.MEDIANCUT, kmeans=3).getpalette() or []
    entries = [*[255] * 3, *[34] * 3, *main[: 3 * (count - 2)]]
    palette = _indexed(np.zeros((1, 1), dtype=np.uint8), entries)
    reduced = []
    for frame in frames:
        index = np.array(frame.quantize(palette=palette, dither=Image.Dither.NONE))
        index[(np.asarray(frame) == 255).all(axis=2)] = 0  # Pillow's search is not exact
        reduced.append(_indexed(index, entries))
    return reduced


def _indexed(index: Pixels, entries: list[int]) -> Image:
    from PIL import Image

    picture = Image.fromarray(index)
    picture.putpalette(entries)
    return picture
