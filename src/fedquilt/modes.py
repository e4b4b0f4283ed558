"""Which parts each mode is made of.

| mode | clip | noise | weights | may claim |
|---|---|---|---|---|
| fedavg | none | none | examples | nothing |
| fixed_dp | fixed, covered slice | once on the mean, flat budget | equal | a bound if all is covered |
| quap_fl | raw percentile, covered slice | once on the mean, cohort's budget | equal | nothing |
| quap_fl_client | raw percentile, whole vector | on each client, its own budget | equal | nothing |
"""

from __future__ import annotations

from fedquilt.config import RunConfig
from fedquilt.errors import InvalidValueError
from fedquilt.learning import FlatModel
from fedquilt.privacy.budget import AdaptivePrivacyAllocator
from fedquilt.privacy.clip import FixedClipper, QuantileClipper
from fedquilt.privacy.coverage import Coverage
from fedquilt.privacy.mechanism import Mechanism, NoPrivacy
from fedquilt.privacy.noise import noise_source
from fedquilt.privacy.seed_mechanisms import ClientNoise, LayerNoise


def make_mechanism(config: RunConfig, flat: FlatModel, num_clients: int) -> Mechanism:
    """Build the mechanism of `config.mode` for a model's layout."""
    if config.mode == "fedavg":
        return NoPrivacy(flat.names, config.delta)
    refuse_buffers(flat, config.mode)
    patterns = ("all",) if config.mode == "quap_fl_client" else config.noise_layer_patterns
    kind = ClientNoise if config.mode == "quap_fl_client" else LayerNoise
    fixed = config.mode == "fixed_dp"
    return kind(
        make_allocator(config),
        FixedClipper(config.clip_norm) if fixed else make_clipper(config),
        make_coverage(flat, patterns),
        noise_source(config.noise_seed),
        num_clients=num_clients,
        warmup_rounds=config.warmup_rounds,
        max_agg_norm=config.max_agg_norm,
        clip_is_public=fixed,
    )


def make_allocator(config: RunConfig) -> AdaptivePrivacyAllocator:
    """Build the budget rule; `fixed_dp` has a flat one (alpha = 0)."""
    return AdaptivePrivacyAllocator(
        epsilon_base=config.epsilon / config.num_rounds,
        alpha=0.0 if config.mode == "fixed_dp" else config.budget_alpha,
        beta=config.budget_beta,
        delta=config.delta,
    )


def make_clipper(config: RunConfig) -> QuantileClipper:
    """Build the paper's clip rule; its first bound is the first round's target."""
    return QuantileClipper(
        quantile=config.clip_quantile,
        momentum=config.clip_momentum,
        min_clip=config.min_clip,
        max_clip=config.max_clip,
    )


def make_coverage(flat: FlatModel, patterns: tuple[str, ...]) -> Coverage:
    """Cover the parameters that match the patterns."""
    tensors = [(segment.name, segment.start, segment.stop) for segment in flat.segments]
    chosen = [segment.name for segment in flat.matching(patterns)]
    return Coverage.make(flat.vector.numel(), tensors, chosen)


def refuse_buffers(flat: FlatModel, mode: str) -> None:
    """Refuse statistics that training moves, such as BatchNorm's, outside fedavg.

    They would be one more release; clipping and noising them as if they were
    weights makes no sense, and leaving them behind would be silent.
    """
    if flat.buffer_names:
        raise InvalidValueError(
            f"mode={mode!r} must not be used with buffers that training changes "
            f"({', '.join(flat.buffer_names)}); use GroupNorm instead of BatchNorm, or fedavg"
        )
