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
from pathlib import Path
from typing import Any

import pytest

SMALL = (
    "--dataset digits --model linear --num-clients 6 --num-rounds 2 --seed 0 --output-dir runs "
    "--quiet"
)
COMMANDS = {
    "slices": f"run --mode fedavg --method heterofl --tiers 1,1/2,1/4 {SMALL} --model mlp",
    "run": f"run {SMALL} --ledger book.sqlite --population people",
    "client evaluation": f"run {SMALL} --client-test-fraction 0.3",
    "sweep": f"sweep {SMALL} --mode fedavg --over learning_rate=0.01,0.1 --seeds 0,1".replace(
        "--seed 0 ", ""
    ),
    "plan": f"plan {SMALL}".replace("--output-dir runs --quiet", ""),
    "audit": "audit --case 'even clips' --case 'not finite'",
    "audit in full": "audit --case 'even clips' --case 'not finite' --verbose",
    "condense": "condense --dataset digits --num-clients 6 --num-rounds 2 --seed 0 --quiet "
    "--output-dir condensed --ipc 1 --dc-iterations 2 --model-epochs 1",
    "data": "data",
    "compare": "compare RUNS",
    "ledger show": "ledger show book.sqlite",
    "clients": "clients CLIENTS",
    "statement": "statement RUN",
}
CHILD = r"""
import glob, shlex, sys, json
from fedquilt.cli import main
for name, line in json.loads(sys.argv[1]).items():
    print(f"\x1e{name}", flush=True)
    words = []
    for word in shlex.split(line):
        runs = sorted(glob.glob("runs/*certified*"))
        named = {"RUNS": sorted(glob.glob("runs/*")), "RUN": runs[:1], "CLIENTS": runs[-1:]}
        words += named.get(word, [word])
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
        assert code.strip() in {"0", "None"}, (name, code, said)
        found[name] = said.splitlines()
    return found


def words(lines: list[str]) -> set[str]:
    """Return the words of lines, whatever their figures are; not the rules of tables."""
    every = (
        re.sub(r"(-?[0-9a-f]*\d[0-9a-f]*)+", "0", word) for line in lines for word in line.split()
    )
    return {word for word in every if not re.fullmatch(r"[-─═]+", word)}


def test_a_plan_fits_a_narrow_terminal() -> None:
    asked = {"plan": COMMANDS["plan"]}
    with tempfile.TemporaryDirectory() as place:
        (whole,) = printed(Path(place, "0"), None, asked).values()
        (shown,) = printed(Path(place, "80"), 80, asked).values()
    assert max(map(len, whole)) > 80 >= max(map(len, shown))
    assert words(shown) == words(whole)


@pytest.mark.slow
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
