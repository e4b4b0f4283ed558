from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from fedquilt.privacy.ledger import Ledger


def test_a_million_clients(path: Path) -> None:
    """The promised times, which are some twenty times what they usually take."""
    rng = np.random.default_rng(0)
    with Ledger.open(path, create=True) as ledger:
        population = ledger.population("all", num_clients=1_000_000, epsilon=6.0, delta=1e-5)
        run = population.start_run("one", epsilon=6.0)
        charges = rng.uniform(0, run.budget_mu2 / 2, 1_000_000)
        run.settle(run.reserve(0, np.arange(1_000_000), charges), "everybody")
        cohort = rng.choice(1_000_000, 10_000, replace=False)
        size = path.stat().st_size

        start = time.perf_counter()
        reservation = run.reserve(1, cohort, charges[cohort])
        reserved = time.perf_counter()
        run.settle(reservation, "cohort")
        settled = time.perf_counter()
        assert reserved - start < 0.5
        assert settled - reserved < 0.5
        assert path.stat().st_size - size < 120_000

        start = time.perf_counter()
        epsilons = population.epsilons()
        assert time.perf_counter() - start < 2.0
        assert epsilons.max() <= 6.0
        assert run.finish() == ledger.head()
        assert ledger.verify().ok
    with Ledger.open(path) as ledger:
        np.testing.assert_array_equal(ledger.population("all").epsilons(), epsilons)
