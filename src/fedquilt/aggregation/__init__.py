"""From the clients' updates to the next global model."""

from fedquilt.aggregation.mean import EndToEnd, RunningMean, Total
from fedquilt.aggregation.server import ServerOptimizer, ServerStep, make_server_optimizer

__all__ = [
    "EndToEnd",
    "RunningMean",
    "ServerOptimizer",
    "ServerStep",
    "Total",
    "make_server_optimizer",
]
