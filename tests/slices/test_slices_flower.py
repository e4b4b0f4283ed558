"""Extract and merge on Flower's types."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from holders_oracle import fill, snapshot
from torch import nn

from fedquilt.errors import InvalidValueError, MissingPackageError
from fedquilt.fed import extract, merge
from fedquilt.nn import SSBatchNorm1d, SSLinear
from run_samples import same_tensors


def net(width: str) -> nn.Sequential:
    held = ("0", width)
    return nn.Sequential(
        SSLinear(4, 8, bias=False, out_features_ranges=held),
        SSBatchNorm1d(8, track_running_stats=True, features_ranges=held),
        nn.PReLU(),
        SSLinear(8, 2, in_features_ranges=held),
    )


def test_without_flower_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(MissingPackageError, match=r"fedquilt\[flower\]"):
        extract(None, net("1/2"), net("1"))  # type: ignore[arg-type]


class TestOnFlower:
    """What the seed document says of `extract` and `merge`."""

    @pytest.fixture(autouse=True)
    def _flower(self) -> None:
        self.common = pytest.importorskip("flwr.common")

    def parameters(self, model: nn.Module) -> Any:
        arrays = [tensor.numpy() for tensor in model.state_dict().values()]
        return self.common.ndarrays_to_parameters(arrays)

    def arrays(self, parameters: Any) -> list[np.ndarray]:
        arrays: list[np.ndarray] = self.common.parameters_to_ndarrays(parameters)
        return arrays

    def result(self, model: nn.Module, examples: int) -> Any:
        status = self.common.Status(code=self.common.Code.OK, message="")
        return (
            None,
            self.common.FitRes(
                status=status,
                parameters=self.parameters(model),
                num_examples=examples,
                metrics={},
            ),
        )

    def test_extract_sets_both_networks_and_returns_the_part(self) -> None:
        source, server, client = net("1"), net("1"), net("1/2")
        fill(source, 1)
        returned = extract(self.parameters(source), client, server)
        assert isinstance(returned, self.common.Parameters)
        assert same_tensors(snapshot(server), snapshot(source))
        arrays = self.arrays(returned)
        assert [a.dtype for a in arrays] == [t.numpy().dtype for t in client.state_dict().values()]
        for array, tensor in zip(arrays, client.state_dict().values(), strict=True):
            assert np.array_equal(array, tensor.numpy())
        assert torch.equal(client[0].weight, source[0].weight[:4])
        assert torch.equal(client[1].running_var, source[1].running_var[:4])
        assert torch.equal(client[2].weight, source[2].weight)

    def test_merge_sets_all_networks_and_returns_the_mean(self) -> None:
        server, trained, nets = net("1"), [net("1/4"), net("1/2")], [net("1/4"), net("1/2")]
        before = snapshot(server)
        for model, value in zip(trained, (1, 4), strict=True):
            for tensor in model.state_dict().values():
                tensor.fill_(value)
        results = [self.result(trained[0], 2), self.result(trained[1], 1)]
        returned = self.arrays(merge(results, nets, server))
        for array, tensor in zip(returned, server.state_dict().values(), strict=True):
            assert np.array_equal(array, tensor.numpy())
        for mine, its in zip(nets, trained, strict=True):
            assert same_tensors(snapshot(mine), snapshot(its))
        assert server[1].weight.tolist()[:4] == [2, 2, 4, 4]
        assert torch.equal(server[1].weight[4:], before["1.weight"][4:])
        assert server[1].num_batches_tracked == 2
        assert server[2].weight.item() == 2

    def test_a_round_of_untouched_clients_is_the_identity(self) -> None:
        server, nets = net("1"), [net("1/4"), net("1/2"), net("1")]
        fill(server, 3)
        start = self.parameters(server)
        results = []
        for examples, client in enumerate(nets):
            extract(start, client, server)
            results.append(self.result(client, examples))
        returned = self.arrays(merge(results, nets, server))
        for array, expected in zip(returned, self.arrays(start), strict=True):
            assert np.array_equal(array, expected)

    def test_bad_input_changes_nothing(self) -> None:
        server, client = net("1"), net("1/2")
        states = [snapshot(server), snapshot(client)]
        few = self.common.ndarrays_to_parameters([np.zeros((8, 4), np.float32)])
        with pytest.raises(InvalidValueError, match="parameters with 1 arrays"):
            extract(few, client, server)
        with pytest.raises(InvalidValueError, match=r"results\[0\]: '0.weight' of shape"):
            merge([self.result(net("1"), 1)], [client], server)
        with pytest.raises(InvalidValueError, match="client_nets=2"):
            merge([self.result(client, 1)], [client, client], server)
        with pytest.raises(InvalidValueError, match=r"weights\[0\]=-1"):
            merge([self.result(client, -1)], [client], server)
        with pytest.raises(InvalidValueError, match="statistics='refuse'"):
            merge([self.result(client, 1)], [client], server, statistics="refuse")
        assert same_tensors(snapshot(server), states[0])
        assert same_tensors(snapshot(client), states[1])
