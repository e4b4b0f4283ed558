"""What a run may expect, said before anything is spent: who will join, what the noise will do.

`fedquilt plan` prints it in full, `fedquilt run` and `fedquilt.run` in two lines, or three.
"""

from __future__ import annotations

import dataclasses
import math
import sys

import torch

from fedquilt.common import trees
from fedquilt.config import RunConfig
from fedquilt.config.modes import MODE_TABLE
from fedquilt.population import CohortSelector
from fedquilt.privacy.accounting import Adjacency, gaussian_mu
from fedquilt.privacy.feasibility import Feasibility, plan_privacy
from fedquilt.privacy.noise import BandedNoise, noise_source
from fedquilt.privacy.policies import make_policy
from fedquilt.setup.mechanism import make_allocator
from fedquilt.setup.task import FederatedTask

# A private quantile takes so much of every join (`setup.mechanism.make_certified`).
_QUANTILE_SHARE = 1 / 16

GOES_ON = (
    "the run goes on all the same: Ctrl-C stops it (nothing has been spent yet), and `fedquilt "
    "plan` with the same options says what to change"
)
"""What follows the verdict that a run is hopeless."""


def preflight_lines(config: RunConfig, problem: FederatedTask) -> list[str]:
    """Return the lines that a run says before its first round."""
    lines = [cohort_line(problem.selector)]
    found = outlook(config, problem)
    if found is not None:
        lines += [found.line, *([GOES_ON] if found.verdict == "hopeless" else [])]
    return lines


def outlook(config: RunConfig, problem: FederatedTask) -> Feasibility | None:
    """Return what the noise of a run will do to it; None where there is none to speak of."""
    condenses = config.method == "condense"  # its statistics are no updates of a model
    if condenses or not MODE_TABLE[config.mode].noised:
        return None
    return noise_feasibility(config, problem.selector, _noised(config, problem))


def tell_owner_of_missing_values(config: RunConfig, problem: FederatedTask) -> None:
    """Say whose samples have NaN or infinity, before anything is spent, on a terminal alone.

    In modes with noise such a client is not refused, because an error would say something about
    its data: its update is not finite, and counts as zero at full charge.
    """
    if not MODE_TABLE[config.mode].noised or not sys.stderr.isatty():
        return
    holders = clients_with_missing_values(problem)
    if holders:
        some = ", ".join(holders[:5]) + (", ..." if len(holders) > 5 else "")
        print(
            f"for the owner alone: {len(holders)} of {len(problem.task.clients)} clients hold "
            f"samples with NaN or infinity ({some}): their updates will count as zero, at full "
            "charge; fill or drop such values before the run",
            file=sys.stderr,
        )


def clients_with_missing_values(problem: FederatedTask) -> list[str]:
    """Return the ids, or numbers, of clients that hold a sample which is not finite."""
    bad: torch.Tensor | None = None
    for leaf in trees.leaves((problem.task.inputs, problem.task.targets)):
        if leaf.is_floating_point():
            finite = torch.isfinite(leaf.reshape(len(leaf), -1)).all(1)
            bad = ~finite if bad is None else bad | ~finite
    if bad is None or not bool(bad.any()):
        return []
    ids = problem.roster.ids
    return [
        str(client if ids is None else ids[client])
        for client in range(len(problem.task.clients))
        if bool(bad[problem.task.index(client)].any())
    ]


def cohort_line(selector: CohortSelector) -> str:
    """Say how many clients join a round."""
    count, mean = selector.availability.num_clients, selector.mean_cohort
    if mean >= count:
        return f"all {count} clients join every round"
    return f"on average {mean:.3g} of {count} clients join a round"


def _noised(config: RunConfig, problem: FederatedTask) -> int:
    """Return how many parameters the noise of a mode falls on."""
    if not MODE_TABLE[config.mode].by_layer:
        return problem.flat.vector.numel()
    covered = problem.flat.matching(config.patterns("noise_layers"))
    return sum(segment.stop - segment.start for segment in covered)


def noise_feasibility(config: RunConfig, selector: CohortSelector, parameters: int) -> Feasibility:
    """Return what the noise of a mode does to a model of so many parameters.

    For `certified` it is the noise of the mechanism, z = sqrt(k / (a - b)) with the
    charge a of a typical join, the bit cost b and the correlation factor k.
    """
    if config.mode != "certified":
        return _of_documents(config, selector, parameters)
    if selector.secret:
        return _amplified(config, selector, parameters)
    count, rounds = selector.availability.num_clients, config.num_rounds
    rate = selector.expected_cohort / count
    moved = Adjacency.of(config.adjacency).sensitivity_factor
    policy = make_policy(
        config.policy,
        (gaussian_mu(config.epsilon, config.delta) / moved) ** 2,
        rounds,
        expected_rate=rate,
        max_joins=config.max_joins,
        allocator=make_allocator(config),
        warmup_rounds=config.warmup_rounds,
    )
    share = 1 - _QUANTILE_SHARE if config.clipping == "quantile" else 1.0
    factor = BandedNoise(noise_source(config.noise_seed), config.noise_bands).cost_factor
    joins = {
        "adaptive": 1 + (rounds - 1) * rate,
        "cap": float(min(config.max_joins or rounds, rounds)),
    }.get(config.policy, float(rounds))
    return _planned(
        config,
        selector,
        parameters,
        joins=joins,
        cohort=min(selector.expected_cohort, count * joins / rounds),
        noise_multiplier=math.sqrt(factor / (policy.expected_charge * share)),
    )


def _planned(
    config: RunConfig,
    selector: CohortSelector,
    parameters: int,
    *,
    joins: float,
    cohort: float,
    noise_multiplier: float | None = None,
) -> Feasibility:
    return plan_privacy(
        population=selector.availability.num_clients,
        rounds=config.num_rounds,
        epsilon=config.epsilon,
        delta=config.delta,
        parameters=parameters,
        joins=joins,
        cohort=cohort,
        clip_norm=config.clip_norm,
        sampling_rate=selector.sampling_rate,
        adjacency=config.adjacency,
        noise_multiplier=noise_multiplier,
    )


def _amplified(config: RunConfig, selector: CohortSelector, parameters: int) -> Feasibility:
    """Return what to expect under a secret coin, whose noise is calibrated for all exposures."""
    joins = min(config.max_joins or config.num_rounds, config.num_rounds)
    if config.policy != "cap":
        joins = config.num_rounds
    most = selector.availability.num_clients * joins * selector.sampling_rate / config.num_rounds
    cohort = min(selector.expected_cohort, most)
    return _planned(config, selector, parameters, joins=joins, cohort=cohort)


def _of_documents(config: RunConfig, selector: CohortSelector, parameters: int) -> Feasibility:
    """Return what to expect of a mode whose noise follows the classic formula, whatever it costs.

    On the sum z = kappa T / epsilon at the base budget, kappa = sqrt(2 ln(1.25 / delta));
    where each of m clients adds noise of its own, sqrt(m) times that.
    """
    multiplier = make_allocator(config).compute_noise_multiplier(
        config.epsilon / config.num_rounds, 1.0
    )
    cohort = selector.expected_cohort
    if config.mode == "quap_fl_client":
        multiplier *= math.sqrt(cohort)
    found = _planned(
        config,
        selector,
        parameters,
        joins=config.num_rounds,
        cohort=cohort,
        noise_multiplier=multiplier,
    )
    if found.workable:
        return found
    advice = (
        "Use the mode 'certified': the formula of this mode adds noise far above what its "
        "epsilon needs.",
    )
    return dataclasses.replace(found, advice=advice)
