"""Runs that are killed, cut off and refused by their disk, again and again.

    python benchmarks/kill_campaign.py [--kills 200] [--cold 10] [--folder FOLDER]
    python benchmarks/kill_campaign.py --faults 1000 [--kinds KIND;KIND] [--folder FOLDER]

The first form kills certified runs at random moments.
Two runs at a time share a ledger.  Each is a process of its own that gets SIGKILL at a
random moment and is then resumed, until it finishes or its clients have nothing left;
after a few runs a new ledger begins.  Every process notes each release beside the
ledger, when the ledger has settled it and before it is used: the clips and the noise
that were applied, which is what was truly given away.  After each kill

* no client may have less in the ledger than it has given away, nor more than its allowance,
* the rounds before the last checkpoint must be the lines they were,
* the ledger must be whole and hold the head that the run has kept.

The second form places faults at the system calls of runs of every kind: kills before, after
and in the middle of a call, errors of the disk, and power cuts, which take what was not
synced (`faults/`).  It needs Linux and a C compiler, and says so where there is none.

Most processes are forked from this one, which has everything imported, so that a kill
costs milliseconds; `--cold` of them start as fresh interpreters and may die importing.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedquilt.config import RunConfig
from fedquilt.experiment import api as experiment
from fedquilt.federation import Federation
from fedquilt.privacy.accounting.gaussian import gaussian_epsilon
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.ledger import BudgetExceededError, Ledger
from fedquilt.privacy.mechanism import RoundPlan
from fedquilt.record.folder import RunFolder

ALLOWANCE, DELTA, CLIENTS = 6.0, 1e-5, 12
RUNS_PER_LEDGER = 6
KINDS: list[dict[str, Any]] = [
    {},
    {"clipping": "quantile"},
    {"noise_bands": 2},
    {"policy": "worst_case", "server_optimizer": "momentum"},
    {"policy": "paper", "normalise_updates": True},
]
REFUSED = 3  # the exit code of a run that no client can pay for
KILLED = (
    "killed before there was a folder",
    "killed before a checkpoint",
    "killed after a checkpoint",
)
MUST_BE_ZERO = (
    "ledgers below what was released",
    "finished rounds that changed",
    "ledgers that are not whole",
    "clients above their allowance",
    "reservations left open at the end",
    "runs that failed",
)


def run_or_resume(parent: Path, ledger: Path, rounds: int, number: int) -> None:
    """Be the child: start a run under `parent`, or go on with the one that is there."""
    _note_releases(ledger.with_suffix(".log"))
    folder = _folder(parent)
    if folder is not None:
        experiment.resume_run(folder)
        return
    config = RunConfig(
        mode="certified",
        dataset="digits",
        model="linear",
        num_clients=CLIENTS,
        clients_per_round=6,
        availability="always",
        num_rounds=rounds,
        local_epochs=1,
        eval_every=5,
        epsilon=2.0,
        delta=DELTA,
        allowance=ALLOWANCE,
        if_exhausted="sit_out",
        ledger=str(ledger),
        population="everybody",
        seed=0,  # another seed would deal other clients
        output_dir=str(parent),
        **KINDS[number % len(KINDS)],
    )
    experiment.run_config(config)


def _note_releases(log: Path) -> None:
    """Write down each release between its settlement and its use."""
    build = experiment.build_federation

    def build_noting(*given: Any, **named: Any) -> Federation:
        federation = build(*given, **named)
        step, open_round = federation.method.server.step, federation.mechanism.open_round
        plans: list[RoundPlan] = []

        def note_plan(plan: RoundPlan) -> None:
            plans[:] = [plan]
            open_round(plan)

        def note_and_step(weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
            line = json.dumps({"pid": os.getpid(), "cost": given_away(federation, plans[0])}) + "\n"
            target = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(target, line.encode())
            os.close(target)
            return step(weights, update)

        federation.method.server.step = note_and_step  # type: ignore[method-assign]
        federation.mechanism.open_round = note_plan  # type: ignore[method-assign]
        return federation

    experiment.build_federation = build_noting


def given_away(federation: Federation, plan: RoundPlan) -> dict[int, float]:
    """Return k (c_i / s)^2, plus the quantile's bit, of everybody in the round."""
    mechanism = federation.mechanism
    assert isinstance(mechanism, Certified)
    bit = 0.0 if mechanism.quantile is None else 0.25 / mechanism.quantile.bit_noise_std**2
    factor = float(np.sum(mechanism.noise.coefficients**2))
    return {
        client: factor * (clip / plan.noise_std) ** 2 + bit for client, clip in plan.clips.items()
    }


def _folder(parent: Path) -> Path | None:
    """Return the run folder that a process has left, None when it died before it had one."""
    found = [path.parent for path in parent.glob("*/config.toml")]
    return found[0] if found else None


def released(log: Path) -> np.ndarray:
    """Return what each client has given away, by the log; a torn last line was not written."""
    total = np.zeros(CLIENTS)
    for line in log.read_text().splitlines() if log.exists() else []:
        for client, cost in json.loads(line)["cost"].items():
            total[int(client)] += cost
    return total


def below_released(ledger: Path, log: Path) -> list[int]:
    """Return the clients of whom the ledger knows less than they have given away."""
    if not ledger.exists():
        return np.flatnonzero(released(log)).tolist()
    truth = released(log)  # first: a run that is alive may settle in between
    # Opened for writing: what a kill has left half written is rolled back then.
    with Ledger.open(ledger) as opened:
        populations = opened.populations()
        counted = populations[0].spent() if populations else np.zeros(CLIENTS)
    size = len(counted)
    return np.flatnonzero(counted < truth[:size] * (1 - 1e-12)).tolist()


def changed_rounds(folder: Path, known: dict[Path, list[str]]) -> int:
    """Return how many rounds before a checkpoint are not what they were, and note the new ones."""
    checkpoint = RunFolder.open(folder).load_checkpoint()
    count = 0 if checkpoint is None else checkpoint.rounds
    path = folder / "rounds.jsonl"
    lines = path.read_text().splitlines()[:count] if path.exists() else []
    before = known.get(folder, [])
    changed = sum(old != new for old, new in zip(before, lines, strict=False))
    changed += max(0, len(before) - len(lines))
    known[folder] = lines
    return changed


def problems_of(ledger: Path, folder: Path | None) -> tuple[str, ...]:
    """Verify the ledger, with the head that the run has kept."""
    heads = []
    checkpoint = None if folder is None else RunFolder.open(folder).load_checkpoint()
    if checkpoint is not None and checkpoint.ledger_head:
        heads.append(checkpoint.ledger_head)
    if not ledger.exists():
        return tuple(heads)
    with Ledger.open(ledger) as opened:
        return opened.verify(known_heads=heads).problems


@dataclass
class Slot:
    """One run and the process that works on it."""

    parent: Path
    ledger: Path
    number: int
    pid: int = 0
    dies_at: float = 0.0
    cold: bool = False


@dataclass
class Campaign:
    """The state of all runs, and what was found."""

    folder: Path
    kills: int
    cold: int
    rounds: int
    draws: random.Random
    longest: float
    counts: Counter[str] = field(default_factory=Counter)
    known: dict[Path, list[str]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    started: int = 0
    largest_epsilon: float = 0.0
    largest_excess: float = 0.0

    def run(self) -> None:
        """Keep two runs going until enough have been killed, then let them finish."""
        slots = [self._next_run(), self._next_run()]
        try:
            while slots:
                slots = [kept for slot in slots for kept in self._attend(slot)]
                time.sleep(0.002)
        finally:
            for slot in slots:
                if slot.pid:
                    os.kill(slot.pid, signal.SIGKILL)
        self._check_allowances()

    def _attend(self, slot: Slot) -> list[Slot]:
        """Start a process, or look after one that ended; return what goes on in its place."""
        if not slot.pid:
            self._start(slot)
        ended = self._ended(slot)
        if ended is None:
            return [slot]
        slot.pid = 0
        self._check(slot)
        if ended == -signal.SIGKILL:
            return [slot]
        self._note_end(ended, slot)
        return [self._next_run()] if self.counts["kills"] < self.kills else []

    def _next_run(self) -> Slot:
        number = self.started
        self.started += 1
        parent = self.folder / f"run-{number}"
        parent.mkdir()
        ledger = self.folder / f"{number // RUNS_PER_LEDGER}.sqlite"
        return Slot(parent, ledger, number)

    def _start(self, slot: Slot) -> None:
        """Start a process and decide when it dies, if it has not finished by then."""
        self.counts["processes"] += 1
        slot.cold = self.counts["cold starts"] < self.cold and self.draws.random() < 0.1
        arguments = (slot.parent, slot.ledger, self.rounds, slot.number)
        if slot.cold:
            self.counts["cold starts"] += 1
            command = [sys.executable, __file__, "--child", *map(str, arguments)]
            slot.pid = subprocess.Popen(command).pid
        else:
            slot.pid = _fork(lambda: run_or_resume(*arguments))
        # The square makes early deaths more frequent: starting is more than a round.
        longest = self.longest + (4.0 if slot.cold else 0.0)
        slot.dies_at = time.monotonic() + longest * self.draws.random() ** 2

    def _ended(self, slot: Slot) -> int | None:
        """Return how the process ended, None while it lives; kill it when its time has come."""
        if time.monotonic() >= slot.dies_at and self.counts["kills"] < self.kills:
            os.kill(slot.pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(slot.pid, 0)[1])
            if code == -signal.SIGKILL:
                self._note_kill(slot)
            return code
        pid, status = os.waitpid(slot.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def _note_kill(self, slot: Slot) -> None:
        self.counts["kills"] += 1
        folder = _folder(slot.parent)
        begun = folder is not None and RunFolder.open(folder).load_checkpoint() is not None
        self.counts[KILLED[0 if folder is None else 2 if begun else 1]] += 1

    def _note_end(self, code: int, slot: Slot) -> None:
        if code not in (0, REFUSED):
            self.counts["runs that failed"] += 1
            self.messages.append(f"{slot.parent.name} ended with {code}")
            return
        self.counts["runs refused" if code == REFUSED else "runs finished"] += 1

    def _check(self, slot: Slot) -> None:
        """Compare ledger and files with what they must be."""
        self.counts["checks"] += 1
        folder = _folder(slot.parent)
        below = below_released(slot.ledger, slot.ledger.with_suffix(".log"))
        changed = 0 if folder is None else changed_rounds(folder, self.known)
        problems = problems_of(slot.ledger, folder)
        self.counts["ledgers below what was released"] += bool(below)
        self.counts["finished rounds that changed"] += changed
        self.counts["ledgers that are not whole"] += bool(problems)
        if below or changed or problems:
            self.messages.append(f"{slot.parent.name}: {below} {changed} {problems}")

    def _check_allowances(self) -> None:
        """Sum up what every client has given away, and what its ledger says."""
        for ledger in sorted(self.folder.glob("*.sqlite")):
            truth = released(ledger.with_suffix(".log"))
            epsilons = [gaussian_epsilon(float(mu2) ** 0.5, DELTA) for mu2 in truth]
            with Ledger.open(ledger) as opened:
                (population,) = opened.populations()
                counted = population.spent()
                open_reservations = population.summary().open_reservations
            log = ledger.with_suffix(".log").read_text()
            self.counts["releases"] += log.count("\n")
            self.counts["reservations left open at the end"] += open_reservations
            self.counts["clients above their allowance"] += sum(e > ALLOWANCE for e in epsilons)
            self.largest_epsilon = max(self.largest_epsilon, *epsilons)
            self.largest_excess = max(self.largest_excess, float((counted - truth).max()))

    @property
    def ok(self) -> bool:
        """Whether nothing was found that must not be."""
        return not self.messages and not any(self.counts[name] for name in MUST_BE_ZERO)

    def table(self) -> str:
        """Return what was done and what was found."""
        names = ("kills", *KILLED, "processes", "cold starts", "runs finished", "runs refused")
        rows = [(name, str(self.counts[name])) for name in (*names, "releases", "checks")]
        rows += [(name, str(self.counts[name])) for name in MUST_BE_ZERO]
        rows += [
            ("largest epsilon given away", f"{self.largest_epsilon:.4f} of {ALLOWANCE:g}"),
            ("charged and never used, at most", f"{self.largest_excess:.4f} mu^2 of a client"),
        ]
        width = max(len(name) for name, _ in rows) + 2
        return "\n".join(f"{name.ljust(width)}{value}" for name, value in rows)


def _fork(work: Callable[[], None]) -> int:
    """Do the work in a copy of this process and return its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = _exit_code(work)
    finally:
        os._exit(code)


def _exit_code(work: Callable[[], None]) -> int:
    try:
        work()
    except BudgetExceededError:
        return REFUSED
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def measure_one_run(folder: Path, rounds: int) -> float:
    """Run once without a kill and return the seconds it takes."""
    began = time.monotonic()
    parent = folder / "alone"
    parent.mkdir()
    pid = _fork(lambda: run_or_resume(parent, folder / "alone.sqlite", rounds, 0))
    os.waitpid(pid, 0)
    seconds = time.monotonic() - began
    for path in folder.glob("alone*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return seconds


def main() -> int:
    """Print the table; exit 1 when something was found that must not be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="how many processes are killed")
    parser.add_argument("--cold", type=int, default=10, help="how many start as new interpreters")
    parser.add_argument("--rounds", type=int, default=25, help="rounds of a run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--folder", type=Path, help="where the runs are made (then removed)")
    parser.add_argument("--faults", type=int, help="place so many faults at system calls instead")
    parser.add_argument("--kinds", help="kinds of run for --faults, joined by ';'; default all")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        parent, ledger, rounds, number = options.child
        return _exit_code(
            lambda: run_or_resume(Path(parent), Path(ledger), int(rounds), int(number))
        )
    if options.faults:
        return place_faults(options.faults, options.kinds, options.seed, options.folder)
    _load_everything()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        longest = measure_one_run(Path(folder), options.rounds)
        numbers = (options.kills, options.cold, options.rounds)
        campaign = Campaign(Path(folder), *numbers, random.Random(options.seed), longest)
        began = time.monotonic()
        campaign.run()
        seconds = time.monotonic() - began
    print(campaign.table())
    print(f"\none run alone takes {longest:.2f} s; the campaign took {seconds:.0f} s")
    print("\n".join(campaign.messages))
    return 0 if campaign.ok else 1


def place_faults(count: int, kinds: str | None, seed: int, parent: Path | None) -> int:
    """Place faults at system calls; with the shim preloaded, so in a process of its own."""
    from faults import shim
    from faults.campaign import FaultCampaign
    from faults.kinds import KINDS as FAULT_KINDS

    with tempfile.TemporaryDirectory(dir=parent) as folder:
        if "fault_shim" not in os.environ.get("LD_PRELOAD", ""):
            try:
                library = shim.build(Path(folder))
            except shim.NoCompilerError as error:
                print(f"skipped: {error}")
                return 0
            return shim.preloaded(library, [sys.executable, *sys.argv])
        names = kinds.split(";") if kinds else list(FAULT_KINDS)
        _load_everything()
        amplified = FAULT_KINDS["certified, amplified"].config(Path(folder))
        _load_what_faults_need(names, amplified)
        campaign = FaultCampaign(Path(folder), names, seed, _note_releases, released)
        campaign.run(count)
    print(campaign.table())
    print(f"\nthe campaign took {campaign.seconds:.0f} s")
    for tally in campaign.tallies.values():
        print("\n".join(tally.bad))
    return 0 if campaign.ok else 1


def _load_what_faults_need(kinds: Sequence[str], amplified: RunConfig) -> None:
    """Import, compute and start once what takes each forked process seconds."""
    from fedquilt.condense import method
    from fedquilt.setup import mechanism as assemble_mechanism

    for name in ("fedquilt.models.features", "torch.func", "torch._dynamo"):
        importlib.import_module(name)
    if "certified, amplified" in kinds:
        assemble_mechanism.calibrate = functools.cache(assemble_mechanism.calibrate)
        experiment.run_in_memory(amplified)
    method.GrowingSettings = functools.partial(method.GrowingSettings, steps=15)
    if "processes" in kinds:
        _start_fork_server()


def _start_fork_server() -> None:
    """Let forked processes use one fork server: starting one takes seconds."""
    import multiprocessing.forkserver

    server = multiprocessing.forkserver
    server.set_forkserver_preload(["fedquilt.training.engines"])
    server.ensure_running()
    server.ensure_running = server._forkserver.ensure_running = lambda: None


def _load_everything() -> None:
    """Import what a run imports late, so that forked processes need not."""
    import safetensors.torch  # noqa: F401

    from fedquilt.data import load_dataset
    from fedquilt.models import make_model

    load_dataset("digits")
    make_model("linear", (1, 8, 8), 10, 0)


if __name__ == "__main__":
    sys.exit(main())
