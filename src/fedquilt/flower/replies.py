"""Replies from the SuperLink, each one by itself: one node never costs another its reply.

Flower's grid fetches all replies in one call.  One reply that cannot be read ends the call after
others were confirmed, and so deleted; one whose objects were announced and never uploaded blocks
it for minutes; and an array may name one chunk a thousand times, which nobody counts before the
bytes are there.  So here

- the SuperLink is asked once which replies are announced,
- the objects of each are fetched without waiting for those that are not there yet,
- bytes are counted while they come, and as often as they are named, before anything is inflated,
- a reply is inflated alone, and confirmed however that went: what it took on disk is given back.

A grid that is no SuperLink's (nodes in this process, Ray) is asked as it is meant to be.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from fedquilt.flower import internals

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_AT_ONCE = 4
# Names, shapes, metadata and heads beside the numbers themselves; honest replies need 2 kB.
_BESIDE = 1 << 16
_SMALLEST_CHUNK = 1 << 20

Pulled = tuple[list[Message], dict[str, str]]
"""Replies, and the orders whose reply cannot be used, with the reason."""


class TooMuchError(ValueError):
    """A reply is larger than it may be; says how large."""


@dataclass
class Announced:
    """A reply whose objects are on their way."""

    number: str
    node: int
    root: str
    wanted: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


class Inbox:
    """What nodes have answered, order by order.

    Parameters
    ----------
    grid : flwr.serverapp.Grid
        How nodes are reached.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._runtime = internals.runtime_of(grid)
        self._coming: dict[str, Announced] = {}

    def pull(self, numbers: list[str], limit_of: Callable[[str], int]) -> Pulled:
        """Return the replies that are there whole, and why others cannot be used.

        `limit_of` says how many bytes of arrays the reply to an order may have.
        """
        try:
            if self._runtime is None:
                return self._pull_plain(numbers)
            new = [number for number in numbers if number not in self._coming]
            self._learn(new, limit_of)
            return self._fetch(limit_of)
        except (httpx.HTTPError, ConnectionError) as error:
            log.warning("the SuperLink does not answer (%s); trying again", type(error).__name__)
            time.sleep(_RETRY_SECONDS)
            return [], {}

    def give_up(self, numbers: Collection[str] | None = None) -> list[str]:
        """Forget replies that were announced and never came whole; return their orders.

        Those to the orders `numbers`; None: all.
        """
        late = [n for n in self._coming if numbers is None or n in numbers]
        for number in late:
            self._confirm(self._coming.pop(number).root)
        return late

    def _pull_plain(self, numbers: list[str]) -> Pulled:
        """Ask a grid that is no SuperLink's; one message that raises spoils no other."""
        try:
            return list(self._grid.pull_messages(numbers)), {}
        except (httpx.HTTPError, ConnectionError):
            raise
        except Exception:  # made by a node: it may be anything
            log.exception("a reply cannot be read; pulling them one by one")
        replies: list[Message] = []
        unusable: dict[str, str] = {}
        for number in numbers:
            try:
                replies += list(self._grid.pull_messages([number]))
            except (httpx.HTTPError, ConnectionError):
                continue
            except Exception:
                unusable[number] = "the message cannot be read"
        return replies, unusable

    def _learn(self, numbers: list[str], limit_of: Callable[[str], int]) -> None:
        """Note which replies are announced, and which objects each is made of."""
        for metadata, objects in internals.announced(self._runtime, numbers):
            number = metadata.reply_to_message_id
            if number not in numbers or number in self._coming:
                continue
            most = 16 + limit_of(number) // _SMALLEST_CHUNK
            wanted = list(dict.fromkeys(objects))
            node, root = metadata.src_node_id, metadata.message_id
            self._coming[number] = Announced(number, node, root, wanted)
            if len(wanted) > most:
                self._coming[number].size = limit_of(number) + _BESIDE + 1

    def _fetch(self, limit_of: Callable[[str], int]) -> Pulled:
        replies: list[Message] = []
        unusable: dict[str, str] = {}

        def one(reply: Announced) -> Message | str | None:
            try:
                return self._one(reply, limit_of(reply.number))
            except (httpx.HTTPError, ConnectionError):
                return None  # the SuperLink is away: later
            except TooMuchError as error:
                return str(error)
            except Exception as error:  # made by a node: it may be anything
                log.warning("a reply of node %s: %s", reply.node, type(error).__name__)
                return "the message cannot be read"

        coming = list(self._coming.values())
        if not coming:
            return replies, unusable
        with concurrent.futures.ThreadPoolExecutor(min(_AT_ONCE, len(coming))) as pool:
            for reply, result in zip(coming, pool.map(one, coming), strict=True):
                if result is None:
                    continue
                del self._coming[reply.number]
                self._confirm(reply.root)
                if isinstance(result, str):
                    unusable[reply.number] = result
                else:
                    replies.append(result)
        return replies, unusable

    def _one(self, reply: Announced, limit: int) -> Message | None:
        """Return a reply that is there whole; None while parts of it are missing."""
        while reply.wanted:
            _check_size(reply.size, limit + _BESIDE)
            content = internals.object_of(self._grid, self._runtime, reply.wanted[-1])
            if content is None:
                return None
            reply.contents[reply.wanted.pop()] = content
            reply.size += len(content)
        _check_size(reply.size, limit + _BESIDE)
        _check_size(internals.inflated_size(reply.contents), limit)
        message: Message = internals.inflate(reply.root, reply.contents)
        inside = message.metadata
        if (inside.reply_to_message_id, inside.src_node_id) != (reply.number, reply.node):
            raise ValueError("what is inside says that it is another's")
        return message

    def _confirm(self, root: str) -> None:
        """Let the SuperLink delete a reply, whatever it was."""
        try:
            internals.confirm(self._grid, self._runtime, root)
        except (httpx.HTTPError, ConnectionError) as error:
            log.warning("a reply was not given back: %s", type(error).__name__)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise TooMuchError(f"{size} bytes must be at most {limit}")
