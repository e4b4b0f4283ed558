"""What a claim rests on where parts are the user's own: the sum, doubts, beliefs, over all rounds.

A run that is resumed goes on from what its earlier rounds rested on, which `ledger.json` keeps
from before the first: a doubt stays for ever, beliefs add up, and the sum and which parts are the
user's own are refused another way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedquilt.aggregation import Accumulator, RunningMean, sensitivity_of, try_sensitivity
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import printable
from fedquilt.config import RunConfig
from fedquilt.config.choices import COLLUDING_ATTACKS
from fedquilt.method import Method
from fedquilt.privacy.certified import Certified
from fedquilt.setup.own_parts import code_digest
from fedquilt.setup.task import FederatedTask, UserComponents

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
