"""Step 3 of asynchronous rounds (FedBuff) on Flower's nodes: nobody waits for the slowest node.

    gather   orders go out at the model of the moment, to nodes that have none; replies are taken as
             they come; as soon as K are there they are the round's buffer
    train    hands them to the round, scaled by the age of the model that they began at

Who is in a buffer is who answered first.  As with a deadline, that is participation, which is
public: the ledger charges who is in a buffer, for each buffer, before anything is released.  An
order stands for `deadline` seconds; then its client is absent and may be asked again.  What comes
from more than `MOST_STALE` releases ago is thrown away and charges nobody.

What a release will cost is fixed when its buffer is full, after its clients have trained: so an
order promises neither clip nor charge, and a site whose policy asks for a bound refuses it.

Orders at work are no part of a checkpoint.  A run that is resumed sends new ones; what old ones are
answered with has no order any more, is in no release and charges nobody.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.randomness import generator
from fedquilt.flower.engine import FlowerEngine, OpenOrder, RoundTraffic
from fedquilt.method import Method
from fedquilt.population.fleet import MOST_STALE, BufferedSelector
from fedquilt.privacy.mechanism import RoundPlan
from fedquilt.training import ClientIds, ClientUpdate
from fedquilt.training.stale import discount
from fedquilt.training.task import learning_rate_at


class BufferedEngine(FlowerEngine):
    """Lets Flower nodes work on, and takes what came first as a round."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._orders: dict[str, OpenOrder] = {}
        self._begun: dict[int, int] = {}  # clients at work or waiting for a buffer, and since when
        self._came: deque[ClientUpdate] = deque()
        self._buffer: dict[int, ClientUpdate] = {}
        self._round = -1

    @property
    def notes(self) -> tuple[str, ...]:
        """What a statement must say of clients that are Flower nodes."""
        return (
            *super().notes,
            "rounds are asynchronous: whose updates came first and how old they were is public by "
            "this adjacency, too",
        )

    def join(self, selector: BufferedSelector) -> None:
        """Learn who may begin, and tell who has come."""
        self._selector = selector
        selector.arrived = self.gather

    def follow(self, released: Callable[[], torch.Tensor]) -> None:
        """Learn where the model is read at which clients begin."""
        self._released = released

    def present(self) -> NDArray[np.bool_] | None:
        """Wait until enough clients are connected; who is in a buffer need not be any more."""
        super().present()
        return None

    def gather(self, round_index: int) -> list[int]:
        """Return whose replies a round releases: the first to come, once a round."""
        if round_index != self._round:
            for client in self._buffer:
                del self._begun[client]
            self._round, self._buffer = round_index, {}
            self.traffic.append(RoundTraffic(round_index))
            self._fill(self.traffic[-1])
        return sorted(self._buffer)

    def _fill(self, traffic: RoundTraffic) -> None:
        """Collect until the buffer is full, nobody is at work, or a deadline has passed."""
        method, _ = self._served()
        began = time.monotonic()
        until = began + self.settings.deadline
        draws = generator(self._config.seed, "arrivals", traffic.round_index)
        there = set(self._selector.available(traffic.round_index).tolist())
        self._take(traffic)
        while len(self._buffer) < self._selector.size and time.monotonic() < until:
            self._begin(draws, there, traffic, until)
            if not self._orders:
                break
            self._check_stop(in_round=True)
            for client, update in self._pulled(self._orders, method, traffic, until):
                if update is None:
                    del self._begun[client]
                else:
                    self._came.append(update)
            self._give_up(traffic)
            self._take(traffic)
        traffic.seconds = time.monotonic() - began
        self._tell_round(traffic, sorted(self._buffer))

    def _begin(
        self, draws: np.random.Generator, there: set[int], traffic: RoundTraffic, until: float
    ) -> None:
        """Let as many begin at the released model as may be at work, nobody twice a release."""
        connected = np.array(sorted(there & set(self._nodes)), dtype=np.int64)
        at_work = len(self._orders)
        clients = self._selector.beginning(draws, connected, set(self._begun), at_work)
        if clients:
            index = traffic.round_index
            rate = learning_rate_at(self._config, index)
            sent = self._send(self._released(), clients, index, rate, traffic, until)
            self._orders |= sent
            self._begun |= {order.client: index for order in sent.values()}
            there -= set(clients)

    def _take(self, traffic: RoundTraffic) -> None:
        """Move what came first into the buffer; leave out what is too old."""
        while self._came and len(self._buffer) < self._selector.size:
            update = self._came.popleft()
            if traffic.round_index - self._begun[update.client] <= MOST_STALE:
                self._buffer[update.client] = update
                continue
            del self._begun[update.client]
            traffic.absent.append(update.client)
            self._tell_refusal(traffic, update.client, f"began over {MOST_STALE} releases ago")

    def _give_up(self, traffic: RoundTraffic) -> None:
        """Leave orders that nobody has answered in time."""
        latest = time.monotonic() - self.settings.deadline
        late = [number for number, order in self._orders.items() if order.sent_at < latest]
        announced = self._inbox.give_up(late) if late else []
        for number in late:
            order = self._orders.pop(number)
            del self._begun[order.client]
            traffic.absent.append(order.client)
            if number in announced:
                self._tell_refusal(traffic, order.client, "announced and never uploaded")

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield what is in the buffer, in the order of the cohort, as the server counts it."""
        method, here = self._served()
        deque(here.train(start, [], round_index, learning_rate), maxlen=0)
        clients = [int(client) for client in cohort]
        ages = {client: round_index - self._begun[client] for client in self._buffer}
        self._tell({"round": round_index, "ages": {str(k): age for k, age in ages.items()}})
        for client in clients:
            update = self._buffer[client]
            yield dataclasses.replace(update, delta=update.delta * discount(ages[client]))
        method.count_traffic(self._bytes_asked(clients, round_index), self.traffic[-1].bytes_down)

    def _order(
        self, method: Method, client: int, round_index: int, learning_rate: float, cohort: int
    ) -> Any:
        return super()._order(method, client, round_index, learning_rate, self._selector.size)

    def _promise(self, plan: RoundPlan | None, client: int) -> dict[str, Any]:
        """Promise nothing: the plan at hand is that of an earlier release."""
        return {}
