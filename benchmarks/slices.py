"""Every schedule of slices beside its two references: all clients smallest, all clients whole.

    python benchmarks/slices.py [--data-dir DIR] [--seeds 0,1,2]      # MNIST, one core
    python benchmarks/slices.py --cifar --data-dir DIR --arms heterofl,fedrolex  # a GPU
    python benchmarks/slices.py --batch-norm              # digits, BatchNorm; half a minute a row

What is scored is the global model on the whole test set, and after the costs every width's own
small model; `smallest` is the one row whose global model is the small one.  100 clients, 10 a
round, dealt evenly to the tiers.
Parameters, bytes and multiply-adds (of one example, forward) are means over clients.

MNIST: a dense network of four hidden layers with an exit after each, so that one network
can be cut by width and by depth; IID and Dirichlet 0.5.  CIFAR-10: ResNet-18 with group
normalisation, IID; the data folder holds `cifar-10-batches-bin`, or `compact/*.npz` with
their reader `unpack_cifar10.py`.  Digits: two convolutions with BatchNorm, 20 clients, 10 a round,
IID.  All settings are the same for all rows, but one: the loss
of `depthfl` is the sum over four exits where the others' is that of their mean, so its
learning rate is a quarter of theirs.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedquilt
from fedquilt.data import ImageDataset, load_dataset, split_clients
from fedquilt.models import ResNet18

ARMS = ("smallest", "heterofl", "fedrolex", "dropout", "fjord", "mfl", "depthfl", "largest")
CIFAR_ARMS = ("smallest", "heterofl", "fedrolex", "largest")
NARROW = ("heterofl", "fedrolex", "dropout", "fjord", "mfl", "largest")
CLIENTS, COHORT = 100, 10
RATE_SHARE = {"depthfl": 0.25}


class DenseExits(nn.Module):
    """Normalised hidden layers of rectified units, each with a classifier; their mean logits.

    HeteroFL's scaler asks for the normalisation: without one it multiplies what a narrow
    layer says by up to the inverse of its width, in every layer, and training diverges.
    """

    def __init__(self, inputs: int = 784, hidden: int = 64, depth: int = 4) -> None:
        super().__init__()
        sizes = [inputs] + [hidden] * depth
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(sizes[i], hidden), nn.GroupNorm(hidden // 8, hidden), nn.ReLU())
            for i in range(depth)
        )
        self.heads = nn.ModuleList(nn.Linear(hidden, 10) for _ in range(depth))

    def exits(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits of every exit."""
        x, outputs = x.flatten(1), []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            outputs.append(head(x))
        return outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over the exits."""
        outputs = self.exits(x)
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total / len(outputs)


class SmallBatchNorm(nn.Sequential):
    """Two convolutions with BatchNorm, whose statistics narrow clients must not average."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        )


def seeded(kind: type[nn.Module], seed: int) -> nn.Module:
    """Return a model with initial weights drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind()


def one_run(
    arguments: argparse.Namespace,
    arm: str,
    partition: str,
    seed: int,
    data: tuple[ImageDataset, ImageDataset],
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Return (test accuracy of the global model, mean costs of a client, each width's own)."""
    train, test = data
    limit = arguments.samples or len(train)
    labels = train.targets.numpy()[:limit]
    number = 20 if arguments.batch_norm else CLIENTS
    clients = split_clients(partition, labels, number, np.random.default_rng(seed))
    began = time.perf_counter()

    def tell(config: Any, line: dict[str, Any]) -> None:
        if arguments.cifar and "test_accuracy" in line:
            done, spent = line["round"] + 1, time.perf_counter() - began
            print(
                f"{arm:10} seed {seed} round {done:4} accuracy {line['test_accuracy']:.4f} "
                f"({spent / done:.2f} s a round)",
                flush=True,
            )

    done = fedquilt.run(
        seeded(NETWORKS[arguments.task], seed),
        train,
        (test.images[:limit], test.targets[:limit]),
        clients,
        output_dir=None,
        observer=tell,
        mode="fedavg",
        method=arm,
        tiers=arguments.tiers,
        num_rounds=arguments.rounds,
        clients_per_round=COHORT,
        availability="always",
        local_epochs=arguments.local_epochs,
        batch_size=arguments.batch_size,
        learning_rate=arguments.lr * RATE_SHARE.get(arm, 1.0),
        lr_decay=arguments.lr_decay,
        eval_every=10 if arguments.cifar else 10**6,
        seed=seed,
        engine=arguments.engine,
    )
    slices = done.result["slices"]
    own = {tier["width"]: tier["test"]["accuracy"] for tier in slices["tiers"]}
    return float(done.final_accuracy or 0.0), slices["mean"], own


NETWORKS: dict[str, type[nn.Module]] = {
    "mnist": DenseExits,
    "cifar": ResNet18,
    "digits": SmallBatchNorm,
}


def cifar10(folder: str) -> tuple[ImageDataset, ImageDataset]:
    """Return CIFAR-10 from its binary files, or from the compact ones beside their reader."""
    found = sorted(Path(folder).rglob("unpack_cifar10.py"))
    if any(Path(folder).rglob("cifar-10-batches-bin")) or not found:
        return load_dataset("cifar10", folder, download=False)
    spec = importlib.util.spec_from_file_location("unpack_cifar10", found[0])
    if spec is None or spec.loader is None:
        raise SystemExit(f"{found[0]} cannot be loaded")
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    compact = found[0].parent / "compact"

    def read(*names: str) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [reader.load_batch(compact / f"{name}.npz") for name in names]
        images = torch.from_numpy(np.concatenate([images for images, _ in parts]))
        labels = torch.from_numpy(np.concatenate([labels for _, labels in parts]))
        return images.float().div_(255), labels.long()

    images, labels = read(*(f"data_batch_{number}" for number in range(1, 6)))
    test_images, test_labels = read("test_batch")
    mean, std = (f(images, dim=(0, 2, 3), keepdim=True) for f in (torch.mean, torch.std))
    scaled = [(pictures - mean) / std for pictures in (images, test_images)]
    train = ImageDataset(scaled[0], labels, "cifar10", 10)
    return train, ImageDataset(scaled[1], test_labels, "cifar10", 10)


def table(
    arguments: argparse.Namespace, data: tuple[ImageDataset, ImageDataset], partition: str
) -> None:
    """Print one row for every arm."""
    print(
        f"\n{partition}: {arguments.rounds} rounds, {arguments.local_epochs} local epochs, batch "
        f"{arguments.batch_size}, lr {arguments.lr:g}, tiers {arguments.tiers}, "
        f"seeds {arguments.seeds}"
    )
    head = ("method", "accuracy", "std", "parameters", "bytes up", "bytes down", "mult-adds", "s")
    print("{:10}{:>10}{:>8}{:>12}{:>12}{:>12}{:>12}{:>8}  own".format(*head), flush=True)
    for arm in arguments.arms.split(","):
        began = time.perf_counter()
        seeds = [int(seed) for seed in arguments.seeds.split(",")]
        runs = [one_run(arguments, arm, partition, seed, data) for seed in seeds]
        scores, cost = [accuracy for accuracy, _, _ in runs], runs[0][1]
        own = {width: statistics.mean(run[2][width] for run in runs) for width in runs[0][2]}
        spread = statistics.stdev(scores) if len(scores) > 1 else float("nan")
        print(
            f"{arm:10}{statistics.mean(scores):10.4f}{spread:8.4f}{cost['parameters']:12,.0f}"
            f"{cost['bytes_up']:12,.0f}{cost['bytes_down']:12,.0f}{cost['multiply_adds']:12,.0f}"
            f"{(time.perf_counter() - began) / len(seeds):8.1f}  "
            + ", ".join(f"{width}: {score:.4f}" for width, score in own.items()),
            flush=True,
        )


def parse() -> argparse.Namespace:
    """Read the command line; what is left out depends on the data set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cifar", action="store_true", help="ResNet-18 on CIFAR-10 instead")
    parser.add_argument("--batch-norm", action="store_true", help="digits, with BatchNorm")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--arms", default=None)
    parser.add_argument("--partitions", default=None, help="iid,dirichlet")
    parser.add_argument("--seeds", default=None)
    parser.add_argument("--tiers", default=None)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--local-epochs", type=int, default=None)
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--lr", type=float, default=None)
    parser.add_argument("--lr-decay", type=float, default=None)
    parser.add_argument("--engine", default="sequential", help="sequential or batched")
    parser.add_argument("--samples", type=int, default=0, help="use so many images only")
    arguments = parser.parse_args()
    mnist = (ARMS, "iid,dirichlet", "0,1,2", 60, 1, 32, 0.3, 1.0)
    cifar = (CIFAR_ARMS, "iid", "0", 100, 2, 50, 0.1, 0.99)
    digits = (NARROW, "iid", "0,1,2", 20, 2, 16, 0.1, 1.0)
    names = ("arms", "partitions", "seeds", "rounds", "local_epochs", "batch_size", "lr")
    names += ("lr_decay",)
    arguments.task = "cifar" if arguments.cifar else "mnist"
    arguments.task = "digits" if arguments.batch_norm else arguments.task
    arguments.tiers = arguments.tiers or ("1,1/2,1/4" if arguments.batch_norm else "1,1/2,1/4,1/8")
    usual = {"mnist": mnist, "cifar": cifar, "digits": digits}[arguments.task]
    for name, value in zip(names, usual, strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, ",".join(value) if isinstance(value, tuple) else value)
    return arguments


def main() -> None:
    """Run the rows and print the tables."""
    arguments = parse()
    if arguments.cifar:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        data = cifar10(arguments.data_dir or "data")
    elif arguments.batch_norm:
        torch.set_num_threads(1)
        data = load_dataset("digits")
    else:
        torch.set_num_threads(1)
        data = load_dataset("mnist", arguments.data_dir, download=False)
    for partition in arguments.partitions.split(","):
        table(arguments, data, partition)


if __name__ == "__main__":
    main()
