"""From the clients' updates to the next global model."""

from fedquilt.aggregation.mean import RunningMean
from fedquilt.aggregation.server import ServerOptimizer, make_server_optimizer

__all__ = ["RunningMean", "ServerOptimizer", "make_server_optimizer"]
