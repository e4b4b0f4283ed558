"""Sub-networks: each client trains the slice of the model that it can hold.

`ranges` and `axis` are the index algebra of one dimension, `tensor_map` and
`slice_map` that of tensors and of flat vectors, `holder_mean` the aggregation
rule, `plan` cuts any model, `schedules` says who gets which slice.
"""

from fedquilt.subnet.axis import Axis
from fedquilt.subnet.depth import Blocks, depth_slice
from fedquilt.subnet.fjord import self_distillation_loss
from fedquilt.subnet.heterofl import Scaler, masked_cross_entropy, scale_outputs
from fedquilt.subnet.holder_mean import mean_over_holders
from fedquilt.subnet.model_slice import ModelSlice, attach, slice_between
from fedquilt.subnet.plan import PlanAxis, SlicePlan, slice_model
from fedquilt.subnet.selection import FixedStructure, Prefix, RandomUnits, Selection, Window
from fedquilt.subnet.slice_map import HolderMean, SliceMap
from fedquilt.subnet.state import (
    aggregate,
    aggregate_layer,
    distribute,
    extract_state,
    merge_states,
)
from fedquilt.subnet.tensor_map import TensorMap

__all__ = [
    "Axis",
    "Blocks",
    "FixedStructure",
    "HolderMean",
    "ModelSlice",
    "PlanAxis",
    "Prefix",
    "RandomUnits",
    "Scaler",
    "Selection",
    "SliceMap",
    "SlicePlan",
    "TensorMap",
    "Window",
    "aggregate",
    "aggregate_layer",
    "attach",
    "depth_slice",
    "distribute",
    "extract_state",
    "masked_cross_entropy",
    "mean_over_holders",
    "merge_states",
    "scale_outputs",
    "self_distillation_loss",
    "slice_between",
    "slice_model",
]
