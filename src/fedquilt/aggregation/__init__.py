"""From the clients' updates to the next global model."""

from fedquilt.aggregation.accumulators import (
    Accumulator,
    Concatenation,
    Place,
    RunningMean,
    sensitivity_of,
    try_sensitivity,
)
from fedquilt.aggregation.server import ServerOptimizer, ServerStep, make_server_optimizer

__all__ = [
    "Accumulator",
    "Concatenation",
    "Place",
    "RunningMean",
    "ServerOptimizer",
    "ServerStep",
    "make_server_optimizer",
    "sensitivity_of",
    "try_sensitivity",
]
