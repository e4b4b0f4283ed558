"""Slices: each client trains the part of the model that it can hold.

| file | what it does |
|---|---|
| `tensor_map` | index algebra of tensors; the mean over holders |
| `model_slice` | a slice of a model, and its place in the flat vector |
| `layers`, `layer_rules` | layers that stand for a part of a larger one; how each kind is cut |
| `graph`, `slicer` | cuts any model: which dimensions go together, the slices, also in depth |
| `selection` | index algebra of one dimension; the width of every client; which units are kept |
| `aggregate` | distribution and aggregation: of states, of Flower's types |
| `slicing`, `method` | each client's slice or ranks in every round, the cost; the method of a run |
| `engine` | trains the cohort, one group of clients with the same slice at a time |
"""

from fedquilt.slices.aggregate import (
    aggregate,
    aggregate_layer,
    distribute,
    extract_state,
    merge_states,
)
from fedquilt.slices.engine import self_distillation_loss
from fedquilt.slices.model_slice import ModelSlice, SliceMap, attach, slice_between
from fedquilt.slices.selection import (
    Axis,
    FixedStructure,
    Listed,
    Prefix,
    RandomUnits,
    Selection,
    Window,
)
from fedquilt.slices.slicer import (
    Blocks,
    PlanAxis,
    Scaler,
    Slicer,
    depth_slice,
    scale_outputs,
    slice_model,
)
from fedquilt.slices.tensor_map import TensorMap, mean_over_holders

__all__ = [
    "Axis",
    "Blocks",
    "FixedStructure",
    "Listed",
    "ModelSlice",
    "PlanAxis",
    "Prefix",
    "RandomUnits",
    "Scaler",
    "Selection",
    "SliceMap",
    "Slicer",
    "TensorMap",
    "Window",
    "aggregate",
    "aggregate_layer",
    "attach",
    "depth_slice",
    "distribute",
    "extract_state",
    "mean_over_holders",
    "merge_states",
    "scale_outputs",
    "self_distillation_loss",
    "slice_between",
    "slice_model",
]
