"""What a condensation is compared with: baselines on the same data and first weights.

| name | what it is | what leaves clients |
|---|---|---|
| coreset | `ipc` random real images of each class: the floor | raw images |
| dm | DM on pooled data (Zhao and Bilen 2023): the ceiling | raw images, all of them |
| feddm | FedDM (Xiong et al. 2023): every client condenses its own data | synthetic images |
| fedavg | federated averaging of the same model | weights |
"""

from __future__ import annotations

from collections.abc import Callable

from fedquilt import validate
from fedquilt.baselines.common import BaselineResult, Progress
from fedquilt.baselines.coreset import run_coreset
from fedquilt.baselines.dm import run_dm
from fedquilt.baselines.fedavg import run_fedavg
from fedquilt.baselines.feddm import run_feddm
from fedquilt.condensing import StatisticsEngine
from fedquilt.config import CondenseConfig
from fedquilt.errors import InvalidValueError
from fedquilt.problem import Problem

__all__ = ["BASELINES", "BaselineResult", "Progress", "run_baseline"]

BASELINES: dict[str, Callable[[CondenseConfig, Problem, int, Progress | None], BaselineResult]] = {
    "coreset": run_coreset,
    "dm": run_dm,
    "feddm": run_feddm,
    "fedavg": run_fedavg,
}


def run_baseline(
    name: str,
    config: CondenseConfig,
    problem: Problem,
    budget_bytes: int,
    progress: Progress | None = None,
) -> BaselineResult:
    """Run the baseline of a name beside the condensation of a configuration.

    Parameters
    ----------
    name
        One of `BASELINES`.
    config, problem
        As `build_problem` returns them; the problem is not changed.  It must not have
        been run: its model would start where that run ended.
    budget_bytes
        What the condensation sent and received, all clients and rounds together;
        decides the rounds of fedavg and feddm.
    progress
        Told what is being done, and which part of it is done, from 0 to 1.
    """
    validate.choice("baseline", name, BASELINES)
    validate.integer("budget_bytes", budget_bytes, at_least=0)
    if not isinstance(config, CondenseConfig) or problem.condensing is None:
        raise InvalidValueError(
            f"method={config.method!r} must be 'condense': baselines stand beside a condensation"
        )
    engine = problem.condensing.engine
    last = engine.lens if isinstance(engine, StatisticsEngine) else engine
    done = last.round_index + 1
    if done:
        raise InvalidValueError(
            f"problem has run for {done} rounds and must be new: build it again for a baseline"
        )
    return BASELINES[name](config, problem, budget_bytes, progress)
