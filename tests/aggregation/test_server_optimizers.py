"""Server optimisers against torch.optim and the formulas of Reddi et al. written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedquilt.aggregation import LateAverage, ServerOptimizer, make_server_optimizer
from fedquilt.errors import InvalidValueError

UPDATES = np.random.default_rng(3).standard_normal((6, 4)) * [
    [1.0],
    [0.1],
    [3.0],
    [0.0],
    [1e-4],
    [1],
]
START = np.array([1.0, -2.0, 0.5, 0.0])


def run(optimizer: ServerOptimizer) -> np.ndarray:
    weights = torch.from_numpy(START.copy())
    for update in UPDATES:
        weights = optimizer.step(weights, torch.from_numpy(update))
    return weights.numpy()


@pytest.mark.parametrize(("name", "momentum"), [("sgd", 0.0), ("momentum", 0.8)])
def test_sgd_and_momentum_are_torchs_with_the_update_as_negative_gradient(
    name: str, momentum: float
) -> None:
    parameter = torch.nn.Parameter(torch.from_numpy(START.copy()))
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=momentum)
    for update in UPDATES:
        parameter.grad = torch.from_numpy(-update)
        reference.step()
    ours = run(ServerOptimizer(name, 0.7, momentum))
    assert np.allclose(ours, parameter.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", ["adam", "yogi"])
def test_adam_and_yogi_are_algorithm_2_of_the_paper(name: str) -> None:
    """m = 0, v = tau^2 at the start; w += lr m / (sqrt(v) + tau), no bias correction."""
    weights, m, v = START.copy(), np.zeros(4), np.full(4, 1e-6)
    for update in UPDATES:
        m = 0.9 * m + 0.1 * update
        if name == "adam":
            v = 0.99 * v + 0.01 * update**2
        else:
            v = v - 0.01 * update**2 * np.sign(v - update**2)
        weights = weights + 0.05 * m / (np.sqrt(v) + 1e-3)
    assert np.allclose(run(ServerOptimizer(name, 0.05)), weights, rtol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "yogi"])
def test_a_saved_state_continues_alike(name: str) -> None:
    first, second = (make_server_optimizer(name, None, 0.9) for _ in range(2))
    weights = torch.from_numpy(START.copy())
    for update in UPDATES[:3]:
        weights = first.step(weights, torch.from_numpy(update))
    second.load_state(first.state(), torch.device("cpu"))
    other = weights.clone()
    for update in UPDATES[3:]:
        weights = first.step(weights, torch.from_numpy(update))
        other = second.step(other, torch.from_numpy(update))
    assert torch.equal(weights, other)
    assert np.allclose(weights, run(make_server_optimizer(name, None, 0.9)))


def test_weights_keep_their_type_and_their_memory() -> None:
    """A second model would be a large one's peak of memory: they move in place."""
    update = torch.ones(3, dtype=torch.float64)
    for name in ("sgd", "momentum", "adam", "yogi"):
        weights = torch.ones(3)
        moved = make_server_optimizer(name, None, 0.9).step(weights, update)
        assert moved.dtype == torch.float32
        assert moved.data_ptr() == weights.data_ptr()
        assert (moved > 1.0).all()
        assert update.tolist() == [1.0] * 3


def test_steps_smaller_than_float32_accumulate_in_the_moments() -> None:
    optimizer = ServerOptimizer("momentum", 1.0, 0.999)
    for _ in range(3):
        optimizer.step(torch.full((1,), 1e8), torch.full((1,), 1e-3))
    assert optimizer.state()["first"] == pytest.approx(1e-3 * (1 + 0.999 + 0.999**2), rel=1e-7)


def test_the_usual_learning_rates() -> None:
    rates = {name: make_server_optimizer(name, None, 0.9).lr for name in ("sgd", "momentum")}
    rates |= {name: make_server_optimizer(name, None, 0.9).lr for name in ("adam", "yogi")}
    assert rates == {"sgd": 1.0, "momentum": 1.0, "adam": 0.01, "yogi": 0.01}
    assert make_server_optimizer("adam", 0.3, 0.9).lr == 0.3


@pytest.mark.parametrize(
    "arguments", [("adamm", 1.0, 0.9), ("sgd", 0.0, 0.9), ("sgd", 1.0, 1.0), ("sgd", 1.0, -0.1)]
)
def test_bad_arguments_are_refused(arguments: tuple[str, float, float]) -> None:
    with pytest.raises(InvalidValueError, match="server_"):
        make_server_optimizer(*arguments)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("cut", [1, 3, 4])
def test_the_last_step_moves_to_the_mean_of_late_models_also_after_a_resume(
    name: str, cut: int
) -> None:
    plain, models = ServerOptimizer(name, 0.7), []
    weights = torch.from_numpy(START.copy())
    for update in UPDATES:
        models.append(plain.step(weights, torch.from_numpy(update)).numpy().copy())
    weights, server = torch.from_numpy(START.copy()), ServerOptimizer(name, 0.7)
    late = LateAverage((3, 6))
    for number, update in enumerate(UPDATES):
        weights = server.step(weights, torch.from_numpy(update))
        late.end_round(weights, number)
        if number < 5:
            assert np.array_equal(weights.numpy(), models[number])
        if number == cut:
            kept = {key: value.copy() for key, value in late.state().items()}
            late = LateAverage((3, 6))
            late.load_state(kept, torch.device("cpu"))
    assert np.allclose(weights.numpy(), np.mean(models[3:], axis=0), rtol=1e-12)
