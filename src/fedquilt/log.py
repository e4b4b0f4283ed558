"""The package's logger, and where its records go: console, file, HTTP server.

Importing adds no handler and changes no level, as a library should: until
`configure` is called, records go where the application's own logging sends them.

>>> from fedquilt.log import configure, log, logger, reset
>>> logger.name
'fedquilt'
"""

from fedquilt.observe.log_handlers import configure, log, logger, reset

__all__ = ["configure", "log", "logger", "reset"]
