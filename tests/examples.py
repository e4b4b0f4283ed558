"""On how many examples a property is tried: few in an ordinary run, ten times that in a thorough
one (`TESTS_PROFILE=thorough make test`)."""

from __future__ import annotations

import os

from hypothesis import settings

PROFILES = {"ordinary": 1, "thorough": 10}
PROFILE = os.environ.get("TESTS_PROFILE", "ordinary")


def examples(ordinary: int) -> int:
    """Return how many examples this run tries where an ordinary one tries so many."""
    return ordinary * PROFILES[PROFILE]


def use_profile() -> None:
    """Make the profile the default of every property; none fails for a slow machine."""
    settings.register_profile(PROFILE, max_examples=examples(50), deadline=None)
    settings.load_profile(PROFILE)
