"""The dictionaries of the seed documents, with the values of the API document.

The paper's experiments used other values (epsilon 6, five warm-up rounds, lower
targets); they are the presets `paper-mnist` and `paper-cifar10`.
"""

from __future__ import annotations

from typing import Any

HYPERPARAMETERS: dict[str, Any] = {
    "num_clients": 100,
    "num_rounds": 200,
    "clients_per_round": 30,
    "local_epochs": 5,
    "local_batch_size": 32,
    "learning_rate": 0.01,
    "lr_decay": 1.0,  # the document states none
    "epsilon_total": 3.0,
    "delta": 1e-5,
    "alpha": 0.5,
    "beta": 2.0,
    "clip_quantile": 0.9,
    "clip_momentum": 0.95,
    "min_clip": 0.1,
    "max_clip": 10.0,
    "max_agg_norm": 10000.0,
    "participation_distribution": "beta",
    "participation_alpha": 2,
    "participation_beta": 5,
}

PRIVACY_CONFIG: dict[str, float] = {
    "epsilon_base": 0.015,
    "alpha": 0.5,
    "beta": 2.0,
    "delta": 1e-5,
}

TARGET_ACCURACY: dict[str, float] = {"mnist": 0.971, "cifar10": 0.812}

EXPECTED_MILESTONES: dict[str, dict[str, tuple[float, float]]] = {
    "mnist": {
        "round_10": (0.65, 0.70),
        "round_50": (0.88, 0.92),
        "round_100": (0.94, 0.96),
        "round_150": (0.96, 0.98),
        "round_200": (0.965, 0.976),
    },
    "cifar10": {
        "round_10": (0.35, 0.40),
        "round_50": (0.65, 0.70),
        "round_100": (0.74, 0.78),
        "round_150": (0.78, 0.82),
        "round_200": (0.803, 0.821),
    },
}

VISUALIZATION_CONFIG: dict[str, Any] = {
    "enabled": True,
    "show_plot": False,
    "dpi": 150,
    "format": "png",
    "style": "seaborn-v0_8",
    "figsize": (12, 10),
    "include_table": True,
}

OUTPUT_CONFIG: dict[str, Any] = {
    "save_results": True,
    "save_plots": True,
    "output_dir": "./results",
    "log_dir": "./results",
}

_PAPER: dict[str, Any] = {
    "num_clients": 100,
    "num_rounds": 200,
    "clients_per_round": 30,
    "warmup_rounds": 5,
    "local_epochs": 3,
    "batch_size": 32,
    "learning_rate": 0.005,
    "lr_decay": 0.995,
    "epsilon": 6.0,
    "delta": 1e-5,
    "budget_alpha": 0.5,
    "budget_beta": 2.0,
    "clip_norm": 1.0,
    "clip_quantile": 0.9,
    "clip_momentum": 0.95,
    "min_clip": 0.1,
    "max_clip": 1.0,
    "noise_layers": "fc*",
    "partition": "dirichlet",
    "dirichlet_alpha": 0.5,
    "availability": "beta",
}

PRESETS: dict[str, dict[str, Any]] = {
    "paper-mnist": {**_PAPER, "dataset": "mnist", "target_accuracy": 0.932},
    "paper-cifar10": {**_PAPER, "dataset": "cifar10", "target_accuracy": 0.768},
}
