"""What a page may know of a run."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from views_samples import small_run

import fedquilt
from command_line import Said
from fedquilt.cli.run import closing_lines
from fedquilt.common.errors import FedquiltError
from fedquilt.common.formatting import format_bound
from fedquilt.common.observer import Observer
from fedquilt.config import build_config
from fedquilt.experiment.api import run_config
from fedquilt.method import WholeModel
from fedquilt.models import lora
from fedquilt.observe.progress import headline_of
from fedquilt.privacy.accounting import gaussian_epsilon, gaussian_mu
from fedquilt.privacy.ledger import Ledger
from fedquilt.record.schema import RESULT_PUBLIC, ROUND_PUBLIC, WITHHELD
from fedquilt.report import comparison_table, html_page, render_comparison
from fedquilt.report.comparison import as_markdown, comparison_rows
from fedquilt.report.html_page import with_comparison
from fedquilt.report.runs import series_of
from fedquilt.report.series import upward
from fedquilt.report.views import page_view, run_view
from fedquilt.report.views.claim import guess_sentence
from fedquilt.report.views.page import find_runs
from fedquilt.report.views.run import encode_roster, lifetime_view


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


def test_an_earlier_run_says_since_when_its_lifetime_is_old(
    two_runs: tuple[Path, Path, Path],
) -> None:
    first, second, _ = two_runs
    old, new = (run_view(run)["claim"] for run in (first, second))
    assert any(n.startswith("lifetime when this run ended: over all runs") for n in old["notes"])
    assert "lifetime when this run ended" in old["text"]
    assert any(note.startswith("lifetime: over all runs") for note in new["notes"])


def test_without_scripts_the_whole_claim_comes_first(two_runs: tuple[Path, Path, Path]) -> None:
    first, second, place = two_runs
    with Ledger.open(place, read_only=True) as opened:
        most = format_bound(float(opened.populations()[0].epsilons().max()))
    page = html_page.html_page(page_view([first, second], look=False))
    said = page[page.index("<noscript>") : page.index("</noscript>")]
    bounds = re.findall(r"(?:ε ≤|epsilon &lt;=) ([\d.]+)", said)
    assert bounds[0] == most
    stated = rf"Every client, over the runs of the ledger&#x27;s population .*: ε ≤ {most} "
    assert re.search(stated, said)
    assert said.index("over all runs of its ledger: ε ≤") < said.index("epsilon &lt;=")


def test_a_page_does_not_hold_the_owner_s_digests(two_runs: tuple[Path, Path, Path]) -> None:
    first, second, _ = two_runs
    kept = json.loads((second / "clients.json").read_text())
    view = page_view([first, second], look=False)
    assert [(run["held"], run["data"]) for run in view["runs"]] == [("0", "0"), ("0", "0")]
    text = html_page.html_page(view)
    assert not any(kept[key] in text for key in ("held", "tested", "clients"))


def test_a_page_does_not_say_whether_a_client_s_data_have_changed_between_two_runs(
    tmp_path: Path,
) -> None:
    """What it says of two runs is the same whether one client has a sample more in the second."""
    source = torch.Generator().manual_seed(0)
    data = torch.randn(61, 6, generator=source), torch.arange(61) % 2
    told = []
    for more in (0, 1):
        folders = []
        for held in (0, more):
            people = [[*range(k, 60, 6), *[60] * (held * (k == 3))] for k in range(6)]
            rest: dict[str, Any] = {"num_rounds": 2, "seed": len(folders), "quiet": True}
            torch.manual_seed(0)
            done = fedquilt.run(
                torch.nn.Linear(6, 2), data, data, people, **rest, output_dir=tmp_path / str(more)
            )
            assert done.folder is not None
            folders.append(done.folder)
        shown = with_comparison(page_view(folders, look=False))
        told.append(([run["data"] for run in shown["runs"]], [s["runs"] for s in shown["series"]]))
    assert told[0] == told[1]


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
    assert (
        unbounded["headline"] == f"No guarantee: ε = ∞ over the runs of the sweep {tmp_path.name!r}"
    )


def _chain(place: Path, **settings: Any) -> list[Path]:
    """Run three times, each time with the model of the run before, as a user would."""
    source = torch.Generator().manual_seed(0)
    data = torch.randn(60, 6, generator=source), torch.arange(60) % 2
    people: list[Any] = [range(k, 60, 6) for k in range(6)]
    first = torch.nn.BatchNorm1d(6) if settings["mode"] == "fedavg" else torch.nn.Linear(6, 6)
    model: torch.nn.Module = torch.nn.Sequential(first, torch.nn.Linear(6, 2))
    folders = []
    for seed in range(3):
        rest = {"num_rounds": 2, "seed": seed, "output_dir": place, "quiet": True, **settings}
        folder = fedquilt.run(model, data, data, people, **rest).folder
        assert folder is not None
        folders.append(folder)
        loaded = fedquilt.load(folder, model).model
        assert loaded is not None
        model = loaded
    return folders


def test_a_run_its_continuation_and_the_next_are_no_seeds(
    tmp_path: Path, cli: Callable[..., Said]
) -> None:
    folders = _chain(tmp_path, mode="fedavg")
    data = with_comparison(page_view([folders[2], folders[0], folders[1]], look=False))
    assert [one["runs"] for one in data["series"]] == [[0], [1], [2]]
    said = cli("compare", *folders, "--figures", "none", "--json", "-o", tmp_path / "out").json()
    assert [len(row["runs"]) for row in said["table"]] == [1, 1, 1]
    assert data["figures"][0]["text"].count("one seed") == 1
    assert data["figures"][1]["figure"] == "ε = ∞"


def _own(how: str, which: int) -> dict[str, Any]:
    """Return the parts of one of two experiments that a configuration calls custom alike."""
    plain: torch.nn.Module = torch.nn.Linear(6, 2)
    if how == "models":
        deep = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        return {"model": deep if which else plain}
    if how == "rules":
        return {"model": plain, "method": Last if which else Tripled}
    loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0 + which]))
    return {"model": plain, "loss": loss}


class Tripled(WholeModel):
    def before_evaluation(self, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return 3 * weights, {}


class Last(WholeModel):
    def before_evaluation(self, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return weights.clone(), {}


@pytest.mark.parametrize("how", ["models", "rules", "constants of a loss"])
def test_own_parts_are_no_seeds_of_one_another(
    how: str, tmp_path: Path, cli: Callable[..., Said]
) -> None:
    """Real runs: linear beside deep, two rules, one rule whose numbers differ; two seeds each."""
    source = torch.Generator().manual_seed(0)
    data = torch.randn(60, 6, generator=source), torch.arange(60) % 2
    people: list[Any] = [range(k, 60, 6) for k in range(6)]
    rest: dict[str, Any] = {"num_rounds": 2, "mode": "fedavg", "quiet": True}
    folders = []
    for seed, which in ((0, 0), (1, 1), (1, 0), (0, 1)):
        torch.manual_seed(seed)
        parts = {"train": data, "test": data, "clients": people, **_own(how, which)}
        done = fedquilt.run(**parts, **rest, seed=seed, output_dir=tmp_path)
        assert done.folder is not None
        folders.append(done.folder)
    names = [folder.name for folder in folders]
    pairs = [sorted([names[0], names[2]]), sorted([names[1], names[3]])]
    for owner in (True, False):
        shown = with_comparison(page_view(folders, look=False))
        assert sorted(sorted(one["runs"]) for one in shown["series"]) == [[0, 2], [1, 3]], owner
        said = cli("compare", *folders, "--figures", "none", "--json", "-o", tmp_path / "out")
        assert sorted(sorted(row["runs"]) for row in said.json()["table"]) == sorted(pairs), owner
        if how.startswith("constants"):
            return  # which only the owner can tell
        for folder in folders:
            (folder / "clients.json").unlink(missing_ok=True)


def test_the_claims_of_a_run_and_its_continuations_are_composed(
    tmp_path: Path, cli: Callable[..., Said]
) -> None:
    folders = _chain(tmp_path, mode="certified", epsilon=3.0)
    mu = gaussian_mu(3.0, 1e-5)
    for count in (2, 3):
        view = page_view(folders[:count], look=False)
        (together,) = view["together"]
        assert together["members"] == list(range(count))
        whole = gaussian_epsilon(mu * count**0.5, 1e-5)
        assert together["epsilon"] == pytest.approx(whole, rel=1e-2)
        assert together["epsilon"] > 4
        assert "not shown here are not counted" in together["text"]
        claim = with_comparison(view)["figures"][1]
        assert claim["figure"] == together["figure"]
    alone = page_view(folders[2:], look=False)
    assert alone["together"] == []
    claim = with_comparison(alone)["figures"][1]
    assert (claim["kind"], claim["text"].endswith(html_page.UNSEEN)) == ("open", True)
    assert with_comparison(page_view(folders, look=False))["figures"][1]["kind"] == "kept"
    later = with_comparison(page_view(folders[1:], look=False))["figures"][1]
    assert later["text"].endswith(html_page.UNSEEN), "of a chain, its first"
    assert dict(alone["runs"][0]["claim"]["facts"])["Began with"].endswith("is not counted")
    said = cli("compare", *folders, "--figures", "none", "--output", tmp_path / "out")
    assert "over the runs that go on from one another: ε ≤" in " ".join(said.out.split())


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


class Told(Observer):
    """Keeps what a run says of its noise before it begins."""

    def expects(self, config: Any, lines: Sequence[str]) -> None:
        """Keep the figure."""
        said = re.findall(r"noise over the run: ([\d.]+)", "\n".join(lines))
        self.ratio = float(said[0])


def _partly_frozen() -> torch.nn.Module:
    """Return a model whose first layer is frozen, and whose statistics nothing moves."""
    norm = torch.nn.BatchNorm1d(24)
    norm.track_running_stats = False
    hidden = torch.nn.Linear(6, 24).requires_grad_(False)
    return torch.nn.Sequential(hidden, norm, torch.nn.Linear(24, 2))


def _adapted() -> torch.nn.Module:
    return lora(torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Linear(24, 2)), rank=2)


@pytest.mark.parametrize("make", [_partly_frozen, _adapted])
def test_noise_is_counted_on_what_is_trained(
    make: Callable[[], torch.nn.Module], tmp_path: Path
) -> None:
    """The page's figure is the one that the run has said before its first round."""
    source = torch.Generator().manual_seed(0)
    data = torch.randn(60, 6, generator=source), torch.arange(60) % 2
    people: list[Any] = [range(k, 60, 6) for k in range(6)]
    told = Told()
    settings: dict[str, Any] = {"mode": "certified", "num_rounds": 4, "quiet": True}
    done = fedquilt.run(make(), data, data, people, observer=told, output_dir=tmp_path, **settings)
    assert done.folder is not None
    assert run_view(done.folder)["noise_ratio"][-1] == pytest.approx(told.ratio, rel=0.02)
    (done.folder / "result.json").unlink()
    assert run_view(done.folder)["noise_ratio"] is None, "nobody knows yet what is noised"


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
    assert measured["metrics"][:1] == ["accuracy"]
    assert "loss" in measured["metrics"], "every measure of a client is on its owner's page"


def test_clients_that_measure_no_accuracy_are_shown_by_what_they_measure() -> None:
    rows = [{"client": k, "examples": 5, "auroc": 0.5 + k / 10, "loss": 1.0} for k in range(3)]
    found = html_page._measured({"rounds": 4, "rows": rows}, [1, 2, 3], "auroc")
    assert found["metrics"] == ["auroc", "loss"]
    assert found["clients"]["2"] == {"auroc": 0.7, "loss": 1.0}
    assert found["groups"][0]["mean"] == pytest.approx(0.6)


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


@pytest.mark.parametrize("command", ["report", "compare"])
def test_many_runs_say_how_far_the_work_is(
    command: str,
    two_runs: tuple[Path, Path, Path],
    cli: Callable[..., Said],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedquilt.observe.progress.SECONDS", 0.0)
    out = tmp_path / ("page.html" if command == "report" else "out")
    said = cli(command, *two_runs[:2], "--output", out)
    assert said.code == 0
    assert f"{command}: run 1 of 2 done, about" in said.err
    assert "done" not in cli("report", two_runs[0], "--output", tmp_path / "one.html").err


def test_a_folder_of_runs_is_all_of_them(certified: Path) -> None:
    assert [run["name"] for run in page_view([certified.parent])["runs"]] == [certified.name]
    above = find_runs([certified.parent.parent])  # as results is after `make demo`
    assert certified in above
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


@pytest.mark.parametrize("metrics", ["auroc,accuracy", "accuracy,auroc", "f1", "mse", "perplexity"])
def test_one_headline_in_all_places(metrics: str, tmp_path: Path) -> None:
    """The first metric that was named: in the run's last lines, on its way, on pages, in tables."""
    source, name = torch.Generator().manual_seed(0), metrics.split(",")[0]
    x = torch.randn(60, 4, generator=source)
    y = x.sum(1, keepdim=True) if name == "mse" else (x.sum(1) > 0).long()
    model = torch.nn.Linear(4, 1 if name == "mse" else 2)
    people: list[Any] = [range(k, 60, 6) for k in range(6)]
    rest: dict[str, Any] = {"num_rounds": 2, "mode": "fedavg", "quiet": True}
    done = fedquilt.run(model, (x, y), (x, y), people, metrics=metrics, output_dir=tmp_path, **rest)
    assert done.folder is not None
    value = done.metrics[name]
    lines = (done.folder / "rounds.jsonl").read_text().splitlines()
    assert closing_lines(done)[0] == (name, f"{value:.4f} after round 2")
    assert headline_of(json.loads(lines[-1])) == f"{name} {value:.4f}"
    shown = re.findall(r"final (\w+)</th><td[^>]*>([\d.]+)", done._repr_html_())
    assert shown == [(name, f"{value:.4f}")]
    view = with_comparison(page_view([done.folder], look=False))
    assert view["runs"][0]["evaluation"]["metric"] == name
    assert view["series"][0]["mean"] == pytest.approx(value, rel=1e-4)
    assert view["figures"][0]["name"].lower() == f"test {name}"
    (row,) = comparison_table([json.loads((done.folder / "result.json").read_text())])
    assert (row["metric"], row["mean"]) == (name, pytest.approx(value))
    assert f"{name} ± std" in render_comparison([row])
    assert f"| {name} |" in as_markdown(comparison_rows(series_of([done.result])))


def test_every_tier_has_its_accuracy(tmp_path: Path) -> None:
    run = small_run(tmp_path, mode="fedavg", method="heterofl", model="mlp", tiers="1,1/2")
    (view,) = page_view([run])["runs"]
    assert list(view["look"]["tiers"]) == ["1", "1/2"]
    assert view["look"]["tiers"]["1"] == pytest.approx(view["evaluation"]["values"][-1], abs=1e-3)
    result = json.loads((run / "result.json").read_text())
    result["slices"]["tiers"][1]["test"]["accuracy"] = 0.125
    (run / "result.json").write_text(json.dumps(result))
    shown = page_view([run])["runs"][0]["look"]["tiers"]
    assert shown["1/2"] == 0.125, "what the run has recorded is not measured once more"
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
