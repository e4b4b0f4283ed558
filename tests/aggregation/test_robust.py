"""Robust rules against numpy and SciPy, and what they are in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from fedquilt.aggregation import keeps_vectors, sensitivity_of
from fedquilt.aggregation.rules import ClippedSum, RememberingServer, RobustSum, make_robust
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.vectors import CHUNK
from fedquilt.config import build_config
from fedquilt.config.choices import AGGREGATIONS
from fedquilt.experiment.api import resume_run, run_config, run_in_memory
from run_samples import only_folder, same_tensors

Rows = NDArray[np.float32]
SMALL: dict[str, Any] = {
    "mode": "fedavg",
    "dataset": "digits",
    "model": "linear",
    "num_clients": 10,
    "clients_per_round": 1.0,
    "availability": "always",
    "num_rounds": 2,
    "local_epochs": 1,
}


def rows(count: int, size: int = 6, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32)


def result_of(total: Any, vectors: Rows, weights: Any = None) -> NDArray[np.float64]:
    for k, vector in enumerate(vectors):
        total.add(torch.from_numpy(vector), 1.0 if weights is None else float(weights[k]))
    value: NDArray[np.float64] = (total.total / total.weight).numpy()
    return value


def by_numpy(rule: str, vectors: Rows, fraction: float) -> NDArray[np.float64]:
    """The rules once more, from their papers, with loops."""
    x = vectors.astype(np.float64)
    n = len(x)
    hostile = int(np.ceil(round(fraction * n, 9)))
    if rule == "median":
        return np.median(x, axis=0)
    if rule == "majority":
        return np.sign((x > 0).sum(axis=0) - (x < 0).sum(axis=0)).astype(np.float64)
    if rule == "trimmed_mean":
        return np.sort(x, axis=0)[hostile : n - hostile].mean(axis=0)
    if rule == "geometric_median":
        found = minimize(
            lambda z: np.linalg.norm(x - z, axis=1).sum(),
            x.mean(axis=0),
            method="BFGS",
            options={"gtol": 1e-9},
        )
        return np.asarray(found.x)
    scores = []
    for i in range(n):
        apart = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(apart[: n - hostile - 2]))
    best = np.argsort(scores)
    return x[best[0]] if rule == "krum" else x[best[: n - hostile]].mean(axis=0)


@pytest.mark.parametrize("count", [7, 10, 15])
@pytest.mark.parametrize(
    "rule", ["median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "majority"]
)
def test_a_rule_is_that_of_its_paper(rule: str, count: int) -> None:
    vectors = rows(count, seed=count)
    vectors[0] *= 50
    found = result_of(RobustSum(rule, 0.2, 6), vectors)
    close = 1e-5 if rule == "geometric_median" else 1e-12
    assert np.allclose(found, by_numpy(rule, vectors, 0.2), atol=close, rtol=0)


def test_a_fifth_of_fifteen_is_three_though_products_round() -> None:
    vectors = np.zeros((15, 1), dtype=np.float32)
    vectors[:3] = 1e6
    assert result_of(RobustSum("trimmed_mean", 0.2, 1), vectors) == 0
    vectors[3] = 1e6
    assert result_of(RobustSum("trimmed_mean", 0.2, 1), vectors) > 0
    few = np.zeros((100, 1), dtype=np.float32)
    few[:7] = 1.0  # 0.07 * 100 is 7.000000000000001
    few[7:15] = 2.0
    cut = np.sort(few.ravel())[7:93].mean()
    assert result_of(RobustSum("trimmed_mean", 0.07, 1), few) == pytest.approx(cut)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_tiny_cohorts_are_answered(rule: str, count: int) -> None:
    vectors = rows(count)
    found = result_of(RobustSum(rule, 0.4, 6), vectors)
    assert np.isfinite(found).all()
    if count == 1:
        assert np.allclose(found, vectors[0])


def test_coordinates_beyond_a_chunk_are_in_the_median() -> None:
    size = CHUNK + 3
    vectors = rows(3, size)
    found = result_of(RobustSum("median", 0.2, size), vectors)
    assert np.array_equal(found, np.median(vectors.astype(np.float64), axis=0))


def test_equal_vectors_are_their_own_geometric_median() -> None:
    vectors = np.ones((4, 6), dtype=np.float32)
    assert np.array_equal(result_of(RobustSum("geometric_median", 0.2, 6), vectors), np.ones(6))


def clipped(vectors: Rows, radius: float, centre: Any = 0.0) -> NDArray[np.float64]:
    away = vectors.astype(np.float64) - centre
    lengths = np.linalg.norm(away, axis=1, keepdims=True)
    value: NDArray[np.float64] = centre + (away * np.minimum(1, radius / lengths)).mean(axis=0)
    return value


def test_norm_bounding_is_the_mean_of_shortened_vectors() -> None:
    vectors = rows(9)
    vectors[0] *= 1000
    assert np.allclose(result_of(ClippedSum(1.5, 6), vectors), clipped(vectors, 1.5), rtol=1e-12)


def test_centred_clipping_goes_around_the_move_before_and_survives_a_checkpoint() -> None:
    class Adds:
        def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
            return weights + update

        def report(self) -> dict[str, float]:
            return {}

        def state(self) -> dict[str, Any]:
            return {}

        def load_state(self, state: dict[str, Any], device: torch.device) -> None:
            assert state == {}

    make, server = make_robust("centred_clipping", 0.2, 0.7, Adds())
    first, second = rows(5, seed=1), rows(5, seed=2)
    one = result_of(make(6, "cpu"), first)
    assert np.allclose(one, clipped(first, 0.7), rtol=1e-12)
    server.step(torch.zeros(6), torch.from_numpy(one))
    two = result_of(make(6, "cpu"), second)
    assert np.allclose(two, clipped(second, 0.7, one), rtol=1e-12)
    again, resumed = make_robust("centred_clipping", 0.2, 0.7, Adds())
    resumed.load_state(server.state(), torch.device("cpu"))
    assert isinstance(resumed, RememberingServer)
    assert np.array_equal(result_of(again(6, "cpu"), second), two)


@pytest.mark.parametrize("rule", AGGREGATIONS[1:])
def test_a_vector_by_its_word_weighs_as_much_as_any_other(rule: str) -> None:
    make, _ = make_robust(rule, 0.2, 1.0, RememberingServer(None))  # type: ignore[arg-type]
    vectors = rows(8)
    lied = result_of(make(6, "cpu"), vectors, weights=[1e6, *[1.0] * 7])
    assert np.array_equal(lied, result_of(make(6, "cpu"), vectors))


@pytest.mark.parametrize("rule", AGGREGATIONS[1:])
def test_no_rule_declares_a_sensitivity_and_none_takes_parts(rule: str) -> None:
    make, _ = make_robust(rule, 0.2, 1.0, RememberingServer(None))  # type: ignore[arg-type]
    total = make(6, "cpu")
    assert sensitivity_of(total) is None
    assert keeps_vectors(total) == (rule not in ("norm_bound", "centred_clipping"))
    assert np.array_equal(total.total, np.zeros(6))
    with pytest.raises(InvalidValueError, match="whole one of 6 numbers"):
        total.add(torch.zeros(5))


@pytest.mark.parametrize("engine", ["local", "sequential"])
def test_a_run_moves_the_model_by_the_median_of_its_updates(engine: str) -> None:
    """One round: what the mean's run and the median's run make of the same updates."""
    seen: list[Any] = []

    class Watched(RobustSum):
        def add(self, vector: torch.Tensor, weight: float = 1.0, place: Any = None) -> None:
            seen.append(vector.clone().numpy())
            super().add(vector, weight, place)

    settings = {**SMALL, "num_rounds": 1, "engine": engine, "aggregation": "median"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedquilt.aggregation.rules.RobustSum", Watched)
        done = run_in_memory(build_config(settings))
    start = run_in_memory(build_config({**settings, "learning_rate": 1e-30})).state_dict
    moved = np.concatenate(
        [(done.state_dict[name] - start[name]).numpy().ravel() for name in done.state_dict]
    )
    assert len(seen) == 10
    assert np.allclose(moved, np.median(np.stack(seen), axis=0), atol=1e-6)


@pytest.mark.parametrize("mode", ["certified", "fixed_dp", "quap_fl", "quap_fl_client"])
@pytest.mark.parametrize("rule", AGGREGATIONS[1:])
def test_modes_that_noise_refuse_robust_rules_with_the_reason(mode: str, rule: str) -> None:
    with pytest.raises(InvalidValueError, match="one client moves by its clip at most"):
        build_config({**SMALL, "mode": mode, "aggregation": rule})


def test_slices_refuse_robust_rules() -> None:
    with pytest.raises(InvalidValueError, match="updates of the whole model"):
        build_config({**SMALL, "method": "heterofl", "aggregation": "krum"})


def test_a_resumed_run_with_centred_clipping_ends_as_one_that_was_not_stopped(
    tmp_path: Path,
) -> None:
    clipped_run = {**SMALL, "aggregation": "centred_clipping", "clip_norm": 0.05, "num_rounds": 4}
    config = build_config({**clipped_run, "eval_every": 1, "output_dir": str(tmp_path)})
    whole = run_in_memory(config)

    def stop(config: Any, line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_config(config, stop)
    resumed = resume_run(only_folder(tmp_path))
    assert resumed.result["rounds"] == 4
    assert same_tensors(resumed.state_dict, whole.state_dict)
