"""What every split has to be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def assert_partition(clients: Sequence[NDArray[np.int64]], num_samples: int) -> None:
    """Fail unless every sample is at exactly one client, and no client is empty."""
    assert all(c.dtype == np.int64 and len(c) > 0 for c in clients)
    assert np.array_equal(np.sort(np.concatenate(clients)), np.arange(num_samples))
