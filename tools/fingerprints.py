"""Digests of the models and histories of seeded runs: a refactoring must not change one of them.

    python tools/fingerprints.py before.json              # on the code of before
    python tools/fingerprints.py after.json --compare before.json

Every run has a noise seed, one thread, and a small task of the embedded digits.  The digests
depend on the processor and on torch's version, so both files come from one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

TINY: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "num_clients": 10,
    "clients_per_round": 5,
    "num_rounds": 3,
    "local_epochs": 2,
    "seed": 3,
}
CERTIFIED = {**TINY, "mode": "certified", "noise_seed": 11}
SLICED = {**TINY, "mode": "fedavg", "tiers": "1,1/2,1/4"}
CONDENSED = {
    **{key: TINY[key] for key in ("dataset", "num_clients", "seed")},
    "method": "condense",
    "model": "convnet",
    "availability": "always",
    "num_rounds": 3,
    "ipc": 1,
    "model_epochs": 2,
}
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {**TINY, "mode": "fedavg"},
    "fixed_dp": {**CERTIFIED, "mode": "fixed_dp"},
    "quap_fl": {**CERTIFIED, "mode": "quap_fl"},
    "quap_fl_client": {**CERTIFIED, "mode": "quap_fl_client"},
    "certified": CERTIFIED,
    "certified, sequential": {**CERTIFIED, "engine": "sequential"},
    "certified, batched": {**CERTIFIED, "engine": "batched"},
    "certified, processes": {**CERTIFIED, "engine": "processes"},
    "certified, worst case": {**CERTIFIED, "policy": "worst_case"},
    "certified, convolutions": {**CERTIFIED, "model": "digits"},
    "certified, adam": {**CERTIFIED, "optimizer": "adam"},
    "fedavg, server adam": {**TINY, "mode": "fedavg", "server_optimizer": "adam"},
    "fedavg, fedprox": {**TINY, "mode": "fedavg", "fedprox_mu": 0.1},
    "heterofl": {**SLICED, "method": "heterofl"},
    "heterofl, certified": {**CERTIFIED, "tiers": "1,1/2,1/4", "method": "heterofl"},
    "fedrolex": {**SLICED, "method": "fedrolex"},
    "dropout": {**SLICED, "method": "dropout"},
    "mfl": {**SLICED, "method": "mfl"},
    "fjord": {**SLICED, "method": "fjord"},
    "condense": {**CONDENSED, "dc_iterations": 3, "model_n": 2, "min_group": 4},
    "condense, certified": {**CONDENSED, "mode": "certified", "noise_seed": 11},
}
TIMES = ("seconds", "time", "timestamp")


def without_times(value: Any) -> Any:
    """Return a record without what the clock put into it."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not any(word in k for word in TIMES)}
        return {key: without_times(inner) for key, inner in sorted(kept.items())}
    if isinstance(value, list):
        return [without_times(inner) for inner in value]
    return value


def fingerprint(settings: dict[str, Any]) -> dict[str, str]:
    """Run a configuration and return the digests of its model, its rounds and its history."""
    import torch

    from fedquilt.config import build_config
    from fedquilt.experiment import run_config

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = run_config(build_config({**settings, "output_dir": folder}))
        model = hashlib.sha256()
        for name, tensor in sorted(result.model.state_dict().items()):
            model.update(name.encode())
            model.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        (rounds,) = Path(folder).glob("*/rounds.jsonl")
        lines = [without_times(json.loads(line)) for line in rounds.read_text().splitlines()]
        data = json.loads((rounds.parent / "result.json").read_text())
    history = without_times(data["history"])
    statement = data["statement"]
    return {
        "model": model.hexdigest()[:16],
        "rounds": _digest(lines),
        "history": _digest(history),
        "statement": _digest(statement),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", help="runs whose name has this in it")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name, settings in RUNS.items():
        if given.only is None or given.only in name:
            try:
                found[name] = fingerprint(settings)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{name:28} {found[name]}", flush=True)
    given.output.write_text(json.dumps(found, indent=1))
    if given.compare is None:
        return 0
    before = json.loads(given.compare.read_text())
    changed = [
        f"{name}: {key}"
        for name, digests in found.items()
        for key in {**digests, **before.get(name, {})}
        if digests.get(key) != before.get(name, {}).get(key)
    ]
    print(f"{len(found)} runs compared, {len(changed)} digests changed", *changed, sep="\n")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
