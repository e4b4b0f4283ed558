"""FedLab's serial trainer on the work."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import common

# FedLab imports torchvision for data sets that are not used here.  A build for another torch misses
# its operators when it describes them; they are as little used.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("_meta_registrations")

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.utils.aggregator import Aggregators  # noqa: E402
from fedlab.utils.serialization import SerializationTool  # noqa: E402


class Dealt:
    """The clients of the work as FedLab asks for them."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._held = [TensorDataset(*common.client(work, n)) for n in range(len(work["clients"]))]

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader[Any]:
        """Return the shuffled batches of a client."""
        return DataLoader(self._held[client], batch_size=batch_size, shuffle=True)


def main() -> None:
    """Run the rounds of the work."""
    work = common.load()
    torch.set_num_threads(common.threads(work))
    model = common.network(work)
    trainer = SGDSerialClientTrainer(model, len(work["clients"]), cuda=False)
    trainer.setup_dataset(Dealt(work))
    trainer.setup_optim(work["epochs"], work["batch_size"], work["learning_rate"])
    weights = SerializationTool.serialize_model(model)
    gate = common.Gate()
    for cohort in work["cohorts"]:
        if not gate.wait():
            sys.exit(0)
        numbers = cohort.tolist()
        trainer.local_process([weights], numbers)
        sizes = [len(work["clients"][number]) for number in numbers]
        sent = [package[0] for package in trainer.uplink_package]
        weights = Aggregators.fedavg_aggregate(sent, sizes)
        gate.done()
    sys.stdin.readline()
    SerializationTool.deserialize_model(model, weights)
    common.say(accuracy=common.accuracy(model, work))


if __name__ == "__main__":
    main()
