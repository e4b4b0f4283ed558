"""From a configuration and its problem to a federation: method, engine, mechanism."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from fedquilt.aggregation import RunningMean, keeps_vectors, sensitivity_of, try_sensitivity
from fedquilt.condense.method import make_condensation
from fedquilt.config import CondenseConfig, RunConfig
from fedquilt.config.choices import WHOLE_METHODS
from fedquilt.federation import Federation
from fedquilt.method import Method, MethodParts, WholeModel
from fedquilt.population import ParticipationTracker
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.mechanism import Mechanism
from fedquilt.privacy.run_account import RunAccount
from fedquilt.setup.mechanism import MechanismParts, make_mechanism
from fedquilt.setup.task import FederatedTask, UserComponents
from fedquilt.slices.method import LargestOnly, Slices, Smallest
from fedquilt.training import Choice, choose_engine
from fedquilt.training.engines import manual_trainer

_LOG = logging.getLogger("fedquilt")


def build_federation(
    config: RunConfig,
    problem: FederatedTask,
    account: RunAccount | None = None,
    method: Method | None = None,
) -> Federation:
    """Build the federation of the configured mode, as it is before round 0."""
    method = build_method(config, problem) if method is None else method
    doubts, total = doubts_of(config, method), method.new_sum()
    sensitivity = sensitivity_of(total)
    parts = MechanismParts(config, problem.flat, method, problem.selector, account)
    tried: tuple[str, ...] = ()
    if not doubts and sensitivity is not None and not is_plain_sum(method):
        parts = dataclasses.replace(parts, sum_sensitivity=sensitivity)
        tried = (_tried_sum(config, problem, method, sensitivity),)
    mechanism = make_mechanism(parts, problem.own.mechanism)
    if mechanism.is_bounded:
        for doubt in doubts:
            _LOG.warning("nothing will be claimed: %s", doubt)
    _lend_updates(problem, method, mechanism)
    return Federation(
        select=problem.selector.select,
        tracker=ParticipationTracker(len(problem.task.clients), config.participation_ema),
        method=method,
        mechanism=mechanism,
        learning_rate_at=config.learning_rate_at,
        weights=problem.flat.read().clone(),
        account=account,
        sensitivity=sensitivity,
        sum_kind=type(total),
        doubts=doubts,
        beliefs=(*tried, *beliefs_of(problem.own)),
        withheld=problem.withheld,
    )


def is_plain_sum(method: Method) -> bool:
    """Tell whether what a method's clients send is summed by the package."""
    return type(method.new_sum()) is RunningMean


def doubts_of(config: RunConfig, method: Method) -> tuple[str, ...]:
    """Return why no bound holds for what a method makes of bounded vectors; empty: one does."""
    total, name = method.new_sum(), type(method).__name__
    declared = sensitivity_of(total)
    usable = config.mode == "certified" and not config.amplification
    doubts = []
    if not is_plain_sum(method) and (declared is None or not usable):
        known = "not known" if declared is None else "used in certified without amplification only"
        doubts.append(f"the sum is made by {type(total).__name__}, whose sensitivity is {known}")
    for step in ("place", "coverage"):
        if not getattr(getattr(method, step), "__module__", "").startswith("fedquilt."):
            doubts.append(f"{name}.{step} decides what of the sum is noised: nothing checks it")
    return tuple(doubts)


def _tried_sum(config: RunConfig, problem: FederatedTask, method: Method, declared: float) -> str:
    """Try a declared sensitivity, and say what is believed of it."""
    count = min(_TRIAL_CLIENTS, len(problem.task.clients))
    whole = method.new_sum().total.numel()
    sizes = [method.update_size(client, 0) or whole for client in range(count)]
    places = [method.place(client, 0) for client in range(count)]
    longest = config.clip_norm * config.clip_cap
    tried = try_sensitivity(method.new_sum, declared, places, sizes, longest)
    return (
        f"the sum is made by {type(method.new_sum()).__name__}: its sensitivity, {declared:g}, is "
        f"as its author declares; tried on {tried} vectors, not proved"
    )


_TRIAL_CLIENTS = 8
_BELIEVED: Mapping[str, str] = {
    "method": "to use of clients' data nothing but the released sums",
    "engine": "to make a client's update of its own samples and public things alone",
    "loss": "to keep nothing of one client for another where it is not put back",
    "optimizer": "to keep nothing of one client for another where it is not put back",
    "metrics": "to look at nothing but the samples they are given",
}
"""What a claim takes on trust of parts that a user brings; see `docs/guarantees.md`."""
# Of `Certified`: whatever these say, a longer vector is shortened.
_BOUNDED_BY_ALL = {"bound_vector", "sensitivity"}


def beliefs_of(own: UserComponents) -> tuple[str, ...]:
    """Say of each part that a user brings what is believed and not checked."""
    found = []
    for part, believed in _BELIEVED.items():
        names = _names_of(getattr(own, part))
        if names:
            found.append(f"{part} of the user's own, {names}: believed {believed}")
    if own.mechanism is not None:
        found.append(_belief_in_mechanism(own.mechanism))
    return tuple(found)


def _belief_in_mechanism(mechanism: object) -> str:
    name = _names_of(mechanism)
    if not isinstance(mechanism, type):
        return f"the mechanism is made by {name}: clip, noise and charges are its word"
    kinds = mechanism.__mro__[: mechanism.__mro__.index(Certified)]
    changed = {key for kind in kinds for key in vars(kind)} & set(vars(Certified))
    changed = {key for key in changed - _BOUNDED_BY_ALL if key[:2] != "__" or key == "__init__"}
    if changed:
        return (
            f"mechanism {name} has its own {', '.join(sorted(changed))}: believed to keep noise "
            "and charges as they are claimed"
        )
    return (
        f"mechanism {name} bounds updates, which are shortened to the clip where they are longer: "
        "believed to look at one update alone"
    )


def _names_of(part: object) -> str:
    """Return what parts that were brought are called; names of the package's own are none."""
    if part is None or isinstance(part, str):
        return ""
    if isinstance(part, Mapping):
        part = tuple(part.values())
    if isinstance(part, list | tuple):
        return ", ".join(filter(None, map(_names_of, part)))
    return str(getattr(part, "__name__", type(part).__name__))


def build_method(config: RunConfig, problem: FederatedTask) -> Method:
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
        trainer=problem.trainer,
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


def resolve_auto_engine(
    config: RunConfig, problem: FederatedTask
) -> tuple[RunConfig, FederatedTask]:
    """Return the configuration with the engine that `auto` is for this run, and its reason.

    Its folder then says which one, and whoever resumes it trains with the same.  So it does where
    `batched` is asked for on a CPU and steps by hand are faster, which are not batched.
    """
    by_cost = is_auto(config, problem)
    if not by_cost and not _is_batched_on_cpu(config, problem):
        return config, problem
    cohort = config.cohort_limit(len(problem.task.clients))
    flat, task, secret = problem.flat, problem.task, problem.selector.secret
    parts = MethodParts(config, flat, task, problem.num_classes, secret)
    settings = dataclasses.replace(parts, optimizer=problem.own.optimizer).local_settings
    if by_cost:
        choice = choose_engine(flat, task, settings, config.num_rounds, cohort)
    else:
        trainer = manual_trainer(flat.module, task, settings)
        if trainer is None:
            return config, problem
        choice = Choice("local", "each client trains with gradients by hand", trainer)
    how = "" if choice.trainer is None else f", trainer {choice.trainer.name}"
    said = f"engine={config.engine} is {choice.engine}{how}: {choice.reason}"
    _LOG.info("%s", said)
    problem = dataclasses.replace(problem, engine_choice=said, trainer=choice.trainer)
    return config.replace(engine=choice.engine), problem


def engine_for_resume(config: RunConfig, problem: FederatedTask) -> RunConfig:
    """Return the configuration of a resumed run with the engine that it began with.

    A folder that says `auto` was made before `auto` was settled at the start: on a CPU it was
    `sequential` then, whose rounding a run with seeded noise must meet again.
    """
    was_sequential = is_auto(config, problem) and problem.task.device.type == "cpu"
    return config.replace(engine="sequential") if was_sequential else config


def is_auto(config: RunConfig, problem: FederatedTask) -> bool:
    """Whether it is still to be decided which engine trains the clients of a run."""
    return config.engine == "auto" and _is_ours(config, problem)


def _is_batched_on_cpu(config: RunConfig, problem: FederatedTask) -> bool:
    is_here = problem.task.device.type == "cpu" and _is_ours(config, problem)
    return config.engine == "batched" and is_here


def _is_ours(config: RunConfig, problem: FederatedTask) -> bool:
    """Whether one engine of this package trains whole models here, as the configuration says."""
    own = problem.own
    brought = own.method or own.engine or own.remote or config.devices is not None
    trains = config.method in WHOLE_METHODS and not isinstance(config, CondenseConfig)
    return trains and not brought and not problem.task.is_remote


def _lend_updates(problem: FederatedTask, method: Method, mechanism: Mechanism) -> None:
    """Let updates lie in the working model's memory where the round is sure to keep none.

    Who keeps vectors says so: the mechanism (`needs_whole_cohort`) and the sum (`keeps_vectors`).
    A mechanism of somebody's own may keep them unsaid.
    """
    kept = mechanism.needs_whole_cohort or keeps_vectors(method.new_sum())
    if kept or problem.own.mechanism is not None or not problem.lends_memory:
        return
    method.engine.lend_updates()
