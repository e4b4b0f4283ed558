"""The one writer, appender, lock and reader of files."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fedquilt.common.errors import RunFolderError, StorageError
from fedquilt.common.storage import (
    NoLocksError,
    append_line,
    has_locks,
    lock_file,
    make_folder,
    open_regular,
    remove_leftovers,
    sync_file,
    sync_folder,
    write_file,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_whole_with_its_rights(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_file(path, b"one", 0o600, parents=True)
    assert (path.read_bytes(), mode_of(path)) == (b"one", 0o600)
    with path.open("rb") as reader:
        write_file(path, b"two", 0o640)
        assert reader.read() == b"one"
    assert path.read_bytes() == b"two"
    assert mode_of(path) == 0o640 & ~_umask()
    assert names(path.parent) == ["file"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_bytes_then_name_then_folder_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        if kind == "file":
            assert os.fstat(handle).st_size == 5, "synced before it was written"
        happened.append(kind)
        fsync(handle)

    def replaced(source: Path, target: Path) -> None:
        happened.append("rename")
        assert Path(source).parent == target.parent
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_file(tmp_path / "file", b"bytes")
    assert happened == ["file", "rename", "folder"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_no_rest(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(StorageError) as raised:
        write_file(path, b"new")
    assert str(raised.value) == f"cannot write '{path}': the disk is full"
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    link = tmp_path / "link"
    link.symlink_to("precious")
    with pytest.raises(StorageError, match="link"):
        append_line(link, "line")
    with pytest.raises(OSError, match="link"):
        lock_file(link)
    write_file(link, b"new")
    assert not link.is_symlink()
    assert (link.read_text(), (tmp_path / "precious").read_text()) == ("new", "precious")


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a pipe"])
def test_only_regular_files_are_opened_and_nothing_waits(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path if kind == "pipe" else tmp_path / "pipe")
        if kind != "pipe":
            path.symlink_to("pipe")
    for use in (lock_file, sync_file, lambda place: append_line(place, "line")):
        with pytest.raises(RunFolderError, match=r"file' must be a regular file; it is a "):
            use(path)
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        with pytest.raises(RunFolderError, match="must be a regular file"):
            open_regular(path, flags)


def test_lines_are_appended_and_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    sync_file(path)  # nothing there, nothing to do
    for line in ("one", "zwölf"):
        append_line(path, line, 0o600)
    assert path.read_text(encoding="utf-8") == "one\nzwölf\n"
    assert mode_of(path) == 0o600
    seen: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(os.fstat(handle).st_ino))
    sync_file(path)
    assert seen == [path.stat().st_ino]


def test_a_lock_keeps_the_file_and_everybody_else_out(tmp_path: Path) -> None:
    path = tmp_path / "locked"
    path.write_text("content")
    with lock_file(path) as held:
        with pytest.raises(BlockingIOError):
            lock_file(path)
        assert held.read() == b"content"
    lock_file(path).close()
    assert path.read_text() == "content"


def test_leftovers_of_killed_writers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", lambda path: None)
        killed.setattr(os, "replace", lambda source, target: None)
        write_file(tmp_path / "file", b"new")
    assert len(names(tmp_path)) == 1
    (tmp_path / "kept.tmp").touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["kept.tmp"]


def refuse(number: int) -> Callable[..., None]:
    """Return a function that fails as a system call does."""

    def call(*given: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


NO_LOCKS = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]


def is_locked_for_others(path: Path) -> bool:
    """Ask from another process: locks of fcntl are a process's own."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            lock_file(path).close()
            code = 0
        except BlockingIOError:
            code = 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 1


@pytest.mark.parametrize("number", NO_LOCKS)
def test_where_there_is_no_flock_the_other_kind_of_lock_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse(number))
    path = tmp_path / "lock"
    with lock_file(path):
        assert is_locked_for_others(path)
    assert not is_locked_for_others(path)
    assert has_locks(tmp_path)


@pytest.mark.parametrize("number", NO_LOCKS)
def test_no_locks_at_all_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, refuse(number))
    with pytest.raises(NoLocksError, match=r"has no file locks .*Lustre"):
        lock_file(tmp_path / "lock")
    assert not has_locks(tmp_path)
    assert names(tmp_path) == ["lock"]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files and folders that were synced, in order."""
    found: list[str] = []
    fsync = os.fsync

    def noting(handle: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noting)
    return found


def test_names_are_durable_before_anything_relies_on_them(
    tmp_path: Path, synced: list[str]
) -> None:
    """A power cut takes a name whose folder was not synced, with all that is in the file."""
    make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path.name, "a"]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2
    synced.clear()
    append_line(tmp_path / "a" / "lines", "one")
    assert synced == ["a"]
    append_line(tmp_path / "a" / "lines", "two")
    assert synced == ["a"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_folders_that_cannot_be_synced_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "fsync", refuse(number))
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        sync_folder(tmp_path)
