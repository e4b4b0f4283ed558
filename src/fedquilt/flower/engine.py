"""Step 3 of the round on Flower's nodes: orders out, replies in, a deadline, refusals.

| what arrives | what becomes of it | charged |
|---|---|---|
| an answer in time, with its order's token | its vector goes to the round, which clips it | yes |
| the same, but unusable: too large, of a wrong shape, "failed" | refused; zero in the sum | yes |
| the same, not finite | zero in the sum | yes |
| one that is announced and does not come whole | refused and absent at the deadline | no |
| a second one, one unasked for, of another node, with another token | refused; still waiting | no |
| word from its site that its policy refuses the order | told to the operator; absent | no |
| nothing until the deadline, or word from the SuperLink that the node is gone | absent | no |

An unusable answer is charged because refusing it looks at what is in it; one that may be
somebody else's is not, so that nobody can spend another's budget.

Whether something came in time is decided before it is looked at.  Under a secret coin
everybody exposed is charged, whoever came (`fedquilt.round`).
"""

from __future__ import annotations

import dataclasses
import hmac
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import numpy as np
import torch
from flwr.app import Array, Message, MessageType
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedquilt.aggregation import Accumulator
from fedquilt.common.errors import InvalidValueError, NotReadyError
from fedquilt.config import MODE_TABLE, RunConfig
from fedquilt.flower import internals, wire
from fedquilt.flower.client_registry import ClientRegistry
from fedquilt.flower.replies import Inbox
from fedquilt.flower.settings import FlowerSettings
from fedquilt.method import Method
from fedquilt.privacy.mechanism import RoundPlan
from fedquilt.privacy.secure import SecureSettings
from fedquilt.training import ClientIds, ClientUpdate, Engine
from fedquilt.training.compression import (
    ERROR_FEEDBACK,
    UnreadableError,
    decompress,
    sent_bytes,
)

Report = Callable[[dict[str, Any]], None]
"""Takes what happened with one client in a round, or with all of them; for the owner alone."""

# Errors that the SuperLink, not a node, answers with: nothing of the client has arrived.
_NOT_DELIVERED = (3, 4, 5)
# Tables of a condensation have as many rows as a client needs; no more than this, though.
_LARGEST_TABLE = 1 << 28
_RETRY_SECONDS = 0.5


@dataclass
class OpenOrder:
    """An order that was sent and not answered yet."""

    client: int
    node: int
    token: str
    sent_at: float


@dataclass
class RoundTraffic:
    """What a round's orders and replies came to."""

    round_index: int
    bytes_up: int = 0
    bytes_down: int = 0
    answered: int = 0
    refused: list[tuple[int | None, str]] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    seconds: float = 0.0
    rows: dict[int, dict[str, Any]] | None = None
    """What clients measure, where that is what they are asked."""


class FlowerEngine(Engine):
    """Lets Flower nodes do the clients' part of a round.

    Parameters
    ----------
    grid : flwr.serverapp.Grid
        How nodes are reached.
    registry : ClientRegistry
        Which node is which client.
    config : RunConfig
        The run's settings; nodes are told those that concern them.
    settings : FlowerSettings
        Deadline, compression, who is waited for.
    frozen : str
        Stands for what never travels (`node.frozen_digest`); nodes compare it with theirs.
    report : callable, optional
        Told what happened with each node; see `Report`.
    check_stop : callable, optional
        Raises where the operator wants the run to stop: called before a round is planned, and with
        `in_round=True` while replies are awaited.
    run_name : callable, optional
        Returns what the ledger calls the run: sites write it down with what they send.
    """

    def __init__(
        self,
        grid: Grid,
        registry: ClientRegistry,
        config: RunConfig,
        settings: FlowerSettings | None = None,
        *,
        frozen: str = "",
        report: Report | None = None,
        check_stop: Callable[..., None] | None = None,
        run_name: Callable[[], str] | None = None,
    ) -> None:
        self.grid = grid
        self.registry = registry
        self.settings = settings or FlowerSettings()
        if self.settings.compression == "none" and config.compression != "none":
            self.settings = dataclasses.replace(
                self.settings, compression=config.compression, topk=config.compression_share
            )
        self.frozen = frozen
        self.report = report
        self._check_stop = check_stop or (lambda **_: None)
        self._run_name = run_name or (lambda: "")
        self.traffic: list[RoundTraffic] = []
        self._noised = MODE_TABLE[config.mode].noised
        self._secret = config.mode == "certified" and config.amplification
        self._method: Method | None = None
        self._here: Engine | None = None
        self._nodes: dict[int, int] = {}
        self._inbox = Inbox(grid)
        self._answered: set[str] = set()
        self._config = config
        self._settings_text = ""

    secure: SecureSettings | None = None

    def new_sum(self, plain: Accumulator, plan: RoundPlan) -> Accumulator:
        """Refuse sums under masks: what these nodes send is plain."""
        raise InvalidValueError("secure_aggregation='protocol' must have nodes that mask")

    @property
    def notes(self) -> tuple[str, ...]:
        """What a statement must say of clients that are Flower nodes."""
        named = "public by this adjacency as well: who was connected, who answered before the "
        charged = "who never answered is not charged; whatever arrived is, refused or not"
        if self._secret:
            charged = "everybody exposed is charged, whoever answered"
        masked = "there is no secure aggregation"
        if self._config.secure_aggregation == "simulated":
            masked = "secure aggregation is simulated beside it, and protects nothing in this run"
        notes = [
            "clients are Flower nodes: the server sees every client's update by itself, before "
            f"clip and noise; {masked}",
            f"{named}deadline ({self.settings.deadline:g} s), and how late; {charged}",
        ]
        if self._config.client_test_fraction:
            notes.append("the server sees what each client measures on samples that it holds back")
        if self.settings.compression != "none":
            notes.append(
                f"updates travel compressed ({self.settings.compression}); the server clips what "
                "it has decompressed"
            )
        return tuple(notes)

    def serve(self, method: Method) -> None:
        """Learn the method; refuse a compression that its updates do not survive."""
        compression, share = self.settings.compression, self._config.evaluation_share
        if share:
            raise InvalidValueError(
                f"evaluation_share={share:g} must be 0 where clients are Flower nodes: no site has "
                "such a release in its account"
            )
        if compression != "none" and method.update_size(0, 0) is None:
            raise InvalidValueError(
                f"flower_compression={compression!r} must be 'none' for tables, whose numbers of "
                "classes must arrive as they are"
            )
        if compression in ERROR_FEEDBACK and (method.holds_parts or not method.clients_train):
            raise InvalidValueError(
                f"flower_compression={compression!r} must be 'none', 'bf16' or 'int8' where "
                "clients do not train the whole model: what it keeps back belongs to fixed places"
            )
        self._method, self._here = method, method.engine
        self._settings_text = wire.settings_text(self._config, method.client_widths)

    def follow(self, released: Callable[[], torch.Tensor]) -> None:
        """A round says from which model its clients begin."""

    def present(self) -> NDArray[np.bool_] | None:
        """Wait until enough clients are connected; tell which."""
        count, wanted = self.registry.num_clients, self.settings.min_nodes
        if wanted > count:
            raise InvalidValueError(
                f"flower_min_nodes={wanted} must be <= {count}, the number of clients"
            )
        until = time.monotonic() + self.settings.wait
        self._check_stop()
        self._nodes = self._looked_up(until)
        while len(self._nodes) < wanted:
            self._check_stop()
            if time.monotonic() > until:
                raise NotReadyError(
                    f"{len(self._nodes)} clients are connected after {self.settings.wait:g} s, and "
                    f"flower_min_nodes={wanted}; the run can be resumed"
                )
            time.sleep(max(self.settings.poll, _RETRY_SECONDS))
            self._nodes = self._looked_up(until)
        if len(self._nodes) == count:
            return None
        mask = np.zeros(count, dtype=np.bool_)
        mask[list(self._nodes)] = True
        return mask

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield what arrives in time, in the order of the cohort."""
        method, here = self._served()
        # With nobody to train, the engine beside the server only learns of the round.
        deque(here.train(start, [], round_index, learning_rate), maxlen=0)
        traffic = RoundTraffic(round_index)
        self.traffic.append(traffic)
        clients = [int(client) for client in cohort]
        began = time.monotonic()
        until = began + self.settings.deadline
        orders = self._send(start, clients, round_index, learning_rate, traffic, until)
        came: list[int] = []
        for update in _in_order(clients, self._arrivals(orders, method, traffic, until)):
            came.append(update.client)
            yield update
            del update
        traffic.seconds = time.monotonic() - began
        if not self._secret:
            up = self._bytes_asked(came, round_index) if self._noised else traffic.bytes_up
            method.count_traffic(up, traffic.bytes_down)
        self._tell_round(traffic, clients)

    def _bytes_asked(self, clients: list[int], round_index: int) -> int:
        """Return how many bytes clients were asked for, whatever they sent.

        Where something is claimed the bytes of a round are public, and what a client sends
        must not tell whether it holds anything, or whether that could be used.
        """
        method, _ = self._served()
        sizes = Counter(method.update_size(client, round_index) or 0 for client in clients)
        how = self.settings
        return sum(
            sent_bytes(how.compression, size, how.topk) * count for size, count in sizes.items()
        )

    def close(self) -> None:
        """Close the engine beside the server; the grid is whoever's made it."""
        if self._here is not None:
            self._here.close()

    def _served(self) -> tuple[Method, Engine]:
        if self._method is None or self._here is None:
            raise RuntimeError("serve must be called before train")
        return self._method, self._here

    def _looked_up(self, until: float) -> dict[int, int]:
        """Ask who is connected, also of a SuperLink that is just coming back."""
        with internals.acting_as_server(self.grid):
            nodes: dict[int, int] = patiently(self.registry.nodes, until)
            return nodes

    def _send(
        self,
        start: torch.Tensor,
        clients: list[int],
        round_index: int,
        learning_rate: float,
        traffic: RoundTraffic,
        until: float,
    ) -> dict[str, OpenOrder]:
        """Send every client its order; return those that were taken, by message number."""
        method, _ = self._served()
        if not self._nodes:
            self._nodes = self._looked_up(until)
        shared: dict[int, tuple[torch.Tensor, Array | None]] = {}
        messages, open_orders = [], []
        for client in clients:
            node = self._nodes.get(client)
            if node is None:
                continue
            vector = method.outgoing(start, client, round_index)
            array = _shared_array(vector, shared)
            order = self._order(method, client, round_index, learning_rate, len(clients))
            messages.append(self._message(wire.pack_order(order, array), node, round_index))
            traffic.bytes_down += 0 if array is None else len(array.data)
            open_orders.append(OpenOrder(client, node, order.token, time.monotonic()))
        return self._pushed(messages, open_orders, round_index, until)

    def _pushed(
        self, messages: list[Message], orders: list[OpenOrder], round_index: int, until: float
    ) -> dict[str, OpenOrder]:
        """Hand orders to the SuperLink; return those that it took, by message number."""
        numbers = patiently(lambda: list(self.grid.push_messages(messages)), until)
        taken = {number: order for number, order in zip(numbers, orders, strict=False) if number}
        asked = [order.client for order in taken.values()]
        self._tell({"round": round_index, "sent": asked, "at": round(time.time(), 1)})
        return taken

    def evaluate(self, weights: torch.Tensor, round_index: int) -> dict[int, dict[str, Any]]:
        """Return what clients measure of a model on samples that they hold back, by their names.

        Whoever is connected is asked; nothing is known of who refuses or does not answer in time.
        """
        method, _ = self._served()
        traffic = RoundTraffic(round_index, rows={})
        until = time.monotonic() + self.settings.deadline
        self._nodes = self._looked_up(until)
        array, kind = wire.as_array(weights.detach().cpu().numpy()), MessageType.EVALUATE
        messages, orders = [], []
        for client, node in self._nodes.items():
            order = self._order(method, client, round_index, 0.0, len(self._nodes))
            messages.append(self._message(wire.pack_order(order, array), node, round_index, kind))
            orders.append(OpenOrder(client, node, order.token, time.monotonic()))
        asked = self._pushed(messages, orders, round_index, until)
        # Replies to orders that clients still train on stay where they are.
        training, self._inbox = self._inbox, Inbox(self.grid)
        try:
            deque(self._arrivals(asked, method, traffic, until), maxlen=0)
        finally:
            self._inbox = training
        rows = traffic.rows or {}
        self._tell({"round": round_index, "evaluated": sorted(rows)})
        names: Sequence[str] = getattr(self.registry, "names", ())
        named = [{"name": name} for name in names] or [{}] * self.registry.num_clients
        unknown: dict[str, Any] = {"accuracy": None, "loss": None}
        return {who: name | rows.get(who, unknown) for who, name in enumerate(named)}

    def _order(
        self, method: Method, client: int, round_index: int, learning_rate: float, cohort: int
    ) -> wire.Order:
        return wire.Order(
            token=secrets.token_hex(16),
            round_index=round_index,
            client=client,
            num_clients=self.registry.num_clients,
            learning_rate=float(learning_rate),
            settings=self._settings_text,
            frozen=self.frozen,
            compression=self.settings.compression,
            topk=self.settings.topk,
            monitor=self.settings.monitor,
            size=method.update_size(client, round_index) or 0,
            cohort=cohort,
            roster=self.registry.roster_text,
            run=self._run_name(),
            **self._promise(method.plan, client),
        )

    def _promise(self, plan: RoundPlan | None, client: int) -> dict[str, Any]:
        """Return the clip, noise and charge of a client, where they are fixed before it trains.

        A site clips by itself to the bound that it is told.  The bits of a private quantile are
        taken of updates before their clip, so there nothing is promised.
        """
        if plan is None or plan.charges is None or self._config.clipping == "quantile":
            return {}
        if client not in plan.clips:
            return {}
        charge = plan.charges[plan.clients == client][0]
        return {
            "clip": float(plan.clips[client]),
            "noise_std": float(plan.noise_std),
            "charge": float(charge),
        }

    def _message(
        self, content: Any, node: int, round_index: int, kind: str = MessageType.TRAIN
    ) -> Message:
        with internals.acting_as_server(self.grid):
            return Message(
                content,
                node,
                kind,
                ttl=self.settings.deadline,
                group_id=str(round_index),
            )

    def _arrivals(
        self,
        orders: dict[str, OpenOrder],
        method: Method,
        traffic: RoundTraffic,
        until: float,
    ) -> Iterator[tuple[int, ClientUpdate | None]]:
        """Yield clients with what they sent, None for those who will not; until the deadline."""
        while orders and time.monotonic() < until:
            self._check_stop(in_round=True)
            yield from self._pulled(orders, method, traffic, until)
        for number in self._inbox.give_up():
            if number in orders:
                self._tell_refusal(traffic, orders[number].client, "announced and never uploaded")
        traffic.absent += [order.client for order in orders.values()]

    def _pulled(
        self,
        orders: dict[str, OpenOrder],
        method: Method,
        traffic: RoundTraffic,
        until: float,
    ) -> Iterator[tuple[int, ClientUpdate | None]]:
        """Yield what has arrived by now; where nothing has, wait for a moment."""
        limit_of = partial(self._largest, orders, method, traffic.round_index)
        replies, unusable = self._inbox.pull(list(orders), limit_of)
        for number, reason in unusable.items():
            yield self._refused(orders.pop(number), traffic, reason, method)
        for reply in replies:
            judged = self._judge(reply, orders, method, traffic)
            if judged is not None:
                yield judged
        if orders and not replies and not unusable:
            time.sleep(min(self.settings.poll, max(0.0, until - time.monotonic())))

    def _largest(
        self, orders: dict[str, OpenOrder], method: Method, round_index: int, number: str
    ) -> int:
        """Return how many bytes of arrays the reply to an order may have."""
        size = method.update_size(orders[number].client, round_index)
        return _LARGEST_TABLE if size is None else 8 * size + 4096

    def _judge(
        self,
        reply: Message,
        orders: dict[str, OpenOrder],
        method: Method,
        traffic: RoundTraffic,
    ) -> tuple[int, ClientUpdate | None] | None:
        """Return a client and its update, or that it will send none; None: still waiting."""
        number = reply.metadata.reply_to_message_id
        order = orders.get(number)
        if order is None:
            again = number in self._answered
            self._tell_refusal(traffic, None, "duplicated" if again else "not asked for")
            return None
        source = reply.metadata.src_node_id
        if reply.has_error() and source != order.node and reply.error.code in _NOT_DELIVERED:
            orders.pop(number)
            traffic.absent.append(order.client)
            return order.client, None
        if source != order.node:
            self._tell_refusal(traffic, order.client, "from another node")
            return None
        if reply.has_error():
            orders.pop(number)
            return self._refused(order, traffic, f"error {reply.error.code}", method)
        token = wire.reply_token(reply.content).encode(errors="replace")
        if not hmac.compare_digest(token, order.token.encode()):
            self._tell_refusal(traffic, order.client, "forged: another token")
            return None
        limit = self._largest(orders, method, traffic.round_index, number)
        orders.pop(number)
        self._answered.add(number)
        return self._read(reply, order, method, traffic, limit)

    def _read(
        self,
        reply: Message,
        order: OpenOrder,
        method: Method,
        traffic: RoundTraffic,
        limit: int,
    ) -> tuple[int, ClientUpdate | None]:
        """Return what a client sent; what cannot be used counts as NaN, and is charged.

        A site that refuses an order has sent nothing: it is absent.
        """
        size = method.update_size(order.client, traffic.round_index)
        try:
            answer = wire.unpack_reply(reply.content, limit)
            traffic.bytes_up += sum(array.nbytes for array in answer.arrays.values())
            if answer.refusal:
                self._tell_refusal(traffic, order.client, f"by its site: {answer.refusal}")
                traffic.absent.append(order.client)
                return order.client, None
            if answer.failed:
                raise UnreadableError("the node failed")
            if traffic.rows is not None:
                traffic.rows[order.client] = wire.read_row(answer.row)
                return order.client, None
            vector = decompress(self.settings.compression, answer.arrays, size, torch.float32)
            objection = method.objection(vector)
            if objection is not None:
                raise UnreadableError(objection)
        except UnreadableError as error:
            return self._refused(order, traffic, str(error), method)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            return self._refused(order, traffic, f"unreadable: {type(error).__name__}", method)
        traffic.answered += 1
        seconds = time.monotonic() - order.sent_at
        self._tell(
            {
                "round": traffic.round_index,
                "client": order.client,
                "node": str(order.node),
                "seconds": round(seconds, 3),
                "finite": bool(torch.isfinite(vector).all()),
                **({"monitor": answer.monitor} if answer.monitor else {}),
            }
        )
        loss = math.nan if answer.loss is None else answer.loss
        return order.client, ClientUpdate(order.client, vector, answer.num_examples or 0, loss)

    def _refused(
        self, order: OpenOrder, traffic: RoundTraffic, reason: str, method: Method
    ) -> tuple[int, ClientUpdate]:
        """Return NaN in the place of what cannot be used: it arrived, so it is charged."""
        self._tell_refusal(traffic, order.client, reason)
        size = method.update_size(order.client, traffic.round_index) or 0
        return order.client, ClientUpdate(order.client, torch.full((size,), math.nan), 0, math.nan)

    def _tell_refusal(self, traffic: RoundTraffic, client: int | None, reason: str) -> None:
        traffic.refused.append((client, reason))
        self._tell({"round": traffic.round_index, "client": client, "refused": reason})

    def _tell_round(self, traffic: RoundTraffic, clients: list[int]) -> None:
        self._tell(
            {
                "round": traffic.round_index,
                "asked": len(clients),
                "answered": traffic.answered,
                "absent": sorted(traffic.absent),
                "bytes_up": traffic.bytes_up,
                "bytes_down": traffic.bytes_down,
                "seconds": round(traffic.seconds, 3),
            }
        )

    def _tell(self, line: dict[str, Any]) -> None:
        if self.report is not None:
            self.report(line)


def _in_order(
    clients: list[int], arrivals: Iterator[tuple[int, ClientUpdate | None]]
) -> Iterator[ClientUpdate]:
    """Yield updates in the order of the cohort, each as soon as those before it are known.

    Sums in floating point depend on their order, and a round that is run again after a
    crash must come out the same.
    """
    waiting = deque(clients)
    known: dict[int, ClientUpdate | None] = {}
    for client, update in arrivals:
        known[client] = update
        while waiting and waiting[0] in known:
            ready = known.pop(waiting.popleft())
            if ready is not None:
                yield ready
    for client in waiting:
        late = known.get(client)
        if late is not None:
            yield late


def _shared_array(
    vector: torch.Tensor, shared: dict[int, tuple[torch.Tensor, Array | None]]
) -> Array | None:
    """Return a vector for a message; the same tensor is turned into bytes once."""
    if id(vector) not in shared:
        array = wire.as_array(vector.detach().cpu().numpy()) if vector.numel() else None
        shared[id(vector)] = (vector, array)  # held, so that its number is not given again
    return shared[id(vector)][1]


def patiently(call: Callable[[], Any], until: float) -> Any:
    """Call, and call again while the SuperLink is away."""
    while True:
        try:
            return call()
        except (httpx.HTTPError, ConnectionError) as error:
            if time.monotonic() > until:
                raise NotReadyError(
                    f"the SuperLink cannot be reached ({type(error).__name__}); the run can be "
                    "resumed"
                ) from error
            time.sleep(_RETRY_SECONDS)
