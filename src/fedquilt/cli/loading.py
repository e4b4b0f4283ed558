"""Loading what a command needs, without looking for garbage meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Import within it: modules make objects by the hundred thousand and no garbage.

    A collection goes through all of them several times while they load, a fifth of a second in
    all; afterwards they are set aside, so that no collection of the run looks at them again.
    Once torch is there, there is nothing of the kind to do.
    """
    if "torch" in sys.modules:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
