"""What a sink offers, and how one is opened."""

from __future__ import annotations

from typing import Protocol

from fedquilt.monitor.samples import Sample
from fedquilt.monitor.settings import Target


class Sink(Protocol):
    """A place for samples."""

    @property
    def port(self) -> int | None:
        """The port it listens on, None when it does not listen."""

    def write(self, sample: Sample) -> None:
        """Take a sample."""

    def close(self) -> None:
        """End; raise when something that was written did not arrive."""


def open_sink(target: Target, network_scope: str) -> Sink:
    """Open the sink that `target` describes; `network_scope` says whose bytes it gets."""
    if target.kind == "file":
        return _open_file(target)
    if target.kind == "remote":
        return _open_remote(target)
    return _open_prometheus(target, network_scope)


def _open_file(target: Target) -> Sink:
    from fedquilt.monitor.sinks.file import FileSink

    return FileSink(target.file)


def _open_prometheus(target: Target, network_scope: str) -> Sink:
    from fedquilt.monitor.sinks.prometheus import PrometheusSink

    return PrometheusSink(target.address, target.port, network_scope)


def _open_remote(target: Target) -> Sink:
    from fedquilt.monitor.sinks.remote import RemoteSink

    return RemoteSink(target.host, target.identifier, simple=target.simple)
