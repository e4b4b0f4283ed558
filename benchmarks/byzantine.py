"""Accuracy under attack, of every aggregation rule and of `certified`, on the embedded digits.

    python benchmarks/byzantine.py [--seeds 0,1,2] [--attackers 0.2] [--table]

The population and the training of `demo.toml` (100 clients, cohorts of those who are there,
60 rounds); a fifth of all clients is hostile.  Rules are told that fifth.  `norm_bound`,
`centred_clipping` and `certified` have the clip of `demo.toml`, which was chosen without attacks.
The last column is the share of test images of other digits that are taken for a 0 when they show
the trigger of the backdoor.  A run is a line of `docs/robust.jsonl`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kept
from fedquilt.config import build_config
from fedquilt.config.choices import AGGREGATIONS, ATTACKS
from fedquilt.data import load_dataset
from fedquilt.experiment.api import run_in_memory
from fedquilt.training.attacks import BACKDOOR_CLASS, with_trigger

SHARED: dict[str, Any] = {
    "dataset": "digits",
    "model": "hog-linear",
    "num_clients": 100,
    "clients_per_round": 1.0,
    "num_rounds": 60,
    "local_epochs": 1,
    "batch_size": 16,
    "learning_rate": 0.2,
    "eval_every": 60,
}
CLIPPED: dict[str, Any] = {"clip_norm": 0.2}
OF_RULE: dict[str, dict[str, Any]] = {
    "norm_bound": CLIPPED,
    "centred_clipping": CLIPPED,
    "majority": {"server_lr": 0.01},
}


_CERTIFIED = {"mode": "certified", "epsilon": 6.0, **CLIPPED}
FILE = kept.DOCS / "robust.jsonl"
TOLD = ("trimmed_mean", "krum", "multi_krum")
ARMS: dict[str, dict[str, Any]] = {
    rule: {"mode": "fedavg", "aggregation": rule, **OF_RULE.get(rule, {})} for rule in AGGREGATIONS
} | {
    "certified": {**_CERTIFIED, "normalise_updates": False},
    "certified --normalise-updates": {**_CERTIFIED, "normalise_updates": True},
}
"""What is compared: every rule without noise, and the certified mode."""


def fooled(model: torch.nn.Module) -> float:
    """Return which share of images of other digits the trigger makes a 0."""
    _, test = load_dataset("digits")
    others = test.targets != BACKDOOR_CLASS
    with torch.no_grad():
        found = model(with_trigger(test.images)[others]).argmax(dim=1)
    return float((found == BACKDOOR_CLASS).float().mean())


def run(key: kept.Line) -> kept.Line:
    """Return the accuracy of a run, and how often the trigger works, in percent."""
    settings, attackers = {**SHARED, **ARMS[key["rule"]], "seed": key["seed"]}, key["attackers"]
    if key["rule"] in TOLD:
        settings["byzantine_fraction"] = min(attackers, 0.49)
    if key["attack"] != "none":
        settings |= {"attack": key["attack"], "attackers": attackers}
    done = run_in_memory(build_config(settings))
    assert done.model is not None
    accuracy, works = done.metrics["accuracy"], fooled(done.model)
    return {"accuracy": round(100 * accuracy, 2), "works": round(100 * works, 2)}


def measure(key: kept.Line) -> kept.Line:
    """Return the line of a run, which is made when the file does not have it."""
    return next(x for x in kept.fill(FILE, [key], run) if key.items() <= x.items())


def table(lines: Sequence[kept.Line], attackers: float) -> str:
    """Return a table of the page: accuracy under each attack, and how often the trigger works."""
    heads = [name.replace("_", " ") for name in ATTACKS[1:]]
    out = [f"| | no attack | {' | '.join(heads)} | backdoor works |", "|---" * 9 + "|"]
    for rule in ARMS:
        mine = [x for x in lines if (x["rule"], x["attackers"]) == (rule, attackers)]
        found = {name: [x for x in mine if x["attack"] == name] for name in ATTACKS}
        if all(found.values()):
            cells = [kept.cell([x["accuracy"] for x in found[name]]) for name in ATTACKS]
            cells.append(kept.cell([x["works"] for x in found["backdoor"]]))
            out.append(f"| `{rule}` | {' | '.join(cells)} |")
    return "\n".join(out)


def main() -> None:
    """Make the runs that the file lacks, and print the table."""
    parser = kept.arguments(__doc__, FILE)
    parser.add_argument("--attackers", type=float, default=0.2)
    given = parser.parse_args()
    wanted = [
        {"attackers": given.attackers, "rule": rule, "attack": attack, "seed": int(seed)}
        for rule in ARMS
        for attack in ATTACKS
        for seed in given.seeds.split(",")
    ]
    print(table(kept.fill(given.file, [] if given.table else wanted, run), given.attackers))


if __name__ == "__main__":
    main()
