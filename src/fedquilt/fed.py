"""Distribution and aggregation: the names of the seed documents' module `fed`.

`aggregate_layer` works on layers, `extract` and `merge` on Flower's types.  The
same over state dicts and networks, with torch alone: `extract_state`,
`merge_states`, `distribute`, `aggregate`; and `slice_model` for any model.
"""

from fedquilt.subnet.parameters import extract, merge
from fedquilt.subnet.plan import slice_model
from fedquilt.subnet.state import (
    aggregate,
    aggregate_layer,
    distribute,
    extract_state,
    merge_states,
)

__all__ = [
    "aggregate",
    "aggregate_layer",
    "distribute",
    "extract",
    "extract_state",
    "merge",
    "merge_states",
    "slice_model",
]
