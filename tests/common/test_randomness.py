"""Streams depend on (seed, purpose, keys) and on nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import fedquilt
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


# The operating system's randomness, read from the source.

OF_THE_SYSTEM = {
    *("urandom", "getrandom", "SystemRandom", "uuid1", "uuid4", "initial_seed"),
    *("token_hex", "token_bytes", "token_urlsafe", "randbits", "randbelow"),
    *("generate_private_key", "random_serial_number"),
}
SEEDS_ITSELF = {"default_rng", "SeedSequence", "RandomState", "Random", "seed"} | {
    *("PCG64", "PCG64DXSM", "Philox", "MT19937", "SFC64")
}
"""Seeded by the system where it is given no seed, or None."""
HOLDS_STILL = {"default_rng", "get_state", "set_state", "getstate", "setstate", "seed"}

REVIEWED = {
    "common/randomness.py": {"urandom", "SeedSequence"},  # the one place; seeds are numbers
    "privacy/noise.py": {"SeedSequence"},  # of a seed that is checked to be a number
    # Names that nobody else may have or guess: files, runs, ledgers, seats, tokens, keys.
    **{name: {"token_hex"} for name in ("common/storage.py", "record/checkpoint.py")},
    "experiment/api.py": {"token_hex", "token_bytes"},
    "setup/account.py": {"token_bytes"},
    "privacy/ledger/files.py": {"token_hex"},
    "observe/monitors.py": {"uuid4"},
    "observe/trackers.py": {"uuid4"},
    "report/watch.py": {"token_urlsafe"},
    "flower/engine.py": {"token_hex"},
    "flower/masked_engine.py": {"token_hex"},
    "flower/client_registry.py": {"token_hex"},
    "flower/keys.py": {"token_urlsafe", "generate_private_key", "random_serial_number"},
    # The documents' functions, where no seed means a fresh one; no run calls them so.
    "data/split.py": {"default_rng", "Generator", "seed"},
    "training/state.py": {"random", "rand"},  # whose generators these are; none is drawn from
    "papers/quapfl.py": {"initial_seed"},  # torch's own seed, which a run then states
}
"""Who may draw what from the operating system; noise and coins are not among them."""


def drawn_from_the_system(source: str) -> Iterator[str]:
    """Yield the names by which a source draws bytes that no seed decides."""
    nodes = list(ast.walk(ast.parse(source)))
    seeded = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr == "manual_seed"
    }
    imported = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from (a.name for a in node.names if a.name in OF_THE_SYSTEM)
            if node.module in ("random", "secrets", "numpy.random"):
                yield from (a.name for a in node.names if a.name[0].islower())
        elif isinstance(node, ast.Attribute):
            base = spelt(node.value)
            is_module = base == "np.random" or (base in ("random", "secrets") and base in imported)
            if node.attr in OF_THE_SYSTEM or (
                is_module and node.attr[0].islower() and node.attr not in HOLDS_STILL
            ):
                yield node.attr
        elif isinstance(node, ast.Constant) and node.value in ("/dev/urandom", "/dev/random"):
            yield node.value
        elif isinstance(node, ast.Call):
            name = spelt(node.func).rpartition(".")[2]
            if name == "Generator" and not node.args and id(node) not in seeded:
                yield name  # torch's; numpy's is given its bits
            if name in SEEDS_ITSELF and may_be_none(node):
                yield name


def may_be_none(call: ast.Call) -> bool:
    """Tell whether the seed a call is given is missing, None, or a name that may be None."""
    given = call.args or [keyword.value for keyword in call.keywords]
    if not given or isinstance(given[0], ast.IfExp):
        return True
    if isinstance(given[0], ast.Constant):
        return given[0].value is None
    named = isinstance(given[0], ast.Name | ast.Attribute)
    return named and spelt(call.func).endswith(("default_rng", "SeedSequence"))


def spelt(node: ast.expr) -> str:
    """Return a name with dots as it stands in the source, nothing for another expression."""
    if isinstance(node, ast.Attribute):
        return f"{spelt(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_noise_and_coins_have_one_source_of_entropy() -> None:
    """What draws elsewhere escapes the replay, as noise on a GPU once did."""
    root = Path(fedquilt.__file__).parent
    found = {
        path.relative_to(root).as_posix(): names
        for path in sorted(root.rglob("*.py"))
        if (names := set(drawn_from_the_system(path.read_text())))
    }
    assert found == REVIEWED


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.urandom(3)",
        "from os import urandom as draw",
        "open('/dev/urandom')",
        "import secrets\nsecrets.choice([1])",
        "import random\nrandom.gauss(0, 1)",
        "from random import gauss",
        "import random\nrandom.SystemRandom()",
        "import numpy as np\nnp.random.standard_normal(3)",
        "import numpy as np\nnp.random.default_rng()",
        "import numpy as np\nnp.random.default_rng(seed)",
        "import numpy as np\nnp.random.Generator(np.random.Philox())",
        "import numpy as np\nnp.random.SeedSequence(None)",
        "import torch\ntorch.seed()",
        "import torch\ntorch.Generator(device='cuda')",
        "import torch\ntorch.initial_seed()",
        "import uuid\nuuid.uuid4()",
    ],
)
def test_a_second_source_would_be_seen(source: str) -> None:
    assert list(drawn_from_the_system(source))


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.random.default_rng([3, 4])",
        "import torch\ntorch.Generator().manual_seed(seed)",
        "import random\nrandom.getstate()\nrandom.seed(seed)",
        "import numpy as np\nnp.random.Generator(np.random.Philox(sequence))",
    ],
)
def test_what_a_seed_decides_is_not_taken_for_one(source: str) -> None:
    assert not list(drawn_from_the_system(source))
