"""Files that survive a crash: one opener, one writer, one appender, one lock; safetensors.

`open_regular` opens a file for what it is: a folder that somebody else has packed may hold a
link to any file of its reader, or a pipe that nobody ever writes to.

`write_file` replaces a file whole or leaves the old one: the bytes go to a temporary
file in the same folder and to the disk, then the name is moved, then the folder goes to
the disk.  A kill at any moment leaves the old file or the new one, and at most a
temporary file `.name.*.tmp`, which `remove_leftovers` deletes.

`as_safetensors` yields tensors from where they lie.  The library's own `save` holds all of them
a second time, as bytes, and a third time as one.  The format is a length, a header in JSON and
the bytes of each tensor (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.common.errors import InvalidValueError, IrregularFileError, StorageError

if TYPE_CHECKING:
    import torch

_CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "no permission",
    errno.EROFS: "the file system is read-only",
}
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
NO_LOCKS = "the file system has no file locks (Lustre without -o flock, NFS without a lock server)"


class NoLocksError(StorageError):
    """The file system has no file locks."""


@contextlib.contextmanager
def storage_errors(path: object) -> Iterator[None]:
    """Turn failures to write into a `StorageError` that names the place and the cause."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r}: {os_reason(error)}") from error


def os_reason(error: OSError) -> str:
    """Return why the system refused a file."""
    return _CAUSES.get(error.errno or 0, error.strerror or str(error))


def check_regular(path: Path) -> None:
    """Refuse what is there and is no regular file; a file that is not there is fine."""
    try:
        found = path.lstat().st_mode
    except OSError:  # whoever opens it says what is wrong
        return
    if not stat.S_ISREG(found):
        raise _irregular(path, found)


def check_own_folder(path: Path) -> None:
    """Refuse a link in the place of a folder; a folder that is not there is fine."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise IrregularFileError(f"{str(path)!r} must be a folder of its own, not a link or a file")


def check_own_tree(path: Path, *, but: Collection[str] = ()) -> None:
    """Refuse a folder in which anything, at any depth, leads out of it or is no file.

    Links of the names `but` may lead anywhere.
    """
    check_own_folder(path)
    inside = path.resolve()
    for folder, folders, names in os.walk(path):
        for one in (Path(folder, name) for name in (*folders, *names)):
            if one.is_symlink() and one.name in but:
                continue
            if one.is_symlink() and not one.resolve().is_relative_to(inside):
                raise IrregularFileError(f"{str(one)!r} must not lead out of {str(path)!r}")
            if not one.is_symlink() and not one.is_dir():
                check_regular(one)


def _irregular(path: Path, mode: int) -> IrregularFileError:
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}
    what = kinds.get(stat.S_IFMT(mode), "a device or a socket")
    return IrregularFileError(f"{str(path)!r} must be a regular file; it is {what}")


def open_regular(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file and nothing else: no link is followed, no pipe is waited for.

    Raises
    ------
    IrregularFileError
        It is a link, a pipe, a folder or a device.
    OSError
        It cannot be opened.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError:
        check_regular(path)  # says it better
        raise
    found = os.fstat(handle).st_mode
    if not stat.S_ISREG(found):
        os.close(handle)
        raise _irregular(path, found)
    return handle


def open_log(path: Path) -> int:
    """Open a file to add lines for its owner, made where there is none; no link is followed."""
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def write_file(
    path: Path,
    content: bytes | Iterable[bytes | memoryview],
    mode: int = 0o666,
    *,
    parents: bool = False,
) -> None:
    """Replace the file at `path`, whole or not at all, and make it durable.

    Parameters
    ----------
    path
        The file.  A symbolic link is replaced, never followed.
    content
        All of it, or its parts in order.
    mode
        The rights of the new file, less the umask.
    parents
        Whether to make the folders above it.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with storage_errors(path):
        if parents:
            make_folder(path.parent)
        # O_EXCL: the temporary file is ours, and no link that somebody put there.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            with open(handle, "wb") as stream:
                for part in (content,) if isinstance(content, bytes) else content:
                    stream.write(part)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            # Gone after the rename; a failure to remove it must not hide the first one.
            with contextlib.suppress(OSError):
                temporary.unlink()


def append_line(path: Path, line: str, mode: int = 0o666) -> None:
    """Add a line to a file, made with `mode` where there is none; links are not followed.

    The line survives the death of the process when this returns, and a power cut after
    `sync_file`: many lines are worth one wait for the disk.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with storage_errors(path):
        is_new = not path.exists()
        with open(open_regular(path, flags, mode), "ab") as stream:
            stream.write(line.encode() + b"\n")
        if is_new:  # its name, too, must survive whenever `sync_file` says that its lines do
            sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Make what was appended to a file durable; a file that is not there has nothing."""
    with (
        storage_errors(path),
        contextlib.suppress(FileNotFoundError),
        open(open_regular(path, os.O_RDWR), "rb+") as stream,
    ):
        os.fsync(stream.fileno())


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, durably; one that is there is fine."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make new names in a folder durable: after a rename it is the folder that has changed.

    Some file systems have no such thing for folders (SMB, some FUSE), and a folder may be
    closed to readers: there the names are as durable as they become by themselves.
    """
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writers that were killed; nobody else may write there."""
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):  # in nobody's way
            path.unlink()


def lock_file(path: Path, mode: int = 0o666) -> io.FileIO:
    """Open a file and lock it for this process; closing it unlocks it.

    The file is made where there is none, and its content stays as it is.  Only a regular
    file is locked (`open_regular`).

    Raises
    ------
    BlockingIOError
        Another process holds the lock.
    NoLocksError
        The file system has no locks.
    OSError
        The file cannot be opened.
    """
    held = io.FileIO(open_regular(path, os.O_RDWR | os.O_CREAT, mode), "r+")
    try:
        _lock(held, path)
    except BaseException:
        held.close()
        raise
    return held


def _lock(held: io.FileIO, path: Path) -> None:
    """Lock a file by flock, or by fcntl where only that is known (some NFS and FUSE)."""
    try:
        import fcntl  # posix only
    except ImportError as error:
        raise NoLocksError(
            f"cannot lock {str(path)!r}: this system has no fcntl (Windows; use WSL)"
        ) from error

    for take in (fcntl.flock, fcntl.lockf):
        try:
            take(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise BlockingIOError(error.errno, error.strerror) from error
            if error.errno not in _WITHOUT_LOCKS:
                raise
    raise NoLocksError(f"cannot lock {str(path)!r}: {NO_LOCKS}")


def has_locks(folder: Path) -> bool:
    """Try whether files of a folder can be locked by fcntl, as SQLite does it."""
    import fcntl  # posix only

    path = folder / f".{secrets.token_hex(8)}.tmp"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        path.unlink()
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _WITHOUT_LOCKS
    finally:
        os.close(handle)
    return True


# The format's names of torch's types, where they are not the first letter and the bits.
_NAMES = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_PLAIN = re.compile(r"([fiuc])(?:loat|nt|int|omplex)(8|16|32|64)")
_ALIGNED = 8


def as_safetensors(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield the parts of a file that holds these tensors, for `storage.write_file`.

    Wide types come first, so that every tensor begins where its type wants it to.
    """
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name in ordered:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _type_name(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNED) * _ALIGNED)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        yield _bytes_of(tensors[name])


def _type_name(name: str, tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if plain := _PLAIN.fullmatch(kind):
        return plain[1].upper() + plain[2]
    if kind not in _NAMES:
        raise InvalidValueError(f"{name} of type {tensor.dtype} must have a type that can be saved")
    return _NAMES[kind]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, in its own memory where it lies in one piece there."""
    import torch

    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
