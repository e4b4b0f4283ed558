"""A client's side: its own data, the method's work on them, and the app that a node runs.

What leaves is the update.  The number of examples leaves only where the mode weighs by it,
the loss only where nothing is claimed.  When something goes wrong a node says that it
failed, and no more: the text of an error may hold data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import torch_seed
from fedquilt.config import MODE_TABLE, RunConfig
from fedquilt.data import as_samples
from fedquilt.data.samples import is_empty
from fedquilt.experiment.client_evaluation import ClientEvaluation
from fedquilt.flower import wire
from fedquilt.flower.keeper import SecureNode, answered
from fedquilt.observe.meters import Sampler
from fedquilt.observe.samples import Metrics, PowerUnavailableError, Reach
from fedquilt.privacy.noise import SecretNoise
from fedquilt.setup.account import is_bounded
from fedquilt.setup.build_task import task_from
from fedquilt.setup.federation import build_method
from fedquilt.setup.task import FederatedTask, UserComponents
from fedquilt.slices.method import Slices
from fedquilt.training.compression import ERROR_FEEDBACK, compress
from fedquilt.training.objective import OwnLoss
from fedquilt.training.optimizers import Factory

log = logging.getLogger(__name__)

MakeModel = Callable[[], nn.Module]
ClientData = Callable[[Context], object]
NodeOf = Callable[[Context, wire.Order], "Node | NodeOfNobody"]
SecureOf = Callable[[Context], SecureNode]

CUSTOM = "custom"
"""What a configuration says where an object was brought."""

_RESIDUAL = "fedquilt-residual"
_REMEMBERED_BYTES = 1 << 28


def new_model(make_model: MakeModel, seed: int) -> nn.Module:
    """Make the user's model with the run's seed, so that server and nodes make the same."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed(seed, "model"))
        return make_model()


def frozen_digest(problem: FederatedTask) -> str:
    """Return what stands for all that never travels: it must be the same on both sides."""
    travelling = set(problem.flat.names)
    digest = hashlib.sha256()
    modules = {"": problem.flat.module, "front.": problem.front or nn.Module()}
    for prefix, module in modules.items():
        for name, tensor in module.state_dict().items():
            if prefix or name not in travelling:
                digest.update(f"{prefix}{name}{tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()[:32]


class Usage:
    """The meters of this process, from the beginning of an order to its end.

    Network traffic is that of the node's network namespace; what talks to the server is
    another process of it.  Power is left out where the machine has no meter.
    """

    def __init__(self) -> None:
        reach = Reach(loopback=True)
        try:
            self._sampler = Sampler(os.getpid(), reach, Metrics(power=True))
        except PowerUnavailableError:
            self._sampler = Sampler(os.getpid(), reach, Metrics(power=False))

    def end(self) -> dict[str, float]:
        """Return the seconds since the beginning and what was measured in them."""
        sample = self._sampler.read()
        self._sampler.close()
        return {"seconds": sample.seconds, **sample.values}


class Node:
    """What a node keeps between two orders of a run: the method, on its own data.

    Parameters
    ----------
    config : RunConfig
        The run's settings, as the server sent them.
    problem : FederatedTask
        The model, and this client's data (other clients' too in a simulation).
    """

    def __init__(self, config: RunConfig, problem: FederatedTask) -> None:
        self.config = config
        self.problem = problem
        self.method = build_method(
            config.replace(engine=_engine(problem), compression="none"), problem
        )
        self.frozen = frozen_digest(problem)
        self._counts = not MODE_TABLE[config.mode].noised
        self._losses = not is_bounded(config, problem)

    @classmethod
    def of_data(
        cls,
        config: RunConfig,
        model: nn.Module,
        data: object,
        client: int,
        num_clients: int,
        own: UserComponents | None = None,
    ) -> Node:
        """Make the node of one client from its own data; nobody else's are here."""
        own = own or UserComponents()
        _check_own(config, own)
        finite = not MODE_TABLE[config.mode].noised
        held = as_samples(data, "train", finite=finite)
        samples = [np.zeros(0, dtype=np.int64)] * num_clients
        samples[client] = np.arange(len(held))
        config, problem = task_from(config, model, held, None, samples, own=own)
        task = dataclasses.replace(problem.task, is_remote=True)
        return cls(config, dataclasses.replace(problem, task=task))

    def answer(self, order: wire.Order, sent: torch.Tensor, state: RecordDict) -> RecordDict:
        """Do what an order asks and return the reply."""
        self._check_frozen(order)
        usage = Usage() if order.monitor else None
        update = self.method.work(sent, order.client, order.round_index, order.learning_rate)
        arrays = self._compressed(order, update.delta, state)
        return wire.pack_reply(
            order.token,
            arrays,
            num_examples=update.num_examples if self._counts else None,
            loss=update.loss if self._losses else None,
            monitor=None if usage is None else usage.end(),
        )

    def evaluate(self, order: wire.Order, sent: torch.Tensor) -> RecordDict:
        """Say what this client measures of a model on the samples that it holds back."""
        self._check_frozen(order)
        own, here = self.problem, self.method
        client = ClientEvaluation(
            own.flat, own.task, own.client_tests or (), None,
            here if isinstance(here, Slices) else None, None, SecretNoise(),
            is_bounded=True, present=lambda index: np.zeros(0, dtype=np.int64),
        )  # fmt: skip
        row = client.row(sent, order.client, order.round_index)
        return wire.pack_reply(order.token, {}, row=row)

    def _check_frozen(self, order: wire.Order) -> None:
        if order.frozen != self.frozen:
            raise InvalidValueError(
                "the model's frozen values must be the server's: make_model must make the same "
                "model whenever it is called with the same seed"
            )

    def _compressed(self, order: wire.Order, delta: torch.Tensor, state: RecordDict) -> Any:
        if order.compression == "none":  # nothing random, and nothing kept back
            return compress("none", delta, 0)[0]
        seed = torch_seed(self.config.seed, "compression", order.round_index, order.client)
        if order.compression not in ERROR_FEEDBACK:
            return compress(order.compression, delta, seed)[0]
        kept = state.array_records.get(_RESIDUAL)
        if kept is not None:
            delta = delta + torch.from_numpy(wire.read_arrays(kept, 1 << 40)["residual"].copy())
        arrays, read = compress(order.compression, delta, seed, order.topk)
        residual = (delta - read).to(torch.float32).cpu().numpy()
        if np.isfinite(residual).all():  # what is not finite would spoil all later rounds
            state[_RESIDUAL] = ArrayRecord({"residual": wire.as_array(residual)})
        return arrays


class NodeOfNobody:
    """The node of a client that holds nothing: zeros, as many as are asked for.

    A message without them would say to whoever sees its length that it holds nothing.
    """

    def answer(self, order: wire.Order, sent: torch.Tensor, state: RecordDict) -> RecordDict:
        """Return the zeros."""
        arrays, _ = compress(order.compression, torch.zeros(order.size), 0, order.topk)
        return wire.pack_reply(order.token, arrays)

    def evaluate(self, order: wire.Order, sent: torch.Tensor) -> RecordDict:
        """Return that there is nothing to measure anything on."""
        return wire.pack_reply(order.token, {}, row={"examples": 0, "accuracy": None})


def _engine(problem: FederatedTask) -> str:
    """Return how a node trains: one client at a time, and on a CPU by hand where that is there.

    Both round as `sequential` does, up to 1e-5; a program for many clients on a GPU would not.
    """
    return "auto" if problem.task.device.type == "cpu" else "sequential"


def _check_own(config: RunConfig, own: UserComponents) -> None:
    """Refuse to train with another loss or optimiser than the server means."""
    for name in ("loss", "optimizer"):
        named = getattr(config, name)
        if (named == CUSTOM) != (getattr(own, name) is not None):
            raise InvalidValueError(
                f"{name}={named!r} of the server must be this node's too: an object of your own "
                f"is given to both, client_app(..., {name}=yours) and server_app(..., "
                f"{name}=yours)"
            )


class OwnData:
    """Makes nodes from a user's model and `client_data(context)`; the last few are kept.

    In a process of its own there is one node; a simulation has many in one process.
    """

    def __init__(
        self, make_model: MakeModel, client_data: ClientData, own: UserComponents | None = None
    ) -> None:
        self._make_model = make_model
        self._client_data = client_data
        self._own = own
        self._nodes: OrderedDict[Hashable, Node | NodeOfNobody] = OrderedDict()

    def __call__(self, context: Context, order: wire.Order) -> Node | NodeOfNobody:
        """Return the node of a context for an order's run."""
        key = (context.run_id, context.node_id, order.settings, order.client, order.num_clients)
        if key not in self._nodes:
            config = wire.read_settings(order.settings)
            model = new_model(self._make_model, config.seed)
            data = self._client_data(context)
            if MODE_TABLE[config.mode].noised and is_empty(data):
                return NodeOfNobody()
            facts = (data, order.client, order.num_clients, self._own)
            self._nodes[key] = Node.of_data(config, model, *facts)
            weights = 4 * sum(tensor.numel() for tensor in model.state_dict().values())
            while len(self._nodes) > max(1, _REMEMBERED_BYTES // max(1 << 16, weights)):
                self._nodes.popitem(last=False)
        self._nodes.move_to_end(key)
        return self._nodes[key]

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel without the nodes: each process makes its own."""
        return OwnData, (self._make_model, self._client_data, self._own)


def answer(message: Message, context: Context, node_of: NodeOf) -> Message:
    """Answer an order; whatever goes wrong is told to this node's log and to nobody else."""
    token = wire.reply_token(message.content)
    try:
        order, sent = wire.unpack_order(message.content)
        node = node_of(context, order)
        if message.metadata.message_type == MessageType.EVALUATE:
            content = node.evaluate(order, sent)
        else:
            content = node.answer(order, sent, context.state)
    except Exception:  # the server is told that it failed, never why
        log.exception("this node could not do its part of the round")
        content = wire.pack_reply(token, None)
    return Message(content, reply_to=message)


def client_app(
    make_model: MakeModel,
    client_data: ClientData,
    *,
    loss: OwnLoss | None = None,
    optimizer: Factory | None = None,
) -> ClientApp:
    """Return the app that a node runs.

    Parameters
    ----------
    make_model : callable
        Returns the model, the same as on the server.
    client_data : callable
        Takes Flower's `Context` (with `node_config`, what this node was started with) and
        returns this client's samples: a pair (x, y), or a data set.  They stay there.
    loss, optimizer : callable, optional
        Objects of your own, as `fedquilt.run` takes them; the server's app gets the same.
        Those that have a name stand in the run configuration.
    """
    return app_of(OwnData(make_model, client_data, UserComponents(loss=loss, optimizer=optimizer)))


def app_of(node_of: NodeOf, secure: SecureOf | None = None) -> ClientApp:
    """Return the app of nodes that are made in some way.

    `secure` has each node's part of masked rounds, in a simulation.  Elsewhere what answers them
    stands before the app, in the node's own processes (`keeper`).
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        masks = None if secure is None else secure(context)
        return answered(message, context, masks, lambda m, c: answer(m, c, node_of))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(message, context, node_of)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        place = context.node_config.get("partition-id", -1)
        content = RecordDict({"config": ConfigRecord({"partition-id": int(place)})})
        return Message(content, reply_to=message)

    return app
