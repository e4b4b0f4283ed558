"""The units of `deploy/systemd`: their commands can be read, and the guide says what they need."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedquilt.flower import proxy
from fedquilt.flower.federation import commands_for_hosts
from fedquilt.flower.keys import make_node_files, make_server_files
from run_processes import environment

ROOT = Path(__file__).resolve().parents[2]
UNITS = {path.stem: path.read_text() for path in (ROOT / "deploy" / "systemd").glob("*.service")}
GUIDE = (ROOT / "docs" / "deploy.md").read_text()


def command(unit: str) -> list[str]:
    (line,) = re.findall(r"^ExecStart=(.*)$", UNITS[unit].replace("\\\n", " "), re.MULTILINE)
    return shlex.split(line)


def test_the_gate_reads_its_units_command() -> None:
    module, *arguments = command("fedquilt-gate")[2:]
    assert importlib.import_module(module) is proxy
    given = proxy.parser().parse_args(arguments)
    assert (given.port, given.superlink) == (443, "127.0.0.1:8000")
    superlink = command("fedquilt-superlink")
    assert superlink[superlink.index("--host") + 1] == "127.0.0.1", "only the gate is outside"
    assert {"--enable-supernode-auth", "--isolation"} <= set(superlink)


def test_what_runs_a_nodes_app_asks_the_policy_of_its_site() -> None:
    words = command("fedquilt-node-app")
    assert words[words.index("--site") + 1] == "site.toml"
    (line,) = [x for x in commands_for_hosts({"trusted": "ab"}).splitlines() if "--trust" in x]
    assert line.endswith("--trust ab --site site.toml")
    assert "/etc/fedquilt/site.toml" in GUIDE


@pytest.mark.parametrize("unit", UNITS)
def test_the_guide_names_a_unit_and_what_it_is_told(unit: str) -> None:
    assert f"`{unit}`" in GUIDE
    for variable in re.findall(r"\$\{(\w+)\}", UNITS[unit]):
        assert variable in GUIDE


def test_the_files_that_units_name_are_those_that_are_made(tmp_path: Path) -> None:
    make_server_files(tmp_path / "server", ["server.example.org"])
    make_node_files(tmp_path / "node")
    made = {path.name for path in tmp_path.glob("*/*")}
    for unit in UNITS:
        words = command(unit)
        named = [
            words[place + 1]
            for place, word in enumerate(words)
            if re.search("file$|certificates$|private-key$", word)
        ]
        assert named or unit == "fedquilt-backup"
        assert set(named) <= made


@pytest.mark.parametrize("unit", UNITS)
def test_what_a_unit_writes_is_its_users_alone(unit: str) -> None:
    assert re.search(r"^UMask=0077$", UNITS[unit], re.MULTILINE)
    writes = "/var/lib/fedquilt" in UNITS[unit] and unit != "fedquilt-gate"  # which only reads it
    closed = re.findall(r"^StateDirectory(Mode)?=(\w+)$", UNITS[unit], re.MULTILINE)
    assert closed == ([("", "fedquilt"), ("Mode", "0700")] if writes else [])


def test_a_container_writes_for_its_user_alone() -> None:
    made = (ROOT / "deploy" / "Containerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", made, re.MULTILINE)
    command = [*json.loads(entry), "sh", "-c", "umask"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0077\n"
    assert "chmod 700 /var/lib/fedquilt" in made
    (number,) = re.findall(r"useradd .*--uid (\d+)", made)
    assert f"chown -R {number} /etc/fedquilt" in GUIDE, "a folder of the host, closed to others"


@pytest.mark.parametrize(
    ("name", "now"), [("trial", "demo_data"), ("directory", "client_registry")]
)
def test_an_earlier_name_of_a_module_means_the_module(name: str, now: str) -> None:
    """An app that was written for an earlier version imports it."""
    ran = subprocess.run(
        [
            *(sys.executable, "-W", "always::DeprecationWarning:__main__", "-c"),
            f"import fedquilt.flower.{name} as was, fedquilt.flower.{now} as now\n"
            "assert was is now and now.__spec__.name == now.__name__\n",
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"fedquilt.flower.{name} is now fedquilt.flower.{now}" in ran.stderr


@pytest.mark.parametrize("name", ["gate", "warm"])
def test_the_commands_of_units_run(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", f"fedquilt.flower.{name}", "--help"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"usage: python -m fedquilt.flower.{name} ")
    assert ran.stderr == ""
