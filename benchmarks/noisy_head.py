"""Why noise on the classifier lifts accuracy where the learning rate is small.

    FEDQUILT_DATA=FOLDER python benchmarks/noisy_head.py [--arms "fedavg|noise"] [--output FILE]

A small form of the paper's CIFAR-10 experiment in plain torch, without the package's engines:
images of 16 x 16, convolutions 16-32-64 and dense layers 256-128-64-10, 100 clients, Dirichlet
0.5, 10 a round, 3 epochs of at most 800 samples in batches of 32, rate 0.005 x 0.995^t, 100 rounds.

| arm | what it is |
|---|---|
| fedavg | the plain mean |
| noise | the dense layers' update clipped to 1 and noised as the paper's, for cohorts of 30 |
| noise, length held | the same; after each round every dense tensor is scaled to its first length |
| long, no noise | dense layers random with deviation 0.2, frozen; no noise at all |
| fedavg, 10 x rate | the plain mean with a rate of 0.05 |

A line for each arm: accuracy on 4,000 test images half way and at the end, and how long the first
dense layer is against its start.  About two minutes for an arm on a GPU; arms side by side.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedquilt.data import ImageDataset, load_dataset, split_clients

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reproduction.cells import source_origin

RATE, DECAY, EPOCHS, BATCH, COHORT, MOST = 0.005, 0.995, 3, 32, 10, 800
# sigma = (C / m) sqrt(2 ln(1.25 / delta)) / epsilon_t: C = 1, m = 30, 6 / 200 x 1.25 a round.
SIGMA = math.sqrt(2 * math.log(1.25 / 1e-5)) / (30 * 0.0375)
ARMS = ("fedavg", "noise", "noise, length held", "long, no noise", "fedavg, 10 x rate")


def network() -> nn.Sequential:
    """Return the small network; its dense layers begin after the flattening."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def head(model: nn.Sequential) -> list[nn.Parameter]:
    """Return the parameters of the dense layers."""
    return [p for layer in model if isinstance(layer, nn.Linear) for p in layer.parameters()]


def train(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor, rate: float) -> None:
    """Train a client's copy by plain SGD."""
    used = [p for p in model.parameters() if p.requires_grad]
    model.train()
    for _ in range(EPOCHS):
        for part in torch.randperm(len(y), device=y.device).split(BATCH):
            loss = functional.cross_entropy(model(x[part]), y[part])
            for parameter, slope in zip(used, torch.autograd.grad(loss, used), strict=True):
                parameter.data.sub_(slope, alpha=rate)


@torch.no_grad()
def accuracy(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the share of right answers, in percent."""
    model.eval()
    return 100 * float((model(x).argmax(1) == y).float().mean())


def run(arm: str, rounds: int, seed: int, device: str) -> dict[str, float]:
    """Run one arm and return what it reached."""
    torch.manual_seed(seed)
    draws = np.random.default_rng(seed)
    (x, y), (tx, ty) = (_images(part, device) for part in load_dataset("cifar10"))
    clients = split_clients("dirichlet", y.cpu().numpy(), 100, draws, dirichlet_alpha=0.5)
    weights = draws.beta(2, 5, 100)
    model = network().to(device)
    if arm.startswith("long"):
        for parameter in head(model):
            nn.init.normal_(parameter, std=0.2)
            parameter.requires_grad_(False)
    dense = {id(p) for p in head(model)}
    lengths = [p.data.norm() for p in head(model)]
    first, half = float(lengths[0]), 0.0
    if arm.startswith("long"):
        first = float(head(network())[0].data.norm())
    for t in range(rounds):
        rate = RATE * DECAY**t * (10 if "10 x" in arm else 1)
        cohort = draws.choice(100, COHORT, replace=False, p=weights / weights.sum())
        held = [
            torch.as_tensor(draws.permutation(clients[c])[:MOST], device=device) for c in cohort
        ]
        changes = []
        for samples in held:
            own = copy.deepcopy(model)
            train(own, x[samples], y[samples], rate)
            pairs = zip(own.parameters(), model.parameters(), strict=True)
            changes.append([(a.data - b.data) / rate for a, b in pairs])
        noised = arm.startswith("noise")
        sizes = torch.tensor([1.0 if noised else len(s) for s in held], device=device)
        shares = sizes / sizes.sum()
        where = [i for i, p in enumerate(model.parameters()) if id(p) in dense]
        if noised:
            for change in changes:
                norm = torch.stack([change[i].norm() for i in where]).norm()
                for i in where:
                    change[i] /= norm.clamp(min=1.0)
        for i, parameter in enumerate(model.parameters()):
            step = sum(s * change[i] for s, change in zip(shares, changes, strict=True))
            if noised and i in where:
                step = step + SIGMA * torch.randn_like(parameter)
            parameter.data.add_(step, alpha=rate)
        if "held" in arm:
            for parameter, length in zip(head(model), lengths, strict=True):
                parameter.data.mul_(length / parameter.data.norm())
        if t + 1 == rounds // 2:
            half = accuracy(model, tx[:4000], ty[:4000])
    return {
        "half": half,
        "end": accuracy(model, tx[:4000], ty[:4000]),
        "length": float(head(model)[0].data.norm()) / first,
    }


def _images(part: ImageDataset, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    images = functional.avg_pool2d(part.images, 2)
    return images.to(device), part.targets.to(device)


def main() -> None:
    """Read the arguments, run, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arms", default="|".join(ARMS), help="joined by |")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="of the source, where there is no git to ask")
    parser.add_argument("--output", help="a JSON file that the arms are added to")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{'arm':<20} {'half':>6} {'end':>6}  length of the first dense layer against its start")
    for arm in given.arms.split("|"):
        found = run(arm, given.rounds, given.seed, device)
        print("{:<20} {half:6.1f} {end:6.1f}  {length:.2f}".format(arm, **found), flush=True)
        if given.output:
            path = Path(given.output)
            kept = json.loads(path.read_text()) if path.is_file() else {}
            how = {"rounds": given.rounds, "seed": given.seed, "device": device}
            kept[arm] = {**found, **how, **source_origin(given.commit)}
            path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
