"""Personal models: what of a model, or which model, each client has for itself.

With the released model x, client i's own part p_i or model v_i, and its loss F_i:

| name | what a client does in a round | it keeps |
|---|---|---|
| `fedper` | trains x and p_i together, sends how x moved (Arivazhagan et al. 2019) | p_i |
| `fedrep` | trains p_i with x held, then x with p_i held (Collins et al. 2021) | p_i |
| `ditto` | trains x as usual; v_i by F_i(v) + lambda / 2 |v - x|^2 (Li et al. 2021) | v_i |
| `finetune` | trains x as usual; v_i is x after some steps of its own, at the end | nothing |

What is kept never leaves: it is in no update, so it is neither clipped nor noised nor charged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import torch_seed
from fedquilt.training.corrections import ShiftedLoss
from fedquilt.training.flat import FlatModel, Segment, matches
from fedquilt.training.task import (
    ClientIds,
    ClientUpdate,
    ClientVectors,
    Engine,
    LocalSettings,
    Loss,
    LossOf,
    Task,
)

Make = Callable[[LossOf | None, LocalSettings], Engine]
"""Makes an engine for what each client minimises (None: the usual), and how it trains."""


def own_segments(flat: FlatModel, patterns: Sequence[str]) -> list[Segment]:
    """Return the tensors that stay with clients; without patterns those of the last layer."""
    if not patterns:
        last = [segment for segment in flat.segments if not segment.is_buffer][-1]
        patterns = (last.name.rpartition(".")[0] or last.name,)
    for pattern in patterns:
        if not any(matches(segment.name, pattern) for segment in flat.segments):
            raise InvalidValueError(
                f"personal_layers={pattern!r} must match a parameter; the model has "
                f"{', '.join(flat.names)}"
            )
    own = [s for s in flat.segments if any(matches(s.name, pattern) for pattern in patterns)]
    if len(own) == len(flat.segments):
        raise InvalidValueError(
            f"personal_layers={','.join(patterns)!r} must leave something to learn together"
        )
    return own


class _Held(nn.Module):
    """A model in whose forward pass some parameters are constants."""

    def __init__(self, module: nn.Module, constants: dict[str, torch.Tensor]) -> None:
        super().__init__()
        vars(self)["whole"], vars(self)["constants"] = module, constants

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return torch.func.functional_call(self.whole, self.constants, inputs, named)  # type: ignore[arg-type]


class PartLoss:
    """A loss that has no gradient in some parameters, so that a step leaves them alone."""

    def __init__(self, loss: Loss, held: frozenset[str]) -> None:
        self._loss, self._held = loss, held

    def __call__(self, module: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        constants = {n: p.detach() for n, p in module.named_parameters() if n in self._held}
        return self._loss(_Held(module, constants), inputs, targets)


class PersonalEngine(Engine):
    """Trains the shared model and, beside it, what each client has for itself.

    Parameters
    ----------
    name : str
        fedper, fedrep, ditto or finetune.
    make : callable
        Makes engines; the shared model's is made first.
    flat, task, settings
        The model, the samples, and how the shared model is trained.
    own : sequence of Segment
        What stays with clients, of fedper and fedrep.
    epochs : int
        Of what a client trains for itself alone.
    base_loss : callable
        What each client minimises.
    ditto_lambda : float
        How strongly Ditto's own models are pulled to the shared one.
    """

    is_small = starts_early = False

    def __init__(
        self,
        name: str,
        make: Make,
        flat: FlatModel,
        task: Task,
        settings: LocalSettings,
        own: Sequence[Segment],
        epochs: int,
        base_loss: LossOf,
        ditto_lambda: float,
    ) -> None:
        self.name, self._base, self._segments = name, base_loss, flat.segments
        self._lambda, self._shared = ditto_lambda, flat.vector.new_zeros(0)
        self.place = torch.zeros(flat.vector.numel(), dtype=torch.bool, device=flat.vector.device)
        for segment in own:
            self.place[segment.start : segment.stop] = True
        alone = dataclasses.replace(
            settings, epochs=epochs, seed=torch_seed(settings.seed, "personal")
        )
        own_names = frozenset(segment.name for segment in own)
        others = frozenset(flat.names) - own_names
        self._engine = make(self._holding(own_names) if name == "fedrep" else None, settings)
        self._alone: Engine | None = None
        if name != "fedper":
            self._alone = make(self._holding(others) if name == "fedrep" else self._near, alone)
        self.kept: ClientVectors | None = None
        if name != "finetune":
            size = int(self.place.sum()) if own else flat.vector.numel()
            self.kept = ClientVectors(f"personal={name!r}", len(task.clients), size)

    def _holding(self, held: frozenset[str]) -> LossOf:
        return lambda client, round_index: PartLoss(self._base(client, round_index), held)

    def _near(self, client: int, round_index: int) -> Loss:
        """Return the loss of a client's own model: near the shared one (Ditto)."""
        loss = self._base(client, round_index)
        if self.name != "ditto" or not len(self._shared):
            return loss
        return ShiftedLoss(loss, self._segments, anchor=self._shared, mu=self._lambda)

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield each client's update of what is shared."""
        for client in map(int, cohort):
            if self.name in ("ditto", "finetune"):
                if self.name == "ditto":
                    self._move_own(start, client, round_index, learning_rate)
                yield from self._engine.train(start, [client], round_index, learning_rate)
                continue
            begin = self.model_of(client, start)
            if self.name == "fedrep":
                begin += self._trained(begin, client, round_index, learning_rate)
            (update,) = self._engine.train(begin, [client], round_index, learning_rate)
            delta = update.delta.clone()
            assert self.kept is not None
            if update.num_examples:
                self.kept.put(client, (begin + delta)[self.place])
            delta[self.place] = 0.0
            yield dataclasses.replace(update, delta=delta)

    def _move_own(
        self, start: torch.Tensor, client: int, round_index: int, learning_rate: float
    ) -> None:
        """Train a client's own model beside the shared one."""
        assert self.kept is not None
        own = self.model_of(client, start)
        self._shared = start.clone()
        self.kept.put(client, own + self._trained(own, client, round_index, learning_rate))

    def _trained(
        self, begin: torch.Tensor, client: int, round_index: int, learning_rate: float
    ) -> torch.Tensor:
        """Return how a client's own training moves its model."""
        assert self._alone is not None
        (update,) = self._alone.train(begin, [client], round_index, learning_rate)
        return update.delta.clone()

    def model_of(self, client: int, weights: torch.Tensor) -> torch.Tensor:
        """Return the model that a client would use: the released one, with what it keeps."""
        own = None if self.kept is None else self.kept.get(client)
        model = weights.clone()
        if own is not None and bool(self.place.any()):
            model[self.place] = own.to(model)
        elif own is not None:
            model = own.to(model, copy=True)
        return model

    def finetuned(
        self, client: int, weights: torch.Tensor, round_index: int, learning_rate: float
    ) -> torch.Tensor:
        """Return the released model after a client's own steps."""
        self._shared = weights.new_zeros(0)
        return weights + self._trained(weights, client, round_index, learning_rate)

    def close(self) -> None:
        """Close the engines."""
        self._engine.close()
        if self._alone is not None:
            self._alone.close()
