"""From a configuration and its problem to a federation: method, engine, mechanism."""

from __future__ import annotations

import dataclasses
import logging

from fedquilt.assemble_mechanism import MechanismParts, make_mechanism
from fedquilt.condense.method import make_condensation
from fedquilt.config import CondenseConfig, RunConfig
from fedquilt.config.choices import WHOLE_METHODS
from fedquilt.learning import choose_engine
from fedquilt.learning.local import SequentialEngine
from fedquilt.method import Method, MethodParts, WholeModel
from fedquilt.population import ParticipationTracker
from fedquilt.privacy.mechanism import Mechanism
from fedquilt.privacy.run_account import RunAccount
from fedquilt.problem import Problem
from fedquilt.round import Federation
from fedquilt.slices.method import LargestOnly, Slices, Smallest

_LOG = logging.getLogger("fedquilt")


def build_federation(
    config: RunConfig,
    problem: Problem,
    account: RunAccount | None = None,
    method: Method | None = None,
) -> Federation:
    """Build the federation of the configured mode, as it is before round 0."""
    method = build_method(config, problem) if method is None else method
    parts = MechanismParts(config, problem.flat, method, problem.selector, account)
    mechanism = make_mechanism(parts, problem.own.mechanism)
    _lend_updates(problem, method, mechanism)
    return Federation(
        select=problem.selector.select,
        tracker=ParticipationTracker(len(problem.task.clients), config.participation_ema),
        method=method,
        mechanism=mechanism,
        learning_rate_at=config.learning_rate_at,
        weights=problem.flat.read().clone(),
        account=account,
    )


def build_method(config: RunConfig, problem: Problem) -> Method:
    """Build what clients do and what the server makes of it."""
    own, task = problem.own, problem.task
    if own.remote is not None:
        # The same method as of a run on one machine; only step 3 is elsewhere.
        here = dataclasses.replace(problem, own=dataclasses.replace(own, remote=None, engine=None))
        method = build_method(config.replace(engine="sequential"), here)
        method.move_to(own.remote)
        return method
    parts = MethodParts(
        config,
        problem.flat,
        task,
        problem.num_classes,
        problem.selector.secret,
        lends_memory=problem.lends_memory,
        optimizer=own.optimizer,
        score=problem.score,
        server_inputs=None if problem.validation is None else problem.validation[0],
    )
    if own.engine is not None:
        engine = own.engine(parts) if callable(own.engine) else own.engine
        parts = dataclasses.replace(parts, engine=engine)
    if own.method is not None:
        return own.method(parts)
    if isinstance(config, CondenseConfig):
        return make_condensation(config, problem.flat.module, task, problem.num_classes)
    if config.method == "full":
        return WholeModel(parts)
    if config.method == "smallest":
        return Smallest(parts, problem.model_width)
    if config.method == "largest_only":
        return LargestOnly(parts)
    return Slices(parts)


def settle_engine(config: RunConfig, problem: Problem) -> tuple[RunConfig, Problem]:
    """Return the configuration with the engine that `auto` is for this run, and its reason.

    Its folder then says which one, and whoever resumes it trains with the same.
    """
    if not _is_open(config, problem):
        return config, problem
    own = problem.own
    cohort = config.cohort_limit(len(problem.task.clients))
    settings = MethodParts(
        config,
        problem.flat,
        problem.task,
        problem.num_classes,
        problem.selector.secret,
        optimizer=own.optimizer,
    ).local_settings
    choice = choose_engine(problem.flat, problem.task, settings, config.num_rounds, cohort)
    said = f"engine=auto is {choice.engine}: {choice.reason}"
    _LOG.info("%s", said)
    problem = dataclasses.replace(problem, engine_choice=said)
    return config.replace(engine=choice.engine), problem


def engine_of_before(config: RunConfig, problem: Problem) -> RunConfig:
    """Return the configuration of a resumed run with the engine that it began with.

    A folder that says `auto` was made before `auto` was settled at the start: on a CPU it was
    `sequential` then, whose rounding a run with seeded noise must meet again.
    """
    was_sequential = _is_open(config, problem) and problem.task.device.type == "cpu"
    return config.replace(engine="sequential") if was_sequential else config


def _is_open(config: RunConfig, problem: Problem) -> bool:
    """Whether it is still to be decided which engine trains the clients of a run."""
    own = problem.own
    brought = own.method or own.engine or own.remote
    trains = config.method in WHOLE_METHODS and not isinstance(config, CondenseConfig)
    settled = config.engine != "auto" or config.devices is not None
    return not (settled or brought or not trains or problem.task.elsewhere)


def _lend_updates(problem: Problem, method: Method, mechanism: Mechanism) -> None:
    """Let updates lie in the working model's memory where the round is sure to keep none.

    A mechanism or a method of somebody's own may keep them.
    """
    known = problem.own.mechanism is None and type(method) is WholeModel
    if not (problem.lends_memory and known) or mechanism.needs_whole_cohort:
        return
    if type(method.engine) is SequentialEngine:
        method.engine.lends_updates = True
