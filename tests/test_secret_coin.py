"""Whatever falls of the secret coin, nobody who watches a run can tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from certified_samples import memory_folder
from fedquilt import population
from fedquilt.common.observer import Observer
from fedquilt.condense import method
from fedquilt.condense.certified import GrowingSettings
from fedquilt.config import RunConfig, build_config
from fedquilt.data import load_condensed
from fedquilt.experiment.api import run_config
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.mechanism import NoiseReport, RoundPlan, RoundTally, Summed
from fedquilt.record.folder import RunFolder
from fedquilt.setup import mechanism as assemble_mechanism

COIN: dict[str, Any] = {
    "dataset": "digits",
    "mode": "certified",
    "num_clients": 6,
    "clients_per_round": 3,
    "availability": "always",
    "selection": "poisson",
    "amplification": True,
    "policy": "worst_case",
}
TRAINED = {"model": "linear", "num_rounds": 3, "local_epochs": 1, "eval_every": 1}
CONDENSED = {
    "method": "condense",
    "num_rounds": 3,
    "mean_rounds": 1,
    "eval_every": 1,
    "ipc": 1,
    "synthetic_images": 40,
    "model_epochs": 2,
}
# Who is kept in each round: nobody, one, some, all.
WORLDS = (
    [[1.0] * 6] * 3,
    [[0.0, 1, 1, 1, 1, 1], [1.0] * 6, [1.0, 1, 1, 1, 1, 0]],
    [[0.0, 0, 0, 1, 1, 1], [1.0, 1, 1, 1, 0, 0], [0.0, 1, 0, 1, 0, 1]],
    [[0.0] * 6] * 3,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither calibration nor beautiful images matter here."""
    monkeypatch.setattr(assemble_mechanism, "calibrate", lambda *given, **options: 1.5)
    monkeypatch.setattr(method, "GrowingSettings", lambda: GrowingSettings(steps=2))


class Watching(Observer):
    """An observer that keeps everything it is given, in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, config: RunConfig, line: dict[str, Any]) -> None:
        self.seen.append(("line", config, json.dumps(line)))

    def opened(self, config: RunConfig, folder: Path) -> None:
        self.seen.append(("opened", config))

    def working(self, what: str, share: float) -> None:
        self.seen.append(("working", what, share))

    def on_artifact(self, path: Path) -> None:
        self.seen.append(("kept", path.name))


def same_release(
    self: Certified, plan: RoundPlan, summed: Summed, tally: RoundTally
) -> tuple[torch.Tensor, NoiseReport]:
    """Release the same whatever was sent: what then differs is told by another way."""
    size = summed.total.numel()
    drawn = torch.from_numpy(np.random.default_rng(size).normal(size=size))
    share = tally.clipped / max(summed.weight, 1.0)
    return drawn, NoiseReport(None, 1.0, 1.0, float(summed.total.norm()), share)


def watch(
    monkeypatch: pytest.MonkeyPatch, world: list[list[float]], config: RunConfig
) -> tuple[list[Any], str, dict[str, Any], dict[str, bytes]]:
    """Run in one world; return what an observer saw and what the public files say."""
    coins = iter(world)

    def fallen(size: int) -> NDArray[np.float64]:
        assert size == 6
        return np.asarray(next(coins))

    monkeypatch.setattr(population, "secret_coins", fallen)
    watching = Watching()
    done = run_config(config, watching)
    assert done.folder is not None
    rounds = (done.folder / "rounds.jsonl").read_text()
    result = json.loads((done.folder / "result.json").read_text())
    result["metadata"].pop("timestamp")
    for name in ("run_id", "head", "ledger"):
        result["ledger"].pop(name)
    return watching.seen, rounds, result, kept_files(done.folder)


def kept_files(folder: Path) -> dict[str, bytes]:
    """Return the names of all files; of images, weights and state also the bytes."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    files = {str(path.relative_to(folder)): b"" for path in paths}
    for path in paths:
        if path.suffix == ".safetensors" and path.stem != "checkpoint":
            files[str(path.relative_to(folder))] = load_condensed(path).images.numpy().tobytes()
    saved = RunFolder.open(folder).load_checkpoint()
    assert saved is not None
    tensors = {name: tensor.numpy() for name, tensor in saved.model.items()}
    for name, array in {**tensors, **saved.state}.items():
        files[f"checkpoint: {name}"] = np.asarray(array).tobytes()
    return files


@pytest.mark.parametrize("settings", [TRAINED, CONDENSED], ids=["training", "condensation"])
def test_what_is_seen_does_not_depend_on_the_coin(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(Certified, "release", same_release)
    with memory_folder() as folder:
        config = build_config({**COIN, **settings, "output_dir": str(folder)})
        seen = [watch(monkeypatch, world, config) for world in WORLDS]
    lines = [entry for entry in seen[0][0] if entry[0] == "line"]
    assert len(lines) == 3
    for other in seen[1:]:
        assert other[0] == seen[0][0], "what an observer is given"
        assert other[1] == seen[0][1], "rounds.jsonl"
        assert other[2] == seen[0][2], "result.json"
        assert other[3] == seen[0][3], "files, images, checkpoint"


def test_a_condensation_still_tells_what_it_is_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_folder() as folder:
        config = build_config({**COIN, **CONDENSED, "output_dir": str(folder)})
        seen, *_ = watch(monkeypatch, WORLDS[2], config)
    shares = [entry[2] for entry in seen if entry[:2] == ("working", "looking")]
    assert shares == [0.0, 1.0] * 3
