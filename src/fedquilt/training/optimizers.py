"""How a client steps: rules on lists of tensors, alike for one client and for a stack of them.

With the gradient g of a batch, clipped to ||g|| <= C where a bound C is set, with FedProx's
pull added, g <- g + mu (w - w_0), and the learning rate r of the round:

| rule | step |
|---|---|
| sgd | g <- g + d w;  w <- w - r g |
| sgd, momentum m | g <- g + d w;  b <- m b + g;  w <- w - r b |
| nesterov | g <- g + d w;  b <- m b + g;  w <- w - r (g + m b) |
| adam | g <- g + d w;  first and second moments of g;  w <- w - r m^ / (sqrt(v^) + 1e-8) |
| adamw | w <- (1 - r d) w;  the rest as adam without d |

d is the weight decay; moments, their decay 0.9 and 0.999 and their correction are those of
`torch.optim`.  State starts from zero for every client in every round: it would carry one
client's data to the next, and a client's from round to round.

All of it is computed number by number, except the norm of the clip, which is each client's
own; so the rule of a stack is the rule of its rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.config.choices import CLIENT_OPTIMIZERS
from fedquilt.training.state import ModuleState

_SGDS, _ADAMS = ("sgd", "nesterov"), ("adam", "adamw")
_FIRST, _SECOND = 0.9, 0.999
_TINY = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it

Gradients = Sequence[torch.Tensor | None]
Factory = Callable[..., torch.optim.Optimizer]
"""Makes an optimiser from parameters, and from `lr` where it takes one."""


class Steps(Protocol):
    """The steps of one client in one round."""

    def step(self, gradients: Gradients) -> None:
        """Move the parameters by the gradients of a batch."""


@dataclass(frozen=True)
class ClientOptimizer:
    """A rule by name, or a user's own factory.

    Parameters
    ----------
    name : str
        sgd, nesterov, adam or adamw; `custom` with a factory.
    momentum : float
        Of sgd and nesterov.
    weight_decay : float
        As in `torch.optim`; decoupled with adamw.
    gradient_clip : float, optional
        The largest norm of a batch's gradient, over all parameters.
    factory : callable, optional
        `params -> torch.optim.Optimizer`; called anew for every client and round, with
        `lr=`, the round's learning rate, where it takes one and has none bound to it.
    """

    name: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    gradient_clip: float | None = None
    factory: Factory | None = None
    _states: dict[object, ModuleState] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        checks.choice("optimizer", self.name, (*CLIENT_OPTIMIZERS, "custom"))
        if self.factory is not None:
            self._states[None] = ModuleState(self.factory)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel without the pictures of a factory: another process takes its own."""
        settings = self.name, self.momentum, self.weight_decay, self.gradient_clip, self.factory
        return ClientOptimizer, settings

    def restore(self) -> None:
        """Put a user's factory, and the classes of what it makes, back as they were."""
        for state in self._states.values():
            state.restore()

    @property
    def opaque(self) -> list[str]:
        """The names of things in a user's factory whose state can neither be seen nor put back."""
        found = [name for state in self._states.values() for name in state.opaque]
        return [f"optimizer.{name}" for name in found]

    def make(self, parameters: list[torch.Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """Return a user's optimiser for one client, made from the same state for each.

        Which class it has is known once one is made: the first of a class is made twice.
        """
        assert self.factory is not None
        self.restore()
        rate = {"lr": learning_rate} if _takes_rate(self.factory) else {}
        made = self.factory(parameters, **rate)
        if not isinstance(made, torch.optim.Optimizer):
            raise InvalidValueError(
                f"optimizer={self.factory!r:.60} must return a torch.optim.Optimizer, "
                f"got {type(made).__name__}"
            )
        if type(made) in self._states:
            return made
        own = {k: v for k, v in vars(made).items() if k not in ("param_groups", "state")}
        self._states[type(made)] = ModuleState([type(made), own])
        return self.make(parameters, learning_rate)

    @property
    def is_plain(self) -> bool:
        """Whether it is w <- w - r g and nothing else."""
        return self == PLAIN

    def begin(
        self,
        parameters: list[torch.Tensor],
        anchors: list[torch.Tensor] | None,
        learning_rate: float,
        mu: float,
    ) -> Steps:
        """Return the steps of one client, from a fresh state."""
        if self.factory is not None:
            return _OwnSteps(self, parameters, anchors, learning_rate, mu)
        if self.is_plain:
            return _PlainSteps(parameters, anchors, learning_rate, mu)
        return _RuleSteps(self, parameters, anchors, learning_rate, mu)


PLAIN = ClientOptimizer()
"""w <- w - r g, and nothing else."""


class _Steps:
    """The steps of one client: from its parameters, towards anchors where there is a pull `mu`."""

    def __init__(
        self,
        parameters: list[torch.Tensor],
        anchors: list[torch.Tensor] | None,
        learning_rate: float,
        mu: float,
    ) -> None:
        self._parameters, self._anchors = parameters, anchors
        self._rate, self._mu = learning_rate, mu


class _PlainSteps(_Steps):
    """w <- w + r mu (w_0 - w) - r g, in one pass."""

    @torch.no_grad()
    def step(self, gradients: Gradients) -> None:
        if self._anchors is not None:
            for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
                parameter.lerp_(anchor.to(parameter.dtype), self._rate * self._mu)
        used = [(p, g) for p, g in zip(self._parameters, gradients, strict=True) if g is not None]
        if used:
            torch._foreach_add_([p for p, _ in used], [g for _, g in used], alpha=-self._rate)


class _RuleSteps(_Steps):
    """The steps of one client under a named rule."""

    def __init__(self, rule: ClientOptimizer, *given: Any) -> None:
        super().__init__(*given)
        self._state = RuleState(rule, self._parameters)

    def step(self, gradients: Gradients) -> None:
        self._state.step(self._parameters, gradients, self._anchors, self._rate, self._mu)


class _OwnSteps(_Steps):
    """The steps of an optimiser of torch's kind, made for one client."""

    def __init__(self, rule: ClientOptimizer, *given: Any) -> None:
        super().__init__(*given)
        self._clip = rule.gradient_clip
        self._optimizer = rule.make(self._parameters, self._rate)

    def step(self, gradients: Gradients) -> None:
        moves = gradients
        if self._clip is not None or self._anchors is not None:
            moves = self._changed(gradients)
        for parameter, move in zip(self._parameters, moves, strict=True):
            parameter.grad = move
        try:
            self._optimizer.step()
        except TypeError as error:
            if "closure" not in str(error):
                raise
            raise InvalidValueError(
                f"optimizer={type(self._optimizer).__name__} must step without a closure"
            ) from error
        for parameter in self._parameters:  # their memory serves the next backward pass
            parameter.grad = None

    @torch.no_grad()
    def _changed(self, gradients: Gradients) -> Gradients:
        moves = clip_gradients(gradients, self._clip, stacked=False)
        if self._anchors is None:
            return moves
        return pulled(self._parameters, moves, self._anchors, self._mu)


def _takes_rate(factory: Factory) -> bool:
    """Tell whether a factory is given the round's learning rate: it has an open `lr`."""
    if isinstance(factory, functools.partial) and "lr" in factory.keywords:
        return False
    try:
        return "lr" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


class RuleState:
    """What a named rule remembers of its steps: for one client, or for each row of a stack."""

    SMALL = 1e-8

    def __init__(
        self, rule: ClientOptimizer, parameters: Iterable[torch.Tensor], *, stacked: bool = False
    ) -> None:
        checks.choice("optimizer", rule.name, (*_SGDS, *_ADAMS))  # another has no rule here
        self._rule, self._stacked = rule, stacked
        self._steps = 0
        count = 2 if rule.name in _ADAMS else int(rule.momentum > 0)
        some = list(parameters)
        self._moments = [[torch.zeros_like(p) for p in some] for _ in range(count)]

    @torch.no_grad()
    def step(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Gradients,
        anchors: Sequence[torch.Tensor] | None,
        learning_rate: float,
        mu: float,
        moving: torch.Tensor | None = None,
    ) -> None:
        """Move parameters in place; a stack may be the first rows of what the state is for.

        Parameters
        ----------
        moving : tensor, optional
            Which rows of a stack have a batch; the others stay as they are, state too.
        """
        self._steps += 1
        rows = len(parameters[0]) if self._stacked else None
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        weights = [parameters[i] for i in used]
        moments = [[kind[i][:rows] if rows else kind[i] for i in used] for kind in self._moments]
        moves = clip_gradients(
            [gradients[i] for i in used], self._rule.gradient_clip, self._stacked
        )
        if anchors is not None:
            moves = pulled(weights, moves, [anchors[i] for i in used], mu)
        changed = [*weights, *(tensor for kind in moments for tensor in kind)]
        before = [tensor.clone() for tensor in changed] if moving is not None else []
        self._apply(weights, [move for move in moves if move is not None], moments, learning_rate)
        if moving is not None:
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(torch.where(by_row(moving, tensor), tensor, old))

    def _apply(
        self,
        weights: list[torch.Tensor],
        moves: list[torch.Tensor],
        moments: list[list[torch.Tensor]],
        rate: float,
    ) -> None:
        rule = self._rule
        if not weights:
            return
        if rule.weight_decay and rule.name == "adamw":
            self._decay(weights, rate)
        elif rule.weight_decay:
            moves = list(torch._foreach_add(moves, weights, alpha=rule.weight_decay))
        if rule.name in _ADAMS:
            self._adam(weights, moves, moments, rate)
            return
        if rule.momentum:
            (past,) = moments
            torch._foreach_mul_(past, rule.momentum)
            torch._foreach_add_(past, moves)
            moves = (
                list(torch._foreach_add(moves, past, alpha=rule.momentum))
                if rule.name == "nesterov"
                else past
            )
        self._advance(weights, moves, rate)

    def _adam(
        self,
        weights: list[torch.Tensor],
        moves: list[torch.Tensor],
        moments: list[list[torch.Tensor]],
        rate: float,
    ) -> None:
        first, second = moments
        torch._foreach_lerp_(first, moves, 1.0 - _FIRST)
        torch._foreach_mul_(second, _SECOND)
        torch._foreach_addcmul_(second, moves, moves, 1.0 - _SECOND)
        self._advance_adam(weights, first, list(torch._foreach_sqrt(second)), rate)

    def rates(self, rate: float, step: int) -> tuple[float, float, float]:
        """Return what moves are multiplied by in a step, counted from 1; Adam's root; the decay."""
        kept = 1.0 - rate * self._rule.weight_decay
        if self._rule.name not in _ADAMS:
            return -rate, 1.0, kept
        return -rate / (1.0 - _FIRST**step), (1.0 - _SECOND**step) ** 0.5, kept

    def _decay(self, weights: list[torch.Tensor], rate: float) -> None:
        torch._foreach_mul_(weights, self.rates(rate, self._steps)[2])

    def _advance(self, weights: list[torch.Tensor], moves: list[torch.Tensor], rate: float) -> None:
        torch._foreach_add_(weights, moves, alpha=-rate)

    def _advance_adam(
        self,
        weights: list[torch.Tensor],
        first: list[torch.Tensor],
        scale: list[torch.Tensor],
        rate: float,
    ) -> None:
        move, root, _ = self.rates(rate, self._steps)
        torch._foreach_div_(scale, root)
        torch._foreach_add_(scale, self.SMALL)
        torch._foreach_addcdiv_(weights, first, scale, move)


def by_row(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a mask of rows, False beyond its end, that broadcasts over a stack."""
    rows = torch.zeros(len(like), dtype=torch.bool, device=like.device)
    rows[: len(mask)] = mask
    return rows.view(-1, *(1,) * (like.dim() - 1))


def clip_gradients(
    gradients: Gradients, bound: float | None, stacked: bool
) -> list[torch.Tensor | None]:
    """Return gradients scaled to a norm of at most `bound`; in a stack each row by its own."""
    used = [gradient for gradient in gradients if gradient is not None]
    if bound is None or not used:
        return list(gradients)
    if stacked:
        length = row_norms(used)
        share = (bound / (length + _TINY)).clamp(max=1.0)
        return [
            None if g is None else g * share.view(-1, *(1,) * (g.dim() - 1)).to(g.dtype)
            for g in gradients
        ]
    length = torch.stack([norm.to(torch.float32) for norm in torch._foreach_norm(used)]).norm()
    share = (bound / (length + _TINY)).clamp(max=1.0)
    return [None if g is None else g * share.to(g.dtype) for g in gradients]


def row_norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each row over all tensors of a stack."""
    parts = [gradient.flatten(1).norm(dim=1).to(torch.float32) for gradient in gradients]
    whole: torch.Tensor = torch.stack(parts).norm(dim=0)
    return whole


def pulled(
    weights: Sequence[torch.Tensor],
    gradients: Gradients,
    anchors: Sequence[torch.Tensor],
    mu: float,
) -> list[torch.Tensor | None]:
    """Return the gradients with that of FedProx's term, mu (w - w_0)."""
    return [
        None if g is None else g + mu * (w - anchor.to(w.dtype))
        for w, g, anchor in zip(weights, gradients, anchors, strict=True)
    ]


def make_client_optimizer(
    name: str,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    gradient_clip: float | None = None,
    factory: Any = None,
) -> ClientOptimizer:
    """Return the optimiser of a configuration, or a user's own."""
    if isinstance(factory, torch.optim.Optimizer):
        raise InvalidValueError(
            "optimizer must be a factory, params -> optimiser, not an optimiser: every client "
            "starts with a fresh one"
        )
    if factory is not None and not callable(factory):
        raise InvalidValueError(
            f"optimizer={factory!r:.60} must be a name or a callable that makes a "
            "torch.optim.Optimizer from parameters"
        )
    return ClientOptimizer(name, momentum, weight_decay, gradient_clip, factory)
