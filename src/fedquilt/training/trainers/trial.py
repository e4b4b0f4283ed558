"""Whether a faster trainer may be used for a model: reasons why not, and a trial.

The table of reasons needs no computation.  What passes it is tried: does it compute what autograd
computes, to rounding?

How far rounding alone takes two ways apart depends on the network: a rectifier near zero, the
larger of two near values, a softmax of large scores.  So it is measured.  A gradient computed with
rounding is the exact one of weights and inputs nearby (backward error analysis); autograd's own
gradient is therefore computed again with both moved by some units of rounding, and another way is
believed where it is no further from autograd than a few times that.

On inputs of ordinary size and on large ones: what clamps or scales its inputs shows on the second.
A rectifier that happens to flip in one way and not in the other is a matter of the draw; what
computes something else does so in every draw.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fedquilt.common import trees
from fedquilt.common.trees import Tree
from fedquilt.training.draws import ClientDraws, bits_of, own_draws
from fedquilt.training.flat import FlatModel
from fedquilt.training.objective import IGNORED, Objective
from fedquilt.training.state import ModuleState
from fedquilt.training.task import LocalSettings, Task, public_inputs
from fedquilt.training.trainers.plan import LayerPlan, NoPlanError, is_interpreted, plan_layers

FLOAT32, TF32, BFLOAT16 = 2.0**-18, 2.0**-9, 2.0**-7
"""How far weights and inputs are moved: 64 units of rounding, which tiled sums (Winograd) need some
of; of products on a GPU, whose factors are rounded once, 4."""
_TIMES = 4
# Near one a relative distance says nothing.
_FURTHEST = 0.5
SCALES = (1.0, 100.0)
"""The sizes of inputs that are tried."""
TRIAL_SEED = 0
_DRAWS = 3
_SPREAD = 0.05

Gradient = Callable[[torch.Tensor, Any], torch.Tensor]
"""The gradient, or the update, at some weights [size of the model] for a batch of inputs."""


WIDEST = {"manual": 1024, "gpu": 256}
"""The largest batch of a trainer; larger ones, which stand for "all samples", take much memory."""
_TOKENS = (torch.int32, torch.int64)  # what `nn.Embedding` takes


def why_not(trainer: str, flat: FlatModel, task: Task, settings: LocalSettings) -> str | None:
    """Return why a trainer by plan (`manual`, `gpu`) cannot take a model, None where it may."""
    is_manual, device, widest = trainer == "manual", flat.vector.device.type, WIDEST[trainer]
    is_plain = all(isinstance(part, torch.Tensor) for part in (task.inputs, task.targets))
    kind = task.inputs.dtype if is_plain else None
    if is_manual:
        takes_inputs = kind == torch.float32 and task.class_mask is None
        takes_steps = settings.optimizer.factory is None
    else:
        takes_inputs = kind is not None and (kind.is_floating_point or kind in _TOKENS)
        takes_steps = settings.optimizer.is_plain
    has_other_types = flat.vector.dtype != torch.float32 or flat.is_lossy
    reasons = {
        "it is not on a CPU": is_manual and device != "cpu",
        "plans run on a GPU": not is_manual and device != "cuda" and not is_interpreted(),
        "triton is not installed": not is_manual and importlib.util.find_spec("triton") is None,
        "its inputs are not one tensor of float32, or classes are hidden": (
            is_manual and not takes_inputs
        ),
        "its inputs are not one tensor of numbers or tokens": not takes_inputs,
        "its loss is not the cross-entropy of one class a sample": not _has_labels(task),
        "own optimizers have no steps by hand": is_manual and not takes_steps,
        "other steps than plain SGD have no GPU program": not takes_steps,
        f"batches above {widest} have no steps by hand": settings.batch_size > widest,
        "it has buffers that move, or other types than float32": (
            bool(flat.buffer_names) or has_other_types
        ),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _has_labels(task: Task) -> bool:
    """Tell whether the loss is the cross-entropy of one class a sample."""
    objective, targets = task.objective, task.targets
    is_label = isinstance(targets, torch.Tensor) and targets.dim() == 1
    is_class = objective.loss == "cross_entropy" and objective.ignore_index == IGNORED
    return is_label and is_class and not targets.is_floating_point()


def plan_for(trainer: str, flat: FlatModel, task: Task, settings: LocalSettings) -> LayerPlan:
    """Return the plan of a model for a trainer, not tried yet; else raise NoPlanError."""
    reason = why_not(trainer, flat, task, settings)
    if reason:
        raise NoPlanError(reason)
    flat.module.train()
    plan = plan_layers(flat.module, task.public().inputs)
    if {weights.name for weights in plan.weights} != set(flat.names):
        raise NoPlanError("it has parameters outside its layers, or frozen ones")
    return plan


class Trial(NamedTuple):
    """Made-up batches on which a trainer by hand is compared with autograd."""

    like: Tree
    samples: int
    scales: Sequence[float]


def refuse_disagreement(
    what: str,
    by_hand: Gradient,
    by_autograd: Gradient,
    flat: FlatModel,
    trials: Sequence[Trial],
    unit: float,
    draws: ClientDraws | None,
    *,
    vocabulary: int | None = None,
) -> None:
    """Raise NoPlanError where steps by hand are not what autograd computes; weights stay.

    `by_hand` and `by_autograd` return the gradients, or the updates, that are compared.
    """
    start = flat.read().clone()
    try:
        for like, count, scales in trials:
            reason = disagreement(
                *(by_hand, by_autograd, start, like, count, unit),
                vocabulary=vocabulary,
                scales=scales,
            )
            if reason:
                raise NoPlanError(f"{what} {reason}")
        moved = moved_by_a_pass(flat, trials[0].like, draws)
    finally:
        flat.write(start)
    if moved:
        raise NoPlanError(f"a pass changes {', '.join(moved)}, which steps by hand do not")


def autograd_gradients(
    flat: FlatModel,
    objective: Objective,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    draws: ClientDraws | None,
    step: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a batch at the model's weights, with the draws of a step."""
    flat.module.train()
    objective.begin()
    with torch.enable_grad(), own_draws(draws):
        if draws is not None:
            draws.begin(bits_of(TRIAL_SEED, step))
        loss = objective(flat.module, inputs, targets)
        return torch.autograd.grad(loss, flat.parameters)


def disagreement(
    way: Gradient,
    autograd: Gradient,
    start: torch.Tensor,
    like: Tree,
    count: int,
    unit: float,
    *,
    vocabulary: int | None = None,
    scales: Sequence[float] = SCALES,
) -> str | None:
    """Return how a way to compute gradients differs from autograd, None where it does not.

    On `count` made-up samples like those of `like`, of a known `vocabulary` where they are tokens;
    at weights near `start`: layers that begin at zero would hide the ones before them.
    """
    weights = start + _SPREAD * _noise(start, seed=1)
    floating = any(leaf.is_floating_point() for leaf in trees.leaves(like))
    for scale in scales if floating else scales[:1]:
        words = ""
        for seed in range(_DRAWS):
            samples = _samples(like, count, scale, seed, vocabulary)
            exact = autograd(weights, samples)
            near = autograd(_moved(weights, unit), trees.mapped(samples, lambda t: _moved(t, unit)))
            allowed = min(_TIMES * max(_distance(near, exact), unit), _FURTHEST)
            far = _distance(way(weights, samples), exact)
            if far <= allowed:  # false for NaN
                break
            words = words or (
                f"{far:.2g} away from autograd's on inputs of size {scale:g}, where rounding "
                f"explains {allowed:.2g}"
            )
        else:
            return words
    return None


def moved_by_a_pass(flat: FlatModel, inputs: Tree, draws: ClientDraws | None) -> list[str]:
    """Return what a pass in training changes beside weights: another way would leave it alone."""
    flat.restore()
    flat.module.train()
    state = ModuleState(flat.module, flat.parameters)
    with own_draws(draws):
        if draws is not None:
            draws.begin(bits_of(0, 0))
        trees.call_with(flat.module, inputs)
    moved = state.moved()
    flat.restore()
    return moved


def _samples(like: Tree, count: int, scale: float, seed: int, vocabulary: int | None) -> Any:
    samples = public_inputs(like, count, seed)
    if vocabulary is not None:
        return drawn_tokens(samples, vocabulary, seed)
    return trees.mapped(samples, lambda t: t * scale if t.is_floating_point() else t)


def drawn_tokens(like: torch.Tensor, vocabulary: int, seed: int) -> torch.Tensor:
    """Return tokens of the whole vocabulary, another at every place."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, like.shape, generator=drawn).to(like)


def _moved(tensor: torch.Tensor, unit: float) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor * (1 + unit * _noise(tensor, seed=2))


def _noise(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=drawn).to(tensor)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the distance relative to the length of the second; 0 where both are zero."""
    apart, length = float((one - other).norm()), float(other.norm())
    return apart / length if length > 0 else apart
