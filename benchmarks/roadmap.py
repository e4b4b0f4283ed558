"""Each part of the roadmap against its paper's central claim, beside plain FedAvg: one table.

    python benchmarks/roadmap.py [--seeds 0,1,2] [--only scaffold,topk] [--table]

On scikit-learn's digits, dealt to 20 clients by Dirichlet(0.1) so that most of them know two or
three digits.  A part is a row of `PARTS`: its claim, and a function of the seed that returns what
plain FedAvg measures and what the part measures, in the units of the row.  Rules against hostile
clients are from `byzantine.py`, attacks on oneself from `attacks.py`, with their own settings.

What is measured is a line of `docs/roadmap.jsonl`; what that has is not measured again.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import attacks, byzantine, kept
from fedquilt.config import build_config
from fedquilt.experiment.api import run_in_memory
from fedquilt.population.fleet import device_seconds
from fedquilt.record.result import RunResult

FILE = kept.DOCS / "roadmap.jsonl"
SHARED: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "mode": "fedavg",
    "num_clients": 20,
    "dirichlet_alpha": 0.1,
    "clients_per_round": 5,
    "availability": "always",
    "num_rounds": 30,
    "local_epochs": 5,
    "batch_size": 16,
    "learning_rate": 0.05,
    "eval_every": 30,
}


@dataclass(frozen=True)
class Part:
    """A row: `measure(seed)` returns (plain FedAvg, with the part)."""

    claim: str
    measure: Callable[[int], tuple[float, float]]
    unit: str = "accuracy, %"


_PLAIN: dict[tuple[Any, ...], RunResult] = {}


def trained(seed: int, **settings: Any) -> RunResult:
    """Return a run of the shared setting with some changes; equal ones are run once."""
    key = (seed, *sorted(settings.items()))
    if key not in _PLAIN:
        _PLAIN[key] = run_in_memory(build_config({**SHARED, **settings, "seed": seed}))
    return _PLAIN[key]


def accuracy(seed: int, **settings: Any) -> float:
    """Return the test accuracy of a run, in percent."""
    return 100 * float(trained(seed, **settings).metrics["accuracy"])


def against_fedavg(shared: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Return what measures the accuracy without and with some settings, beside shared ones."""
    both = shared or {}

    def measure(seed: int) -> tuple[float, float]:
        return accuracy(seed, **both), accuracy(seed, **both, **settings)

    return measure


def on_own_samples(**settings: Any) -> Any:
    """Return what measures models on samples that each client holds back: shared, and its own."""
    held = {"client_test_fraction": 0.3}

    def mean(rows: list[dict[str, Any]] | None, key: str) -> float:
        return 100 * statistics.mean(float(x[key]) for x in rows or [] if x[key] is not None)

    def measure(seed: int) -> tuple[float, float]:
        plain, with_it = trained(seed, **held), trained(seed, **held, **settings)
        return mean(plain.client_metrics, "accuracy"), mean(with_it.client_metrics, "own_accuracy")

    return measure


def spread_of_energy(seed: int) -> tuple[float, float]:
    """Return how much more than the mean the client spends that spends most, in percent."""
    found = []
    for selection in ("uniform", "energy"):
        done = trained(seed, selection=selection, clients_per_round=4)
        cohorts = done.result["history"]["client_participation"]
        joins = Counter(client for cohort in cohorts for client in cohort)
        mean = sum(joins.values()) / SHARED["num_clients"]
        found.append(100 * (max(joins.values()) / mean - 1))
    return found[0], found[1]


LONGER = {"num_rounds": 300, "eval_every": 300}
OWN_UNIT = "accuracy on clients' own samples, %"
PARTS: dict[str, Part] = {
    "fedper": Part(
        "a head of one's own fits one's own data better than the shared model",
        on_own_samples(personal="fedper"),
        OWN_UNIT,
    ),
    "fedrep": Part(
        "heads and the shared part in turns: the same",
        on_own_samples(personal="fedrep", personal_epochs=5),
        OWN_UNIT,
    ),
    "ditto": Part(
        "a model of one's own near the shared one: the same",
        on_own_samples(personal="ditto", personal_epochs=5),
        OWN_UNIT,
    ),
    "finetune": Part(
        "some steps of one's own at the end: the same",
        on_own_samples(personal="finetune", personal_epochs=5),
        OWN_UNIT,
    ),
    "energy": Part(
        "picking who has spent least spends a fleet's energy evenly",
        spread_of_energy,
        "most joules of a client above the mean, %",
    ),
    "scaffold": Part(
        "control variates undo client drift: more accurate on skewed data after as many rounds",
        against_fedavg(correction="scaffold"),
    ),
    "feddyn": Part(
        "clients' optima agree with the global one: more accurate after as many rounds",
        against_fedavg(correction="feddyn", feddyn_alpha=0.1),
    ),
    "fednova": Part(
        "uneven numbers of local steps do not bias the model",
        against_fedavg(correction="fednova"),
    ),
    "topk": Part(
        "a twentieth of the numbers, with error feedback, learns as well: bytes up / 10",
        against_fedavg(compression="topk", compression_share=0.05),
    ),
    "randomk": Part(
        "random places, with error feedback, learn as well in the end: bytes up / 10",
        against_fedavg(LONGER, compression="randomk", compression_share=0.1),
        "accuracy after 300 rounds, %",
    ),
    "qsgd": Part(
        "4 bits a number without bias learn as well: bytes up / 8",
        against_fedavg(compression="qsgd"),
    ),
    "sign": Part(
        "one bit a number with error feedback: bytes up / 32", against_fedavg(compression="sign")
    ),
    "majority": Part(
        "one bit a number and a majority vote: bytes up / 32",
        against_fedavg(compression="sign", aggregation="majority", server_lr=0.01),
    ),
    "ternary": Part(
        "places and signs of a twentieth, on skewed data: bytes up / 19",
        against_fedavg(compression="ternary", compression_share=0.05),
    ),
}

TIERS = {"tiers": "1,1/2,1/4", "model": "digits", "method": "heterofl"}
"""What slices are compared with: HeteroFL on the same clients."""
PARTS |= {
    "fiarse": Part(
        "important units give a better global model than the first ones (HeteroFL)",
        lambda seed: (accuracy(seed, **TIERS), accuracy(seed, **{**TIERS, "method": "fiarse"})),
    ),
    "scalefl": Part(
        "depth and width together beat width alone (HeteroFL, on the same network with exits)",
        lambda seed: (
            accuracy(seed, **{**TIERS, "model": "exits"}),
            accuracy(seed, **{**TIERS, "model": "exits", "method": "scalefl"}),
        ),
    ),
}


def seconds_to(target: float, seed: int, **settings: Any) -> float:
    """Return the simulated seconds until a run reaches an accuracy; its end where it does not."""
    done = trained(seed, **ASYNC, **settings)
    history = done.result["history"]
    clock = history.get("clock")
    if clock is None:  # a synchronous round waits for its slowest device
        each = device_seconds(ASYNC["num_clients"], 1.0, seed)
        clock = np.cumsum([each[cohort].max() for cohort in done.result["cohorts"]]).tolist()
    reached = (place for place, score in enumerate(history["test_accuracy"]) if score >= target)
    return float(clock[next(reached, -1)])


ASYNC: dict[str, Any] = {"num_clients": 100, "dirichlet_alpha": 0.5, "eval_every": 1}
"""Devices whose logarithm of the seconds has the deviation 1; ten updates make a release."""
PARTS |= {
    "fedbuff": Part(
        "nobody waits for the slowest device: sooner at 85 % with as many (30) at work",
        lambda seed: (
            seconds_to(0.85, seed, clients_per_round=30, num_rounds=150),
            seconds_to(0.85, seed, buffer_size=10, in_flight=30, num_rounds=300),
        ),
        "simulated seconds",
    ),
}


def under_flipped_signs(rule: str) -> Any:
    """Return what measures the accuracy of the mean and of a rule, a fifth of all hostile."""

    def accuracy(rule: str, seed: int) -> float:
        key = {"attackers": 0.2, "rule": rule, "attack": "sign_flip", "seed": seed}
        return float(byzantine.measure(key)["accuracy"])

    return lambda seed: (accuracy("mean", seed), accuracy(rule, seed))


HOSTILE_UNIT = "accuracy where a fifth of all flip the sign, %"
_ROBUST = {
    "median": "the median of each coordinate withstands fewer than half",
    "trimmed_mean": "means without the extremes withstand as many as are cut",
    "krum": "the update nearest to its neighbours is no attacker's",
    "multi_krum": "the mean of those that are best by Krum's score: the same, and faster",
    "geometric_median": "the geometric median withstands fewer than half, and loses little without",
    "norm_bound": "shortened updates do little harm",
    "centred_clipping": "clipping around the last move withstands what clipping alone does not",
    "certified": "its clip bounds attackers too (epsilon 6)",
}
PARTS |= {
    rule: Part(claim, under_flipped_signs(rule), HOSTILE_UNIT) for rule, claim in _ROBUST.items()
}


def found_by(kind: str, figure: Callable[[dict[str, Any]], float]) -> Any:
    """Return what measures an attack on runs of FedAvg and of `certified` at epsilon 6."""
    return lambda seed: (
        figure(attacks.measure({"kind": kind, "run": "fedavg", "seed": seed})),
        figure(attacks.measure({"kind": kind, "run": "certified, epsilon 6", "seed": seed})),
    )


PARTS |= {
    "invert": Part(
        "a gradient shows the images that it was taken of; under a bound it does not",
        found_by("inversion", lambda line: max(line["psnr"].values())),
        "PSNR of the best attack, dB",
    ),
    "membership": Part(
        "LiRA tells members from others; under a bound it does not",
        found_by("membership", lambda line: 100 * line["attacks"]["lira"]["auc"]),
        "area under the curve, % (50: nothing learned)",
    ),
}


def table(lines: Sequence[kept.Line]) -> str:
    """Return the table of the page: a row for each part that was measured."""
    out = ["| part | its paper's claim | measured | FedAvg | with it |", "|---" * 5 + "|"]
    for name, part in PARTS.items():
        found = [line for line in lines if line["part"] == name]
        if found:
            cells = [kept.cell([line[side] for line in found]) for side in ("plain", "with")]
            out.append(f"| `{name}` | {part.claim} | {part.unit} | {' | '.join(cells)} |")
    return "\n".join(out)


def measure(key: kept.Line) -> kept.Line:
    """Return what a part measures at a seed."""
    plain, with_it = PARTS[key["part"]].measure(key["seed"])
    return {"plain": round(plain, 3), "with": round(with_it, 3)}


def main() -> None:
    """Measure what the file lacks, and print the table."""
    parser = kept.arguments(__doc__, FILE)
    parser.add_argument("--only", default=",".join(PARTS))
    given = parser.parse_args()
    wanted = [
        {"part": part, "seed": int(seed)}
        for part in given.only.split(",")
        for seed in given.seeds.split(",")
    ]
    print(table(kept.fill(given.file, [] if given.table else wanted, measure)))


if __name__ == "__main__":
    main()
