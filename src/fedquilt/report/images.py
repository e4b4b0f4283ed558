"""Sheets of images, still and moving; of a condensed data set a grid, its growth, an animation.

A pixel of an image becomes a square of whole screen pixels; nothing is smoothed, so a
picture shows the values that a model trains on.  The value x of channel c is shown as
x * std[c] + mean[c], and what lies outside the range [0, 1] of the data is clipped.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedquilt.common import checks, optional
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


ClassNames = Sequence[str] | Mapping[int, str]

MAX_ROWS = 20
"""Rows that still fit a page; of more classes the first are shown, and a note says so."""

_TILE = 72  # an image is at least this many screen pixels wide or high
_TALLEST = 2.5  # rows for each column of images, before classes stand side by side
_LONGEST_NAME, _LONGEST_LABEL = 18, 20
_GIF_LOOKS = ((40, 64), (40, 32), (20, 64), (20, 32), (20, 24))
"""Least size of an image and number of colours in a GIF, from the best to the smallest."""


def draw_condensed(
    images: npt.ArrayLike,
    labels: npt.ArrayLike,
    path: str | os.PathLike[str],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    title: str | None = None,
    max_columns: int = 10,
    class_names: ClassNames | None = None,
) -> Path:
    """Draw a condensed set as a PNG with one row of images for each class.

    Parameters
    ----------
    images, labels
        Normalised images [N, C, H, W], C = 1 (grey) or 3 (colour), and their classes [N].
    path
        A file ending in .png; a path without an ending gets it.
    mean, std
        What the images were normalised with, one value a channel.
    title
        A line below the images.
    max_columns
        The most images in one line.  Where a class has few images, classes stand side
        by side as well, so that the picture does not become a thin column.
    class_names
        Names of the classes by label; the labels themselves when None.
    """
    target = target_of(path, ".png")
    pixels = _pixels("images", images, mean, std)
    members = _members(labels, len(pixels))
    grid = _Grid.fit(members, pixels.shape[1:3], _TILE, max_columns, class_names)
    return write_png(target, grid.sheet(pixels, title), pixels.shape[3])


def draw_condensed_strip(
    frames: Sequence[tuple[str, npt.ArrayLike]],
    labels: npt.ArrayLike,
    path: str | os.PathLike[str],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    per_class: int = 1,
    title: str | None = None,
    max_columns: int = 12,
    class_names: ClassNames | None = None,
) -> Path:
    """Draw how a condensed set grew: a PNG with a row a class and a column a moment.

    `frames` holds (label, images) for each moment, such as ("round 5", images).  At most
    `max_columns` of them are shown, evenly chosen, always with the first and the last;
    of each class the first `per_class` images.  The rest is as in `draw_condensed`.
    """
    target = target_of(path, ".png")
    checks.integer("max_columns", max_columns, at_least=2, at_most=100)
    checks.integer("per_class", per_class, at_least=1, at_most=MAX_ROWS)
    moments = _moments(frames, max_columns, mean, std)
    shape = moments[0][1].shape
    members = _members(labels, shape[0])
    shown = dict(list(members.items())[: MAX_ROWS // per_class])
    notes = [_part(len(shown), len(members), "classes"), _part(len(moments), len(frames), "frames")]
    sheet = _strip(moments, shown, per_class, _names(class_names, shown))
    sheet.footer(title, notes)
    return write_png(target, sheet, shape[3])


def animate_condensed(
    frames: Sequence[tuple[str, npt.ArrayLike]],
    labels: npt.ArrayLike,
    path: str | os.PathLike[str],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    title: str | None = None,
    max_columns: int = 10,
    max_frames: int = 16,
    frame_ms: int = 300,
    last_ms: int = 2500,
    max_bytes: int = 600_000,
    class_names: ClassNames | None = None,
) -> Path:
    """Show how a condensed set grew as a small GIF that repeats for ever.

    Each of `frames`, (label, images), is the grid of `draw_condensed` below its label.
    At most `max_frames` are shown, evenly chosen, always with the first and the last.
    A frame stays `frame_ms` milliseconds and the last one `last_ms`; GIF counts in
    hundredths of a second.  Noise hardly compresses: a file of more than `max_bytes` is
    made again with fewer colours, then with smaller images, then with fewer frames.
    """
    target = target_of(path, ".gif")
    checks.integer("max_frames", max_frames, at_least=2, at_most=1000)
    checks.integer("max_bytes", max_bytes, at_least=1)
    stay = _hundredths("frame_ms", frame_ms), _hundredths("last_ms", last_ms)
    moments = _moments(frames, max_frames, mean, std)
    members = _members(labels, len(moments[0][1]))
    size = moments[0][1].shape[1:3]

    def encode(shown: list[tuple[str, Pixels]], tile: int, colours: int) -> bytes:
        grid = _Grid.fit(members, size, tile, max_columns, class_names)
        pictures = [grid.sheet(pixels, title, label).picture() for label, pixels in shown]
        grey = shown[0][1].shape[3] == 1
        return encode_gif(pictures, [*[stay[0]] * (len(shown) - 1), stay[1]], colours, grey)

    write_file(target, _encode_within(max_bytes, moments, encode), parents=True)
    return target


def _encode_within(
    max_bytes: int,
    moments: list[tuple[str, Pixels]],
    encode: Callable[[list[tuple[str, Pixels]], int, int], bytes],
) -> bytes:
    """Return the best-looking GIF of at most `max_bytes`, or the smallest there is."""
    content = b""
    for look in _GIF_LOOKS:
        content = encode(moments, *look)
        if len(content) <= max_bytes:
            return content
    while len(content) > max_bytes and len(moments) > 2:
        fewer = max(2, min(len(moments) - 1, len(moments) * max_bytes // len(content)))
        moments = [moments[place] for place in _spread(len(moments), fewer)]
        content = encode(moments, *_GIF_LOOKS[-1])
    return content


@dataclass(frozen=True)
class _Grid:
    """Which images stand where: blocks side by side, each with one row a class."""

    members: dict[int, npt.NDArray[np.intp]]
    names: list[str]
    notes: list[str]
    scale: int
    rows: int
    columns: int

    @classmethod
    def fit(
        cls,
        members: dict[int, npt.NDArray[np.intp]],
        size: tuple[int, ...],
        tile: int,
        max_columns: int,
        class_names: ClassNames | None,
    ) -> _Grid:
        most = checks.integer("max_columns", max_columns, at_least=1, at_most=100)
        largest = max(len(indices) for indices in members.values())
        columns = min(most, largest)
        blocks = _blocks(len(members), columns, most)
        rows = min(MAX_ROWS, -(-len(members) // blocks))
        shown = dict(list(members.items())[: rows * blocks])
        notes = [_part(len(shown), len(members), "classes")]
        notes.append(_part(columns, largest, "images a class"))
        names = _names(class_names, shown)
        return cls(shown, names, notes, _scale(size, tile), rows, columns)

    def sheet(self, pixels: Pixels, title: str | None, label: str | None = None) -> Sheet:
        """Lay out the images, with `label` above them and `title` below."""
        sheet = Sheet()
        height, width = (side * self.scale + GAP for side in pixels.shape[1:3])
        gutter = sheet.width(self.names) + PADDING
        block = gutter + self.columns * width + WIDE_GAP
        top = MARGIN + (2 * FONT_SIZE if label is not None else 0)
        if label is not None:
            sheet.text(MARGIN + gutter, MARGIN, _elide(label, 2 * _LONGEST_LABEL), "la")
        for place, (name, indices) in enumerate(
            zip(self.names, self.members.values(), strict=True)
        ):
            left = MARGIN + gutter + place // self.rows * block
            y = top + place % self.rows * height
            sheet.text(left - PADDING, y + (height - GAP) // 2, name, "rm")
            for column, index in enumerate(indices[: self.columns]):
                sheet.image(left + column * width, y, pixels[index], self.scale)
        sheet.footer(title, self.notes)
        return sheet


def _blocks(classes: int, columns: int, most: int) -> int:
    """Return in how many blocks side by side the classes make a picture of good shape."""
    for blocks in range(1, most // columns + 1):
        rows = -(-classes // blocks)
        if rows <= min(MAX_ROWS, _TALLEST * blocks * columns):
            return blocks
    return most // columns


def _strip(
    moments: list[tuple[str, Pixels]],
    members: dict[int, npt.NDArray[np.intp]],
    per_class: int,
    names: list[str],
) -> Sheet:
    sheet = Sheet()
    scale = _scale(moments[0][1].shape[1:3], _TILE)
    height, width = (side * scale for side in moments[0][1].shape[1:3])
    heads = [_elide(label, _LONGEST_LABEL) for label, _ in moments]
    pitch = max(width + GAP, sheet.width(heads) + WIDE_GAP)
    overhang = (pitch - GAP - width) // 2
    left = MARGIN + max(sheet.width(names) + PADDING, overhang)
    for column, head in enumerate(heads):
        sheet.text(left + column * pitch + width // 2, MARGIN, head, "ma")
    y = MARGIN + 2 * FONT_SIZE
    for name, indices in zip(names, members.values(), strict=True):
        lines = min(per_class, len(indices))
        middle = y + (lines * (height + GAP) - GAP) // 2
        sheet.text(left - PADDING, middle, name, "rm")
        for index in indices[:lines]:
            for column, (_, pixels) in enumerate(moments):
                sheet.image(left + column * pitch, y, pixels[index], scale)
            y += height + GAP
        y += WIDE_GAP - GAP if per_class > 1 else 0
    return sheet


def _pixels(
    name: str, images: npt.ArrayLike, mean: Sequence[float], std: Sequence[float]
) -> Pixels:
    """Return images [N, C, H, W] as they are shown, [N, H, W, C] from 0 to 255."""
    values = _array(name, images)
    if values.ndim != 4 or values.shape[1] not in (1, 3) or 0 in values.shape:
        raise InvalidValueError(
            f"{name} must have shape [N, C, H, W] with C = 1 or 3, got {list(values.shape)}"
        )
    if values.dtype.kind not in "fiu":
        raise InvalidValueError(f"{name} must hold real numbers, got dtype {values.dtype}")
    finite = np.isfinite(values).all(axis=(1, 2, 3))
    if not finite.all():
        raise InvalidValueError(
            f"{name}[{int(np.argmin(finite))}] holds a value that is not finite"
        )
    channels = values.shape[1]
    shift = [checks.number("mean", v) for v in _each("mean", mean, channels)]
    spread = [checks.number("std", v, above=0) for v in _each("std", std, channels)]
    shown = values.transpose(0, 2, 3, 1).astype(np.float64) * spread + shift
    pixels: Pixels = np.rint(shown.clip(0, 1) * 255).astype(np.uint8)
    return pixels


def _array(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # a ragged list, a tensor elsewhere
        raise InvalidValueError(f"{name} must be an array of numbers: {error}") from error


def _each(name: str, values: Sequence[float], channels: int) -> Sequence[float]:
    if not isinstance(values, Sequence | np.ndarray) or len(values) != channels:
        raise InvalidValueError(f"{name}={values!r} must have {channels} values, one a channel")
    return values


def _members(labels: npt.ArrayLike, count: int) -> dict[int, npt.NDArray[np.intp]]:
    """Return for each class, in order, which images it has."""
    values = _array("labels", labels)
    if values.shape != (count,) or values.dtype.kind not in "iu" or values.min() < 0:
        raise InvalidValueError(
            f"labels must be {count} integers >= 0, one an image, "
            f"got {values.dtype} {list(values.shape)}"
        )
    return {int(label): np.flatnonzero(values == label) for label in np.unique(values)}


def _names(names: ClassNames | None, members: dict[int, Any]) -> list[str]:
    if names is None:
        return [str(label) for label in members]
    if isinstance(names, str) or not isinstance(names, Sequence | Mapping):
        raise InvalidValueError(f"class_names={names!r} must be a list or a mapping of names")
    try:
        return [_elide(str(names[label]), _LONGEST_NAME) for label in members]
    except (KeyError, IndexError) as error:
        raise InvalidValueError(
            f"class_names has {len(names)} names and must have one for each of the labels "
            f"{min(members)} to {max(members)}"
        ) from error


def _moments(
    frames: Sequence[tuple[str, npt.ArrayLike]],
    most: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> list[tuple[str, Pixels]]:
    """Return at most `most` frames with the first and the last, all of one shape."""
    if not isinstance(frames, Sequence) or len(frames) == 0:
        raise InvalidValueError("frames must be a list of at least one (label, images)")
    moments: list[tuple[str, Pixels]] = []
    for place in _spread(len(frames), most):
        try:
            label, images = frames[place]
        except (TypeError, ValueError) as error:
            raise InvalidValueError(f"frames[{place}] must be (label, images)") from error
        pixels = _pixels(f"frames[{place}]", images, mean, std)
        if moments and pixels.shape != moments[0][1].shape:
            raise InvalidValueError(
                f"frames[{place}] has shape {list(np.shape(images))}, all must have "
                f"the shape of frames[0], {list(np.shape(frames[0][1]))}"
            )
        moments.append((str(label), pixels))
    return moments


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` places out of `count`, evenly, with the first and the last."""
    places = np.linspace(0, count - 1, min(most, count)).round()
    return [int(place) for place in places]


def _scale(size: tuple[int, ...], tile: int) -> int:
    """Return the smallest whole factor that makes an image at least `tile` large."""
    return -(-tile // max(size))


def _part(shown: int, all_: int, what: str) -> str:
    return f"{shown} of {all_} {what}" if shown < all_ else ""


def _elide(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _hundredths(name: str, milliseconds: int) -> int:
    whole = checks.integer(name, milliseconds, at_least=20, at_most=60_000)
    return round(whole / 10) * 10
