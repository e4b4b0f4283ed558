"""What a round costs beside a bare PyTorch loop that does the same steps.

    python benchmarks/overhead.py [--repeats 15] [--threads 1]

Both train 20 clients of 600 samples on a 784-64-10 network, one epoch at batch
size 32, from the same weights on the same data, and average the results, in one
process and alternating, so that whatever else the machine does hits both.  The
bare loop is what one writes by hand: a model, `torch.optim.SGD`, shuffled
batches, an average of state dicts.  Aim: a ratio of at most 1.15.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import numpy as np
import torch
from torch import nn

from fedquilt.assemble import build_federation, problem_from
from fedquilt.config import RunConfig
from fedquilt.models import MLP
from fedquilt.round import run_round

CLIENTS, SAMPLES, BATCH, RATE = 20, 600, 32, 0.05


def bare_round(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, clients) -> None:
    """Train every client from the global model and average: FedAvg by hand."""
    start = copy.deepcopy(model.state_dict())
    total = {name: torch.zeros_like(value) for name, value in start.items()}
    local = copy.deepcopy(model)
    for index in clients:
        local.load_state_dict(start)
        local.train()
        optimizer = torch.optim.SGD(local.parameters(), lr=RATE)
        for batch in index[torch.randperm(len(index))].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(local(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        for name, value in local.state_dict().items():
            total[name] += value
    model.load_state_dict({name: value / len(clients) for name, value in total.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

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
    )
    config, problem = problem_from(
        config, model, (inputs, targets), (inputs[:10], targets[:10]), list(clients)
    )
    federation = build_federation(config, problem)
    as_tensors = [torch.from_numpy(index) for index in clients]

    ours, bare = [], []
    for repeat in range(-2, arguments.repeats):
        began = time.perf_counter()
        bare_round(model, inputs, targets, as_tensors)
        middle = time.perf_counter()
        run_round(federation, repeat + 2)
        ended = time.perf_counter()
        if repeat >= 0:  # the first two are warm-up
            bare.append(middle - began)
            ours.append(ended - middle)
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), {arguments.repeats} repeats")
    print(f"{'':14}{'median s':>10}{'fastest s':>11}")
    print(f"{'bare loop':14}{statistics.median(bare):10.4f}{min(bare):11.4f}")
    print(f"{'fedquilt':14}{statistics.median(ours):10.4f}{min(ours):11.4f}")
    print(
        f"ratio, median of pairs {statistics.median(ratios):.3f}, "
        f"of the fastest {min(ours) / min(bare):.3f}"
    )


if __name__ == "__main__":
    main()
