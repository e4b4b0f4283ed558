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
from hostile_code import OWN_METHODS, OWN_OPTIMIZERS, PLAIN_METHOD
from hostile_models import CLIENTS, FORMS_OF_ONE, KINDS, NOTHING, OTHERS, RECIPE_HEADS, SHORT
from task_forms import CLIENT_FORMS, own_loss, own_loss_by_sample

from fedquilt.config import RunConfig
from fedquilt.config.choices import EXIT_METHODS, METHODS, OWN_LOSS_METHODS, RANK_METHODS
from fedquilt.config.modes import rules_for, strength


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
    then : dict
        What is otherwise when the run is resumed, after its first round; empty: it is not stopped.
    """

    settings: dict[str, Any]
    model: str = "plain"
    task: str = "images"
    kinds: tuple[str, ...] = tuple(KINDS)
    needs: tuple[str, ...] = ()
    fresh: dict[str, Callable[[], Any]] = field(default_factory=dict)
    may_waive: bool = False
    then: dict[str, Any] = field(default_factory=dict)


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
_SLICED = tuple(name for name in METHODS if name not in ("full", *OWN_LOSS_METHODS, *RANK_METHODS))
_STATELESS = ("dropout layer", "dropout call", "smooth dropout", "log-softmax", "frozen front")
_STATEFUL = ("frozen parameter", "attribute", "late buffer", "gradient buffer")
_STACKED = ("layer norm", "adapters")
_OF_LOSSES: dict[str, dict[str, Any]] = {
    "fjord": {"fjord_alpha": 0.3, "fjord_temperature": 2.0},
    "depthfl": {"depthfl_rampup": 2},
}
_FEW = (*SHORT, "replaced")  # a process engine takes a second to start

_HALVES = {
    engine: (*NOTHING, *list(OTHERS)[number::2])
    for number, engine in enumerate(("sequential", "batched"))
}
"""Where both engines train the same, each meets every other kind of data."""

OPTIONS: dict[str, dict[str, Any]] = {
    "even clips": {"policy": "worst_case", "delta": 1e-4},
    "cap on joins": {"policy": "cap", "max_joins": 1},
    "paper's schedule": {
        "policy": "paper",
        "budget_alpha": 0.8,
        "budget_beta": 1.0,
        "warmup_rounds": 1,
        "availability": "beta",
        "num_rounds": 4,
    },
    "adaptive, uneven": {"policy": "adaptive", "availability": "uniform", "num_rounds": 4},
    "clip cap": {"clip_cap": 1.2, "availability": "beta", "num_rounds": 4},
    "quantile": {
        "clipping": "quantile",
        "num_rounds": 3,
        "private_quantile": 0.7,
        "private_quantile_lr": 0.4,
    },
    "bands": {"noise_bands": 2, "clients_per_round": 3, "num_rounds": 4},
    "normalised": {"normalise_updates": True, "clip_norm": 1.0},
    "everything": {
        "clipping": "quantile",
        "noise_bands": 2,
        "normalise_updates": True,
        "num_rounds": 3,
    },
    "wide clip": {"clip_norm": 10.0},
    "adam": {"server_optimizer": "adam", "server_lr": 0.05, "num_rounds": 3},
    "fedprox": {"fedprox_mu": 0.5},
    "poisson": {"selection": "poisson", "clients_per_round": 4, "num_rounds": 4},
    "noise seed": {"noise_seed": 5},
    "fixed_dp": {"mode": "fixed_dp", "noise_layers": "all", "clip_norm": 0.1},
    "some layers": {"trainable": "last*"},
    "replace one": {"adjacency": "replace_one"},
    "flipped signs": {"attack": "sign_flip", "attackers": 0.5, "attack_strength": 3.0},
    "noise of the clients": {
        "secure_aggregation": "simulated",
        "least_survivors": 0.6,
        "colluding_clients": 1,
        "num_rounds": 3,
    },
    "top-k": {"compression": "topk", "compression_share": 0.1, "num_rounds": 3},
    "random-k": {"compression": "randomk", "compression_share": 0.3, "num_rounds": 3},
    "4 bits": {"compression": "qsgd"},
    "signs": {"compression": "sign", "num_rounds": 3},
    "ternary": {"compression": "ternary", "compression_share": 0.2, "num_rounds": 3},
    "buffers": {"buffer_size": 3, "in_flight": 5, "device_spread": 1.5, "num_rounds": 4},
    "windows": {"rounds_per_release": 2, "availability": "beta", "num_rounds": 5},
    "warm-up": {
        "lr_warmup_rounds": 2,
        "lr_schedule": "step",
        "lr_step_rounds": 1,
        "lr_decay": 0.5,
        "num_rounds": 4,
    },
    "energy": {"selection": "energy", "energy": "ENERGY", "clients_per_round": 3, "num_rounds": 4},
    "late models averaged": {
        "average_late": 1.0,
        "normalise_updates": True,
        "server_optimizer": "momentum",
        "server_momentum": 0.5,
        "num_rounds": 3,
    },
    "the recipe": {
        **rules_for(strength(6.0, 1e-5, CLIENTS), 6),
        "normalise_updates": True,
        "availability": "beta",
        "num_rounds": 6,
    },
    "8 bits": {"compression": "int8"},
    "upper halves": {"compression": "bf16"},
    "scaled updates": {"attack": "scaling", "attackers": 0.5},
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
    for name in RECIPE_HEADS:
        settings = {**OPTIONS["the recipe"], "engine": "auto"}
        cases[f"the recipe, {name}"] = WholeCase(settings, name)
    cases |= _model_cases() | _method_cases() | _process_cases() | _condense_cases()
    cases |= _task_cases() | _own_cases() | _flower_cases() | _personal_cases()
    cases["secure aggregation, sequential"] = WholeCase(
        {"engine": "sequential", "secure_aggregation": "protocol"},
        kinds=_FEW,
        needs=("cryptography",),
    )
    cases["ledger file, sequential"] = WholeCase(
        {
            "engine": "sequential",
            "ledger": "LEDGER",
            "population": "people",
            "allowance": 9.0,
            "if_exhausted": "sit_out",
        }
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
    cases["buffers, attribute, sequential"] = WholeCase(
        {**OPTIONS["buffers"], "engine": "sequential"}, "attribute", kinds=_FEW
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
        model = "exits" if method in EXIT_METHODS else "dropout layer"
        settings = {"method": method, "tiers": "1,1/2", "engine": "sequential"}
        settings |= _OF_LOSSES.get(method, {})
        cases[f"{method}, {model}, sequential"] = WholeCase(
            settings, model, kinds=_HALVES["sequential"]
        )
    for method in RANK_METHODS:
        settings = {"method": method, "tiers": _TIERS, "engine": "sequential"}
        model = "cores" if method == "fedsb" else "ranks"
        cases[f"{method}, sequential"] = WholeCase(settings, model, kinds=_FEW, needs=("peft",))
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


def _personal_cases() -> dict[str, WholeCase]:
    """Return runs in which clients keep a part or a model, and measure it."""
    kept: dict[str, dict[str, Any]] = {
        "fedper": {"personal_layers": "last*"},
        "fedrep": {"personal_layers": "last*", "personal_epochs": 2},
        "ditto": {"ditto_lambda": 0.5, "evaluation_share": 0.3, "num_rounds": 3},
        "finetune": {},
    }
    shared = {"engine": "sequential", "client_test_fraction": 0.5}
    cases = {
        f"{name}, sequential": WholeCase(
            {**shared, "personal": name, **more},
            kinds=_MEASURED if "evaluation_share" in more else tuple(KINDS),
        )
        for name, more in kept.items()
    }
    # What a model hides, where clients train two models or are tuned before they measure one.
    for name, model in (("fedrep", "hook"), ("finetune", "attribute")):
        settings = {**shared, "personal": name, **kept[name]}
        cases[f"{name}, {model}, sequential"] = WholeCase(settings, model, kinds=_FEW)
    return cases


def _condense_cases() -> dict[str, WholeCase]:
    coin = {**CONDENSE, **_COIN, "eval_every": 4, "normalise_updates": True}
    return {
        "condense": WholeCase(CONDENSE, "condensed"),
        "condense, noise of the clients": WholeCase(
            {**CONDENSE, "secure_aggregation": "simulated"}, "condensed", kinds=_FEW
        ),
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
    cases["always drops, evaluation share"] = WholeCase(
        {"engine": "sequential", **_EVALUATED},
        "always drops",
        kinds=("nothing", "one less", "replaced"),
    )
    cases["normed front, sequential"] = WholeCase(
        {"engine": "sequential"}, "normed front", kinds=(*_FEW, "removed")
    )
    for model, engine in (("class attribute", "auto"), ("closure", "auto"), ("hook", "auto")):
        cases[f"{model}, {engine}"] = WholeCase({"engine": engine}, model, kinds=_FEW)
    for engine in ("sequential", "batched"):
        cases[f"root hook, {engine}"] = WholeCase({"engine": engine}, "root hook", kinds=_FEW)
        cases[f"columns, {engine}"] = WholeCase({"engine": engine}, "columns", "columns")
        cases[f"codes, {engine}"] = WholeCase({"engine": engine}, "codes", kinds=(*_FEW, "NaN"))
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
    for name, method in (("declared", OWN_METHODS["declared sum"]), ("plain", PLAIN_METHOD)):
        cases[f"loud sum, {name} when resumed, sequential"] = WholeCase(
            {"engine": "sequential", "method": OWN_METHODS["loud sum"]},
            kinds=_FEW,
            may_waive=True,
            then={"method": method},
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
    buffers = {"engine": "flower", "buffer_size": 3, "in_flight": 5, "num_rounds": 4}
    cases["buffers, flower"] = WholeCase(buffers, kinds=(*_FEW, "ignored"), needs=("flwr",))
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
    "hetlora, sequential",
    "flexlora, sequential",
    "fedsb, sequential",
    "fedper, sequential",
    "fedrep, sequential",
    "finetune, sequential",
    "warm-up, sequential",
    "energy, batched",
)
"""The cases of a quick audit."""

ROADMAP = (
    *(
        "buffers, sequential",
        "buffers, flower",
        "flipped signs, batched",
        "top-k, batched",
        "random-k, sequential",
    ),
    *("4 bits, batched", "signs, sequential", "ternary, batched", "8 bits, sequential"),
    *("upper halves, batched", "scaled updates, sequential"),
    *("fiarse, log-softmax, sequential", "scalefl, exits, sequential"),
)
"""Cases that `docs/methods.md` names: its test requires that they are replayed."""
