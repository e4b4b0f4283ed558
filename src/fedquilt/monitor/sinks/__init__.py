"""Where samples go: a file, Prometheus, an HTTP server."""

from fedquilt.monitor.sinks.sink import Sink, open_sink

__all__ = ["Sink", "open_sink"]
