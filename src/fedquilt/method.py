"""What clients do in a round, and what the server makes of it: one `Method` a run.

The round (`round.py`) is the same for everybody: select, reserve, clip, noise, settle.
Methods differ in what a client computes, where its vector belongs, and what the release
is used for:

| method | a client sends | the server |
|---|---|---|
| `WholeModel` | the update of the whole model | moves the model by it |
| `fedquilt.slices.Slices` | the update of the slice it holds | moves every part by its holders |
| `fedquilt.condense.Condensation` | class statistics | grows images, trains the model on them |

A method of your own is a subclass; `docs/extending.md` has one.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.aggregation import (
    Accumulator,
    Place,
    RunningMean,
    ServerOptimizer,
    ServerStep,
    make_server_optimizer,
)
from fedquilt.aggregation.rules import CorrectedServer, SharedStep, make_robust
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.observer import accept_old_names
from fedquilt.config import RunConfig
from fedquilt.config.choices import ATTACK_STRENGTHS
from fedquilt.config.modes import MODE_TABLE
from fedquilt.data import ImageDataset
from fedquilt.privacy.mechanism import RoundPlan
from fedquilt.privacy.secure import SecureSettings
from fedquilt.training import (
    ClientUpdate,
    Engine,
    FlatModel,
    LocalSettings,
    Task,
    as_engine,
    make_client_optimizer,
    make_engine,
)
from fedquilt.training.attacks import AttackedEngine, hostile_clients
from fedquilt.training.compression import CompressedEngine, sent_bytes
from fedquilt.training.corrections import CorrectedEngine
from fedquilt.training.personal import PersonalEngine, own_segments
from fedquilt.training.task import ClientVectors, LossOf, learning_rate_at
from fedquilt.training.trainers import Trainer
from fedquilt.training.trainers.autograd import default_loss_of

Progress = Callable[[str, float], None]
"""Called with the step of a round that is running, and with the share of it that is done."""


OWN_PARTS = (
    "each client keeps {what} to itself: it never leaves the client, so that nothing is charged "
    "for it and nothing claimed of it"
)
"""What a statement says of personal models."""


class Files(Protocol):
    """Where a method may keep files of its own in the run's folder."""

    def room_for_synthetic(self, rounds: int | None = None) -> Path:
        """Return the file of the synthetic set after so many rounds; None: the final one."""


class RemoteEngine(Engine, Protocol):
    """An engine whose clients are elsewhere: it asks the method what each of them is sent."""

    @property
    def notes(self) -> Sequence[str]:
        """What a statement must say because clients are elsewhere."""

    def serve(self, method: Method) -> None:
        """Learn the method whose clients these are, before the first round."""

    def follow(self, released: Callable[[], torch.Tensor]) -> None:
        """Learn where the released model is read, for clients that begin between two rounds."""

    def present(self) -> NDArray[np.bool_] | None:
        """Tell who can be asked now; None: everybody.  Participation is public."""

    def evaluate(self, weights: torch.Tensor, round_index: int) -> dict[int, dict[str, Any]]:
        """Return what clients measure on samples that they hold back."""

    secure: SecureSettings | None
    """The numbers of secure aggregation, where clients send vectors under masks."""

    def new_sum(self, plain: Accumulator, plan: RoundPlan) -> Accumulator:
        """Return the sum of masked vectors in the place of a plain one."""


@dataclass(frozen=True, eq=False)
class MethodParts:
    """What a method is made from.

    Parameters
    ----------
    config : RunConfig
        The run's settings.
    flat : FlatModel
        The model that travels.
    task : Task
        All samples, and who holds which.  Public choices must not depend on them:
        `task.public()` has synthetic ones.
    num_classes : int
        How many scores the model gives.
    secret_cohort : bool
        A secret coin decides who takes part, so nothing may follow the cohort's size.
    engine : Engine, optional
        A user's own.
    trainer : Trainer, optional
        The one that was made when the engine was chosen.
    lends_memory : bool
        An engine may train in the memory of `flat`, which is written before it is read.
    optimizer : callable, optional
        A user's own: `params -> torch.optim.Optimizer`.
    score : callable
        What a model reaches on the test data, which no client holds.
    server_inputs : tree of tensors, optional
        Inputs of the server's own, which no client holds.
    """

    config: RunConfig
    flat: FlatModel
    task: Task
    num_classes: int
    secret_cohort: bool = False
    engine: Engine | None = None
    trainer: Trainer | None = None
    lends_memory: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    score: Callable[[torch.nn.Module], dict[str, float]] = lambda module: {}
    server_inputs: Any = None  # a `Tree`

    @property
    def local_settings(self) -> LocalSettings:
        """How clients train."""
        config = self.config
        # Under a secret coin the shape of a program must not tell how many it kept.
        rows = config.cohort_limit(len(self.task.clients)) if self.secret_cohort else None
        optimizer = make_client_optimizer(
            config.optimizer,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            gradient_clip=config.gradient_clip,
            factory=self.optimizer,
        )
        return LocalSettings(
            config.local_epochs,
            config.batch_size,
            config.feddyn_alpha if config.correction == "feddyn" else config.fedprox_mu,
            config.seed,
            config.precision,
            group_rows=rows,
            optimizer=optimizer,
            silent=MODE_TABLE[config.mode].noised,
        )

    def make_engine(
        self, made: Engine | None = None, withheld: torch.Tensor | None = None
    ) -> Engine:
        """Return the engine that the configuration names (or `made`), or the user's own.

        `withheld`: what never leaves clients, so that no message has it.
        """
        if self.engine is not None:
            return self.engine
        config, engine = self.config, made or self.own_engine()
        if config.attack != "none":
            engine = self._attacked(engine)
        if config.compression == "none":
            return engine
        sent = torch.ones_like(self.flat.vector, dtype=torch.bool)
        sent = sent if withheld is None else ~withheld
        facts = (len(self.task.clients), sent, config.seed)
        return CompressedEngine(engine, config.compression, config.compression_share, *facts)

    def _attacked(self, engine: Engine) -> Engine:
        """Return an engine in which some clients are hostile."""
        config = self.config
        who = hostile_clients(len(self.task.clients), config.attackers, config.seed)
        strength = config.attack_strength or ATTACK_STRENGTHS[config.attack]
        return AttackedEngine(engine, config.attack, strength, who)

    def own_engine(
        self, loss_of: LossOf | None = None, settings: LocalSettings | None = None
    ) -> Engine:
        """Return the engine of this package that the configuration names.

        `loss_of`: what each client minimises, where it is its own.
        """
        if self.config.devices is not None:
            if loss_of is not None or settings is not None:
                raise InvalidValueError(
                    f"devices={self.config.devices!r} must be left out where clients minimise a "
                    "loss or take steps of their own: several devices train by the run's"
                )
            return self._on_devices(self.config.devices)
        model = self.flat if self.lends_memory else self.flat.module
        name, how = self.config.engine, settings or self.local_settings
        return make_engine(name, model, self.task, how, loss_of, self.trainer)

    def _on_devices(self, names: str) -> Engine:
        """Return one batched engine on each of several devices."""
        from fedquilt.training.engines import DevicesEngine, parse_devices

        return DevicesEngine(self.flat.module, self.task, self.local_settings, parse_devices(names))

    def make_server(self) -> ServerOptimizer:
        """Return the server optimiser that the configuration names."""
        config = self.config
        return make_server_optimizer(
            config.server_optimizer, config.server_lr, config.server_momentum
        )


class Method(ABC):
    """Steps 3 and 8 of the round, and what a run saves and reports beyond its model.

    Parameters
    ----------
    engine : Engine
        Step 3: who trains or measures, and how.
    server : ServerStep
        Step 8: what the server makes of the release.
    released : sequence of str
        The names of what leaves the clients, for the statement.
    frozen : sequence of str
        The names of what never changes and never leaves.
    notes : sequence of str
        What else the statement must say.
    """

    clients_train = True
    """Whether clients train the model, so that what training moves travels."""
    holds_parts = False
    """Whether a client's vector may belong to a part of the whole one."""
    step_size: int | None = None
    """How many numbers the server's step is given; None: as many as the model has that travel."""
    client_widths: Sequence[Fraction] | None = None
    """What part of the model each client can hold, where the method asks; public."""
    plan: RoundPlan | None = None
    """What is fixed of the round that trains: clients elsewhere are told their part of it."""
    kept: Mapping[str, ClientVectors] = MappingProxyType({})
    """What clients keep from round to round, raw: for the owner's file alone."""
    personal_model: Callable[[int, torch.Tensor, int], torch.Tensor] | None = None
    """The model that a client uses in the place of the released one, where it has its own."""
    evaluates_slowly = False
    """Whether `before_evaluation` takes long; a checkpoint is then written before it."""

    def __init__(
        self,
        engine: Engine,
        server: ServerStep,
        *,
        released: Sequence[str],
        frozen: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self.server = server
        self.released = tuple(released)
        self.frozen = tuple(frozen)
        self.notes = tuple(notes)
        self.remote: RemoteEngine | None = None

    @property
    def engine(self) -> Engine:
        """Who trains or measures (step 3)."""
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        # One of somebody's own need not say what it can do.
        self._engine = as_engine(engine)

    def move_to(self, remote: RemoteEngine) -> None:
        """Let clients elsewhere do step 3 from now on; what this engine did stays with them."""
        remote.serve(self)
        self.engine, self.remote = remote, remote
        self.notes = (*self.notes, *remote.notes)

    def follow(self, released: Callable[[], torch.Tensor]) -> None:
        """Learn where the released model is read: it is public, and so is what follows from it."""
        if self.remote is not None:
            self.remote.follow(released)

    def present(self) -> NDArray[np.bool_] | None:
        """Tell who can be asked now; None: everybody."""
        return None if self.remote is None else self.remote.present()

    def outgoing(self, weights: torch.Tensor, client: int, round_index: int) -> torch.Tensor:
        """Return what a client elsewhere is sent: as much as its part of the round needs."""
        return weights

    def work(
        self, sent: torch.Tensor, client: int, round_index: int, learning_rate: float
    ) -> ClientUpdate:
        """Do a client's part of a round where its data are, given what it was sent."""
        (update,) = self.engine.train(sent, [client], round_index, learning_rate)
        return update

    def update_size(self, client: int, round_index: int) -> int | None:
        """Return how many numbers a client sends in a round; None: as many as it has."""
        return None

    def objection(self, vector: torch.Tensor) -> str | None:
        """Return why a vector of the right size from elsewhere can be no client's, if so."""
        return None

    def traffic(self) -> dict[str, float]:
        """Return what there is to say of the round's messages, from their shapes alone."""
        return {}

    def count_traffic(self, up: int, down: int) -> None:  # noqa: B027 (most report none)
        """Take the bytes that clients elsewhere sent and received in the round."""

    @abstractmethod
    def new_sum(self) -> Accumulator:
        """Return an empty accumulator for the vectors of a round."""

    def place(self, client: int, round_index: int) -> Place | None:
        """Return where a client's vector belongs in the whole one; None: it is the whole."""
        return None

    def coverage(self, clients: NDArray[np.int64], round_index: int) -> torch.Tensor | None:
        """Return the share of clients that hold each coordinate; None: all hold all."""
        return None

    def before_evaluation(self, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the model, up to date with all releases, and the measurements of that."""
        return weights, {}

    def extra_metrics(
        self, weights: torch.Tensor, round_index: int, measured: Mapping[str, float]
    ) -> dict[str, Any]:
        """Return what else the released model shows on test data, beside what was `measured`.

        Of a bounded run only what `record.schema.ROUND_KEYS` declares public is published.
        """
        return {}

    def save_artifacts(self, files: Files, rounds: int | None = None) -> Path | None:
        """Write the method's own files after so many rounds (None: at the end); return where."""
        return None

    look, keep = extra_metrics, save_artifacts

    def __init_subclass__(cls) -> None:
        """Read `look` and `keep`, as `extra_metrics` and `save_artifacts` were called."""
        accept_old_names(cls, {"look": "extra_metrics", "keep": "save_artifacts"})

    def result(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what result.json says beyond what every run says."""
        return {}

    def synthetic(self) -> ImageDataset | None:
        """Return the data set that the method has made, None where it makes none."""
        return None

    def report_to(self, progress: Progress) -> None:  # noqa: B027 (most have no long steps)
        """Report the steps within a round to `progress`, where they take long."""

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which all rounds run."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Release the resources of the engine."""
        self.engine.close()


class WholeModel(Method):
    """Everybody trains the whole model (McMahan et al. 2017)."""

    def __init__(self, parts: MethodParts, engine: Engine | None = None) -> None:
        flat, config = parts.flat, parts.config
        server: ServerStep = parts.make_server()
        self._size, self._device = flat.vector.numel(), flat.vector.device
        self._make_sum: Callable[..., Accumulator] = RunningMean
        self._sent_size, made = self._size, None
        if config.correction != "none":
            made, server = self._corrected(parts, parts.make_server())
        own, withheld = frozenset[str](), None
        if config.personal != "none" and engine is None:
            made, server, own = self._personal(parts)
            withheld = made.place
        super().__init__(
            parts.make_engine(made, withheld) if engine is None else engine,
            server,
            released=[name for name in flat.names if name not in own],
            frozen=flat.frozen_names,
            notes=[OWN_PARTS.format(what=", ".join(sorted(own)) or "its own model")]
            if config.personal != "none"
            else (),
        )
        if isinstance(self.engine, CompressedEngine):
            if self.engine.kept is not None:
                self.kept = {**self.kept, "residual": self.engine.kept}
            self.notes = (
                *self.notes,
                f"updates are compressed ({config.compression}) and clipped after decompression",
            )
        self._bytes = self._message_bytes(parts, 0 if withheld is None else int(withheld.sum()))
        if config.aggregation != "mean":
            self._make_sum, self.server = make_robust(
                config.aggregation, config.byzantine_fraction, config.clip_norm, self.server
            )

    def _message_bytes(self, parts: MethodParts, kept: int) -> dict[str, int]:
        """Return the bytes of a client's messages, from shapes, where parts of the model differ.

        `kept` numbers stay with clients.  Under a secret coin nothing is said: how many messages
        there were is nobody's business.
        """
        config, width = parts.config, parts.flat.vector.element_size()
        parted = (config.compression, config.correction, config.personal) != ("none",) * 3
        if parts.secret_cohort or not parted:
            return {}
        up = width * (self._sent_size - kept)
        if config.compression != "none":
            up = sent_bytes(config.compression, self._size - kept, config.compression_share)
        twice = 2 if config.correction == "scaffold" else 1  # the server's variate travels, too
        return {"bytes_up": up, "bytes_down": twice * width * (self._size - kept)}

    def _corrected(
        self, parts: MethodParts, server: ServerStep
    ) -> tuple[Engine | None, ServerStep]:
        """Return clients that correct their drift, and the server's part of it."""
        config, task = parts.config, parts.task
        name, clients = config.correction, len(task.clients)
        step = CorrectedServer(name, server, clients, config.feddyn_alpha)
        engine = CorrectedEngine(
            *(name, parts.own_engine, parts.flat, task, parts.local_settings),
            *(default_loss_of(task), lambda: step.vector),
        )
        if engine.kept is not None:
            self.kept = {"control": engine.kept}
        self._make_sum, self._sent_size = step.new_sum, step.sent_size(self._size)
        return engine, step

    def _personal(self, parts: MethodParts) -> tuple[PersonalEngine, ServerStep, frozenset[str]]:
        """Return clients that keep something, the server's step, and the names of what is kept."""
        config, flat = parts.config, parts.flat
        keeps_part = config.personal in ("fedper", "fedrep")
        own = own_segments(flat, config.patterns("personal_layers")) if keeps_part else []
        engine = PersonalEngine(
            *(config.personal, parts.own_engine, flat, parts.task, parts.local_settings, own),
            *(config.personal_epochs, default_loss_of(parts.task), config.ditto_lambda),
        )
        if engine.kept is not None:
            self.kept = {"personal": engine.kept}

        def model_of(client: int, weights: torch.Tensor, round_index: int) -> torch.Tensor:
            if config.personal != "finetune":
                return engine.model_of(client, weights)
            return engine.finetuned(
                client, weights, round_index, learning_rate_at(config, round_index)
            )

        self.personal_model = model_of
        server = parts.make_server()
        names = frozenset(segment.name for segment in own)
        return engine, SharedStep(server, engine.place) if own else server, names

    def traffic(self) -> dict[str, float]:
        """Return the bytes of the round, of so many as were asked; public, whatever was sent."""
        count = 0 if self.plan is None else len(self.plan.clients)
        return {name: float(count * each) for name, each in self._bytes.items()}

    def new_sum(self) -> Accumulator:
        """Return a sum as long as what clients send."""
        return self._make_sum(self._size, self._device)

    def update_size(self, client: int, round_index: int) -> int | None:
        """Return the size of what is sent, mostly that of the model."""
        return self._sent_size
