"""`QuAPFLServer` of the QuAP-FL API document, with its names and methods.

A thin object over the round that everything else uses: its methods are the steps of the
QuAP-FL architecture document, so a subclass that overrides one changes that step.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator
from fedquilt.common.storage import write_file
from fedquilt.common.vectors import norm
from fedquilt.config import HYPERPARAMETERS, OUTPUT_CONFIG, TARGET_ACCURACY, RunConfig, plain_config
from fedquilt.config.documents import settings_from_hyperparameters
from fedquilt.experiment.loop import Experiment, limit_notes
from fedquilt.experiment.preflight import preflight_lines
from fedquilt.observe.progress import Progress
from fedquilt.population import (
    Availability,
    Cohort,
    CohortSelector,
    ParticipationTracker,
    checked_ids,
    propensities,
)
from fedquilt.privacy.clip import FixedClipper, QuantileClipper
from fedquilt.privacy.policies import AdaptivePrivacyAllocator
from fedquilt.privacy.quap_mechanisms import Clipper, LayerNoise, QuapMechanism
from fedquilt.privacy.statement import Statement
from fedquilt.record.result import build_history, build_result, published
from fedquilt.setup.build_task import task_from
from fedquilt.setup.federation import build_federation
from fedquilt.setup.mechanism import make_allocator, make_clipper
from fedquilt.setup.task import FederatedTask
from fedquilt.training import ClientIds, ClientUpdate, Engine, FlatModel, evaluate
from fedquilt.training.task import learning_rate_at

__all__ = ["AdaptivePrivacyAllocator", "ParticipationTracker", "QuAPFLServer", "QuantileClipper"]


class QuAPFLServer:
    """QuAP-FL with the interface of the QuAP-FL API document (section QuAPFLServer).

    Parameters
    ----------
    model : nn.Module
        The global model; it holds the trained weights after `train`.
    train_dataset, test_dataset
        Anything with `len` and `[i] -> (tensor, int)`.
    client_indices : list of lists of int
        The samples of each client.
    dataset_name : str
        Names the run and its target accuracy; 'mnist' and 'cifar10' have one.
    config : dict, optional
        Keys of `HYPERPARAMETERS`, over its values.  With `noise_strategy`
        ('layer_wise', 'full', 'none') the QuAP-FL paper's algorithm runs (mode quap_fl),
        without it the API document's (mode quap_fl_client).  Keys of `RunConfig`
        (`seed`, `noise_seed`, `eval_every`, `server_optimizer`, ...) are taken too.
    device : torch.device or str, optional
        Where to train; the GPU when there is one.
    logger : logging.Logger, optional
        Receives what is said; without one the package's logger does, where somebody listens
        to it (`fedquilt.log.configure`), and else it goes to the error stream.
    verbose : bool
        Say the settings now and a line after every round, as a bar in a terminal; False is
        silent.
    validation : data set, optional
        Data that no client holds.  With `early_stopping` in `config` training ends when the
        accuracy on them reaches `target_accuracy`, the data set's own by default.

    Without a `seed` in `config` the run follows `torch.manual_seed`.  What may be claimed
    about the model is in `statement`, and in that of the history that `train` returns.
    """

    def __init__(
        self,
        model: nn.Module,
        train_dataset: object,
        test_dataset: object,
        client_indices: Sequence[Sequence[int]],
        dataset_name: str,
        config: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        logger: logging.Logger | None = None,
        *,
        verbose: bool = True,
        validation: object = None,
    ) -> None:
        self.model = model
        self.dataset_name = dataset_name
        self.client_indices = client_indices
        self.logger = logger if logger is not None else logging.getLogger("fedquilt")
        self.verbose = checks.flag("verbose", verbose)
        self._own_logger = logger is not None
        self._config = _Settings({**HYPERPARAMETERS, **(config or {})})
        settings = _settings(config or {}, model, len(client_indices), dataset_name, device)
        self._run_config, self._problem = task_from(
            settings, model, train_dataset, test_dataset, client_indices, validation=validation
        )
        self._federation = build_federation(self._run_config, self._problem)
        self._engine = self._federation.method.engine
        self._optimizer = self._federation.method.server
        self._selector = self._make_selector()
        self._training = False
        self.tracker = self._federation.tracker
        self._lines: list[dict[str, Any]] = []
        self._own_steps: set[str] = set()
        self._adopt_mechanism()
        self.history = History(build_history([]), self.statement)
        self._progress().expects(self._run_config, self._settings_in_words())

    @property
    def config(self) -> dict[str, Any]:
        """The settings, which everything here was made from; they cannot be changed."""
        return self._config

    def _adopt_mechanism(self) -> None:
        """Expose allocator and clipper under the API document's names."""
        mechanism = self._federation.mechanism
        if isinstance(mechanism, QuapMechanism):
            mechanism.clipper = self._chosen_clipper(mechanism.clipper)
            self.privacy_allocator = mechanism.allocator
            self.clipper: Any = mechanism.clipper
        else:
            self.privacy_allocator = make_allocator(self._run_config)
            self.clipper = make_clipper(self._run_config)

    def _chosen_clipper(self, default: Clipper) -> Clipper:
        """Return the clip rule that `clipping_strategy` and `initial_clip` ask for."""
        strategy = self.config.get("clipping_strategy", "quantile")
        checks.choice("clipping_strategy", strategy, ("quantile", "fixed"))
        initial = self.config.get("initial_clip")
        if strategy == "fixed":
            return FixedClipper(1.0 if initial is None else initial)
        if initial is None or not isinstance(default, QuantileClipper):
            return default
        return QuantileClipper(
            default.quantile, default.momentum, default.min_clip, default.max_clip, initial
        )

    def train(self) -> History:
        """Run all rounds from the model's present weights and return the history."""
        self._take_weights()
        self._plug_in()
        judged = type(self).evaluate is not QuAPFLServer.evaluate
        subject = _OwnEvaluation(self, self._problem) if judged else self._problem
        with self._progress() as shown:
            experiment = Experiment(self._run_config, subject, self._federation, observer=shown)
            self._training = True
            try:
                experiment.run()
            finally:
                self._training = False
                self._store_weights()
                self._lines = experiment.lines
                self.history = History(build_history(experiment.lines), self.statement)
        return self.history

    @property
    def statement(self) -> Statement:
        """What may be claimed about the model, after all that `train` has done so far."""
        doubts = (
            f"steps of your own ({', '.join(sorted(self._own_steps))}): what they look at is not "
            "known here",
        )
        found = self._federation.statement().believing((), doubts if self._own_steps else ())
        limited = limit_notes(self._lines, self._run_config.max_agg_norm)
        return dataclasses.replace(found, notes=(*found.notes, *limited))

    def save_results(self) -> list[str]:
        """Write the last training where `OUTPUT_CONFIG` says; return the files.

        `{output_dir}/{dataset}_seed{seed}.json` has `metadata`, `history` and `statement`,
        `{log_dir}/{dataset}_seed{seed}.log` what was said of it.  With `save_results` off
        nothing is written.
        """
        if not checks.flag("save_results", OUTPUT_CONFIG["save_results"]):
            return []
        counts = self.tracker.participation_count
        result = build_result(self._run_config, self._lines, self.statement, counts)
        if self._federation.mechanism.is_bounded:
            result = published(result)
        said: list[str] = []
        shown = self._progress(sink=said.append)
        shown.expects(self._run_config, self._settings_in_words())
        for line in self._lines:
            shown(self._run_config, line)
        stem = f"{self.dataset_name}_seed{self._run_config.seed}"
        files = {
            Path(OUTPUT_CONFIG["output_dir"]) / f"{stem}.json": json.dumps(result, allow_nan=False),
            Path(OUTPUT_CONFIG["log_dir"]) / f"{stem}.log": "\n".join(said),
        }
        for path, text in files.items():
            write_file(path, f"{text}\n".encode(), parents=True)
        return [str(path) for path in files]

    def _plug_in(self) -> None:
        """Give the round this server's parts, and the steps that a subclass overrides."""
        federation, kind = self._federation, type(self)
        steps = ("select_clients", "local_training", "update_global_model", "evaluate")
        self._own_steps |= {s for s in steps if getattr(kind, s) is not getattr(QuAPFLServer, s)}
        if type(self.tracker) is not ParticipationTracker:
            self._own_steps.add("tracker")
        if type(self.privacy_allocator) is not AdaptivePrivacyAllocator:
            self._own_steps.add("privacy_allocator")
        federation.tracker = self.tracker
        if isinstance(federation.mechanism, QuapMechanism):
            federation.mechanism.allocator = self.privacy_allocator
            federation.mechanism.clipper = self.clipper
            federation.mechanism.clip_is_public = type(self.clipper) is FixedClipper
        federation.select = self._cohort
        if kind.local_training is not QuAPFLServer.local_training:
            federation.method.engine = _OwnTraining(self)
        if kind.update_global_model is not QuAPFLServer.update_global_model:
            federation.method.server = _OwnUpdate(self)

    def evaluate(self) -> tuple[float, float]:
        """Return (accuracy, loss) of the global model on the test data."""
        self._load_model()
        return evaluate(self._problem.flat.module, *self._problem.test_data)

    def select_clients(self, round_t: int) -> list[int]:
        """Step 1: return the cohort of a round."""
        return [int(client) for client in self._selector.select(round_t).clients]

    def _cohort(self, round_t: int, allowed: NDArray[np.bool_] | None) -> Cohort:
        """Return the cohort of `select_clients`; `model` has the current global weights."""
        self._store_weights()
        clients = checked_ids(self.select_clients(round_t), len(self.client_indices))
        return Cohort(clients, clients)

    def local_training(self, client_id: int, round_t: int) -> LocalUpdate:
        """Step 3: train one client from the global model; return its vector.

        The vector is local - global weights, divided by the learning rate when
        the QuAP-FL paper's algorithm runs.  Its `loss` is the mean of the training, and
        `vector, loss = server.local_training(...)` takes both.
        """
        checks.integer("client_id", client_id, at_least=0, at_most=len(self.client_indices) - 1)
        self._take_weights()
        rate = learning_rate_at(self._run_config, round_t)
        update = next(
            iter(self._engine.train(self._federation.weights, [client_id], round_t, rate))
        )
        scale = rate if self._divides_by_rate else 1.0
        return LocalUpdate.of((update.delta / scale).cpu().numpy(), update.loss)

    def update_global_model(self, aggregated_gradient: NDArray[Any] | torch.Tensor) -> None:
        """Step 8: add a mean update to the model, limited to max_agg_norm.

        An update with a NaN or Inf entry is skipped.  Called by hand, it moves the model by
        something of which nothing is known, and the statement says so.
        """
        if not self._training:
            self._own_steps.add("update_global_model")
        self._take_weights()
        weights = self._federation.weights
        update = torch.as_tensor(aggregated_gradient, device=weights.device).to(torch.float64)
        if update.shape != weights.shape:
            raise InvalidValueError(
                f"aggregated_gradient of shape {tuple(update.shape)} must have the shape "
                f"{tuple(weights.shape)}"
            )
        length = norm(update)
        if not np.isfinite(length):
            return
        limit = self._run_config.max_agg_norm
        limited = update * (limit / length) if length > limit else update
        self._federation.weights = self._optimizer.step(weights, limited)
        self._store_weights()

    def check_convergence(self, accuracy: float) -> bool:
        """Tell whether an accuracy reaches the data set's target; False without one."""
        target = TARGET_ACCURACY.get(self.dataset_name)
        return target is not None and accuracy >= target

    @property
    def _divides_by_rate(self) -> bool:
        return isinstance(self._federation.mechanism, LayerNoise)

    def _make_selector(self) -> CohortSelector:
        """Build the selector from the participation keys of `HYPERPARAMETERS`."""
        count = len(self.client_indices)
        draws = propensities(
            count,
            generator(self._run_config.seed, "propensity"),
            checks.number("participation_alpha", self.config["participation_alpha"], above=0),
            checks.number("participation_beta", self.config["participation_beta"], above=0),
        )
        mix = checks.number(
            "participation_mix", self.config.get("participation_mix", 0.0), at_least=0, at_most=1
        )
        draws = (1.0 - mix) * draws + mix * draws.mean()
        return CohortSelector(
            Availability.make(self._run_config.availability, count, draws),
            draws,
            rule=self._run_config.selection,
            limit=self._run_config.cohort_limit(count),
            seed=self._run_config.seed,
        )

    def _take_weights(self) -> None:
        """Start from the model's weights; within a round the federation has newer ones."""
        if not self._training:
            self._load_model()
            self._federation.weights = self._problem.flat.read().clone()

    def _load_model(self) -> None:
        """Take all tensors of the caller's model, frozen ones too."""
        flat = self._problem.flat
        flat.restore()
        flat.module.load_state_dict(self.model.state_dict())
        flat.remember()

    def _store_weights(self) -> None:
        self._problem.flat.write(self._federation.weights)
        self.model.load_state_dict(self._problem.flat.module.state_dict())

    def _progress(self, sink: Callable[[str], object] | None = None) -> Progress:
        """Return what says how training goes: to a sink, to a logger that is heard, or shown."""
        label = f"{self.dataset_name} {self._run_config.mode}"
        heard = self.logger.isEnabledFor(logging.INFO) and self.logger.hasHandlers()
        if sink is None and not self.verbose:
            sink = _nowhere
        elif sink is None and (heard or self._own_logger):
            sink = partial(self.logger.info, "%s")
        return Progress(label, every_round=True, sink=sink)

    def _settings_in_words(self) -> list[str]:
        """Return the settings that the QuAP-FL architecture document lists (section v1.1.2).

        After them who will join, and what the noise will do.
        """
        config = self._run_config
        words = (
            f"mode: {config.mode}, num_rounds: {config.num_rounds}, "
            f"learning_rate: {config.learning_rate}, max_clip: {config.max_clip}, "
            f"max_agg_norm: {config.max_agg_norm}, epsilon_total: {config.epsilon}, "
            f"epsilon_base: {config.epsilon / config.num_rounds:.6f}"
        )
        problem = dataclasses.replace(self._problem, selector=self._selector)
        return [words, *preflight_lines(config, problem)]


class LocalUpdate(np.ndarray[Any, np.dtype[Any]]):
    """A client's vector, as the QuAP-FL architecture document's loop takes it, and its loss.

    To numpy it is the vector.  It unpacks into (vector, loss), which is what the code published
    with the document returns; arrays that are computed from it are plain vectors.
    """

    loss: float | None = None

    @classmethod
    def of(cls, vector: NDArray[Any], loss: float) -> LocalUpdate:
        """Return the vector with its loss."""
        made = vector.view(cls)
        made.loss = loss
        return made

    def __iter__(self) -> Iterator[Any]:
        if self.loss is None:
            return super().__iter__()
        return iter((np.asarray(self), self.loss))


class _Settings(dict[str, Any]):
    """Settings that were used: changing them would change nothing, and is refused."""

    def _refuse(self, *changes: object, **more: object) -> NoReturn:
        raise InvalidValueError(
            "server.config cannot be changed: the server was made from it. Make another with "
            "QuAPFLServer(..., config={...})"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class History(dict[str, list[Any]]):
    """What a training recorded, in the lists of the API document, with what may be claimed."""

    def __init__(self, lists: Mapping[str, list[Any]], statement: Statement) -> None:
        super().__init__(lists)
        self.statement = statement


def _nowhere(text: str) -> None:
    """Say nothing."""


class _OwnEvaluation:
    """What an experiment is about, with a subclass's `evaluate`."""

    def __init__(self, server: QuAPFLServer, problem: FederatedTask) -> None:
        self._server, self._problem = server, problem

    @property
    def flat(self) -> FlatModel:
        return self._problem.flat

    def whole_model(self) -> nn.Module:
        return self._problem.whole_model()

    def evaluate(self) -> dict[str, float]:
        self._server._store_weights()
        accuracy, loss = self._server.evaluate()
        return {"test_accuracy": accuracy, "test_loss": loss}

    def metadata(self) -> dict[str, Any]:
        return self._problem.metadata()


class _OwnTraining(Engine):
    """An engine that asks a subclass's `local_training`."""

    def __init__(self, server: QuAPFLServer) -> None:
        self._server = server

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        server = self._server
        scale = learning_rate if server._divides_by_rate else 1.0
        for client in cohort:
            result = server.local_training(int(client), round_index)
            # In the QuAP-FL architecture document it returns the vector alone.
            pair = isinstance(result, tuple)
            vector, loss = result if pair else (result, getattr(result, "loss", None))
            loss = math.nan if loss is None else loss
            delta = torch.as_tensor(vector).to(start.device, start.dtype) * scale
            if delta.shape != start.shape:
                raise InvalidValueError(
                    f"local_training must return a vector of shape {tuple(start.shape)}, "
                    f"not {tuple(delta.shape)}"
                )
            yield ClientUpdate(int(client), delta, len(server.client_indices[int(client)]), loss)

    def close(self) -> None:
        self._server._engine.close()


class _OwnUpdate:
    """A server step that asks a subclass's `update_global_model`."""

    def __init__(self, server: QuAPFLServer) -> None:
        self._server = server
        self.report = server._optimizer.report
        self.state = server._optimizer.state
        self.load_state = server._optimizer.load_state

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        server = self._server
        server.update_global_model(update.cpu().numpy())
        if server._federation.weights is weights:
            # The override moved the model by itself.
            server._load_model()
            return server._problem.flat.read().clone()
        return server._federation.weights


def _settings(
    given: Mapping[str, Any],
    model: nn.Module,
    num_clients: int,
    dataset_name: str,
    device: torch.device | str | None,
) -> RunConfig:
    """Translate a dictionary like `HYPERPARAMETERS` into a `RunConfig`."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    settings = settings_from_hyperparameters(
        given, num_clients=num_clients, dataset_name=dataset_name, parameter_names=names
    )
    settings.setdefault("seed", torch.initial_seed() % 2**63)
    if device is not None:
        settings["device"] = str(torch.device(device))
    return plain_config(settings)
