"""Distribution and aggregation: the names of the HeFlwr document, `heflwr.fed`, and more.

`aggregate_layer` works on layers, `extract` and `merge` on Flower's types.  The
same over state dicts and networks, with torch alone: `extract_state`,
`merge_states`, `distribute`, `aggregate`; and `slice_model` for any model.
"""

from fedquilt.slices.aggregate import (
    aggregate,
    aggregate_layer,
    distribute,
    extract,
    extract_state,
    merge,
    merge_states,
)
from fedquilt.slices.slicer import slice_model

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
