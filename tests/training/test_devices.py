"""A cohort on several devices: here two processes on the CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedquilt.common.errors import InvalidValueError, NotReadyError, WorkerError
from fedquilt.config import RunConfig
from fedquilt.experiment.api import run_in_memory
from fedquilt.method import MethodParts
from fedquilt.models import DigitsModel
from fedquilt.training import FlatModel, LocalSettings, Task, make_engine
from fedquilt.training.engines import DevicesEngine, parse_devices
from fedquilt.training.engines.pool import end_workers
from run_samples import tiny

SIZES = [9, 4, 0, 1, 6, 7, 3, 8, 2, 5, 4, 4]
CPUS = [torch.device("cpu")] * 2


def make_task() -> Task:
    random = np.random.default_rng(0)
    count = sum(SIZES)
    inputs = torch.from_numpy(random.standard_normal((count, 1, 8, 8), dtype=np.float32))
    targets = torch.from_numpy(random.integers(0, 10, count))
    return Task(inputs, targets, np.split(np.arange(count), np.cumsum(SIZES)[:-1]))


HOW = LocalSettings(epochs=1, batch_size=4, fedprox_mu=0.0, seed=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[DevicesEngine]:
    torch.manual_seed(0)
    made = DevicesEngine(DigitsModel(), make_task(), HOW, CPUS)
    yield made
    made.close()


@pytest.mark.processes
def test_two_devices_train_as_one_does(engine: DevicesEngine) -> None:
    torch.manual_seed(0)
    model = DigitsModel()
    start = FlatModel(model).read().clone()
    alone = make_engine("sequential", model, make_task(), HOW)
    for round_index, cohort in enumerate([list(range(12)), [5, 2, 9], [3]]):
        wanted = list(alone.train(start, cohort, round_index, 0.1))
        got = list(engine.train(start, cohort, round_index, 0.1))
        assert [u.client for u in got] == cohort
        for ours, theirs in zip(got, wanted, strict=True):
            assert (ours.delta - theirs.delta).norm() <= 1e-5 * theirs.delta.norm()
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5, nan_ok=True)
            assert ours.num_examples == theirs.num_examples


@pytest.mark.processes
def test_an_error_on_a_device_is_raised_here_and_a_closed_engine_says_so() -> None:
    task = make_task()
    task.targets[task.clients[4][0]] = 77
    engine = DevicesEngine(DigitsModel(), task, HOW, CPUS)
    start = FlatModel(DigitsModel()).read().clone()
    with pytest.raises(WorkerError, match=r"training failed in the process of device cpu .*77"):
        list(engine.train(start, range(12), 0, 0.1))
    engine.close()
    with pytest.raises(NotReadyError, match="closed"):
        next(engine.train(start, [0], 0, 0.1))


@pytest.mark.processes
def test_a_run_on_two_devices_is_the_run_on_one() -> None:
    plain = run_in_memory(tiny(mode="fedavg", engine="sequential", num_rounds=2))
    shared = run_in_memory(tiny(mode="fedavg", devices="cpu,cpu", num_rounds=2))
    for name, tensor in plain.state_dict.items():
        assert torch.allclose(shared.state_dict[name], tensor, rtol=1e-5, atol=1e-7)


class Deaf:
    """A worker that notes what it is given and trains nothing."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.in_hand: list[int] = []

    def send(self, job: Any) -> None:
        self.given.append(job.clients)


def test_who_trains_where_follows_places_in_the_cohort_and_not_what_anybody_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = []
    for sizes in (SIZES, [*SIZES[:5], 60, *SIZES[6:]], [0, *SIZES[1:]]):
        inputs, targets = torch.zeros(sum(sizes), 1, 8, 8), torch.zeros(sum(sizes)).long()
        held = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        engine = DevicesEngine(DigitsModel(), Task(inputs, targets, held), HOW, CPUS)
        workers = [Deaf(), Deaf()]
        monkeypatch.setattr(engine._pool, "workers", workers)
        start = FlatModel(DigitsModel()).read().clone()
        with contextlib.suppress(StopIteration, ValueError):
            monkeypatch.setattr(engine, "_in_order", lambda *_: iter(()))
            next(engine.train(start, [7, 1, 5, 0, 9], 0, 0.1))
        shares.append([worker.given for worker in workers])
    assert shares == [[[[7, 5, 9]], [[1, 0]]]] * 3


def test_devices_of_several_kinds_are_refused_where_clients_are_protected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protected = replace(HOW, silent=True)

    def made(names: list[str], how: LocalSettings) -> DevicesEngine:
        devices = [torch.device(name) for name in names]
        return DevicesEngine(DigitsModel(), make_task(), how, devices)

    def properties(device: torch.device) -> SimpleNamespace:
        name = "NVIDIA A100" if device.index == 2 else "NVIDIA H200"
        cores, memory = 132, 2**37
        return SimpleNamespace(
            name=name, major=9, minor=0, multi_processor_count=cores, total_memory=memory
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    made(["cuda:0", "cuda:1"], protected).close()
    made(["cuda:0", "cpu"], HOW).close()
    for names, reason in ((["cuda:0", "cpu"], "H200.*cpu"), (["cuda:0", "cuda:2"], "A100.*H200")):
        with pytest.raises(InvalidValueError, match=f"devices=.*one kind.*{reason}"):
            made(names, protected)


@pytest.mark.parametrize("names", ["cpu,,cpu", "gpu", "meta", "cuda:99"])
def test_devices_that_are_none_are_refused(names: str) -> None:
    with pytest.raises(InvalidValueError, match="devices="):
        parse_devices(names)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"engine": "processes"}, "'auto' or 'batched'"), ({"method": "heterofl"}, "left out")],
)
def test_settings_that_devices_do_not_go_with(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        RunConfig(mode="fedavg", devices="cpu,cpu", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"loss_of": lambda model: None}, {"settings": HOW}])
def test_devices_do_not_drop_a_loss_or_steps_of_a_client(given: dict[str, Any]) -> None:
    model = FlatModel(DigitsModel())
    parts = MethodParts(tiny(engine="batched", devices="cpu,cpu"), model, make_task(), 10, False)
    with pytest.raises(InvalidValueError, match="must be left out where clients minimise a loss"):
        parts.own_engine(**given)


@pytest.mark.processes
def test_a_forked_copy_leaves_the_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the owner forks, as a pool does, must not end the owner's workers when it ends."""
    engine = DevicesEngine(DigitsModel(), make_task(), HOW, CPUS)
    start = FlatModel(DigitsModel()).read().clone()
    list(engine.train(start, [0, 1], 0, 0.1))
    began = [worker.process for worker in engine._pool.workers]
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        engine._pool.close()
    assert [process.is_alive() for process in began] == [True, True]
    end_workers(engine._pool.workers, os.getpid())
    assert [process.is_alive() for process in began] == [False, False]
