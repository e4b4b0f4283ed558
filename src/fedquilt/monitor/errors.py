"""What a monitor can fail with."""

from __future__ import annotations

from fedquilt.errors import FedquiltError


class MonitorError(FedquiltError, RuntimeError):
    """Sampling could not start, or ended before it was told to."""


class MetricTypeError(FedquiltError, TypeError):
    """A metric was switched with something that is not True or False."""


class PowerUnavailableError(MonitorError):
    """Power was asked for and the machine offers no way to measure it."""


class DeliveryError(MonitorError):
    """Samples were taken but could not all be delivered to the remote server."""


class MissingExtraError(MonitorError, ImportError):
    """A package of the extra `monitor` is needed and not installed."""
