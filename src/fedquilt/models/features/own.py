"""Any module as a frozen front: a pretrained network that a user brings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn

from fedquilt.common.errors import InvalidValueError

# What models of the usual libraries call the features of their output, the best one first.
_NAMED = ("pooler_output", "last_hidden_state", "image_embeds", "logits")


class OwnFront(nn.Module):
    """A frozen copy of a module, which says what a sample is like; for `FeatureModel`.

    It stays in evaluation mode, trains nothing, and nothing of it is in a state dict: a
    run's files hold the head alone, and whoever loads them brings the same module.

    The module must be public: no client's data may have had a part in it.  Name what it was
    trained on in `FeatureModel(..., chosen_on=("ImageNet-1k",))`, and the statement says it.

    Parameters
    ----------
    module : nn.Module
        For example `timm.create_model(..., num_classes=0)`, or a model of `transformers`
        loaded from a folder.
    input_shape : sequence of int
        Of one sample, without the batch.
    output : callable, optional
        Picks the features [N, ...] from what the module returns.  By default a tensor is
        taken as it is, of an output object `pooler_output` or the mean of
        `last_hidden_state`, and of a tuple its first entry.
    dtype : torch.dtype
        Of a sample: torch.int64 for token ids.
    """

    def __init__(
        self,
        module: nn.Module,
        input_shape: Sequence[int],
        *,
        output: Callable[[Any], torch.Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        held = copy.deepcopy(module).eval().requires_grad_(False)
        self._held = (held,)  # in a tuple: torch registers no module there
        self._output = output
        self.num_features = 0
        sample = torch.zeros(3, *input_shape)
        if dtype.is_floating_point:
            sample = torch.randn(sample.shape, generator=torch.Generator().manual_seed(0))
        first = next(held.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        self._try(sample.to(device=device, dtype=dtype))

    def _try(self, sample: torch.Tensor) -> None:
        """Count the features, and refuse a module that mixes the samples of a batch."""
        features = self(sample)
        if features.dim() != 2 or features.shape[0] != len(sample):
            raise InvalidValueError(
                f"front={type(self._held[0]).__name__} must return one row of features a sample; "
                f"for {len(sample)} samples it returns shape {tuple(features.shape)}"
            )
        alone = self(torch.cat([sample[:1]] * len(sample)))[:1]
        if not torch.allclose(alone, features[:1], rtol=1e-3, atol=1e-5):
            raise InvalidValueError(
                f"front={type(self._held[0]).__name__} must say the same of a sample whatever "
                "stands beside it; its output depends on the other samples of the batch"
            )
        self.num_features = int(features.shape[1])

    @torch.no_grad()
    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the features of each sample, [N, num_features], in float32."""
        found = self._held[0](samples)
        picked = self._output(found) if self._output is not None else _features(found)
        return picked.flatten(1).float()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move the module along with this one, also to another device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._held[0]._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, whatever is asked."""
        return super().train(False)


def _features(found: Any) -> torch.Tensor:
    """Return the features of what a model returned."""
    for name in _NAMED:
        value = getattr(found, name, None)
        if isinstance(value, torch.Tensor):
            return value.mean(dim=1) if name == "last_hidden_state" else value
    if isinstance(found, (tuple, list)) and found:
        found = found[0]
    if not isinstance(found, torch.Tensor):
        raise InvalidValueError(
            f"front returns {type(found).__name__}, which must be a tensor of features: say which "
            "part of it is, output=lambda found: ..."
        )
    return found
