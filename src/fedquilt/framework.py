"""The seed documents' classes, under the names and with the methods they give.

`QuAPFLServer` is a thin object over the round that everything else uses: its
methods are the steps, so a subclass that overrides one changes that step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt import validate
from fedquilt.config import HYPERPARAMETERS, TARGET_ACCURACY, RunConfig, build_config
from fedquilt.errors import InvalidValueError
from fedquilt.experiment import train_rounds
from fedquilt.history import build_history
from fedquilt.learning import ClientUpdate, evaluate
from fedquilt.population import Availability, ParticipationTracker, propensities
from fedquilt.population.selection import Cohort, CohortSelector
from fedquilt.privacy.budget import AdaptivePrivacyAllocator
from fedquilt.privacy.clip import FixedClipper, QuantileClipper, norm
from fedquilt.privacy.seed_mechanisms import LayerNoise, SeedMechanism
from fedquilt.problem import build_federation, problem_from
from fedquilt.randomness import generator

__all__ = ["AdaptivePrivacyAllocator", "ParticipationTracker", "QuAPFLServer", "QuantileClipper"]

# The seed's keys on the left, the package's on the right.
_RENAMED = {
    "local_batch_size": "batch_size",
    "epsilon_total": "epsilon",
    "alpha": "budget_alpha",
    "beta": "budget_beta",
}
_SAME = (
    "num_rounds",
    "clients_per_round",
    "warmup_rounds",
    "local_epochs",
    "learning_rate",
    "lr_decay",
    "delta",
    "clip_quantile",
    "clip_momentum",
    "min_clip",
    "max_clip",
    "max_agg_norm",
)
_OTHER = (
    "num_clients",
    "participation_distribution",
    "participation_alpha",
    "participation_beta",
    "participation_mix",
    "noise_strategy",
    "critical_layers",
    "clipping_strategy",
    "initial_clip",
)
_STRATEGIES = ("layer_wise", "full", "none")


class QuAPFLServer:
    """QuAP-FL with the API document's interface.

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
        ('layer_wise', 'full', 'none') the paper's algorithm runs (mode quap_fl),
        without it the document's (mode quap_fl_client).  Keys of `RunConfig`
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
        settings = _settings(dict(config or {}), len(client_indices), dataset_name, device)
        self._run_config, self._problem = problem_from(
            settings, model, train_dataset, test_dataset, client_indices
        )
        self._federation = build_federation(self._run_config, self._problem)
        self._engine = self._federation.engine
        self._selector = self._make_selector()
        self.tracker = self._federation.tracker
        self.history: dict[str, list[Any]] = build_history([])
        self._adopt_mechanism()
        self._log_settings()

    def _adopt_mechanism(self) -> None:
        """Expose allocator and clipper under the document's names."""
        mechanism = self._federation.mechanism
        if not isinstance(mechanism, SeedMechanism):
            self.privacy_allocator = AdaptivePrivacyAllocator(
                self._run_config.epsilon / self._run_config.num_rounds
            )
            self.clipper: Any = QuantileClipper()
            return
        if self.config.get("clipping_strategy", "quantile") != "quantile":
            mechanism.clipper = FixedClipper(float(self.config.get("initial_clip", 1.0)))
            mechanism.clip_is_public = True
        elif self.config.get("initial_clip") is not None and isinstance(
            mechanism.clipper, QuantileClipper
        ):
            mechanism.clipper.initial_clip = float(self.config["initial_clip"])
            mechanism.clipper.reset()
        self.privacy_allocator = mechanism.allocator
        self.clipper = mechanism.clipper

    def train(self) -> dict[str, list[Any]]:
        """Run all rounds from the model's present weights and return the history."""
        federation = self._federation
        self._problem.flat.module.load_state_dict(self.model.state_dict())
        federation.weights = self._problem.flat.read().clone()
        federation.tracker = self.tracker
        if isinstance(federation.mechanism, SeedMechanism):
            federation.mechanism.allocator = self.privacy_allocator
            federation.mechanism.clipper = self.clipper
        federation.select = self._cohort
        if type(self).local_training is not QuAPFLServer.local_training:
            federation.engine = _OwnTraining(self)
        lines: list[dict[str, Any]] = []
        train_rounds(self._run_config, self._problem, federation, lines, observer=self._observe)
        self._store_weights()
        self.history = build_history(lines)
        return self.history

    def evaluate(self) -> tuple[float, float]:
        """Return (accuracy, loss) of the global model on the test data."""
        self._problem.flat.module.load_state_dict(self.model.state_dict())
        return evaluate(self._problem.flat.module, *self._problem.test)

    def select_clients(self, round_t: int) -> list[int]:
        """Step 1: return the cohort of a round."""
        return [int(client) for client in self._selector.select(round_t).clients]

    def _cohort(self, round_t: int, allowed: NDArray[np.bool_] | None) -> Cohort:
        clients = np.asarray(list(self.select_clients(round_t)), dtype=np.int64)
        return Cohort(clients, clients)

    def local_training(self, client_id: int, round_t: int) -> tuple[NDArray[Any], float]:
        """Step 3: train one client from the global model; return (vector, mean loss).

        The vector is local - global weights, divided by the learning rate when
        the paper's algorithm runs.
        """
        validate.integer("client_id", client_id, at_least=0, at_most=len(self.client_indices) - 1)
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
        self._federation.weights = self._federation.server.step(weights, limited)
        self._store_weights()

    def check_convergence(self, accuracy: float) -> bool:
        """Tell whether an accuracy reaches the data set's target; False without one."""
        target = TARGET_ACCURACY.get(self.dataset_name)
        return target is not None and accuracy >= target

    @property
    def _divides_by_rate(self) -> bool:
        return isinstance(self._federation.mechanism, LayerNoise)

    def _make_selector(self) -> CohortSelector:
        """Build the selector from the seed's participation keys."""
        count = len(self.client_indices)
        draws = propensities(
            count,
            generator(self._run_config.seed, "propensity"),
            float(self.config["participation_alpha"]),
            float(self.config["participation_beta"]),
        )
        mix = validate.number(
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
        """Log what the documents want seen at the start of an experiment."""
        config = self._run_config
        for key in ("mode", "learning_rate", "max_clip", "epsilon", "max_agg_norm"):
            self.logger.info("%s: %s", key, getattr(config, key))
        self.logger.info("epsilon_base: %.6f", config.epsilon / config.num_rounds)


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
            vector, loss = server.local_training(int(client), round_index)
            delta = torch.as_tensor(vector).to(start.device, start.dtype) * scale
            yield ClientUpdate(int(client), delta, len(server.client_indices[int(client)]), loss)

    def close(self) -> None:
        self._server._engine.close()


def _settings(
    given: dict[str, Any],
    num_clients: int,
    dataset_name: str,
    device: torch.device | str | None,
) -> RunConfig:
    """Translate the seed's dictionary into a `RunConfig`."""
    merged = {**HYPERPARAMETERS, **given}
    settings: dict[str, Any] = {key: merged[key] for key in _SAME if key in merged}
    settings |= {new: merged[old] for old, new in _RENAMED.items()}
    settings |= {"dataset": dataset_name, "model": "custom", "availability": "beta"}
    if "num_clients" in given:
        settings["num_clients"] = given["num_clients"]
    if "clients_per_round" not in given and merged["clients_per_round"] > num_clients:
        settings["clients_per_round"] = 0.3
    settings["availability"] = validate.choice(
        "participation_distribution",
        merged["participation_distribution"],
        ("beta", "uniform", "always"),
    )
    settings |= _mode(given)
    settings.setdefault("seed", torch.initial_seed() % 2**63)
    if device is not None:
        settings["device"] = torch.device(device).type
    known = {*_SAME, *_RENAMED, *_OTHER}
    settings |= {key: value for key, value in given.items() if key not in known}
    return build_config(settings)


def _mode(given: dict[str, Any]) -> dict[str, Any]:
    """Pick the algorithm: the paper's when a noise strategy is named, else the document's."""
    strategy = given.get("noise_strategy")
    if strategy is None:
        return {"mode": "quap_fl_client"}
    validate.choice("noise_strategy", strategy, _STRATEGIES)
    if strategy == "none":
        return {"mode": "fedavg"}
    if strategy == "full":
        return {"mode": "quap_fl", "noise_layers": "all"}
    layers = given.get("critical_layers", ["fc2"])
    # The seed matches layers by substring.
    return {"mode": "quap_fl", "noise_layers": ",".join(f"*{layer}*" for layer in layers)}
