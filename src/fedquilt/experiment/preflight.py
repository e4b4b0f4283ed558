"""What a run may expect, said before anything is spent: who will join, what the noise will do.

`fedquilt plan` prints it in full, `fedquilt run` and `fedquilt.run` in two lines, or three.
"""

from __future__ import annotations

import dataclasses
import math
import sys

import torch

from fedquilt.common import trees
from fedquilt.common.quorum import fewest, protocol_bytes
from fedquilt.config import RunConfig
from fedquilt.config.modes import MODE_TABLE
from fedquilt.population import CohortSelector
from fedquilt.privacy.accounting import Adjacency, gaussian_mu
from fedquilt.privacy.feasibility import Feasibility, plan_privacy
from fedquilt.privacy.noise import BandedNoise, noise_source
from fedquilt.privacy.policies import make_policy
from fedquilt.privacy.secure import modulus_bits
from fedquilt.setup.mechanism import make_allocator, recipe_of, secure_settings
from fedquilt.setup.task import FederatedTask

# A private quantile takes so much of every join (`setup.mechanism.make_certified`).
_QUANTILE_SHARE = 1 / 16

GOES_ON = (
    "the run goes on all the same: Ctrl-C stops it (nothing has been spent yet), and `fedquilt "
    "plan` with the same options says what to change"
)
STILL_GOES_ON = GOES_ON.replace("nothing has been spent yet", "its rounds so far are charged")
"""What follows the verdict that a run is hopeless; the second, where it is resumed."""


def preflight_lines(config: RunConfig, problem: FederatedTask, resumed: bool = False) -> list[str]:
    """Return the lines that a run says before its first round: who comes, the noise, the recipe."""
    lines = [cohort_line(problem.selector)]
    found = outlook(config, problem)
    if found is not None:
        lines.append(found.line)
        lines += [STILL_GOES_ON if resumed else GOES_ON] if found.verdict == "hopeless" else []
    recipe = recipe_of(config, problem.flat)
    lines += [] if recipe is None else [recipe]
    evaluates = problem.client_tests is not None or config.client_test_fraction
    if problem.test is None and evaluates and config.is_bounded(covered=True):
        lines.append("no test set: what clients measure is for the owner (client_metrics)")
    return lines


def outlook(config: RunConfig, problem: FederatedTask) -> Feasibility | None:
    """Return what the noise of a run will do to it; None where there is none to speak of."""
    condenses = config.method == "condense"  # its statistics are no updates of a model
    if condenses or not MODE_TABLE[config.mode].noised:
        return None
    return noise_feasibility(config, problem.selector, _noised(config, problem))


def tell_owner_of_missing_values(config: RunConfig, problem: FederatedTask) -> tuple[str, ...]:
    """Say whose samples have NaN or infinity, before anything is spent, to the owner alone.

    In modes with noise such a client is not refused, because an error would say something about
    its data: its update is not finite, and counts as zero at full charge.
    """
    holders = clients_with_missing_values(problem) if MODE_TABLE[config.mode].noised else []
    if not holders:
        return ()
    some = ", ".join(holders[:5]) + (", ..." if len(holders) > 5 else "")
    words = (
        f"{len(holders)} of {len(problem.task.clients)} clients hold samples with NaN or infinity "
        f"({some}): their updates count as zero, at full charge; fill or drop such values before "
        "the run"
    )
    tell_owner(words)
    return (words,)


def tell_owner(words: str) -> None:
    """Say something on a terminal or in a notebook: what goes elsewhere, others may read."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # what rich puts there says no
    if stream.isatty() or shell is not None:
        print(f"for the owner alone: {words}", file=sys.stderr)


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
    when = "round" if selector.window == 1 else f"window of {selector.window} rounds"
    return f"on average {mean:.3g} of {count} clients join a {when}"


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
    count, rounds = selector.availability.num_clients, config.num_releases
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
        noise_multiplier=math.sqrt(factor / (policy.expected_charge * share))
        * _price(config, policy.expected_charge, selector.expected_cohort, parameters),
    )


def _price(config: RunConfig, charge: float, cohort: float, parameters: int) -> float:
    """Return by how much the noise on a sum is larger because clients add it; 1: they do not.

    The only release must be paid for as if the fewest survived; of many it is so of the last one,
    and of the first one where charges are even parts.
    """
    if config.secure_aggregation == "off":
        return 1.0
    secure, count = secure_settings(config, parameters, charge), max(1, round(cohort))
    share = secure.settled_share(count, count) if config.num_releases > 1 else 1.0
    # The clip's part of a charge is what rounding leaves of it.
    clip = 1.0 - secure.rounding * secure.unit * share / charge
    return math.sqrt(share * count / max(1, secure.honest(count)) / clip)


def secure_plan(config: RunConfig, made: Feasibility) -> dict[str, float]:
    """Return what secure aggregation costs a client in a round, and its noise beside a server's."""
    moved = Adjacency.of(config.adjacency).sensitivity_factor
    charge = (gaussian_mu(config.epsilon, config.delta) / moved) ** 2 / made.joins
    secure = secure_settings(config, made.parameters, charge)
    count = max(1, round(made.cohort))
    least = fewest(count, secure.share, secure.colluding)
    largest = charge / (secure.unit * secure.settled_share(count, count))
    bits = modulus_bits(secure, count, count * math.sqrt(largest))
    sent = {f"bytes_{name}": size for name, size in protocol_bytes(count).items()}
    return {
        "clients": count,
        "least": least,
        "bits": bits,
        "bytes_update": -(-bits * made.parameters // 8),
        **sent,
        "price": _price(config, charge, made.cohort, made.parameters),
    }


def secure_line(config: RunConfig, made: Feasibility) -> str:
    """Say it in words."""
    plan = secure_plan(config, made)
    keys = plan["bytes_keys"] + plan["bytes_letters"] + plan["bytes_shares"]
    return (
        f"secure aggregation: {plan['bits']} bits a number, {plan['bytes_update']:,} bytes a "
        f"client and round (float32: {4 * made.parameters:,}), {keys:,} more of keys, letters and "
        f"shares, {plan['bytes_received']:,} received; {plan['least']} of {plan['clients']} must "
        f"answer; noise {plan['price']:.2f} times that of a trusted server if all do"
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
        rounds=config.num_releases,
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
    joins = min(config.max_joins or config.num_releases, config.num_releases)
    if config.policy != "cap":
        joins = config.num_releases
    most = selector.availability.num_clients * joins * selector.sampling_rate / config.num_releases
    cohort = min(selector.expected_cohort, most)
    return _planned(config, selector, parameters, joins=joins, cohort=cohort)


def _of_documents(config: RunConfig, selector: CohortSelector, parameters: int) -> Feasibility:
    """Return what to expect of a mode whose noise follows the classic formula, whatever it costs.

    On the sum z = kappa T / epsilon at the base budget, kappa = sqrt(2 ln(1.25 / delta));
    where each of m clients adds noise of its own, sqrt(m) times that.
    """
    multiplier = make_allocator(config).compute_noise_multiplier(
        config.epsilon / config.num_releases, 1.0
    )
    cohort = selector.expected_cohort
    if config.mode == "quap_fl_client":
        multiplier *= math.sqrt(cohort)
    found = _planned(
        config,
        selector,
        parameters,
        joins=config.num_releases,
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
