"""Static batch normalisation: nothing tracked in training, statistics before an evaluation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slices_samples import data, federation, problem
from torch import nn

import fedquilt
from fedquilt.common.errors import InvalidValueError
from fedquilt.config.choices import NARROW_METHODS
from fedquilt.data import load_dataset, split_clients
from fedquilt.round import run_round
from fedquilt.setup.federation import build_method
from fedquilt.setup.task import hold_back
from fedquilt.slices.method import Slices
from fedquilt.slices.static_norm import (
    batches_of,
    batches_of_clients,
    make_static,
    make_tracking,
    recompute,
    statistics_of,
)
from tiers import rest_is_slow

STATISTICS = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
NARROW = sorted(set(NARROW_METHODS) - {"scalefl"})  # which needs exits: see below


def batch_normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


@pytest.mark.parametrize("method", rest_is_slow(["heterofl", "fedrolex"], ["fedrolex"]))
def test_a_small_network_with_batch_norm_learns(method: str) -> None:
    """With statistics that travel HeteroFL stays below 0.3 here."""
    train, test = load_dataset("digits")
    clients = split_clients("iid", train.targets.numpy()[:800], 8, np.random.default_rng(0))
    done = fedquilt.run(
        *(small_network(), train, test, clients),
        output_dir=None,
        mode="fedavg",
        method=method,
        tiers="1,1/2,1/4",
        num_rounds=8,
        clients_per_round=8,
        availability="always",
        quiet=True,
        local_epochs=2,
        batch_size=16,
        learning_rate=0.1,
        eval_every=8,
    )
    assert done.final_accuracy is not None
    assert done.final_accuracy > 0.75
    scores = {tier["width"]: tier["test"]["accuracy"] for tier in done.result["slices"]["tiers"]}
    assert scores["1"] == done.final_accuracy
    assert scores["1/2"] > 0.5


@pytest.mark.parametrize("method", NARROW)
def test_nothing_is_tracked_while_clients_train(method: str) -> None:
    sample = federation(model=batch_normed(), method=method, tiers="1/2")
    assert isinstance(sample.method, Slices)
    assert len(sample.weights) == 16 + 8 + 15  # no statistics among what travels
    run_round(sample, 0)
    model = sample.method.slicing.model
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert int(model[1].num_batches_tracked) == 0


def test_nothing_is_tracked_while_narrow_blocks_with_exits_train() -> None:
    from test_slices_engine import TwoExits

    model = TwoExits()
    model.blocks[0] = nn.Sequential(model.blocks[0], nn.BatchNorm1d(4))
    sample = federation(model=model, method="scalefl", tiers="1/2")
    run_round(sample, 0)
    assert isinstance(sample.method, Slices)
    tracked = dict(sample.method.slicing.model.named_buffers())
    assert int(tracked["blocks.0.1.num_batches_tracked"]) == 0


@pytest.mark.parametrize("method", ["largest", "full"])
def test_whole_layers_keep_their_running_statistics(method: str) -> None:
    _, its = problem(batch_normed(), method=method, mode="fedavg")
    assert its.flat.buffer_names == STATISTICS


def test_statistics_are_those_of_the_inputs() -> None:
    model, (inputs, _, clients) = batch_normed(), data()
    make_static(model)
    assert statistics_of(model) == STATISTICS
    recompute(model, batches_of_clients(inputs, clients)())
    values = (inputs @ model[0].weight.T + model[0].bias).detach().double().numpy()
    np.testing.assert_allclose(model[1].running_mean.numpy(), values.mean(0), rtol=1e-5)
    np.testing.assert_allclose(model[1].running_var.numpy(), values.var(0, ddof=1), rtol=1e-5)
    assert model.training
    assert not model[1]._forward_pre_hooks
    make_tracking(model)
    assert statistics_of(model) == []
    assert model[1].track_running_stats


def test_a_single_sample_has_no_statistics() -> None:
    model = batch_normed()
    make_static(model)
    recompute(model, batches_of(torch.ones(1, 3))())
    assert torch.equal(model[1].running_var, torch.ones(4))


def run_digits(tmp_path: Path, **more: Any) -> fedquilt.RunResult:
    inputs, labels, clients = data()
    return fedquilt.run(
        *(batch_normed(), (inputs, labels), (inputs, labels), clients),
        output_dir=str(tmp_path),
        mode="fedavg",
        method="heterofl",
        tiers="1,1/2",
        num_rounds=4,
        clients_per_round=6,
        availability="always",
        quiet=True,
        **{"local_epochs": 1, "batch_size": 8, "learning_rate": 0.2, "eval_every": 2, **more},
    )


def test_the_statement_names_what_leaves_the_clients(tmp_path: Path) -> None:
    done = run_digits(tmp_path)
    assert set(STATISTICS) <= set(done.statement.uncovered)
    assert any("from all clients' inputs" in note for note in done.statement.notes)
    assert done.model is not None
    assert done.model[1].track_running_stats  # an ordinary model again
    assert done.folder is not None
    loaded = fedquilt.load(done.folder, batch_normed())
    assert torch.equal(loaded.state_dict["1.running_mean"], done.state_dict["1.running_mean"])
    assert not torch.equal(done.state_dict["1.running_mean"], torch.zeros(4))


def test_clients_who_evaluate_see_the_statistics_of_the_day(tmp_path: Path) -> None:
    done = run_digits(tmp_path, client_test_fraction=0.4)
    inputs, labels, clients = data()
    assert done.client_metrics is not None
    assert done.model is not None
    _, tests = hold_back(clients, 0.4, 0)
    with torch.no_grad():
        outputs = done.model(inputs)
    for row, test in zip(done.client_metrics, tests, strict=True):
        wanted = nn.functional.cross_entropy(outputs[test], labels[test])
        assert row["loss"] == pytest.approx(float(wanted), rel=1e-4)
        if row["width"] == "1":
            assert row["own_loss"] == pytest.approx(row["loss"], rel=1e-4)


def test_a_bound_refuses_statistics_of_clients() -> None:
    config, its = problem(batch_normed(), method="heterofl", mode="certified")
    with pytest.raises(InvalidValueError, match="norm_statistics='clients' must be 'server' in"):
        build_method(config, its)
    config, its = problem(
        batch_normed(), method="heterofl", mode="certified", norm_statistics="server"
    )
    with pytest.raises(InvalidValueError, match="needs samples of the server's own"):
        build_method(config, its)


def test_statistics_of_the_server_do_not_move_with_a_client() -> None:
    """Under a bound: the same weights, other data of a client, the same model in every bit."""
    inputs, labels, _ = data(7)
    found = []
    for world in (0.0, 100.0):
        settings = {"method": "heterofl", "mode": "certified", "norm_statistics": "server"}
        config, its = problem(batch_normed(), **settings)
        moved = its.task.inputs.clone()
        moved[:3] += world
        task = dataclasses.replace(its.task, inputs=moved)
        its = dataclasses.replace(its, task=task, validation=(inputs, labels))
        method = build_method(config, its)
        method.before_evaluation(its.flat.read().clone())
        assert method.released == tuple(its.flat.names)
        assert any("server's own samples" in note for note in method.notes)
        found.append({k: v.clone() for k, v in its.flat.module.state_dict().items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not torch.equal(found[0]["1.running_mean"], torch.zeros(4))


def test_clients_elsewhere_cannot_be_asked_for_statistics() -> None:
    config, its = problem(batch_normed(), method="heterofl")
    its = dataclasses.replace(its, task=dataclasses.replace(its.task, is_remote=True))
    with pytest.raises(InvalidValueError, match="on other machines"):
        build_method(config, its)
