"""What one matching step costs beside a loop over classes.

    python benchmarks/matching.py [--ipc 10] [--device cpu] [--repeats 15] [--threads 1]

Three ways to take the same step, on the same images, targets and ConvNet of 10 classes:

| way | passes | gradients of weights |
|---|---|---|
| Matcher.step | what the package does: classes together | no |
| loop, frozen | forward and backward for each class, then `torch.optim.SGD` | no |
| loop, not frozen | the same | yes: the model was left as it trains, and backward() fills them |

Before anything is timed, the three must agree on the gradient of the pixels.  That is
checked in double precision: in single precision a ReLU whose input is 0 but for rounding
may switch, and one switch moves a pixel's gradient by percents.

All ways run as a condensation does, with freed memory kept (`freed_memory_kept`);
--usual-memory leaves it to glibc.  The ways take turns, so that whatever else the
machine does hits all of them.  Times are medians of a step with their quartiles; the
ratio is one of medians, to the first way, with the quartiles of the ratios of single
turns.  The floor is how many multiply-adds the convolutions need for the forward pass and
the backward pass to the pixels; the last column is how many of them the way does in a
second (gradients of weights, which nobody asked for, do not count).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedquilt.condense.embeds import frozen_copy
from fedquilt.condense.matching import Matcher, MatchingSettings, SyntheticSet, View
from fedquilt.condense.statistics import ClassTargets, StatisticsTable
from fedquilt.models.networks import ConvNet
from fedquilt.training.hardware import freed_memory_kept

CLASSES, MOMENTUM, REAL_IMAGES = 10, 0.5, 32
SHAPES = {"MNIST": (1, 28, 28), "CIFAR": (3, 32, 32)}
WIDTHS = (128, 64)
TOLERANCE = 1e-4
STEPS = {"cpu": 1, "cuda": 20}  # in one turn; a GPU is waited for once in a turn, as in a run
WARM_UP = 2  # turns

Step = Callable[[], object]


class Case:
    """Images, targets and a model, and the ways to take a step with copies of them."""

    def __init__(
        self, model: ConvNet, images: Tensor, targets: Tensor, learning_rate: float
    ) -> None:
        self.model, self.targets, self.learning_rate = model, targets, learning_rate
        self.images = images  # [classes, ipc, C, H, W]; targets are [classes, D]

    @classmethod
    def random(cls, shape: tuple[int, ...], width: int, ipc: int, device: str) -> Case:
        """Draw images, and as targets the mean embeddings of other random images."""
        source = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = ConvNet(shape, CLASSES, width)
        images = torch.randn(CLASSES, ipc, *shape, generator=source)
        real = torch.randn(CLASSES, REAL_IMAGES, *shape, generator=source)
        with torch.no_grad():
            targets = torch.stack([model.embed(one).mean(dim=0) for one in real])
        return cls(model.to(device), images.to(device), targets.to(device), 1.0)

    def double(self) -> Case:
        """Return the case in double precision."""
        model = copy.deepcopy(self.model).double()
        return Case(model, self.images.double(), self.targets.double(), self.learning_rate)

    def ways(self) -> dict[str, tuple[Step, list[Tensor]]]:
        """Return for each way its step and the images of the classes that it moves."""
        return {
            "Matcher.step": self.at_once(),
            "loop, frozen": self.loop(copy.deepcopy(self.model).eval().requires_grad_(False)),
            "loop, not frozen": self.loop(copy.deepcopy(self.model).eval()),
        }

    def at_once(self) -> tuple[Step, list[Tensor]]:
        """Prepare `Matcher.step`."""
        images = self.images.clone()
        ones = torch.ones(CLASSES, dtype=torch.int64, device=images.device)
        table = StatisticsTable(
            models=0 * ones,
            classes=torch.arange(CLASSES, device=images.device),
            counts=REAL_IMAGES * ones,
            features=self.targets,
            logits=self.targets[:, :0],
        )
        synthetic = SyntheticSet(images.flatten(0, 1), tuple(range(CLASSES)), images.shape[1])
        views = [View(frozen_copy(self.model), ClassTargets(table))]
        settings = MatchingSettings(image_lr=self.learning_rate, momentum=MOMENTUM)
        matcher, source = Matcher(synthetic, views, settings), np.random.default_rng(0)
        return lambda: matcher.step(0, source), list(images.unbind())

    def loop(self, model: ConvNet) -> tuple[Step, list[Tensor]]:
        """Prepare a forward and a backward pass for each class."""
        images = [one.clone().requires_grad_(True) for one in self.images.unbind()]
        optimizer = torch.optim.SGD(images, lr=self.learning_rate, momentum=MOMENTUM)

        def step() -> None:
            optimizer.zero_grad()
            for one, target in zip(images, self.targets, strict=True):
                (model.embed(one).mean(dim=0) - target).square().sum().backward()
            optimizer.step()

        return step, images


def check(case: Case) -> float:
    """Return how far the ways are apart in the gradient; stop where that is too far."""
    exact = case.double()
    gradients = {}
    for name, (step, images) in exact.ways().items():
        step()
        after = torch.stack([one.detach() for one in images])
        gradients[name] = (exact.images - after) / exact.learning_rate
    first, *others = gradients.values()
    apart = max(float((first - other).abs().max() / first.abs().max()) for other in others)
    if not apart < TOLERANCE:
        raise SystemExit(f"the ways disagree: gradients differ by {apart:.1e} of the largest entry")
    return apart


def multiply_adds(step: Step) -> float:
    """Return the multiply-adds of one step."""
    with FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops()) / 2


def seconds(step: Step, device: str) -> float:
    """Return how long a step takes, the work of the device included."""
    wait(device)
    began = time.perf_counter()
    for _ in range(STEPS[device]):
        step()
    wait(device)
    return (time.perf_counter() - began) / STEPS[device]


def wait(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, device: str, repeats: int) -> tuple[float, dict[str, NDArray[np.float64]]]:
    """Return the floor, and by way the seconds of each turn."""
    steps = {name: step for name, (step, _) in case.ways().items()}
    floor = multiply_adds(steps["Matcher.step"])
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-WARM_UP, repeats):
        for name, step in steps.items():
            took = seconds(step, device)
            if turn >= 0:
                times[name].append(took)
    return floor, {name: np.array(values) for name, values in times.items()}


def rows(case: Case, device: str, repeats: int) -> list[str]:
    """Return the lines of one case."""
    apart = check(case)
    floor, times = measure(case, device, repeats)
    first = times["Matcher.step"]
    lines = []
    for name, values in times.items():
        low, middle, high = 1e3 * np.quantile(values, (0.25, 0.5, 0.75))
        spread = np.quantile(values / first, (0.25, 0.75))
        ratio = middle / (1e3 * np.median(first))
        lines.append(
            f"{name:<20}{middle:9.2f} ({low:8.2f} to {high:8.2f})"
            f"{ratio:7.2f} ({spread[0]:.2f} to {spread[1]:.2f})"
            f"{floor / 1e9:9.2f}{floor / 1e6 / middle:9.1f}{apart:10.0e}"
        )
    return lines


def describe(device: str) -> str:
    """Return the device in words."""
    if device == "cuda":
        tf32 = "on" if torch.backends.cudnn.allow_tf32 else "off"
        return f"{torch.cuda.get_device_name()}, TF32 {tf32} in convolutions"
    return f"cpu, {torch.get_num_threads()} thread(s)"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ipc", type=int, default=10, help="images of a class")
    parser.add_argument("--device", choices=sorted(STEPS), help="default: both, where there is one")
    parser.add_argument("--repeats", type=int, default=15, help="turns that count")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads on the CPU")
    parser.add_argument(
        "--usual-memory", action="store_true", help="do not let glibc keep freed memory"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    both = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    print(
        f"{CLASSES} classes of {options.ipc} images, {options.repeats} turns, "
        f"torch {torch.__version__}"
    )
    print(
        f"{'':<20}{'ms a step':>9} {'(quartiles)':<22}{'ratio':>7} {'(quartiles)':<14}"
        f"{'GMAC':>9}{'GMAC/s':>9}{'apart':>10}"
    )
    memory = contextlib.nullcontext() if options.usual_memory else freed_memory_kept()
    with memory:
        for device in [options.device] if options.device else both:
            for (data, shape), width in itertools.product(SHAPES.items(), WIDTHS):
                print(f"{describe(device)}: {data}-like {shape}, width {width}")
                case = Case.random(shape, width, options.ipc, device)
                print("\n".join(rows(case, device, options.repeats)), flush=True)


if __name__ == "__main__":
    main()
