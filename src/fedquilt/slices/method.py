"""Clients that train slices of the model, as a `Method` of the round.

FlexLoRA: clients of unequal ranks whose changes are averaged as products (Bai et al. 2024).
The mean of A and the mean of B are not the adapters of the mean change; the mean of products is.
A client of rank k gets the nearest adapters of rank k (`Products.factored_`), trains them, and its
vector is the change of its products, B' A' - B A, with the change of all else that it trained.
Whatever its rank, that vector has the same place in the sum.

Under a bound this vector is what is clipped, so one client moves the sum by the clip at most, and
noise falls on every element of it: on out x in numbers a layer, where methods that send A and B
have rank (in + out).  Truncation reads the noised sum and public weights alone.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.aggregation import Place, ServerStep
from fedquilt.common.errors import InvalidValueError
from fedquilt.config.choices import EXIT_METHODS
from fedquilt.config.modes import MODE_TABLE
from fedquilt.method import MethodParts, Progress, RemoteEngine, WholeModel
from fedquilt.slices import static_norm
from fedquilt.slices.engine import SlicedEngine
from fedquilt.slices.model_slice import WithoutRows
from fedquilt.slices.slicer import keep_scaling
from fedquilt.slices.slicing import (
    NOTES,
    Cut,
    Products,
    Slicing,
    ZeroPadded,
    cost_of_everybody,
    cost_table,
    make_slicing,
    tier_widths,
)
from fedquilt.training import ClientIds, ClientUpdate, FlatModel, Task, WrappedEngine, public_inputs

_REMEMBERED = 16
_LOOKED = 8
"""Clients of a width whose slices are evaluated by themselves."""

_NEED_CLASSES = {
    "heterofl": "hides the classes that a client has no sample of",
    "fjord": "distils class scores from wide to narrow models",
    **dict.fromkeys(EXIT_METHODS, "distils class scores between exits"),
}
"""Methods whose loss is one of classes, and why."""


def refuse_without_classes(what: str, method: str, task: Task) -> None:
    """Raise where a method needs one class a sample, and the task is another."""
    why = _NEED_CLASSES.get(method)
    if why is not None and not task.is_classification:
        raise InvalidValueError(
            f"{what} must be used with one class a sample and loss='cross_entropy', not with "
            f"loss={task.objective.name!r}: it {why}; 'fedrolex', 'dropout', 'mfl', 'fiarse', "
            "'smallest' and 'largest' take any loss"
        )


class Slices(WholeModel):
    """Each client trains the slice it can hold; a part moves by those who hold it."""

    holds_parts = True

    def __init__(self, parts: MethodParts) -> None:
        config = parts.config
        if parts.engine is not None:
            raise InvalidValueError(
                f"engine must be a name with method={config.method!r}, which makes an engine for "
                "every slice"
            )
        refuse_without_classes(f"method={config.method!r}", config.method, parts.task)
        sample = parts.task.public().inputs
        self.slicing: Slicing = make_slicing(config, parts.flat, sample, len(parts.task.clients))
        super().__init__(
            parts, SlicedEngine(self.slicing, parts.task, parts.local_settings, config.engine)
        )
        self.client_widths = self.slicing.widths
        self._pads = config.method == "hetlora"
        self.notes = (*self.notes, *filter(None, (NOTES.get(config.method),)))
        engine = cast(SlicedEngine, self.engine)
        leaves_out = config.absent_classes == "leave_out" and not parts.task.is_remote
        self._classes = engine.task.class_mask if leaves_out else None
        self._flat, self._score, self._secret = parts.flat, parts.score, parts.secret_cohort
        self._statistics = static_norm.statistics_of(parts.flat.module)
        self._batches = _batches_for_statistics(parts) if self._statistics else None
        self._own: OrderedDict[Hashable, FlatModel] = OrderedDict()
        self._computed: dict[Cut, dict[str, torch.Tensor]] = {}
        if self._batches is not None and config.norm_statistics == "clients":
            self.released = (*self.released, *self._statistics)
            self.notes = (*self.notes, _FROM_CLIENTS)
        elif self._batches is not None:
            self.notes = (*self.notes, _FROM_SERVER)

    def place(self, client: int, round_index: int) -> Place | None:
        """Return where a client's slice lies in the whole vector.

        HeteroFL leaves the output rows of classes that a client lacks out of the mean (the
        authors' `combine`).  That follows from a client's data, so it is done only where
        nothing is claimed; under a bound the rows count as zeros and divisors stay public.
        """
        place = self.slicing.place(client, round_index)
        mask = self._classes
        if self._pads:
            return ZeroPadded(place)
        if mask is None or not bool(mask.hidden[client].any()):
            return place
        rows = self.slicing.output_rows(self.slicing.cut(client, round_index))
        lacking = tuple(mask.hidden[client].nonzero().flatten().tolist())
        return WithoutRows(place, rows, lacking) if rows else place

    def outgoing(self, weights: torch.Tensor, client: int, round_index: int) -> torch.Tensor:
        """Return the client's slice of the model."""
        return self.slicing.place(client, round_index).gather(weights)

    def work(
        self, sent: torch.Tensor, client: int, round_index: int, learning_rate: float
    ) -> ClientUpdate:
        """Train the slice that was sent; the rest of the model is nowhere used."""
        place = self.slicing.place(client, round_index)
        whole = sent.new_zeros(place.whole_size)
        place.scatter_(whole, sent)
        return super().work(whole, client, round_index, learning_rate)

    def update_size(self, client: int, round_index: int) -> int | None:
        """Return the size of the client's slice."""
        return self.slicing.place(client, round_index).size

    def coverage(self, clients: NDArray[np.int64], round_index: int) -> torch.Tensor | None:
        """Return the share of clients that hold each coordinate, or count on it as zeros."""
        shares = self.slicing.coverage(clients, round_index)
        return (shares > 0).to(shares) if self._pads else shares

    def report_to(self, progress: Progress) -> None:
        """Report which width trains; under a secret coin that would tell whom it picked."""
        if isinstance(self.engine, SlicedEngine) and not self._secret:
            self.engine.report = progress

    def follow(self, released: Callable[[], torch.Tensor]) -> None:
        """Let slices follow the released model, where the method cuts by it."""
        self.slicing.follow(released)

    def move_to(self, remote: RemoteEngine) -> None:
        """Let clients elsewhere train; statistics of their inputs cannot be had from there."""
        if self.slicing.method == "fiarse":
            raise InvalidValueError(
                "method='fiarse' must be used where clients are on this machine: which units a "
                "slice has follows from the whole model, and others are sent their slice alone"
            )
        if self._batches is not None and _FROM_CLIENTS in self.notes:
            _refuse_clients("engine='flower'", "the clients' inputs are on other machines")
        super().move_to(remote)

    def before_evaluation(self, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the statistics of static batch normalisation for the model as it stands."""
        if self._batches is not None:
            self._flat.write(weights)
            static_norm.recompute(self._flat.module, self._batches())
            self._flat.remember()  # else clients who evaluate put the last statistics back
            self._computed.clear()
        return weights, {}

    def own_model(self, client: int, weights: torch.Tensor, round_index: int) -> FlatModel:
        """Return a client's own small model, to be evaluated by itself.

        It is what the client trains in the round: with HeteroFL's scaler, and with statistics
        of its own, because narrow layers see other values than the whole model's.
        """
        cut = self.slicing.cut(client, round_index)
        key = self.slicing.structure(cut)
        if key not in self._own:
            self._flat.restore()  # a client may have looked at its samples since
            model = copy.deepcopy(self.slicing.sub_model(cut))
            keep_scaling(model)
            self._own[key] = FlatModel(model, self.slicing.sample, adopt=True)
            if len(self._own) > _REMEMBERED:
                self._own.popitem(last=False)
        self._own.move_to_end(key)
        small = self._own[key]
        small.write(self.slicing.place_of(cut).gather(weights))
        if self._batches is not None:
            self._set_statistics(cut, small.module, self._batches)
        return small

    def _set_statistics(self, cut: Cut, model: nn.Module, batches: static_norm.Batches) -> None:
        """Compute a small model's statistics, once for every evaluation of it."""
        if cut in self._computed:
            for name, value in self._computed[cut].items():
                model.get_buffer(name).copy_(value)
            return
        static_norm.recompute(model, batches())
        found = {name: model.get_buffer(name).clone() for name in self._statistics}
        if len(self._computed) < _REMEMBERED:
            self._computed[cut] = found

    def extra_metrics(
        self, weights: torch.Tensor, round_index: int, measured: Mapping[str, float]
    ) -> dict[str, Any]:
        """Evaluate the small models of every tier on the test data.

        Where clients of a width hold different slices, a tier's score is the mean over its
        first clients' (`_LOOKED`).
        """
        tiers: dict[str, dict[str, float]] = {}
        whole = {k.removeprefix("test_"): v for k, v in measured.items() if k.startswith("test_")}
        for width in self.slicing.first_of_each_width():
            clients = np.flatnonzero([w == width for w in self.slicing.widths])[:_LOOKED]
            groups = self.slicing.groups(clients, round_index)
            scores = [
                whole
                if self.slicing.place_of(cut).is_full
                else self._score(self.own_model(members[0], weights, round_index).module)
                for cut, members in groups.items()
            ]
            if scores[0]:
                sizes = [len(members) for members in groups.values()]
                tiers[str(width)] = _mean_score(scores, sizes)
        return {"tiers": tiers} if tiers else {}

    def result(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what a client of each width sends, receives and computes, and what it scores."""
        table = cost_table(self.slicing)
        last: dict[str, Any] = next(
            (line["tiers"] for line in reversed(lines) if "tiers" in line), {}
        )
        for tier in table["tiers"]:
            if tier["width"] in last:
                tier["test"] = last[tier["width"]]
        return {"slices": table}


_FROM_CLIENTS = (
    "BatchNorm's statistics are computed from all clients' inputs before every evaluation, and "
    "leave them neither clipped nor noised"
)
_FROM_SERVER = (
    "BatchNorm's statistics come from the server's own samples, which no client holds; the claim "
    "is not about whoever those are of"
)


def _mean_score(scores: Sequence[Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    """Return the mean over clients, of whom so many share each score."""
    if len(scores) == 1:
        return dict(scores[0])
    return {key: float(np.average([s[key] for s in scores], weights=sizes)) for key in scores[0]}


def _batches_for_statistics(parts: MethodParts) -> static_norm.Batches:
    """Return the inputs from which static batch normalisation has its statistics, or raise."""
    config, task = parts.config, parts.task
    if config.norm_statistics == "clients":
        if MODE_TABLE[config.mode].noised:
            why = "sums over their inputs would leave clients without clip or noise"
            _refuse_clients(f"mode={config.mode!r}", why)
        if task.is_remote:
            _refuse_clients(f"engine={config.engine!r}", "clients' inputs are on other machines")
        return static_norm.batches_of_clients(task.inputs, task.clients)
    if parts.server_inputs is None:
        raise InvalidValueError(
            "norm_statistics='server' needs samples of the server's own, which no client holds: "
            "give a validation set"
        )
    return static_norm.batches_of(parts.server_inputs)


def _refuse_clients(where: str, why: str) -> None:
    raise InvalidValueError(
        f"norm_statistics='clients' must be 'server' in {where} with a model that has BatchNorm: "
        f"{why}; GroupNorm needs no statistics"
    )


class Smallest(WholeModel):
    """Everybody trains the model that even the weakest client can hold."""

    def __init__(self, parts: MethodParts, width: str) -> None:
        super().__init__(parts)
        self._parts, self._width, self._count = parts, width, len(parts.task.clients)
        self.client_widths = [Fraction(width)] * self._count

    def result(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what each client that trains sends, receives and computes, and what it gets."""
        flat, task = self._parts.flat, self._parts.task
        sample, method = public_inputs(task.inputs, 1), self._parts.config.method
        costs = cost_of_everybody(
            method, self._width, self._count, flat.vector, flat.module, sample
        )
        looked: dict[str, Any] = next((x for x in reversed(lines) if "test_loss" in x), {})
        found = {k.removeprefix("test_"): v for k, v in looked.items() if k.startswith("test_")}
        if found:
            costs["tiers"][0]["test"] = found
        return {"slices": costs}


class LargestOnly(Smallest):
    """Only clients that can hold the whole model train: HeFlwr's Selective Client."""

    def __init__(self, parts: MethodParts) -> None:
        super().__init__(parts, "1")
        sample, clients = parts.task.public().inputs, len(parts.task.clients)
        widths = tier_widths(parts.config, parts.flat.module, sample, clients)
        self.client_widths = widths
        self._wide = np.asarray([width == 1 for width in widths])
        self._count = int(self._wide.sum())
        if not self._count:
            raise InvalidValueError(
                f"tiers={parts.config.tiers!r} must have clients of width 1 with "
                f"method='largest_only': nobody could train; the widest is {max(widths)}"
            )

    def present(self) -> NDArray[np.bool_]:
        """Tell who may be asked: widths are public and no matter of data."""
        there = super().present()
        return self._wide if there is None else self._wide & there


class FlexLoRA(Slices):
    """Clients of unequal ranks; the server averages products and truncates them."""

    holds_parts = False

    def __init__(self, parts: MethodParts) -> None:
        if parts.config.average_late:
            raise InvalidValueError(
                f"average_late={parts.config.average_late:g} must be 0 with method='flexlora': the "
                "mean of A and the mean of B are not the adapters of the mean model"
            )
        super().__init__(parts)
        buffers = tuple(parts.flat.buffer_names)
        whole = Products(parts.flat.module, buffers)
        assert isinstance(self.engine, SlicedEngine)
        self.engine = ProductEngine(self.engine, buffers)
        self.server = ProductStep(self.server, whole)
        self._size = self.step_size = whole.of(parts.flat.read()).numel()

    def place(self, client: int, round_index: int) -> None:
        """Return None: everybody's products have their place in the whole sum."""

    def coverage(self, clients: NDArray[np.int64], round_index: int) -> None:
        """Return None: everybody counts on every element."""

    def update_size(self, client: int, round_index: int) -> int | None:
        """Return the size of the products."""
        return self.step_size

    def move_to(self, remote: RemoteEngine) -> None:
        """Refuse clients elsewhere: they would send products, which are as long as the model."""
        raise InvalidValueError(
            "method='flexlora' must be 'hetlora' or 'fedsb' with engine='flower': its clients "
            "would send products, as long as the frozen weights"
        )


class ProductEngine(WrappedEngine):
    """Trains slices and yields the change of their products."""

    is_small = False
    _engine: SlicedEngine

    def __init__(self, engine: SlicedEngine, buffers: tuple[str, ...]) -> None:
        self._engine, self._buffers = engine, buffers
        self._products: dict[Cut, Products] = {}

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield each client's change of its products, in the type of the weights."""
        slicing = self._engine.slicing
        for update in self._engine.train(start, cohort, round_index, learning_rate):
            cut = slicing.cut(update.client, round_index)
            if cut not in self._products:
                self._products[cut] = Products(slicing.sub_model(cut), self._buffers)
            products, before = self._products[cut], slicing.place_of(cut).gather(start)
            delta = products.of(before + update.delta) - products.of(before)
            yield ClientUpdate(
                update.client, delta.to(start.dtype), update.num_examples, update.loss
            )


class ProductStep:
    """The server's step on products, which are then truncated to the adapters' rank."""

    def __init__(self, server: ServerStep, products: Products) -> None:
        self._server, self._products = server, products
        self.report, self.state = server.report, server.state
        self.load_state = server.load_state

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Move the products by the release and return the nearest adapters."""
        moved: Any = self._server.step(self._products.of(weights), update)
        return self._products.factored_(weights, moved)
