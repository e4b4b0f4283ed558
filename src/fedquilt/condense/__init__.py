"""Server-side condensation from class statistics.

`FedNumClient` and `FedNumServer` are the classes of the FedNum document; the command
line and `fedquilt.run` reach the same code through a configuration.
"""

from fedquilt.condense.augment import Augmentation
from fedquilt.condense.client import FedNumClient
from fedquilt.condense.embeds import Embeds, LayerEmbedding
from fedquilt.condense.server import FedNumServer
from fedquilt.condense.synthetic import SyntheticSet

__all__ = [
    "Augmentation",
    "Embeds",
    "FedNumClient",
    "FedNumServer",
    "LayerEmbedding",
    "SyntheticSet",
]
