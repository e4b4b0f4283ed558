"""Condensation: clients send class statistics, the server grows images from them.

    step 3    the engine looks at the clients' samples instead of training on them
    step 8    the server matches its images to what was released, and trains on them

`FedNumClient` and `FedNumServer` are the classes of the FedNum document; the command
line and `fedquilt.run` reach the same code through a configuration.
"""

from fedquilt.condense.augment import Augmentation
from fedquilt.condense.embeds import Embeds, LayerEmbedding
from fedquilt.condense.fednum_client import FedNumClient
from fedquilt.condense.fednum_server import FedNumServer
from fedquilt.condense.synthetic import SyntheticSet

__all__ = [
    "Augmentation",
    "Embeds",
    "FedNumClient",
    "FedNumServer",
    "LayerEmbedding",
    "SyntheticSet",
]
