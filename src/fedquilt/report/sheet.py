"""Sheets of images, still and moving."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedquilt.common import optional
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.storage import write_file

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

Pixels = npt.NDArray[np.uint8]

MARGIN, GAP, WIDE_GAP, PADDING = 16, 3, 12, 8
FONT_SIZE = 15
_INK, _GREY = "#222222", "#777777"


@dataclass
class Sheet:
    """Images and words with their places; the picture is as large as they need."""

    images: list[tuple[int, int, Pixels]] = field(default_factory=list)
    texts: list[tuple[int, int, str, str, str]] = field(default_factory=list)
    right: int = 0
    bottom: int = 0
    font: FreeTypeFont = field(default_factory=lambda: _font())

    def image(self, x: int, y: int, pixels: Pixels, scale: int) -> None:
        enlarged = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
        self.images.append((x, y, enlarged))
        self._reach(x + enlarged.shape[1], y + enlarged.shape[0])

    def text(self, x: int, y: int, words: str, anchor: str, colour: str = _INK) -> None:
        words = " ".join(words.split())
        _, _, right, bottom = self.font.getbbox(words, anchor=anchor)
        self.texts.append((x, y, words, anchor, colour))
        self._reach(x + round(right), y + round(bottom))

    def footer(self, title: str | None, notes: list[str]) -> None:
        """Add the title and what is left out as lines below everything else."""
        left = min(x for x, _, _ in self.images)
        parts = ", ".join(note for note in notes if note)
        lines = [(line, _INK) for line in textwrap.wrap(title or "", max(40, self.right // 9))]
        lines += [(f"showing {parts}", _GREY)] if parts else []
        y = self.bottom + WIDE_GAP
        for words, colour in lines:
            self.text(left, y, words, "la", colour)
            y += FONT_SIZE + PADDING

    def width(self, words: Sequence[str]) -> int:
        return max(round(self.font.getlength(word)) for word in words)

    def picture(self) -> Image:
        from PIL import Image, ImageDraw

        canvas = np.full((self.bottom + MARGIN, self.right + MARGIN, 3), 255, dtype=np.uint8)
        for x, y, pixels in self.images:
            canvas[y : y + pixels.shape[0], x : x + pixels.shape[1]] = pixels
        picture = Image.fromarray(canvas)
        pen = ImageDraw.Draw(picture)
        for x, y, words, anchor, colour in self.texts:
            pen.text((x, y), words, fill=colour, font=self.font, anchor=anchor)
        return picture

    def _reach(self, right: int, bottom: int) -> None:
        self.right, self.bottom = max(self.right, right), max(self.bottom, bottom)


def _font() -> FreeTypeFont:
    """Return the typeface of matplotlib, which every machine that draws has."""
    for package in ("matplotlib", "PIL"):
        optional.require(package, "a picture")
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(
        Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", FONT_SIZE
    )


def target_of(path: str | os.PathLike[str], ending: str) -> Path:
    target = Path(path)
    if not target.name or target.suffix.lower() not in ("", ending):
        raise InvalidValueError(f"path={str(path)!r} must end in {ending} or have no ending")
    return target if target.suffix else target.with_suffix(ending)


def write_png(path: Path, sheet: Sheet, channels: int) -> Path:
    picture = sheet.picture()
    stream = io.BytesIO()
    (picture.convert("L") if channels == 1 else picture).save(stream, "PNG", optimize=True)
    write_file(path, stream.getvalue(), parents=True)
    return path


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


def picture_rows(rows: Sequence[tuple[str, npt.NDArray[np.float64]]], least: int = 64) -> bytes:
    """Return a PNG with a row of images [N, C, H, W], values from 0 to 1, for each name."""
    sheet, top = Sheet(), MARGIN
    left = MARGIN + sheet.width([name for name, _ in rows]) + PADDING
    for name, images in rows:
        scale = max(1, least // images.shape[-1])
        for number, image in enumerate(images):
            pixels = (255 * image).round().astype(np.uint8).transpose(1, 2, 0)
            across = images.shape[-1] * scale + GAP
            wide = np.broadcast_to(pixels, (*pixels.shape[:2], 3))
            sheet.image(left + number * across, top, wide, scale)
        high = images.shape[-2] * scale
        sheet.text(left - PADDING, top + high // 2, name, "rm")
        top += high + GAP
    stream = io.BytesIO()
    sheet.picture().save(stream, "PNG", optimize=True)
    return stream.getvalue()
