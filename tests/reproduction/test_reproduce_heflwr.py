"""`python -m reproduction heflwr`: the README's methods, every width's own accuracy."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from fedquilt.config import RunConfig, build_config
from fedquilt.setup.build_task import build_task
from fedquilt.setup.federation import build_method
from fedquilt.slices.method import Slices
from fedquilt.slices.slicing import Slicing
from fedquilt.sweep import make_plan, parse_axis
from reproduction import PAPERS, Wanted, heflwr, heflwr_page, reproduce
from reproduction.cells import Kept
from reproduction.tables import mean

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_cells_are_the_readmes_comparison() -> None:
    full = {cell.name: cell.config() for cell in heflwr.cells("full")}
    assert len(full) == 2 * 2 * 9
    one = full["dirichlet-cifar10-fedrolex-seed0"]
    assert (one["num_clients"], one["clients_per_round"], one["num_rounds"]) == (8, 8, 50)
    assert (one["optimizer"], one["batch_size"], one["dirichlet_alpha"]) == ("adam", 64, 0.5)
    assert one["tiers"] == "1,3/4,1/2,1/4"
    assert full["iid-mnist-heterofl-seed0"]["model"] == "lenet"
    assert full["iid-mnist-depthfl-seed0"]["model"] == "exits"
    assert heflwr.TABLE["cifar10", "dirichlet", "fjord"] == 40.20
    assert heflwr.TABLE["mnist", "iid", "full"] == 99.30
    assert len(heflwr.TABLE) == 7 * 4


def test_heterofl_is_one_method_in_run_sweep_and_reproduction() -> None:
    def typed(**changes: Any) -> str:
        return build_config({"dataset": "digits", "method": "heterofl", **changes}).absent_classes

    assert typed() == "leave_out", "as its authors"
    assert typed(mode="certified") == "average", "under a bound divisors are public"
    cell = next(c for c in heflwr.cells("full") if "heterofl" in c.name)
    assert cell.config()["absent_classes"] == typed()
    base = build_config({"dataset": "digits", "mode": "fedavg"}, arms=[{"method": "heterofl"}])
    axes = [parse_axis("method=fedrolex,heterofl,depthfl")]

    def points(said: Sequence[str] = ()) -> list[RunConfig]:
        plan = make_plan(base.as_dict(), axes, [0], said=said)
        return [plan.config(point, Path("sweep")) for point in plan.points]

    assert [one.absent_classes for one in points()] == ["average", "leave_out", "average"]
    assert points()[2].model == "exits"
    assert {one.absent_classes for one in points(["absent_classes"])} == {"average"}, "as was said"


def test_in_mfl_every_client_holds_a_half() -> None:
    """HeFlwr's: 2^k structures, one half of every axis, (client + round) mod 2^k."""
    cells_ = {c.name: c.config() for c in heflwr.cells("full")}
    assert cells_["iid-mnist-mfl-seed0"]["tiers"] == "1/2"
    assert cells_["iid-mnist-heterofl-seed0"]["tiers"] == "1,3/4,1/2,1/4"
    assert build_config({"dataset": "digits", "method": "mfl"}).tiers == "1/2"
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    slicing = Slicing("mfl", [Fraction(1, 2)] * 8, 0, model, (), torch.zeros(2, 4))
    for client, round_index in itertools.product(range(8), range(5)):
        place = slicing.place(client, round_index)
        held = torch.zeros(place.whole_size)
        place.scatter_(held, torch.ones(place.size))
        first, second = (client + round_index) % 2, (client + round_index) // 2 % 2
        rows, columns = torch.zeros(6), torch.zeros(8)
        rows[3 * first : 3 * first + 3] = 1
        columns[4 * second : 4 * second + 4] = 1
        parts = (rows[:, None].expand(6, 4), rows, torch.outer(columns, rows), columns)
        parts = (*parts, columns.expand(3, 8), torch.ones(3))
        assert torch.equal(held, torch.cat([part.reshape(-1) for part in parts]))


def test_a_width_s_score_is_the_mean_over_its_clients() -> None:
    """Clients of one width hold other halves in MFL, and each scores its own."""
    few = {"dataset": "digits", "method": "mfl", "num_clients": 4, "clients_per_round": 4}
    config = build_config({**few, "num_rounds": 1, "availability": "always"})
    problem = build_task(config)
    method = cast(Slices, build_method(*problem))
    weights = method._flat.vector.clone()
    own = [method._score(method.own_model(c, weights, 0).module)["accuracy"] for c in range(4)]
    assert len(set(own)) > 1
    looked = method.extra_metrics(weights, 0, {})["tiers"]
    assert looked["1/2"]["accuracy"] == pytest.approx(sum(own) / 4)
    method.close()


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_every_width_s_own_accuracy_beside_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dataclasses.replace(
        heflwr.SIZES["small"], seeds=(0,), changes={"batch_size": 64, "num_rounds": 1}
    )
    monkeypatch.setitem(heflwr.SIZES, "small", one)
    few = {key: heflwr.METHODS[key] for key in ("full", "heterofl", "largest_only")}
    monkeypatch.setattr(heflwr, "METHODS", few)
    text = reproduce("heflwr", Wanted(only="iid", jobs=1))
    assert "#### digits for MNIST, split evenly" in text
    assert "Dirichlet" not in text, "no cell of it is kept"
    record = json.loads(Path("reproduced/heflwr/small/iid-digits-heterofl-seed0.json").read_text())
    assert {width: tier["clients"] for width, tier in record["tiers"].items()} == dict.fromkeys(
        heflwr.TIERS, 2
    )
    row = next(line for line in text.splitlines() if line.startswith("| HeteroFL | 98.44 |"))
    shown = [float(value) for value in row.strip("| ").split(" | ")[3:]]
    assert shown[0] == pytest.approx(sum(shown[2:]) / 4, abs=0.011), "the mean over clients"
    assert shown[1] == shown[2], "the whole clients have the global model"


def test_the_mean_over_clients_counts_clients() -> None:
    tiers = {"1": {"clients": 3, "accuracy": 0.9}, "1/2": {"clients": 1, "accuracy": 0.5}}
    cell = heflwr.cells("small")[0]
    kept = {cell.name: Kept({"accuracy": 0.9, "tiers": tiers})}
    assert heflwr_page._clients([cell], kept) == "80.00"
    whole = {cell.name: Kept({"accuracy": 0.9})}
    assert heflwr_page._clients([cell], whole) == "90.00"


@pytest.mark.parametrize(("seeds", "said"), [(1, "1 of 3"), (2, "2 of 3"), (3, "3")])
def test_a_row_says_over_how_many_seeds_it_is(seeds: int, said: str) -> None:
    cells = heflwr.rows("small")["mnist", "iid", "full"]
    kept = {cell.name: Kept({"accuracy": 0.9}) for cell in cells[:seeds]}
    text = heflwr_page.markdown("small", kept)
    row = next(line for line in text.splitlines() if line.startswith("| FedAvg (everybody"))
    assert row.split(" | ")[:3] == ["| FedAvg (everybody whole)", "99.30", said]
    few = "" if seeds == 3 else f" ({said} seeds)"
    assert mean(cells, kept) == ("90.00" if seeds == 1 else "90.00 ± 0.00") + few


@pytest.mark.parametrize("scale", heflwr.SCALES)
def test_the_page_shows_what_is_kept(scale: str) -> None:
    text = PAPERS["heflwr"].markdown(scale, DOCS / "reproduction" / "heflwr" / scale, "")
    assert text in (DOCS / "reproduction.md").read_text()
