"""What a power cut may leave of a folder: a model of a file system that keeps no more than it must.

What POSIX promises is little.  `fsync` of a file makes its bytes durable and not its name;
`fsync` of a folder makes the names in it durable.  Everything else may be lost in any
combination, with these exceptions: what happens to one name happens in order, and a rename
happens wholly or not at all.  Of bytes that were written and not synced, each piece of a
sector may be there or not; where a file grew and its bytes did not arrive there are zeros.

`Disk` follows the log of the shim (shim.c).  `cut` forgets what was not synced: all of it, or
what a seeded coin picks, and gives back what is left.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SECTOR = 512
_HEAD = struct.Struct("=iiqII")
_OPEN, _CLOSE, _WRITE, _TRUNCATE, _SYNC, _RENAME, _UNLINK, _LINK, _MKDIR, _RMDIR = range(1, 11)


@dataclass(eq=False)
class File:
    """The bytes of a file: those on the disk, those that programs see, and the way between."""

    durable: bytes = b""
    current: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    @classmethod
    def of(cls, content: bytes) -> File:
        """Return a file whose bytes are all on the disk."""
        return cls(content, bytearray(content))

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes that are not durable yet."""
        self.pending.append((offset, data))
        _put(self.current, offset, data)

    def truncate(self, size: int) -> None:
        """Cut the file, or make it longer by zeros."""
        self.pending.append((size, None))
        _resize(self.current, size)

    def sync(self) -> None:
        """Make everything durable."""
        self.durable = bytes(self.current)
        self.pending.clear()

    def after_cut(self, draws: random.Random | None) -> File:
        """Return what is left: nothing that was not synced, or what the draws pick."""
        left = bytearray(self.durable)
        keeps = 0.0 if draws is None else draws.choice((0.0, 0.5, 0.9, 1.0))
        for offset, data in self.pending:
            if data is None:
                if draws is not None and draws.random() < keeps:
                    _resize(left, offset)
                continue
            for start, piece in _pieces(offset, data):
                if draws is not None and draws.random() < keeps:
                    _put(left, start, piece)
        if draws is not None and len(self.current) > len(left) and draws.random() < 0.25:
            _resize(left, len(self.current))  # it grew, and what it grew by did not arrive
        return File.of(bytes(left))


def _pieces(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the parts of a write that lie in one sector each."""
    start = offset
    while start < offset + len(data):
        end = min((start // SECTOR + 1) * SECTOR, offset + len(data))
        yield start, data[start - offset : end - offset]
        start = end


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


Node = File | None  # None is a folder


class Change(NamedTuple):
    """A change of names that the disk does not have yet: `name` gets `node`, `gone` goes."""

    name: str | None
    node: Node
    gone: str | None


class Disk:
    """The files below a folder as programs see them and as the disk has them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: dict[str, Node] = {}
        for path in sorted(root.rglob("*")):
            self.names[str(path)] = None if path.is_dir() else File.of(path.read_bytes())
        self._durable = dict(self.names)
        self._pending: list[Change] = []

    def replay(self, log: Path) -> None:
        """Do what a process did, by its log."""
        handles: dict[int, Node | str] = {}
        for op, handle, number, path, data in _records(log.read_bytes()):
            self._do(op, handle, number, path, data, handles)

    def _do(
        self,
        op: int,
        handle: int,
        number: int,
        path: str,
        data: bytes,
        handles: dict[int, Node | str],
    ) -> None:
        if op == _OPEN:
            handles[handle] = self._open(path, number)
        elif op == _CLOSE:
            handles.pop(handle, None)
        elif op in (_WRITE, _TRUNCATE, _SYNC):
            self._do_content(op, handles[handle], number, data)
        else:
            self._do_names(op, path, data.decode())

    def _open(self, path: str, flags: int) -> Node | str:
        path = os.path.normpath(path)
        if path == str(self.root) or (path in self.names and self.names[path] is None):
            return path
        if path not in self.names:
            self._change(path, File(), None)
        file = self.names[path]
        if flags & os.O_TRUNC and file is not None and file.current:
            file.truncate(0)
        return file

    def _do_content(self, op: int, opened: Node | str, number: int, data: bytes) -> None:
        if isinstance(opened, str):
            if op == _SYNC:
                self._sync_folder(opened)
        elif opened is not None:
            if op == _WRITE:
                opened.write(number, data)
            elif op == _TRUNCATE:
                opened.truncate(number)
            else:
                opened.sync()

    def _do_names(self, op: int, path: str, other: str) -> None:
        path, other = os.path.normpath(path), os.path.normpath(other)
        if op == _RENAME:
            self._change(other, self.names[path], path)
        elif op == _LINK:
            self._change(other, self.names[path], None)
        elif op == _MKDIR:
            self._change(path, None, None)
        else:
            self._change(None, None, path)

    def _change(self, name: str | None, node: Node, gone: str | None) -> None:
        change = Change(name, node, gone)
        _apply(change, self.names)
        self._pending.append(change)

    def _sync_folder(self, folder: str) -> None:
        later = []
        for change in self._pending:
            if os.path.dirname(change.name or change.gone or "") == folder:
                _apply(change, self._durable)
            else:
                later.append(change)
        self._pending = later

    def is_what_is_there(self) -> bool:
        """Tell whether the model has the files that the folder has: no call was missed."""
        found = {str(path): path for path in self.root.rglob("*")}
        return found.keys() == self.names.keys() and all(
            path.is_dir() if node is None else path.read_bytes() == node.current
            for path, node in ((found[name], node) for name, node in self.names.items())
        )

    def durable(self, name: str) -> bytes | None:
        """Return what the file of this name would hold if all that was not synced were lost."""
        node = self._durable.get(name)
        return None if node is None else node.durable

    def cut(self, draws: random.Random | None) -> None:
        """Forget what was not synced, all of it or what the draws pick, and write the rest."""
        names, kept = dict(self._durable), 0.0 if draws is None else draws.choice((0.3, 0.7, 1.0))
        stopped: set[str] = set()  # names of which a change was lost: later ones are, too
        for change in self._pending:
            touched = {name for name in (change.name, change.gone) if name is not None}
            possible = change.gone is None or change.gone in names
            if possible and not touched & stopped and draws and draws.random() < kept:
                _apply(change, names)
            else:
                stopped |= touched
        left: dict[int, File] = {}  # a file may have two names
        for node in names.values():
            if node is not None and id(node) not in left:
                left[id(node)] = node.after_cut(draws)
        names = {name: node and left[id(node)] for name, node in names.items()}
        self.names = {name: node for name, node in names.items() if self._is_reached(name, names)}
        self._durable, self._pending = dict(self.names), []
        self._write()

    def _is_reached(self, name: str, names: dict[str, Node]) -> bool:
        """Tell whether all folders above a name are there."""
        above = Path(name).parent
        return above == self.root or (
            names.get(str(above), name) is None and self._is_reached(str(above), names)
        )

    def _write(self) -> None:
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in sorted(self.names):
            node, path = self.names[name], Path(name)
            if node is None:
                path.mkdir()
            else:
                path.write_bytes(node.current)
                path.chmod(0o600)


def _apply(change: Change, names: dict[str, Node]) -> None:
    if change.gone is not None:
        names.pop(change.gone, None)
    if change.name is not None:
        names[change.name] = change.node


def _records(log: bytes) -> Iterator[tuple[int, int, int, str, bytes]]:
    place = 0
    while place < len(log):
        op, handle, number, path_size, data_size = _HEAD.unpack_from(log, place)
        place += _HEAD.size
        path = log[place : place + path_size].decode()
        place += path_size
        yield op, handle, number, path, log[place : place + data_size]
        place += data_size
