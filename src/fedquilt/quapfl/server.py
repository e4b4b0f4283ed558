"""`QuAPFLServer` of the QuAP-FL API document, with its names and methods.

A thin object over the round that everything else uses: its methods are the steps of the
QuAP-FL architecture document, so a subclass that overrides one changes that step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.assemble import Problem, build_federation, problem_from
from fedquilt.assemble_mechanism import make_allocator, make_clipper
from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator
from fedquilt.config import HYPERPARAMETERS, TARGET_ACCURACY, RunConfig, plain_config
from fedquilt.config.documents import settings_from_hyperparameters
from fedquilt.experiment import Experiment
from fedquilt.learning import ClientUpdate, FlatModel, evaluate
from fedquilt.population import Availability, ParticipationTracker, propensities
from fedquilt.population.participation import checked_ids
from fedquilt.population.selection import Cohort, CohortSelector
from fedquilt.privacy.clip import FixedClipper, QuantileClipper, norm
from fedquilt.privacy.policies import AdaptivePrivacyAllocator
from fedquilt.privacy.quap_mechanisms import Clipper, LayerNoise, QuapMechanism
from fedquilt.record import build_history

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
        Receives one line per evaluation.

    Without a `seed` in `config` the run follows `torch.manual_seed`.
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
    ) -> None:
        self.model = model
        self.dataset_name = dataset_name
        self.client_indices = client_indices
        self.logger = logger if logger is not None else logging.getLogger("fedquilt")
        self.config: dict[str, Any] = {**HYPERPARAMETERS, **(config or {})}
        settings = _settings(config or {}, model, len(client_indices), dataset_name, device)
        self._run_config, self._problem = problem_from(
            settings, model, train_dataset, test_dataset, client_indices
        )
        self._federation = build_federation(self._run_config, self._problem)
        self._engine = self._federation.method.engine
        self._optimizer = self._federation.method.server
        self._selector = self._make_selector()
        self._training = False
        self.tracker = self._federation.tracker
        self.history: dict[str, list[Any]] = build_history([])
        self._adopt_mechanism()
        self._log_settings()

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

    def train(self) -> dict[str, list[Any]]:
        """Run all rounds from the model's present weights and return the history."""
        self._take_weights()
        self._plug_in()
        judged = type(self).evaluate is not QuAPFLServer.evaluate
        subject = _OwnEvaluation(self, self._problem) if judged else self._problem
        experiment = Experiment(self._run_config, subject, self._federation, observer=self._observe)
        self._training = True
        try:
            experiment.run()
        finally:
            self._training = False
            self._store_weights()
            self.history = build_history(experiment.lines)
        return self.history

    def _plug_in(self) -> None:
        """Give the round this server's parts, and the steps that a subclass overrides."""
        federation, kind = self._federation, type(self)
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
        self._problem.flat.module.load_state_dict(self.model.state_dict())
        return evaluate(self._problem.flat.module, *self._problem.test_data)

    def select_clients(self, round_t: int) -> list[int]:
        """Step 1: return the cohort of a round."""
        return [int(client) for client in self._selector.select(round_t).clients]

    def _cohort(self, round_t: int, allowed: NDArray[np.bool_] | None) -> Cohort:
        """Return the cohort of `select_clients`; `model` has the current global weights."""
        self._store_weights()
        clients = checked_ids(self.select_clients(round_t), len(self.client_indices))
        return Cohort(clients, clients)

    def local_training(self, client_id: int, round_t: int) -> tuple[NDArray[Any], float]:
        """Step 3: train one client from the global model; return (vector, mean loss).

        The vector is local - global weights, divided by the learning rate when
        the QuAP-FL paper's algorithm runs.
        """
        checks.integer("client_id", client_id, at_least=0, at_most=len(self.client_indices) - 1)
        self._take_weights()
        rate = self._run_config.learning_rate_at(round_t)
        update = next(
            iter(self._engine.train(self._federation.weights, [client_id], round_t, rate))
        )
        scale = rate if self._divides_by_rate else 1.0
        return (update.delta / scale).cpu().numpy(), update.loss

    def update_global_model(self, aggregated_gradient: NDArray[Any] | torch.Tensor) -> None:
        """Step 8: add a mean update to the model, limited to max_agg_norm.

        An update with a NaN or Inf entry is skipped.
        """
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
            self._problem.flat.module.load_state_dict(self.model.state_dict())
            self._federation.weights = self._problem.flat.read().clone()

    def _store_weights(self) -> None:
        self._problem.flat.write(self._federation.weights)
        self.model.load_state_dict(self._problem.flat.module.state_dict())

    def _observe(self, config: RunConfig, line: dict[str, Any]) -> None:
        if "test_accuracy" in line:
            self.logger.info(
                "round %d of %d: accuracy %.4f, loss %.4f",
                line["round"] + 1,
                config.num_rounds,
                line["test_accuracy"],
                line["test_loss"],
            )

    def _log_settings(self) -> None:
        """Log the settings that the QuAP-FL architecture document lists (section v1.1.2)."""
        config = self._run_config
        for key in ("mode", "learning_rate", "max_clip", "epsilon", "max_agg_norm"):
            self.logger.info("%s: %s", key, getattr(config, key))
        self.logger.info("epsilon_base: %.6f", config.epsilon / config.num_rounds)


class _OwnEvaluation:
    """What an experiment is about, with a subclass's `evaluate`."""

    def __init__(self, server: QuAPFLServer, problem: Problem) -> None:
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


class _OwnTraining:
    """An engine that asks a subclass's `local_training`."""

    def __init__(self, server: QuAPFLServer) -> None:
        self._server = server

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        server = self._server
        scale = learning_rate if server._divides_by_rate else 1.0
        for client in cohort:
            result = server.local_training(int(client), round_index)
            # In the QuAP-FL architecture document it returns the vector alone.
            vector, loss = result if isinstance(result, tuple) else (result, math.nan)
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
            server._problem.flat.module.load_state_dict(server.model.state_dict())
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
        chosen = torch.device(device)
        if chosen.index:
            raise InvalidValueError(f"device={str(device)!r} must be the first of its kind")
        settings["device"] = chosen.type
    return plain_config(settings)
