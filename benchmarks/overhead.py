"""What a round costs beside a bare PyTorch loop that does the same steps.

    python benchmarks/overhead.py [--repeats 15] [--threads 1]

Both train 20 clients of 600 samples on a 784-64-10 network, one epoch at batch
size 32, from the same weights on the same data, and average the results, in one
process and alternating, so that whatever else the machine does hits both.  The
bare loop is what one writes by hand: a model, an optimiser of `torch.optim`, shuffled
batches, an average of state dicts.  Aim: a ratio of at most 1.15, with cross-entropy and
plain SGD, with a named rule (Adam), and with a user's own loss and optimiser factory.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fedquilt.config import RunConfig
from fedquilt.models import MLP
from fedquilt.round import run_round
from fedquilt.setup.build_task import task_from
from fedquilt.setup.federation import build_federation
from fedquilt.setup.task import UserComponents

CLIENTS, SAMPLES, BATCH, RATE = 20, 600, 32, 0.05


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Make = Callable[[Any], torch.optim.Optimizer]


def smoothed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a loss that somebody wrote: cross-entropy with smooth labels and a penalty."""
    loss = nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)
    return loss + 1e-3 * outputs.square().mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=RATE)


def rmsprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=1e-3, momentum=0.5)


def bare_round(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    clients: list[torch.Tensor],
    loss: Loss,
    make: Make,
) -> None:
    """Train every client from the global model and average: FedAvg by hand."""
    start = copy.deepcopy(model.state_dict())
    total = {name: torch.zeros_like(value) for name, value in start.items()}
    local = copy.deepcopy(model)
    for index in clients:
        local.load_state_dict(start)
        local.train()
        optimizer = make(local.parameters())
        for batch in index[torch.randperm(len(index))].split(BATCH):
            optimizer.zero_grad()
            loss(local(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        for name, value in local.state_dict().items():
            total[name] += value
    model.load_state_dict({name: value / len(clients) for name, value in total.items()})


# What is compared: its name, the bare loop's loss and optimiser, ours by name or as objects.
CASES: dict[str, tuple[Loss, Make, dict[str, str], UserComponents]] = {
    "cross-entropy, SGD": (nn.functional.cross_entropy, sgd, {}, UserComponents()),
    "cross-entropy, Adam": (
        nn.functional.cross_entropy,
        adam,
        {"optimizer": "adam"},
        UserComponents(),
    ),
    "own loss, own RMSprop": (
        smoothed,
        rmsprop,
        {"loss": "custom", "optimizer": "custom"},
        UserComponents(loss=smoothed, optimizer=rmsprop),
    ),
}


def compare(name: str, repeats: int) -> None:
    """Time both in turns and print the ratio."""
    loss, make, named, own = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS * SAMPLES, 1, 28, 28, generator=generator)
    targets = torch.randint(10, (CLIENTS * SAMPLES,), generator=generator)
    clients = np.arange(CLIENTS * SAMPLES).reshape(CLIENTS, SAMPLES)
    model = MLP((1, 28, 28), 10)
    config = RunConfig(
        mode="fedavg",
        availability="always",
        clients_per_round=1.0,
        local_epochs=1,
        batch_size=BATCH,
        learning_rate=RATE,
        engine="sequential",
        device="cpu",
        **named,
    )
    data = (inputs, targets)
    test = (inputs[:10], targets[:10])
    config, problem = task_from(config, model, data, test, list(clients), own=own)
    federation = build_federation(config, problem)
    as_tensors = [torch.from_numpy(index) for index in clients]

    ours, bare = [], []
    for repeat in range(-2, repeats):
        began = time.perf_counter()
        bare_round(model, inputs, targets, as_tensors, loss, make)
        middle = time.perf_counter()
        run_round(federation, repeat + 2)
        ended = time.perf_counter()
        if repeat >= 0:  # the first two are warm-up
            bare.append(middle - began)
            ours.append(ended - middle)
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    print(f"{name}\n{'':14}{'median s':>10}{'fastest s':>11}")
    print(f"{'bare loop':14}{statistics.median(bare):10.4f}{min(bare):11.4f}")
    print(f"{'fedquilt':14}{statistics.median(ours):10.4f}{min(ours):11.4f}")
    print(
        f"ratio, median of pairs {statistics.median(ratios):.3f}, "
        f"of the fastest {min(ours) / min(bare):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), {arguments.repeats} repeats")
    for name in CASES:
        compare(name, arguments.repeats)


if __name__ == "__main__":
    main()
