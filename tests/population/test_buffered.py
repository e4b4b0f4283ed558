"""Asynchronous rounds: the simulated clock, models of other ages, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedquilt.common.errors import InvalidValueError
from fedquilt.config import build_config
from fedquilt.experiment.api import resume_run, run_config, run_in_memory
from fedquilt.population import Availability
from fedquilt.population.fleet import MOST_STALE, BufferedSelector, device_seconds
from fedquilt.round import run_round
from fedquilt.setup.build_task import build_task
from fedquilt.setup.federation import build_federation
from fedquilt.training import ClientUpdate
from fedquilt.training.attacks import hostile_clients
from fedquilt.training.stale import PastModels
from run_samples import assert_same_run, tiny


def selector(seconds: Any, size: int, in_flight: int, **given: Any) -> BufferedSelector:
    seconds = np.asarray(seconds, dtype=float)
    there = given.get("availability", Availability(len(seconds)))
    return BufferedSelector(
        *(there, np.ones(len(seconds))),
        rule="uniform",
        limit=len(seconds),
        seed=given.get("seed", 0),
        buffer_size=size,
        in_flight=in_flight,
        seconds=seconds,
    )


def test_whoever_replaces_the_last_of_a_buffer_begins_at_the_new_model() -> None:
    picks = selector(np.ones(12), 4, 4)
    for index in range(6):
        flush = picks.flush(index)
        assert len(set(flush.clients.tolist())) == 4
        assert sorted(flush.ages.values()) == ([0, 1, 1, 1] if index else [0, 0, 0, 0])
        assert flush.seconds == index + 1


def test_twice_as_many_at_work_are_one_release_late_at_the_same_second() -> None:
    picks = selector(np.ones(12), 3, 6)
    first, second, third = (picks.flush(index) for index in range(3))
    assert [f.seconds for f in (first, second, third)] == [1.0, 1.0, 2.0]
    assert set(first.ages.values()) == {0}
    assert set(second.ages.values()) == {1}
    assert not set(first.clients.tolist()) & set(second.clients.tolist())


def test_a_slow_device_comes_when_it_is_done_and_too_late_a_one_never() -> None:
    """Devices of 1 s fill a buffer of one each second; one takes 5.5 s, one 1000 s."""
    picks = selector([1.0, 5.5, 1000.0], 1, 3)
    seen = [picks.flush(index) for index in range(40)]
    slow = [(index, f) for index, f in enumerate(seen) if 1 in f.ages]
    assert slow[0][1].seconds == 5.5
    assert slow[0][1].ages[1] == slow[0][0]
    assert not any(2 in f.ages for f in seen)
    hours = selector([1.0, 30.0], 1, 2)
    assert not any(1 in hours.flush(index).ages for index in range(29 + MOST_STALE))


def test_nobody_comes_who_is_not_there_and_whoever_may_not_is_left_out() -> None:
    trace = {0: np.array([1, 4]), 1: np.zeros(0, dtype=np.int64), 2: np.array([2])}
    picks = selector(np.ones(6), 2, 2, availability=Availability(6, trace=trace))
    assert picks.select(0).clients.tolist() == [1, 4]
    assert picks.select(1).clients.tolist() == []
    allowed = np.array([True, True, False, True, True, True])
    assert picks.select(2, allowed).clients.tolist() == []
    assert picks.select(2).clients.tolist() == [2]


def test_seconds_of_devices_are_log_normal() -> None:
    seconds = np.log(device_seconds(100_000, 0.7, 3))
    assert abs(np.mean(seconds)) < 0.01
    assert np.std(seconds) == pytest.approx(0.7, rel=0.01)


CERTIFIED = {"mode": "certified"}
SETTINGS: dict[str, Any] = {"buffer_size": 3, "in_flight": 6, "device_spread": 1.5}


def test_a_round_is_the_mean_of_scaled_updates_from_older_models() -> None:
    shared = {"mode": "fedavg", "num_clients": 12, "num_rounds": 8, "engine": "sequential"}
    config, problem = build_task(tiny(**shared, **SETTINGS))
    ours = build_federation(config, problem)
    plain_config, plain = build_task(tiny(**shared))
    alone = build_federation(plain_config, plain)
    picks, models, met = problem.selector, [], set()
    assert isinstance(picks, BufferedSelector)
    for index in range(8):
        models.append(ours.weights.clone())
        flush = picks.flush(index)
        total, samples = torch.zeros_like(models[0], dtype=torch.float64), 0
        for client, age in flush.ages.items():
            met.add(age)
            start = models[index - age].clone()
            (update,) = alone.method.engine.train(start, [client], index, 0.01)
            total += update.num_examples * update.delta.double() / np.sqrt(1 + age)
            samples += update.num_examples
        record = run_round(ours, index)
        assert sorted(record.cohort) == sorted(flush.ages)
        expected = models[index].double() + total / samples
        torch.testing.assert_close(ours.weights.double(), expected, atol=1e-6, rtol=1e-5)
        assert record.server["clock"] == flush.seconds
    assert len(met) > 2


def test_a_round_without_a_release_leaves_the_model_of_the_next() -> None:
    class Server:
        report = state = staticmethod(dict)

    past = PastModels(torch.zeros(2), 4, float).serve(Server())
    for index in (0, 2, 3):  # nobody came in round 1
        past.note(index, torch.full((2,), float(index)))
    assert [float(past.at(index)[0]) for index in range(4)] == [0.0, 2.0, 2.0, 3.0]


def test_attackers_that_know_one_another_know_the_whole_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone with the model of its age an attacker would have no honest update to look at."""
    shared = {"mode": "fedavg", "num_clients": 12, "num_rounds": 6, "engine": "sequential"}
    attacked = {"attack": "inner_product", "attackers": 0.5}
    config, problem = build_task(tiny(**shared, **SETTINGS, **attacked))
    hostile, picks = hostile_clients(12, 0.5, config.seed), problem.selector
    assert isinstance(picks, BufferedSelector)
    federation = build_federation(config, problem)
    engine, sent = federation.method.engine, dict[int, torch.Tensor]()
    train = engine.train

    def kept(*given: Any) -> Iterator[ClientUpdate]:
        for update in train(*given):
            sent[update.client] = update.delta * np.sqrt(1 + ages[update.client])
            yield update

    monkeypatch.setattr(engine, "train", kept)
    alone = 0
    for index in range(6):
        sent.clear()
        ages = picks.flush(index).ages
        run_round(federation, index)
        honest = [one for one in sent if one not in hostile]
        for one in sent if honest else ():
            if one in hostile:
                alone += ages[one] not in {ages[other] for other in honest}
                agreed = -0.5 * torch.stack([sent[other] for other in honest]).mean(dim=0)
                torch.testing.assert_close(sent[one], agreed)
    assert alone, "somebody hostile was alone with its age"


@pytest.mark.parametrize("mode", ["fedavg", "certified"])
def test_a_resumed_asynchronous_run_is_the_uninterrupted_one(tmp_path: Path, mode: str) -> None:
    shared: dict[str, Any] = {"mode": mode, "num_clients": 12, "num_rounds": 6, **SETTINGS}
    whole = run_config(tiny(output_dir=str(tmp_path / "whole"), **shared))

    class StopError(Exception):
        pass

    def stop(config: object, line: dict[str, Any]) -> None:
        if line["round"] == 3:
            raise StopError

    with pytest.raises(StopError):
        run_config(tiny(output_dir=str(tmp_path / "cut"), **shared), stop)
    (folder,) = (tmp_path / "cut").iterdir()
    assert_same_run(resume_run(folder), whole)


def test_a_client_is_charged_for_each_contribution() -> None:
    shared = {"mode": "certified", "num_clients": 12, "num_rounds": 6, "noise_seed": None}
    done = run_in_memory(tiny(**{**shared, **SETTINGS}))
    assert done.statement.is_bounded
    counts = np.bincount(np.concatenate(done.result["cohorts"]).astype(int), minlength=12)
    assert done.result["joins"] == counts.tolist()
    assert len(done.result["history"]["clock"]) == 6


@pytest.mark.parametrize(
    "other",
    [
        {"method": "fedrolex"},
        {"rounds_per_release": 2},
        {"selection": "poisson"},
        {"correction": "scaffold"},
        {"personal": "fedper"},
        {**CERTIFIED, "secure_aggregation": "simulated"},
        {
            "policy": "worst_case",
            "mode": "certified",
            "selection": "poisson",
            "amplification": True,
        },
    ],
    ids=lambda other: next(reversed(other)),
)
def test_what_cannot_be_asynchronous_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match="buffer_size=3 must be left out with"):
        build_config({"mode": "fedavg", "model": "mlp", "buffer_size": 3, **other})


@pytest.mark.parametrize("other", [{"in_flight": 4}, {"device_spread": 2.0}])
def test_options_of_a_buffer_are_refused_without_one(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match="it is for a buffer_size"):
        build_config({"mode": "fedavg", "model": "mlp", **other})
