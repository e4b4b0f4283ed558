"""Step 3 of the round on Flower's nodes, under masks: five messages a client instead of one.

    train           advertise (with the model: nodes train), share, mask
    MaskedArrivals  seal: agree;  open: unmask

What comes late, is refused, or cannot be used is of a client that has dropped out there.  As long
as `least` are left, the others' sum is opened.  Fewer before the last step: nothing can be
opened, and nobody is charged.  The charge is settled between `seal` and `open`, so before any
client is asked for a share (`Federation.open_sum`).

Nothing rests on the honesty of this side: what it must not do, nodes refuse (`keeper`).
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedquilt.aggregation import Accumulator, Place
from fedquilt.aggregation.secure.client import SumOrder
from fedquilt.aggregation.secure.primitives import ProtocolError, packed_size
from fedquilt.aggregation.secure.server import FalseSharesError, Server
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.config import RunConfig
from fedquilt.flower import internals, wire
from fedquilt.flower.buffered_engine import BufferedEngine
from fedquilt.flower.client_registry import ClientRegistry, public_der
from fedquilt.flower.engine import FlowerEngine, OpenOrder, RoundTraffic, patiently
from fedquilt.flower.settings import FlowerSettings
from fedquilt.method import Method
from fedquilt.privacy.mechanism import RoundPlan
from fedquilt.privacy.secure import SecureSettings, longest_sum
from fedquilt.training import ClientIds, ClientUpdate
from fedquilt.training.compression import UnreadableError

Body = TypeVar("Body")
_SIGNATURE = 160
_ENTRY = 8


class MaskedEngine(FlowerEngine):
    """Lets Flower nodes send integers under masks, and opens their sum alone."""

    secure: SecureSettings | None = None
    """Set with the mechanism (`setup.mechanism.make_secure`)."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._server: Server | None = None
        self._first: Any = None
        self._limit = 0
        self._false: set[int] = set()
        self._who: dict[int, int] = {}
        self._traffic = RoundTraffic(0)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a statement must say of clients that are Flower nodes."""
        plain = super().notes
        return (
            "clients are Flower nodes: they clip, round and noise by themselves, and the server "
            "sees what they send under masks; it does see who is there and how fast",
            *plain[1:],
        )

    def serve(self, method: Method) -> None:
        """Learn the method; refuse what cannot travel under masks."""
        if self.settings.compression != "none":
            raise InvalidValueError(
                f"flower_compression={self.settings.compression!r} must be 'none' under "
                "secure_aggregation: integers are packed in as few bits as their sum needs"
            )
        if self._config.client_test_fraction:
            raise InvalidValueError(
                f"client_test_fraction={self._config.client_test_fraction:g} must be 0 under "
                "secure_aggregation: the server would see what each client measures by itself"
            )
        super().serve(method)

    def new_sum(self, plain: Accumulator, plan: RoundPlan) -> MaskedArrivals:
        """Return the sum of the round that is about to train."""
        return MaskedArrivals(self, plain)

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield who has sent a masked vector in time; the vectors are in the sum already."""
        method, here = self._served()
        deque(here.train(start, [], round_index, learning_rate), maxlen=0)
        self._traffic = traffic = RoundTraffic(round_index)
        self.traffic.append(traffic)
        clients, began = [int(client) for client in cohort], time.monotonic()
        self._server = None
        try:
            yield from self._masked(start, clients, round_index, learning_rate)
        except ProtocolError as error:  # too few are left
            self._tell({"round": round_index, "closed": str(error)})
        traffic.seconds = time.monotonic() - began
        method.count_traffic(self._bytes_asked(clients, round_index), traffic.bytes_down)
        self._tell_round(traffic, clients)

    def _masked(
        self, start: torch.Tensor, clients: list[int], round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        method, _ = self._served()
        until = time.monotonic() + self.settings.deadline
        total = self._begin(start, clients, round_index, learning_rate, until)
        server = Server(total)
        count, traffic = len(total.roster), self._traffic
        self._limit = 256
        orders = self._send(start, list(total.roster), round_index, learning_rate, traffic, until)
        self._first = None
        adverts = self._read_all(self._replies(orders, method, until), wire.read_advert)
        try:
            told = server.take_adverts(adverts)
        finally:
            self._leave_out(adverts, server.adverts, "its keys are not signed for this order")
        body = wire.write_map({c: wire.write_advert(a) for c, a in told.items()})
        came = self._step("share", dict.fromkeys(told, body), 128 * count + 64)
        letters = self._read_all(came, wire.read_map)
        try:
            written = server.take_letters(letters)
        finally:
            self._leave_out(letters, server.letters, "its letters are not one for everybody")
        bodies = {c: wire.write_map(server.letters_to(c)) for c in written}
        for client, packed in self._step("mask", bodies, packed_size(total.size, total.bits)):
            try:
                server.add(client, packed)
            except ProtocolError as error:
                self._drop(client, str(error))
                continue
            traffic.answered += 1
            yield ClientUpdate(client, torch.zeros(0), 0, math.nan)
        self._server = server

    def _begin(
        self,
        start: torch.Tensor,
        clients: list[int],
        round_index: int,
        learning_rate: float,
        until: float,
    ) -> SumOrder:
        """Write the order of the sum: who is asked, under which keys, for what."""
        method, _ = self._served()
        plan, secure = method.plan, self.secure
        if plan is None or secure is None:
            raise RuntimeError("a masked round needs its plan and the numbers of the protocol")
        if not self._nodes:
            self._nodes = self._looked_up(until)
        self._who = {c: self._nodes[c] for c in clients if c in self._nodes.keys() - self._false}
        with internals.acting_as_server(self.grid):
            public = patiently(
                lambda: {int(n.node_id): bytes(n.public_key) for n in self.grid.get_nodes()}, until
            )
        roster = {c: public_der(public[n]) for c, n in self._who.items() if public.get(n)}
        self._who = {c: n for c, n in self._who.items() if c in roster}
        if len(roster) < plan.least:
            raise ProtocolError(f"{len(roster)} clients have keys here, and {plan.least} must")
        model = method.outgoing(start, next(iter(roster)), round_index)
        size = secure.size
        normalise = self._config.normalise_updates
        order = self._order(method, next(iter(roster)), round_index, learning_rate, len(roster))
        total = SumOrder(
            run=wire.run_name(internals.run_number(self.grid)),
            round_index=round_index,
            task=wire.task_digest(order, model, secure.variance, normalise),
            roster=roster,
            least=plan.least,
            colluding=secure.colluding,
            size=size,
            bits=plan.bits,
        )
        self._first = wire.first_record(total, secure.variance, normalise)
        return total

    def _message(
        self, content: Any, node: int, round_index: int, kind: str = MessageType.TRAIN
    ) -> Message:
        if self._first is not None:
            content[wire.RECORD] = self._first
        return super()._message(content, node, round_index, kind)

    def _read_all(
        self, came: Iterable[tuple[int, bytes]], read: Callable[[bytes], Body]
    ) -> dict[int, Body]:
        """Read the bodies of a step; who sends anything else has dropped out."""
        found = {}
        for client, body in came:
            try:
                found[client] = read(body)
            except UnreadableError as error:
                self._drop(client, str(error))
        return found

    def _leave_out(self, came: Iterable[int], usable: Iterable[int], reason: str) -> None:
        for client in sorted(set(came) - set(usable)):
            self._drop(client, reason)

    def _drop(self, client: int, reason: str) -> None:
        self._tell_refusal(self._traffic, client, reason)
        self._traffic.absent.append(client)

    def _step(
        self, step: str, bodies: Mapping[int, bytes], limit: int
    ) -> Iterator[tuple[int, bytes]]:
        """Ask clients for a later step, each with its body; yield what comes in time."""
        method, _ = self._served()
        until = time.monotonic() + self.settings.step_deadline
        self._limit = limit
        index, run = self._traffic.round_index, wire.run_name(internals.run_number(self.grid))
        messages, opened = [], []
        for client, body in bodies.items():
            token, node = secrets.token_hex(16), self._who[client]
            content = wire.later_content(token, step, index, run, body)
            self._traffic.bytes_down += len(body)
            with internals.acting_as_server(self.grid):
                ttl = self.settings.step_deadline
                messages.append(
                    Message(content, node, MessageType.TRAIN, ttl=ttl, group_id=str(index))
                )
            opened.append(OpenOrder(client, node, token, time.monotonic()))
        numbers = patiently(lambda: list(self.grid.push_messages(messages)), until)
        orders = {number: o for number, o in zip(numbers, opened, strict=False) if number}
        yield from self._replies(orders, method, until)

    def _replies(
        self, orders: dict[str, OpenOrder], method: Method, until: float
    ) -> Iterator[tuple[int, bytes]]:
        for client, update in self._arrivals(orders, method, self._traffic, until):
            if update is not None:
                yield client, update.delta.numpy().tobytes()

    def _largest(
        self, orders: dict[str, OpenOrder], method: Method, round_index: int, number: str
    ) -> int:
        return self._limit

    def _read(
        self,
        reply: Message,
        order: OpenOrder,
        method: Method,
        traffic: RoundTraffic,
        limit: int,
    ) -> tuple[int, ClientUpdate | None]:
        """Return the body of a reply; what cannot be used is nobody's."""
        try:
            answer = wire.unpack_reply(reply.content, limit)
            if answer.refusal or answer.failed:
                said = f"by its site: {answer.refusal}" if answer.refusal else "the node failed"
                return self._refused(order, traffic, said, method)
            body = wire.body_of(reply.content, limit)
        except (FedquiltError, TypeError, ValueError, KeyError, AttributeError) as error:
            return self._refused(order, traffic, f"unreadable: {type(error).__name__}", method)
        traffic.bytes_up += len(body)
        numbers = torch.from_numpy(wire.as_numbers(body).copy())
        return order.client, ClientUpdate(order.client, numbers, 0, math.nan)

    def _refused(  # type: ignore[override]
        self, order: OpenOrder, traffic: RoundTraffic, reason: str, method: Method
    ) -> tuple[int, ClientUpdate | None]:
        """Note that a client has dropped out: nothing of it is in the sum."""
        self._drop(order.client, reason)
        return order.client, None

    def agree(self) -> Server | None:
        """Let survivors sign who they are; return the server's side, None where too few did."""
        server = self._server
        if server is None:
            return None
        try:
            survivors = server.survivors()
        except ProtocolError:
            return None
        body = wire.write_map(dict.fromkeys(survivors, b""))
        came = dict(self._step("agree", dict.fromkeys(survivors, body), _SIGNATURE))
        self._signed = server.take_signatures(came)
        self._leave_out(came, self._signed, "its signature is not under the list of survivors")
        if len(self._signed) >= server.order.least:
            return server
        self._tell({"round": self._traffic.round_index, "signed": len(self._signed)})
        return None

    def opened(self, server: Server) -> NDArray[np.int64] | None:
        """Ask for shares, and open the sum; None where too few have answered."""
        body = wire.write_map(self._signed)
        asked = dict.fromkeys(self._signed, body)
        limit = len(server.order.roster) * (_ENTRY + 64)
        answers = self._read_all(self._step("unmask", asked, limit), wire.read_opened)
        try:
            return self._possible(server.open(answers))
        except ProtocolError as error:
            if isinstance(error, FalseSharesError):  # they are not asked again in this run
                self._false |= error.clients
            self._tell({"round": self._traffic.round_index, "closed": str(error)})
            return None

    def _possible(self, total: NDArray[np.int64]) -> NDArray[np.int64]:
        """Refuse a sum that clients which keep to the protocol do not have.

        It is computed from the sum that was charged and from public numbers, so it costs nothing.
        """
        plan, secure = self._served()[0].plan, self.secure
        if plan is None or secure is None:
            raise RuntimeError("a sum has a plan")
        length, most = float(np.linalg.norm(total)), longest_sum(secure, plan)
        if length > most:
            raise ProtocolError(f"a sum of norm {length:.4g} must be below {most:.4g}")
        return total


class MaskedArrivals:
    """The sum of a masked round: a number of clients until it is opened."""

    keeps_vectors = False
    held = None

    def __init__(self, engine: MaskedEngine, plain: Accumulator) -> None:
        self._engine, self._like = engine, plain.total
        self._count = 0
        self._server: Server | None = None
        self._opened: torch.Tensor | None = None

    @property
    def weight(self) -> float:
        """How many clients are in it."""
        return float(self._count)

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: Place | None = None) -> None:
        """Count a client; its vector was added as it came."""
        self._count += 1

    def seal(self) -> torch.Tensor | None:
        """Let survivors sign who they are; return the sum under its masks."""
        self._server = self._engine.agree()
        if self._server is None:
            return None
        return torch.from_numpy(self._server.masked.astype(np.int64))

    def open(self) -> bool:
        """Ask survivors for their shares; tell whether the sum could be opened."""
        if self._server is None:
            return False
        total = self._engine.opened(self._server)
        if total is not None:
            self._opened = torch.from_numpy(total).to(self._like.device, torch.float64)
        return total is not None

    @property
    def total(self) -> torch.Tensor:
        """The sum, once it is open."""
        if self._opened is None:
            raise RuntimeError("a sum under masks is opened before it is read")
        return self._opened


def engine_of(
    grid: Grid, registry: ClientRegistry, config: RunConfig, settings: FlowerSettings, **more: Any
) -> FlowerEngine:
    """Return the engine of a run on nodes: with masks, asynchronous, or neither."""
    if config.secure_aggregation == "simulated" and internals.is_elsewhere(grid):
        raise InvalidValueError(
            "secure_aggregation='simulated' must be 'protocol' or 'off' on nodes elsewhere: they "
            "would send their updates plain, without noise; it is for runs of one process"
        )
    kind = MaskedEngine if config.secure_aggregation == "protocol" else FlowerEngine
    kind = kind if config.buffer_size is None else BufferedEngine
    return kind(grid, registry, config, settings, **more)
