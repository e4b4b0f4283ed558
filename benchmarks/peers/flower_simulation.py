"""Flower's simulation (Ray) on the work; the second argument is the number of actors."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from flwr.client import Client, ClientApp, NumPyClient
from flwr.common import Context, FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation

import common

ACTORS = int(sys.argv[2])
FILE = sys.argv[1]
_held: dict[str, Any] = {}


class Trainer(NumPyClient):
    """Trains the client that it is told to."""

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
        """Return weights and the number of samples."""
        if not _held:
            torch.set_num_threads(1)
            _held.update(torch.load(config["file"], weights_only=False, mmap=True))
            _held["model"] = common.network(_held)
        model = _held["model"]
        own = zip(model.state_dict(), parameters, strict=True)
        model.load_state_dict({name: torch.from_numpy(value) for name, value in own})
        model.train()
        x, y = common.client(_held, int(config["client"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=_held["learning_rate"])
        for _ in range(_held["epochs"]):
            for batch in torch.randperm(len(x)).split(_held["batch_size"]):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        return [tensor.numpy() for tensor in model.state_dict().values()], len(x), {}


def make_client(context: Context) -> Client:
    """Return a client; whose samples it trains on is said in every round."""
    return Trainer().to_client()


class Gated(FedAvg):
    """Federated averaging over the cohorts of the work."""

    def __init__(self, work: dict[str, Any], gate: common.Gate, **settings: Any) -> None:
        super().__init__(**settings)
        self._work, self._gate = work, gate
        self.latest: Any = None

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Wait for the gate, then ask the cohort."""
        cohort = self._work["cohorts"][server_round - 1]
        client_manager.wait_for(len(cohort))
        if not self._gate.wait():
            os._exit(0)
        proxies = list(client_manager.all().values())[: len(cohort)]
        # The largest clients first, as the engine that is compared with does.
        sizes = self._work["clients"]
        order = sorted(cohort.tolist(), key=lambda number: -len(sizes[number]))
        return [
            (proxy, FitIns(parameters, {"client": number, "file": FILE}))
            for proxy, number in zip(proxies, order, strict=True)
        ]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Average, and say how long the round took."""
        averaged = super().aggregate_fit(server_round, results, failures)
        if failures:  # a round that somebody did not train is no figure
            print(f"{len(failures)} clients failed: {failures[0]!r}", file=sys.stderr, flush=True)
            os._exit(1)
        self.latest = averaged[0]
        self._gate.done()
        return averaged


def main() -> None:
    """Run the rounds of the work."""
    work = common.load()
    model = common.network(work)
    first = [tensor.numpy() for tensor in model.state_dict().values()]
    strategy = Gated(
        work,
        common.Gate(),
        fraction_evaluate=0.0,
        min_evaluate_clients=0,
        initial_parameters=ndarrays_to_parameters(first),
    )

    def make_server(context: Context) -> ServerAppComponents:
        config = ServerConfig(num_rounds=len(work["cohorts"]))
        return ServerAppComponents(strategy=strategy, config=config)

    run_simulation(
        server_app=ServerApp(server_fn=make_server),
        client_app=ClientApp(client_fn=make_client),
        num_supernodes=len(work["clients"]),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": ACTORS, "include_dashboard": False},
        },
    )
    sys.stdin.readline()
    values = parameters_to_ndarrays(strategy.latest)
    own = zip(model.state_dict(), values, strict=True)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in own})
    common.say(accuracy=common.accuracy(model, work))


if __name__ == "__main__":
    main()
