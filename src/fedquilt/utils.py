"""The module `utils` of the QuAP-FL API document: figures, tables, milestones and a self-test.

The self-test checks the parts of QuAP-FL against the formulas of its paper.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np

from fedquilt.report import (
    generate_summary_table,
    plot_multi_seed_comparison,
    plot_paper_figures,
    plot_privacy_consumption_by_group,
    plot_training_history,
)

__all__ = [
    "check_milestone",
    "generate_summary_table",
    "plot_multi_seed_comparison",
    "plot_paper_figures",
    "plot_privacy_consumption_by_group",
    "plot_training_history",
    "validate_implementation",
]

_TOLERANCE = 1e-6


def validate_implementation() -> bool:
    """Run four checks, print one line each, tell whether all hold.

    1. Participation rates: 1.0 for a client in both of two rounds, 0.5 in one.
    2. Budget: epsilon(p) = epsilon_base (1 + alpha exp(-beta p)), larger for the
       client that joins rarely.
    3. Clipping: the bound lies in [min_clip, max_clip], and no clipped update
       is longer than the bound.
    4. Noise: sigma = C sqrt(2 ln(1.25 / delta)) / epsilon.
    """
    checks: list[tuple[str, Callable[[], str]]] = [
        ("participation rates", _check_rates),
        ("privacy budget", _check_budget),
        ("quantile clipping", _check_clipping),
        ("noise level", _check_noise),
    ]
    results = [_holds(name, check) for name, check in checks]
    return all(results)


def _holds(name: str, check: Callable[[], str]) -> bool:
    """Run one check, which returns what is wrong or nothing, and print its line."""
    try:
        wrong = check()
    except Exception as error:  # a check that crashes is a check that failed
        wrong = f"{type(error).__name__}: {error}"
    print(f"{name}: FAILED, {wrong}" if wrong else f"{name}: ok")
    return not wrong


def _differs(what: str, value: float, expected: float) -> str:
    close = abs(value - expected) <= _TOLERANCE
    return "" if close else f"{what} is {value:.8g}, expected {expected:.8g}"


def _check_rates() -> str:
    from fedquilt.papers.quapfl import ParticipationTracker

    tracker = ParticipationTracker(10)
    tracker.update([0, 1, 2])
    tracker.update([1, 2, 3])
    return _differs(
        "rate of a client in 2 of 2 rounds", tracker.get_participation_rate(1), 1.0
    ) or (_differs("rate of a client in 1 of 2 rounds", tracker.get_participation_rate(0), 0.5))


def _check_budget() -> str:
    from fedquilt.papers.quapfl import AdaptivePrivacyAllocator

    allocator = AdaptivePrivacyAllocator(epsilon_base=0.015, alpha=0.5, beta=2.0)
    rare, frequent = (allocator.compute_privacy_budget(rate) for rate in (0.1, 0.9))
    if not rare > frequent:
        return f"epsilon(0.1)={rare:.8g} must be > epsilon(0.9)={frequent:.8g}"
    return _differs("epsilon(0.1)", rare, 0.015 * (1 + 0.5 * math.exp(-0.2))) or (
        _differs("epsilon(0.9)", frequent, 0.015 * (1 + 0.5 * math.exp(-1.8)))
    )


def _check_clipping() -> str:
    from fedquilt.papers.quapfl import QuantileClipper

    generator = np.random.default_rng(0)
    clipper = QuantileClipper(quantile=0.9, momentum=0.95, min_clip=0.1, max_clip=10.0)
    updates = [scale * generator.standard_normal(100) for scale in range(1, 11)]
    bound = float(clipper.update_clip_value(updates))
    if not 0.1 <= bound <= 10.0:
        return f"clip bound {bound:.8g} must be in [0.1, 10]"
    clipped = clipper.clip_gradient(100 * generator.standard_normal(100))
    length = float(np.linalg.norm(clipped))
    if not length <= bound + _TOLERANCE:
        return f"clipped norm {length:.8g} must be <= {bound:.8g}"
    return ""


def _check_noise() -> str:
    from fedquilt.papers.quapfl import AdaptivePrivacyAllocator

    allocator = AdaptivePrivacyAllocator(epsilon_base=0.015, alpha=0.5, beta=2.0, delta=1e-5)
    noise_std = float(allocator.compute_noise_multiplier(epsilon=0.015, clip_norm=1.0))
    expected = math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.015
    return _differs("noise standard deviation", noise_std, expected)


def check_milestone(
    dataset: str, round: int, acc: float, logger: logging.Logger | None = None
) -> bool:
    """Tell whether an accuracy lies in the range of `EXPECTED_MILESTONES` at a round.

    True where there is no milestone: another data set or another round.
    `round` counts finished rounds, so the last of 200 rounds is round 200.
    """
    from fedquilt.config import EXPECTED_MILESTONES

    expected = EXPECTED_MILESTONES.get(dataset, {}).get(f"round_{round}")
    if expected is None:
        return True
    low, high = expected
    inside = low <= acc <= high
    log = logger or logging.getLogger("fedquilt")
    log.log(
        logging.INFO if inside else logging.WARNING,
        "round %s: accuracy %.4f is %s the expected range %.3f to %.3f",
        round,
        acc,
        "in" if inside else "outside",
        low,
        high,
    )
    return inside
