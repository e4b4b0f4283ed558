"""Do the engines agree: every built-in model and every mode, cohort by cohort.

    python benchmarks/agreement.py [--models NAME,NAME] [--modes NAME,NAME] [--ways NAME,NAME]

A run trains two rounds with the engine `sequential`.  Before each cohort is handed on, the other
ways train the same cohort from the same weights, and every client's update is compared:
|update - sequential's| / |sequential's|, which must be at most 1e-5 in float32.  A shuffle, a
dropout mask or a batch that came from another random stream would show as a number near one;
numbers of samples and losses are compared as well, and the generators of torch and NumPy must
be left as they were.

| way | what it is |
|---|---|
| batched | the batched engine as it is: steps by hand where it knows all layers |
| stacked | the batched engine without steps by hand: the model on a stack of clients |
| processes | two worker processes |
| devices | two batched engines on the CPU, each in a process of its own |

All models in the first mode, then the other modes on small models.  A cell is the largest
difference over all clients and rounds.  In a deep network the last bit of a sum may send a unit to
the other side of its ReLU, or a window of the pooling to another pixel, and the client's weights
then move apart.  So a client above the limit is trained by the *sequential* engine again, from
weights that are 2^-22 to 2^-19 larger or smaller, two millionths at the most: sums of some hundred
products round as much, in Winograd's form above all.  Where that moves its update as far, it is
rounding that decides, and no engine is right or wrong; such clients are counted apart.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

import fedquilt
from fedquilt.common.errors import InvalidValueError, WorkerError
from fedquilt.config.choices import DRAWN_WIDTHS
from fedquilt.config.modes import MODES
from fedquilt.method import MethodParts
from fedquilt.models import make_model
from fedquilt.training import ClientUpdate, Engine, make_engine
from fedquilt.training.engines import DevicesEngine, LocalEngine, batched_trainer
from fedquilt.training.engines.workers import ProcessEngine
from fedquilt.training.trainers.vmap import VmapTrainer

LIMIT, _LOSSES = 1e-5, 1e-4
NUDGES, DRAWS = (2.0**-22, 2.0**-21, 2.0**-20, 2.0**-19), 24
SIZES = (5, 3, 8, 1, 4, 6)
SHAPES: dict[str, tuple[int, ...]] = {
    "digits": (1, 8, 8),
    "mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "mlp": (1, 8, 8),
    "linear": (1, 8, 8),
    "exits": (3, 32, 32),
    "convnet": (3, 32, 32),
    "convnet-64": (3, 32, 32),
    "convnet-32": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "resnet18-batchnorm": (3, 32, 32),
    "lenet": (1, 28, 28),
    "lstm": (80,),
    "hog-linear": (1, 28, 28),
    "scatter-linear": (1, 28, 28),
    "hog-drawn-linear": (1, 28, 28),
    **{f"drawn-linear-{width}": (3, 32, 32) for width in DRAWN_WIDTHS},
}
DEEP = ("resnet18", "resnet18-batchnorm")
"""Two clients, one round of one epoch: more steps move apart by rounding, and take minutes."""
SMALL = ("digits", "mlp", "linear")
AMPLIFIED = "certified, secret coin"
WAYS = ("batched", "stacked", "processes", "devices")


def make(way: str, parts: MethodParts) -> Engine:
    """Return an engine of a run."""
    given = (parts.flat.module, parts.task, parts.local_settings)
    if way == "processes":
        return ProcessEngine(*given, workers=2)
    if way == "devices":
        return DevicesEngine(*given, [torch.device("cpu")] * 2)
    return LocalEngine(VmapTrainer(*given) if way == "stacked" else batched_trainer(*given))


class Gap(NamedTuple):
    """How far two updates are apart, and whether rounding alone may take them as far."""

    far: float
    by_chance: bool


class Compared:
    """The sequential engine, which has every cohort trained in other ways, too."""

    def __init__(self, parts: MethodParts, ways: Sequence[str], cells: dict[str, Any]) -> None:
        self._first = make_engine("sequential", parts.flat.module, parts.task, parts.local_settings)
        self._others: dict[str, Engine] = {}
        self._cells = cells
        for way in ways:
            try:
                self._others[way] = make(way, parts)
                cells[way] = []
            except InvalidValueError as error:
                cells[way] = str(error)

    def train(
        self, start: torch.Tensor, cohort: Any, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the sequential engine's updates, compared."""
        given = (start, cohort, round_index, learning_rate)
        wanted = [self._kept(update) for update in self._first.train(*given)]
        for way, engine in self._others.items():
            before = torch.get_rng_state(), str(np.random.get_state())
            try:
                found = list(engine.train(*given))
            except WorkerError as error:  # two devices say it when they begin
                if "cannot train this model" not in str(error):
                    raise
                self._cells[way] = str(error)
                continue
            unmoved = torch.equal(before[0], torch.get_rng_state())
            alike = unmoved and before[1] == str(np.random.get_state())
            gaps = differences(found, wanted) if alike else [math.inf]
            for gap, update in zip(gaps, wanted, strict=False):
                chance = gap > LIMIT and self._by_rounding(gap, update, *given)
                self._cells[way].append(Gap(gap, chance))
        yield from wanted

    def _by_rounding(
        self,
        gap: float,
        update: ClientUpdate,
        start: torch.Tensor,
        cohort: Any,
        round_index: int,
        learning_rate: float,
    ) -> bool:
        """Return whether nudges of the start move what a client sends about as far as `gap`."""
        random = torch.Generator().manual_seed(0)
        for nudge in NUDGES * DRAWS:
            signs = torch.randint(0, 2, start.shape, generator=random) * 2 - 1
            given = (start * (1 + nudge * signs), [update.client], round_index, learning_rate)
            moved = differences([self._kept(u) for u in self._first.train(*given)], [update])
            if gap <= 1.1 * moved[0]:
                return True
        return False

    @staticmethod
    def _kept(update: ClientUpdate) -> ClientUpdate:
        return ClientUpdate(update.client, update.delta.clone(), update.num_examples, update.loss)

    def close(self) -> None:
        """Close all engines."""
        for engine in (self._first, *self._others.values()):
            engine.close()


def differences(found: Sequence[ClientUpdate], wanted: Sequence[ClientUpdate]) -> list[float]:
    """Return the relative differences of two cohorts' updates; inf where they are others."""
    if [(u.client, u.num_examples) for u in found] != [(u.client, u.num_examples) for u in wanted]:
        return [math.inf] * len(wanted)
    gaps = []
    for ours, theirs in zip(found, wanted, strict=True):
        norm, gap = float(theirs.delta.norm()), float((ours.delta - theirs.delta).norm())
        gap = gap / norm if norm else gap
        if not math.isclose(ours.loss, theirs.loss, rel_tol=_LOSSES, abs_tol=_LOSSES):
            gap = max(gap, abs(ours.loss - theirs.loss) / max(abs(theirs.loss), 1.0))
        gaps.append(math.inf if math.isnan(gap) else gap)
    return gaps


def compare(model: str, mode: str, ways: Sequence[str]) -> dict[str, Any]:
    """Return, for each way, all clients' differences, or why it refuses the model."""
    cells: dict[str, Any] = {}
    random = torch.Generator().manual_seed(3)
    sizes = SIZES[:2] if model in DEEP else SIZES
    shape, count = SHAPES[model], sum(sizes)
    if model == "lstm":
        inputs = torch.randint(0, 10, (count, *shape), generator=random)
    else:
        inputs = torch.randn(count, *shape, generator=random)
    targets = torch.randint(0, 10, (count,), generator=random)
    settings: dict[str, Any] = {"mode": mode}
    if mode == AMPLIFIED:
        coin = {"selection": "poisson", "amplification": True, "policy": "worst_case"}
        settings = {"mode": "certified", **coin}
    if mode in ("fixed_dp", "quap_fl"):
        settings["noise_layers"] = "all"
    if mode not in ("fedavg", AMPLIFIED):  # the second round begins alike every time
        settings["noise_seed"] = 7
    fedquilt.run(
        make_model(model, shape, 10, seed=5),
        (inputs, targets),
        None,
        np.split(np.arange(count), np.cumsum(sizes)[:-1]),
        engine=lambda parts: Compared(parts, ways, cells),
        num_rounds=1 if model in DEEP else 2,
        clients_per_round=0.99 if mode == AMPLIFIED else 1.0,
        local_epochs=1 if model in DEEP else 2,
        batch_size=4,
        learning_rate=0.05,
        client_test_fraction=0.0,
        output_dir=None,
        quiet=True,
        **settings,
    )
    return cells


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    models, modes, ways = (getattr(options, key).split(",") for key in ("models", "modes", "ways"))
    torch.set_num_threads(1)
    if "certified" in modes:
        modes.append(AMPLIFIED)
    cases = [(model, modes[0]) for model in models]
    cases += [(model, mode) for mode in modes[1:] for model in models if model in SMALL]
    print(f"| model | mode | {' | '.join(ways)} | s |\n|{'---|' * (len(ways) + 3)}")
    notes, counts = [], {"above": 0, "by chance": 0, "all": 0}
    for model, mode in cases:
        began = time.perf_counter()
        cells = compare(model, mode, ways)
        notes += [f"{model}: {value}" for value in cells.values() if isinstance(value, str)]
        for gaps in cells.values():
            gaps = [] if isinstance(gaps, str) else gaps
            counts["all"] += len(gaps)
            counts["by chance"] += sum(gap.by_chance for gap in gaps)
            counts["above"] += sum(gap.far > LIMIT and not gap.by_chance for gap in gaps)
        seconds = time.perf_counter() - began
        shown = " | ".join(cell(cells[way]) for way in ways)
        print(f"| {model} | {mode} | {shown} | {seconds:.1f} |", flush=True)
    if notes:
        print("\nrefused:\n" + "\n".join(line[:160] for line in dict.fromkeys(notes)))
    print(
        f"\n{counts['all']} updates; beyond {LIMIT:g} of the sequential engine's: "
        f"{counts['above']}, and {counts['by chance']} that its own rounding moves as far"
    )


def cell(gaps: list[Gap] | str) -> str:
    """Return what the table says of a way."""
    if isinstance(gaps, str):
        return "refused"
    sure = [gap.far for gap in gaps if not gap.by_chance]
    count = sum(far > LIMIT for far in sure)
    more = f" ({count} of {len(gaps)} clients)" if count else ""
    chance = [gap.far for gap in gaps if gap.by_chance]
    ties = f"; {len(chance)} by rounding, {max(chance):.0e}" if chance else ""
    return f"{max(sure, default=0.0):.1e}{more}{ties}"


if __name__ == "__main__":
    main()
