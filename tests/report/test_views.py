"""What a page may know of a run."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from views_samples import small_run

import fedquilt
from command_line import Said
from fedquilt.common.errors import FedquiltError
from fedquilt.common.formatting import format_bound
from fedquilt.config import build_config
from fedquilt.experiment.api import run_config
from fedquilt.privacy.accounting import gaussian_epsilon, gaussian_mu
from fedquilt.privacy.ledger import Ledger
from fedquilt.record.schema import RESULT_PUBLIC, ROUND_PUBLIC, WITHHELD
from fedquilt.report.html_page import with_comparison
from fedquilt.report.series import upward
from fedquilt.report.views import page_view, run_view
from fedquilt.report.views.claim import guess_sentence
from fedquilt.report.views.run import encode_roster
from fedquilt.report.views.spend import lifetime_view


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("certified"), mode="certified", seed=3)


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("fedavg"), mode="fedavg")


PRIVATE = {"noise_norm", "signal_norm", "train_loss", "clipped", "seconds"}


@pytest.mark.parametrize("which", ["certified", "fedavg"])
def test_raw_measurements_are_shown_to_the_owner_only(
    which: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(which)
    assert not PRIVATE & set(run_view(folder)["per_round"])
    shown = run_view(folder, private=True)["per_round"]
    assert {"train_loss", "seconds"} <= set(shown)
    assert page_view([folder])["runs"][0]["holdings"] is None
    held = page_view([folder], private=True)["runs"][0]["holdings"]
    assert len(held["counts"]) == 12


def test_no_private_figure_is_anywhere_in_a_public_page(certified: Path, tmp_path: Path) -> None:
    """Figures that nothing else has stand in the private file, and come out for the owner only."""
    run = Path(shutil.copytree(certified, tmp_path / "run"))
    lines = [json.loads(line) for line in (run / "private.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {key: 60907000 + line["round"] for key in WITHHELD if key in line}
    (run / "private.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    public, own = (json.dumps(page_view([run], private=private)) for private in (False, True))
    assert "60907001" not in public
    assert "60907001" in own
    assert str(tmp_path) not in public


def test_what_somebody_adds_to_the_files_stays_out(certified: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("config.toml", "rounds.jsonl", "result.json"):
        (folder / name).write_bytes((certified / name).read_bytes())
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"mean_update_norm": 3.25, "train_loss": 4.125}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = json.loads((folder / "result.json").read_text())
    result["norms"] = {"mean_update_norm": 3.25}
    (folder / "result.json").write_text(json.dumps(result))
    text = json.dumps(page_view([folder]))
    assert "mean_update_norm" not in text
    assert "4.125" not in text
    assert {"cohort", "test_accuracy"} <= set(ROUND_PUBLIC)
    assert "norms" not in RESULT_PUBLIC


def test_spend_is_what_the_ledger_says(certified: Path) -> None:
    view = run_view(certified)
    spend, result = view["spend"], json.loads((certified / "result.json").read_text())
    stated = result["statement"]["epsilon_max"]
    assert max(spend["epsilons"]) == pytest.approx(stated, rel=1e-4)
    assert max(spend["epsilons"]) >= stated
    assert spend["rounds"]["max"][-1] == pytest.approx(stated, rel=1e-3)
    for name in ("max", "high", "median", "low"):
        assert np.all(np.diff(spend["rounds"][name]) >= 0)
    never = [e for e, joins in zip(spend["epsilons"], result["joins"], strict=True) if joins == 0]
    assert all(epsilon == 0 for epsilon in never)
    assert view["joins"] == result["joins"]


def test_charges_add_up_to_each_client_s_epsilon(certified: Path) -> None:
    view = run_view(certified)
    spend = view["spend"]
    lines = [json.loads(line) for line in (certified / "rounds.jsonl").read_text().splitlines()]
    spent = np.zeros(view["num_clients"])
    for line, charges in zip(lines, spend["charges"], strict=True):
        spent[sorted(line["cohort"])] += charges
    place = np.searchsorted(spend["curve"]["mu2"], spent * (1 - 1e-4))
    for client in np.flatnonzero(spent):
        looked_up = spend["curve"]["epsilon"][min(place[client], 255)]
        assert looked_up >= spend["epsilons"][client] * (1 - 1e-3)
        assert looked_up <= spend["epsilons"][client] * 1.02 + 0.02


def test_a_shared_ledger_with_other_clients_first(tmp_path: Path) -> None:
    """The run's client 0 is not the population's: spend still lands where it belongs."""
    ledger = str(tmp_path / "shared.sqlite")
    common: dict[str, Any] = {"mode": "certified", "ledger": ledger, "allowance": 8.0}
    common |= {"population": "people", "new_population": True}
    small_run(tmp_path, **common, seed=1)
    second = small_run(tmp_path, **common, seed=2)
    view, result = run_view(second), json.loads((second / "result.json").read_text())
    assert view["spend"]["population"] == "people"
    spent = view["spend"]["epsilons"]
    assert [e > 0 for e in spent] == [joins > 0 for joins in result["joins"]]
    assert max(spent) == pytest.approx(result["statement"]["epsilon_max"], rel=1e-3)
    assert view["spend"]["rounds"]["max"][-1] == pytest.approx(max(spent), rel=2e-3)
    assert view["spend"]["lifetime"] is None  # these clients are new
    assert len(set(run_view(second, private=True)["spend"]["ids"])) == 12


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A first and a second run of the same clients on one ledger, and the ledger."""
    place = tmp_path_factory.mktemp("shared")
    ledger = place / "clients.sqlite"
    common: dict[str, Any] = {"mode": "certified", "ledger": str(ledger), "allowance": 6.0}
    common |= {"client_test_fraction": 0.3}
    first = small_run(place, **common, epsilon=1.0)
    return first, small_run(place, **common, epsilon=2.0), ledger


def test_a_later_run_begins_at_what_was_spent_before(two_runs: tuple[Path, Path, Path]) -> None:
    first, second, ledger = two_runs
    before, after = (run_view(run)["spend"] for run in (first, second))
    assert before["lifetime"] is None
    past = after["lifetime"]
    assert past["max"][0] == before["rounds"]["max"][-1] > 0
    assert len(past["max"]) == 7
    with Ledger.open(ledger, read_only=True) as opened:
        most = float(opened.populations()[0].epsilons().max())
    assert past["max"][-1] == pytest.approx(most, rel=1e-3)
    assert after["rounds"]["max"][0] < past["max"][1]
    assert sum(amount > 0 for amount in past["before"]) == sum(e > 0 for e in before["epsilons"])


def test_two_runs_at_once_count_each_other(two_runs: tuple[Path, Path, Path]) -> None:
    """What others were charged in between is in the levels, and in nobody's single line."""
    _, second, _ = two_runs
    run_id = json.loads((second / "ledger.json").read_text())["run_id"]
    place = json.loads((second / "ledger.json").read_text())["ledger"]
    with Ledger.open(second / place, read_only=True) as ledger:
        population = ledger.populations()[0]
        run = next(run for run in population.runs() if run.name == run_id)
        charges = population.charges()
        own = [i for i, one in enumerate(charges) if one.run == run.key]
        other = dataclasses.replace(charges[0], charges_mu2=charges[0].charges_mu2 + 1.0)
        mixed = [*charges[: own[2]], other, *charges[own[2] :]]
        calm = lifetime_view(population, run, np.arange(12), 6)
        population.charges = lambda *_: mixed  # type: ignore[method-assign]
        busy = lifetime_view(population, run, np.arange(12), 6)
    assert calm is not None
    assert busy is not None
    assert busy["max"][:3] == calm["max"][:3]
    assert busy["max"][3] > calm["max"][3]
    assert (calm["before"] is None, busy["before"] is None) == (False, True)


def test_the_headline_is_what_all_runs_of_the_ledger_cost(
    two_runs: tuple[Path, Path, Path],
) -> None:
    """The claim on a page is never smaller than what the ledger says of the same clients."""
    first, second, place = two_runs
    with Ledger.open(place, read_only=True) as opened:
        most = float(opened.populations()[0].epsilons().max())
    view = page_view([first, second], look=False)
    stated = f"Every client, over all runs of its ledger: ε ≤ {format_bound(most)} at δ = 1e-05"
    assert [run["claim"]["headline"] for run in view["runs"]] == [stated, stated]
    assert most > max(float(run["claim"]["epsilon_max"]) for run in view["runs"])
    assert ["This run alone", "ε ≤ 1"] in view["runs"][0]["claim"]["facts"]
    (together,) = view["together"]
    assert (together["runs"], together["bounded"]) == (2, True)
    assert f"ε ≤ {format_bound(most)}" in together["headline"]
    shown = fedquilt.load(second)._repr_html_()
    assert f"over all runs of its ledger: epsilon &lt;= {format_bound(most)}" in shown
    moved = Path(shutil.copytree(second, second.parent / "moved"))
    (moved / "ledger.json").unlink()
    assert page_view([moved], look=False)["runs"][0]["claim"]["headline"] == stated


def test_a_sweep_s_claims_are_composed(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    for point, epsilon in enumerate((1.0, 3.0)):
        small_run(tmp_path / "points" / f"{point:04d}", mode="certified", epsilon=epsilon)
    view = page_view([tmp_path], look=False)
    mu2 = sum(gaussian_mu(float(run["claim"]["epsilon_max"]), 1e-5) ** 2 for run in view["runs"])
    (together,) = view["together"]
    assert together["epsilon"] == pytest.approx(gaussian_epsilon(mu2**0.5, 1e-5), rel=1e-3)
    assert together["epsilon"] > 3
    assert "2 looks were taken" in together["text"]
    small_run(tmp_path / "points" / "0002", mode="fedavg")
    (unbounded,) = page_view([tmp_path], look=False)["together"]
    assert unbounded["headline"] == "No guarantee: ε = ∞ over all of them"


@pytest.mark.parametrize(("epsilon", "times"), [(6.0, "74.4"), (3.0, "64.1"), (1.0, "55.")])
def test_what_a_bound_means_to_who_guesses(epsilon: float, times: str) -> None:
    said = guess_sentence(epsilon, 1e-5, "zero-out", gaussian=True)
    assert f"right at most {times}" in said
    exact = scipy.stats.norm.cdf(gaussian_mu(epsilon, 1e-5) / 2)
    shown = float(re.findall(r"at most ([\d.]+) times", said)[0])
    assert 100 * exact <= shown <= 100 * exact + 0.1
    looser = guess_sentence(epsilon, 1e-5, "zero-out", gaussian=False)
    assert float(re.findall(r"at most ([\d.]+) times", looser)[0]) > shown


def test_the_noise_of_a_page_is_the_figure_of_a_plan(certified: Path) -> None:
    """One figure for the noise everywhere: that of the whole run, after its last round."""
    view = run_view(certified)
    lines = [json.loads(line) for line in (certified / "rounds.jsonl").read_text().splitlines()]
    size, rounds = 64 * 10 + 10, len(lines)
    noise, clip = lines[0]["noise_std"], lines[0]["clip_value"]
    assert all((line["noise_std"], line["clip_value"]) == (noise, clip) for line in lines)
    expected = np.sqrt(size) * noise / clip / np.sqrt(rounds)
    assert view["noise_ratio"][-1] == pytest.approx(expected, rel=1e-3)
    assert view["noise_ratio"][0] == pytest.approx(expected * np.sqrt(rounds), rel=1e-3)


def test_shares_are_of_units_that_add_up(certified: Path) -> None:
    spend = run_view(certified)["spend"]
    for epsilon, share in zip(spend["epsilons"], spend["shares"], strict=True):
        given = gaussian_mu(epsilon, 1e-5) ** 2 if epsilon else 0.0
        assert share == pytest.approx(given / gaussian_mu(spend["budget"], 1e-5) ** 2, abs=2e-3)


def test_what_the_mode_has_by_default_is_no_change(tmp_path: Path) -> None:
    config = build_config({"mode": "certified", "num_rounds": 2, "output_dir": str(tmp_path)})
    done = run_config(config)
    assert done.folder is not None
    changed = [name for name, _, usual in run_view(done.folder)["config"] if not usual]
    assert {"num_rounds", "output_dir", "mode"} <= set(changed)
    assert not {"epsilon", "clip_norm", "model", "learning_rate"} & set(changed)


def test_names_of_the_ledger_and_where_it_lies_are_the_owner_s(
    two_runs: tuple[Path, Path, Path],
) -> None:
    _, second, ledger = two_runs
    with Ledger.open(ledger, read_only=True) as opened:
        names = opened.populations()[0].ids()
    own = run_view(second, private=True)
    assert own["spend"]["ids"] == names
    assert any(str(ledger) in note for note in own["claim"]["notes"])
    public = json.dumps(page_view([second]))
    assert not any(name in public for name in names)
    assert str(ledger.parent) not in public
    assert "runs of ledger clients.sqlite" in public


def test_what_clients_measured_is_the_owner_s(two_runs: tuple[Path, Path, Path]) -> None:
    _, second, _ = two_runs
    assert page_view([second], look=False)["runs"][0]["measured"] is None
    measured = with_comparison(page_view([second], private=True, look=False))["runs"][0]["measured"]
    assert measured["rounds"] == 6
    assert measured["groups"][0]["name"] == "all clients"
    assert {"joined most", "class 3"} <= {group["name"] for group in measured["groups"]}
    assert len(measured["clients"]) == 12


def test_a_ledger_that_is_gone_is_said(certified: Path, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    folder.mkdir()
    for name in ("config.toml", "rounds.jsonl", "result.json", "ledger.json"):
        (folder / name).write_bytes((certified / name).read_bytes())
    assert "could not be read" in run_view(folder)["spend"]["missing"]


def test_an_unfinished_run_claims_nothing_yet(certified: Path, tmp_path: Path) -> None:
    folder = tmp_path / "running"
    folder.mkdir()
    (folder / "config.toml").write_bytes((certified / "config.toml").read_bytes())
    lines = (certified / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    torn = b"".join(lines[:3]) + lines[3][:40]
    (folder / "rounds.jsonl").write_bytes(torn)
    view = run_view(folder)
    assert (view["finished"], view["rounds"]) == (False, 3)
    assert view["claim"]["headline"] == "No statement yet"
    assert (folder / "rounds.jsonl").read_bytes() == torn


def test_rosters_come_back() -> None:
    bits = encode_roster([0, 3, 9], 10)
    assert bits == "kEA="
    assert encode_roster([5], 1000) == [5]
    assert encode_roster([], 10) == []


def test_bounds_are_never_shown_smaller() -> None:
    for value in np.random.default_rng(0).uniform(1e-6, 50, 500):
        shown = upward(float(value))
        assert isinstance(shown, int | float)
        assert value * (1 - 1e-12) <= shown <= value * 1.0002


def test_the_command_writes_one_file(
    certified: Path, fedavg: Path, cli: Callable[..., Said]
) -> None:
    said = cli("report", certified, fedavg, "-o", "page.html", "--no-look")
    assert said.code == 0
    assert said.out == "page.html\n"
    public = Path("page.html").read_text()
    assert "PRIVATE: this page" not in public
    assert cli("report", certified, "-o", "own.html", "--private", "--no-look").code == 0
    assert "PRIVATE: this page" in Path("own.html").read_text()
    assert stat.S_IMODE(Path("own.html").stat().st_mode) == 0o600


def test_a_folder_of_runs_is_all_of_them(certified: Path) -> None:
    assert [run["name"] for run in page_view([certified.parent])["runs"]] == [certified.name]
    with pytest.raises(FedquiltError, match="must be a folder"):
        page_view([certified.parent.parent / "nowhere"])


WRITTEN_BEFORE = Path(__file__).resolve().parents[1] / "data" / "written_before" / "runs"


@pytest.mark.parametrize("name", sorted(path.name for path in WRITTEN_BEFORE.iterdir()))
def test_runs_of_older_versions_are_shown(name: str) -> None:
    view = page_view([WRITTEN_BEFORE / name], look=False)
    assert view["runs"][0]["rounds"] > 0
    assert view["runs"][0]["claim"]["headline"]


def test_a_run_without_accuracy_shows_what_it_is_judged_by(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    data = (x, x @ torch.tensor([[1.0], [2.0], [0.0], [1.0]]))
    clients = [list(range(i, 60, 6)) for i in range(6)]
    done = fedquilt.run(
        torch.nn.Linear(4, 1), data, data, clients, num_rounds=4, clients_per_round=3,
        mode="fedavg", eval_every=2, output_dir=str(tmp_path), quiet=True,
    )  # fmt: skip
    assert done.folder is not None
    view = with_comparison(page_view([done.folder]))
    found = view["runs"][0]["evaluation"]
    assert (found["metric"], found["rounds"]) == ("mse", [2, 4])
    assert found["values"][-1] == pytest.approx(done.metrics["mse"], rel=1e-4)
    assert found["loss"] == pytest.approx(found["values"], rel=1e-3)
    (series,) = view["series"]
    assert (series["metric"], series["mean"]) == ("MSE", found["values"][-1])
    assert series["curve"]["mean"] == found["values"]


def test_every_tier_has_its_accuracy(tmp_path: Path) -> None:
    run = small_run(tmp_path, mode="fedavg", method="heterofl", model="mlp", tiers="1,1/2")
    (view,) = page_view([run])["runs"]
    assert list(view["look"]["tiers"]) == ["1", "1/2"]
    assert view["look"]["tiers"]["1"] == pytest.approx(view["evaluation"]["values"][-1], abs=1e-3)
    assert len(view["look"]["classes"]) == 10
    assert sum(one["samples"] for one in view["look"]["classes"]) == 355


def test_under_a_secret_coin_the_roster_is_who_was_available(tmp_path: Path) -> None:
    coin = {"selection": "poisson", "amplification": True, "policy": "worst_case"}
    run = small_run(tmp_path, mode="certified", **coin)
    view = run_view(run)
    assert view["roster_is"] == "available"
    result = json.loads((run / "result.json").read_text())
    assert view["joins"] == result["joins"]
    assert '"time"' not in json.dumps(view["spend"])
