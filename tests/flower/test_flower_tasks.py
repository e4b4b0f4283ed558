"""Tasks of other forms on nodes, what nodes are told of a run, and runs that are resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import nn

import fedquilt
from fedquilt.common.errors import InvalidValueError, NotReadyError, RunFolderError
from fedquilt.config import CondenseConfig, RunConfig, build_config, option_fields
from fedquilt.config.option import Flag, kinds_of
from fedquilt.config.run import option_names
from fedquilt.flower import wire
from fedquilt.flower.client_registry import PlaceRegistry
from fedquilt.flower.node import client_app, new_model
from fedquilt.flower.server import run_on_grid
from fedquilt.flower.settings import FlowerSettings
from fedquilt.flower.simulate import InProcessGrid, _all_settings, _nodes_of, simulate
from fedquilt.record.result import RunResult
from fedquilt.setup.build_task import build_task
from fedquilt.setup.task import UserComponents
from flower_samples import COUNT, client_data, make_model, run_federation, samples
from flower_samples import test_data as held_by_the_server

HOW = FlowerSettings(poll=0.01)
EACH, TOKENS = 20, 6


class Sum(nn.Module):
    """Takes a dictionary of token ids and numbers; gives one real number a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.last = nn.Linear(6, 1)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> Any:
        return self.last(torch.cat([self.embed(ids).mean(dim=1), numbers], dim=1)).squeeze(1)


class Labels(nn.Module):
    """Gives a class for each token, class 0 being padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.embed(ids)).transpose(1, 2)


def numbers(seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (EACH, TOKENS), generator=source)
    values = torch.randn(EACH, 2, generator=source)
    return {"ids": ids, "numbers": values}, values.sum(dim=1) + ids.float().mean(dim=1)


def labels(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 9, (EACH, TOKENS), generator=torch.Generator().manual_seed(seed))
    return ids, ids % 4


TASKS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "regression on a dictionary": (Sum, numbers, {"loss": "mse", "metrics": "mae"}),
    "a loss that is found out": (Sum, numbers, {}),
    "a class for each token": (Labels, labels, {"loss": "cross_entropy", "ignore_index": 0}),
}


def on_nodes(make: Any, of: Any, options: dict[str, Any]) -> RunResult:
    def own(context: Context) -> Any:
        return of(int(context.node_config["partition-id"]))

    grid = InProcessGrid(client_app(make, own), COUNT)
    places = PlaceRegistry(grid, COUNT)
    return run_on_grid(grid, places, make, lambda: of(99), options, HOW)


@pytest.mark.parametrize("mode", ["fedavg", "certified"])
@pytest.mark.parametrize("task", TASKS)
def test_tasks_of_every_form_agree_with_one_machine(task: str, mode: str) -> None:
    make, of, options = TASKS[task]
    options = {**options, "mode": mode, "num_rounds": 3, "seed": 2, "optimizer": "adam"}
    options |= {"noise_seed": 4, "epsilon": 50.0} if mode == "certified" else {}
    there = on_nodes(make, of, options)
    here = fedquilt.run(
        new_model(make, 2), [of(i) for i in range(COUNT)], of(99), output_dir=None, **options
    )
    assert there.result["metadata"]["loss"] == here.result["metadata"]["loss"]
    for name, tensor in here.state_dict.items():
        assert float((tensor - there.state_dict[name]).abs().max()) <= 1e-5
    began = new_model(make, 2).state_dict()
    assert any(not torch.equal(began[name], x) for name, x in there.state_dict.items())
    last = here.result["history"]["test_loss"][-1]
    assert there.result["history"]["test_loss"][-1] == pytest.approx(last, abs=1e-4)


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of somebody's own, the mean over a batch."""
    return ((outputs - nn.functional.one_hot(targets, 3)) ** 2).mean()


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.5)


@pytest.mark.parametrize("mode", ["fedavg", "certified"])
def test_objects_of_the_app_are_the_servers_and_the_nodes(mode: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"mode": mode, "num_rounds": 3, "seed": 2}
    options |= {"noise_seed": 4, "epsilon": 50.0} if mode == "certified" else {}
    grid = InProcessGrid(
        client_app(make_model, client_data, loss=squared, optimizer=momentum), COUNT
    )
    own = UserComponents(loss=squared, optimizer=momentum, metrics={"squared": squared})
    there = run_on_grid(
        grid,
        PlaceRegistry(grid, COUNT),
        make_model,
        held_by_the_server,
        options,
        HOW,
        output_dir=str(tmp_path),
        own=own,
    )
    here = fedquilt.run(
        new_model(make_model, 2),
        [samples(i) for i in range(COUNT)],
        held_by_the_server(),
        output_dir=None,
        loss=squared,
        optimizer=momentum,
        **options,
    )
    for name, tensor in here.state_dict.items():
        assert float((tensor - there.state_dict[name]).abs().max()) <= 1e-5
    assert there.result["history"]["test_squared"][-1] > 0
    assert "refused" not in (there.folder / "nodes.jsonl").read_text()  # type: ignore[operator]


@pytest.mark.parametrize(("of_node", "of_server"), [(squared, None), (None, squared)])
def test_an_object_that_only_one_side_has_is_refused(
    of_node: Any, of_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = InProcessGrid(client_app(make_model, client_data, loss=of_node), COUNT)
    places, options = PlaceRegistry(grid, COUNT), {"mode": "fedavg", "num_rounds": 1}
    run_on_grid(
        *(grid, places, make_model, held_by_the_server, options, HOW),
        output_dir=str(tmp_path),
        own=UserComponents(loss=of_server),
    )
    assert "must be this node's too" in caplog.text
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert "the node failed" in (folder / "nodes.jsonl").read_text()


def test_a_run_configuration_does_not_name_what_the_app_brings() -> None:
    grid = InProcessGrid(client_app(make_model, client_data, loss=squared), COUNT)
    places, options = PlaceRegistry(grid, COUNT), {"mode": "fedavg", "loss": "mse"}
    with pytest.raises(InvalidValueError, match="loss='mse' must be left out"):
        run_on_grid(
            *(grid, places, make_model, held_by_the_server, options, HOW),
            own=UserComponents(loss=squared),
        )


CONFIGS: dict[str, dict[str, Any]] = {
    "certified": {},
    "quap_fl": {"mode": "quap_fl", "noise_layers": "all"},
    "optimizer": {"mode": "fedavg", "optimizer": "adamw", "weight_decay": 0.1, "metrics": "f1"},
    "slices": {"method": "heterofl", "tiers": "1,1/2"},
    "condensation": {"method": "condense"},
    "condensation, certified": {"method": "condense", "mode": "certified"},
    "usual values in another mode": {"batch_size": 32, "learning_rate": 0.01, "clip_norm": 1.0},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_node_reads_what_the_server_meant(case: str) -> None:
    own = {"dataset": "custom", "model": "custom", "engine": "custom"}
    config = build_config({**own, **CONFIGS[case]}, own=True)
    read = wire.read_settings(wire.settings_text(config))
    assert type(read) is type(config)
    for name in option_names(Flag.NODES, type(config)):
        assert getattr(read, name) == getattr(config, name), name


FREE_TEXTS = {"trainable", "whole", "tiers", "noise_layers", "embed_layer", "augmentation"}
"""Options without a list of choices that nodes are told: patterns and names, never a path."""


@pytest.mark.parametrize("kind", [RunConfig, CondenseConfig])
def test_a_node_is_told_nothing_that_is_not_declared_for_it(kind: type[RunConfig]) -> None:
    """Every option at a value of its own, the texts as paths on the server's disk."""
    config = build_config({"method": kind().method, "mode": kind().mode})
    assert type(config) is kind
    secret: dict[str, Any] = {}
    for number, (name, kinds) in enumerate(kinds_of(kind).items()):
        if name not in ("mode", "method"):
            marked = f"/srv/hospital-A/{name}.csv" if str in kinds else 60907000 + number
            secret[name] = True if bool in kinds else marked
            object.__setattr__(config, name, secret[name])  # whatever the rules say of it
    text = wire.settings_text(config)
    allowed = option_names(Flag.NODES, kind)
    assert set(json.loads(text)) <= set(allowed)
    for name, value in secret.items():
        if name not in allowed or name == "tiers":
            assert value is True or str(value) not in text
    rules = {name: item.metadata["rule"] for name, item in option_fields(kind).items()}
    free = {n for n in allowed if str in kinds_of(kind)[n] and "choices" not in rules[n]}
    assert free <= FREE_TEXTS


WIDE = ["1", "1/2", "1/2", "1"]


@pytest.mark.parametrize("method", ["heterofl", "fjord", "mfl", "smallest", "largest_only"])
def test_widths_of_a_table_travel_and_its_path_does_not(method: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    table = tmp_path / "hospital-A.csv"
    table.write_text("client,width\n" + "".join(f"{i},{w}\n" for i, w in enumerate(WIDE)))
    grid = Recording(client_app(make, client_data), COUNT)
    options: dict[str, Any] = {"mode": "fedavg", "method": method, "tiers": str(table)}
    options |= {"num_rounds": 2, "seed": 3, "learning_rate": 0.1}
    places = PlaceRegistry(grid, COUNT)
    there = run_on_grid(grid, places, make, held_by_the_server, options, HOW)
    told = {order.content["config"]["settings"] for order in grid.orders}
    assert told
    assert all("hospital-A" not in text for text in told)
    here = fedquilt.run(
        new_model(make, 3),
        [samples(i) for i in range(COUNT)],
        held_by_the_server(),
        output_dir=None,
        **options,
    )
    for name, tensor in here.state_dict.items():
        assert float((tensor - there.state_dict[name]).abs().max()) <= 1e-5


class Recording(InProcessGrid):
    """A grid that keeps the orders of its nodes."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.orders: list[Message] = []

    def _answer(self, message: Message) -> list[Message]:
        if message.metadata.message_type == "train":
            self.orders.append(message)
        return super()._answer(message)


EVALUATED: dict[str, dict[str, Any]] = {
    "certified": {"mode": "certified", "noise_seed": 4, "epsilon": 50.0},
    "slices": {"mode": "fedavg", "method": "heterofl", "tiers": "1,1/2"},
    "no classes": {"mode": "fedavg", "loss": "mse"},
}


def hidden() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("case", EVALUATED)
def test_clients_measure_on_nodes_what_they_measure_on_one_machine(
    case: str, tmp_path: Path
) -> None:
    make, of = (Sum, numbers) if case == "no classes" else (hidden, samples)
    options = {**EVALUATED[case], "num_rounds": 4, "eval_every": 2, "client_test_fraction": 0.25}

    def own(context: Context) -> Any:
        return of(int(context.node_config["partition-id"]))

    grid = InProcessGrid(client_app(make, own), COUNT)
    places = PlaceRegistry(grid, COUNT)
    served = (grid, places, make, lambda: of(99), options, HOW)
    there = run_on_grid(*served, output_dir=str(tmp_path / "there"))
    data = [of(i) for i in range(COUNT)]
    kept = str(tmp_path / "here")
    here = fedquilt.run(new_model(make, 0), data, of(99), output_dir=kept, **options)
    assert there.client_metrics is not None
    assert len(there.client_metrics) == COUNT
    for mine, yours in zip(there.client_metrics, here.client_metrics or (), strict=True):
        assert mine["examples"] == yours["examples"] > 0
        assert mine.keys() - {"name"} == yours.keys() - {"name", "mse"}, "metrics do not travel"
        for name in mine.keys() - {"name", "width", "classes"}:
            assert mine[name] == pytest.approx(yours[name], abs=1e-4)
        assert [mine.get(name) for name in ("width", "classes")] == [
            yours.get(name) for name in ("width", "classes")
        ]
    assert there.folder is not None
    path = there.folder / "client_metrics.jsonl"
    assert [json.loads(line)["rounds"] for line in path.read_text().splitlines()] == [2, 4]
    assert path.stat().st_mode & 0o077 == 0
    assert any("each client measures" in note for note in there.statement.notes)
    published = "client_accuracy" in (there.folder / "rounds.jsonl").read_text()
    assert published == (case == "slices"), "raw measures are not published beside a claim"


ROWS: dict[str, Any] = {
    "no row": None,
    "no JSON": "{",
    "not an object": [1],
    "no examples": {"accuracy": 0.5},
    "a share above 1": {"examples": 4, "accuracy": 2.0},
    "a loss that is none": {"examples": 4, "loss": "much"},
    "a class that is none": {"examples": 4, "classes": {"0": 3}},
    "a number too long": {"examples": 10**40, "accuracy": 0.5},
}


@pytest.mark.parametrize("case", ROWS)
def test_a_client_whose_measures_are_none_is_named_and_costs_nobody_theirs(
    case: str, tmp_path: Path
) -> None:
    row = ROWS[case]

    class Odd(InProcessGrid):
        def _answer(self, message: Message) -> list[Message]:
            (reply,) = super()._answer(message)
            first = self.contexts[message.metadata.dst_node_id].node_config["partition-id"] == 0
            if message.metadata.message_type == "evaluate" and first:
                facts = {**reply.content["config"]}
                del facts["row"]
                if row is not None:
                    facts["row"] = row if isinstance(row, str) else json.dumps(row)
                reply.content["config"] = ConfigRecord(facts)
            return [reply]

    grid = Odd(client_app(make_model, client_data), COUNT)
    told = run_federation(grid, tmp_path, num_rounds=2, eval_every=2, client_test_fraction=0.25)
    assert told.client_metrics is not None
    assert [row["accuracy"] is None for row in told.client_metrics] == [True, False, False, False]
    assert told.folder is not None
    lines = [json.loads(x) for x in (told.folder / "nodes.jsonl").read_text().splitlines()]
    assert [line["client"] for line in lines if "refused" in line] == [0]
    assert [line["evaluated"] for line in lines if "evaluated" in line] == [[1, 2, 3]]
    assert [line["answered"] for line in lines if "asked" in line] == [COUNT] * 2


def test_samples_that_clients_hold_back_stay_with_them() -> None:
    dealt = build_config({"mode": "fedavg", "num_clients": 4, "client_test_fraction": 0.2})
    config = dealt.replace(engine="flower", num_rounds=1, local_epochs=1)
    rows = simulate(config, in_memory=True).client_metrics
    assert rows is not None
    assert all(row["examples"] > 0 and row["accuracy"] is not None for row in rows)
    grid = InProcessGrid(client_app(make_model, client_data), COUNT)
    with pytest.raises(InvalidValueError, match=r"evaluation_share=0\.1 must be 0"):
        run_federation(grid, None, client_test_fraction=0.2, evaluation_share=0.1)
    with pytest.raises(InvalidValueError, match=r"must be 0 under secure"):
        run_federation(grid, None, client_test_fraction=0.2, secure_aggregation="protocol")


class Ends(InProcessGrid):
    """A grid whose nodes are gone after some orders."""

    def __init__(self, orders: int) -> None:
        super().__init__(client_app(make_model, client_data), COUNT)
        self._left = orders

    def get_node_ids(self) -> Any:
        return super().get_node_ids() if self._left > 0 else []

    def _answer(self, message: Any) -> Any:
        self._left -= message.metadata.message_type == "train"
        return super()._answer(message)


def resumed(grid: InProcessGrid, output: Path, test: Any, resume: Path | None) -> RunResult:
    options = {"mode": "certified", "num_rounds": 4, "noise_seed": 1, "eval_every": 1}
    return run_on_grid(
        grid,
        PlaceRegistry(grid, COUNT),
        make_model,
        test,
        options,
        FlowerSettings(poll=0.01, wait=0.2),
        client_ids=[f"client {place}" for place in range(COUNT)],
        output_dir=str(output),
        resume=resume,
    )


def test_a_run_without_data_is_resumed_and_comes_out_the_same(tmp_path: Path) -> None:
    honest = InProcessGrid(client_app(make_model, client_data), COUNT)
    whole = resumed(honest, tmp_path / "whole", held_by_the_server, None)
    with pytest.raises(NotReadyError):
        resumed(Ends(2 * COUNT), tmp_path / "parted", held_by_the_server, None)
    (folder,) = (tmp_path / "parted").iterdir()
    assert (folder / "clients.json").exists()
    with pytest.raises(RunFolderError, match="other test data"):
        resumed(honest, tmp_path, samples(98, 60), folder)
    parted = resumed(honest, tmp_path, held_by_the_server, folder)
    assert parted.result["rounds"] == 4
    for name, tensor in whole.state_dict.items():
        assert torch.equal(tensor, parted.state_dict[name])
    spent = [
        np.asarray(result.result["ledger"]["lifetime_epsilon_max"]) for result in (whole, parted)
    ]
    assert spent[0] == spent[1]


def test_actors_read_a_configuration_as_it_is() -> None:
    config = build_config({"mode": "certified", "num_clients": 4, "engine": "flower-ray"})
    made = _nodes_of(json.dumps(_all_settings(config)))
    order = wire.Order("", 0, 1, 4, 0.1, "", "", "none", 0.1, False)
    context = Context(1, 1, {"partition-id": 1}, RecordDict(), {})
    settled, _ = build_task(config.replace(engine="sequential"))
    assert made(context, order).config == settled
