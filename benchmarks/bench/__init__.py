"""How fast this machine trains a federation: the plain loop, every engine, and other frameworks.

All of them do the same work: the same samples, clients, cohorts, network and first weights.
They take turns, round by round, so that a change in the machine's load meets all of them.
"""

from benchmarks.bench.measure import Measured, measure
from benchmarks.bench.tables import as_json, floors, table
from benchmarks.bench.work import WORKS, Work, make_work

__all__ = ["WORKS", "Measured", "Work", "as_json", "floors", "make_work", "measure", "table"]
