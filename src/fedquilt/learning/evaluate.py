"""Accuracy and loss of a model on a data set."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


@torch.no_grad()
def evaluate(
    module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, batch_size: int = 1024
) -> tuple[float, float]:
    """Return (accuracy, mean cross-entropy), with the model in evaluation mode."""
    was_training = module.training
    module.eval()
    correct = torch.zeros((), dtype=torch.int64, device=inputs.device)
    loss = torch.zeros((), dtype=torch.float64, device=inputs.device)
    batches = zip(torch.split(inputs, batch_size), torch.split(targets, batch_size), strict=True)
    for batch, labels in batches:
        outputs = module(batch)
        correct += (outputs.argmax(dim=1) == labels).sum()
        loss += functional.cross_entropy(outputs, labels, reduction="sum")
    module.train(was_training)
    return float(correct) / len(targets), float(loss) / len(targets)
