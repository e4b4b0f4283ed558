"""What a sampler's process and the process that started it tell each other.

Lines of JSON.  The settings come first; then `{"metrics": ...}` or `{"stop": true}` go to
the sampler, and back come `{"ready": {"port": ...}}`, `{"sample": ...}`,
`{"switched": true}`, `{"refused": error}`, and at the end `{"failed": error}` or
`{"done": true}`.
"""

from __future__ import annotations

import traceback
from dataclasses import asdict
from typing import Any

from fedquilt.errors import FedquiltError, InvalidValueError, StorageError
from fedquilt.monitor.errors import (
    DeliveryError,
    MissingExtraError,
    MonitorError,
    PowerUnavailableError,
)
from fedquilt.monitor.runner import surfaced
from fedquilt.monitor.samples import Sample

_KINDS: dict[str, type[FedquiltError]] = {
    kind.__name__: kind
    for kind in (
        *(MonitorError, PowerUnavailableError, DeliveryError, MissingExtraError),
        *(StorageError, InvalidValueError),
    )
}


def pack_error(error: BaseException) -> dict[str, str]:
    """Return an error as plain data, with the place where it happened."""
    shown = surfaced(error)
    trace = "".join(traceback.format_exception(error))
    return {"kind": type(shown).__name__, "text": str(shown), "trace": trace}


def unpack_error(held: dict[str, str]) -> FedquiltError:
    """Return the error that `pack_error` packed; its trace is a note."""
    error = _KINDS.get(held["kind"], MonitorError)(held["text"])
    error.add_note(f"in the sampler's process:\n{held['trace']}")
    return error


def pack_sample(sample: Sample) -> dict[str, Any]:
    """Return a sample as plain data."""
    return asdict(sample)


def unpack_sample(held: dict[str, Any]) -> Sample:
    """Return the sample that `pack_sample` packed."""
    return Sample(**held)
