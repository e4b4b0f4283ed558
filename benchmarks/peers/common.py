"""What the scripts of all peers share: the work, the networks, and the gate.

A script is started with the file of the work (`benchmarks.bench.work` writes it).  It trains one
round for every line `go` on its standard input and answers with the seconds it took, so that
all ways take turns; at `end` it answers with the accuracy of what it has trained.  Answers are
lines of JSON behind `@@`; whatever else a framework prints is not looked at.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Small(nn.Module):
    """784-64-10."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))


class Cnn(nn.Module):
    """The MNIST network of the QuAP-FL document."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.fc1 = nn.Linear(9216, 128)
        self.dropout2 = nn.Dropout(0.5)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities."""
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = self.dropout1(functional.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)


NETWORKS = {"small": Small, "cnn": Cnn}


def load() -> dict[str, Any]:
    """Return the work that the first argument names."""
    work: dict[str, Any] = torch.load(sys.argv[1], weights_only=False, mmap=True)
    return work


def network(work: dict[str, Any]) -> nn.Module:
    """Return the network of the work with the weights that everybody starts from."""
    model = NETWORKS[work["name"]]()
    model.load_state_dict(work["start"])
    return model


def threads(work: dict[str, Any]) -> int:
    """Return how many threads one process trains fastest with: small products want one."""
    return 1 if work["name"] == "small" else 2


def client(work: dict[str, Any], number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a client holds."""
    index = torch.from_numpy(work["clients"][number])
    return work["inputs"][index], work["targets"][index]


@torch.no_grad()
def accuracy(model: nn.Module, work: dict[str, Any]) -> float:
    """Return the accuracy on the test set."""
    model.eval()
    parts = zip(work["test_inputs"].split(1000), work["test_targets"].split(1000), strict=True)
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
    return right / len(work["test_targets"])


def say(**answer: Any) -> None:
    """Answer whoever runs the benchmark."""
    print("@@ " + json.dumps(answer), flush=True)


class Gate:
    """Lets one round through for each `go`, and says how long it took."""

    def __init__(self) -> None:
        self._began = 0.0

    def wait(self) -> bool:
        """Wait for the next round; False: there is none."""
        line = sys.stdin.readline().strip()
        self._began = time.perf_counter()
        return line == "go"

    def done(self) -> None:
        """Say how long the round took."""
        say(seconds=time.perf_counter() - self._began)
