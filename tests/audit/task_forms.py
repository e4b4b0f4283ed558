"""Other tasks than images of classes, made from the audit's images: tokens, numbers, dictionaries.

A neighbour's image becomes a neighbour of the task: values that are no number, or too large,
become token ids that no model takes, so that a victim of NaN contributes nothing here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hostile_models import Data
from torch import nn
from torch.nn import functional

from fedquilt.audit.canary import CLASSES, SIDE
from fedquilt.data import ImageDataset

WORDS = 11
VALUES = (2, 50, 300)  # of each column of a table
_NO_WORD = 999
_WIDTH = 8


class TokenNet(nn.Module):
    """Scores for the word at every place: an embedding, a running mean, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, _WIDTH)
        self.head = nn.Linear(_WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, places, words] that look back only."""
        seen = self.embedding(ids).cumsum(1) / SIDE
        out: torch.Tensor = self.head(seen.tanh())
        return out


class NumberNet(nn.Module):
    """One number of an image, in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, _WIDTH), nn.Tanh())
        self.last = nn.Linear(_WIDTH, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number and what stands before it."""
        hidden = self.layers(x)
        return self.last(hidden), hidden


class TextAndImage(nn.Module):
    """Takes an image, ids and a mask by name, and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(SIDE**2, _WIDTH)
        self.embedding = nn.Embedding(WORDS, _WIDTH)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(_WIDTH, CLASSES)

    def forward(
        self, pixels: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return scores under `logits`."""
        words = self.embedding(input_ids) * attention_mask[..., None]
        hidden = self.image(pixels.flatten(1)) + words.mean(1)
        return {"logits": self.head(self.drop(hidden.tanh()))}


class ColumnNet(nn.Module):
    """An embedding for each column of a table; every column has its own number of values."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(count, _WIDTH) for count in VALUES)
        self.head = nn.Linear(_WIDTH, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        each = [column(rows[:, place]) for place, column in enumerate(self.columns)]
        out: torch.Tensor = self.head(torch.stack(each).sum(0).tanh())
        return out


class CodeNet(nn.Module):
    """Looks up a row by a real number of the image: no range of whole numbers is known."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5000, _WIDTH)
        self.head = nn.Linear(_WIDTH + SIDE**2, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        flat = x.flatten(1)
        out: torch.Tensor = self.head(torch.cat([self.rows(flat[:, 0].abs().long()), flat], 1))
        return out


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next word, and a penalty on large scores: one number."""
    scores, words = outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
    return functional.cross_entropy(scores, words) + 0.01 * scores.square().mean()


def own_loss_by_sample(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the same, one number a sample."""
    each = functional.cross_entropy(
        outputs[:, :-1].movedim(-1, 1), targets[:, 1:], reduction="none"
    )
    return each.mean(1) + 0.01 * outputs[:, :-1].square().mean((1, 2))


def _ids(inputs: torch.Tensor) -> torch.Tensor:
    flat = inputs.flatten(1)
    usual = flat.nan_to_num(0.0, 0.0, 0.0).clamp(-9.0, 9.0)
    words = (2.0 * usual + WORDS // 2).round().clamp(0, WORDS - 1).long()
    return torch.where(flat.abs() < 1e6, words, _NO_WORD)


def _tokens(data: Data) -> tuple[Any, Any]:
    ids = _ids(data.inputs)
    return ids, ids


def _numbers(data: Data) -> tuple[Any, Any]:
    return data.inputs, data.labels.float() - 1.0


def _dictionary(data: Data) -> tuple[Any, Any]:
    ids = _ids(data.inputs)
    mask = torch.ones_like(ids)
    mask[:, SIDE:] = 0
    return {"pixels": data.inputs, "input_ids": ids, "attention_mask": mask}, data.labels


def _columns(data: Data) -> tuple[Any, Any]:
    """Return three columns, the first of two values, the last of most."""
    flat = data.inputs.flatten(1)[:, : len(VALUES)]
    usual = flat.nan_to_num(0.0, 0.0, 0.0).clamp(-2.9, 2.9) / 6.0 + 0.5
    rows = (usual * torch.tensor(VALUES)).long()
    return torch.where(flat.abs() < 1e6, rows, _NO_WORD), data.labels


class Drawn:
    """A data set whose transformation draws from everybody's generators, as augmentations do."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self._inputs, self._labels = inputs, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        image = self._inputs[place]
        return image.flip(-1) if torch.rand(1) < 0.5 else image, int(self._labels[place])


CLIENT_FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "client pairs": lambda x, y: (x, y),
    "client sets": lambda x, y: ImageDataset(x, y, "own", CLASSES),
    "client draws": Drawn,
}
"""Tasks in which every client brings a data set of its own, and their form."""


def client_sets(data: Data, task: str) -> list[object]:
    """Return one data set a client; an empty one is always a pair.

    Whatever they will draw begins in the same place in every world.
    """
    torch.manual_seed(0)
    np.random.seed(0)
    usual = CLIENT_FORMS[task]
    sets = []
    for client, held in enumerate(data.clients):
        form = data.forms.get(client, usual) if held else CLIENT_FORMS["client pairs"]
        sets.append(form(data.inputs[held], data.labels[held]))
    return sets


FORMS: dict[str, Callable[[Data], tuple[Any, Any]]] = {
    "images": lambda data: (data.inputs, data.labels),
    "tokens": _tokens,
    "numbers": _numbers,
    "image numbers": lambda data: (data.inputs, data.inputs.flatten(1)[:, :CLASSES]),
    "dictionary": _dictionary,
    "columns": _columns,
}
"""How the audit's data become inputs and targets."""

TASK_MODELS: dict[str, Callable[[], nn.Module]] = {
    "tokens": TokenNet,
    "numbers": NumberNet,
    "dictionary": TextAndImage,
    "columns": ColumnNet,
    "codes": CodeNet,
}
"""The models of those tasks."""
