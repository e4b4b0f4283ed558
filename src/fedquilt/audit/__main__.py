"""`python -m fedquilt.audit`: the audits where only torch and numpy are installed.

The same as `fedquilt audit`, without what the command line needs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fedquilt import audit
from fedquilt.common.errors import FedquiltError


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, print its tables and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fedquilt.audit", description=__doc__)
    parser.add_argument("--replay", action="store_true", help="worlds with the same noise")
    parser.add_argument("--canary", action="store_true", help="find a client in secret noise")
    parser.add_argument("--case", action="append", help="only this case of --replay; repeatable")
    parser.add_argument("--engine", default="sequential", help="of --canary")
    parser.add_argument("--device", default="cpu", help="of --canary: cpu or cuda")
    parser.add_argument("--verbose", action="store_true", help="every check of --replay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=400)
    given = parser.parse_args(arguments)
    if not (given.replay or given.canary):
        parser.error("--replay or --canary must be given")
    good = True
    try:
        if given.replay:
            rounds = audit.replay(given.case, given.seed, progress=True)
            table = audit.replay_table(rounds, verbose=given.verbose)
            print(f"{table}\n\n{audit.WHOLE_RUNS}")
            good = all(finding.ok for finding in rounds)
        if given.canary:
            options: dict[str, Any] = {"seed": given.seed, "device": given.device, "progress": True}
            found = audit.canary(trials=given.trials, engine=given.engine, **options)
            found += audit.one_run(**options)
            print(audit.canary_table(found))
            good = good and all(finding.ok for finding in found)
    except FedquiltError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
