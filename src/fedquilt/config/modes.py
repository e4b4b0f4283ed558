"""The modes: what each is, what it may claim, what it begins with, how it is drawn.

One table.  The command line, the checks of a configuration, the order and the colours of
figures and the question whether a run is bounded all read it.  Which options a mode uses
stands in `fedquilt.config.uses`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_MODE = "certified"
"""What `fedquilt run` and `fedquilt.run` do unless somebody names another mode."""


class Claim(enum.Enum):
    """What a mode may claim of every client."""

    NOTHING = "nothing"
    IF_COVERED = "a bound if noise covers everything"
    BOUND = "a bound"


@dataclass(frozen=True)
class Mode:
    """What there is to know of a mode without running it.

    Attributes
    ----------
    claim
        What it may claim, as long as its noise is secret.
    noised
        Whether clip and noise stand between a client and the server.
    by_layer
        Whether its noise reaches the tensors of `noise_layers` only.
    sliced
        Whether clients may hold slices of the model.
    trains, condenses
        Whether it is a mode of `fedquilt run`, of `fedquilt condense`.
    of_documents
        Whether `QuAPFLServer` runs it from a dictionary like `HYPERPARAMETERS`.
    color
        Its colour in figures, a name of `fedquilt.report.style.COLORS`.
    defaults
        What `fedquilt run` begins with where the mode's values are not those of the
        QuAP-FL API document, which `RunConfig` declares.
    own_defaults
        What differs from them for somebody's own model.
    """

    name: str
    summary: str
    claim: Claim
    color: str
    noised: bool = True
    by_layer: bool = False
    sliced: bool = False
    trains: bool = True
    condenses: bool = False
    of_documents: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    own_defaults: Mapping[str, Any] = field(default_factory=dict)


# Chosen for digits on validation samples that no client holds; what a comparison of modes shares.
# Every update is scaled to its clip, so that a model's own scale matters little.
_CERTIFIED_DEFAULTS = {
    "model": "hog-linear",
    "clients_per_round": 1.0,
    "num_rounds": 60,
    "local_epochs": 1,
    "batch_size": 16,
    "learning_rate": 0.2,
    "epsilon": 6.0,
    "clip_norm": 0.2,
    "normalise_updates": True,
    "eval_every": 5,
}
# Between what a linear model and a small perceptron like best (0.2) and a CNN (0.05).
_CERTIFIED_OWN = {"learning_rate": 0.1}

MODE_TABLE: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            "fedavg",
            "federated averaging: no clip, no noise",
            Claim.NOTHING,
            "grey",
            noised=False,
            sliced=True,
            of_documents=True,
        ),
        Mode(
            "fixed_dp",
            "the QuAP-FL paper's baseline: fixed budget, fixed clip, noise on chosen layers",
            Claim.IF_COVERED,
            "orange",
            by_layer=True,
            of_documents=True,
        ),
        Mode(
            "quap_fl",
            "the QuAP-FL paper's algorithm: budget by participation, noise on chosen layers",
            Claim.NOTHING,
            "blue",
            by_layer=True,
            of_documents=True,
        ),
        Mode(
            "quap_fl_client",
            "the QuAP-FL API document's variant: noise on each client's whole vector",
            Claim.NOTHING,
            "purple",
            of_documents=True,
        ),
        Mode(
            "fednum",
            "the FedNum document's condensation: means over groups of samples, no noise",
            Claim.NOTHING,
            "sky",
            noised=False,
            trains=False,
            condenses=True,
        ),
        Mode(
            "certified",
            "everything released is clipped once and noised; a ledger bounds every client",
            Claim.BOUND,
            "green",
            sliced=True,
            condenses=True,
            defaults=_CERTIFIED_DEFAULTS,
            own_defaults=_CERTIFIED_OWN,
        ),
    )
}
"""Every mode, least private first."""

MODES = tuple(name for name, mode in MODE_TABLE.items() if mode.trains)
CONDENSE_MODES = tuple(name for name, mode in MODE_TABLE.items() if mode.condenses)
SLICED_MODES = tuple(name for name, mode in MODE_TABLE.items() if mode.trains and mode.sliced)
DOCUMENT_MODES = tuple(name for name, mode in MODE_TABLE.items() if mode.of_documents)
NOISED_MODES = tuple(name for name, mode in MODE_TABLE.items() if mode.noised)
OWN_CLIENT_DEFAULTS = {"availability": "always", "clients_per_round": 1.0}
"""Your own clients are all there and all join, in every mode; the data sets' come and go."""


def mode_colors() -> dict[str, str]:
    """Return the name of each mode's colour."""
    return {name: mode.color for name, mode in MODE_TABLE.items()}
