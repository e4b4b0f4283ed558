"""Which part of the model each client trains, joined with local training.

`fedquilt.subnet` knows how to cut models and `fedquilt.learning` how to train them;
here a schedule decides who holds what in a round, and an engine trains it.

| file | what it does |
|---|---|
| `tiers` | the width of every client, from a list or a table of devices |
| `slices` | the slice of a client in a round, its place in the model, the public coverage |
| `engine` | trains the cohort, one group of clients with the same slice at a time |
| `losses` | HeteroFL's masked loss, FjORD's self-distillation, DepthFL's exits |
| `depth` | slices by depth of models with early exits |
| `costs` | parameters, bytes and multiply-adds of a slice |
"""

from fedquilt.slicing.costs import cost_of_everybody, cost_table
from fedquilt.slicing.engine import SlicedEngine
from fedquilt.slicing.slices import Slicing, make_slicing, smallest_model

__all__ = [
    "SlicedEngine",
    "Slicing",
    "cost_of_everybody",
    "cost_table",
    "make_slicing",
    "smallest_model",
]
