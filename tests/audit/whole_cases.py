"""The runs that are replayed whole: which engine, method, model and option meet where.

Not the product of all four, which would be thousands of runs; every engine meets every
kind of model and of method that it can train, and every option meets a run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hostile_code import OWN_METHODS, OWN_OPTIMIZERS
from hostile_models import CLIENTS, FORMS_OF_ONE, KINDS, NOTHING, OTHERS, SHORT
from task_forms import CLIENT_FORMS, own_loss, own_loss_by_sample

from fedquilt.config import RunConfig
from fedquilt.config.choices import METHODS, OWN_LOSS_METHODS


@dataclass(frozen=True)
class WholeCase:
    """One run through the public entry.

    Parameters
    ----------
    settings : dict
        Fields of `RunConfig` beside `SHARED`.
    model : str
        One of `hostile_models.MODELS`, `task_forms.TASK_MODELS` or
        `hostile_code.OWN_MODELS`.
    task : str
        One of `task_forms.FORMS` or `CLIENT_FORMS`.
    kinds : tuple of str
        What is put in the place of a victim's data, of `hostile_models.KINDS` or
        `FORMS_OF_ONE`.
    needs : tuple of str
        Packages without which the case is left out.
    fresh : dict
        Fields whose values keep state, and what makes one for each world.
    may_waive : bool
        Whether the run may claim nothing; what it does not claim need not hold.
    """

    settings: dict[str, Any]
    model: str = "plain"
    task: str = "images"
    kinds: tuple[str, ...] = tuple(KINDS)
    needs: tuple[str, ...] = ()
    fresh: dict[str, Callable[[], Any]] = field(default_factory=dict)
    may_waive: bool = False


SHARED: dict[str, Any] = {
    "mode": "certified",
    "clients_per_round": CLIENTS,
    "availability": "always",
    "num_rounds": 2,
    "epsilon": 6.0,
    "learning_rate": 0.5,
    "local_epochs": 2,
    "batch_size": 2,
    "clip_norm": 0.05,  # below every real update, so that the bound is reached
    "eval_every": 1,
}

CONDENSE: dict[str, Any] = {
    "method": "condense",
    "mode": "certified",
    "num_rounds": 2,
    "mean_rounds": 1,
    "ipc": 1,
    "synthetic_images": 4,
    "model_epochs": 1,
    "epsilon": 6.0,
    "eval_every": 2,
    "clip_norm": 0.05,
}

_COIN: dict[str, Any] = {
    "amplification": True,
    "selection": "poisson",
    "policy": "worst_case",
    "clients_per_round": 4,
    "epsilon": 20.0,
    "num_rounds": 4,
}
_TIERS = "1,1/2,1/4"
_SLICED = tuple(name for name in METHODS if name not in ("full", *OWN_LOSS_METHODS))
_STATELESS = ("dropout layer", "dropout call", "smooth dropout", "log-softmax", "frozen front")
_STATEFUL = ("frozen parameter", "attribute", "late buffer", "gradient buffer")
_STACKED = ("layer norm", "adapters")
_FEW = (*SHORT, "replaced")  # a process engine takes a second to start

_HALVES = {
    engine: (*NOTHING, *list(OTHERS)[number::2])
    for number, engine in enumerate(("sequential", "batched"))
}
"""Where both engines train the same, each meets every other kind of data."""

OPTIONS: dict[str, dict[str, Any]] = {
    "even clips": {"policy": "worst_case"},
    "cap on joins": {"policy": "cap", "max_joins": 1},
    "paper's schedule": {"policy": "paper", "availability": "beta", "num_rounds": 4},
    "adaptive, uneven": {"policy": "adaptive", "availability": "uniform", "num_rounds": 4},
    "clip cap": {"clip_cap": 1.2, "availability": "beta", "num_rounds": 4},
    "quantile": {"clipping": "quantile", "num_rounds": 3},
    "bands": {"noise_bands": 2, "clients_per_round": 3, "num_rounds": 4},
    "normalised": {"normalise_updates": True, "clip_norm": 1.0},
    "everything": {
        "clipping": "quantile",
        "noise_bands": 2,
        "normalise_updates": True,
        "num_rounds": 3,
    },
    "wide clip": {"clip_norm": 10.0},
    "adam": {"server_optimizer": "adam", "num_rounds": 3},
    "fedprox": {"fedprox_mu": 0.5},
    "poisson": {"selection": "poisson", "clients_per_round": 4, "num_rounds": 4},
    "noise seed": {"noise_seed": 5},
    "fixed_dp": {"mode": "fixed_dp", "noise_layers": "all", "clip_norm": 0.1},
    "some layers": {"trainable": "last*"},
    "replace one": {"adjacency": "replace_one"},
}

_LATE: dict[str, Any] = {"engine": "sequential", "local_epochs": 8}
"""Steps enough for what counts them and shows it late."""
_EVALUATED: dict[str, Any] = {"evaluation_share": 0.3, "client_test_fraction": 0.5}
_MEASURED = tuple(kind for kind in KINDS if "NaN" not in kind)  # NaN is measured, too


def whole_cases() -> dict[str, WholeCase]:
    """Return all cases by name; options that this version does not have are left out."""
    known = {item.name for item in dataclasses.fields(RunConfig)}
    cases: dict[str, WholeCase] = {}
    for number, (name, settings) in enumerate(OPTIONS.items()):
        if set(settings) <= known:
            engine = ("sequential", "batched")[number % 2]
            cases[f"{name}, {engine}"] = WholeCase({**settings, "engine": engine})
    cases |= _model_cases() | _method_cases() | _process_cases() | _condense_cases()
    cases |= _task_cases() | _own_cases() | _flower_cases()
    cases["ledger file, sequential"] = WholeCase(
        {"engine": "sequential", "ledger": "LEDGER", "population": "people", "allowance": 9.0}
    )
    for engine, model in (("sequential", "plain"), ("batched", "dropout layer")):
        cases[f"secret coin, {model}, {engine}"] = WholeCase(
            {**_COIN, "engine": engine}, model, needs=("dp_accounting",)
        )
    return cases


def _model_cases() -> dict[str, WholeCase]:
    cases = {}
    for engine, kinds in _HALVES.items():
        for model in _STATELESS:
            cases[f"{model}, {engine}"] = WholeCase({"engine": engine}, model, kinds=kinds)
    for model in _STATEFUL:
        cases[f"{model}, sequential"] = WholeCase({"engine": "sequential"}, model)
    for model in _STACKED:
        cases[f"{model}, batched"] = WholeCase({"engine": "batched"}, model, kinds=_FEW)
    cases["width seen, batched"] = WholeCase(
        {"engine": "batched", "batch_size": 16}, "width seen", kinds=_FEW
    )
    cases["adapters, devices"] = WholeCase(
        {"engine": "batched", "devices": "cpu,cpu"},
        "adapters",
        kinds=("nothing", "many NaN", "replaced"),
    )
    cases["plain, local"] = WholeCase({"engine": "local"}, "plain", kinds=_FEW)
    cases["adapters, sequential"] = WholeCase({"engine": "sequential"}, "adapters", kinds=_FEW)
    cases["dropout layer, fixed_dp, batched"] = WholeCase(
        {**OPTIONS["fixed_dp"], "engine": "batched"}, "dropout layer"
    )
    return cases


def _method_cases() -> dict[str, WholeCase]:
    cases = {}
    for number, method in enumerate(_SLICED):
        models = [("plain", "log-softmax", "dropout layer")[number % 3]]
        for model in [*models, "log-softmax"] if method == "heterofl" else models:
            for engine, kinds in _HALVES.items():
                settings = {"method": method, "tiers": _TIERS, "engine": engine}
                cases[f"{method}, {model}, {engine}"] = WholeCase(settings, model, kinds=kinds)
    cases["fedrolex, frozen parameter, sequential"] = WholeCase(
        {"method": "fedrolex", "tiers": "1", "engine": "sequential"}, "frozen parameter"
    )
    for method in OWN_LOSS_METHODS:
        model = "exits" if method == "depthfl" else "dropout layer"
        settings = {"method": method, "tiers": "1,1/2", "engine": "sequential"}
        cases[f"{method}, {model}, sequential"] = WholeCase(
            settings, model, kinds=_HALVES["sequential"]
        )
    cases["fedrolex, secret coin, batched"] = WholeCase(
        {"method": "fedrolex", "tiers": _TIERS, "engine": "batched", **_COIN},
        kinds=_HALVES["batched"],
        needs=("dp_accounting",),
    )
    return cases


def _process_cases() -> dict[str, WholeCase]:
    cases = {}
    for model in ("dropout layer", "frozen parameter"):
        cases[f"{model}, processes"] = WholeCase({"engine": "processes"}, model, kinds=_FEW)
    return cases


def _task_cases() -> dict[str, WholeCase]:
    """Return other tasks, losses and optimisers, each on the engines that take it."""
    steps = {"optimizer": "nesterov", "momentum": 0.9, "gradient_clip": 0.5}
    adam = {"optimizer": "adam", "weight_decay": 0.01, "learning_rate": 0.05, "fedprox_mu": 0.1}
    wanted: dict[str, tuple[dict[str, Any], str, str, tuple[str, ...]]] = {
        "tokens, own loss": ({"loss": own_loss}, "tokens", "tokens", ("sequential", "processes")),
        "tokens, own loss by sample": (
            {"loss": own_loss_by_sample}, "tokens", "tokens", ("sequential", "batched")
        ),
        "next token, adam": (
            {"loss": "next_token", **adam}, "tokens", "tokens", ("sequential", "batched")
        ),
        "regression, nesterov and clip": (
            {"loss": "huber", "metrics": "mae,mse", **steps}, "numbers", "numbers",
            ("sequential", "batched", "processes"),
        ),
        "regression, momentum": (
            {"momentum": 0.9, "lr_schedule": "cosine"}, "numbers", "numbers",
            ("sequential", "batched"),
        ),
        "dictionary, adam": (adam, "dictionary", "dictionary", ("sequential", "batched")),
        "dictionary, own optimizer": (
            {"optimizer": torch.optim.RMSprop, "metrics": "accuracy,auroc,f1"},
            "dictionary", "dictionary", ("sequential", "processes"),
        ),
        "fedrolex, regression": (
            {"method": "fedrolex", "tiers": _TIERS}, "plain", "image numbers",
            ("sequential", "batched"),
        ),
    }  # fmt: skip
    return {
        f"{name}, {engine}": WholeCase(
            {**settings, "engine": engine},
            model,
            task,
            kinds=_HALVES.get(engine, _FEW),
        )
        for name, (settings, model, task, engines) in wanted.items()
        for engine in engines
    }


def _condense_cases() -> dict[str, WholeCase]:
    coin = {**CONDENSE, **_COIN, "eval_every": 4, "normalise_updates": True}
    return {
        "condense": WholeCase(CONDENSE, "condensed"),
        "condense, secret coin": WholeCase(coin, "condensed", needs=("dp_accounting",)),
    }


def _own_cases() -> dict[str, WholeCase]:
    """Return models, optimisers, sums and data sets of a user's own."""
    cases = {}
    for model in ("class attribute", "closure", "hook"):
        cases[f"{model}, sequential"] = WholeCase({"engine": "sequential"}, model, kinds=_FEW)
        cases[f"{model}, evaluation share"] = WholeCase(
            {"engine": "sequential", **_EVALUATED}, model, kinds=("nothing", "one less", "replaced")
        )
    for model, engine in (("class attribute", "auto"), ("closure", "auto"), ("hook", "auto")):
        cases[f"{model}, {engine}"] = WholeCase({"engine": engine}, model, kinds=_FEW)
    for engine in ("sequential", "batched"):
        cases[f"root hook, {engine}"] = WholeCase({"engine": engine}, "root hook", kinds=_FEW)
        cases[f"columns, {engine}"] = WholeCase({"engine": engine}, "columns", "columns")
        cases[f"evaluation share, {engine}"] = WholeCase(
            {"engine": engine, **_EVALUATED}, kinds=_MEASURED
        )
    for model in ("late, class generator", "late, metaclass", "late, property default"):
        cases[f"{model}, sequential"] = WholeCase(_LATE, model, kinds=_FEW)
    for place, make in OWN_OPTIMIZERS.items():
        cases[f"optimizer with state in {place}, sequential"] = WholeCase(
            _LATE, kinds=_FEW, fresh={"optimizer": make}
        )
    for name, method in OWN_METHODS.items():
        cases[f"{name}, sequential"] = WholeCase(
            {"engine": "sequential", "method": method},
            kinds=_FEW,
            may_waive=name != "declared sum",
        )
    for task in CLIENT_FORMS:
        cases[f"{task}, sequential"] = WholeCase(
            {"engine": "sequential"}, "spare scores", task, kinds=(*_FEW, *FORMS_OF_ONE)
        )
    return cases


def _flower_cases() -> dict[str, WholeCase]:
    """Return runs whose clients are Flower nodes, in this process."""
    cases = {
        f"{model}, flower": WholeCase({"engine": "flower"}, model, kinds=kinds, needs=("flwr",))
        for model, kinds in (("plain", (*_FEW, "ignored")), ("frozen parameter", _FEW))
    }
    cases["condense, flower"] = WholeCase(
        {**CONDENSE, "engine": "flower"},
        "condensed",
        kinds=(*_FEW, "ignored"),
        needs=("flwr",),
    )
    return cases


def missing(case: WholeCase) -> list[str]:
    """Return the packages that a case needs and this machine does not have."""
    return [name for name in case.needs if importlib.util.find_spec(name) is None]


QUICK = (
    "even clips, sequential",
    "quantile, batched",
    "fixed_dp, sequential",
    "dropout layer, batched",
    "smooth dropout, batched",
    "frozen parameter, sequential",
    "heterofl, log-softmax, sequential",
    "fedrolex, secret coin, batched",
    "condense, secret coin",
    "tokens, own loss, sequential",
    "regression, nesterov and clip, batched",
    "dictionary, adam, batched",
)
"""The cases of a quick audit."""
