"""The modes: what each is, what it may claim, how it is drawn.

One table.  The command line, the checks of a configuration, the order and the colours of
figures and the question whether a run is bounded all read it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
        ),
    )
}
"""Every mode, least private first."""

MODES = tuple(name for name, mode in MODE_TABLE.items() if mode.trains)
CONDENSE_MODES = tuple(name for name, mode in MODE_TABLE.items() if mode.condenses)
SLICED_MODES = tuple(name for name, mode in MODE_TABLE.items() if mode.trains and mode.sliced)
DOCUMENT_MODES = tuple(name for name, mode in MODE_TABLE.items() if mode.of_documents)
