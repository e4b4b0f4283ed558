"""A federation on loopback, with TLS, node keys and the gate: parity, who may talk, the end."""

from __future__ import annotations

import http.client
import json
import os
import signal
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
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.node_pb2 import Node

import fedquilt
from fedquilt.common.errors import InvalidValueError
from fedquilt.flower import keys
from fedquilt.flower.federation import LocalFederation
from fedquilt.flower.node import new_model
from fedquilt.flower.processes import free_ports
from fedquilt.flower.run_notes import is_running
from fedquilt.flower.simulate import OFFLINE
from fedquilt.flower.template import write_app
from run_processes import environment

pytestmark = [pytest.mark.deploy, pytest.mark.processes, pytest.mark.timeout(480)]

NODES = 4
ALL = {"num_rounds": 3, "clients_per_round": 1.0, "local_epochs": 1, "seed": 3, "eval_every": 3}
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {**ALL, "mode": "fedavg", "clients_per_round": 0.5, "learning_rate": 0.1},
    "certified": {**ALL, "mode": "certified", "epsilon": 60.0, "noise_seed": 5},
    "heterofl": {**ALL, "mode": "fedavg", "method": "heterofl", "tiers": "1,1/2"},
    "condensation": {
        "method": "condense",
        "mode": "certified",
        "noise_seed": 5,
        "num_rounds": 3,
        "mean_rounds": 1,
        "ipc": 1,
        "synthetic_images": 20,
        "model_epochs": 2,
        "eval_every": 3,
        "clients_per_round": 1.0,
        "seed": 3,
    },
}

TASK = """
import numpy as np
from sklearn.datasets import load_digits
from torch import nn


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def client_data(context):
    x, y = digits()
    place = int(context.node_config["partition-id"])
    return x[300 + place :: 4], y[300 + place :: 4]


def test_data():
    x, y = digits()
    return x[:300], y[:300]


def digits():
    x, y = load_digits(return_X_y=True)
    return (x / 16.0).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64)
"""
SERVER = '''
import json
import os
from flwr.serverapp import ServerApp
from fedquilt.flower.server import run_from
from quiltapp.task import make_model, test_data

app = ServerApp()


@app.main()
def main(grid, context):
    for name, options in json.loads(CASES).items():
        result = run_from(grid, {**options, "flower_min_nodes": 4}, make_model, test_data)
        with open(os.environ["FEDQUILT_FLOWER_OUTPUT"] + "/done.jsonl", "a") as done:
            done.write(json.dumps({"case": name, "folder": str(result.folder)}) + "\\n")


CASES = """%s"""
'''


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    folder = tmp_path_factory.mktemp("federation")
    app = write_app(
        folder / "app",
        {
            "quiltapp/task.py": TASK,
            "quiltapp/server_app.py": SERVER % json.dumps(CASES),
        },
    )
    federation = LocalFederation(folder / "here")
    before = os.umask(0o022)
    federation.prepare(app, NODES)
    started: dict[str, Any] = {}
    try:
        federation.up()
        started = federation.status() or {}
        yield federation
    finally:
        os.umask(before)
        killed = federation.down()
    assert killed == []
    for job in (started, *started["processes"].values()):
        assert not is_running(job["pid"], job["began"]), "nothing is left running"
    assert not federation.is_up()


@pytest.fixture(scope="module")
def finished(federation: LocalFederation) -> dict[str, Path]:
    assert federation.run() == 0
    lines = (federation.folder / "results" / "done.jsonl").read_text().splitlines()
    return {record["case"]: Path(record["folder"]) for record in map(json.loads, lines)}


def sequential(case: str) -> Any:
    """Run the same on one machine, with everybody's data in one place."""
    names: dict[str, Any] = {}
    exec(TASK, names)
    x, y = names["digits"]()
    parts = [np.arange(300 + place, len(y), NODES) for place in range(NODES)]
    return fedquilt.run(
        new_model(names["make_model"], 3),
        (x, y),
        (x[:300], y[:300]),
        parts,
        output_dir=None,
        availability="always",
        **CASES[case],
    )


@pytest.mark.parametrize("case", CASES)
def test_a_deployment_agrees_with_sequential(case: str, finished: dict[str, Path]) -> None:
    here, there = sequential(case), fedquilt.load(finished[case])
    assert there.result["cohorts"] == here.result["cohorts"]
    apart = max(
        float((here.state_dict[name] - tensor).abs().max())
        for name, tensor in there.state_dict.items()
    )
    assert apart <= 1e-5
    assert any("no secure aggregation" in note for note in there.statement.notes)
    nodes = [json.loads(x) for x in (finished[case] / "nodes.jsonl").read_text().splitlines()]
    assert not [line for line in nodes if "refused" in line]


def gate(federation: LocalFederation) -> tuple[int, ssl.SSLContext]:
    """Return what somebody outside has: the gate's port and the certificate."""
    context = ssl.create_default_context(cafile=str(federation.folder / "ca.crt"))
    return federation.config()["ports"]["gate"], context


def outside(federation: LocalFederation) -> httpx.Client:
    port, context = gate(federation)
    return httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context)


def said_to_announced(federation: LocalFederation, path: str, size: int) -> int:
    """Return the answer to a request that announces so many bytes and sends none of them."""
    port, context = gate(federation)
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context)
    try:
        connection.putrequest("POST", path)
        connection.putheader("content-length", str(size))
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/docs", "/openapi.json", "/v1/control/list-runs", "/v1/control/start-run"),
        *("/v1/runtime/get-nodes", "/v1/runtime/push-messages", "/V1/fleet/pull-messages"),
        *("/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run"),
        *("/v1/fleet//control", "/v1/fleetx"),
    ],
)
def test_only_the_paths_of_nodes_are_open_from_outside(
    federation: LocalFederation, path: str
) -> None:
    with outside(federation) as client:
        for method in ("GET", "POST"):
            raw = httpx.URL(client.base_url.copy_with(raw_path=path.encode()))
            assert client.request(method, raw).status_code == 403
        assert client.get("/v1/fleet/pull-messages").status_code == 403


def test_a_node_without_a_key_is_not_served_and_a_huge_request_not_read(
    federation: LocalFederation, finished: dict[str, Path]
) -> None:
    lines = map(json.loads, (finished["fedavg"] / "nodes.jsonl").read_text().splitlines())
    node = next(int(line["node"]) for line in lines if "node" in line)
    with outside(federation) as client:
        asked = PullMessagesRequest(node=Node(node_id=node)).SerializeToString()
        kind = {"content-type": "application/protobuf"}
        said = client.post("/v1/fleet/pull-messages", content=asked, headers=kind)
        assert said.status_code == 401
    assert said_to_announced(federation, "/v1/fleet/push-object", 2**40) == 413


def test_a_node_with_an_unknown_key_is_refused(federation: LocalFederation, tmp_path: Path) -> None:
    keys.make_node_key(tmp_path / "stranger")
    port = federation.config()["ports"]["gate"]
    node = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "flower-supernode"), "--max-retries", "0"),
            *("--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1"),
            *("--isolation", "process"),
            *("--port", str(free_ports(1)[0])),
            *("--root-certificates", str(federation.folder / "ca.crt")),
            *("--auth-supernode-private-key", str(tmp_path / "stranger")),
        ],
        env={**environment(), **OFFLINE, "FLWR_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert node.returncode == 1, node.stderr
    assert "Exit Code: 305" in node.stderr + node.stdout
    assert len(federation.online()) == NODES


def test_a_new_key_has_the_old_account(
    federation: LocalFederation, finished: dict[str, Path]
) -> None:
    before = federation.roster().client_ids
    value = federation.rotate("node2")
    assert federation.roster().client_ids == before
    until = time.monotonic() + 90
    while federation.online().get("node2") != value and time.monotonic() < until:
        time.sleep(1)
    assert federation.online()["node2"] == value


def test_nothing_that_a_federation_writes_can_be_read_by_others(
    federation: LocalFederation, finished: dict[str, Path]
) -> None:
    """The SuperLink's database holds single updates; the test process lets everybody read."""
    found = [federation.folder, *federation.folder.rglob("*")]
    assert {"state.db", "superlink.log", "supervisor.log", "result.json"} <= {p.name for p in found}
    shared = [path.name for path in found if path.lstat().st_mode & 0o077]
    assert all(name in ("ca.crt", "server.pem") or name.endswith(".pub") for name in shared)


def test_a_killed_supervisor_leaves_nobody_behind(federation: LocalFederation) -> None:
    """The last one here: it ends the federation."""
    status = federation.status() or {}
    os.kill(status["pid"], signal.SIGKILL)
    while is_running(status["pid"], status["began"]):
        time.sleep(0.05)
    jobs = status["processes"].values()
    assert {job["pid"] for job in jobs} <= set(federation.left()), "they go on, and are seen"
    assert len(federation.online()) == NODES
    with pytest.raises(InvalidValueError, match="of its processes go on"):
        federation.up()
    assert federation.status() == status
    assert federation.down() == []
    assert not [job for job in jobs if is_running(job["pid"], job["began"])]
    assert not list(federation.folder.glob("state.db*")), "what clients had sent"
