"""From a configuration and its problem to a federation: method, engine, mechanism, basis.

The `Basis` is what a claim rests on where parts are the user's own: the sum, doubts, beliefs.  A
run that is resumed goes on from what its earlier rounds rested on, which `ledger.json` keeps from
before the first: a doubt stays for ever, beliefs add up, and the sum and which parts are the user's
own are refused another way.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.aggregation import (
    Accumulator,
    LateAverage,
    RunningMean,
    keeps_vectors,
    sensitivity_of,
    try_sensitivity,
)
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import printable
from fedquilt.condense.method import make_condensation
from fedquilt.config import CondenseConfig, RunConfig
from fedquilt.config.choices import COLLUDING_ATTACKS, WHOLE_METHODS
from fedquilt.federation import Federation, Select
from fedquilt.method import Method, MethodParts, WholeModel
from fedquilt.population import Cohort, CohortSelector, ParticipationTracker
from fedquilt.population.fleet import MOST_STALE, BufferedSelector, EnergyTracker, load_energy
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.mechanism import Mechanism, RoundPlan
from fedquilt.privacy.run_account import RunAccount
from fedquilt.setup.mechanism import MechanismParts, make_mechanism
from fedquilt.setup.own_parts import code_digest
from fedquilt.setup.task import FederatedTask, UserComponents
from fedquilt.slices.method import FlexLoRA, LargestOnly, Slices, Smallest
from fedquilt.training import Choice, choose_engine
from fedquilt.training.engines import manual_trainer
from fedquilt.training.stale import AgedEngine, PastModels, StaleEngine
from fedquilt.training.task import learning_rate_at

_LOG = logging.getLogger("fedquilt")


def build_federation(
    config: RunConfig,
    problem: FederatedTask,
    account: RunAccount | None = None,
    method: Method | None = None,
    basis: Basis | None = None,
) -> Federation:
    """Build the federation of the configured mode, as it is before round 0.

    `basis` is what its claim rests on where earlier rounds have a part in that.
    """
    method = build_method(config, problem) if method is None else method
    basis = basis_of(config, problem, method) if basis is None else basis
    parts = MechanismParts(config, problem.flat, method, problem.selector, account)
    if not basis.doubts and basis.sensitivity is not None and not is_plain_sum(method):
        parts = dataclasses.replace(parts, sum_sensitivity=basis.sensitivity)
    mechanism = make_mechanism(parts, problem.own.mechanism)
    if mechanism.is_bounded:
        for doubt in basis.doubts:
            _LOG.warning("nothing will be claimed: %s", printable(doubt))
    _lend_updates(problem, method, mechanism)
    select, tracker = _participation(config, problem)
    return Federation(
        select=select,
        tracker=tracker,
        method=method,
        mechanism=mechanism,
        learning_rate_at=functools.partial(learning_rate_at, config),
        weights=problem.flat.read().clone(),
        account=account,
        sensitivity=basis.sensitivity,
        sum_kind=basis.kind,
        doubts=basis.doubts,
        beliefs=basis.beliefs,
        withheld=problem.withheld,
        protocol=_protocol(config, method),
        late=None if config.late_releases is None else LateAverage(config.late_releases),
    )


def _participation(
    config: RunConfig, problem: FederatedTask
) -> tuple[Select, ParticipationTracker]:
    """Return who picks a cohort and who counts it; batteries decide who is there."""
    selector, clients = problem.selector, len(problem.task.clients)
    if config.energy is None and config.selection != "energy":
        return selector.select, ParticipationTracker(clients, config.participation_ema)
    tracker = EnergyTracker(load_energy(config.energy, clients), config.participation_ema)
    selector.spent = lambda: tracker.spent

    def select(round_index: int, allowed: NDArray[np.bool_] | None) -> Cohort:
        ready = tracker.ready if allowed is None else allowed & tracker.ready
        return selector.select(round_index, ready)

    return select, tracker


def _protocol(
    config: RunConfig, method: Method
) -> Callable[[Accumulator, RoundPlan], Accumulator] | None:
    """Return what makes a sum under masks, where the run asks for it."""
    if config.secure_aggregation != "protocol":
        return None
    if method.remote is not None:
        return method.remote.new_sum
    from fedquilt.aggregation.secure import MaskedSum

    def masked(total: Accumulator, plan: RoundPlan) -> Accumulator:
        return MaskedSum(
            total,
            round_index=plan.round_index,
            count=len(plan.clients),
            least=plan.least,
            colluding=config.colluding_clients,
            bits=plan.bits,
        )

    return masked


def build_method(config: RunConfig, problem: FederatedTask) -> Method:
    """Build what clients do and what the server makes of it."""
    own, task = problem.own, problem.task
    if own.remote is not None:
        for name in ("attack", "correction", "personal"):
            if getattr(config, name) != "none":
                raise InvalidValueError(
                    f"{name}={getattr(config, name)!r} must be 'none' where clients are on other "
                    "machines"
                )
        # The same method as of a run on one machine; only step 3 is elsewhere.
        here = dataclasses.replace(problem, own=dataclasses.replace(own, remote=None, engine=None))
        method = build_method(config.replace(engine="sequential", compression="none"), here)
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
        if config.buffer_size is not None:
            raise InvalidValueError(
                f"buffer_size={config.buffer_size} must be left out with an engine of your own: "
                "its clients begin at one model"
            )
        engine = own.engine(parts) if callable(own.engine) else own.engine
        parts = dataclasses.replace(parts, engine=engine)
    if own.method is not None:
        return own.method(parts)
    if isinstance(config, CondenseConfig):
        return make_condensation(config, problem.flat.module, task, problem.num_classes)
    if config.method == "full":
        return _whole(parts, problem.selector)
    if config.method == "smallest":
        return Smallest(parts, problem.model_width)
    if config.method == "largest_only":
        return LargestOnly(parts)
    if config.method == "flexlora":
        return FlexLoRA(parts)
    return Slices(parts)


def _whole(parts: MethodParts, selector: CohortSelector) -> Method:
    """Return whole models; where rounds are asynchronous, clients begin at older ones."""
    if not isinstance(selector, BufferedSelector) or selector.arrived is not None:
        return WholeModel(parts)

    def ages(round_index: int) -> Mapping[int, int]:
        return selector.flush(round_index).ages

    past = PastModels(parts.flat.vector, MOST_STALE + 1, lambda t: selector.flush(t).seconds)
    engine = parts.make_engine(AgedEngine(parts.own_engine(), past, ages))
    method = WholeModel(parts, engine)
    method.server = past.serve(method.server)
    method.engine = StaleEngine(method.engine, ages)
    return method


def resolve_auto_engine(
    config: RunConfig, problem: FederatedTask
) -> tuple[RunConfig, FederatedTask]:
    """Return the configuration with the engine that `auto` is for this run, and its reason.

    Its folder then says which one, and whoever resumes it trains with the same.  So it does where
    `batched` is asked for on a CPU and steps by hand are faster, which are not batched.
    """
    if config.engine == "auto" and config.trains_one_by_one:
        return config.replace(engine="sequential"), problem
    by_cost = is_auto(config, problem)
    if not by_cost and not _is_batched_on_cpu(config, problem):
        return config, problem
    cohort = config.cohort_limit(len(problem.task.clients))
    flat, task, secret = problem.flat, problem.task, problem.selector.secret
    parts = MethodParts(config, flat, task, problem.num_classes, secret)
    settings = dataclasses.replace(parts, optimizer=problem.own.optimizer).local_settings
    if by_cost:
        choice = choose_engine(flat, task, settings, config.num_releases, cohort)
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


_NOT_NOTED = "parts are the user's own, and nothing is noted of what the first rounds rest on"
_CHANGED = (
    "parts of the user's own, or what they hold, had changed when the run was resumed: what is "
    "believed of them is believed of each"
)

_TEXTS = ("own", "digests", "doubts", "beliefs")


@dataclass(frozen=True)
class Basis:
    """What the claim of a run rests on.

    Parameters
    ----------
    kind, sensitivity
        The kind of sum that noise is made for, and how far one vector moves it; None: not known.
    own
        Which parts are the user's own.
    digests
        Of their code, one for each way it has been.
    doubts, beliefs
        Why nothing may be claimed, and what a claim takes on trust.
    """

    kind: type[Accumulator]
    sensitivity: float | None
    own: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    beliefs: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return it for `ledger.json`."""
        named = (*_TEXTS, "sensitivity")
        return {"sum": self.kind.__name__, **{name: getattr(self, name) for name in named}}

    def after(self, earlier: Mapping[str, Any] | None) -> Basis:
        """Return what rounds by these parts rest on together with those before them.

        `earlier` is None where rounds were released and nothing is noted of them.
        """
        if earlier is None:
            doubts = (_NOT_NOTED,) if self.own or self.doubts else ()
            return dataclasses.replace(self, doubts=_united(doubts, self.doubts))
        self._refuse_others(earlier)
        digests = _united(earlier["digests"], self.digests)
        changed = (_CHANGED,) if len(digests) > 1 else ()
        return dataclasses.replace(
            self,
            digests=digests,
            doubts=_united(earlier["doubts"], self.doubts),
            beliefs=_united(earlier["beliefs"], self.beliefs, changed),
        )

    def _refuse_others(self, earlier: Mapping[str, Any]) -> None:
        """Refuse parts that come or go, and another sum, which the noise is made for."""
        if set(earlier["own"]) != set(self.own):
            raise InvalidValueError(
                "parts of your own must be those of the run that is resumed, "
                f"{_listed(earlier['own'])}; they are {_listed(self.own)}"
            )
        kind = self.kind.__name__
        if (earlier["sum"], earlier["sensitivity"]) != (kind, self.sensitivity):
            raise InvalidValueError(
                f"new_sum must give sums of one kind and sensitivity in all rounds: {kind} has "
                f"{self.sensitivity}, and the run that is resumed was begun with "
                f"{printable(earlier['sum'])} of {earlier['sensitivity']}"
            )


def _united(*texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for some in texts for text in some))


def _listed(names: tuple[str, ...]) -> str:
    return printable(", ".join(names)) or "none"


def basis_of(config: RunConfig, problem: FederatedTask, method: Method) -> Basis:
    """Return what a claim about rounds by these parts rests on; a declared sum is tried."""
    own, (kind, sensitivity) = problem.own, _kind_of_sum(method)
    doubts = doubts_of(config, method)
    tried: tuple[str, ...] = ()
    if not doubts and sensitivity is not None and kind is not RunningMean:
        tried = (_tried_sum(config, problem, method, sensitivity),)
    parts = {name: getattr(own, name) for name in (*_BELIEVED, "mechanism")}
    brought = {name: part for name, part in parts.items() if part is not None}
    return Basis(
        kind,
        sensitivity,
        tuple(brought),
        (code_digest(list(brought.values())),),
        doubts,
        (*tried, *beliefs_of(own)),
    )


def is_plain_sum(method: Method) -> bool:
    """Tell whether what a method's clients send is summed by the package."""
    return _kind_of_sum(method)[0] is RunningMean


def _kind_of_sum(method: Method) -> tuple[type, float | None]:
    """Return a sum's class and sensitivity; the sum itself, as long as the model, is let go."""
    total = method.new_sum()
    return type(total), sensitivity_of(total)


def doubts_of(config: RunConfig, method: Method) -> tuple[str, ...]:
    """Return why no bound holds for what a method makes of bounded vectors; empty: one does."""
    (kind, declared), name = _kind_of_sum(method), type(method).__name__
    usable = config.mode == "certified" and not config.amplification
    doubts = []
    if kind is not RunningMean and (declared is None or not usable):
        known = "not known" if declared is None else "used in certified without amplification only"
        doubts.append(f"the sum is made by {kind.__name__}, whose sensitivity is {known}")
    if config.attack in COLLUDING_ATTACKS:
        doubts.append(f"attack={config.attack!r} makes clients send what others' data say")
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
