"""What travels: a table with one row a group, and its form as one vector."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedquilt.errors import InvalidValueError

_HEAD = 3  # feature model, class, samples


@dataclass(frozen=True, eq=False)
class StatisticsTable:
    """Means over groups of samples, as seen by one or several feature models.

    Attributes
    ----------
    models, classes, counts : int64 [G]
        Which feature model, which class, how many samples.
    features : [G, D]
        Mean embedding of the group.
    logits : [G, K]
        Mean scores of the group; K is 0 where they are not sent.
    """

    models: torch.Tensor
    classes: torch.Tensor
    counts: torch.Tensor
    features: torch.Tensor
    logits: torch.Tensor

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the table in float32, its three numbers a row included."""
        return 4 * len(self) * (_HEAD + self.features.shape[1] + self.logits.shape[1])

    def pack(self) -> torch.Tensor:
        """Return the rows as one vector; the vectors of clients can be laid end to end.

        Class, model and count are whole numbers below 2^24, exact in float32.
        """
        head = torch.stack([self.models, self.classes, self.counts], dim=1)
        return torch.cat([head.to(self.features), self.features, self.logits], dim=1).flatten()

    @classmethod
    def unpack(cls, vector: torch.Tensor, features: int, logits: int) -> StatisticsTable:
        """Read what `pack` wrote, for one client or many."""
        width = _HEAD + features + logits
        if vector.numel() % width:
            raise InvalidValueError(
                f"a table of {vector.numel()} numbers must consist of rows of {width}"
            )
        rows = vector.view(-1, width)
        models, classes, counts = rows[:, :_HEAD].round().to(torch.int64).unbind(dim=1)
        return cls(
            models, classes, counts, rows[:, _HEAD : _HEAD + features], rows[:, _HEAD + features :]
        )

    def of_model(self, number: int) -> StatisticsTable:
        """Return the rows of one feature model."""
        at = self.models == number
        return StatisticsTable(
            *(
                part[at]
                for part in (self.models, self.classes, self.counts, self.features, self.logits)
            )
        )
