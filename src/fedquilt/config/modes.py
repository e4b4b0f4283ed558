"""The modes: what each is, what it may claim, what it begins with, how it is drawn.

One table (`MODE_TABLE`), and the recipe of what follows from clients, epsilon and rounds.  The
command line, the checks of a configuration, the order and the colours of figures and the question
whether a run is bounded all read it.  Which options a mode uses stands in `fedquilt.config.uses`.

What a certified run does where nobody says how (`recipe`): windows, clip, averaging and width.

Everything follows from public numbers: N clients, the claim (epsilon, delta), T rounds.  With mu of
the claim (the Gaussian whose trade-off it is), a sum of N vectors of length 1 over all rounds
together has a signal of at most N and noise f / mu in every coordinate, f = 1 for zero-out and 2
for replace-one, so

    s = N mu / f

is how strong a run is.  From it

| what | rule | why |
|---|---|---|
| releases | R = s / 8, from 2 to 20 | each has sqrt(R) of the noise; a weak run affords few steps |
| window | w = T / ceil(T / max(1, T // R)), rounded up | nearly everybody comes and counts once |
| clip | C = max(10, s / 20) / ceil(T / w), at most max(1, s / 400) | the step of the server |
| average | the last half of the models | costs nothing, forgives a step that is too long |
| local epochs | 3, of rate 0.2 | a client says once in a window where its own optimum lies |
| width, colour | the power of two nearest to s, 16 to 512 | of features whose order is public |
| width, grey | 384, gradients beside learned features, at any s | see below |

Windows are even: a short last one would have the noise of the others and few clients.  With one of
a single round MNIST lost 2.7 points at epsilon 1 on the training images below.

On grey pictures (MNIST, its writers, Fashion-MNIST) fewer directions won by no more than seeds
differ, ordered by principal components of drawn pictures or by how far those differ from jitter of
themselves: rows have one length, so the noise in a logit does not grow with the width.

N times the clip times mu is what a client may spend, however many of the windows it joins, because
allowances follow joins; that is why everybody who is there must be asked, and N must be known.

The constants were chosen on training images of MNIST, Fashion-MNIST and CIFAR-10 that no client
held in those runs, 100 clients, other seeds; `benchmarks/honest.py` shows what comes of them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedquilt.config.choices import (
    AVAILABILITIES,
    BESIDE_MODEL,
    DRAWN_MODELS,
    DRAWN_WIDTHS,
)

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


CHOSEN_ON = ("mnist", "fashion-mnist", "cifar10")
MEASURED_ON = ("hog-linear", BESIDE_MODEL, *DRAWN_MODELS)
"""The models that the rules were tried on."""
_COLOUR, _GREY = ("cifar10", "cifar100"), ("mnist", "mnist-writers", "fashion-mnist")
_USUAL_CLIENTS = 100
_FEWEST, _MOST = 2, 20
_FACTOR = {"zero_out": 1.0, "replace_one": 2.0}

RECIPE_KEYS = frozenset(
    (
        *("dataset", "data_dir", "no_download", "partition", "dirichlet_alpha", "num_clients"),
        *("classes_per_client", "allow_overlap", "availability", "mode", "model", "num_rounds"),
        *("metrics", "epsilon", "delta", "adjacency", "noise_seed", "participation_ema"),
        *("ledger", "population", "new_population", "allowance", "if_exhausted", "noise_layers"),
        *("client_test_fraction", "eval_every", "target_accuracy", "early_stopping", "method"),
        *("validation_fraction", "seed", "device", "devices", "engine", "output_dir"),
    )
)
"""What somebody may say and still gets the recipe; any other option says how to train or to noise,
and then all of it is as it was."""
RECIPE_SETS = frozenset(
    ("rounds_per_release", "clip_norm", "average_late", "local_epochs", "learning_rate")
)
"""What the recipe sets of a run, beside its model."""
_PLAIN = {"mode": "certified", "method": "full", "clients_per_round": 1.0}


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return mu of the Gaussian mechanism that is (epsilon, delta)-private, by bisection.

    A figure to plan with; what is claimed and charged comes from `fedquilt.privacy.accounting`.
    """

    def normal(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    low, high = 1e-6, 200.0
    for _ in range(100):
        mu = math.sqrt(low * high)
        far = -epsilon / mu - mu / 2
        # exp(epsilon) of a tail that underflows first is nothing
        rest = math.exp(min(700.0, epsilon)) * normal(far) if far > -37 else 0.0
        low, high = (mu, high) if normal(far + mu) - rest < delta else (low, mu)
    return low


def strength(epsilon: float, delta: float, num_clients: int, adjacency: str = "zero_out") -> float:
    """Return s = N mu / f."""
    return num_clients * gaussian_mu(epsilon, delta) / _FACTOR[adjacency]


def width_for(strong: float) -> int:
    """Return how many directions a head should have."""
    return min(DRAWN_WIDTHS, key=lambda width: abs(math.log(width / strong)))


def recipe(given: Mapping[str, Any], usual: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    """Return what a run is told of which somebody said this, over the mode's own defaults.

    All of it or nothing: an empty dictionary where anything but `RECIPE_KEYS` was said, or
    where the rules were not tried.
    """
    if set(given) - RECIPE_KEYS:
        return {}
    said = {**usual, **given}
    strong = _strength_of(said)
    if strong is None:
        return {}
    found: dict[str, Any] = {}
    if "model" not in given and dataset in _COLOUR:
        found["model"] = f"drawn-linear-{width_for(strong)}"
    elif "model" not in given and dataset in _GREY:
        found["model"] = BESIDE_MODEL
    rules = rules_for(strong, said["num_rounds"])
    return found | rules if found.get("model", said.get("model")) in MEASURED_ON else {}


def rules_for(strong: float, rounds: int) -> dict[str, Any]:
    """Return window, clip, averaging and local epochs of so strong a run."""
    longest = max(1, rounds // max(_FEWEST, min(_MOST, round(strong / 8))))
    window = -(-rounds // -(-rounds // longest))  # no short one at the end
    releases = -(-rounds // window)
    step = min(max(1.0, strong / 400), max(10.0, strong / 20) / releases)
    return {
        "rounds_per_release": window,
        "clip_norm": round(step, 4),
        "average_late": 0.5,
        "local_epochs": 3,
        "learning_rate": 0.2,
    }


def recipe_line(settings: Mapping[str, Any]) -> str | None:
    """Say that a run's settings are those of the rules, and why; None where they are not."""
    strong = _strength_of(settings)
    if strong is None or settings.get("model") not in MEASURED_ON:
        return None
    rules = rules_for(strong, settings["num_rounds"])
    if any(settings.get(name) != value for name, value in rules.items()):
        return None
    window = rules["rounds_per_release"]
    releases = -(-settings["num_rounds"] // window)
    often = "one a round" if window == 1 else f"one every {window} rounds"
    return (
        f"recipe: N mu = {strong:.0f} affords {releases} releases, {often}, in which a client "
        f"counts once, clip {rules['clip_norm']:g}, the last half of the models averaged, "
        f"head {settings['model']}: rows of one length, so width adds no noise to a logit"
    )


def _strength_of(said: Mapping[str, Any]) -> float | None:
    """Return s of settings; None where the rules were not tried, or a number is not sound."""
    if any(said.get(name, plain) != plain for name, plain in _PLAIN.items()):
        return None
    if said.get("availability", "beta") not in AVAILABILITIES:
        return None
    clients = said.get("num_clients")
    if clients is None and said.get("partition") != "writer":
        clients = _USUAL_CLIENTS  # writers are counted when the data are loaded
    rounds, adjacency = said.get("num_rounds"), said.get("adjacency", "zero_out")
    numbers = [said.get("epsilon"), said.get("delta", 1e-5), rounds, clients]
    sound = [float(x) for x in numbers if isinstance(x, int | float) and 0 < x < 1e6]
    if len(sound) < len(numbers) or not isinstance(rounds, int) or adjacency not in _FACTOR:
        return None
    epsilon, delta = sound[:2]
    most = said.get("allowance")
    epsilon = min(epsilon, most) if isinstance(most, int | float) and most > 0 else epsilon
    return strength(epsilon, delta, int(sound[3]), adjacency) if delta < 1 else None
