"""The keywords of `fedquilt.run` with their types, for editors and type checkers.

What each is stands at its declaration in `fedquilt.config.run` and `fedquilt.config.condense`,
and in `help(fedquilt.run)`; a test compares names and types with the declarations.  Options of
named data sets (`partition`, `data_dir`, ...) say nothing of your own data and are left out.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

from fedquilt.config.condense import ALIASES, CondenseConfig
from fedquilt.config.modes import DEFAULT_MODE, MODE_TABLE, OWN_CLIENT_DEFAULTS
from fedquilt.config.run import RunConfig, option_fields
from fedquilt.config.uses import USES, uses_in_words


class RunSettings(TypedDict, total=False):
    """Settings of a run, all optional: see `RunConfig`."""

    dataset: str
    num_clients: int | None
    clients_per_round: int | float
    availability: str
    selection: str
    allow_overlap: bool
    mode: str
    trainable: str
    num_rounds: int
    local_epochs: int
    batch_size: int
    learning_rate: float
    lr_decay: float
    lr_schedule: str
    lr_step_rounds: int
    lr_warmup_rounds: int
    ignore_index: int
    momentum: float
    weight_decay: float
    gradient_clip: float | None
    fedprox_mu: float
    server_optimizer: str
    server_lr: float | None
    server_momentum: float
    tiers: str
    whole: str | None
    absent_classes: str
    fjord_alpha: float
    fjord_temperature: float
    depthfl_rampup: int
    norm_statistics: str
    epsilon: float
    delta: float
    adjacency: str
    budget_alpha: float
    budget_beta: float
    warmup_rounds: int
    participation_ema: float | None
    clip_norm: float
    clip_quantile: float
    clip_momentum: float
    min_clip: float
    max_clip: float
    max_agg_norm: float
    noise_layers: str
    noise_seed: int | None
    policy: str
    max_joins: int | None
    clipping: str
    private_quantile: float
    private_quantile_lr: float
    clip_cap: float
    normalise_updates: bool
    noise_bands: int
    amplification: bool
    ledger: str | None
    population: str | None
    new_population: bool
    allowance: float | None
    on_short: str
    spend_everything: bool
    client_test_fraction: float
    evaluation_share: float
    eval_every: int
    target_accuracy: float | None
    early_stopping: bool
    seed: int
    device: str
    precision: str
    devices: str | None


class Settings(RunSettings, total=False):
    """The same and those of a condensation (`method="condense"`): see `CondenseConfig`."""

    embed_layer: str | None
    model_epochs: int
    model_lr: float
    model_weight_decay: float
    model_schedule: str
    cutmix: float
    model_families: int
    avg_num: int
    min_group: int
    max_samples: int
    feature_model: str
    model_n: int | None
    trained_n: int
    pool_epochs: int
    moments: int
    row_bits: int
    rho: float
    augmentation: str
    ipc: int
    tiles: int
    init_method: str
    dc_iterations: int
    batch_num: int | None
    image_optimizer: str
    image_lr: float | None
    image_momentum: float
    logit_loss_type: str
    loss_computation: str
    discrimination: float
    front: str
    mean_rounds: int | None
    head_step: float
    drawings: int
    split_file: str | None
    pixel_mean: str | None
    pixel_std: str | None
    communication_rounds: int
    join_ratio: int | float
    eval_gap: int


def shows_settings(function: Callable[..., Any]) -> None:
    """Give a function with `**settings` a signature and a docstring that name every one."""
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {p.name for p in named}
    more = [p for p in _parameters() if p.name not in taken]
    function.__signature__ = signature.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
    described = "\n".join(_described(name) for name in RunSettings.__annotations__)
    function.__doc__ = (
        f"{inspect.cleandoc(function.__doc__ or '')}\n\nSettings\n--------\n{described}"
    )


def _parameters() -> Iterator[inspect.Parameter]:
    kinds = {**RunSettings.__annotations__, **Settings.__annotations__}
    for name, kind in kinds.items():
        annotation = getattr(kind, "__forward_arg__", kind)
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=_default(name), annotation=annotation
        )


def _described(name: str) -> str:
    item = option_fields(RunConfig)[name]
    choices = item.metadata["rule"].get("choices")
    words = item.metadata["help"] + (f" One of {', '.join(choices)}." if choices else "")
    only = f" Only for {uses_in_words(name)}." if name in USES else ""
    return f"{name} : {item.type}, default {_default(name)!r}\n    {words}{only}"


def _default(name: str) -> Any:
    """Return what an option is in the default mode, with your own model and clients."""
    row = MODE_TABLE[DEFAULT_MODE]
    usual = {**row.defaults, **row.own_defaults, **OWN_CLIENT_DEFAULTS}
    if name in usual:
        return usual[name]
    fields = {**option_fields(CondenseConfig), **option_fields(RunConfig)}
    default = fields[ALIASES.get(name, name)].default
    return None if default is dataclasses.MISSING else default
