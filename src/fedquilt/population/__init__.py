"""Who takes part: participation history, availability, selection."""

from fedquilt.population.availability import Availability, load_trace, propensities
from fedquilt.population.participation import ParticipationTracker
from fedquilt.population.selection import Cohort, CohortSelector, poisson_cohort, select_cohort

__all__ = [
    "Availability",
    "Cohort",
    "CohortSelector",
    "ParticipationTracker",
    "load_trace",
    "poisson_cohort",
    "propensities",
    "select_cohort",
]
