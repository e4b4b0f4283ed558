"""Feature models: the embeddings that clients and server compute, drawn for each round.

| kind | what travels to a client | source |
|---|---|---|
| global | the current model | FedNum document, section 1 |
| random_pool | one seed; `count` freshly initialised models a round | Zhao and Bilen 2023 (DM) |
| perturbed | the current model and one seed; `count` models at distance `rho` from it | FedDM |
| trained_pool | a few models that the server has trained on its images | Zhao et al. 2023 (IDM) |

In the first round of a trained pool there are no images yet, and it is a random one.

Client and server must see the same models, so both build them here from the same
weights and seeds.  Weights are drawn on the CPU: every device gets the same ones.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
from torch import nn

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import torch_seed
from fedquilt.config.choices import FEATURE_MODELS


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
        self.layer = checks.choice("embed_layer", layer, layers)
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


class TwoMoments(nn.Module):
    """A model whose embedding is followed by its squares.

    Means over groups are then the first two moments of every feature, and groups of many
    clients still merge by their counts.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Return features and their squares, [N, 2 D]."""
        return _with_squares(cast(Embeds, self.model).embed(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the model puts out."""
        return cast(torch.Tensor, self.model(x))

    def embed_and_forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both from one pass."""
        embedded, scores = embed_and_forward(self.model, x)
        return _with_squares(embedded), scores


class HalfPrecision(nn.Module):
    """A model that computes in bfloat16 and gives float32; for GPUs, where that is faster."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.to(torch.bfloat16)
        for part in self.model.modules():
            for name, layer in list(part.named_children()):
                if type(layer) is nn.AvgPool2d and _halves(layer):
                    setattr(part, name, Halving())

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Return features, [N, D]."""
        return cast(Embeds, self.model).embed(x.to(torch.bfloat16)).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the model puts out."""
        return cast(torch.Tensor, self.model(x.to(torch.bfloat16))).float()

    def embed_and_forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both from one pass."""
        embedded, scores = embed_and_forward(self.model, x.to(torch.bfloat16))
        return embedded.float(), scores.float()


class Halving(nn.Module):
    """Means over 2 x 2 pixels, whose gradient is one pass; a pooling layer's takes several."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, C, H // 2, W // 2]; a last row or column without a second is left out."""
        height, width = (side // 2 for side in x.shape[2:])
        pairs = x[:, :, : 2 * height, : 2 * width]
        return pairs.reshape(*x.shape[:2], height, 2, width, 2).mean(dim=(3, 5))


def _halves(layer: nn.AvgPool2d) -> bool:
    sizes = (layer.kernel_size, layer.stride, layer.padding)
    plain = all(size in (want, (want, want)) for size, want in zip(sizes, (2, 2, 0), strict=True))
    return plain and not layer.ceil_mode and layer.divisor_override is None


def _with_squares(embedded: torch.Tensor) -> torch.Tensor:
    return torch.cat([embedded, embedded.square()], dim=1)


def frozen_copy(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode whose weights ask for no gradient."""
    return copy.deepcopy(model).eval().requires_grad_(False)


SEED_BYTES = 8


@dataclass(frozen=True)
class FeatureModels:
    """How the feature models of a round come from the current model and a seed.

    Parameters
    ----------
    kind
        One of `FEATURE_MODELS`.
    count
        Models a round (`model_n`); "global" has one.
    rho
        Radius of "perturbed": w' = w + rho g / |g|, g Gaussian over all trainable
        parameters.  (The reference draws min(1, rho / |g|) g; with more than a few
        dozen parameters |g| is larger than rho, and the two are the same.)
    seed
        Seed of the run.
    """

    kind: str = "random_pool"
    count: int = 1
    rho: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.choice("feature_model", self.kind, FEATURE_MODELS)
        checks.integer("model_n", self.count, at_least=1)
        checks.number("rho", self.rho, at_least=0)
        if self.kind == "global" and self.count != 1:
            raise InvalidValueError(
                f"model_n={self.count} must be 1 with feature_model='global': there is one"
            )

    def build(self, model: nn.Module, round_index: int, number: int) -> nn.Module:
        """Return feature model `number` of a round as a frozen copy."""
        if self.kind == "global":
            return frozen_copy(model)
        seed = torch_seed(self.seed, "feature-model", round_index, number)
        if self.kind in ("random_pool", "trained_pool"):
            return frozen_copy(reinitialised(model, seed))
        return frozen_copy(perturbed(model, self.rho, seed))

    def bytes_down(self, model: nn.Module) -> int:
        """Return what one client receives in a round: the weights, a seed, or both."""
        weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
        if self.kind in ("random_pool", "trained_pool"):
            return SEED_BYTES
        return int(weights) + (SEED_BYTES if self.kind == "perturbed" else 0)


def reinitialised(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy whose layers have drawn their weights anew from `seed`."""
    fresh = copy.deepcopy(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    fresh.cpu()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for name, module in fresh.named_modules():
            # Norms without scale have no parameters, but statistics that must not travel.
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            elif any(True for _ in module.parameters(recurse=False)):
                raise InvalidValueError(
                    f"feature_model='random_pool' needs layers that can draw their weights anew; "
                    f"{name or type(module).__name__!r} has no reset_parameters()"
                )
    return fresh.to(device)


def perturbed(model: nn.Module, rho: float, seed: int) -> nn.Module:
    """Return a copy at distance `rho` in a direction drawn from `seed`."""
    moved = copy.deepcopy(model)
    source = torch.Generator().manual_seed(seed)
    parameters = [p for p in moved.parameters() if p.requires_grad]
    directions = [torch.randn(p.shape, generator=source, dtype=torch.float64) for p in parameters]
    length = sum(float(d.square().sum()) for d in directions) ** 0.5
    with torch.no_grad():
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.add_((direction * (rho / length)).to(parameter))
    return moved
