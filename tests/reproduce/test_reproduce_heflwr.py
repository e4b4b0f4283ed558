"""`fedquilt reproduce heflwr`: the README's comparison of methods, every width's own accuracy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fedquilt.reproduce import PAPERS, Wanted, heflwr, heflwr_page, reproduce
from fedquilt.reproduce.cells import Kept
from fedquilt.reproduce.tables import mean

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
    record = json.loads(
        Path("reproduction/heflwr/small/iid-digits-heterofl-seed0.json").read_text()
    )
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
