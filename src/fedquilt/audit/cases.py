"""The ways through a round that are replayed, in families."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

CLIENTS = 6
"""The number of clients in every case."""


@dataclass(frozen=True)
class Case:
    """One way through a round.

    Parameters
    ----------
    settings : dict
        Fields of `RunConfig` beside those that all cases share.
    norms : tuple of float
        The norm of each client's update; NaN and Inf stand for updates with such
        entries.  Empty: the clients train for real.
    victims : tuple of int
        The clients whose data are taken away, one in each world.
    present : tuple of tuple of int
        Who is there in each round; empty: everybody, always.
    kept : tuple of tuple of int
        Whom the secret coin keeps in each round, where there is one.
    timed : bool
        Let the victim's missing data show in the wall time, as they do in truth.
    """

    settings: dict[str, Any]
    norms: tuple[float, ...] = (0.5, 3.0, 0.9, 40.0, 5.0, 2.0)
    victims: tuple[int, ...] = (0, 3, 4)
    present: tuple[tuple[int, ...], ...] = ()
    kept: tuple[tuple[int, ...], ...] = ()
    timed: bool = False

    @property
    def num_rounds(self) -> int:
        """How many rounds are replayed."""
        return len(self.present or self.kept) or 4

    @property
    def num_releases(self) -> int:
        """How many releases they have."""
        return -(-self.num_rounds // int(self.settings.get("rounds_per_release", 1)))


_UNEVEN = ((0, 1, 2, 3), (1, 3), (), (0, 1, 3, 5), (1,), (1, 2, 3, 4))
_NONE = math.nan

_CONDENSE = {
    "method": "condense",
    "ipc": 1,
    "synthetic_images": 8,
    "model_epochs": 1,
    "eval_every": 6,
}

CASES: dict[str, Case] = {
    "adaptive clips": Case({"policy": "adaptive"}, present=_UNEVEN),
    "clips at their cap": Case({"clip_cap": 1.2}, present=_UNEVEN),
    "even clips": Case({"policy": "worst_case"}),
    "a cap on joins": Case({"policy": "cap", "max_joins": 2}),
    "the paper's schedule": Case({"policy": "paper"}, present=_UNEVEN),
    "nobody there": Case({}, present=((), (0, 1), (), (), (0, 3))),
    "not finite": Case({}, norms=(_NONE, math.inf, -math.inf, 0.5, 9.0, 1.0), victims=(0, 1, 2, 4)),
    "zero updates": Case({}, norms=(0.0, 0.0, 0.0, 0.0, 1.0, 9.0), victims=(0, 4, 5)),
    # Above 1e154 and below 1e-154 the squares leave the range of float64.
    "tiny and huge": Case({}, norms=(1e-161, 1e-40, 1e30, 1e160, 1e300, 1.0), victims=(0, 1, 2, 3)),
    "normalised updates": Case(
        {"normalise_updates": True},
        norms=(1e-161, 1e-40, _NONE, 1e160, 0.0, 0.5),
        victims=(0, 1, 2, 3, 5),
    ),
    "private quantile": Case({"clipping": "quantile"}),
    "quantile of odd updates": Case(
        {"clipping": "quantile"}, norms=(0.0, _NONE, 1e-40, 1e160, 1.0, 2.0), victims=(0, 1, 3)
    ),
    "windows": Case({"rounds_per_release": 3, "clip_cap": 1.5}, present=_UNEVEN),
    "windows, late models averaged": Case(
        {"rounds_per_release": 2, "average_late": 1.0, "normalise_updates": True}, present=_UNEVEN
    ),
    "windows, correlated noise": Case(
        {"rounds_per_release": 2, "noise_bands": 2, "normalise_updates": True}, present=_UNEVEN
    ),
    "windows of slices": Case(
        {"method": "fedrolex", "tiers": "1/2,1/4", "rounds_per_release": 2}, present=_UNEVEN
    ),
    "correlated noise": Case({"noise_bands": 3, "clients_per_round": 2}),
    "everything at once": Case(
        {"noise_bands": 2, "clipping": "quantile", "normalise_updates": True}, present=_UNEVEN
    ),
    "secret coin": Case(
        {
            "amplification": True,
            "selection": "poisson",
            "policy": "worst_case",
            "clients_per_round": 3,
            "epsilon": 20.0,
        },
        kept=((0, 1, 3), (), (3, 4), (0, 1)),
    ),
    "noise of the clients": Case({"secure_aggregation": "simulated"}, present=_UNEVEN),
    "noise of the clients, odd updates": Case(
        {
            "secure_aggregation": "simulated",
            "colluding_clients": 1,
            "normalise_updates": True,
            "num_rounds": 4,
        },
        norms=(1e-161, 1e-40, _NONE, 1e160, 0.0, 0.5),
        victims=(0, 1, 2, 3, 5),
    ),
    "prefix slices": Case({"method": "heterofl", "tiers": "1,1/2,1/4"}, present=_UNEVEN),
    "rolling slices": Case({"method": "fedrolex", "tiers": "1/2,1/4"}, present=_UNEVEN),
    "random slices": Case(
        {"method": "dropout", "tiers": "1/2,1/4", "noise_bands": 2, "clipping": "quantile"},
        norms=(_NONE, 3.0, 0.0, 1e30, 1.0, 0.2),
    ),
    "slices of important units": Case({"method": "fiarse", "tiers": "1/2,1/4"}, present=_UNEVEN),
    "slices under a secret coin": Case(
        {
            "method": "fedrolex",
            "tiers": "1/2,1/4",
            "amplification": True,
            "selection": "poisson",
            "policy": "worst_case",
            "clients_per_round": 3,
            "epsilon": 20.0,
        },
        present=((0, 1, 3), (3, 4), (0, 1, 2, 3, 4, 5), (1, 3)),
        kept=((0, 3), (), (0, 3, 4), (3,)),
    ),
    "slices, real training": Case(
        {"method": "heterofl", "tiers": "1,1/2,1/4", "clip_norm": 0.01}, norms=()
    ),
    "class statistics": Case(
        {**_CONDENSE, "num_rounds": 6}, norms=(_NONE, 3.0, 0.0, 1e30, 1.0, 0.2), present=_UNEVEN
    ),
    "class statistics, real data": Case({**_CONDENSE, "mean_rounds": 2}, norms=()),
    "fixed_dp over everything": Case(
        {"mode": "fixed_dp", "noise_layers": "all"}, norms=(_NONE, 3.0, 0.0, 1e30, 1.0, 0.2)
    ),
    "real training": Case({"clip_norm": 0.01}, norms=()),
    "compressed updates": Case(
        {"compression": "topk", "compression_share": 0.05, "clip_norm": 0.01}, norms=()
    ),
    "local heads": Case({"personal": "fedper", "clip_norm": 0.01}, norms=()),
    "heads in turns": Case({"personal": "fedrep", "clip_norm": 0.01}, norms=(), present=_UNEVEN),
    "own models": Case({"personal": "ditto", "clip_norm": 0.01}, norms=()),
    "fine-tuned models": Case({"personal": "finetune", "clip_norm": 0.01}, norms=()),
    "energy spent evenly": Case({"selection": "energy", "clients_per_round": 3}, present=_UNEVEN),
    "signs": Case({"compression": "sign", "clip_norm": 0.01}, norms=(), present=_UNEVEN),
    "wall time": Case({}, victims=(3,), timed=True),
}

FAMILIES: dict[str, tuple[str, ...]] = {
    "clips and policies": (
        "adaptive clips",
        "clips at their cap",
        "even clips",
        "a cap on joins",
        "the paper's schedule",
        "nobody there",
    ),
    "updates that are odd": ("not finite", "zero updates", "tiny and huge", "normalised updates"),
    "private quantile": ("private quantile", "quantile of odd updates"),
    "windows": (
        "windows",
        "windows, late models averaged",
        "windows, correlated noise",
        "windows of slices",
    ),
    "correlated noise": ("correlated noise", "everything at once"),
    "secret coin": ("secret coin", "slices under a secret coin"),
    "secure aggregation": ("noise of the clients", "noise of the clients, odd updates"),
    "slices": (
        *("prefix slices", "rolling slices", "random slices", "slices of important units"),
        "slices, real training",
    ),
    "condensation": ("class statistics", "class statistics, real data"),
    "fixed_dp": ("fixed_dp over everything",),
    "energy": ("energy spent evenly",),
    "messages": ("compressed updates", "signs"),
    "personal models": ("local heads", "heads in turns", "own models", "fine-tuned models"),
    "training and time": ("real training", "wall time"),
}
"""Cases that go through the same part of the code."""
