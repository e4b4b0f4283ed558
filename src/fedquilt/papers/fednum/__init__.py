"""The classes of the FedNum document, and the baselines of its comparisons.

Their public place is `fedquilt.condense`, which has `FedNumClient` and `FedNumServer` too.
"""

from fedquilt.papers.fednum.client import FedNumClient
from fedquilt.papers.fednum.server import FedNumServer

__all__ = ["FedNumClient", "FedNumServer"]
