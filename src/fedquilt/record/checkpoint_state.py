"""What the state arrays of a checkpoint must be: types and shapes before, values after loading.

A checkpoint may come from elsewhere.  An array of another size would be found by whatever
touches it first, perhaps rounds later and after they were charged; a count that is NaN would
never be found.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.common.errors import RunFolderError
from fedquilt.common.formatting import printable
from fedquilt.common.untrusted import TensorSpec
from fedquilt.federation import Federation

# Arrays whose shape never changes during a run; those of a part that somebody wrote may.
_FIXED = (
    *("tracker.total_rounds", "tracker.participation_count", "account.spent", "fingerprint"),
    *("tracker.ema_value", "tracker.ema_round", "mechanism.last_join", "mechanism.bound"),
    *("mechanism.nominal_epsilon", "mechanism.squared_gdp", "mechanism.quantile_bound"),
    *("mechanism.clipper.clip_value", "server.images", "server.behind", "server.seen"),
    *("server.means_total", "server.head"),
)
# Of the size of the model, where there are any.
_VECTORS = ("weights", "server.first", "server.second")
_KINDS = {"F": "f", "I": "i", "U": "i", "B": "b"}


def expected_state(
    like: Mapping[str, NDArray[Any]],
    federation: Federation,
    path: Path,
    found: Mapping[str, TensorSpec],
) -> list[str]:
    """Return which arrays of a checkpoint to load, all of types and shapes that fit.

    Parameters
    ----------
    like
        The state of the federation before its first round.
    federation
        The federation that will take the arrays over.
    path
        The run's folder, for the message.
    found
        What the checkpoint holds.
    """
    size = tuple(federation.weights.shape)
    for name, spec in found.items():
        if name in _VECTORS:
            wanted: tuple[str, tuple[int, ...]] = ("f", size)
        elif name in _FIXED and name in like:
            array = np.asarray(like[name])
            wanted = (array.dtype.kind.replace("u", "i"), array.shape)
        else:
            continue
        if (_KINDS[spec.dtype[0]], spec.shape) != wanted:
            raise RunFolderError(
                f"{path}: the checkpoint does not fit: state/{printable(name)} is {spec.dtype} of "
                f"shape {list(spec.shape)} and must be {_IN_WORDS[wanted[0]]} of shape "
                f"{list(wanted[1])}"
            )
    return list(found)


_IN_WORDS = {"f": "floats", "i": "whole numbers", "b": "truth values"}


def check_state(state: Mapping[str, NDArray[Any]], rounds: int, path: Path) -> None:
    """Refuse counts and amounts that no run of so many rounds can have."""
    limits: dict[str, tuple[float, float]] = {
        "tracker.total_rounds": (rounds, rounds),
        "tracker.participation_count": (0, rounds),
        "tracker.ema_value": (0, np.inf),
        "tracker.ema_round": (-np.inf, rounds),
        "mechanism.last_join": (-np.inf, rounds),
        "mechanism.nominal_epsilon": (0, np.inf),
        "mechanism.squared_gdp": (0, np.inf),
        "mechanism.bound": (0, np.inf),
        "mechanism.quantile_bound": (np.finfo(np.float64).tiny, np.finfo(np.float64).max),
        "account.spent": (0, np.inf),
        "server.behind": (-1, rounds),
        "server.seen": (0, rounds),
    }
    for name, (least, most) in limits.items():
        values = state.get(name)
        # A comparison with NaN is false.
        if values is not None and not np.all((values >= least) & (values <= most)):
            raise RunFolderError(
                f"{path}: the checkpoint does not fit: state/{name} holds values that no run of "
                f"{rounds} rounds has"
            )
