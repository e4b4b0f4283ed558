"""fluke on the work: one client after the other, as it simulates."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

import common

# fluke imports torchvision for data sets that are not used here.  A build for another torch misses
# its operators when it describes them; they are as little used.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("_meta_registrations")

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402


class Dealt:
    """The clients of the work as fluke's loaders."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._work = work

    def assign(self, n_clients: int, batch_size: int) -> Any:
        """Return training loaders, no test loaders, and none for the server."""
        loaders = []
        for number in range(n_clients):
            x, y = common.client(self._work, number)
            loaders.append(FastDataLoader(x, y, num_labels=10, batch_size=batch_size, shuffle=True))
        return (loaders, [None] * n_clients), None


def main() -> None:
    """Run the rounds of the work."""
    work = common.load()
    torch.set_num_threads(common.threads(work))
    FlukeENV().set_device("cpu")
    settings = DDict(
        client=DDict(
            batch_size=work["batch_size"],
            local_epochs=work["epochs"],
            loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=work["learning_rate"]),
            scheduler=DDict(name="StepLR", step_size=1, gamma=1.0),
        ),
        server=DDict(weighted=True),
        model=common.network(work),
    )
    count = len(work["clients"])
    federation = FedAVG(count, Dealt(work), settings)
    gate, cohorts = common.Gate(), iter(work["cohorts"])

    def cohort(share: float) -> list[Any]:
        if not gate.wait():
            sys.exit(0)
        return [federation.clients[number] for number in next(cohorts).tolist()]

    federation.server.get_eligible_clients = cohort
    federation._compute_evaluation = lambda round, eligible: gate.done()
    federation.finalize = lambda: None
    federation.run(len(work["cohorts"]), len(work["cohorts"][0]) / count)
    sys.stdin.readline()
    common.say(accuracy=common.accuracy(federation.server.model, work))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
