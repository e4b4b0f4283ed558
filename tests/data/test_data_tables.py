"""Tables whose column says whose each row is."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.common.errors import InvalidValueError
from fedquilt.data.holdings import by_column

COLUMNS: dict[str, list[Any]] = {
    "x": [[float(i), float(i % 3)] for i in range(12)],
    "label": [i % 2 for i in range(12)],
    "user_id": [("ann", "bob", "cem")[i * i % 3] for i in range(12)],
}
FORMS = {
    "datasets": datasets.Dataset.from_dict,
    "pandas": pandas.DataFrame,
    "mapping": dict,
}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("form", FORMS)
def test_each_row_belongs_to_the_client_its_column_names(form: str) -> None:
    table, parts, _ = by_column(FORMS[form](COLUMNS), "user_id")
    wanted = {
        name: [i for i, owner in enumerate(COLUMNS["user_id"]) if owner == name]
        for name in sorted(set(COLUMNS["user_id"]))
    }
    assert {name: held.tolist() for name, held in parts.items()} == wanted
    assert list(table) == ["x", "label"]
    assert np.asarray(table["x"]).tolist() == COLUMNS["x"]


@pytest.mark.parametrize("form", FORMS)
def test_a_run_split_by_a_column_is_the_run_on_the_same_index_lists(form: str) -> None:
    x, labels = torch.tensor(COLUMNS["x"]), torch.tensor(COLUMNS["label"])
    owners = COLUMNS["user_id"]
    clients = {n: [i for i in range(12) if owners[i] == n] for n in sorted(set(owners))}
    settings = {"mode": "fedavg", "num_rounds": 2, "output_dir": None, "quiet": True}
    torch.manual_seed(0)
    model = Linear()
    table = FORMS[form](COLUMNS)
    ours = fedquilt.run(model, table, table, clients="user_id", **settings)
    data = {"x": x, "label": labels}
    theirs = fedquilt.run(model, data, data, clients, **settings)
    for name, value in ours.state_dict.items():
        assert torch.equal(value, theirs.state_dict[name])
    assert ours.metrics == theirs.metrics


def test_a_column_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidValueError, match=r"'user' must be a column of train.*'user_id'"):
        by_column(FORMS["datasets"](COLUMNS), "user")


@pytest.mark.parametrize("nobody", [None, float("nan")])
def test_a_row_without_an_owner_is_refused(nobody: object) -> None:
    owners = [*COLUMNS["user_id"][:4], nobody, *COLUMNS["user_id"][5:]]
    with pytest.raises(InvalidValueError, match="row 4 has none"):
        by_column({**COLUMNS, "user_id": np.array(owners, dtype=object)}, "user_id")
