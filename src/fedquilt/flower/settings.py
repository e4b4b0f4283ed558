"""What only the Flower engine asks for, beside the options of every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.config.choices import COMPRESSIONS

PREFIX = "flower_"
"""In a run configuration these settings are written with it: `flower_deadline = 60.0`."""


@dataclass(frozen=True, kw_only=True)
class FlowerSettings:
    """How a server deals with its nodes.

    Parameters
    ----------
    deadline : float
        Seconds from the order to the last moment at which a reply counts.  It is the order's
        time to live as well, so no node works on a round that is over.
    step_deadline : float
        The same for each of the short steps of secure aggregation, in which nobody trains.
    min_nodes : int
        How many clients must be connected before a round begins.
    wait : float
        How long to wait for them, in seconds, before the run stops (it can be resumed).
    poll : float
        Seconds between two looks for replies.
    compression : str
        How updates travel (`training/compression.py`); `none`: as the run's own option says.
    topk : float
        The share of entries that `topk`, `randomk` and `ternary` send.
    monitor : bool
        Let nodes report processor, memory, network and power to the server.  How long a
        client computes tells how much it holds: the file is the owner's alone.
    resume : bool
        Continue the last run in the operator's folder that is not finished.
    """

    deadline: float = 600.0
    step_deadline: float = 60.0
    min_nodes: int = 1
    wait: float = 600.0
    poll: float = 0.1
    compression: str = "none"
    topk: float = 0.1
    monitor: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("deadline", "step_deadline", "wait", "poll"):
            checks.number(PREFIX + name, getattr(self, name), above=0, at_most=1e7)
        checks.integer(PREFIX + "min_nodes", self.min_nodes, at_least=1)
        checks.choice(PREFIX + "compression", self.compression, COMPRESSIONS)
        checks.number(PREFIX + "topk", self.topk, above=0, at_most=1)


def split_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], FlowerSettings]:
    """Part a run configuration into options of the run and those of this engine.

    Keys may be written with dashes, as Flower's own are; an empty text is an option that
    was not given, because a run configuration cannot leave one out.
    """
    plain = {key.replace("-", "_"): value for key, value in given.items() if value != ""}
    own = {k[len(PREFIX) :]: v for k, v in plain.items() if k.startswith(PREFIX)}
    known = {field.name for field in dataclasses.fields(FlowerSettings)}
    unknown = sorted(own.keys() - known)
    if unknown:
        raise InvalidValueError(
            f"{PREFIX}{unknown[0]} must be one of "
            f"{', '.join(PREFIX + name for name in sorted(known))}"
        )
    rest = {key: value for key, value in plain.items() if not key.startswith(PREFIX)}
    return rest, FlowerSettings(**own)
