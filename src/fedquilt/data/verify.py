"""Read a data file and refuse it unless it is, byte for byte, what it should be."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from pathlib import Path

from fedquilt.data import idx
from fedquilt.data.specs import FileSpec
from fedquilt.errors import DataError

_CHUNK = 1 << 20


def read_verified(path: Path, spec: FileSpec) -> bytes:
    """Return the unpacked content of the file at `path`, or raise with its name.

    Nothing is read from a file whose size shows that it cannot be the right one.
    """
    try:
        if not path.is_file():
            raise DataError("is not a regular file")
        _check_size(path, spec)
        raw = path.read_bytes()
        return _unpacked(raw, spec) if path.suffix == ".gz" else _checked(raw, spec)
    except (DataError, OSError) as error:
        raise DataError(f"{path}: {error}; expected {spec.expected}") from error


def file_md5(path: Path) -> str:
    """Return the MD5 of a file that may not fit in memory."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _check_size(path: Path, spec: FileSpec) -> None:
    size = path.stat().st_size
    if path.suffix != ".gz":
        if size != spec.size:
            raise DataError(f"has {size} bytes")
    elif size > spec.size + _CHUNK:
        raise DataError(f"has {size} bytes, more than its content would have unpacked")


def _unpacked(raw: bytes, spec: FileSpec) -> bytes:
    """Unpack at most one byte more than expected, so that no bomb fills the memory."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            content = file.read(spec.size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"is torn or no gzip file ({len(raw)} bytes, {error})") from error
    # The original packing is known to hold the right content.
    if hashlib.md5(raw, usedforsecurity=False).hexdigest() == spec.packed_md5:
        return content
    return _checked(content, spec)


def _checked(content: bytes, spec: FileSpec) -> bytes:
    if spec.packed_md5 is not None:
        idx.parse(content, spec.dtype, spec.shape)
    if len(content) != spec.size:
        raise DataError(f"has content of {len(content)} bytes")
    found = hashlib.sha256(content).hexdigest()
    if found != spec.sha256:
        raise DataError(f"has other content (sha256 {found})")
    return content
