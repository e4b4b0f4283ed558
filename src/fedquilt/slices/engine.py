"""Training a cohort of unequal slices, and the losses of the methods."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedquilt.common import checks, trees
from fedquilt.common.randomness import generator
from fedquilt.common.trees import Tree
from fedquilt.slices.selection import Axis, Selection, fjord
from fedquilt.slices.slicer import Slicer, exits_loss, ramp
from fedquilt.slices.slicing import Cut, Slicing
from fedquilt.training import (
    ClassMask,
    ClientIds,
    ClientUpdate,
    Engine,
    LocalSettings,
    Loss,
    LossOf,
    StepLoss,
    Task,
    make_engine,
    outputs_of,
)
from fedquilt.training.state import ModuleState


@torch.no_grad()
def class_mask(model: nn.Module, task: Task) -> ClassMask | None:
    """Return HeteroFL's mask: the classes of which a client has no sample.

    Their logits count as zero in the client's loss, so that it does not push down what
    it has never seen (Diao et al. 2021, section 3).  A model that ends in
    log-probabilities has normalised over all classes already: there the hidden classes
    are left out of the sum instead, which is what masking means for it.  Which of the two
    a model is holds for all clients, so it is tried on public inputs.
    """
    if not task.is_classification:
        return None
    state = ModuleState(model, model.parameters())
    outputs = outputs_of(trees.call_with(model, task.public().inputs))
    state.restore()  # all slices of the model share its class, closures and hooks
    hidden = torch.ones(len(task.clients), outputs.shape[-1], dtype=torch.bool)
    labels = task.targets.cpu().numpy()
    for client, samples in enumerate(task.clients):
        held = np.unique(labels[samples])
        held = held[held != task.objective.ignore_index]
        hidden[client, torch.from_numpy(held)] = False
    normalised = bool((outputs.logsumexp(-1).abs() < 1e-4).all())
    return ClassMask(hidden.to(task.targets.device), -torch.inf if normalised else 0.0)


def loss_of_slice(slicing: Slicing, model: nn.Module) -> LossOf | None:
    """Return the clients' loss on a slice's model, None for the engine's own."""
    options = slicing.options
    if slicing.method == "depthfl":
        return lambda client, round_index: StepLoss(
            exits_loss, partial(ramp, round_index, options.depthfl_rampup)
        )
    if slicing.method == "scalefl":
        return lambda client, round_index: scale_loss
    if slicing.method != "fjord":
        return None
    narrow = _NarrowPasses(model, slicing)
    widths = sorted(set(slicing.widths))

    def loss_of(client: int, round_index: int) -> Loss:
        limit = slicing.widths[client]
        narrow.begin([width for width in widths if width < limit])
        random = generator(slicing.seed, "ordered dropout", round_index, client)
        return StepLoss(narrow.loss, lambda: (fjord(limit, widths, random).width, limit))

    return loss_of


class _NarrowPasses:
    """FjORD's local step on a client's model of width w (Horvath et al. 2021, algorithm 1).

    Each step draws a width p from those up to w.  The loss is the cross-entropy of
    width w, plus, where p < w, that of width p distilled from width w; the gradient of
    the narrow pass arrives in the weights of the wide model.
    """

    def __init__(self, model: nn.Module, slicing: Slicing) -> None:
        self._model = model
        self._slicing = slicing
        self._plan: Slicer | None = None
        self._models: dict[Fraction, nn.Module] = {}
        self._states = [ModuleState(model)]

    def begin(self, widths: Sequence[Fraction]) -> None:
        """Have the narrow models of these widths as they were before any client."""
        for state in self._states:
            state.restore()
        if widths and self._plan is None:
            self._plan = Slicer(self._model, self._slicing.sample, self._slicing.options.whole)
        for width in widths:
            if width not in self._models:
                assert self._plan is not None
                self._models[width] = self._plan.build(self._nested(width))
                self._states.append(ModuleState(self._models[width]))

    def _nested(self, width: Fraction) -> _Nested:
        return _Nested(width, self._slicing.free_units)

    def loss(
        self, wide: nn.Module, inputs: Tree, targets: Tensor, drawn: tuple[Fraction, Fraction]
    ) -> Tensor:
        """Return the loss of one step that drew (a width, the client's own)."""
        width, limit = drawn
        outputs = outputs_of(trees.call_with(wide, inputs))
        loss = functional.cross_entropy(outputs, targets)
        if width == limit:
            return loss
        assert self._plan is not None
        options = self._slicing.options
        held = self._plan.slice(self._nested(width)).gather(dict(wide.named_parameters()))
        narrow = functional_call(self._models[width].train(), held, *trees.arguments_of(inputs))
        return loss + self_distillation_loss(
            outputs_of(narrow),
            outputs,
            targets,
            alpha=options.fjord_alpha,
            temperature=options.fjord_temperature,
        )


@dataclasses.dataclass(frozen=True)
class _Nested:
    """The first max(1, floor(w n)) units of every axis, n being those of the whole model.

    Inside a client's slice the same units as of a client of that width: rounded once.
    """

    width: Fraction
    whole_units: tuple[int, ...]

    def choose(self, units: int, axis: int) -> Axis:
        """Return the first units."""
        return Axis(units, ((0, min(units, max(1, int(self.whole_units[axis] * self.width)))),))


_: type[Selection] = _Nested

_REMEMBERED = 16


class SlicedEngine(Engine):
    """Cut the model for each group of clients with the same slice, and train the group.

    A group is one call of an ordinary engine on a small model, so that the clients of
    a tier can run as one program on a GPU.  An update is the vector of the client's
    slice.  Updates come group by group, in the order of the cohort within a group.

    Parameters
    ----------
    slicing : Slicing
        Who holds what.
    task, settings
        As of any engine.
    name : str
        The engine that trains a group: auto, sequential or batched.
    """

    def __init__(self, slicing: Slicing, task: Task, settings: LocalSettings, name: str) -> None:
        self.slicing = slicing
        self.settings = settings
        self._name = name
        mask = class_mask(slicing.model, task) if slicing.method == "heterofl" else None
        self.task = dataclasses.replace(task, class_mask=mask)
        self.report: Callable[[str, float], None] | None = None
        """Told which width begins to train, where that may be known."""
        self._engines: OrderedDict[Hashable, Engine] = OrderedDict()
        self._engine(slicing.cut(0, 0))  # an engine that cannot train this is an error now

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client, as a vector of its slice."""
        done = 0
        for cut, clients in self.slicing.groups(cohort, round_index).items():
            if self.report is not None:
                self.report(f"width {self.slicing.widths[clients[0]]}", done / len(cohort))
            part = self.slicing.place_of(cut).gather(start)
            yield from self._engine(cut).train(part, clients, round_index, learning_rate)
            done += len(clients)
        if self.report is not None:
            self.report("server", 1.0)

    def _engine(self, cut: Cut) -> Engine:
        key = self.slicing.structure(cut)
        if key not in self._engines:
            model = self.slicing.sub_model(cut)
            loss = loss_of_slice(self.slicing, model)
            self._engines[key] = make_engine(self._name, model, self.task, self.settings, loss)
            if len(self._engines) > _REMEMBERED:
                self._engines.popitem(last=False)[1].close()
        self._engines.move_to_end(key)
        return self._engines[key]

    def close(self) -> None:
        """Close the engines of all slices."""
        for engine in self._engines.values():
            engine.close()


def self_distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    *,
    alpha: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """Return (1 - alpha) CE(student, labels) + alpha T^2 KL(teacher_T || student_T).

    The student is the narrow pass and the teacher the widest one the client can
    run; no gradient goes through the teacher.  T divides both sides' logits, and
    T^2 keeps the size of the gradient (Hinton et al. 2015).
    """
    checks.number("alpha", alpha, at_least=0, at_most=1)
    checks.number("temperature", temperature, above=0)
    hard = functional.cross_entropy(student_logits, labels)
    soft = functional.kl_div(
        functional.log_softmax(student_logits / temperature, dim=-1),
        functional.log_softmax(teacher_logits.detach() / temperature, dim=-1),
        reduction="batchmean",
        log_target=True,
    )
    return (1 - alpha) * hard + alpha * temperature**2 * soft


def scale_loss(module: nn.Module, inputs: Tree, targets: Tensor) -> Tensor:
    """Return ScaleFL's loss over the exits z_1 .. z_d of a client's model (Ilhan et al. 2023).

        2 / (d (d + 1)) sum_i i l_i,  l_d = CE(z_d, y),  l_i = the last exit's lesson to exit i

    with `self_distillation_loss` as the lesson, at the share 0.05 and the temperature 3.
    """
    exits: Any = module.exits
    outputs: Sequence[Tensor] = trees.call_with(exits, inputs)
    last, loss = outputs[-1], len(outputs) * functional.cross_entropy(outputs[-1], targets)
    for number, own in enumerate(outputs[:-1], start=1):
        lesson = self_distillation_loss(own, last, targets, alpha=0.05, temperature=3.0)
        loss = loss + number * lesson
    return loss * 2 / (len(outputs) * (len(outputs) + 1))
