"""Certified condensation: what is public of a client's data is what was charged, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from condense_samples import Linear, condense
from flwr.app import Context

import fedquilt
from certified_samples import refine_in_few_steps
from fedquilt.audit.cases import known_entropy
from fedquilt.common.errors import InvalidValueError
from fedquilt.data import load_dataset
from fedquilt.flower.client_registry import PlaceRegistry
from fedquilt.flower.node import client_app
from fedquilt.flower.server import run_on_grid
from fedquilt.flower.settings import FlowerSettings
from fedquilt.flower.simulate import InProcessGrid
from fedquilt.models.features import make_feature_model, precompute
from fedquilt.record.result import RunResult

COUNT, EACH = 4, 12
SETTINGS: dict[str, Any] = {
    "method": "condense",
    "mode": "certified",
    "num_rounds": 2,
    "mean_rounds": 1,
    "ipc": 1,
    "synthetic_images": 20,
    "model_epochs": 1,
    "epsilon": 6.0,
}
WORLDS = ("data", "nothing", "ignored label", "label out of range", "bytes", "not finite")


def held(world: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the victim's samples in a world."""
    train, _ = load_dataset("digits")
    x, y = train.images[:EACH].clone(), train.targets[:EACH].clone()
    if world == "nothing":
        return x[:0], y[:0]
    if world == "ignored label":
        y[5] = -100
    elif world == "label out of range":
        y[5] = 77
    elif world == "bytes":
        x = x.to(torch.int32)
    elif world == "not finite":
        x[3, 0, 2, 2] = torch.nan
    return x, y


def others(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    train, _ = load_dataset("digits")
    place = slice(client * EACH, (client + 1) * EACH)
    return train.images[place], train.targets[place]


def here(world: str, folder: Path) -> RunResult:
    _, test = load_dataset("digits")
    data = [held(world), *(others(client) for client in range(1, COUNT))]
    with known_entropy(5):
        return fedquilt.run(
            Linear(), data, (test.images[:40], test.targets[:40]), quiet=True,
            output_dir=str(folder), **SETTINGS,
        )  # fmt: skip


def on_nodes(world: str, folder: Path, compression: str) -> RunResult:
    def client_data(context: Context) -> Any:
        place = int(context.node_config["partition-id"])
        return held(world) if place == 0 else others(place)

    _, test = load_dataset("digits")
    grid = InProcessGrid(client_app(Linear, client_data), COUNT)
    how = FlowerSettings(poll=0.01, compression=compression)
    with known_entropy(5):
        return run_on_grid(
            grid, PlaceRegistry(grid, COUNT), Linear, (test.images[:40], test.targets[:40]),
            SETTINGS, how, client_ids=[f"client {k}" for k in range(COUNT)], output_dir=str(folder),
        )  # fmt: skip


def public_bytes(done: RunResult) -> list[Any]:
    assert done.folder is not None
    lines = [json.loads(line) for line in (done.folder / "rounds.jsonl").read_text().splitlines()]
    said = json.loads((done.folder / "result.json").read_text())["condensation"]
    return [*((line["bytes_up"], line["bytes_down"]) for line in lines), said["bytes_up"]]


def test_a_label_that_no_class_has_is_like_holding_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refine_in_few_steps(monkeypatch)
    nothing = here("nothing", tmp_path)
    for world in ("ignored label", "label out of range", "not finite"):
        done = here(world, tmp_path)
        assert done.statement.is_bounded
        for name, tensor in nothing.state_dict.items():
            assert torch.equal(done.state_dict[name], tensor)
        assert public_bytes(done) == public_bytes(nothing)
    data = here("data", tmp_path)
    assert not all(torch.equal(data.state_dict[n], t) for n, t in nothing.state_dict.items())


def test_without_a_claim_such_a_label_is_refused_in_words() -> None:
    with pytest.raises(InvalidValueError, match="-100 is below 0"):
        condense(train=held("ignored label"), clients=[range(6), range(6, EACH)])


@pytest.mark.parametrize(("compression", "worlds"), [("none", WORLDS), ("int8", WORLDS[:2])])
def test_bytes_on_flower_nodes_follow_from_what_was_asked_for(
    compression: str, worlds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refine_in_few_steps(monkeypatch)
    front = make_feature_model("hog-linear", (1, 8, 8), 10).front
    numbers = 10 * (precompute(front, held("data")[0][:1]).shape[1] + 1)
    each = 4 * numbers if compression == "none" else numbers + 4 * -(-numbers // 2048)
    for world in worlds:
        done = on_nodes(world, tmp_path, compression)
        up = [line[0] for line in public_bytes(done)[:-1]]
        assert up == [COUNT * each] * 2, world
        assert public_bytes(done)[-1] == 2 * COUNT * each


def test_the_node_of_a_client_that_holds_nothing_sends_as_much_as_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refine_in_few_steps(monkeypatch)
    sent = {}
    for world in ("data", "nothing"):
        folder = on_nodes(world, tmp_path, "none").folder
        assert folder is not None
        lines = [json.loads(line) for line in (folder / "nodes.jsonl").read_text().splitlines()]
        assert not any("refused" in line for line in lines)
        sent[world] = [line["bytes_up"] for line in lines if "bytes_up" in line]
    assert sent["data"] == sent["nothing"]
