"""Adapters of unequal ranks: three methods and one rank for all, at equal bytes and equal epsilon.

    python benchmarks/adapters.py [--seeds 3] [--rounds 12] [--out results.jsonl]

A small vision transformer is pre-trained on Fashion-MNIST (clothes), then 100 clients with 30
digits of MNIST on average (Dirichlet 0.5) fine-tune adapters of `peft` in it, and the head.  A
quarter of the clients each has the memory for rank 8, 4, 2 and 1.  Everybody joins every round.

The server's learning rate is the best of three for each cell, on a split of its own, whose seed is
none of the table's.  Bytes are those that
a client sends in a round, on average; Fed-SB is shown at the same ranks, where it sends less, and
at ranks 4 to 32, where it sends about as much as the others.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from torch import nn
from torch.nn import functional

import fedquilt
from fedquilt.data import load_dataset, split_clients
from fedquilt.models import with_cores

CLIENTS, SAMPLES, TESTS, WIDTH, TUNING_SEED = 100, 30, 2000, 48, 100
TIERS = "1,1/2,1/4,1/8"
STEPS = (1.0, 3.0, 10.0)  # of the server; under a bound updates have the length 0.3
SHARED: dict[str, Any] = {
    "local_epochs": 1,
    "batch_size": 30,
    "learning_rate": 0.1,
    "lr_schedule": "constant",
    "availability": "always",
    "clients_per_round": 1.0,
    "output_dir": None,
    "quiet": True,
}
LAYERS = ["query", "value", "up", "down"]


@dataclass(frozen=True)
class Arm:
    """A row: a method, the rank of the adapters, and who holds how much of it."""

    method: str
    rank: int
    tiers: str | None = TIERS


ARMS = {
    "HetLoRA, ranks 8, 4, 2, 1": Arm("hetlora", 8),
    "FlexLoRA, ranks 8, 4, 2, 1": Arm("flexlora", 8),
    "Fed-SB, ranks 8, 4, 2, 1": Arm("fedsb", 8),
    "Fed-SB, ranks 32, 16, 8, 4": Arm("fedsb", 32),
    "LoRA, rank 4 for all": Arm("full", 4, None),
    "LoRA, rank 1 for all": Arm("full", 1, None),
}


class Block(nn.Module):
    """Attention of one head, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.key, self.value = nn.LayerNorm(WIDTH), *_linear(3)
        self.second, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the words after the block."""
        y = self.norm(x)
        look = (self.query(y) @ self.key(y).transpose(-1, -2) / math.sqrt(WIDTH)).softmax(-1)
        x = x + look @ self.value(y)
        return x + self.down(functional.gelu(self.up(self.second(x))))


def _linear(count: int) -> list[nn.Linear]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


class Vision(nn.Module):
    """Sixteen patches of 7 x 7 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(49, WIDTH)
        self.places = nn.Parameter(torch.randn(16, WIDTH) * 0.02)
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return class scores."""
        patches = functional.unfold(images, 7, stride=7).transpose(1, 2)
        return self.head(self.norm(self.block(self.embed(patches) + self.places).mean(1)))


def pretrained() -> Vision:
    """Return the network after three passes over 20,000 pictures of clothes."""
    torch.manual_seed(0)
    model, (clothes, _) = Vision(), load_dataset("fashion-mnist")
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(3):
        for batch in torch.randperm(20_000).split(100):
            loss = functional.cross_entropy(model(clothes.images[batch]), clothes.targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


def score(arm: Arm, backbone: Vision, epsilon: float, step: float, seed: int, rounds: int) -> Any:
    """Return a run's accuracy and the bytes that a client sends in a round."""
    train, test = load_dataset("mnist")
    draws = np.random.default_rng(seed)
    held = draws.permutation(len(train.targets))[: CLIENTS * SAMPLES]
    labels = train.targets[held]
    clients = split_clients("dirichlet", labels, CLIENTS, draws)
    torch.manual_seed(seed)
    layers = peft.LoraConfig(
        r=arm.rank, lora_alpha=arm.rank, target_modules=LAYERS, modules_to_save=["head"]
    )
    model: nn.Module = peft.get_peft_model(_copied(backbone), layers)
    model = with_cores(model) if arm.method == "fedsb" else model
    bounded = math.isfinite(epsilon)
    settings: dict[str, Any] = {"mode": "fedavg"}
    if bounded:
        settings = {"mode": "certified", "epsilon": epsilon, "delta": 1e-3, "clip_norm": 0.3}
        settings |= {"normalise_updates": True, "policy": "worst_case"}
    if arm.tiers is not None:
        settings["tiers"] = arm.tiers
    done = fedquilt.run(
        model,
        (train.images[held], labels),
        (test.images[:TESTS], test.targets[:TESTS]),
        clients,
        method=arm.method,
        seed=seed,
        num_rounds=rounds,
        server_lr=step,
        eval_every=rounds,
        **SHARED,
        **settings,
    )
    sizes = sum(p.numel() for p in model.parameters() if p.requires_grad) * 4
    table = done.result.get("slices", {"mean": {"bytes_up": sizes}})
    return done.metrics["accuracy"], table["mean"]["bytes_up"]


def _copied(backbone: Vision) -> Vision:
    model = Vision()
    model.load_state_dict(backbone.state_dict())
    return model


def main() -> None:
    """Run the table and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[math.inf, 8.0, 3.0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    backbone = pretrained()
    print(f"| method | bytes | {' | '.join(f'epsilon {e:g}' for e in given.epsilons)} |")
    for name in given.arms:
        cells, sent = [], 0.0
        for epsilon in given.epsilons:
            tried = {
                step: score(ARMS[name], backbone, epsilon, step, TUNING_SEED, given.rounds)[0]
                for step in STEPS
            }
            best = max(tried, key=lambda step: tried[step])
            found = [
                score(ARMS[name], backbone, epsilon, best, seed, given.rounds)
                for seed in range(given.seeds)
            ]
            values, sent = [100 * value for value, _ in found], found[0][1]
            cells.append(f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}")
            if given.out is not None:
                line = {"arm": name, "epsilon": str(epsilon), "tried": tried, "accuracy": values}
                with given.out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps({**line, "bytes": sent}) + "\n")
        print(f"| {name} | {sent:,.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
