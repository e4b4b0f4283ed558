"""Replay: does a round move by no more than the ledger was charged for?

Cebere et al. 2026 (arXiv:2602.17454) found privacy bugs in most libraries by one method:
run the mechanism on neighbouring inputs with the same randomness, and compare how far
its output moves with the sensitivity it declares.  `replay` does that with `run_round`
itself, with real ledgers, mechanisms and cohorts; only updates and noise are prescribed.

Neighbours differ in the data of one client, the victim, which has nothing instead: its
update is the zero vector, while roster, participation and cohorts stay (zero-out).
Each victim has a world of its own, which runs beside the base world and takes over,
after every round, what that has released: so each round is compared under the same
public history.  One more world has no noise.

| check | what is measured | what it must not exceed, or must be |
|---|---|---|
| sum | how far the released sum moves; the same noise cancels | c_i, from the charge |
| noise | the noise in the released sum | the stated s_t times (C^-1 Z)_t |
| fraction | how far the released fraction of the quantile moves | 1/2 over the expected cohort |
| bits | that fraction without noise | that of the updates inside C_t |
| bit noise | the noise in it | the one its cost is computed from |
| separation | rounds between two joins of a client | at least the bands of the noise |
| public | lines, charges, entries, states, statements that differ | none |

A client's clip follows from what the ledger has charged: c_i = s_t sqrt((charge_i - bit)
/ k), with the bit's cost and the correlation factor k.  Who is absent must move nothing.

`canary` and `one_run` try to find a client in releases with real, secret noise.  Whole runs
through `fedquilt.run` are replayed in the repository, by `tests/audit/whole_runs.py`: with real
training, every kind of data that may stand in the place of a client's, and hostile models.
See docs/audit.md.

>>> [finding.ok for finding in replay(["even clips"])]
[True, True, True]
"""

from fedquilt.audit.canary import CanaryFinding, canary, canary_table, one_run
from fedquilt.audit.cases import CASES, Case
from fedquilt.audit.findings import ReplayFinding, replay, replay_table

__all__ = [
    "CASES",
    "WHOLE_RUNS",
    "CanaryFinding",
    "Case",
    "ReplayFinding",
    "canary",
    "canary_table",
    "one_run",
    "replay",
    "replay_table",
]

WHOLE_RUNS = "Whole runs are replayed by the repository's tests: python tests/audit/whole_runs.py."
