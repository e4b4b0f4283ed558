"""The engines agree with the sequential one, and each keeps its own promises."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedquilt.common.errors import WorkerError
from fedquilt.errors import InvalidValueError, NotReadyError
from fedquilt.models import MLP, DigitsModel
from fedquilt.training import make_engine
from fedquilt.training.engines import LocalEngine
from fedquilt.training.engines.workers import ProcessEngine
from fedquilt.training.flat import FlatModel
from fedquilt.training.task import ClientUpdate, Engine, LocalSettings, Task, client_seed
from fedquilt.training.trainers.autograd import epoch_batches
from fedquilt.training.trainers.vmap import VmapTrainer, why_not_stacked
from run_processes import environment

SIZES = (33, 1, 32, 70, 0, 64, 5)
COHORT = [3, 1, 6, 4, 0, 2, 5]
SHAPE = (1, 8, 8)


def make_task(sizes: tuple[int, ...] = SIZES, classes: int = 10) -> Task:
    random = torch.Generator().manual_seed(3)
    inputs = torch.randn(sum(sizes), *SHAPE, generator=random)
    targets = torch.randint(0, classes, (sum(sizes),), generator=random)
    order = np.random.default_rng(4).permutation(sum(sizes))
    return Task(inputs, targets, np.split(order, np.cumsum(sizes)[:-1]))


def seeded(build: type[nn.Module] | object, *arguments: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return build(*arguments)  # type: ignore[operator]


def settings(
    epochs: int = 2, batch_size: int = 32, mu: float = 0.0, seed: int = 9
) -> LocalSettings:
    return LocalSettings(epochs=epochs, batch_size=batch_size, fedprox_mu=mu, seed=seed)


def start_of(model: nn.Module) -> torch.Tensor:
    return FlatModel(model, make_task().inputs[:2]).read().clone()


def two_rounds(engine: Engine, start: torch.Tensor) -> list[ClientUpdate]:
    first = list(engine.train(start, COHORT, 0, 0.1))
    mean = torch.stack([update.delta for update in first]).mean(0)
    return first + list(engine.train(start + mean, np.array(COHORT), 1, 0.05))


def assert_agree(updates: list[ClientUpdate], reference: list[ClientUpdate]) -> None:
    assert [u.client for u in updates] == [u.client for u in reference]
    assert [u.num_examples for u in updates] == [u.num_examples for u in reference]
    for update, wanted in zip(updates, reference, strict=True):
        difference = (update.delta - wanted.delta).abs().max()
        assert difference <= 1e-5 * wanted.delta.norm()
        assert update.loss == pytest.approx(wanted.loss, rel=1e-5, nan_ok=True)


def by_hand(model: nn.Module, task: Task, how: LocalSettings, client: int) -> torch.Tensor:
    """Train one client with `backward` and the FedProx loss written out."""
    start = start_of(model)
    flat = FlatModel(model)
    anchors = [parameter.detach().clone() for parameter in flat.parameters]
    shuffle = torch.Generator().manual_seed(client_seed(how, 0, client))
    for _ in range(how.epochs):
        for batch in epoch_batches(task.index(client), how.batch_size, shuffle, 1):
            loss = functional.cross_entropy(flat.module(task.inputs[batch]), task.targets[batch])
            for parameter, anchor in zip(flat.parameters, anchors, strict=True):
                loss = loss + how.fedprox_mu / 2 * (parameter - anchor).square().sum()
            loss.backward()
            for parameter in flat.parameters:
                assert parameter.grad is not None
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
    return flat.read() - start


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.drop_maps = nn.Dropout2d(0.25)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4 * 36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.drop(self.drop_maps(self.conv(x).relu()).flatten(1)))


class Awkward(nn.Module):
    """A frozen layer, a parameter without use, two layers with the same weight, float64."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 12).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.last = nn.Linear(12, 10)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x.flatten(1).double()).tanh()
        return self.last(self.second(self.first(x).tanh()).tanh())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x.flatten(1))
        return x if self.fc.bias.sum() > 0 else -x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.fc = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.lstm(x.squeeze(1))[0][:, -1])


class Captured(nn.Module):
    """Holds on to its weight in a list, where another weight cannot be put in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10, 64))
        self.kept = [self.weight]
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.flatten(1), self.kept[0], self.bias)


def normalised(track: bool = True) -> nn.Module:
    middle = nn.BatchNorm1d(12, track_running_stats=track)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), middle, nn.ReLU(), nn.Linear(12, 10))


@pytest.mark.parametrize("mu", [0.0, 0.3])
@pytest.mark.parametrize(
    "model", [seeded(MLP, SHAPE, 10), seeded(DigitsModel), seeded(Awkward)], ids=type
)
def test_engines_agree_over_two_rounds(model: nn.Module, mu: float) -> None:
    task, how, start = make_task(), settings(mu=mu), start_of(model)
    reference = two_rounds(make_engine("sequential", model, task, how), start)
    assert [update.client for update in reference] == COHORT * 2
    assert_agree(two_rounds(make_engine("batched", model, task, how), start), reference)
    engine = ProcessEngine(model, task, how, workers=2)
    try:
        assert_agree(two_rounds(engine, start), reference)
    finally:
        engine.close()


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_batched_update_is_that_of_the_written_out_loss(mu: float) -> None:
    model, task, how = seeded(DigitsModel), make_task(), settings(mu=mu)
    for update in make_engine("batched", model, task, how).train(start_of(model), [0, 3], 0, 0.1):
        wanted = by_hand(model, task, how, update.client)
        torch.testing.assert_close(update.delta, wanted, rtol=1e-4, atol=1e-6)


def test_client_without_samples_sends_nothing() -> None:
    model, task = seeded(MLP, SHAPE, 10), make_task()
    engine = make_engine("batched", model, task, settings())
    for cohort in ([4], [4, 0]):
        empty = next(engine.train(start_of(model), cohort, 0, 0.1))
        assert empty.num_examples == 0
        assert math.isnan(empty.loss)
        assert not empty.delta.any()
    assert list(engine.train(start_of(model), [], 0, 0.1)) == []


@pytest.mark.parametrize("group", [1, 2, 3])
def test_groups_do_not_change_the_updates(group: int) -> None:
    model, task = seeded(DigitsModel), make_task()
    whole = make_engine("batched", model, task, settings())
    parts = LocalEngine(VmapTrainer(model, task, settings(), max_clients_per_group=group))
    assert_agree(two_rounds(parts, start_of(model)), two_rounds(whole, start_of(model)))


def test_group_size_follows_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedquilt.training.trainers.stack._CPU_BYTES", 2**22)
    model, task = seeded(DigitsModel), make_task()
    small = VmapTrainer(model, task, settings(batch_size=1)).group_size
    large = VmapTrainer(model, task, settings(batch_size=64)).group_size
    weights_alone = 2**22 // (4 * 4 * 8714)
    assert 1 <= large < small <= weights_alone


def test_dropout_draws_the_same_on_both_engines_and_leaves_torch_alone() -> None:
    model, task = seeded(Dropping), make_task()
    start = start_of(model)
    state = torch.get_rng_state()
    runs = [two_rounds(make_engine("batched", model, task, settings()), start) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a.delta, b.delta) for a, b in zip(*runs, strict=True))
    assert_agree(runs[0], two_rounds(make_engine("sequential", model, task, settings()), start))


def test_dropout_differs_between_clients() -> None:
    model, samples = seeded(Dropping), np.arange(40)
    task = Task(make_task().inputs, make_task().targets, [samples] * 300)
    one_step = settings(epochs=1, batch_size=40)
    engine = make_engine("batched", model, task, one_step)
    rows = torch.stack([u.delta for u in engine.train(start_of(model), range(300), 0, 0.1)])
    assert len({float(row.norm()) for row in rows}) == 300


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (normalised(), "buffers .*running_mean.*BatchNorm"),
        (normalised(track=False), "depends on the other samples"),
        (Branching(), r"vmap cannot run it \("),
        (Recurrent(), "vmap cannot run it|does not reach its parameter lstm"),
        (Captured(), "does not reach its parameter weight"),
    ],
    ids=["batchnorm", "batchnorm without statistics", "branching", "lstm", "captured"],
)
def test_batched_refuses_what_it_cannot_run(model: nn.Module, reason: str) -> None:
    assert why_not_stacked(model, make_task()) is not None
    with pytest.raises(InvalidValueError, match=reason):
        make_engine("batched", model, make_task(), settings())


def test_labels_that_the_loss_leaves_out_are_left_out_of_the_mean() -> None:
    model, task = seeded(MLP, SHAPE, 10), make_task()
    task.targets[7] = -100
    start = start_of(model)
    batched, alone = (
        [
            update.delta
            for update in make_engine(kind, model, task, settings()).train(start, range(4), 0, 0.1)
        ]
        for kind in ("batched", "sequential")
    )
    for ours, theirs in zip(batched, alone, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_batched_passes_on_an_error_of_the_model() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        why_not_stacked(MLP((1, 7, 7), 10), make_task())


def test_batched_needs_a_group() -> None:
    with pytest.raises(InvalidValueError, match="max_clients_per_group=0 must be >= 1"):
        VmapTrainer(MLP(SHAPE, 10), make_task(), settings(), max_clients_per_group=0)


def test_factory_knows_both_engines() -> None:
    model, task = MLP(SHAPE, 10), make_task()
    assert isinstance(make_engine("batched", model, task, settings()), LocalEngine)
    engine = make_engine("processes", model, task, settings())
    assert isinstance(engine, ProcessEngine)
    assert engine.worker_pids == []
    engine.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def crowd() -> Iterator[tuple[ProcessEngine, torch.Tensor, list[int]]]:
    """An engine, a start and a cohort that keeps two workers busy for a while."""
    model = seeded(MLP, SHAPE, 10)
    task = make_task(sizes=(60,) + (30,) * 60)
    engine = ProcessEngine(model, task, settings(epochs=5, batch_size=2), workers=2)
    yield engine, start_of(model), list(range(61))
    engine.close()


@pytest.mark.processes
def test_the_cores_are_the_workers_while_they_train() -> None:
    """A second thread of this process would take one of them; afterwards it is there again."""
    model, task = seeded(DigitsModel), make_task()
    before = torch.get_num_threads()
    engine = ProcessEngine(model, task, settings(), workers=2)
    try:
        torch.set_num_threads(2)
        updates = engine.train(start_of(model), [0, 1, 2], 0, 0.1)
        next(updates)
        assert torch.get_num_threads() == 1
        assert len(list(updates)) == 2
        assert torch.get_num_threads() == 2
    finally:
        engine.close()
        torch.set_num_threads(before)


def test_processes_train_batchnorm() -> None:
    model, task = seeded(normalised), make_task()
    start = start_of(model)
    reference = two_rounds(make_engine("sequential", model, task, settings()), start)
    engine = ProcessEngine(model, task, settings(), workers=2)
    assert_agree(two_rounds(engine, start), reference)
    engine.close()


def test_processes_train_dropout_as_the_sequential_engine_does() -> None:
    model, task = (
        seeded(nn.Sequential, nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)),
        make_task(),
    )
    start = start_of(model)
    reference = two_rounds(make_engine("sequential", model, task, settings()), start)
    engine = ProcessEngine(model, task, settings(), workers=2)
    assert_agree(two_rounds(engine, start), reference)
    engine.close()


def test_workers_are_at_most_one_a_client_and_close_ends_them() -> None:
    model, task = seeded(MLP, SHAPE, 10), make_task()
    engine = ProcessEngine(model, task, settings(), workers=3)
    assert list(engine.train(start_of(model), [], 0, 0.1)) == []
    list(engine.train(start_of(model), [0], 0, 0.1))
    assert len(engine.worker_pids) == 1
    list(engine.train(start_of(model), COHORT, 0, 0.1))
    pids = engine.worker_pids
    assert len(pids) == 3
    assert all(is_alive(pid) for pid in pids)
    engine.close()
    engine.close()
    assert not any(is_alive(pid) for pid in pids)
    assert multiprocessing.active_children() == []
    with pytest.raises(NotReadyError, match="closed"):
        next(engine.train(start_of(model), [0], 0, 0.1))


def test_forgotten_engine_leaves_no_process() -> None:
    model, task = seeded(MLP, SHAPE, 10), make_task()
    engine = ProcessEngine(model, task, settings(), workers=1)
    list(engine.train(start_of(model), [0], 0, 0.1))
    pids = engine.worker_pids
    del engine
    assert not any(is_alive(pid) for pid in pids)


SOCKETS = """
import os, signal, tempfile
from fedquilt.training.engines.pool import start_fork_server, worker_context

here = tempfile.gettempdir()
if os.fork() == 0:
    start_fork_server(worker_context())
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
left = os.listdir(here)
for name in left:
    os.utime(os.path.join(here, name), (0, 0))
start_fork_server(worker_context())
print(len(left), len(os.listdir(here)), [name for name in os.listdir(here) if name in left])
"""


@pytest.mark.slow
def test_sockets_of_a_killed_process_are_removed_by_the_next_and_its_own_by_itself() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # names of sockets are short
        ended = subprocess.run(
            [sys.executable, "-c", SOCKETS],
            env={**environment(), "TMPDIR": folder},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ended.stdout == "1 1 []\n"
        assert os.listdir(folder) == []


def test_killed_worker_is_an_error_that_names_it(
    crowd: tuple[ProcessEngine, torch.Tensor, list[int]],
) -> None:
    engine, start, cohort = crowd
    updates = engine.train(start, cohort, 0, 0.1)
    next(updates)
    pids = engine.worker_pids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"worker process 1 \(pid {pids[1]}\).*SIGKILL"):
        list(updates)
    assert not any(is_alive(pid) for pid in pids)
    assert len(list(engine.train(start, cohort[:3], 0, 0.1))) == 3


def test_workers_leave_an_interrupt_to_their_parent(
    crowd: tuple[ProcessEngine, torch.Tensor, list[int]],
) -> None:
    engine, start, cohort = crowd
    updates = engine.train(start, cohort, 0, 0.1)
    next(updates)
    for pid in engine.worker_pids:
        os.kill(pid, signal.SIGINT)
    assert len(list(updates)) == len(cohort) - 1


def test_round_left_early_does_not_leak_into_the_next(
    crowd: tuple[ProcessEngine, torch.Tensor, list[int]],
) -> None:
    engine, start, cohort = crowd
    updates = engine.train(start, cohort, 0, 0.1)
    next(updates)
    with pytest.raises(NotReadyError, match="one round at a time"):
        next(engine.train(start, cohort, 1, 0.1))
    updates.close()  # type: ignore[attr-defined]
    wanted = list(
        make_engine("sequential", MLP(SHAPE, 10), engine.task, engine.settings).train(
            start, [1], 1, 0.1
        )
    )
    assert_agree(list(engine.train(start, [1], 1, 0.1)), wanted)


def test_engine_closed_in_a_round_does_not_hang(
    crowd: tuple[ProcessEngine, torch.Tensor, list[int]],
) -> None:
    engine, start, cohort = crowd
    updates = engine.train(start, cohort, 0, 0.1)
    next(updates)
    engine.close()
    with pytest.raises(NotReadyError, match="closed"):
        list(updates)


def test_error_in_a_worker_surfaces_with_its_message() -> None:
    model, task = seeded(MLP, SHAPE, 10), make_task()
    task.targets[task.clients[2][0]] = 77
    engine = ProcessEngine(model, task, settings(), workers=2)
    with pytest.raises(
        WorkerError, match=r"client 2 failed in worker process .* 77 .*bounds"
    ) as caught:
        list(engine.train(start_of(model), COHORT, 0, 0.1))
    assert "cross_entropy" in "".join(caught.value.__notes__)
    engine.close()


def test_processes_refuse_what_they_cannot_share() -> None:
    class Local(nn.Linear):
        pass

    with pytest.raises(InvalidValueError, match=r"Local.*picklable.*top level"):
        ProcessEngine(Local(64, 10), make_task(), settings())
    elsewhere = Task(torch.empty(4, 64, device="meta"), torch.zeros(4), [np.arange(4)])
    with pytest.raises(InvalidValueError, match="on the CPU, got meta"):
        ProcessEngine(nn.Linear(64, 10), elsewhere, settings())
    with pytest.raises(InvalidValueError, match="workers=0 must be >= 1"):
        ProcessEngine(MLP(SHAPE, 10), make_task(), settings(), workers=0)


SCRIPT = """
    import numpy as np, torch
    from torch import nn
    from fedquilt.training import FlatModel, LocalSettings, Task
    from fedquilt.training.engines.workers import ProcessEngine

    class Net(nn.Linear):
        pass

    if __name__ == "__main__":
        task = Task(torch.randn(40, 6), torch.zeros(40, dtype=torch.int64), [np.arange(40)] * 999)
        model = Net(6, 3)
        engine = ProcessEngine(model, task, LocalSettings(20, 1, 0.0, 1), workers=2)
        for update in engine.train(FlatModel(model).read().clone(), range(999), 0, 0.1):
            if update.client == 0:
                print(*engine.worker_pids, flush=True)
"""


def test_interrupt_ends_the_workers_quietly(tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert not any(is_alive(pid) for pid in pids)
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_model_that_workers_cannot_import_is_an_error_that_says_so() -> None:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert "WorkerError: worker process" in result.stderr
    assert "could not set up the model" in result.stderr
    assert "top level of a file" in result.stderr
