"""A SuperLink that answers its own user alone, and gives back the storage of what it deleted.

    python -m fedquilt.flower.superlink --host 127.0.0.1 --port 8000 ...

takes the options of `flower-superlink` and is that program, but for three things:

- **Who may ask.**  Its one port serves nodes, apps and operators, and Control asks for no login:
  whoever reaches it runs code as the federation's owner.  Flower has no login of its own (its
  accounts are a commercial extension), no socket in the file system, and sends no secret that we
  could compare.  So the kernel is asked: each request comes over a connection of this machine,
  whose other end belongs to a user (sock_diag(7)), and must be this process's user or root.
  `flwr`, the gate and the server's apps run as that user and notice nothing.
- **Storage.**  A reply that was fetched is deleted, and so is one that was refused; without more,
  the file keeps its size and the content.  Here freed pages are cut off at once (`auto_vacuum`)
  and overwritten (`secure_delete`), and the journal beside the file is cut to 4 MB.
- **Address.**  Any but loopback is refused: the gate is what the network sees.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sqlite3
import struct
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from fedquilt.flower import internals

_TABLE = Path("/proc/net/tcp")
_ESTABLISHED = 1
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR = 4, 20, 1, 2  # of netlink(7) and sock_diag(7)
_JOURNAL_BYTES = 1 << 22
_DATABASE = "--database"

App = Callable[[Any, Any, Any], Awaitable[None]]


def owner_of(mine: Any, theirs: Any) -> int | None:
    """Return the user whose connection ends at `theirs` here and at `mine`; None: nobody's.

    The kernel knows both ends of a connection on loopback, each with its owner.  A connection
    that is being closed has no owner any more.
    """
    try:
        ends = struct.pack(
            "!HH4s12x4s12x",
            *(theirs[1], mine[1]),
            *(socket.inet_aton(str(ipaddress.IPv4Address(end[0]))) for end in (theirs, mine)),
        )
        return _looked_up(ends)
    except OSError:
        return _listed(mine, theirs)  # a kernel without sock_diag
    except (TypeError, ValueError, struct.error):
        return None


def _looked_up(ends: bytes) -> int | None:
    """Ask for one connection: however many there are, that takes a tenth of a millisecond."""
    query = struct.pack("=BBxxI", socket.AF_INET, socket.IPPROTO_TCP, 1 << _ESTABLISHED)
    whole = query + ends + struct.pack("=I8s", 0, b"\xff" * 8)  # any interface, any cookie
    head = struct.pack("=IHHII", 16 + len(whole), _BY_FAMILY, _REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.sendto(head + whole, (0, 0))
        said = kernel.recv(8192)
    (kind,) = struct.unpack_from("=H", said, 4)
    if kind == _ERROR:
        (error,) = struct.unpack_from("=i", said, 16)
        if error == -errno.ENOENT:
            return None
        raise OSError(-error, "sock_diag")
    same = said[17] == _ESTABLISHED and said[20 : 20 + len(ends)] == ends
    return int(struct.unpack_from("=I", said, 80)[0]) if same else None


def _listed(mine: Any, theirs: Any) -> int | None:
    """Look for a connection in the table of all."""
    try:
        wanted = (_shown(*theirs), _shown(*mine), f"{_ESTABLISHED:02X}")
        rows = _TABLE.read_text(encoding="ascii").splitlines()[1:]
    except (OSError, TypeError, ValueError):
        return None
    found = [row.split() for row in rows]
    owners = [int(row[7]) for row in found if (row[1], row[2], row[3]) == wanted]
    return owners[0] if len(owners) == 1 else None


def _shown(host: str, port: int) -> str:
    """Return an address as the kernel's table has it: a number of this machine's byte order."""
    packed = socket.inet_aton(str(ipaddress.IPv4Address(host)))
    return f"{int.from_bytes(packed, sys.byteorder):08X}:{port:04X}"


def for_owner(app: App, allowed: Iterable[int] | None = None) -> App:
    """Return an ASGI app that answers requests of these users (default: this one's and root)."""
    users = frozenset((os.geteuid(), 0) if allowed is None else allowed)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        kind, ends = scope["type"], (scope.get("server"), scope.get("client"))
        if kind == "lifespan" or owner_of(*ends) in users:
            await app(scope, receive, send)
        elif kind == "http":
            headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"for the owner of this SuperLink"})
        else:
            await send({"type": "websocket.close"})

    return guarded


def give_back_storage(path: str) -> None:
    """Let a database, new or not, be cut to what is in it after every deletion."""
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA auto_vacuum = FULL")
        database.execute("VACUUM")
    database.close()


def main() -> None:
    """Be `flower-superlink`, with its options."""
    arguments = sys.argv[1:]
    host = arguments[arguments.index("--host") + 1] if "--host" in arguments[:-1] else "127.0.0.1"
    try:
        local = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        sys.exit(f"--host {host} must be an address of loopback: the gate is what others reach")
    if _DATABASE in arguments[:-1]:
        place = arguments[arguments.index(_DATABASE) + 1]
        if not place.startswith(":") and "://" not in place:
            give_back_storage(place)
    pragmas = {"secure_delete": "ON", "journal_size_limit": _JOURNAL_BYTES}
    internals.run_superlink(for_owner, pragmas)


if __name__ == "__main__":
    main()
