"""A network for texts: the next letter after the ones before."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from fedquilt.models.images import CountsParameters


class CharLSTM(CountsParameters):
    """Letters as vectors of 8, two LSTM layers of 256 units, a score for every next letter.

    LEAF's network for Shakespeare; 819,920 parameters for 80 letters.  Inputs are numbers of
    letters, whole, [samples, letters].
    """

    def __init__(self, num_letters: int = 80, width: int = 256, embedding: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_letters, embedding)
        self.lstm = nn.LSTM(embedding, width, num_layers=2, batch_first=True)
        self.fc = nn.Linear(width, num_letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        states, _ = self.lstm(self.embedding(x.long()))
        return cast(torch.Tensor, self.fc(states[:, -1]))
