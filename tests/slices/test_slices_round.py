"""Rounds on slices against NumPy, for every schedule; and what they have in common."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sliced_federation import (
    HIDDEN,
    INPUTS,
    SIZE,
    Array,
    Held,
    Loss,
    cross_entropy,
    divergence,
    kept,
    logits,
    mean_over_holders,
    trained,
)
from slices_samples import EPOCHS, RATE, SIZES, data, federation

from fedquilt.common.randomness import generator
from fedquilt.config.choices import EXIT_METHODS
from fedquilt.experiment.api import resume_run, run_config, run_in_memory
from fedquilt.federation import Federation
from fedquilt.privacy.noise import SeededNoise
from fedquilt.round import run_round
from fedquilt.slices.method import Slices
from fedquilt.slices.selection import fjord
from run_samples import assert_same_run, same_tensors, tiny
from tiers import rest_is_slow

SEED = 0
METHODS = ("heterofl", "fedrolex", "dropout", "fjord", "mfl", "fiarse", "largest")
ALL = Held(list(range(HIDDEN)), list(range(HIDDEN)))


def prefix(width: Fraction) -> Held:
    units = list(range(kept(width)))
    return Held(units, units)


def held_by(sample: Federation, method: str, client: int, index: int) -> Held:
    """Return the units of a client in a round, from the description of the method."""
    assert isinstance(sample.method, Slices)
    width = sample.method.slicing.widths[client]
    count = kept(width)
    if method == "largest" or width == 1:
        return ALL
    if method == "fedrolex":
        window = [(index + place) % HIDDEN for place in range(count)]
        return Held(window, window)
    if method == "fiarse":
        values = sample.weights.double().numpy()
        first = np.abs(values[: HIDDEN * INPUTS]).reshape(HIDDEN, INPUTS).sum(axis=1)
        start = HIDDEN * (INPUTS + 1)
        second = np.abs(values[start : start + HIDDEN**2]).reshape(HIDDEN, HIDDEN).sum(axis=1)
        return Held(*(sorted(np.argsort(-own)[:count].tolist()) for own in (first, second)))
    if method == "mfl":
        pieces, digits = int(1 / width), client + index
        piece = [digits % pieces, digits // pieces % pieces]
        return Held(*(list(range(p * HIDDEN // pieces, (p + 1) * HIDDEN // pieces)) for p in piece))
    if method == "dropout":
        draw = int(generator(SEED, "slice", index, client).integers(2**62))
        rows = [np.random.default_rng([draw, axis]).permutation(HIDDEN) for axis in (0, 1)]
        return Held(*(sorted(row[:count].tolist()) for row in rows))
    return prefix(width)


def losses(sample: Federation, method: str, client: int, index: int) -> list[Loss]:
    """Return the loss of every local step."""
    assert isinstance(sample.method, Slices)
    inputs, labels, clients = data()
    x, y = inputs.numpy().astype(np.float64)[clients[client]], labels.numpy()[clients[client]]
    held = held_by(sample, method, client, index)
    if method == "heterofl":
        rates = (len(held.first) / HIDDEN, len(held.second) / HIDDEN)
        known = np.isin(np.arange(3), y)
        return [
            lambda v, _: cross_entropy(np.where(known, logits(v, x, held, rates), 0.0), y)
        ] * EPOCHS
    if method != "fjord":
        return [lambda v, _: cross_entropy(logits(v, x, held), y)] * EPOCHS
    limit, random = (
        sample.method.slicing.widths[client],
        generator(SEED, "ordered dropout", index, client),
    )
    steps: list[Loss] = []
    for _ in range(EPOCHS):
        narrow = fjord(limit, sample.method.slicing.widths, random).width
        steps.append(distilled(x, y, held, prefix(narrow) if narrow < limit else None))
    return steps


def distilled(x: Array, y: Array, wide: Held, narrow: Held | None) -> Loss:
    """Return FjORD's loss of a step that draws the narrow width; None: the wide one."""

    def loss(vector: Array, start: Array) -> float:
        own = cross_entropy(logits(vector, x, wide), y)
        if narrow is None:
            return own
        teacher, student = logits(start, x, wide), logits(vector, x, narrow)
        return own + 0.5 * cross_entropy(student, y) + 0.5 * divergence(teacher, student)

    return loss


def mask_of(sample: Federation, method: str, client: int, index: int, leave_out: bool) -> Array:
    """Return which elements of the mean a client takes part in."""
    mask = held_by(sample, method, client, index).mask()
    if method != "heterofl" or not leave_out:
        return mask
    _, labels, clients = data()
    known = np.isin(np.arange(3), labels.numpy()[clients[client]])
    rows = np.concatenate([np.ones(SIZE - 15, bool), np.repeat(known, HIDDEN), known])
    return mask & rows  # output rows of classes that it lacks are left out


def expected_updates(
    sample: Federation, method: str, index: int, weights: Array, leave_out: bool = False
) -> list[tuple[Array, Array, float]]:
    return [
        (
            trained(losses(sample, method, client, index), weights, RATE),
            mask_of(sample, method, client, index, leave_out),
            float(SIZES[client]),
        )
        for client in range(len(SIZES))
    ]


@pytest.mark.parametrize("method", METHODS)
def test_two_rounds_are_those_of_numpy(method: str) -> None:
    leave_out = method == "heterofl"
    own = {"absent_classes": "leave_out"} if leave_out else {}
    sample = federation(method=method, seed=SEED, **own)
    for index in range(2):
        before = sample.weights.double().numpy()
        updates = expected_updates(sample, method, index, before, leave_out)
        run_round(sample, index)
        expected = before + mean_over_holders(updates)
        np.testing.assert_allclose(sample.weights.numpy(), expected, atol=3e-6)
        moved = sample.weights.double().numpy() != before
        assert not moved[~np.any([mask for _, mask, _ in updates], axis=0)].any()


def test_elements_that_nobody_holds_stay_as_they_are() -> None:
    sample = federation(method="heterofl", tiers="1/2,1/4")
    before = sample.weights.clone()
    run_round(sample, 0)
    held = prefix(Fraction(1, 2)).mask()
    assert torch.equal(sample.weights[~held], before[~held])
    assert (sample.weights[held] != before[held]).float().mean() > 0.9


@pytest.mark.parametrize("method", METHODS)
def test_the_coverage_counts_the_roster(method: str) -> None:
    sample = federation(method=method, seed=SEED)
    assert isinstance(sample.method, Slices)
    roster = np.array([0, 2, 3, 5])
    for index in (0, 5):
        masks = [held_by(sample, method, int(client), index).mask() for client in roster]
        coverage = sample.method.slicing.coverage(roster, index)
        np.testing.assert_allclose(coverage.numpy(), np.mean(masks, axis=0), atol=1e-15)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bands", [1, 2])
def test_a_certified_round_is_clip_noise_and_coverage(
    tmp_path: Path, method: str, bands: int
) -> None:
    settings: dict[str, Any] = {"mode": "certified", "policy": "worst_case", "clip_norm": 0.05}
    sample = federation(
        tmp_path, method=method, seed=SEED, noise_seed=9, noise_bands=bands, **settings
    )
    before = sample.weights.double().numpy()
    updates = expected_updates(sample, method, 0, before)
    record = run_round(sample, 0)
    assert record.noise.noise_std is not None
    noise_std = record.noise.noise_std * 6  # six clients are expected, and there
    total, count = np.zeros(SIZE), np.zeros(SIZE)
    for update, mask, _ in updates:
        sent = update * mask
        total += sent * min(1.0, 0.05 / np.linalg.norm(sent))
        count += mask
    noise = noise_std * SeededNoise(9).stream(0).normal(SIZE) * (count > 0)
    expected = before + (total + noise) / np.maximum(1.0, count)
    np.testing.assert_allclose(sample.weights.numpy(), expected, atol=1e-5)
    uncovered = count == 0
    assert np.array_equal(sample.weights.double().numpy()[uncovered], before[uncovered])


def test_uncovered_coordinates_have_neither_update_nor_noise(tmp_path: Path) -> None:
    sample = federation(tmp_path, method="heterofl", tiers="1/2", mode="certified")
    before = sample.weights.clone()
    run_round(sample, 0)
    held = torch.from_numpy(prefix(Fraction(1, 2)).mask())
    assert torch.equal(sample.weights[~held], before[~held])
    assert (sample.weights[held] != before[held]).all()


CERTIFIED = {"mode": "certified", "noise_seed": 3, "clip_norm": 0.3}


@pytest.mark.parametrize("settings", [{"mode": "fedavg"}, CERTIFIED], ids=["fedavg", "certified"])
@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_largest_is_full_bit_for_bit(settings: dict[str, Any], partition: str) -> None:
    # Slices are trained one after the other; `auto` may train whole models with other sums.
    shared = {**settings, "model": "digits", "partition": partition, "output_dir": "unused"}
    shared["engine"] = "sequential"
    whole = run_in_memory(tiny(method="full", **shared))
    sliced = run_in_memory(tiny(method="largest", **shared))
    assert same_tensors(whole.state_dict, sliced.state_dict)
    assert whole.result["history"]["test_accuracy"] == sliced.result["history"]["test_accuracy"]


RESUMED = [*METHODS[:-1], *EXIT_METHODS, "smallest"]
EVERY = [(mode, method) for mode in ("fedavg", "certified") for method in RESUMED]
DIAGONAL = [(("fedavg", "certified")[place % 2], method) for place, method in enumerate(RESUMED)]


@pytest.mark.parametrize(("mode", "method"), rest_is_slow(EVERY, DIAGONAL, names=2))
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, mode: str, method: str) -> None:
    model = "exits" if method in EXIT_METHODS else "digits"
    shared: dict[str, Any] = {"mode": mode, "method": method, "model": model, "tiers": "1,1/2,1/4"}
    shared["batch_size"] = 64  # two steps or more of most clients
    whole = run_config(tiny(output_dir=str(tmp_path / "whole"), **shared))

    class StopError(Exception):
        pass

    def stop(config: object, line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise StopError

    with pytest.raises(StopError):
        run_config(tiny(output_dir=str(tmp_path / "cut"), **shared), stop)
    (folder,) = (tmp_path / "cut").iterdir()
    assert_same_run(resume_run(folder), whole)


@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "mfl", "dropout", "fiarse"])
def test_the_batched_engine_trains_slices_alike(method: str) -> None:
    one = federation(method=method, engine="sequential")
    many = federation(method=method, engine="batched")
    for index in range(2):
        run_round(one, index)
        run_round(many, index)
    torch.testing.assert_close(one.weights, many.weights, atol=1e-5, rtol=1e-4)
