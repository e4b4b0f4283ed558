"""What a node used while it worked on an order: processor, memory, network, power."""

from __future__ import annotations

import os

from fedquilt.observe.meters import Sampler
from fedquilt.observe.samples import Metrics, PowerUnavailableError, Reach


class Reading:
    """The meters of this process, from the beginning of an order to its end.

    Network traffic is that of the node's network namespace; what talks to the server is
    another process of it.  Power is left out where the machine has no meter.
    """

    def __init__(self) -> None:
        reach = Reach(loopback=True)
        try:
            self._sampler = Sampler(os.getpid(), reach, Metrics(power=True))
        except PowerUnavailableError:
            self._sampler = Sampler(os.getpid(), reach, Metrics(power=False))

    def end(self) -> dict[str, float]:
        """Return the seconds since the beginning and what was measured in them."""
        sample = self._sampler.read()
        self._sampler.close()
        return {"seconds": sample.seconds, **sample.values}
