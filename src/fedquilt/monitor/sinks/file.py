"""Samples as lines of a text file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from fedquilt.errors import StorageError
from fedquilt.monitor.samples import Sample


class FileSink:
    """Appends to a file: the date and time of the start, then a line for each sample."""

    port = None

    def __init__(self, file: str) -> None:
        self._path = Path(file)
        with self._storage_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115
        try:
            self._line(datetime.now().strftime("%Y-%m-%d %H:%M:%S"))
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.close()
            raise

    def write(self, sample: Sample) -> None:
        """Append a sample; it is in the file when this returns."""
        self._line(sample.text())

    def close(self) -> None:
        """Close the file."""
        with self._storage_errors():
            self._file.close()

    def _line(self, text: str) -> None:
        with self._storage_errors():
            self._file.write(f"{text}\n")
            self._file.flush()

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"file={str(self._path)!r} cannot be written: {error}") from error
