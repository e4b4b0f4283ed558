"""Condensation: clients send class statistics, the server grows images from them.

    step 3    the engine computes statistics of the clients' samples; nobody trains on them
    step 8    the server matches its images to what was released, and trains on them

`FedNumClient` and `FedNumServer` are the classes of the FedNum document; the command
line and `fedquilt.run` reach the same code through a configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedquilt.condense.augment import Augmentation
from fedquilt.condense.embeds import Embeds, LayerEmbedding
from fedquilt.condense.matching import SyntheticSet

if TYPE_CHECKING:
    from fedquilt.papers.fednum import FedNumClient, FedNumServer

__all__ = [
    "Augmentation",
    "Embeds",
    "FedNumClient",
    "FedNumServer",
    "LayerEmbedding",
    "SyntheticSet",
]


def __getattr__(name: str) -> Any:
    """Return FedNum's classes, whose package `fedquilt.papers.fednum` stands above this one."""
    if name not in ("FedNumClient", "FedNumServer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedquilt.papers import fednum as fednum

    return getattr(fednum, name)
