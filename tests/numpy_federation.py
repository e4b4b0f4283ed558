"""A federation in plain numpy, written from the documents' formulas.

It knows nothing of the package: a three-layer network with its own backward pass,
full-batch gradient descent, and the rounds of the four modes.  Tests compare whole
runs with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray
LAYERS = ("fc1", "mid", "fc2")
NAMES = tuple(f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias"))


@dataclass
class Settings:
    """What the runs under test and this one share."""

    mode: str
    num_rounds: int
    learning_rate: float = 0.3
    lr_decay: float = 0.9
    local_epochs: int = 2
    fedprox_mu: float = 0.0
    epsilon: float = 400.0
    delta: float = 1e-5
    budget_alpha: float = 0.7
    budget_beta: float = 3.0
    warmup_rounds: int = 0
    participation_ema: float | None = None
    clip_norm: float = 0.8
    clip_quantile: float = 0.6
    clip_momentum: float = 0.7
    min_clip: float = 0.05
    max_clip: float = 5.0
    max_agg_norm: float = 10000.0
    noise_layers: tuple[str, ...] = ("fc1", "fc2")
    noise_seed: int = 17
    initial_clip: float | None = None


@dataclass
class Outcome:
    """What a run shows."""

    weights: Array
    clip_values: list[float | None] = field(default_factory=list)
    noise_levels: list[float | None] = field(default_factory=list)
    privacy_budgets: list[float | None] = field(default_factory=list)
    noise_norms: list[float | None] = field(default_factory=list)
    signal_norms: list[float | None] = field(default_factory=list)
    nominal: Array = field(default_factory=lambda: np.zeros(0))


class Net:
    """tanh network with the parameters fc1, mid, fc2, laid out one after the other."""

    def __init__(self, sizes: tuple[int, int, int, int]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        for layer, before, after in zip(LAYERS, sizes[:-1], sizes[1:], strict=True):
            self.shapes[f"{layer}.weight"] = (after, before)
            self.shapes[f"{layer}.bias"] = (after,)
        stops = np.cumsum([math.prod(shape) for shape in self.shapes.values()])
        starts = [0, *stops[:-1]]
        self.places = {
            name: slice(int(a), int(b)) for name, a, b in zip(NAMES, starts, stops, strict=True)
        }
        self.size = int(stops[-1])

    def split(self, vector: Array) -> dict[str, Array]:
        return {name: vector[self.places[name]].reshape(self.shapes[name]) for name in NAMES}

    def covered(self, layers: tuple[str, ...]) -> Array:
        """Return the coordinates of some layers, ascending."""
        names = [name for name in NAMES if layers == ("all",) or name.split(".")[0] in layers]
        return np.concatenate([np.arange(self.size)[self.places[name]] for name in names])

    def gradient(self, vector: Array, x: Array, y: Array) -> Array:
        """Return the gradient of the mean cross-entropy, by hand."""
        p = self.split(vector)
        a1 = np.tanh(x @ p["fc1.weight"].T + p["fc1.bias"])
        a2 = np.tanh(a1 @ p["mid.weight"].T + p["mid.bias"])
        logits = a2 @ p["fc2.weight"].T + p["fc2.bias"]
        odds = np.exp(logits - logits.max(1, keepdims=True))
        error = odds / odds.sum(1, keepdims=True)
        error[np.arange(len(y)), y] -= 1
        error /= len(y)
        back2 = (error @ p["fc2.weight"]) * (1 - a2**2)
        back1 = (back2 @ p["mid.weight"]) * (1 - a1**2)
        parts = {
            "fc1.weight": back1.T @ x,
            "fc1.bias": back1.sum(0),
            "mid.weight": back2.T @ a1,
            "mid.bias": back2.sum(0),
            "fc2.weight": error.T @ a2,
            "fc2.bias": error.sum(0),
        }
        return np.concatenate([parts[name].ravel() for name in NAMES])


class NumpyFederation:
    """The rounds of the documents, one list of cohorts at a time."""

    def __init__(
        self, net: Net, clients: list[tuple[Array, Array]], settings: Settings, broken: set[int]
    ) -> None:
        self.net = net
        self.clients = clients
        self.settings = settings
        self.broken = broken  # clients whose training ends in NaN
        self.joins = np.zeros(len(clients))
        self.moving = np.zeros(len(clients))
        self.rounds = 0
        self.clip: float | None = settings.initial_clip

    def run(self, weights: Array, cohorts: list[list[int]]) -> Outcome:
        outcome = Outcome(weights.copy(), nominal=np.zeros(len(self.clients)))
        for index, cohort in enumerate(cohorts):
            self._count(cohort)
            if cohort:
                self._round(outcome, index, cohort)
            else:
                for series in vars(outcome).values():
                    if isinstance(series, list):
                        series.append(None)
        return outcome

    def _count(self, cohort: list[int]) -> None:
        self.rounds += 1
        joined = np.isin(np.arange(len(self.clients)), cohort)
        self.joins += joined
        eta = self.settings.participation_ema or 0.0
        self.moving = eta * joined + (1 - eta) * self.moving

    def _rate(self, client: int) -> float:
        if self.settings.participation_ema is not None:
            return float(self.moving[client])
        return float(self.joins[client] / self.rounds)

    def _delta(self, weights: Array, client: int, lr: float) -> Array:
        x, y = self.clients[client]
        local = weights.copy()
        for _ in range(self.settings.local_epochs):
            pull = self.settings.fedprox_mu * (local - weights)
            local -= lr * (self.net.gradient(local, x, y) + pull)
        return local - weights

    def _budget(self, index: int, rate: float) -> float:
        s = self.settings
        base = s.epsilon / s.num_rounds
        if index < s.warmup_rounds or s.mode == "fixed_dp":
            return base
        return base * (1 + s.budget_alpha * math.exp(-s.budget_beta * rate))

    def _next_clip(self, norms: list[float]) -> float:
        s = self.settings
        if s.mode == "fixed_dp":
            return s.clip_norm
        if not norms:
            return s.min_clip if self.clip is None else self.clip
        target = float(np.clip(np.quantile(norms, s.clip_quantile), s.min_clip, s.max_clip))
        old = self.clip
        self.clip = (
            target if old is None else s.clip_momentum * old + (1 - s.clip_momentum) * target
        )
        return self.clip

    def _round(self, outcome: Outcome, index: int, cohort: list[int]) -> None:
        s = self.settings
        lr = s.learning_rate * s.lr_decay**index
        deltas = {c: self._delta(outcome.weights, c, lr) for c in cohort if c not in self.broken}
        if s.mode == "fedavg":
            sizes = {c: len(self.clients[c][1]) for c in deltas}
            if deltas:
                total = sum(sizes[c] * deltas[c] for c in deltas)
                outcome.weights = outcome.weights + total / sum(sizes.values())
            self._note(outcome, None, None, None, None, None)
        elif s.mode == "quap_fl_client":
            self._client_noise(outcome, index, cohort, deltas)
        else:
            self._layer_noise(outcome, index, cohort, deltas, lr)

    def _normal(self, index: int) -> np.random.Generator:
        sequence = np.random.SeedSequence(self.settings.noise_seed, spawn_key=(index,))
        return np.random.Generator(np.random.Philox(sequence))

    def _layer_noise(
        self, outcome: Outcome, index: int, cohort: list[int], deltas: dict[int, Array], lr: float
    ) -> None:
        s, m = self.settings, len(cohort)
        part = self.net.covered(s.noise_layers)
        raw = {client: delta / lr for client, delta in deltas.items()}
        bound = self._next_clip([float(np.linalg.norm(raw[c][part])) for c in raw])
        mean = np.zeros(self.net.size)
        for vector in raw.values():
            vector[part] *= min(1.0, bound / np.linalg.norm(vector[part]))
            mean += vector / m
        epsilon = self._budget(index, float(np.mean([self._rate(c) for c in cohort])))
        sigma = bound / m * math.sqrt(2 * math.log(1.25 / s.delta)) / epsilon
        noise = sigma * self._normal(index).standard_normal(len(part))
        signal = np.linalg.norm(mean)
        mean[part] += noise
        scale = self._scale(mean)
        outcome.weights = outcome.weights + lr * scale * mean
        outcome.nominal[cohort] += epsilon
        applied = (np.linalg.norm(noise) * scale, signal * scale)
        self._note(outcome, bound, sigma * scale, epsilon, *applied)

    def _client_noise(
        self, outcome: Outcome, index: int, cohort: list[int], deltas: dict[int, Array]
    ) -> None:
        s, m = self.settings, len(cohort)
        bound = self._next_clip([float(np.linalg.norm(delta)) for delta in deltas.values()])
        generator = self._normal(index)
        signal, noise = np.zeros(self.net.size), np.zeros(self.net.size)
        epsilons, variance = [], 0.0
        for client in cohort:
            delta = deltas.get(client, np.zeros(self.net.size))
            length = np.linalg.norm(delta)
            signal += delta * (min(1.0, bound / length) if length else 1.0) / m
            epsilons.append(self._budget(index, self._rate(client)))
            sigma = bound * math.sqrt(2 * math.log(1.25 / s.delta)) / epsilons[-1]
            noise += sigma * generator.standard_normal(self.net.size) / m
            variance += sigma**2
            outcome.nominal[client] += epsilons[-1]
        scale = self._scale(signal + noise)
        outcome.weights = outcome.weights + scale * (signal + noise)
        std = math.sqrt(variance) / m * scale
        budget = float(np.mean(epsilons))
        applied = (np.linalg.norm(noise) * scale, np.linalg.norm(signal) * scale)
        self._note(outcome, bound, std, budget, *applied)

    def _scale(self, mean: Array) -> float:
        """Return what max_agg_norm leaves of a noised mean, noise and signal alike."""
        length = float(np.linalg.norm(mean))
        return min(1.0, self.settings.max_agg_norm / length) if length else 1.0

    @staticmethod
    def _note(outcome: Outcome, *values: Any) -> None:
        series = (
            outcome.clip_values,
            outcome.noise_levels,
            outcome.privacy_budgets,
            outcome.noise_norms,
            outcome.signal_norms,
        )
        for items, value in zip(series, values, strict=True):
            items.append(None if value is None else float(value))
