"""The short form of the campaign of hostile files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from run_processes import environment
from tiers import rest_is_slow

CAMPAIGN = Path(__file__).resolve().parents[1] / "benchmarks" / "fuzz_files.py"


@pytest.mark.processes
@pytest.mark.parametrize("count", rest_is_slow([60, 200], [60]))
def test_no_hostile_file_ends_in_a_traceback_a_hang_or_elsewhere(
    tmp_path: Path, count: int
) -> None:
    if not CAMPAIGN.exists():
        pytest.skip("the benchmarks are not there")
    ended = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--inputs", str(count), "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(rf"^{count} inputs in \d+ s, 0 bad$", ended.stdout, re.MULTILINE)
    sums = next(line for line in ended.stdout.splitlines() if line.startswith("all"))
    _, inputs, accepted, refused, *bad = sums.split()
    assert int(accepted) > count // 10
    assert int(refused) > count // 2
    assert int(accepted) + int(refused) == int(inputs)
    assert bad == ["0"] * 5
