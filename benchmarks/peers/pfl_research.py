"""pfl-research on the work, in one process or several (second argument).

Users are dealt to the processes by size, as `FederatedDataset` does when it is told sizes.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from typing import Any

import torch

import common

RANK = int(os.environ.get("RANK", "0"))
PROCESSES = int(sys.argv[2])


def start_others() -> list[subprocess.Popen[bytes]]:
    """Start the other processes, as `torchrun` would; before pfl is imported."""
    if PROCESSES == 1 or "RANK" in os.environ:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        "WORLD_SIZE": str(PROCESSES),
        "LOCAL_WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "bench",
    }
    others = []
    for rank in range(1, PROCESSES):
        own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, *sys.argv]
        others.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL))
    os.environ |= {**shared, "RANK": "0", "LOCAL_RANK": "0"}
    return others


def main() -> None:
    """Run rounds until there are no more."""
    others = start_others()
    torch.set_num_threads(1)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from pfl.postprocessor import base  # noqa: F401  (registers what the backend looks up)

    work = common.load()
    model = common.network(work)
    rule = torch.nn.functional.cross_entropy

    def loss(x: torch.Tensor, y: torch.Tensor, **_: Any) -> torch.Tensor:
        model.train()
        return rule(model(x), y)

    def metrics(x: torch.Tensor, y: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"loss": Weighted(float(rule(model(x), y)), 1)}

    model.loss, model.metrics = loss, metrics  # type: ignore[assignment]
    held = {number: common.client(work, number) for number in range(len(work["clients"]))}

    def user(number: int) -> Dataset:
        x, y = held[number]
        order = torch.randperm(len(x))
        return Dataset([x[order], y[order]], user_id=str(number))

    cohort = len(work["cohorts"][0])
    everybody = itertools.cycle(itertools.chain.from_iterable(work["cohorts"]))
    sizes = {number: len(part) for number, part in enumerate(work["clients"])}
    data = FederatedDataset(user, lambda: int(next(everybody)), sizes)
    gate = common.Gate()

    def together() -> bool:
        """Let all processes go on when the first one may."""
        goes = torch.tensor([int(gate.wait()) if RANK == 0 else 0])
        if PROCESSES > 1:
            torch.distributed.broadcast(goes, 0)
        return bool(goes)

    class AtTheGate(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Any:
            together()
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> Any:
            if RANK == 0:
                gate.done()
            return not together(), Metrics()

    wrapped = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]
        ),
        model=wrapped,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=work["epochs"],
            local_learning_rate=work["learning_rate"],
            local_batch_size=work["batch_size"],
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=1000),
        callbacks=[AtTheGate()],
        send_metrics_to_platform=False,
    )
    if RANK == 0:
        common.say(accuracy=common.accuracy(model, work))
    for other in others:
        other.wait(20)


if __name__ == "__main__":
    main()
