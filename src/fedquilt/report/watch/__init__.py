"""Looking on while something runs: a page on this machine that follows runs or a ledger."""

from fedquilt.report.watch.server import WatchServer
from fedquilt.report.watch.source import LedgerSource, RunsSource, Source, source_of

__all__ = ["LedgerSource", "RunsSource", "Source", "WatchServer", "source_of"]
