"""Compressed updates in a simulation: formats against numpy, error feedback, bytes, the claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedquilt.common.errors import InvalidValueError
from fedquilt.config import build_config
from fedquilt.config.choices import COMPRESSIONS
from fedquilt.experiment import loop
from fedquilt.experiment.api import resume_run, run_config, run_in_memory
from fedquilt.setup.build_task import build_task
from fedquilt.training.compression import (
    ERROR_FEEDBACK,
    CompressedEngine,
    UnreadableError,
    bounded,
    compress,
    decompress,
    sent_bytes,
)
from fedquilt.training.task import ClientUpdate, Engine

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "model": "linear",
    "mode": "fedavg",
    "num_clients": 6,
    "clients_per_round": 4,
    "availability": "always",
    "num_rounds": 4,
    "local_epochs": 1,
    "eval_every": 4,
}
NAMES = [name for name in COMPRESSIONS if name != "none"]


def vector(size: int = 1001) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


def by_numpy(name: str, x: np.ndarray[Any, Any], arrays: Any, share: float) -> Any:
    """What the server must read, from the papers."""
    count = max(1, round(share * len(x)))
    largest = np.sort(np.argsort(-np.abs(x), kind="stable")[:count])
    if name == "sign":
        return np.where(x < 0, -1.0, 1.0) * np.abs(x).mean()
    if name == "topk":
        return np.where(np.isin(np.arange(len(x)), largest), x, 0)
    if name == "ternary":
        size = np.abs(x[largest]).mean()
        return np.where(np.isin(np.arange(len(x)), largest), np.sign(x) * size, 0)
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["sign", "topk", "ternary"])
@pytest.mark.parametrize("size", [1, 7, 1001])
def test_what_is_read_is_what_the_paper_says(name: str, size: int) -> None:
    x = vector(size)
    arrays, read = compress(name, x, 3, 0.1)
    assert np.allclose(read.numpy(), by_numpy(name, x.numpy(), arrays, 0.1), rtol=1e-6)


def test_random_k_sends_as_many_entries_as_they_are_and_other_ones_each_time() -> None:
    x = vector()
    reads = [compress("randomk", x, seed, 0.1)[1] for seed in (1, 2)]
    for read in reads:
        assert int((read != 0).sum()) == 100
        assert torch.equal(read[read != 0], x[read != 0])
    assert not torch.equal(*reads)


def test_qsgd_is_unbiased_has_seven_levels_and_at_most_one_level_of_error() -> None:
    x = vector()
    reads = torch.stack([compress("qsgd", x, seed)[1] for seed in range(2000)])
    norms = torch.cat([part.norm().expand(len(part)) for part in x.split(512)])
    assert bool(((reads - x).abs() <= norms / 7 * (1 + 1e-5)).all())
    levels = reads[0] / norms * 7
    assert torch.allclose(levels, levels.round(), atol=1e-4)
    off = (reads.mean(0) - x).abs() / (norms / 7)
    assert float(off.max()) < 0.06  # five deviations of a coin's mean: 0.5 / sqrt(2000) * 5


@pytest.mark.parametrize(
    ("name", "each"),
    [("bf16", 2), ("int8", 1), ("qsgd", 0.5), ("sign", 1 / 8), ("topk", 0.8), ("randomk", 0.4)],
)
def test_bytes_follow_from_the_shape_alone(name: str, each: float) -> None:
    size = 51_200
    assert sent_bytes(name, size, 0.1) == pytest.approx(each * size, rel=0.02)
    for x in (vector(size), torch.zeros(size), torch.full((size,), float("nan"))):
        arrays, _ = compress(name, x, 9, 0.1)
        assert sum(array.nbytes for array in arrays.values()) == sent_bytes(name, size, 0.1)


@pytest.mark.parametrize("name", NAMES)
def test_a_vector_that_is_no_number_is_none_when_it_is_read(name: str) -> None:
    x = vector(64)
    x[5] = float("nan")
    read = compress(name, x, 3, 1.0)[1]
    assert not bool(read.isfinite().all())


@pytest.mark.parametrize("name", NAMES)
def test_a_site_can_shorten_what_is_compressed(name: str) -> None:
    arrays, read = compress(name, vector(), 3, 0.1)
    limit = float(read.norm()) / 3
    short = decompress(name, bounded(name, arrays, 1001, limit), 1001, torch.float64)
    assert 0.98 * limit <= float(short.norm()) <= limit
    assert float(short @ read.double()) > 0.98 * limit * float(read.norm())


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("randomk", "seed", np.asarray([-1], np.int32)),
        ("randomk", "value", np.zeros(1002, np.float32)),
        ("sign", "sign", np.zeros(3, np.int8)),
        ("qsgd", "scale", np.zeros(1, np.float32)),
        ("ternary", "index", np.asarray([5, 4], np.int32)),
    ],
)
def test_arrays_that_no_client_makes_are_refused(name: str, key: str, value: Any) -> None:
    arrays, _ = compress(name, vector(), 3, 0.1)
    with pytest.raises(UnreadableError):
        decompress(name, {**arrays, key: value}, 1001, torch.float32)


class Steady(Engine):
    """Every client sends the same vector in every round."""

    def train(self, start: Any, cohort: Any, *rest: Any) -> Any:
        for client in cohort:
            yield ClientUpdate(int(client), vector(300) * (1 + client), 5, 0.1)


@pytest.mark.parametrize("name", ERROR_FEEDBACK)
def test_what_is_left_out_is_sent_later(name: str) -> None:
    engine = CompressedEngine(Steady(), name, 0.1, 2, torch.ones(300, dtype=torch.bool), seed=4)
    total = torch.zeros(2, 300)
    for index in range(40):
        for update in engine.train(torch.zeros(300), [0, 1], index, 0.1):
            total[update.client] += update.delta
    assert engine.kept is not None
    for client in (0, 1):
        kept = engine.kept.get(client)
        assert kept is not None
        whole = 40 * vector(300) * (1 + client)
        assert torch.allclose(total[client] + kept, whole, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_records_its_bytes_and_learns(name: str) -> None:
    longer = {**SMALL, "num_rounds": 8, "learning_rate": 0.2, "eval_every": 8}
    done = run_in_memory(build_config({**longer, "compression": name}))
    size = sum(p.numel() for p in done.model.parameters())  # type: ignore[union-attr]
    history = done.result["history"]
    assert history["bytes_up"] == [4 * sent_bytes(name, size, 0.1)] * 8
    assert history["bytes_down"] == [4 * 4 * size] * 8
    assert done.metrics["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("changes", "up", "down"),
    [
        ({"correction": "scaffold"}, lambda n, head: 8 * n, lambda n, head: 8 * n),
        ({"correction": "fednova"}, lambda n, head: 4 * (n + 1), lambda n, head: 4 * n),
        ({"correction": "feddyn"}, lambda n, head: 4 * n, lambda n, head: 4 * n),
        ({"personal": "ditto"}, lambda n, head: 4 * n, lambda n, head: 4 * n),
        ({"personal": "fedper"}, lambda n, head: 4 * (n - head), lambda n, head: 4 * (n - head)),
        (
            {"personal": "fedper", "compression": "topk"},
            lambda n, head: sent_bytes("topk", n - head, 0.1),
            lambda n, head: 4 * (n - head),
        ),
    ],
    ids=["scaffold", "fednova", "feddyn", "ditto", "fedper", "fedper, topk"],
)
def test_bytes_are_those_of_what_travels(changes: dict[str, Any], up: Any, down: Any) -> None:
    shared = {**SMALL, "mode": "fedavg", "model": "mlp", "num_rounds": 1}
    done = run_in_memory(build_config({**shared, **changes}))
    assert done.model is not None
    sizes = [p.numel() for p in done.model.parameters()]
    size, head, history = sum(sizes), sum(sizes[-2:]), done.result["history"]
    assert history["bytes_up"] == [4 * up(size, head)]
    assert history["bytes_down"] == [4 * down(size, head)]


def test_what_stays_with_clients_is_no_part_of_the_mean_size_of_signs() -> None:
    sent = torch.arange(300) < 200
    engine = CompressedEngine(Steady(), "sign", 0.1, 1, sent, seed=4)
    (update,) = engine.train(torch.zeros(300), [0], 0, 0.1)
    assert not update.delta[~sent].any()
    mean = float(vector(300)[sent].abs().mean())
    torch.testing.assert_close(update.delta[sent].abs(), torch.full((200,), mean))


def test_a_resumed_run_goes_on_with_its_residuals_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    config = build_config({**SMALL, "compression": "topk", "output_dir": str(tmp_path)})
    whole, real = run_in_memory(config), loop.Experiment.run_round

    def dies(self: Any, index: int) -> Any:
        if index == 2:
            raise KeyboardInterrupt
        return real(self, index)

    monkeypatch.setattr(loop.Experiment, "run_round", dies)
    with pytest.raises(KeyboardInterrupt):
        run_config(config)
    monkeypatch.setattr(loop.Experiment, "run_round", real)
    (folder,) = tmp_path.iterdir()
    again = resume_run(folder)
    for name, tensor in whole.model.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(again.model.state_dict()[name], tensor)  # type: ignore[union-attr]


def test_sign_with_majority_moves_every_coordinate_by_the_servers_rate() -> None:
    settings = {**SMALL, "num_rounds": 1, "eval_every": 1, "compression": "sign"}
    settings |= {"aggregation": "majority", "server_lr": 0.01}
    _, problem = build_task(build_config(settings))
    before = problem.flat.read().clone()
    voted = run_in_memory(build_config(settings))
    assert voted.model is not None
    after = torch.cat([parameter.detach().flatten() for parameter in voted.model.parameters()])
    assert {round(step, 4) for step in (after - before).tolist()} <= {-0.01, 0.0, 0.01}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "heterofl"}, "fixed places"),
        ({"mode": "fedavg", "correction": "scaffold"}, "what clients computed"),
        ({"mode": "certified", "secure_aggregation": "simulated"}, "masks take all"),
    ],
)
def test_what_a_compression_does_not_survive_is_refused(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        build_config({**settings, "compression": "topk"})


def test_a_majority_needs_a_step() -> None:
    with pytest.raises(InvalidValueError, match="server_lr"):
        build_config({"mode": "fedavg", "aggregation": "majority"})
