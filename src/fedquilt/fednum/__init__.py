"""The classes of the FedNum document, and what its comparisons stand beside.

`FedNumClient` and `FedNumServer` are also in `fedquilt.condense`, where the document has them.
"""

from fedquilt.fednum.client import FedNumClient
from fedquilt.fednum.server import FedNumServer

__all__ = ["FedNumClient", "FedNumServer"]
