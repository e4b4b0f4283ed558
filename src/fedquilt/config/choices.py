"""What each closed option may be, declared once.

The command line, the checks of a configuration, the leaves that build the parts and the
audit read these lists; the modes have a table of their own (`fedquilt.config.modes`).
"""

from __future__ import annotations

# Data and population
PARTITIONS = ("dirichlet", "iid", "shards", "part", "writer")
AVAILABILITIES = ("beta", "uniform", "always")
SELECTIONS = ("uniform", "weighted", "poisson", "energy")

# Training
SERVER_LEARNING_RATES = {"sgd": 1.0, "momentum": 1.0, "adam": 0.01, "yogi": 0.01}
"""The server's optimisers, each with its usual learning rate."""
SERVER_OPTIMIZERS = tuple(SERVER_LEARNING_RATES)
CORRECTIONS = ("none", "scaffold", "feddyn", "fednova")
"""What clients and server do against the drift of local steps on skewed data."""
PERSONAL = ("none", "fedper", "fedrep", "ditto", "finetune")
"""What each client has for itself (`training/personal.py`)."""
COMPRESSIONS = ("none", "bf16", "int8", "qsgd", "sign", "topk", "randomk", "ternary")
"""How updates travel (`training/compression.py`)."""
AGGREGATIONS = (
    *("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median"),
    *("norm_bound", "centred_clipping", "majority"),
)
"""What the server makes of a cohort's updates; all but the mean bound hostile clients."""
ATTACK_STRENGTHS = {
    "none": 0.0,
    "sign_flip": 5.0,
    "scaling": 10.0,
    "label_flip": 1.0,
    "backdoor": 1.0,
    "little_is_enough": 1.5,
    "inner_product": 0.5,
}
"""What hostile clients of a simulation do, each with its usual strength."""
ATTACKS = tuple(ATTACK_STRENGTHS)
COLLUDING_ATTACKS = ("little_is_enough", "inner_product")
"""Attacks whose clients look at the updates of others."""
LOSSES = (
    *("auto", "cross_entropy", "nll", "binary_cross_entropy", "mse", "mae", "huber"),
    *("token_cross_entropy", "next_token", "model"),
)
"""What clients minimise; `auto` is cross_entropy for classes and mse for numbers."""
METRICS = ("accuracy", "top<k>", "auroc", "f1", "mse", "mae", "perplexity")
"""What is measured on the test data, beside the loss."""
CLIENT_OPTIMIZERS = ("sgd", "adam", "nesterov", "adamw")
LR_SCHEDULES = ("exponential", "constant", "cosine", "step")
ENGINES = ("auto", "local", "sequential", "batched", "processes", "flower", "flower-ray")
FLOWER_ENGINES = ("flower", "flower-ray")
"""Engines whose clients are Flower nodes, in this process or in Ray's (`fedquilt.flower`)."""
DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("float32", "bf16")

# Slices
METHODS = (
    *("full", "heterofl", "fedrolex", "fjord", "dropout", "mfl", "fiarse", "depthfl", "scalefl"),
    *("smallest", "largest", "largest_only"),
    *("hetlora", "flexlora", "fedsb"),
)
RANK_METHODS = ("hetlora", "flexlora", "fedsb")
"""Methods in which clients hold fewer ranks of adapters."""
WHOLE_METHODS = ("full", "smallest", "largest_only")
"""Methods in which all who train, train one and the same model."""
EXIT_METHODS = ("depthfl", "scalefl")
"""Methods whose models have exits after their blocks."""
OWN_LOSS_METHODS = ("fjord", "depthfl", "scalefl")
"""Methods whose local loss only the sequential engine can train."""
NARROW_METHODS = ("heterofl", "fedrolex", "fjord", "dropout", "mfl", "fiarse", "scalefl")
"""Methods in which clients hold fewer units of a layer; their BatchNorm is static."""
ABSENT_CLASSES = ("average", "leave_out")
"""What HeteroFL does with output rows of classes that a client lacks."""
NORM_STATISTICS = ("clients", "server")
"""Whose inputs give static BatchNorm its statistics."""

# Privacy and the ledger
POLICIES = ("adaptive", "cap", "worst_case", "paper")
CLIPPINGS = ("fixed", "quantile")
ADJACENCIES = ("zero_out", "replace_one")
"""What two neighbouring worlds differ in: a client's data against nothing, or other data."""
SECURE_AGGREGATION = ("off", "simulated", "protocol")
"""Whether clients add the noise, under masks: not at all, computed without them, or with them."""
IF_EXHAUSTED = ("refuse", "sit_out")

# Condensation
FEATURE_MODELS = ("trained_pool", "random_pool", "global", "perturbed")
FEATURE_EXTRACTORS = ("hog-linear", "scatter-linear")
DRAWN_WIDTHS = (16, 32, 64, 128, 256, 512)
DRAWN_MODELS = tuple(f"drawn-linear-{width}" for width in DRAWN_WIDTHS)
"""Heads on so many directions of what drawn pictures taught; 512 for colour pictures only."""
BESIDE_MODEL = "hog-drawn-linear"
"""A head on gradient features beside all learned ones, for grey pictures."""
INIT_METHODS = ("random", "smooth", "leaves", "real_sample", "dm")
ROW_BITS = (32, 12, 8)
"""How many bits a number of a table of statistics has on its way."""
IMAGE_OPTIMIZERS = ("sgd", "adam")
LOGIT_LOSSES = ("l2", "kl", "wasserstein", "wasserstein_sorted", "none")
LOSS_COMPUTATIONS = ("avg-loss", "loss-avg")
MODEL_SCHEDULES = ("step", "cosine", "constant")
