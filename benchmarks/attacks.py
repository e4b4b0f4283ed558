"""What attackers find in runs without a bound and with one, on the embedded digits.

    python benchmarks/attacks.py [--seeds 0,1,2] [--table] [--picture FILE.png]

Inversion: 300 clients of about 5 images, who take one step on all of them: the worst case there is.
The same client is attacked in every run.  Membership: 60 clients who train a perceptron until it
remembers its samples.  `certified` has the clip and the normalised updates of `demo.toml`.

An attack is a line of `docs/attack.jsonl`; what that has is not measured again.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kept
from fedquilt.audit.privacy_attacks import FALSE_ALARMS, INVERSIONS, Inversion, invert, membership
from fedquilt.config import build_config
from fedquilt.experiment.api import run_config
from fedquilt.report.images import picture_rows

FILE = kept.DOCS / "attack.jsonl"
SHARED: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "partition": "iid",
    "availability": "always",
    "clients_per_round": 1.0,
}
ONE_STEP = {"num_clients": 300, "num_rounds": 1, "batch_size": 64, "learning_rate": 0.1}
LONG = {"num_clients": 60, "num_rounds": 60, "batch_size": 16, "learning_rate": 0.5}
EPOCHS = {300: 1, 60: 5}
CLIENT = 7


_BOUNDED = {"mode": "certified", "clip_norm": 0.2, "normalise_updates": True}
ARMS: dict[str, dict[str, Any]] = {"fedavg": {"mode": "fedavg"}, "quap_fl": {"mode": "quap_fl"}} | {
    f"certified, epsilon {epsilon:g}": {**_BOUNDED, "epsilon": epsilon}
    for epsilon in (1.0, 6.0, 20.0)
}
INVERTED = ("fedavg", "quap_fl", "certified, epsilon 6")


def ran(given: dict[str, Any], folder: str, seed: int) -> tuple[Path, float]:
    """Run one configuration; return its folder and its accuracy."""
    rounds, epochs = given["num_rounds"], EPOCHS[given["num_clients"]]
    settings = {**SHARED, **given, "local_epochs": epochs, "eval_every": rounds, "seed": seed}
    done = run_config(build_config({**settings, "output_dir": folder}))
    assert done.folder is not None
    return done.folder, done.metrics["accuracy"]


def inverted(run: str, seed: int) -> Inversion:
    """Return what an attacker finds of the client's images."""
    with tempfile.TemporaryDirectory() as folder:
        return invert(ran({**ONE_STEP, **ARMS[run]}, folder, seed)[0], CLIENT)


def attack(key: kept.Line) -> kept.Line:
    """Return what an attack finds in a run."""
    if key["kind"] == "inversion":
        seen = inverted(key["run"], key["seed"])
        psnr = {name: round(value, 2) for name, value in seen.psnr.items()}
        return {"psnr": psnr, "blank": round(seen.blank, 2)}
    with tempfile.TemporaryDirectory() as folder:
        path, accuracy = ran({**LONG, **ARMS[key["run"]]}, folder, key["seed"])
        found = {one.attack: one for one in membership(path)}
    return {"accuracy": round(accuracy, 4), "attacks": {
        name: {"auc": round(one.auc, 4), "allowed": round(one.allowed_auc, 4),
               "right": [round(one.right_alarms[rate], 4) for rate in FALSE_ALARMS]}
        for name, one in found.items()
    }}  # fmt: skip


def measure(key: kept.Line) -> kept.Line:
    """Return the line of an attack, which is made when the file does not have it."""
    return next(x for x in kept.fill(FILE, [key], attack) if key.items() <= x.items())


def inversions(lines: Sequence[kept.Line]) -> str:
    """Return the table of pictures that were looked for."""
    out = [f"| PSNR in dB | {' | '.join(INVERSIONS)} | mean test image |", "|---" * 5 + "|"]
    for run in INVERTED:
        found = [x for x in lines if (x["kind"], x["run"]) == ("inversion", run)]
        cells = [kept.cell([x["psnr"][name] for x in found]) for name in INVERSIONS]
        out.append(f"| {run} | {' | '.join(cells)} | {kept.cell([x['blank'] for x in found])} |")
    return "\n".join(out)


def memberships(lines: Sequence[kept.Line]) -> str:
    """Return the table of members that were told from others."""
    rates = " | ".join(f"right at {100 * rate:g} % false" for rate in FALSE_ALARMS)
    out = [f"| run | accuracy | attack | AUC | allowed | {rates} |", "|---" * 8 + "|"]
    for run in ARMS:
        found = [x for x in lines if (x["kind"], x["run"]) == ("membership", run)]
        for name in found[0]["attacks"]:
            mine = [x["attacks"][name] for x in found]
            right = zip(*(one["right"] for one in mine), strict=True)
            cells = [kept.cell([x["accuracy"] for x in found], 3), name]
            cells += [kept.cell([one["auc"] for one in mine], 3), f"{mine[0]['allowed']:.3f}"]
            cells += [kept.cell(values, 3) for values in right]
            out.append(f"| {run} | {' | '.join(cells)} |")
    return "\n".join(out)


def draw(picture: Path) -> None:
    """Draw the client's images, and what the best attack found in each run, at seed 0."""
    rows: list[tuple[str, Any]] = []
    for run in INVERTED:
        seen = inverted(run, 0)
        best = max(seen.psnr, key=lambda name: seen.psnr[name])
        rows += [] if rows else [("the client's images", seen.truth)]
        rows.append((f"{run}: {best}, {seen.psnr[best]:.1f} dB", seen.found[best]))
    picture.write_bytes(picture_rows(rows, least=48))


def main() -> None:
    """Attack what the file lacks, and print both tables."""
    parser = kept.arguments(__doc__, FILE)
    parser.add_argument("--picture", type=Path, help="draw what was found at seed 0")
    given = parser.parse_args()
    wanted = [
        {"kind": kind, "run": run, "seed": int(seed)}
        for kind, runs in (("inversion", INVERTED), ("membership", ARMS))
        for run in runs
        for seed in given.seeds.split(",")
    ]
    lines = kept.fill(given.file, [] if given.table else wanted, attack)
    print(inversions(lines), memberships(lines), sep="\n\n")
    if given.picture is not None:
        draw(given.picture)


if __name__ == "__main__":
    main()
