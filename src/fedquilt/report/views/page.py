"""Several runs as one page: with their images and, for the owner, what clients hold.

The released model is looked at again, accuracy by class and of the slices that tiers hold: on test
data, which no client holds, so this costs no privacy.  Where a claiming run withholds what it
measured on them, because people who are clients made them, only the owner sees it here too.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedquilt._version import __version__
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.config import MODE_TABLE, RunConfig
from fedquilt.config.modes import Claim
from fedquilt.data import DATASETS, ImageDataset, load_dataset
from fedquilt.data.holdings import salted_digest
from fedquilt.federation import CLIENTS_TESTED
from fedquilt.observe.progress import StepsProgress
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import CUSTOM, RunResult, load
from fedquilt.report.tables import tier_scores
from fedquilt.report.views.claim import together_view
from fedquilt.report.views.run import run_view
from fedquilt.setup.build_task import build_task

if TYPE_CHECKING:
    import torch
    from torch import nn

SCHEMA_VERSION = 1
NESTED = ("heterofl", "fjord")
"""Methods in which a narrow client's slice is the front part of everybody's model."""
_BATCH = 1024
_SWEEP = "sweep.json"
MOST_FRAMES = 24
_MOST_A_CLASS = 10
_MOST_BEFORE = 20
"""Of runs beside one that are not shown, so many are looked at for what it may go on from."""
_GAP = 1
_INSIDE = ("*/config.toml", "points/*/*/config.toml")
"""Where runs lie in a folder of runs, and in that of a sweep."""


def runs_inside(path: Path) -> list[Path]:
    """Return the run folders in a folder of runs or of a sweep, none where it is no such.

    Of a folder that holds no run but comparisons and sweeps it is the runs of those.
    """
    own, below = (
        sorted(found.parent for pattern in _INSIDE for found in path.glob(above + pattern))
        for above in ("", "*/")
    )
    return own or below


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
    paths: Sequence[str | Path], *, private: bool = False, look: bool = True, shown: bool = False
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
    shown
        Show how far the work is, where there are several runs.
    """
    folders = find_runs(paths)
    runs = read_runs(folders, lambda path: _one(path, private, look), "report: run", shown=shown)
    together = together_view(runs, sweeps_of(folders))
    return {**empty_view(private=private), "runs": runs, "together": together}


def read_runs(
    folders: Sequence[Path], read: Callable[[Path], dict[str, Any]], what: str, *, shown: bool
) -> list[dict[str, Any]]:
    """Return what `read` makes of each run, with what tells it from the others."""
    runs = []
    with StepsProgress(what, len(folders), shown=shown and len(folders) > 1) as steps:
        for path, own in zip(folders, digests_of(folders), strict=True):
            steps.begin(path.name)
            runs.append(read(path) | own)
            steps.end()
    return runs


def digests_of(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return which runs have equal parts, data and ledgers, and which go on from which.

    The digests are the owner's: this says which are equal, and not what they are.  Under a claim
    not even that of who holds which samples: it would say whether somebody's have changed.
    `unseen`: one goes on from a run that lies beside it and is not among these.
    """
    opened = [RunFolder.open(path) for path in folders]
    found: list[dict[str, Any]] = [
        {**folder.digests(), "account": _account(folder), "ends": ""} for folder in opened
    ]
    configs = [folder.read_config() for folder in opened]
    for own, config in zip(found, configs, strict=True):
        if config.dataset == CUSTOM and MODE_TABLE[config.mode].claim is not Claim.NOTHING:
            own["data"] = ""
    if any(config.model == CUSTOM for config in configs):  # others begin anew
        for own, folder in zip(found, opened, strict=True):
            own["ends"] = _last_weights(folder)
        shown, ends = {path.resolve() for path in folders}, {own["ends"] for own in found}
        for own, folder in zip(found, opened, strict=True):
            if folder.read_config().model == CUSTOM and own["begins"] not in ends:
                own["unseen"] = _goes_on_from_beside(folder, own, shown)
    for keys in (("held",), ("data",), ("account",), ("begins", "ends")):
        places = sorted({own[key] for own in found for key in keys} - {""})
        for own in found:
            own |= {key: str(places.index(own[key])) if own[key] else "" for key in keys}
    return found


def _account(folder: RunFolder) -> str:
    """Return where the ledger of a run lies."""
    try:
        account = folder.read_account()
    except (FedquiltError, OSError):  # the owner's alone, and somebody else looks
        return ""
    return "" if account is None else str(Path(account["ledger"]).resolve())


def _goes_on_from_beside(folder: RunFolder, own: Mapping[str, str], shown: set[Path]) -> bool:
    """Tell whether a run goes on from one of the newest before it that lie beside it.

    Where one ledger counts both, nobody has to be told.
    """
    place = folder.path.resolve()
    began = (place / "config.toml").stat().st_mtime
    done = [path / "result.json" for path in runs_inside(place.parent) if path not in shown]
    before = [path for path in done if path.exists() and path.stat().st_mtime <= began]
    for path in sorted(before, key=lambda path: path.stat().st_mtime)[: -_MOST_BEFORE - 1 : -1]:
        with contextlib.suppress(FedquiltError, OSError):
            earlier = RunFolder.open(path.parent)
            counted = own["account"] and _account(earlier) == own["account"]
            if not counted and _last_weights(earlier) == own["begins"]:
                return True
    return False


def _last_weights(folder: RunFolder) -> str:
    """Return the digest of the weights that a finished run ended with."""
    if not (folder.path / "result.json").exists():
        return ""
    saved = folder.load_checkpoint()
    return "" if saved is None else salted_digest(saved.model, b"")


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
    view["look"] = class_accuracy_view(path, private) if look and view["finished"] else None
    view["holdings"] = holdings_view(folder.read_config()) if private else None
    view["measured"] = measured_view(folder) if private else None
    view["baselines"] = (folder.read_baselines() or None) if private else None
    view["attacks"] = (folder.read_attacks() or None) if private else None
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


def class_accuracy_view(path: Path, private: bool) -> dict[str, Any] | None:
    """Return what a look at a finished run's model shows, None where there is nothing to see.

    Data that are not on this machine are not fetched for it.
    """
    try:
        done = load(path)
        settings = done.result["metadata"]["hyperparameters"]
        if done.model is None or settings.get("dataset") not in DATASETS:
            return None
        statement = done.statement
        withheld = statement.is_bounded and set(CLIENTS_TESTED) <= set(statement.uncovered)
        if withheld and not private:
            return None
        _, test = load_dataset(settings["dataset"], settings.get("data_dir"), download=False)
        return _look(done, test)
    except (FedquiltError, OSError) as error:
        return {"missing": str(error)}


def _look(done: RunResult, test: ImageDataset) -> dict[str, Any]:
    import torch

    assert done.model is not None
    with torch.no_grad():
        right = _right(done.model, test)
        classes = [
            {
                "label": label,
                "samples": int((test.targets == label).sum()),
                "accuracy": round(float(right[test.targets == label].float().mean()), 4),
            }
            for label in range(test.num_classes)
            if bool((test.targets == label).any())
        ]
        return {"classes": classes, "tiers": _tiers(done, test)}


def _right(model: nn.Module, test: ImageDataset) -> torch.Tensor:
    import torch

    model.eval()
    answers = [model(batch).argmax(dim=1) for batch in torch.split(test.images, _BATCH)]
    return torch.cat(answers) == test.targets


def _tiers(done: RunResult, test: ImageDataset) -> dict[str, float]:
    """Return the accuracy of each width: as recorded or, of older runs, of nested slices."""
    record = done.result.get("slices") or {}
    if any("test" in tier for tier in record.get("tiers", ())):
        return {width: round(score, 4) for width, score in tier_scores(record).items()}
    if record.get("method") not in NESTED or done.model is None:
        return {}
    sample, method = test.images[:2], record["method"]
    cut = {str(t["width"]): _slice(done.model, method, t["width"], sample) for t in record["tiers"]}
    return {w: round(float(_right(part, test).float().mean()), 4) for w, part in cut.items()}


def _slice(model: nn.Module, method: str, width: str, sample: torch.Tensor) -> nn.Module:
    from fedquilt.slices import slice_model

    return slice_model(model, width, sample=sample, scaled=method == "heterofl")
