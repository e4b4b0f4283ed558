"""A hostile node, strangers at the gate and a local user, on one federation with TLS and keys."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

import httpx

from fedquilt.flower import prefork
from fedquilt.flower.federation import LocalFederation
from fedquilt.flower.proxy import Limits
from fedquilt.flower.simulate import OFFLINE
from fedquilt.flower.template import write_app
from fedquilt.privacy.ledger import Ledger

pytestmark = [pytest.mark.deploy, pytest.mark.processes, pytest.mark.timeout(240)]

HOSTILE, LARGE = 3, 16_000_000
STRANGER = "127.0.0.2"
OTHER_STRANGER = "127.0.0.3"
ALLOWED = 128  # connections of one address, where all nodes are at one
REASONS = [
    "forged: another token",
    "the message cannot be read",
    "bytes must be at most",
    "bytes must be at most",
    "announced and never uploaded",
]
CHARGED = [False, True, True, True, False]
CLIENT = '''
import json

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.supernode.runtime import run_clientapp

from fedquilt.flower.node import client_app
from quiltapp.task import client_data, make_model

app = ClientApp()
honest = client_app(make_model, client_data)


@app.train()
def train(message, context):
    reply = honest(message, context)
    if int(context.node_config["partition-id"]) == 3:
        ATTACKS[message.content["config"]["round_index"]](reply)
    return reply


def nonascii(reply):
    reply.content["config"] = ConfigRecord({"token": "\\u00e9" * 32, "failed": False})


def body_of_arrays(change):
    """Exchange what arrays are deflated to, in this process, which ends with this reply."""
    usual = Array.deflate

    def deflate(self):
        head, _, body = usual(self).partition(b"\\x00")
        kind, children, _ = head.split(b" ")
        new = change(body)
        return b"%s %s %d\\x00" % (kind, children, len(new)) + new

    Array.deflate = deflate


def malformed(reply):
    body_of_arrays(lambda body: b'{"dtype": 7')


def bomb(reply):
    chunks = Array("float32", (1,), "fedquilt.raw", b"x" * 4_000_000)
    reply.content["arrays"] = ArrayRecord({"vector": chunks})
    named = {"arraychunk_ids": [0] * 600}
    body_of_arrays(lambda body: json.dumps({**json.loads(body), **named}).encode())


def large(reply):
    numbers = np.arange(LARGE // 2, dtype="f4")
    reply.content["arrays"] = ArrayRecord({"vector": Array("float32", (len(numbers),),
                                                           "fedquilt.raw", numbers.tobytes())})


def never_uploaded(reply):
    run_clientapp.push_objects = lambda *given, **named: None


ATTACKS = (nonascii, malformed, bomb, large, never_uploaded)
LARGE = TOO_LARGE
'''


@contextlib.contextmanager
def strangers(federation: LocalFederation) -> Iterator[int]:
    """Hold as many connections as the gate grants, most idle, some with unfinished bodies.

    Yield how many of the idle ones it lets open.
    """
    context = ssl.create_default_context(cafile=str(federation.folder / "ca.crt"))
    gate = ("127.0.0.1", federation.config()["ports"]["gate"])
    with contextlib.ExitStack() as opened:

        def connected(address: str) -> socket.socket:
            return opened.enter_context(socket.create_connection(gate, 10, (address, 0)))

        idle = [connected(STRANGER) for _ in range(200)]
        for raw in idle:
            raw.setblocking(False)
        until = time.monotonic() + Limits.head_seconds / 2  # before any is closed for its silence
        while (granted := sum(map(_is_open, idle))) > ALLOWED:
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        for _ in range(16):  # of another address: the gate is at work on them from now on
            raw = connected(OTHER_STRANGER)
            with contextlib.suppress(OSError):
                secure = opened.enter_context(context.wrap_socket(raw, server_hostname="localhost"))
                head = b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\n"
                secure.sendall(head + b"content-length: 60000000\r\n\r\n")
                secure.settimeout(0.2)
                for _ in range(30):
                    secure.sendall(b"x" * 1_000_000)
        yield granted


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def memory_of(federation: LocalFederation, name: str) -> int:
    """Return the largest resident size of a process so far, in bytes."""
    pid = (federation.status() or {})["processes"][name]["pid"]
    (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) * 1024


def control_as(federation: LocalFederation, user: int, headers: dict[str, str]) -> int:
    """Return what Control answers to a user of this machine."""
    port = federation.config()["ports"]["superlink"]
    url = f"https://127.0.0.1:{port}/v1/control/list-runs"

    def work() -> None:
        os.setuid(user)
        kind = {"content-type": "application/protobuf", **headers}
        sys.exit(httpx.post(url, verify=False, headers=kind, content=b"").status_code - 200)

    child = prefork.fork(work, federation.folder.parent / "log")
    return 200 + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "nodes.jsonl").read_text().splitlines()]


def test_honest_clients_are_summed_and_charged_as_if_no_attacker_were_there(tmp_path: Path) -> None:
    chosen = {"mode": "certified", "epsilon": 60.0, "policy": "worst_case", "num_rounds": 5}
    options: dict[str, Any] = {**chosen, "clients_per_round": 1.0, "flower_deadline": 20.0}
    app = write_app(
        tmp_path / "app",
        {"quiltapp/client_app.py": CLIENT.replace("TOO_LARGE", str(LARGE))},
        **options,
    )
    stranger = write_app(tmp_path / "other", **{**options, "num_rounds": 1, "seed": 8})
    federation = LocalFederation(tmp_path / "federation")
    ledger = tmp_path / "ledger.sqlite"
    federation.prepare(app, 4, ledger=str(ledger), population="wards")
    federation.up()
    try:
        # An app that nodes do not trust: each says so, and is free for the next order.
        home = {**os.environ, **OFFLINE, "FLWR_HOME": str(federation.folder / "flwr")}
        flwr = str(Path(sys.executable).parent / "flwr")
        command = [flwr, "run", str(stranger), "fedquilt", "--stream"]
        subprocess.run(command, env=home, check=False, timeout=90)
        refused = federation.wait(rounds=1)
        before = memory_of(federation, "gate")
        with strangers(federation) as granted:
            federation.run()
            grown = memory_of(federation, "gate") - before
        folder = federation.wait()
        prints = [federation.roster().keys[f"node{place}"][0] for place in range(4)]
        if os.geteuid() == 0:
            assert control_as(federation, 65534, {}) == 403
            assert control_as(federation, 65534, {"x-forwarded-for": "127.0.0.1:1"}) == 403
        assert control_as(federation, os.geteuid(), {}) != 403
        until = time.monotonic() + 20
        while _stored(federation) > LARGE // 2 and time.monotonic() < until:
            time.sleep(0.5)
        stored = _stored(federation)
    finally:
        federation.down()
    told = [line["refused"] for line in lines(refused) if "refused" in line]
    assert len(told) == 4
    assert all("not the one that this node was told to trust" in reason for reason in told)
    asked = [line for line in lines(folder) if "asked" in line]
    assert [line["answered"] for line in asked] == [3] * 5
    assert [line["absent"] for line in asked] == [[] if paid else [HOSTILE] for paid in CHARGED]
    culprits = [line for line in lines(folder) if "refused" in line]
    assert [line["client"] for line in culprits] == [HOSTILE] * 5
    for line, reason in zip(culprits, REASONS, strict=True):
        assert reason in line["refused"]
    with Ledger.open(ledger) as opened:
        (population,) = opened.populations()
        spent = population.spent()[population.numbers(prints)]
    np.testing.assert_allclose(spent[:3], spent[0])
    assert spent[HOSTILE] == pytest.approx(spent[0] * sum(CHARGED) / 5)
    assert granted <= ALLOWED, "the connections of one address are bounded"
    assert grown < 250_000_000, "bodies are bounded in sum"
    assert stored < LARGE // 2, "what a refused reply took is given back"


def _stored(federation: LocalFederation) -> int:
    return sum(path.stat().st_size for path in federation.folder.glob("state.db*"))
