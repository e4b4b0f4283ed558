"""Every example of the API document, with `fedquilt.` in front of its module names.

The examples on MNIST run where FEDQUILT_DATA has its files, with one round of two
clients and few samples; everything else is as the document writes it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from fedquilt.config import HYPERPARAMETERS, OUTPUT_CONFIG, TARGET_ACCURACY, VISUALIZATION_CONFIG
from fedquilt.data import dataset_status, prepare_non_iid_data
from fedquilt.framework import (
    AdaptivePrivacyAllocator,
    ParticipationTracker,
    QuantileClipper,
    QuAPFLServer,
)
from fedquilt.models import CIFAR10Model, MNISTModel
from fedquilt.utils import generate_summary_table, plot_multi_seed_comparison, plot_training_history


def test_participation_tracker() -> None:
    tracker = ParticipationTracker(num_clients=100)
    tracker.update([0, 1, 2])
    rate = tracker.get_participation_rate(0)
    assert f"{rate:.2%}" == "100.00%"
    rates = tracker.get_all_participation_rates()
    assert rates.shape == (100,)
    assert f"{rates.mean():.2%}" == "3.00%"
    stats = tracker.get_statistics()
    assert f"{stats['total_rounds']}" == "1"
    assert f"{stats['mean_participation_rate']:.3f}" == "0.030"
    assert f"{stats['std_participation_rate']:.3f}" == f"{math.sqrt(0.03 * 0.97):.3f}"
    assert (stats["participating_clients"], stats["never_participated"]) == (3, 97)


def test_adaptive_privacy_allocator() -> None:
    allocator = AdaptivePrivacyAllocator(epsilon_base=0.015, alpha=0.5, beta=2.0, delta=1e-5)
    eps_high = allocator.compute_privacy_budget(0.9)
    eps_low = allocator.compute_privacy_budget(0.1)
    assert f"{eps_high:.6f}" == "0.016240"
    assert f"{eps_low:.6f}" == "0.021140"
    noise_std = allocator.compute_noise_multiplier(epsilon=0.015, clip_norm=1.0)
    assert f"{noise_std:.2f}" == "322.99"
    gradient = np.random.randn(100)
    noisy_gradient = allocator.add_gaussian_noise(gradient, epsilon=0.015, clip_norm=1.0)
    assert isinstance(noisy_gradient, np.ndarray)
    assert noisy_gradient.shape == (100,)
    assert 100 < np.std(noisy_gradient) < 700


def test_quantile_clipper() -> None:
    clipper = QuantileClipper(quantile=0.9, momentum=0.95, min_clip=0.1, max_clip=10.0)
    gradients = [np.random.randn(100) for _ in range(10)]
    clip_value = clipper.update_clip_value(gradients)
    norms = [np.linalg.norm(gradient) for gradient in gradients]
    assert clip_value == pytest.approx(min(10.0, np.percentile(norms, 90)))
    gradient = np.random.randn(100) * 10
    clipped = clipper.clip_gradient(gradient)
    assert np.linalg.norm(clipped) == pytest.approx(min(np.linalg.norm(gradient), clip_value))
    gradients = [np.random.randn(100) * i for i in range(1, 11)]
    clipped_gradients = clipper.clip_gradients(gradients)
    assert len(clipped_gradients) == 10
    assert all(np.linalg.norm(gradient) <= clip_value for gradient in clipped_gradients)


def test_models() -> None:
    assert f"{MNISTModel().get_num_parameters():,}" == "1,199,882"
    assert f"{CIFAR10Model().get_num_parameters():,}" == "1,453,834"


def test_config() -> None:
    assert HYPERPARAMETERS["num_clients"] == 100
    assert HYPERPARAMETERS["num_rounds"] == 200
    assert HYPERPARAMETERS["epsilon_total"] == 3.0
    assert f"{TARGET_ACCURACY['mnist']:.1%}" == "97.1%"
    assert f"{TARGET_ACCURACY['cifar10']:.1%}" == "81.2%"
    assert VISUALIZATION_CONFIG["enabled"] is True
    assert (VISUALIZATION_CONFIG["dpi"], VISUALIZATION_CONFIG["format"]) == (150, "png")
    assert OUTPUT_CONFIG["output_dir"] == "./results"
    assert (OUTPUT_CONFIG["save_results"], OUTPUT_CONFIG["save_plots"]) == (True, True)


def history_of_three() -> dict[str, list[Any]]:
    return {
        "test_accuracy": [0.5, 0.9752, 0.9710],
        "test_loss": [1.2, 0.1, 0.0921],
        "clip_values": [0.5, 0.52, 0.543],
        "privacy_budgets": [1.0, 1.0, 1.0],
        "participation_stats": [{"mean_participation_rate": 0.3, "participating_clients": 30}] * 3,
        "evaluation_rounds": [10, 190, 200],
    }


def test_generate_summary_table() -> None:
    table = generate_summary_table(
        final_accuracy=0.9710,
        final_loss=0.0921,
        dataset_name="mnist",
        seed=42,
        history=history_of_three(),
        config=HYPERPARAMETERS,
    )
    for row in (
        "QuAP-FL Experiment Results - MNIST (seed=42)",
        "│ Metric                  │ Value               │ Status             │",
        "│ Final Accuracy          │ 0.9710 (97.10%)     │ Achieved           │",
        "│ Best Accuracy           │ 0.9752 (97.52%)     │ Round 190          │",
        "│ Final Loss              │ 0.0921              │ -                  │",
        "│ Total Privacy Budget    │ ε = 3.0             │ nominal, no bound  │",
        "│ Average Clipping        │ 0.5210              │ -                  │",
        "│ Mean Participation Rate │ 0.300               │ 30 clients         │",
    ):
        assert row in table


def test_plot_training_history(tmp_path: Path) -> None:
    plot_path = plot_training_history(
        history=history_of_three(),
        dataset_name="mnist",
        seed=42,
        config=VISUALIZATION_CONFIG,
        save_path=str(tmp_path / "mnist_training.png"),
    )
    assert Path(plot_path).read_bytes().startswith(b"\x89PNG")


def test_plot_multi_seed_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("results")
    seeds = [42, 123, 999]
    for seed in seeds:
        with open(f"results/mnist_seed{seed}.json", "w") as f:
            json.dump({"history": history_of_three()}, f)

    results = []
    for seed in seeds:
        with open(f"results/mnist_seed{seed}.json") as f:
            data = json.load(f)
            results.append(data["history"])
    plot_path = plot_multi_seed_comparison(
        results=results,
        seeds=seeds,
        dataset_name="mnist",
        config=VISUALIZATION_CONFIG,
        save_path=None,
    )
    assert Path(plot_path).read_bytes().startswith(b"\x89PNG")


# The examples on MNIST


@pytest.fixture(scope="module")
def mnist() -> tuple[Any, Any, Any]:
    if not os.environ.get("FEDQUILT_DATA") or not dataset_status("mnist").ready:
        pytest.skip("FEDQUILT_DATA does not have the MNIST files")
    client_indices, train_dataset, test_dataset = prepare_non_iid_data(
        "mnist", num_clients=100, alpha=0.5, seed=42
    )
    # Whole clients and the whole test set would take minutes.
    return [part[:64] for part in client_indices], train_dataset, Subset(test_dataset, range(200))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of two clients: `config=None` takes these values."""
    for key, value in {"num_rounds": 1, "clients_per_round": 2, "local_epochs": 1}.items():
        monkeypatch.setitem(HYPERPARAMETERS, key, value)


def test_prepare_non_iid_data(mnist: tuple[Any, Any, Any]) -> None:
    client_indices, train_dataset, test_dataset = prepare_non_iid_data(
        dataset_name="mnist", num_clients=100, alpha=0.5, data_dir="./data", seed=42
    )
    assert len(client_indices) == 100
    assert len(train_dataset) == 60_000
    assert len(test_dataset) == 10_000
    everything = np.sort(np.concatenate(client_indices))
    assert np.array_equal(everything, np.arange(60_000))
    assert [part[:64].tolist() for part in client_indices] == [part.tolist() for part in mnist[0]]


@pytest.mark.usefixtures("short")
def test_quapfl_server(mnist: tuple[Any, Any, Any]) -> None:
    client_indices, train_dataset, test_dataset = mnist
    model = MNISTModel()
    server = QuAPFLServer(
        model=model,
        train_dataset=train_dataset,
        test_dataset=test_dataset,
        client_indices=client_indices,
        dataset_name="mnist",
        config=None,
        device=None,
    )
    history = server.train()
    assert 0 <= history["test_accuracy"][-1] <= 1
    assert math.isfinite(history["test_loss"][-1])
    documented = {"test_accuracy", "test_loss", "clip_values", "noise_levels"}
    assert documented | {"participation_stats", "privacy_budgets"} <= set(history)
    accuracy, loss = server.evaluate()
    assert (accuracy, loss) == (history["test_accuracy"][-1], history["test_loss"][-1])


@pytest.mark.usefixtures("short")
def test_the_whole_pipeline_with_figures(
    mnist: tuple[Any, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(42)
    client_indices, train_dataset, test_dataset = mnist
    model = MNISTModel()
    server = QuAPFLServer(
        model=model,
        train_dataset=train_dataset,
        test_dataset=test_dataset,
        client_indices=client_indices,
        dataset_name="mnist",
    )
    history = server.train()
    final_acc = history["test_accuracy"][-1]
    table = generate_summary_table(
        final_accuracy=history["test_accuracy"][-1],
        final_loss=history["test_loss"][-1],
        dataset_name="mnist",
        seed=42,
        history=history,
        config={},
    )
    assert f"{final_acc:.4f}" in table
    assert "│ Privacy Claim           │ none (ε = ∞)        │ no guarantee       │" in table
    if VISUALIZATION_CONFIG["enabled"]:
        plot_path = plot_training_history(
            history=history, dataset_name="mnist", seed=42, config=VISUALIZATION_CONFIG
        )
        assert Path(plot_path).read_bytes().startswith(b"\x89PNG")
