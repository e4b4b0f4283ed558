"""How pixels became the inputs of a model."""

from __future__ import annotations

from fedquilt.config import RunConfig
from fedquilt.config.condense import CondenseConfig
from fedquilt.data import DATASETS


def normalisation(config: RunConfig, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation that took pixels in [0, 1] to inputs.

    What the configuration says, else what is known of its data set, else (0, 1).
    """
    given = config.pixels(channels) if isinstance(config, CondenseConfig) else None
    if given is not None:
        return given
    spec = DATASETS.get(config.dataset)
    if spec is None or len(spec.mean) != channels:
        return (0.0,) * channels, (1.0,) * channels
    return spec.mean, spec.std
