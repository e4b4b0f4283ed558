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
difference over all clients and rounds, or why an engine refuses the model.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

import fedquilt
from fedquilt.config.modes import MODES
from fedquilt.errors import InvalidValueError
from fedquilt.learning import ClientUpdate, Engine
from fedquilt.learning.batched import BatchedEngine
from fedquilt.learning.devices import DevicesEngine
from fedquilt.learning.local import SequentialEngine
from fedquilt.learning.processes import ProcessEngine
from fedquilt.method import MethodParts
from fedquilt.models import make_model

LIMIT = 1e-5
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
    "lstm": (80,),
    "hog-linear": (1, 28, 28),
    "scatter-linear": (1, 28, 28),
}
SMALL = ("digits", "mlp", "linear")
AMPLIFIED = "certified, secret coin"
WAYS = ("batched", "stacked", "processes", "devices")


class _Stacked(BatchedEngine):
    """The batched engine without steps by hand."""

    def _make_by_hand(self, model: Any) -> None:
        return None


def make(way: str, parts: MethodParts) -> Engine:
    """Return an engine of a run."""
    given = (parts.flat.module, parts.task, parts.local_settings)
    if way == "processes":
        return ProcessEngine(*given, workers=2)
    if way == "devices":
        return DevicesEngine(*given, [torch.device("cpu")] * 2)
    return (BatchedEngine if way == "batched" else _Stacked)(*given)


class Compared:
    """The sequential engine, which has every cohort trained in other ways, too."""

    def __init__(self, parts: MethodParts, ways: Sequence[str], cells: dict[str, Any]) -> None:
        self._first = SequentialEngine(parts.flat.module, parts.task, parts.local_settings)
        self._others: dict[str, Engine] = {}
        self._cells = cells
        for way in ways:
            try:
                self._others[way] = make(way, parts)
                cells[way] = 0.0
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
            except InvalidValueError as error:  # two devices say it when they begin
                self._cells[way] = str(error)
                continue
            unmoved = torch.equal(before[0], torch.get_rng_state())
            alike = unmoved and before[1] == str(np.random.get_state())
            worst = difference(found, wanted) if alike else math.inf
            self._cells[way] = max(self._cells[way], worst)
        yield from wanted

    @staticmethod
    def _kept(update: ClientUpdate) -> ClientUpdate:
        return ClientUpdate(update.client, update.delta.clone(), update.num_examples, update.loss)

    def close(self) -> None:
        """Close all engines."""
        for engine in (self._first, *self._others.values()):
            engine.close()


def difference(found: Sequence[ClientUpdate], wanted: Sequence[ClientUpdate]) -> float:
    """Return the largest relative difference of two cohorts' updates; inf where they are others."""
    if [(u.client, u.num_examples) for u in found] != [(u.client, u.num_examples) for u in wanted]:
        return math.inf
    worst = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        norm, gap = float(theirs.delta.norm()), float((ours.delta - theirs.delta).norm())
        worst = max(worst, gap / norm if norm else gap)
        if not math.isclose(ours.loss, theirs.loss, rel_tol=LIMIT, abs_tol=LIMIT):
            return math.inf
    return worst


def compare(model: str, mode: str, ways: Sequence[str]) -> dict[str, Any]:
    """Return, for each way, the largest difference in a run, or why it refuses the model."""
    cells: dict[str, Any] = {}
    random = torch.Generator().manual_seed(3)
    shape, count = SHAPES[model], sum(SIZES)
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
    fedquilt.run(
        make_model(model, shape, 10, seed=5),
        (inputs, targets),
        None,
        np.split(np.arange(count), np.cumsum(SIZES)[:-1]),
        engine=lambda parts: Compared(parts, ways, cells),
        num_rounds=2,
        clients_per_round=0.99 if mode == AMPLIFIED else 1.0,
        local_epochs=2,
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
    worst, notes = 0.0, []
    for model, mode in cases:
        began = time.perf_counter()
        cells = compare(model, mode, ways)
        worst = max([worst, *(value for value in cells.values() if not isinstance(value, str))])
        notes += [f"{model}: {value}" for value in cells.values() if isinstance(value, str)]
        values = [cells[way] for way in ways]
        shown = ["refused" if isinstance(value, str) else f"{value:.1e}" for value in values]
        seconds = time.perf_counter() - began
        print(f"| {model} | {mode} | {' | '.join(shown)} | {seconds:.1f} |", flush=True)
    print("\nrefused:\n" + "\n".join(dict.fromkeys(notes)) if notes else "")
    word = "holds" if worst <= LIMIT else "DOES NOT HOLD"
    print(f"\n{word}: every update within {LIMIT:g} of the sequential engine's (worst {worst:.1e})")


if __name__ == "__main__":
    main()
