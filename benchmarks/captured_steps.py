"""Milliseconds of a step on a GPU, launched from Python and replayed as a CUDA graph.

    python benchmarks/captured_steps.py --steps 60 --together 1,3

ResNet-18 with BatchNorm in the widths of HeFlwr's clients on random images of the size of
CIFAR-10, batches of 64, Adam; and a small transformer.  `apart` is the distance between the two
ways' updates after all steps but the last short one, relative to the update's norm; `noise` is that
of autograd from itself with weights moved by a unit of TF32, which products on a GPU are rounded
to.  `--together` runs the captured part in several processes at once.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np
import torch
from torch import nn

from fedquilt.models import make_model
from fedquilt.slices.slicer import Slicer
from fedquilt.training import FlatModel, LocalSettings, Task
from fedquilt.training.optimizers import ClientOptimizer
from fedquilt.training.trainers import Trainer
from fedquilt.training.trainers.autograd import AutogradTrainer
from fedquilt.training.trainers.captured import CapturedTrainer, CapturedTraining, CudaRecorder

BATCH = 64
WIDTHS = ("1", "3/4", "1/2", "1/4")


class Attention(nn.Module):
    """Two layers of a transformer on 64 tokens, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.fc(self.layers(self.embed(x)).mean(1))
        return logits


def problems(steps: int, widths: list[str]) -> dict[str, tuple[nn.Module, Task]]:
    """Return the models and their data: one client with so many full batches and a short one."""
    random = torch.Generator().manual_seed(0)
    count = steps * BATCH + BATCH // 2
    images = torch.randn(count, 3, 32, 32, generator=random).cuda()
    tokens = torch.randint(1000, (count, 64), generator=random).cuda()
    targets = torch.randint(10, (count,), generator=random).cuda()
    clients = [np.arange(count)]
    whole = make_model("resnet18-batchnorm", (3, 32, 32), 10, 0)
    plan = Slicer(whole, torch.zeros(2, 3, 32, 32))
    found: dict[str, tuple[nn.Module, Task]] = {
        f"resnet18 width {w}": (plan.build(Fraction(w)), Task(images, targets, clients))
        for w in widths
    }
    torch.manual_seed(0)
    found["transformer"] = Attention(), Task(tokens, targets, clients)
    return found


def timed(engine: Trainer, start: torch.Tensor, steps: int) -> tuple[float, torch.Tensor]:
    """Return the milliseconds of a step and the update; the first pass warms up."""
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        (update,) = engine.train(start, [0], 0, 0.001)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 1000 * seconds[-1] / steps, update.delta.clone()


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return a distance relative to the norm of the second."""
    return float((one - other).norm() / other.norm())


def row(name: str, model: nn.Module, task: Task, steps: int) -> str:
    """Return one row of the table."""
    how = LocalSettings(1, BATCH, 0.0, 0, optimizer=ClientOptimizer("adam"))
    start = FlatModel(model, task.inputs[:2]).read().clone()
    begin = time.perf_counter()
    plain = AutogradTrainer(model, task, how)
    built = time.perf_counter() - begin
    eager, wanted = timed(plain, start, steps)
    nudged = start * (1 + 2.0**-11 * torch.randn_like(start))
    _, noise = timed(plain, nudged, steps)
    begin = time.perf_counter()
    engine = CapturedTrainer(model, task, how)
    tried = time.perf_counter() - begin - built
    if engine.captured is None:
        return f"{name:22s} {eager:7.2f}  not captured"
    last = engine.captured._channels_last
    captured, found = timed(engine, start, steps)
    again = apart(timed(engine, start, steps)[1], found)
    engine.captured = CapturedTraining(
        engine.flat, task, how, CudaRecorder(task.device), channels_last=not last
    )
    other, _ = timed(engine, start, steps)
    return (
        f"{name:22s} {eager:7.2f} {captured:8.2f} {eager / captured:6.1f} {other:9.2f} "
        f"{apart(found, wanted):8.1e} {apart(noise, wanted):8.1e} {again:8.1e} "
        f"{built:6.1f} {tried:6.1f}   {'last' if last else 'first'}"
    )


def together(processes: int, arguments: argparse.Namespace) -> str:
    """Run the captured part in several processes and return what each says."""
    command = [sys.executable, __file__, "--alone", "--steps", str(arguments.steps)]
    begin = time.perf_counter()
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    said = [process.communicate()[0].strip() for process in running]
    return f"{processes} at once, {time.perf_counter() - begin:.1f} s: {said[0]}"


def alone(steps: int) -> str:
    """Return the milliseconds of a captured step of each width, several passes."""
    found = []
    for name, (model, task) in problems(steps, ["1", "1/4"]).items():
        how = LocalSettings(1, BATCH, 0.0, 0, optimizer=ClientOptimizer("adam"))
        start = FlatModel(model, task.inputs[:2]).read().clone()
        engine = CapturedTrainer(model, task, how)
        for _ in range(4):
            milliseconds, _ = timed(engine, start, steps)
        found.append(f"{name} {milliseconds:.2f} ms")
    return ", ".join(found)


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description="Milliseconds of a captured step.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--together", default="")
    parser.add_argument("--alone", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.alone:
        print(alone(arguments.steps), flush=True)
        return
    print(
        "ms a step                eager captured  ratio   other way  apart    noise    again  "
        "built   trial   channels"
    )
    for name, (model, task) in problems(arguments.steps, list(WIDTHS)).items():
        print(row(name, model, task, arguments.steps), flush=True)
    for count in filter(None, arguments.together.split(",")):
        print(together(int(count), arguments), flush=True)


if __name__ == "__main__":
    main()
