"""A SuperNode that asks often while a run goes on, and is soon known to be gone.

    python -m fedquilt.flower.supernode --superlink server.example.org:443 ...

takes the options of `flower-supernode` and is that program, but for its pauses:

| pause | Flower | here |
|---|---|---|
| until it asks for an order again | 3 s | 0.25 s within a minute of its last order, then 3 s |
| until it looks again whether its app has a reply | 0.5 s | 0.05 s, of this machine alone |
| between two signs of life, and until they are missed | 20 s, 60 s | 4 s, 20 s |

A round waits for the slowest of its nodes, and most of that was pauses.  A node that is killed is
refused until its last sign of life is missed, so that it also comes back sooner.
"""

from __future__ import annotations

import time

from fedquilt.flower import internals

BUSY_SECONDS = 60.0
"""How long after an order a node expects the next one."""
HEARTBEAT_SECONDS = 10
"""The least that a SuperLink accepts; it forgets a node after twice that."""
_ASK_AGAIN, _LOOK_AGAIN = 0.25, 0.05
_SHORT = 1.0  # Flower's pauses below this are waits for the app, those above for orders


class Pauses:
    """Stands in the place of the module `time` in Flower's loop."""

    def __init__(self) -> None:
        self._busy_until = 0.0

    def sleep(self, seconds: float) -> None:
        """Wait, but not as long as Flower would."""
        now = time.monotonic()
        if seconds < _SHORT:  # an order is being answered
            self._busy_until = now + BUSY_SECONDS
            time.sleep(min(seconds, _LOOK_AGAIN))
        else:
            time.sleep(_ASK_AGAIN if now < self._busy_until else seconds)


def main() -> None:
    """Be a SuperNode."""
    internals.run_supernode(Pauses(), HEARTBEAT_SECONDS)


if __name__ == "__main__":
    main()
