"""Samples posted to an HTTP server, in the form that `fedquilt.log` uses."""

from __future__ import annotations

import logging
from typing import Any

from fedquilt.log.address import Address
from fedquilt.log.delivery import Delivery
from fedquilt.log.handlers import record_fields
from fedquilt.monitor.errors import DeliveryError
from fedquilt.monitor.samples import Sample

CLOSE_SECONDS = 2.0


class RemoteSink:
    """Posts every sample from a thread of its own; an outage does not stop the sampling.

    `simple` posts the fields `identifier` and `message` to `/simple_log`; otherwise a
    whole log record goes to `/log`, with the sample's numbers as further fields.
    """

    port = None

    def __init__(self, host: str, identifier: str, *, simple: bool) -> None:
        self._identifier = identifier
        self._simple = simple
        self._written = 0
        self._delivery = Delivery(Address.parse(host))

    def write(self, sample: Sample) -> None:
        """Queue a sample."""
        self._written += 1
        if self._simple:
            fields: dict[str, Any] = {"identifier": self._identifier, "message": sample.text()}
            self._delivery.put("/simple_log", fields)
        else:
            self._delivery.put("/log", self._record(sample))

    def close(self) -> None:
        """Deliver what waits, for at most two seconds; raise when something is left."""
        self._delivery.close(CLOSE_SECONDS)
        lost = self._delivery.undelivered
        if lost:
            raise DeliveryError(
                f"{lost} of {self._written} samples were not delivered to "
                f"{self._delivery.address}: {self._delivery.last_error}; stats() has them all"
            )

    def _record(self, sample: Sample) -> dict[str, Any]:
        record = logging.LogRecord(
            "fedquilt.monitor", logging.INFO, __file__, 0, sample.text(), None, None
        )
        fields = record_fields(record, self._identifier)
        return {**fields, "seconds": sample.seconds, "time": sample.time, **sample.values}
