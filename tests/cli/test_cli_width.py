"""Every command that prints a table fits its terminal: no line is wider, no word is broken."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from fedquilt.cli.app import app

SMALL = (
    "--dataset digits --model linear --num-clients 6 --num-rounds 2 --seed 0 --output-dir runs "
    "--quiet"
)
PLAN = f"plan {SMALL}".replace("--output-dir runs --quiet", "")
COMMANDS = {
    "slices": f"run --mode fedavg --method heterofl --tiers 1,1/2,1/4 {SMALL} --model mlp",
    "run": f"run {SMALL} --ledger book.sqlite --population people",
    "client evaluation": f"run {SMALL} --client-test-fraction 0.3",
    "sweep": f"sweep {SMALL} --mode fedavg --over learning_rate=0.01,0.1 --seeds 0,1".replace(
        "--seed 0 ", ""
    ),
    "plan": PLAN,
    "plan, secure": f"{PLAN} --secure-aggregation simulated",
    "plan, recipe": "plan --num-clients 100 --num-rounds 60",
    "audit": "audit --case 'even clips' --case 'not finite'",
    "audit in full": "audit --case 'even clips' --case 'not finite' --verbose",
    "condense": "condense --dataset digits --num-clients 6 --num-rounds 2 --seed 0 --quiet "
    "--output-dir condensed --ipc 1 --dc-iterations 2 --model-epochs 1",
    "data": "data",
    "compare": "compare RUNS",
    "ledger show": "ledger show book.sqlite",
    "one client": "ledger show book.sqlite --client CLIENT",
    "clients": "clients CLIENTS",
    "statement": "statement RUN",
    "card": "card RUN --output card.md",
    "validate": "validate",
    "many": f"run --mode fedavg {SMALL} --num-clients 60 --output-dir many",
    "attack invert": "attack invert MANY --iterations 2 --restarts 1",
    "attack membership": "attack membership RUN --shadows 0",
    "ledger verify": "ledger verify book.sqlite",
    "ledger backup": "ledger backup book.sqlite kept.sqlite",
    "ledger restore": "ledger restore kept.sqlite restored.sqlite",
    "site init": "site init site.toml",
    "site show": "site show POLICY",
    "site verify": "site verify site.toml",
    "site verify, receipts": "site verify site.toml --receipts receipts.json",
    "site statement": "site statement site.toml",
    "ledger reconcile": "ledger reconcile book.sqlite site.sqlite --client CLIENT",
    "flower new": "flower new quilt",
    "flower trust": "flower trust quilt",
    "flower setup": "flower setup node keys",
    "flower enroll": "flower enroll ward keys/node.pub --roster roster.json",
    "flower seats": "flower seats 2 --roster roster.json",
    "flower revoke": "flower revoke ward --roster roster.json",
    "flower audit": "flower audit .",
    "flower audit, verified": "flower audit . --verify",
}
ADDRESSES = {"report", "watch", "site page", "ledger export", "ledger receipts"}
"""These print one path, one address, or a file for programs: nothing that could be laid out."""
SHORT = {"ledger reconcile", "site verify, receipts"}
"""These find here what is not charged, and say so by their exit code too."""
FEDERATION = {"up", "down", "status", "run", "resume", "stop", "logs", "join", "leave", "rotate"}
"""Commands of `flower` on a federation that is up: `make test-deploy` calls them."""
CHILD = r"""
import glob, shlex, sys, json
from pathlib import Path
from fedquilt.cli import main

def someone():
    from fedquilt.privacy.ledger import Ledger
    with Ledger.open("book.sqlite", read_only=True) as book:
        (population,) = book.populations()
        return [next(iter(population.rows())).client_id]

def given_away():
    from fedquilt.flower.policy import read_policy
    from fedquilt.flower.site import refusals_path, site_account
    policy = Path("site.toml")
    ledger, population = site_account(Path("site.sqlite"), read_policy(policy))
    with ledger:
        run = population.start_run("2026-11-18_certified_0123456789abcdef", epsilon=6.0)
        for index in range(3):
            run.settle(run.reserve(index, [0], 0.04), f"{index:064x}")
    refusals_path(policy).write_text("2026-11-18 refused: mode='fedavg' is not one of " * 3)
    line = {"run": "r", "round": 0, "time": "t", "release": "0" * 64, "mu2": 0.04}
    Path("receipts.json").write_text(
        json.dumps({"client": "c", "head": "0" * 64, "receipts": [line]})
    )
    return [str(policy)]

for name, line in json.loads(sys.argv[1]).items():
    print(f"\x1e{name}", flush=True)
    words = []
    for word in shlex.split(line):
        runs = sorted(glob.glob("runs/*certified*"))
        named = {"RUNS": sorted(glob.glob("runs/*")), "RUN": runs[:1], "CLIENTS": runs[-1:]}
        named["MANY"] = glob.glob("many/*")
        made = {"CLIENT": someone, "POLICY": given_away}.get(word, lambda: [word])
        words += named[word] if word in named else made()
    sys.argv = ["fedquilt", *words]
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    print(f"\x1f{code}", flush=True)
"""


def printed(
    folder: Path, width: int | None, commands: dict[str, Any] = COMMANDS
) -> dict[str, list[str]]:
    """Return the lines that each command prints, in a pseudo-terminal or into a pipe."""
    folder.mkdir()
    script = [sys.executable, "-c", CHILD, json.dumps(commands)]
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    for name in ("COLUMNS", "LINES", "FEDQUILT_DATA"):
        environment.pop(name, None)
    ours, theirs = pty.openpty() if width else os.pipe()
    if width:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    chunks = []
    with subprocess.Popen(
        script,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    ) as child:
        os.close(theirs)
        try:
            while chunk := os.read(ours, 65536):
                chunks.append(chunk)
        except OSError:  # how a pseudo-terminal ends
            pass
        os.close(ours)
    assert child.returncode == 0
    text = b"".join(chunks).decode().replace("\r\n", "\n")
    found = {}
    for part in text.split("\x1e")[1:]:
        name, _, said = part.partition("\n")
        said, _, code = said.partition("\x1f")
        assert code.strip() in {"0", "None"} or name in SHORT, (name, code, said)
        found[name] = said.splitlines()
    return found


def words(lines: list[str]) -> set[str]:
    """Return the words of lines, whatever their figures are; not the rules of tables."""
    every = (
        re.sub(r"(-?[0-9a-f]*\d[0-9a-f]*)+", "0", word) for line in lines for word in line.split()
    )
    return {word for word in every if not re.fullmatch(r"[-─═]+", word)}


def leaves(group: Any, before: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield every command by its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*before, name))
        else:
            yield " ".join((*before, name))


def test_every_command_is_looked_at_or_said_why_not() -> None:
    known = set(leaves(typer.main.get_command(app)))
    elsewhere = ADDRESSES | {f"flower {name}" for name in FEDERATION}
    assert elsewhere <= known
    lines = [f"{line} " for line in COMMANDS.values()]
    looked_at = {name for name in known if any(line.startswith(f"{name} ") for line in lines)}
    assert known - looked_at == elsewhere


def test_a_plan_fits_a_narrow_terminal() -> None:
    asked = {"plan": COMMANDS["plan"]}
    with tempfile.TemporaryDirectory() as place:
        (whole,) = printed(Path(place, "0"), None, asked).values()
        (shown,) = printed(Path(place, "80"), 80, asked).values()
    assert max(map(len, whole)) > 80 >= max(map(len, shown))
    assert words(shown) == words(whole)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_line_is_wider_than_the_terminal_and_no_word_is_broken() -> None:
    with tempfile.TemporaryDirectory() as place:  # a short name: paths are words as well
        whole = printed(Path(place, "0"), None)
        shown = {width: printed(Path(place, str(width)), width) for width in (80, 140)}
    assert list(whole) == list(shown[80]) == list(shown[140]) == list(COMMANDS)
    wrong = []
    for width, commands in shown.items():
        for name, lines in commands.items():
            assert any(line.strip() for line in lines), f"{name} printed nothing"
            wrong += [f"{name}, {width}: {line}" for line in lines if len(line) > width]
            broken = words(lines) - words(whole[name])
            wrong += [f"{name}, {width}: {word!r} is part of a word" for word in sorted(broken)]
    assert not wrong, "\n".join(wrong)
