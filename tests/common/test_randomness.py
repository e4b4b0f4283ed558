"""Streams depend on (seed, purpose, keys) and on nothing else."""

from __future__ import annotations

import subprocess
import sys
import zlib

import numpy as np
import torch

from fedquilt.common.randomness import generator, torch_seed


def test_the_same_key_gives_the_same_stream_whatever_was_drawn_before() -> None:
    first = generator(3, "select", 7).random(5)
    generator(3, "select", 6).random(1000)
    np.random.seed(0)
    assert np.array_equal(generator(3, "select", 7).random(5), first)


def test_the_stream_is_that_of_numpys_seed_sequence() -> None:
    sequence = np.random.SeedSequence(3, spawn_key=(zlib.crc32(b"select"), 7))
    expected = np.random.Generator(np.random.PCG64(sequence)).random(5)
    assert np.array_equal(generator(3, "select", 7).random(5), expected)


def test_streams_stay_what_they_were() -> None:
    """A run that an earlier version saved must continue with the same numbers."""
    assert torch_seed(5, "local", 2, 9) == 921308649282104034
    assert generator(0, "select", 3).integers(1000, size=4).tolist() == [810, 481, 105, 357]


def test_seed_purpose_and_every_key_matter() -> None:
    keys = [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0), (1, "a", 1), (1, "a", 0, 0), (1, "a", 1, 0)]
    purposes = ("select", "local", "propensity", "partition", "model", "validation")
    keys += [(1, purpose) for purpose in purposes]
    draws = {generator(*key).integers(2**63) for key in keys}
    seeds = {torch_seed(*key) for key in keys}
    assert len(draws) == len(seeds) == len(keys)


def test_torch_seeds_fit_a_generator_and_fill_their_range() -> None:
    seeds = np.asarray([torch_seed(0, "local", t, c) for t in range(30) for c in range(30)])
    assert np.all((seeds >= 0) & (seeds < 2**63))
    # Half of the 63-bit numbers have the highest bit; 900 coins are far from 40 % or 60 %.
    assert 0.4 < np.mean(seeds >= 2**62) < 0.6
    assert len(set(seeds.tolist())) == len(seeds)
    torch.Generator().manual_seed(int(seeds.max()))


def test_another_process_draws_the_same() -> None:
    code = "from fedquilt.common.randomness import *; print(torch_seed(5, 'local', 2, 9))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == torch_seed(5, "local", 2, 9)


def test_nothing_global_is_touched() -> None:
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    generator(1, "select").random(10)
    torch_seed(1, "local")
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
