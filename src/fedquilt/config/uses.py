"""Which options say something in which run, and which of them most people need.

One table.  The refusal of options that would do nothing, the help of the command line and
`docs/modes.md` read it.  An option that is not in it says something in every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedquilt.common.errors import InvalidValueError
from fedquilt.config.choices import METHODS, NARROW_METHODS
from fedquilt.config.modes import MODE_TABLE, NOISED_MODES
from fedquilt.config.option import OWN
from fedquilt.config.run import RunConfig

Case = Mapping[str, tuple[Any, ...] | None]
"""Settings that must hold together: option -> what it may be; None: anything but absent."""

CLIENTS = "clients"
"""Stands in a case for whose clients a run has: dealt from a named data set, or your own."""
SPLIT, OWN_CLIENTS = "dealt from a data set", "your own"


class _AnyBut(tuple[Any, ...]):
    """All values but these."""

    def __contains__(self, value: object) -> bool:
        return not super().__contains__(value)


_QUAP = ("quap_fl", "quap_fl_client")
_BY_LAYER = tuple(name for name, mode in MODE_TABLE.items() if mode.by_layer)
_CLAIMING = ("fixed_dp", "certified")
_CERTIFIED: Case = {"mode": ("certified",)}
_PAPER: Case = {"mode": ("certified",), "policy": ("paper",)}
_IN_LEDGER: Case = {"ledger": None}
_FEDNUM: Case = {"mode": ("fednum",)}
_TRAINED_POOL: Case = {"mode": ("fednum",), "feature_model": ("trained_pool",)}
_SLICED = tuple(name for name in METHODS if name != "full")

USES: dict[str, tuple[Case, ...]] = {
    "data_dir": ({CLIENTS: (SPLIT,)},),
    "no_download": ({CLIENTS: (SPLIT,)},),
    "partition": ({CLIENTS: (SPLIT,)},),
    "dirichlet_alpha": ({CLIENTS: (SPLIT,), "partition": ("dirichlet", "part")},),
    "classes_per_client": ({CLIENTS: (SPLIT,), "partition": ("shards", "part")},),
    "allow_overlap": ({CLIENTS: (OWN_CLIENTS,)},),
    "lr_decay": ({"lr_schedule": ("exponential", "step")},),
    "lr_step_rounds": ({"lr_schedule": ("step",)},),
    "momentum": ({"optimizer": ("sgd", "nesterov")},),
    "server_momentum": ({"server_optimizer": ("momentum",)},),
    "tiers": ({"method": _SLICED},),
    "whole": ({"method": (*NARROW_METHODS, "smallest")},),
    "absent_classes": ({"mode": ("fedavg",), "method": ("heterofl",)},),
    "fjord_alpha": ({"method": ("fjord",)},),
    "fjord_temperature": ({"method": ("fjord",)},),
    "depthfl_rampup": ({"method": ("depthfl",)},),
    "norm_statistics": ({"method": NARROW_METHODS},),
    "epsilon": ({"mode": NOISED_MODES}, _IN_LEDGER),
    "delta": ({"mode": NOISED_MODES}, _IN_LEDGER),
    "adjacency": ({"mode": _CLAIMING}, _IN_LEDGER),
    "budget_alpha": ({"mode": _QUAP}, _PAPER),
    "budget_beta": ({"mode": _QUAP}, _PAPER),
    "warmup_rounds": ({"mode": _QUAP}, _PAPER),
    "participation_ema": ({"mode": _QUAP},),
    "clip_norm": ({"mode": _CLAIMING},),
    "clip_quantile": ({"mode": _QUAP},),
    "clip_momentum": ({"mode": _QUAP},),
    "min_clip": ({"mode": _QUAP},),
    "max_clip": ({"mode": _QUAP},),
    "max_agg_norm": ({"mode": ("fixed_dp", *_QUAP)},),
    "noise_layers": ({"mode": _BY_LAYER},),
    "noise_seed": ({"mode": NOISED_MODES},),
    "policy": (_CERTIFIED,),
    "max_joins": ({"mode": ("certified",), "policy": ("cap",)},),
    "clipping": (_CERTIFIED,),
    "private_quantile": ({"mode": ("certified",), "clipping": ("quantile",)},),
    "private_quantile_lr": ({"mode": ("certified",), "clipping": ("quantile",)},),
    "clip_cap": (_CERTIFIED,),
    "normalise_updates": (_CERTIFIED,),
    "noise_bands": (_CERTIFIED,),
    "amplification": (_CERTIFIED,),
    "population": (_IN_LEDGER,),
    "new_population": (_IN_LEDGER,),
    "allowance": ({"mode": _CLAIMING}, _IN_LEDGER),
    "on_short": (_IN_LEDGER,),
    "spend_everything": (_IN_LEDGER,),
    "evaluation_share": (_CERTIFIED,),
    "validation_fraction": (
        {CLIENTS: (SPLIT,), "early_stopping": (True,)},
        {CLIENTS: (SPLIT,), "norm_statistics": ("server",)},
    ),
    "front": (_CERTIFIED,),
    "mean_rounds": (_CERTIFIED,),
    "head_step": (_CERTIFIED,),
    "drawings": (_CERTIFIED,),
    "embed_layer": (_FEDNUM,),
    "model_families": ({"augmentation": _AnyBut(("none",))},),
    "avg_num": (_FEDNUM,),
    "min_group": (_FEDNUM,),
    "max_samples": (_FEDNUM,),
    "feature_model": (_FEDNUM,),
    "model_n": (_FEDNUM,),
    "trained_n": (_TRAINED_POOL,),
    "pool_epochs": (_TRAINED_POOL,),
    "moments": (_FEDNUM,),
    "row_bits": (_FEDNUM,),
    "rho": (
        {"mode": ("fednum",), "feature_model": ("perturbed",)},
        {"mode": ("fednum",), "init_method": ("dm",)},
    ),
    "tiles": (_FEDNUM,),
    "init_method": (_FEDNUM,),
    "dc_iterations": (_FEDNUM,),
    "batch_num": (_FEDNUM,),
    "image_optimizer": (_FEDNUM,),
    "image_lr": (_FEDNUM,),
    "image_momentum": ({**_FEDNUM, "image_optimizer": ("sgd",)},),
    "logit_loss_type": (_FEDNUM,),
    "loss_computation": (_FEDNUM,),
    "discrimination": (_TRAINED_POOL,),
    "split_file": ({CLIENTS: (SPLIT,)},),
}
"""Option -> the cases in which it says something; one of them is enough."""

COMMON = (
    *("dataset", "data_dir", "partition"),
    *("num_clients", "clients_per_round", "availability"),
    *("model", "trainable", "num_rounds", "local_epochs", "batch_size", "learning_rate"),
    *("server_optimizer", "method", "tiers"),
    *("mode", "epsilon", "delta", "adjacency", "policy", "max_joins", "clipping", "clip_norm"),
    *("ledger", "population", "allowance"),
    *("eval_every", "seed", "device", "engine", "output_dir"),
)
"""The options of `fedquilt run --help`; `--help-all` lists the others too."""


def says_something(name: str, settings: Mapping[str, Any]) -> bool:
    """Tell whether an option does anything in a run of these (complete) settings."""
    cases = USES.get(name)
    return cases is None or any(_holds(case, settings) for case in cases)


def _holds(case: Case, settings: Mapping[str, Any]) -> bool:
    for name, allowed in case.items():
        value = settings.get(name)
        # What somebody brings as an object may use whatever it likes.
        if value is None or (allowed is not None and value not in allowed and value != OWN):
            return False
    return True


def refuse_idle(given: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """Raise for the first given option that would do nothing.

    Parameters
    ----------
    given
        What somebody said; an option that is None or a flag that is off says nothing anyway.
    runs
        The settings of the runs it is said of, complete: an option must do something in one.
    """
    for name, value in given.items():
        said = value is not None and value is not False
        if said and not any(says_something(name, run) for run in runs):
            raise InvalidValueError(
                f"{name}={value!r} must be left out of this run, where it would do nothing: "
                f"it is for {uses_in_words(name)}"
            )


def uses_in_words(name: str) -> str:
    """Return the cases of an option in words: `mode 'certified' with policy 'cap'`."""
    return ", or ".join(" with ".join(_in_words(case)) for case in USES[name])


def _in_words(case: Case) -> Iterator[str]:
    for name, allowed in case.items():
        if allowed is None:
            yield f"a {name}"
        elif name == "method" and allowed == _SLICED:
            yield "methods other than 'full'"
        elif name == CLIENTS:
            yield f"clients that are {allowed[0]}"
        elif allowed == (True,):
            yield name
        elif isinstance(allowed, _AnyBut):
            yield f"{name} other than {allowed[0]!r}"
        else:
            names = [repr(value) for value in allowed]
            yield f"{name} " + " or ".join([", ".join(names[:-1]), names[-1]][len(names) == 1 :])


def modes_of(name: str) -> tuple[str, ...]:
    """Return the modes of `fedquilt run` in which an option may say something."""
    trained = [mode for mode, row in MODE_TABLE.items() if row.trains]
    cases = USES.get(name, ({},))
    return tuple(
        mode for mode in trained if any(mode in (case.get("mode") or (mode,)) for case in cases)
    )


def uses_table() -> str:
    """Return the table of `docs/modes.md`: where each option that is not everywhere says something.

    Options of condensations only, and those of named data sets, are left out.
    """
    modes = [mode for mode, row in MODE_TABLE.items() if row.trains]
    rows = [["option", *(f"`{mode}`" for mode in modes)], ["---"] * (1 + len(modes))]
    for name, cases in USES.items():
        if name in RunConfig.__dataclass_fields__ and not any(CLIENTS in case for case in cases):
            flag = f"`--{name.replace('_', '-')}`"
            rows.append([flag, *(_cell(cases, mode) for mode in modes)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(cases: tuple[Case, ...], mode: str) -> str:
    """Return what an option needs beside a mode, "yes" for nothing."""
    found = []
    for case in cases:
        if mode in (case.get("mode") or (mode,)):
            rest = {name: allowed for name, allowed in case.items() if name != "mode"}
            found.append(" and ".join(_in_words(rest)).replace("'", "`"))
    return "yes" if "" in found else "; ".join(found)
