"""What an engine is: it trains a cohort and yields one update per client.

Every engine runs the same local steps on the same batches, drawn from the same
per-client seeds, so engines differ in speed and floating-point rounding only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import torch_seed
from fedquilt.common.trees import Tree
from fedquilt.config import RunConfig
from fedquilt.training.objective import CROSS_ENTROPY, Objective
from fedquilt.training.optimizers import PLAIN, ClientOptimizer


@dataclass(frozen=True)
class LocalSettings:
    """How a client trains: by its optimiser, with the FedProx term when mu > 0.

    FedProx (Li et al. 2020) adds mu/2 * ||w - w_global||^2 to the local loss.
    """

    epochs: int
    batch_size: int
    fedprox_mu: float
    seed: int
    precision: str = "float32"
    """What the batched engine computes in on a GPU: `float32` (products in TF32) or `bf16`."""
    group_rows: int | None = None
    """How many clients a program of the batched engine is made for; None: those it is given.

    Where a secret coin decides who is given to the engine, the number must not follow it.
    """
    optimizer: ClientOptimizer = PLAIN
    """How a client steps; its state starts anew for every client in every round."""
    silent: bool = False
    """Whether a client that cannot be trained sends NaN, which counts as nothing.

    For modes that protect clients: an error would say something about one's data.
    """


def learning_rate_at(config: RunConfig, round_index: int) -> float:
    """Return the local learning rate of release t, of T, by `lr_schedule`.

    exponential: learning_rate * lr_decay ** t;  step: lr_decay ** (t // lr_step_rounds);
    cosine: (1 + cos(pi t / T)) / 2;  all times (t + 1) / (w + 1) in the first w rounds,
    lr_warmup_rounds.
    """
    rate = config.learning_rate * _schedule(config, round_index)
    if round_index < config.lr_warmup_rounds:
        rate *= (round_index + 1) / (config.lr_warmup_rounds + 1)
    return rate


def _schedule(config: RunConfig, round_index: int) -> float:
    """Return the factor on the learning rate in a round, without warm-up."""
    if config.lr_schedule == "cosine":
        return (1.0 + math.cos(math.pi * round_index / config.num_releases)) / 2.0
    if config.lr_schedule == "step":
        return config.lr_decay ** (round_index // config.lr_step_rounds)
    return config.lr_decay**round_index if config.lr_schedule == "exponential" else 1.0


def client_seed(settings: LocalSettings, round_index: int, client: int) -> int:
    """Return the seed of everything random that a client does in a round."""
    return torch_seed(settings.seed, "local", round_index, client)


def epoch_order(count: int, shuffle: torch.Generator) -> torch.Tensor:
    """Return the order in which an epoch takes a client's samples."""
    return torch.randperm(count, generator=shuffle)


Loss = Callable[[nn.Module, Any, Any], torch.Tensor]
"""The loss of a model in training on a batch: (model, inputs, targets) -> a number."""


@dataclass(frozen=True)
class StepLoss:
    """A loss that decides before each step what it computes, such as the width of a pass.

    Under equal decisions a step runs the same operations on the same tensors, whichever client's
    it is: it can be recorded and replayed.  `loss` is called on (model, inputs, targets, decision).
    """

    loss: Callable[[nn.Module, Any, Any, Any], torch.Tensor]
    decide: Callable[[], Hashable]

    def __call__(self, module: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        """Decide, and return the loss of a batch."""
        return self.loss(module, inputs, targets, self.decide())

    def decided(self) -> tuple[Hashable, Loss]:
        """Decide; return the decision and the loss under it."""
        decision = self.decide()
        return decision, lambda module, inputs, targets: self.loss(
            module, inputs, targets, decision
        )


LossOf = Callable[[int, int], Loss]
"""The loss that a client minimises in a round: (client, round) -> loss."""


@dataclass(frozen=True, eq=False)
class ClassMask:
    """Which outputs a client's loss leaves alone: `hidden[client, class]` have this value."""

    hidden: torch.Tensor
    value: float

    def apply(self, outputs: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return outputs with the hidden classes set; `hidden` are rows of the mask."""
        return outputs.masked_fill(hidden, self.value)


@dataclass(frozen=True, eq=False)
class Task:
    """The training data of all clients, an index array a client, and what they minimise.

    Inputs and targets are tensors, or tuples or dictionaries of them, samples first.
    """

    inputs: Any  # a `Tree`; methods that need images ask for them
    targets: Any
    clients: Sequence[NDArray[np.int64]] = field(repr=False)
    class_mask: ClassMask | None = None
    objective: Objective = CROSS_ENTROPY
    is_remote: bool = False
    """Whether the data of some clients, or of all, are on other machines."""
    unranged: frozenset[str] = frozenset()
    """Names of inputs, whole numbers, of which nobody knows which ones the model takes."""

    def public(self) -> Task:
        """Return two made-up samples in the shape of the real ones, held by one client.

        Whatever is tried on a model before it trains (which buffers move, whether it can
        run as a stack) is decided for all clients, so no client's data may decide it.
        """
        inputs, targets = public_inputs(self.inputs, 2), self.public_targets(2)
        return dataclasses.replace(
            self, inputs=inputs, targets=targets, clients=[np.arange(2)], class_mask=None
        )

    def public_targets(self, count: int) -> Tree:
        """Return targets that nobody holds: zeros, or ones where zero is left out of the loss."""
        value = 1 if self.objective.ignore_index == 0 else 0
        targets: Tree = trees.mapped(
            self.targets, lambda tensor: tensor.new_full((count, *tensor.shape[1:]), value)
        )
        return targets

    @functools.cached_property
    def counts(self) -> torch.Tensor:
        """How many elements of each sample a mean loss is over; see `Objective.counts`."""
        return self.objective.counts(self.targets)

    @property
    def is_classification(self) -> bool:
        """Whether a sample has one class, and the loss is the cross-entropy of its scores."""
        plain = isinstance(self.targets, torch.Tensor) and self.targets.dim() == 1
        whole = plain and not self.targets.is_floating_point()
        return whole and self.objective.name in ("cross_entropy", "nll")

    @functools.cached_property
    def device(self) -> torch.device:
        """Where the samples lie."""
        return trees.device_of(self.inputs)

    def index(self, client: int) -> torch.Tensor:
        """Return the sample numbers of a client, on the data's device."""
        return torch.as_tensor(self.clients[client], device=self.device)


def public_inputs(like: Tree, count: int, seed: int = 0) -> Any:
    """Return samples that nobody holds, in shape, type and place like those of `like`.

    Normal numbers; where samples are whole numbers (token ids), zeros and ones in turn.
    Masks leave something to look at: ones under a name with `attention_mask`, False under one
    with `padding_mask`, and True and False in turn along the last dimension otherwise.
    """
    return trees.mapped_by_name(like, lambda name, leaf: _public_leaf(name, leaf, count, seed))


def _public_leaf(name: str, like: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    shape = (count, *like.shape[1:])
    if like.is_floating_point():
        draws = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return draws.to(device=like.device, dtype=like.dtype)
    if "padding_mask" in name or "attention_mask" in name:
        return like.new_full(shape, 0 if "padding_mask" in name else 1)
    if like.dtype == torch.bool and len(shape) > 1:
        turns = torch.arange(shape[-1], device=like.device) % 2 == 0
        return turns.expand(shape).clone()
    turns = torch.arange(count, device=like.device) % 2
    return turns.to(like.dtype).view(count, *(1,) * (len(shape) - 1)).expand(shape).clone()


ClientIds = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ClientUpdate:
    """What a client sends: local minus global weights, and how it got there."""

    client: int
    delta: torch.Tensor
    num_examples: int
    loss: float


class Engine(Protocol):
    """Trains the clients of a cohort.

    Subclasses inherit the defaults of what an engine can do.  An object that has only `train` and
    `close` is adapted by `as_engine`.
    """

    @property
    def is_small(self) -> bool:
        """Whether a round is so short that a second thread of torch only costs time."""
        return False

    @property
    def starts_early(self) -> bool:
        """Whether `train` queues work on a device and returns while it is done there."""
        return False

    def lend_updates(self) -> None:
        """Let an update lie in the working model's memory until the next client trains.

        An engine that has memory for each update does nothing.
        """
        return

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the cohort, in any order.

        The package's own follow the cohort, or public numbers: a sum rounds as it is ordered.
        A client of whom nothing arrived may be left out: it is not in the sum, and it is not
        charged.  Whatever arrived is yielded, unusable or not (then as NaN): who is charged
        must not depend on what is in it.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the resources of the engine: processes, memory."""
        return


@contextlib.contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Limit torch to one thread within, where that is wanted.

    A thread that has helped with one operation spins for milliseconds while it waits for the
    next, on a core that others could use: workers, or whatever else runs on the machine.  With a
    small network that costs more than a second thread ever saves.
    """
    threads = torch.get_num_threads()
    if not wanted or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class WrappedEngine(Engine):
    """An engine that changes what another one is told, or what it yields."""

    _engine: Engine

    @property
    def is_small(self) -> bool:
        """As the engine says."""
        return self._engine.is_small

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class _Adapted(Engine):
    """A user's own engine, with the defaults of what it does not declare."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    is_small = property(lambda self: bool(getattr(self._engine, "is_small", False)))
    starts_early = property(lambda self: bool(getattr(self._engine, "starts_early", False)))

    def train(self, *given: Any) -> Iterator[ClientUpdate]:
        updates: Iterator[ClientUpdate] = self._engine.train(*given)
        return updates

    def close(self) -> None:
        self._engine.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def as_engine(engine: Any) -> Engine:
    """Return an engine that declares what it can do: the given one, where it does."""
    if all(hasattr(engine, name) for name in ("is_small", "starts_early", "lend_updates")):
        given: Engine = engine
        return given
    return _Adapted(engine)


MOST_BYTES = 4 << 30
"""What the vectors of all clients may take together."""


class ClientVectors:
    """One vector a client, from the first round that it has joined: control variates, residuals.

    They are raw: a client's vector follows from its own data.  Nothing of them is published; a
    run's folder has them in a file for the owner alone, beside the checkpoint.

    Parameters
    ----------
    what : str
        What they are, for messages.
    num_clients, size : int
        How many clients there are, and how long a vector is.
    """

    def __init__(self, what: str, num_clients: int, size: int) -> None:
        needed = 4 * num_clients * size
        if needed > MOST_BYTES:
            raise InvalidValueError(
                f"{what} must take at most {MOST_BYTES / 2**30:g} GiB, and would take "
                f"{needed / 2**30:.1f}: one vector of {size} numbers for each of {num_clients} "
                "clients"
            )
        self._num_clients, self._size = num_clients, size
        self._kept: dict[int, torch.Tensor] = {}

    def get(self, client: int) -> torch.Tensor | None:
        """Return a client's vector; None: it has none yet."""
        return self._kept.get(client)

    def put(self, client: int, vector: torch.Tensor) -> None:
        """Keep a copy of a client's vector, unless it is not finite: then the last one stays."""
        if bool(vector.isfinite().all()):
            self._kept[client] = vector.detach().to(torch.float32, copy=True)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return all of them as arrays."""
        who = sorted(self._kept)
        rows = [self._kept[client].cpu().numpy() for client in who]
        values = np.stack(rows) if rows else np.zeros((0, self._size), np.float32)
        return {"clients": np.asarray(who, dtype=np.int64), "values": values}

    def load_state(self, state: dict[str, NDArray[Any]], device: torch.device) -> None:
        """Restore what `state` returned; raise ValueError for what cannot be it."""
        who, values = state["clients"], state["values"]
        inside = who.ndim == 1 and all(0 <= client < self._num_clients for client in who.tolist())
        if not inside or values.shape != (len(who), self._size) or values.dtype != np.float32:
            raise ValueError(f"vectors of clients of shape {values.shape} are of another run")
        rows = torch.from_numpy(values.copy()).to(device)
        self._kept = dict(zip(who.tolist(), rows, strict=True))
