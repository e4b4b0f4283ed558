"""Several processes on one file, and processes that die."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.privacy.ledger import BudgetExceededError, Ledger

fork = multiprocessing.get_context("fork")
CLIENTS, EPSILON, DELTA = 5, 2.0, 1e-5


def make(path: Path) -> Ledger:
    ledger = Ledger.open(path, create=True)
    ledger.population("p", num_clients=CLIENTS, epsilon=EPSILON, delta=DELTA)
    return ledger


def spend(path: Path, number: int, start: Any, results: Any) -> None:
    """Reserve, settle, release and abandon at random; report what was settled."""
    rng = np.random.default_rng(number)
    settled: list[tuple[int, float]] = []
    with Ledger.open(path) as ledger:
        population = ledger.population("p")
        run = population.start_run(f"run {number}", epsilon=EPSILON)
        start.wait()
        for index in range(40):
            clients = rng.choice(CLIENTS, rng.integers(1, CLIENTS + 1), replace=False)
            charges = run.budget_mu2 * rng.uniform(0, 0.05, clients.size)
            try:
                reservation = run.reserve(index, clients, charges)
            except BudgetExceededError:
                continue
            fate = rng.uniform()
            if fate < 0.8:
                run.settle(reservation, f"{number}/{index}")
                settled += zip(clients.tolist(), reservation.charges_mu2.tolist(), strict=True)
            elif fate < 0.9:
                run.release(reservation)
    results.put(settled)


def test_processes_never_overspend_together(path: Path) -> None:
    ledger = make(path)
    start, results = fork.Barrier(4), fork.Queue()
    processes = [fork.Process(target=spend, args=(path, k, start, results)) for k in range(4)]
    for process in processes:
        process.start()
    reported = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    totals = [Fraction(0)] * CLIENTS
    for client, charge in itertools.chain.from_iterable(reported):
        totals[client] += Fraction(charge)
    population = ledger.population("p")
    allowance = population.info.allowance_mu2
    assert [Fraction(spent) for spent in population.spent()] == totals
    assert max(totals) <= Fraction(allowance)
    assert np.all(population.spent() + population.reserved() <= allowance)
    assert population.spent().max() > 0.7 * allowance  # the limit was really reached
    assert np.all(population.epsilons() <= EPSILON)
    report = ledger.verify()
    assert report.ok, report.problems
    ledger.close()


def grab(path: Path, number: int, start: Any, results: Any) -> None:
    with Ledger.open(path) as ledger:
        run = ledger.population("p").start_run(f"run {number}", epsilon=EPSILON)
        start.wait()
        try:
            run.reserve(0, [0], run.budget_mu2)
        except BudgetExceededError:
            results.put(0)
        else:
            results.put(1)


def test_only_one_process_gets_the_last_allowance(path: Path) -> None:
    make(path).close()
    start, results = fork.Barrier(5), fork.Queue()
    processes = [fork.Process(target=grab, args=(path, k, start, results)) for k in range(5)]
    for process in processes:
        process.start()
    assert sum(results.get(timeout=60) for _ in processes) == 1
    for process in processes:
        process.join()


def use_until_killed(path: Path, seed: int, said: int) -> None:
    """Do rounds without end; say what is used after it is settled, as a run would use it."""
    rng = np.random.default_rng(seed)
    population = make(path).population("p")
    run = population.start_run("mortal", epsilon=EPSILON)
    for index in range(10**6):
        clients = rng.choice(CLIENTS, 2, replace=False)
        charges = run.budget_mu2 * rng.uniform(0, 1e-4, 2)
        reservation = run.reserve(index, clients, charges)
        if rng.uniform() < 0.1:
            run.release(reservation)
            continue
        head = run.settle(reservation, f"{seed}/{index}")
        pairs = zip(clients.tolist(), reservation.charges_mu2.tolist(), strict=True)
        line = head + "".join(f" {client}:{charge.hex()}" for client, charge in pairs) + "\n"
        os.write(said, line.encode())


@pytest.mark.slow
def test_killing_never_loses_a_charge(path: Path) -> None:
    delays = random.Random(5)
    used = [Fraction(0)] * CLIENTS
    heads: list[str] = []
    interrupted = 0
    for attempt in range(30):
        receiver, sender = os.pipe()
        process = fork.Process(target=use_until_killed, args=(path, attempt, sender))
        process.start()
        os.close(sender)
        time.sleep(delays.uniform(0.005, 0.08))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        with os.fdopen(receiver) as pipe:
            for line in pipe.read().splitlines():
                head, *pairs = line.split()
                heads.append(head)
                for client, charge in (pair.split(":") for pair in pairs):
                    used[int(client)] += Fraction(float.fromhex(charge))
        if not path.exists():
            continue
        with Ledger.open(path) as ledger:
            report = ledger.verify(heads)
            assert report.ok, report.problems
            for population in ledger.populations():
                counted = population.spent() + population.reserved()
                assert all(Fraction(c) >= u for c, u in zip(counted, used, strict=True))
                spent = [Fraction(value) for value in population.spent()]
                assert all(s >= u for s, u in zip(spent, used, strict=True))
                # At most the one settled release that was not yet said to be used.
                assert sum(spent) - sum(used) <= (attempt + 1) * 2 * Fraction(1, 10**4)
                interrupted += int(population.summary().open_reservations > 0)
    assert len(heads) > 30
    assert interrupted > 0  # some kills fell between reserve and settle
