"""Written by tools/keywords.py from the declarations of options; a test compares."""

from collections.abc import Iterator
from typing import TypedDict

from fedquilt.config.run import RunConfig

def keywords(config: type[RunConfig]) -> Iterator[tuple[str, str]]:
    """Yield the keywords that are options of a configuration, each with the option's name."""

class RunSettings(TypedDict, total=False):
    """Settings of a run, all optional: see `RunConfig`."""

    dataset: str
    num_clients: int | None
    allow_overlap: bool
    clients_per_round: int | float
    availability: str
    selection: str
    energy: str | None
    buffer_size: int | None
    in_flight: int | None
    device_spread: float
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
    correction: str
    feddyn_alpha: float
    server_optimizer: str
    server_lr: float | None
    server_momentum: float
    average_late: float
    personal: str
    personal_layers: str | None
    personal_epochs: int
    ditto_lambda: float
    compression: str
    compression_share: float
    aggregation: str
    byzantine_fraction: float
    attack: str
    attackers: float
    attack_strength: float | None
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
    rounds_per_release: int
    amplification: bool
    secure_aggregation: str
    least_survivors: float
    colluding_clients: int
    ledger: str | None
    population: str | None
    new_population: bool
    allowance: float | None
    if_exhausted: str
    allow_unbounded: bool
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
    feature_extractor: str
    mean_rounds: int | None
    head_step: float
    synthetic_images: int
    pixel_mean: str | None
    pixel_std: str | None
    communication_rounds: int
    join_ratio: int | float
    eval_gap: int
    on_short: str
    spend_everything: bool
    front: str
    drawings: int
