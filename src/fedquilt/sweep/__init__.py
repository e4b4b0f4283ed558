"""Many runs of one experiment: every combination of some options, or random ones, and all seeds.

A sweep is a folder: what was planned, one folder for each point, and one SQLite table of results.
Whatever is in the table follows from the points' own folders, so a sweep that was killed goes on
where it was, and ends with the table it would have had.
"""

from fedquilt.sweep.plan import Plan, Point, SweepAxis, choose, make_plan, parse_axis
from fedquilt.sweep.run import finished_run, run_sweep
from fedquilt.sweep.table import SweepSummary, Table, summarise

__all__ = [
    "Plan",
    "Point",
    "SweepAxis",
    "SweepSummary",
    "Table",
    "choose",
    "finished_run",
    "make_plan",
    "parse_axis",
    "run_sweep",
    "summarise",
]
