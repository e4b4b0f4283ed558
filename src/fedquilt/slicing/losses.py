"""The losses of the methods that have one of their own."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedquilt.learning import ClassMask, Loss, LossOf, Task
from fedquilt.learning.state import ModuleState
from fedquilt.randomness import generator
from fedquilt.slicing.depth import exits_loss
from fedquilt.subnet import Axis, Selection, SlicePlan, self_distillation_loss
from fedquilt.subnet.schedules import fjord

if TYPE_CHECKING:
    from fedquilt.slicing.slices import Slicing


@torch.no_grad()
def class_mask(model: nn.Module, task: Task) -> ClassMask | None:
    """Return HeteroFL's mask: the classes of which a client has no sample.

    Their logits count as zero in the client's loss, so that it does not push down what
    it has never seen (Diao et al. 2021, section 3).  A model that ends in
    log-probabilities has normalised over all classes already: there the hidden classes
    are left out of the sum instead, which is what masking means for it.  Which of the two
    a model is holds for all clients, so it is tried on public inputs.
    """
    if task.targets.is_floating_point() or task.targets.dim() != 1:
        return None
    outputs = model(task.public().inputs)
    hidden = torch.ones(len(task.clients), outputs.shape[-1], dtype=torch.bool)
    labels = task.targets.cpu().numpy()
    for client, samples in enumerate(task.clients):
        hidden[client, torch.from_numpy(np.unique(labels[samples]))] = False
    normalised = bool((outputs.logsumexp(-1).abs() < 1e-4).all())
    return ClassMask(hidden.to(task.targets.device), -torch.inf if normalised else 0.0)


def loss_of_slice(slicing: Slicing, model: nn.Module) -> LossOf | None:
    """Return the clients' loss on a slice's model, None for the engine's own."""
    if slicing.method == "depthfl":
        return lambda client, round_index: exits_loss
    if slicing.method != "fjord":
        return None
    narrow = _NarrowPasses(model, slicing.sample)
    widths = sorted(set(slicing.widths))

    def loss_of(client: int, round_index: int) -> Loss:
        narrow.restore()
        random = generator(slicing.seed, "ordered dropout", round_index, client)
        limit = slicing.widths[client]
        return lambda wide, inputs, targets: narrow.loss(
            wide, inputs, targets, fjord(limit, widths, random).width / limit
        )

    return loss_of


class _NarrowPasses:
    """FjORD's local step on a client's model of width w (Horvath et al. 2021, algorithm 1).

    Each step draws a width p from those up to w.  The loss is the cross-entropy of
    width w, plus, where p < w, that of width p distilled from width w; the gradient of
    the narrow pass arrives in the weights of the wide model.
    """

    def __init__(self, model: nn.Module, sample: Tensor) -> None:
        self._model = model
        self._sample = sample
        self._plan: SlicePlan | None = None
        self._models: dict[Fraction, nn.Module] = {}
        self._states: list[ModuleState] = []

    def restore(self) -> None:
        """Put the narrow models back as they were before any client."""
        for state in self._states:
            state.restore()

    def loss(self, wide: nn.Module, inputs: Tensor, targets: Tensor, share: Fraction) -> Tensor:
        """Return the loss of one step that draws the share p / w."""
        outputs = wide(inputs)
        loss = functional.cross_entropy(outputs, targets)
        if share == 1:
            return loss
        if self._plan is None:
            self._plan = SlicePlan(self._model, self._sample)
        if share not in self._models:
            self._models[share] = self._plan.build(_AtLeastOne(share))
            self._states.append(ModuleState(self._models[share]))
        held = self._plan.slice(_AtLeastOne(share)).gather(dict(wide.named_parameters()))
        narrow = functional_call(self._models[share].train(), held, (inputs,))
        return loss + self_distillation_loss(narrow, outputs, targets)


class _AtLeastOne:
    """The first units of every axis of a slice, never none of them."""

    def __init__(self, share: Fraction) -> None:
        self.share = share

    def choose(self, units: int, axis: int) -> Axis:
        """Return the first max(1, floor(share x units)) units."""
        return Axis(units, ((0, max(1, int(units * self.share))),))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _AtLeastOne) and other.share == self.share

    def __hash__(self) -> int:
        return hash(self.share)


_: type[Selection] = _AtLeastOne
