"""Pictures of condensed sets, read back and compared pixel by pixel."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedquilt.errors import InvalidValueError, StorageError
from fedquilt.report import animate_condensed, draw_condensed, draw_condensed_strip

GREY: dict[str, Any] = {"mean": (0.1307,), "std": (0.3081,)}
COLOUR: dict[str, Any] = {"mean": (0.49, 0.48, 0.45), "std": (0.20, 0.19, 0.21)}


def bytes_of(count: int, channels: int, side: int, seed: int = 0) -> np.ndarray:
    """Pixels 0..255 as a data set has them, [N, C, H, W]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, channels, side, side))


def normalised(pixels: np.ndarray, look: dict[str, Any]) -> Any:
    mean, std = (np.array(look[key]).reshape(-1, 1, 1) for key in ("mean", "std"))
    return ((pixels / 255 - mean) / std).astype(np.float32)


def read(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


def enlarged(pixels: np.ndarray, scale: int) -> np.ndarray:
    """One image [C, H, W] as it must stand in the picture."""
    block = np.kron(pixels, np.ones((1, scale, scale), dtype=int)).transpose(1, 2, 0)
    return block[..., 0] if len(pixels) == 1 else block


def places(picture: np.ndarray, block: np.ndarray, off: int = 1) -> list[tuple[int, int]]:
    """Every (y, x) at which the block stands with values at most `off` away."""
    high, wide = block.shape[:2]
    rows, columns = picture.shape[0] - high + 1, picture.shape[1] - wide + 1
    fits = np.ones((rows, columns), dtype=bool)
    for y, x in ((0, 0), (0, wide - 1), (high - 1, 0), (high - 1, wide - 1), (high // 2, 0)):
        near = np.abs(picture[y : y + rows, x : x + columns] - block[y, x]) <= off
        fits &= near if picture.ndim == 2 else near.all(axis=-1)
    found = [(int(y), int(x)) for y, x in np.argwhere(fits)]
    return [
        (y, x) for y, x in found if (abs(picture[y : y + high, x : x + wide] - block) <= off).all()
    ]


def only_place(picture: np.ndarray, block: np.ndarray) -> tuple[int, int]:
    found = places(picture, block)
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("channels", "side", "scale"), [(1, 28, 3), (1, 8, 9), (3, 32, 3), (3, 64, 2), (1, 80, 1)]
)
def test_every_image_stands_in_the_row_of_its_class(
    tmp_path: Path, channels: int, side: int, scale: int
) -> None:
    look = GREY if channels == 1 else COLOUR
    pixels = bytes_of(6, channels, side)
    labels = [4, 0, 4, 0, 0, 4]
    path = draw_condensed(normalised(pixels, look), labels, tmp_path / "a.png", **look)
    picture = read(path)
    assert picture.ndim == (2 if channels == 1 else 3)
    at = [only_place(picture, enlarged(image, scale)) for image in pixels]
    step = side * scale + 3
    assert [at[i] for i in (3, 4)] == [(at[1][0], at[1][1] + step * k) for k in (1, 2)]
    assert [at[i] for i in (0, 2, 5)] == [(at[1][0] + step, at[1][1] + step * k) for k in range(3)]
    y, x = at[1]
    assert (picture[y : y + 2 * step - 3, x + step - 3 : x + step] == 255).all()
    assert (picture[y + step - 3 : y + step, x : x + 3 * step - 3] == 255).all()
    assert (picture[: y - 1] == 255).all()


def test_values_outside_the_data_are_clipped(tmp_path: Path) -> None:
    images = np.array([-50.0, 50.0, 0.0, 1.0])[:, None, None, None] * np.ones((4, 1, 9, 9))
    picture = read(draw_condensed(images, [0, 0, 0, 0], tmp_path / "a.png", **GREY))
    y, x = only_place(picture, np.zeros((72, 72), dtype=int))
    shown = [int(picture[y + 5, x + 5 + 75 * k]) for k in range(4)]
    # 0.1307 and 0.1307 + 0.3081 of 255 are 33.3 and 111.9.
    assert shown == [0, 255, 33, 112]


def test_classes_with_few_images_stand_side_by_side(tmp_path: Path) -> None:
    pixels = bytes_of(10, 1, 8)
    picture = read(draw_condensed(normalised(pixels, GREY), range(10), tmp_path / "a.png", **GREY))
    at = np.array([only_place(picture, enlarged(image, 9)) for image in pixels])
    assert (at[:5, 1] == at[0, 1]).all()
    assert (at[5:, 1] == at[5, 1]).all()
    assert at[5, 1] > at[0, 1] + 72
    assert (at[:5, 0] == at[5:, 0]).all()
    assert (np.diff(at[:5, 0]) == 75).all()


def shown_images(picture: np.ndarray, pixels: np.ndarray, scale: int) -> list[int]:
    return [i for i, image in enumerate(pixels) if places(picture, enlarged(image, scale))]


@pytest.mark.slow
def test_of_many_classes_and_images_the_first_are_shown_with_a_note(tmp_path: Path) -> None:
    pixels = bytes_of(100, 1, 8)
    images, labels = normalised(pixels, GREY), np.repeat(np.arange(50), 2)
    cut = read(draw_condensed(images, labels, tmp_path / "cut.png", max_columns=1, **GREY))
    assert shown_images(cut, pixels, 9) == list(range(0, 40, 2))
    whole = read(draw_condensed(images, labels, tmp_path / "whole.png", **GREY))
    assert shown_images(whole, pixels[::9], 9) == list(range(12))
    few = read(draw_condensed(images[:4], labels[:4], tmp_path / "few.png", **GREY))
    for picture, noted in ((cut, True), (few, False)):
        below = np.flatnonzero((picture != 255).any(axis=1)).max()
        last = max(
            y for image in pixels[[0, 2, 38]] for y, _ in places(picture, enlarged(image, 9))
        )
        assert (below > last + 72) == noted


def ink(picture: np.ndarray) -> int:
    return int((picture < 200).sum())


def test_title_and_names_are_written(tmp_path: Path) -> None:
    white = np.full((2, 1, 8, 8), 50.0)
    plain = read(draw_condensed(white, [0, 1], tmp_path / "a.png", **GREY))
    named = read(
        draw_condensed(white, [0, 1], tmp_path / "b.png", class_names=["cat", "dog"], **GREY)
    )
    mapped = draw_condensed(
        white, [0, 1], tmp_path / "c.png", class_names={1: "dog", 0: "cat"}, **GREY
    )
    titled = read(draw_condensed(white, [0, 1], tmp_path / "d.png", title="made at night", **GREY))
    assert 0 < ink(plain) < ink(named)
    assert (read(mapped) == named).all()
    assert (titled[: plain.shape[0] - 20, : plain.shape[1] - 20] == plain[:-20, :-20]).all()
    assert ink(titled) > 2 * ink(plain)
    long = read(draw_condensed(white, [0, 1], tmp_path / "e.png", title="word " * 60, **GREY))
    assert long.shape[1] < 500


def test_the_strip_has_a_row_a_class_and_a_column_a_moment(tmp_path: Path) -> None:
    moments = [bytes_of(4, 3, 16, seed) for seed in range(3)]
    frames = [(f"round {i}", normalised(pixels, COLOUR)) for i, pixels in enumerate(moments)]
    picture = read(draw_condensed_strip(frames, [2, 1, 2, 1], tmp_path / "a", **COLOUR))
    at = np.array([[only_place(picture, enlarged(m[i], 5)) for m in moments] for i in (1, 0)])
    assert (at[:, :, 0] == at[:, :1, 0]).all()
    assert (at[:, :, 1] == at[:1, :, 1]).all()
    assert at[1, 0, 0] - at[0, 0, 0] == 83
    assert len(set(np.diff(at[0, :, 1]))) == 1
    heads = picture[: at[0, 0, 0]]
    for x in at[0, :, 1]:
        assert (heads[:, x : x + 80] < 200).any()
    assert not places(picture, enlarged(moments[0][2], 5))
    both = read(draw_condensed_strip(frames, [2, 1, 2, 1], tmp_path / "b", per_class=2, **COLOUR))
    rows = [only_place(both, enlarged(moments[0][i], 5))[0] for i in (1, 3, 0, 2)]
    assert np.diff(rows).tolist() == [83, 92, 83]


@pytest.mark.parametrize(
    ("count", "most", "expected"),
    [(41, 12, [0, 4, 7, 11, 15, 18, 22, 25, 29, 33, 36, 40]), (5, 2, [0, 4]), (1, 12, [0])],
)
def test_moments_are_chosen_evenly_with_first_and_last(
    tmp_path: Path, count: int, most: int, expected: list[int]
) -> None:
    moments = np.concatenate([bytes_of(1, 1, 8, seed) for seed in range(count)])
    frames = [(str(i), normalised(moments[i : i + 1], GREY)) for i in range(count)]
    path = draw_condensed_strip(frames, [0], tmp_path / "a.png", max_columns=most, **GREY)
    assert shown_images(read(path), moments, 9) == expected


def test_the_strip_shows_at_most_twenty_rows(tmp_path: Path) -> None:
    pixels = bytes_of(90, 1, 8)
    frames = [("start", normalised(pixels, GREY))]
    labels = np.repeat(np.arange(30), 3)
    path = draw_condensed_strip(frames, labels, tmp_path / "a.png", per_class=3, **GREY)
    assert shown_images(read(path), pixels, 9) == list(range(18))


def gif_frames(path: Path) -> tuple[list[np.ndarray], list[int]]:
    pictures, durations = [], []
    with Image.open(path) as gif:
        assert gif.info["loop"] == 0
        for number in range(gif.n_frames):  # type: ignore[attr-defined]
            gif.seek(number)
            pictures.append(np.asarray(gif.convert("RGB")).astype(int))
            durations.append(int(gif.info["duration"]))
    return pictures, durations


def test_the_animation_shows_every_frame_and_rests_on_the_last(tmp_path: Path) -> None:
    moments = [bytes_of(4, 1, 8, seed) for seed in range(5)]
    frames = [(f"round {i}", normalised(pixels, GREY)) for i, pixels in enumerate(moments)]
    path = animate_condensed(
        frames, [0, 0, 1, 1], tmp_path / "a.gif", frame_ms=250, last_ms=1500, title="grown", **GREY
    )
    pictures, durations = gif_frames(path)
    assert durations == [250] * 4 + [1500]
    assert len({picture.shape for picture in pictures}) == 1
    for picture, pixels in zip(pictures, moments, strict=True):
        assert (picture[..., 0] == picture[..., 2]).all()
        # 64 greys are 255 / 63 apart: each value is at most 2.03 from one, which is rounded.
        at = [places(picture[..., 0], enlarged(image, 5), off=2) for image in pixels]
        assert [len(found) for found in at] == [1, 1, 1, 1]
        assert at[1][0] == (at[0][0][0], at[0][0][1] + 43)
        assert at[2][0] == (at[0][0][0] + 43, at[0][0][1])
        assert picture[0, 0].tolist() == picture[-1, -1].tolist() == [255, 255, 255]
    heads = {picture[:40].tobytes() for picture in pictures}
    assert len(heads) == 5


def test_a_colour_animation_keeps_its_colours(tmp_path: Path) -> None:
    pure = np.zeros((4, 3, 8, 8), dtype=int)
    for i, colour in enumerate([(255, 0, 0), (0, 160, 0), (0, 0, 255), (200, 200, 0)]):
        pure[i] = np.array(colour)[:, None, None]
    frames = [(str(k), normalised(np.roll(pure, k, axis=0), COLOUR)) for k in range(2)]
    pictures, _ = gif_frames(animate_condensed(frames, range(4), tmp_path / "a", **COLOUR))
    for k, picture in enumerate(pictures):
        at = [only_place(picture, enlarged(image, 5)) for image in np.roll(pure, k, axis=0)]
        assert at[0][1] == at[1][1]
        assert (picture[:10] == 255).all()


@pytest.mark.slow
def test_an_animation_of_noise_stays_small_and_keeps_its_ends(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    frames = [(f"round {i}", rng.standard_normal((20, 3, 16, 16))) for i in range(30)]
    labels = np.repeat(np.arange(5), 4)
    large = animate_condensed(frames, labels, tmp_path / "large.gif", max_bytes=10**9, **COLOUR)
    small = animate_condensed(frames, labels, tmp_path / "small.gif", max_bytes=125_000, **COLOUR)
    assert len(gif_frames(large)[1]) == 16
    assert small.stat().st_size <= 125_000 < large.stat().st_size
    ends = animate_condensed(
        [frames[0], frames[-1]], labels, tmp_path / "ends.gif", max_bytes=1, **COLOUR
    )
    pictures, expected = gif_frames(small)[0], gif_frames(ends)[0]
    assert 2 < len(pictures) < 16
    for place, other in ((0, -1), (-1, 0)):
        assert pictures[place].shape == expected[place].shape
        # The palettes differ, the images do not.
        off = [abs(pictures[place] - expected[end]).mean() for end in (place, other)]
        assert 2.5 * off[0] < off[1]


IMAGES = np.zeros((2, 1, 8, 8), dtype=np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": IMAGES[0]}, r"images must have shape \[N, C, H, W\] .* got \[1, 8, 8\]"),
        ({"images": np.zeros((2, 2, 8, 8))}, r"C = 1 or 3, got \[2, 2, 8, 8\]"),
        ({"images": np.zeros((0, 1, 8, 8)), "labels": []}, r"got \[0, 1, 8, 8\]"),
        ({"images": IMAGES.astype(complex)}, "must hold real numbers, got dtype complex128"),
        ({"images": [[1], [1, 2]]}, "images must be an array of numbers"),
        ({"images": np.stack([IMAGES[0], IMAGES[0] + np.nan])}, r"images\[1\] holds a value"),
        ({"labels": [0]}, r"labels must be 2 integers >= 0, one an image, got int64 \[1\]"),
        ({"labels": [0.0, 1.0]}, "got float64"),
        ({"labels": [0, -1]}, "labels must be 2 integers >= 0"),
        ({"mean": (0.1, 0.2)}, r"mean=\(0.1, 0.2\) must have 1 values"),
        ({"std": 0.3}, "std=0.3 must have 1 values"),
        ({"std": (0.0,)}, "std=0.0 must be > 0"),
        ({"max_columns": 0}, "max_columns=0 must be >= 1"),
        ({"class_names": ["one"]}, "class_names has 1 names .* labels 0 to 1"),
        ({"class_names": "ab"}, "class_names='ab' must be a list"),
        ({"path": "picture.jpg"}, r"path='.*picture\.jpg' must end in \.png or have no ending"),
    ],
)
def test_wrong_input_is_refused_and_nothing_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    given = {"images": IMAGES, "labels": [0, 1], "path": "a.png", **GREY, **changes}
    images, labels, name = (given.pop(key) for key in ("images", "labels", "path"))
    with pytest.raises(InvalidValueError, match=message):
        draw_condensed(images, labels, tmp_path / name, **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("draw", [draw_condensed_strip, animate_condensed])
@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "frames must be a list of at least one"),
        (IMAGES, "frames must be a list"),
        ([IMAGES[0]], r"frames\[0\] must be \(label, images\)"),
        ([("a", IMAGES), ("b", IMAGES[:, :, :4])], r"frames\[1\] has shape \[2, 1, 4, 8\]"),
        ([("a", IMAGES), ("b", IMAGES[0])], r"frames\[1\] must have shape \[N, C, H, W\]"),
    ],
)
def test_wrong_frames_are_refused(tmp_path: Path, draw: Any, frames: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        draw(frames, [0, 1], tmp_path / "a", **GREY)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("draw", "option", "message"),
    [
        (draw_condensed_strip, {"per_class": 0}, "per_class=0 must be >= 1"),
        (draw_condensed_strip, {"max_columns": 1}, "max_columns=1 must be >= 2"),
        (animate_condensed, {"frame_ms": 5}, "frame_ms=5 must be >= 20"),
        (animate_condensed, {"max_frames": 1}, "max_frames=1 must be >= 2"),
        (animate_condensed, {"max_bytes": 0}, "max_bytes=0 must be >= 1"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, draw: Any, option: dict[str, int], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        draw([("a", IMAGES)], [0, 1], tmp_path / "a", **GREY, **option)
    assert not list(tmp_path.iterdir())


def test_endings_and_folders_are_made(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "dir"
    png = draw_condensed(IMAGES, [0, 1], folder / "grid", **GREY)
    gif = animate_condensed([("a", IMAGES)], [0, 1], str(folder / "grown"), **GREY)
    assert (png, gif) == (folder / "grid.png", folder / "grown.gif")
    assert sorted(item.name for item in folder.iterdir()) == ["grid.png", "grown.gif"]
    assert len(gif_frames(gif)[0]) == 1


def test_a_full_disk_leaves_the_old_picture_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.png"
    path.write_text("old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write '.*a\.png': the disk is full"):
        draw_condensed(IMAGES, [0, 1], path, **GREY)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.png"]


def test_a_reader_of_the_old_picture_never_sees_half_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_text("old")
    with path.open() as reader:
        draw_condensed(IMAGES, [0, 1], path, **GREY)
        assert reader.read() == "old"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_same_images_give_the_same_file(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).standard_normal((4, 3, 8, 8))
    first, second = (
        draw_condensed(noise, [0, 0, 1, 1], tmp_path / f"{name}.png", **COLOUR).read_bytes()
        for name in "ab"
    )
    assert first == second
