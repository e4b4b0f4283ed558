from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedquilt.data import (
    ImageDataset,
    analyze_data_distribution,
    create_client_dataloaders,
    load_dataset,
    prepare_non_iid_data,
)
from fedquilt.data.load import rank_in_class
from fedquilt.errors import InvalidValueError


def test_signature_is_the_documented_one() -> None:
    parameters = inspect.signature(prepare_non_iid_data).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert list(parameters) == ["dataset_name", "num_clients", "alpha", "data_dir", "seed"]
    assert defaults == {"alpha": 0.5, "data_dir": "./data", "seed": None}


def test_prepare_digits(tmp_path: Path) -> None:
    clients, train, test = prepare_non_iid_data("digits", 30, 0.3, str(tmp_path), seed=42)
    again = prepare_non_iid_data("digits", 30, 0.3, str(tmp_path), seed=42)[0]
    assert all(np.array_equal(a, b) for a, b in zip(clients, again, strict=True))
    assert len(clients) == 30
    assert min(len(c) for c in clients) >= 1
    assert np.array_equal(np.sort(np.concatenate(clients)), np.arange(len(train)))
    image, label = train[int(clients[0][0])]
    assert image.shape == (1, 8, 8)
    assert label == int(train.targets[clients[0][0]])
    assert (len(train), len(test)) == (1442, 355)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digit", 3), "did you mean 'digits'"),
        (("digits", 2000), "num_clients=2000 must be at most the number of samples, 1442"),
        (("mnist", 0), "num_clients=0"),
        (("mnist", 3, -1.0), "alpha=-1.0 must be > 0"),
        (("mnist", 3, 1.0, "./data", "a"), "seed='a'"),
    ],
)
def test_prepare_refuses_before_it_loads(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        prepare_non_iid_data(*arguments)


def test_digits_are_those_of_scikit_learn_in_a_fixed_division() -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    seen = [0] * 10
    parts: tuple[list[int], list[int]] = ([], [])
    for i, label in enumerate(source.target):
        seen[label] += 1
        parts[seen[label] % 5 == 0].append(i)
    for dataset, rows in zip(load_dataset("digits"), parts, strict=True):
        assert dataset.targets.tolist() == source.target[rows].tolist()
        grey = dataset.images[:, 0].double().numpy() * 0.3762 + 0.3051
        np.testing.assert_allclose(grey * 16, source.images[rows], atol=1e-4)
    train, test = load_dataset("digits")
    assert abs(float(train.images.mean())) < 1e-3
    assert abs(float(train.images.std(correction=0)) - 1) < 1e-3
    shares = np.bincount(test.targets) / np.bincount(torch.cat([train.targets, test.targets]))
    assert np.abs(shares - 0.2).max() < 0.01


def test_rank_in_class() -> None:
    assert rank_in_class(np.array([2, 0, 2, 2, 0])).tolist() == [0, 0, 1, 2, 1]


def small() -> ImageDataset:
    images = torch.arange(10, dtype=torch.float32)[:, None]
    return ImageDataset(images, torch.arange(10) % 3, "small", 3)


def test_a_client_loader_gives_all_its_samples_shuffled() -> None:
    clients = [[0, 1], [9, 8, 7, 6, 5, 4, 3], []]
    generator = torch.Generator().manual_seed(0)
    loader = create_client_dataloaders(small(), clients, 3, 1, generator=generator)
    epochs = [list(loader) for _ in range(4)]
    assert [len(y) for _, y in epochs[0]] == [3, 3, 1]
    orders = [torch.cat([x for x, _ in epoch]).flatten().tolist() for epoch in epochs]
    assert all(sorted(order) == [3, 4, 5, 6, 7, 8, 9] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    x, y = epochs[0][0]
    assert torch.equal(y, x.flatten().long() % 3)


def test_a_client_loader_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    list(create_client_dataloaders(small(), [np.arange(10)], 4, 0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("clients", "batch_size", "client_id", "message"),
    [
        ([[0], []], 3, 1, "client_id=1 must have samples"),
        ([[0], [1]], 3, 2, "client_id=2 must be >= 0 and <= 1"),
        ([[0], [1]], 0, 1, "batch_size=0 must be >= 1"),
        ([[0], [10]], 3, 1, r"client_indices\[1\] holds 10, every number must be >= 0 and < 10"),
        ([[0], [0.5]], 3, 1, r"client_indices\[1\]=\[0.5\] must be a flat list"),
    ],
)
def test_loaders_that_cannot_be(clients, batch_size, client_id, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_client_dataloaders(small(), clients, batch_size, client_id)


def test_distribution_by_hand() -> None:
    labels = torch.tensor([0, 0, 1, 1, 1, 2])
    found = analyze_data_distribution([[0, 1, 2], np.array([3, 4, 5]), []], labels, 4)
    assert found["counts"].tolist() == [[2, 1, 0, 0], [0, 2, 1, 0], [0, 0, 0, 0]]
    assert found["client_sizes"].tolist() == [3, 3, 0]
    assert found["class_totals"].tolist() == [2, 3, 1, 0]
    assert found["classes_per_client"].tolist() == [2, 2, 0]
    assert (found["num_clients"], found["num_samples"], found["empty_clients"]) == (3, 6, 1)
    assert (found["min_size"], found["max_size"], found["mean_size"]) == (0, 3, 2.0)
    assert found["std_size"] == pytest.approx(np.sqrt(2))
    assert found["mean_classes_per_client"] == pytest.approx(4 / 3)
    # Overall (2, 3, 1)/6; both clients are at (1/3 + 1/6 + 1/6)/2 = 1/3.
    assert found["label_skew"] == pytest.approx(1 / 3)


def test_distribution_refuses_what_does_not_fit() -> None:
    with pytest.raises(InvalidValueError, match="labels must be < num_classes=2"):
        analyze_data_distribution([[0]], [0, 2], 2)
    with pytest.raises(InvalidValueError, match=r"client_indices\[0\] holds"):
        analyze_data_distribution([[2]], [0, 1], 2)
    with pytest.raises(InvalidValueError, match="at least one client"):
        analyze_data_distribution([], [0, 1], 2)


def test_importing_the_package_loads_no_optional_library() -> None:
    heavy = ("sklearn", "scipy", "pooch", "rich", "matplotlib")
    code = f"import sys, fedquilt.data; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
