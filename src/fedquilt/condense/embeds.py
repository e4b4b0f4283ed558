"""What a model must offer to be a feature model, and how any model can offer it."""

from __future__ import annotations

import copy
from typing import Protocol, cast, runtime_checkable

import torch
from torch import nn

from fedquilt import validate
from fedquilt.errors import InvalidValueError


@runtime_checkable
class Embeds(Protocol):
    """A classifier that also says how it sees an image.

    `embed(x)` gives one row of features an image; calling the model gives logits or
    log-probabilities.  `embed_and_forward(x)`, where a model has it, gives both in
    one pass.
    """

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Return features, [N, D]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits or log-probabilities, [N, K]."""


class LayerEmbedding(nn.Module):
    """Any model, with the output of one of its layers as the embedding.

    Parameters
    ----------
    model
        The classifier; it is not copied.
    layer
        Name of the layer, as in `model.named_modules()`, for example "fc1".
    """

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        layers = [name for name, _ in model.named_modules() if name]
        self.layer = validate.choice("embed_layer", layer, layers)
        self.model = model

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer puts out, one row an image."""
        return self.embed_and_forward(x)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the model puts out."""
        return cast(torch.Tensor, self.model(x))

    def embed_and_forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both from one pass."""
        seen: list[torch.Tensor] = []
        hook = self.model.get_submodule(self.layer).register_forward_hook(
            # A copy: an in-place ReLU behind the layer would overwrite its output.
            lambda module, inputs, output: seen.append(_copied(output))
        )
        try:
            outputs = self.model(x)
        finally:
            hook.remove()
        if len(seen) != 1 or seen[0].ndim < 2 or len(seen[0]) != len(x):
            raise InvalidValueError(
                f"embed_layer={self.layer!r} must be called once and give one row an image"
            )
        return seen[0].flatten(1), outputs


def _copied(output: object) -> torch.Tensor:
    """Return a copy of a layer's output; what is no tensor becomes an empty one."""
    return output.clone() if isinstance(output, torch.Tensor) else torch.empty(0)


def embedding_model(model: nn.Module, layer: str | None = None) -> nn.Module:
    """Return a model that has `embed`: itself, or with the named layer as embedding."""
    if layer is not None:
        return LayerEmbedding(model, layer)
    if not isinstance(model, Embeds):
        raise InvalidValueError(
            f"model of type {type(model).__name__} has no embed(x): name the layer whose output "
            "is the embedding (embed_layer)"
        )
    return model


def embed_and_forward(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings and scores, in one pass where the model can."""
    both = getattr(model, "embed_and_forward", None)
    if both is not None:
        embedded, scores = both(x)
        return embedded, scores
    return cast(Embeds, model).embed(x), model(x)


def frozen_copy(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode whose weights ask for no gradient."""
    return copy.deepcopy(model).eval().requires_grad_(False)
