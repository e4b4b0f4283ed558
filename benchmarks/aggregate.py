"""How fast unequal slices are averaged, and how much memory that takes.

    python benchmarks/aggregate.py [--clients 100] [--peer-python PATH]

100 clients of ResNet-18 at widths 1, 1/2, 1/4 and 1/8 in turn are averaged over their
holders.  The yardstick is plain averaging of equal models with as many bytes: one
in-place addition for each client and tensor.  Memory is the peak above the inputs; the
result is one model of it.  The last rows add flat vectors one at a time into a total
that is there already, by blocks and by an int64 index of every element.

With --peer-python, the path of an interpreter that has heflwr 0.1.91, the layers of the
same model are also averaged by both packages' `aggregate_layer`, one after the other.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedquilt.models import ResNet18
from fedquilt.slices import (
    ModelSlice,
    Prefix,
    RandomUnits,
    Selection,
    SliceMap,
    Slicer,
    Window,
    extract_state,
    merge_states,
)

WIDTHS = ("1", "1/2", "1/4", "1/8")
LAYERS = Path(__file__).with_name("aggregate_layers.py")

State = dict[str, Tensor]


def fastest(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the seconds of the fastest of some calls of each; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in seconds.items()}


def peak_above(call: Callable[[], object]) -> float:
    """Return by how many bytes a call raises the process's memory at its peak (Linux, glibc)."""
    library = ctypes.CDLL(None)
    library.mallopt(-3, 65536)  # give every larger block back at once, so that it is counted
    library.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = memory("VmRSS")
    kept = call()
    peak = memory("VmHWM")
    del kept
    return peak - before


def memory(name: str) -> float:
    """Return a field of the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def fed_avg(states: Sequence[State], weights: Sequence[float]) -> State:
    """Return the plain weighted mean of equal models."""
    total = sum(weights)
    mean = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    for name, target in mean.items():
        for state, weight in zip(states, weights, strict=True):
            target.add_(state[name], alpha=weight / total)
    return mean


def num_bytes(states: Sequence[State]) -> int:
    """Return the bytes that clients send."""
    return sum(tensor.nbytes for state in states for tensor in state.values())


def clients_of(plan: Slicer, slices: Sequence[ModelSlice]) -> list[State]:
    """Return the clients' states, each different from the model."""
    whole = plan.model.state_dict()
    states = [extract_state(whole, one) for one in slices]
    for number, client in enumerate(states):
        for tensor in client.values():
            tensor.add_(0.01 * number)
    return states


def selections_of(kind: str, clients: int) -> list[Selection]:
    """Return the clients' slices: their widths take turns."""
    widths = [WIDTHS[client % len(WIDTHS)] for client in range(clients)]
    if kind == "prefix":
        return [Prefix(width) for width in widths]
    if kind == "rolling window":
        return [Window(width, 40) for width in widths]
    return [RandomUnits(width, seed) for seed, width in enumerate(widths)]


def holders(kind: str, plan: Slicer, clients: int) -> tuple[Callable[[], object], int]:
    """Return the aggregation of slices, ready to be called, and the bytes it takes in."""
    slices = [plan.slice(selection) for selection in selections_of(kind, clients)]
    states, weights = clients_of(plan, slices), [float(1 + k % 7) for k in range(clients)]
    whole = plan.model.state_dict()
    return lambda: merge_states(whole, states, slices, weights), num_bytes(states)


def plain(plan: Slicer, clients: int) -> tuple[Callable[[], object], int]:
    """Return plain averaging of whole models with about as many bytes, and the bytes."""
    sizes = [sum(one.numel for _, one in plan.slice(width).items) for width in WIDTHS]
    number = max(2, round(clients * sum(sizes) / len(sizes) / sizes[0]))
    states = clients_of(plan, [plan.slice("1")] * number)
    weights = [float(1 + k % 7) for k in range(number)]
    return lambda: fed_avg(states, weights), num_bytes(states)


def stream(plan: Slicer, clients: int, by_index: bool) -> tuple[Callable[[], object], int]:
    """Return the addition of flat vectors, one client after the other, and the bytes."""
    maps = {width: SliceMap.between(plan.model, plan.build(width)) for width in WIDTHS}
    vectors = {width: torch.rand(one.size) for width, one in maps.items()}
    index = {width: one.index() for width, one in maps.items()} if by_index else {}
    turns = [WIDTHS[client % len(WIDTHS)] for client in range(clients)]
    total = torch.zeros(maps["1"].whole_size)

    def add_all() -> None:
        for width in turns:
            if by_index:
                total.index_add_(0, index[width], vectors[width])
            else:
                maps[width].scatter_add_(total, vectors[width])

    return add_all, sum(vectors[width].nbytes for width in turns)


def measure_peer(python: str, clients: int, repeats: int) -> list[str]:
    """Return the lines about both packages' aggregate_layer on the same layers."""
    seconds = {}
    for name, interpreter in (("fedquilt", sys.executable), ("heflwr", python)):
        command = [interpreter, str(LAYERS), name, str(clients), str(repeats)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds[name] = json.loads(done.stdout.splitlines()[-1])
    lines = [f"aggregate_layer, {clients} clients: fedquilt s, heflwr s, times faster"]
    for layer, ours in seconds["fedquilt"].items():
        theirs = seconds["heflwr"][layer]
        ratio = f"{theirs / ours:.1f}" if theirs is not None else "it fails"
        lines.append(f"  {layer:28s} {ours:8.4f} {theirs or float('nan'):8.4f} {ratio:>9s}")
    both = [(ours, seconds["heflwr"][layer]) for layer, ours in seconds["fedquilt"].items()]
    worked = [(ours, theirs) for ours, theirs in both if theirs is not None]
    total = [sum(column) for column in zip(*worked, strict=True)]
    lines.append(f"  {'together':28s} {total[0]:8.4f} {total[1]:8.4f} {total[1] / total[0]:9.1f}")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100, help="clients that are averaged")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest of so many counts")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--peer-python", help="an interpreter that has heflwr")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plan = Slicer(ResNet18())
    cases = {"plain averaging, equal models": plain(plan, options.clients)}
    for kind in ("prefix", "rolling window", "random units"):
        cases[f"over holders, {kind}"] = holders(kind, plan, options.clients)
    cases["flat vectors, by blocks"] = stream(plan, options.clients, by_index=False)
    cases["flat vectors, by index"] = stream(plan, options.clients, by_index=True)
    seconds = fastest({name: call for name, (call, _) in cases.items()}, options.repeats)
    speeds = {name: seconds[name] / size * 1e9 for name, (_, size) in cases.items()}
    yardstick = speeds["plain averaging, equal models"]
    model = num_bytes([plan.model.state_dict()])
    print(f"ResNet-18, {options.clients} clients at widths {', '.join(WIDTHS)}")
    print(f"{'':32s} ns/byte  of plain  peak memory, in models")
    for name, (call, _) in cases.items():
        peak = peak_above(call) / model
        print(f"{name:32s} {speeds[name]:7.3f}  {speeds[name] / yardstick:8.2f}  {peak:11.2f}")
    if options.peer_python:
        print("\n".join(measure_peer(options.peer_python, options.clients, options.repeats)))


if __name__ == "__main__":
    main()
