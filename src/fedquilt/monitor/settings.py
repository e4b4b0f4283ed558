"""Everything that says what a monitor samples, as plain data.

A process monitor hands its settings to another process, so they are made of
numbers, texts and truth values and survive a trip through JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.monitor.metrics import Metrics

NETWORK_SCOPES = ("namespace", "process")


@dataclass(frozen=True)
class Reach:
    """How far the metrics reach.

    Attributes
    ----------
    children : bool
        Whether the processes that the monitored one started count with it.
    network_scope : str
        "namespace": all traffic of the network namespace, which on a plain machine is
        the whole machine.  "process": the TCP connections of the monitored
        processes (Linux).
    loopback : bool
        Whether traffic of the machine with itself counts in the namespace's.
    sysfs : str
        Where the files of power sensors are.
    """

    children: bool = True
    network_scope: str = "namespace"
    loopback: bool = True
    sysfs: str = "/sys"

    def __post_init__(self) -> None:
        for name in ("children", "loopback"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidValueError(f"{name}={getattr(self, name)!r} must be True or False")
        validate.choice("network_scope", self.network_scope, NETWORK_SCOPES)


@dataclass(frozen=True)
class Target:
    """Where samples go: "file", "prometheus" or "remote", and its own settings."""

    kind: str
    file: str = ""
    address: str = ""
    port: int = 0
    host: str = ""
    identifier: str = ""
    simple: bool = True


@dataclass(frozen=True)
class Settings:
    """What is sampled, how often, and where it goes."""

    pid: int
    interval: float
    metrics: Metrics
    reach: Reach
    target: Target

    def to_json(self) -> str:
        """Return the settings as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read what `to_json` wrote."""
        held = json.loads(text)
        return cls(
            pid=held["pid"],
            interval=held["interval"],
            metrics=Metrics(**held["metrics"]),
            reach=Reach(**held["reach"]),
            target=Target(**held["target"]),
        )
