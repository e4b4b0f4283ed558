"""Condensation in a round: clients send statistics, the server grows images from them.

Joins `condense` (how), `learning` (what an engine is) and `aggregation` (what a server
step is), so that `round.py` runs a condensation like any other round:

    step 3    the engine looks at the clients' samples instead of training on them
    step 8    the server matches its images to what was released, and trains on them
"""

from fedquilt.condensing.build import Condensing, make_condensing
from fedquilt.condensing.engine import StatisticsEngine
from fedquilt.condensing.lens import Lens
from fedquilt.condensing.memory import freed_memory_kept
from fedquilt.condensing.server import CondensingServer

__all__ = [
    "Condensing",
    "CondensingServer",
    "Lens",
    "StatisticsEngine",
    "freed_memory_kept",
    "make_condensing",
]
