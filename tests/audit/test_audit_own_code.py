"""A user's own code, replayed: state wherever it may hide, sums, nodes, devices, data sets.

Every case holds; and with its hole put back, exactly the check that was meant for it fails.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_code
import numpy as np
import pytest
import torch
import whole_runs
from hostile_models import KINDS, MODELS, NOTHING, audit_data
from watched_runs import Recorder, Seen, differing, watched_run
from whole_cases import WholeCase

from fedquilt import federation
from fedquilt.audit.canary import Net
from fedquilt.audit.cases import known_entropy
from fedquilt.condense.certified import CertifiedEngine
from fedquilt.config import plain_config
from fedquilt.errors import InvalidValueError
from fedquilt.experiment.api import run_config
from fedquilt.privacy import noise
from fedquilt.privacy.noise import DeviceNoise
from fedquilt.report.views import page_view
from fedquilt.setup import build_task as assemble_problem
from fedquilt.setup import federation as assemble
from fedquilt.setup.federation import Basis
from fedquilt.training import ClientUpdate
from fedquilt.training.optimizers import ClientOptimizer
from fedquilt.training.state import ModuleState
from fedquilt.training.trainers.autograd import train_client
from fedquilt.training.trainers.batches import BatchTable
from fedquilt.training.trainers.vmap import VmapTrainer
from tiers import one_of_each, rest_is_slow

FEW = ("nothing", "many NaN", "one less", "replaced")


def problems(case: str, kinds: tuple[str, ...] | None = FEW) -> tuple[str, ...]:
    (finding,) = whole_runs.replay_worlds([case], kinds=kinds)
    assert finding.ok == (not finding.problems)
    return finding.problems


HOLDS = {
    "class attribute, sequential": FEW,
    "closure, sequential": FEW,
    "hook, sequential": FEW,
    "class attribute, evaluation share": None,
    "evaluation share, sequential": ("nothing", "one less", "replaced"),
    "class attribute, auto": ("nothing",),
    "root hook, batched": ("nothing", "replaced"),
    "columns, sequential": ("nothing", "replaced"),
    "late, class generator, sequential": ("nothing", "many NaN"),
    "late, metaclass, sequential": ("nothing", "many NaN"),
    "late, property default, sequential": ("nothing", "many NaN"),
    "optimizer with state in its class, sequential": ("nothing", "many NaN"),
    "optimizer with state in a closure, sequential": ("nothing", "many NaN"),
    "optimizer with state in its factory, sequential": ("nothing", "many NaN"),
    "loud sum, sequential": ("nothing",),
    "declared sum, sequential": ("nothing",),
    "median, sequential": ("nothing",),
    "loud sum, declared when resumed, sequential": ("nothing",),
    "loud sum, plain when resumed, sequential": ("nothing",),
    "width seen, batched": ("nothing", "many NaN"),
    "client pairs, sequential": ("nothing", "bytes"),
    "client sets, sequential": ("nothing", "bytes", "more classes"),
    "condense": ("nothing", "ignored", "one ignored"),
    "plain, flower": ("nothing", "ignored"),
    "condense, flower": ("nothing", "ignored"),
}
REFUSABLE = {
    *("late, class generator, sequential", "late, metaclass, sequential"),
    *("late, property default, sequential", "loud sum, sequential", "median, sequential"),
    *(f"loud sum, {then} when resumed, sequential" for then in ("declared", "plain")),
}
"""State that cannot be put back, and sums of one's own, may be refused; the rest must run."""


def own_part(case: str) -> str:
    """Return what is somebody's own in a case: "late", "optimizer", "median"."""
    return case.split(",")[0].split(" with ")[0]


@pytest.mark.parametrize("case", rest_is_slow([*HOLDS], one_of_each([*HOLDS], own_part)))
def test_own_code_moves_no_more_than_is_charged(case: str) -> None:
    if "flower" in case:
        pytest.importorskip("flwr")
    (finding,) = whole_runs.replay_worlds([case], kinds=HOLDS[case])
    assert finding.problems == ()
    assert case in REFUSABLE or finding.note == ""
    assert finding.note != "" or finding.ratio == pytest.approx(1.0, abs=1e-6)


@pytest.mark.processes
def test_clients_on_two_devices_do_not_change_one_another() -> None:
    assert problems("adapters, devices", ("nothing", "many NaN")) == ()


# State in models.


def below(function: str) -> bool:
    """Tell whether a function of this name is being called."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


def restored_before_clients_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what the last client moved to whatever comes after training."""
    real = ModuleState.restore

    def restore(self: ModuleState) -> None:
        if below(train_client.__name__):
            real(self)

    monkeypatch.setattr(ModuleState, "restore", restore)


@pytest.mark.parametrize("model", ["class attribute", "closure", "hook"])
def test_what_the_last_client_leaves_to_the_evaluation_is_found(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    restored_before_clients_only(monkeypatch)
    found = problems(f"{model}, sequential", ("nothing", "replaced"))
    assert found
    assert all(problem.startswith("client 5, ") for problem in found), "the last one"
    assert all("public values differ" in problem for problem in found)
    assert "final_loss" in found[0]


def test_what_the_last_client_leaves_to_a_paid_evaluation_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restored_before_clients_only(monkeypatch)
    found = problems("class attribute, evaluation share", None)
    moved = [problem for problem in found if "moved" in problem]
    assert moved
    assert all("evaluation" in problem for problem in moved)


@pytest.mark.parametrize("place", ["class generator", "metaclass"])
def test_a_count_on_a_class_that_nobody_puts_back_is_found(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(ModuleState, "_take_class", lambda self, value, name: None)
    found = problems(f"late, {place}, sequential", ("nothing", "many NaN"))
    assert any("the victim has nothing, the sum moved" in problem for problem in found)


def test_the_state_of_an_optimiser_that_nobody_puts_back_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ClientOptimizer, "restore", lambda self: None)
    case = "optimizer with state in a closure, sequential"
    found = problems(case, ("nothing", "many NaN"))
    assert any("the victim has nothing, the sum moved" in problem for problem in found)


# Sums, shapes, data sets, nodes.


@pytest.mark.parametrize(("case", "least"), [("loud sum", 999.0), ("median", 1.2)])
def test_a_sum_that_is_believed_to_be_a_sum_is_found(
    monkeypatch: pytest.MonkeyPatch, case: str, least: float
) -> None:
    for module in (assemble, federation):
        monkeypatch.setattr(module, "sensitivity_of", lambda total: 1.0)
    monkeypatch.setattr(assemble, "try_sensitivity", lambda *given: 1)
    (finding,) = whole_runs.replay_worlds([f"{case}, sequential"], kinds=("nothing",))
    assert all("moved" in problem for problem in finding.problems)
    assert finding.ratio > least


@pytest.mark.parametrize("then", ["declared", "plain"])
def test_rounds_that_a_resumed_run_forgets_are_found(
    monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr(Basis, "after", lambda self, earlier: self)
    found = problems(f"loud sum, {then} when resumed, sequential", ("nothing",))
    assert any("moved" in problem and problem.endswith("of 1") for problem in found)


def test_a_declared_sensitivity_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile_code.Declared, "sensitivity", 500.0)
    monkeypatch.setattr(assemble, "try_sensitivity", lambda *given: 1)
    (finding,) = whole_runs.replay_worlds(["declared sum, sequential"], kinds=("nothing",))
    assert finding.ratio == pytest.approx(2.0, abs=1e-6)


def test_programs_as_wide_as_the_largest_batch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shrunk(
        self: VmapTrainer, table: BatchTable, rows: int, width: int
    ) -> list[tuple[int, int]]:
        return [(rows, min(width, max(4, widest))) for widest in table.widths]

    monkeypatch.setattr(VmapTrainer, "_program", shrunk)
    found = problems("width seen, batched", ("nothing", "many NaN"))
    assert any("the victim has nothing, the sum moved" in problem for problem in found)


def test_one_client_s_form_of_data_in_the_notes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble_problem, "_said_as_of_test", lambda train, *_, **__: train)
    noted, counted = problems("client sets, sequential", ("bytes", "more classes"))
    assert "metadata.data_notes" in noted
    assert "metadata.num_classes" in counted


def test_bytes_that_nodes_sent_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pytest.importorskip("fedquilt.flower.engine").FlowerEngine
    monkeypatch.setattr(engine, "_bytes_asked", lambda self, *given: self.traffic[-1].bytes_up)
    monkeypatch.setattr("fedquilt.flower.node.is_empty", lambda data: False)  # it then fails
    found = problems("condense, flower", ("nothing", "ignored"))
    assert len(found) >= 3
    assert all("bytes_up" in problem for problem in found)


# Errors.


def test_an_error_in_one_world_is_found_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = CertifiedEngine.train

    def stops(self: CertifiedEngine, *given: Any) -> Iterator[ClientUpdate]:
        if sum(map(len, self.task.clients)) > len(audit_data(0).labels):
            raise RuntimeError("too many")
        yield from real(self, *given)

    monkeypatch.setattr(CertifiedEngine, "train", stops)
    (finding,) = whole_runs.replay_worlds(["condense"], kinds=("nothing", "twice", "one less"))
    (problem,) = finding.problems
    assert problem.endswith(", twice: RuntimeError: too many")
    assert finding.worlds == 6
    assert finding.ratio == pytest.approx(1.0, abs=1e-6), "the other worlds were compared"


def test_an_error_of_somebody_else_is_no_refusal_even_in_every_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*given: Any, **more: Any) -> Any:
        raise TypeError("unhashable")

    monkeypatch.setattr(whole_runs.experiment, "run", wrong)
    (finding,) = whole_runs.replay_worlds(["even clips, sequential"], kinds=("nothing",))
    assert not finding.ok
    assert "TypeError: unhashable" in finding.problems[0]

    def refuses(*given: Any, **more: Any) -> Any:
        raise InvalidValueError("no")

    monkeypatch.setattr(whole_runs.experiment, "run", refuses)
    (finding,) = whole_runs.replay_worlds(["even clips, sequential"], kinds=("nothing",))
    assert finding.ok
    assert finding.note == "refused in every world: InvalidValueError: no"


def test_only_what_a_user_asks_for_stops_the_audit() -> None:
    def interrupted(observer: Recorder) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watched_run(interrupted, 0)


def test_a_run_that_trains_nobody_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Still(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.0 * super().forward(x)

    monkeypatch.setitem(MODELS, "still", Still)
    case = WholeCase({"engine": "sequential"}, "still", kinds=("nothing", "replaced"))
    finding = whole_runs.replay_case("still", case, 0)
    assert finding.problems == ("nobody's data moved anything: the case shows nothing",)


# Victims.


def test_every_case_has_a_first_a_middle_and_a_last_victim() -> None:
    kinds = tuple(KINDS)
    pairs = set()
    for turn in range(9):
        dealt = list(whole_runs._dealt([0, 3, 5], kinds, turn))
        assert [victim for victim, kind in dealt if kind == "nothing"] == [0, 3, 5]
        others = [kind for _, kind in dealt if kind != "nothing"]
        assert sorted(others) == sorted(set(kinds) - {"nothing"}), "each kind once"
        for victim in (0, 3, 5):
            own = [kind for who, kind in dealt if who == victim]
            assert len([kind for kind in own if kind in NOTHING]) >= 2, "two to compare"
        pairs |= set(dealt)
    assert pairs == {(victim, kind) for victim in (0, 3, 5) for kind in kinds}


def test_victims_are_those_who_join_most_often() -> None:
    (finding,) = whole_runs.replay_worlds(["cap on joins, batched"], kinds=("nothing",))
    assert finding.worlds == 4
    joins = np.array([[1, 0, 1, 1], [1, 1, 0, 1]], dtype=float)
    rounds: Any = [type("Round", (), {"declared": row}) for row in joins]
    assert whole_runs._victims(whole_runs.Seen(rounds)) == [0, 3]
    assert whole_runs._victims(whole_runs.Seen()) == [0, 3, 5], "nobody is known to have joined"


# Entropy.


def numbers_of(key: bytes, size: int, device: Any) -> torch.Tensor:
    """Expand a key on a CPU, as a kernel does on a GPU."""
    seed = np.random.SeedSequence(int.from_bytes(key, "little"))
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size))


class OnThisDevice(DeviceNoise):
    """Noise that is drawn where the vector is, also where that is a CPU."""

    def normal(self, size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.asarray(self.normal_on(torch.device("cpu"), size))


def test_noise_drawn_on_a_device_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "expand_key", numbers_of)
    drawn = []
    for _ in range(2):
        with known_entropy(3):
            drawn.append(DeviceNoise().normal_on(torch.device("cpu"), 5).tolist())
    assert drawn[0] == drawn[1]
    assert DeviceNoise().normal_on(torch.device("cpu"), 5).tolist() != drawn[0]


def test_noise_that_the_audit_does_not_hold_still_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(noise, "expand_key", numbers_of)
    monkeypatch.setattr("fedquilt.setup.mechanism.noise_source", lambda *given: OnThisDevice())
    assert problems("even clips, sequential", ("nothing", "replaced")) == ()
    monkeypatch.setattr(noise, "secret_bytes", os.urandom)
    found = problems("even clips, sequential", ("nothing", "replaced"))
    assert all("moved" in problem for problem in found)
    assert len(found) > 3


# Test samples that are clients' own.


def write_leaf(place: Path, shifted: int) -> None:
    """Write six people's samples as LEAF does; the last one's test labels are shifted."""
    draws = np.random.default_rng(4)
    for part, shift in (("train", 0), ("test", shifted)):
        people = {}
        for number in range(6):
            labels = (np.arange(4) + number + (shift if number == 5 else 0)) % 62
            people[f"f{number}"] = {"x": draws.random((4, 784)).tolist(), "y": labels.tolist()}
        content = {"users": [*people], "num_samples": [4] * 6, "user_data": people}
        file = place / "femnist" / part / "all.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))


def worlds_of_leaf(tmp_path: Path) -> list[Seen]:
    """Run twice, on other test labels of one client, with the same noise; and look at the page."""
    people = {"dataset": "femnist", "partition": "writer", "clients_per_round": 6}
    short = {"num_rounds": 1, "local_epochs": 1, "availability": "always", "model": "linear"}
    here = {"data_dir": str(tmp_path), "output_dir": str(tmp_path / "runs"), "device": "cpu"}
    claim = {"mode": "certified", "epsilon": 6.0, "engine": "sequential"}
    config = plain_config({**people, **short, **here, **claim})
    worlds: list[Seen] = []
    for shifted in (0, 9):
        write_leaf(tmp_path, shifted)
        worlds.append(watched_run(functools.partial(run_config, config), 0, *worlds))
        worlds[-1].public |= {"look of the page": looked(tmp_path, private=False)}
    assert [seen.error for seen in worlds] == [None, None]
    return worlds


def looked(place: Path, *, private: bool) -> Any:
    """Return what the page of the newest run says of its model on test samples."""
    newest = max((place / "runs").iterdir())
    return page_view([newest], private=private)["runs"][0]["look"]


def test_what_is_measured_on_clients_own_test_samples_is_withheld_and_stated(
    tmp_path: Path,
) -> None:
    one, other = worlds_of_leaf(tmp_path)
    assert differing(one.public, other.public) == []
    assert "test samples" in one.public["statement"]
    assert looked(tmp_path, private=True)["classes"]


def test_what_is_measured_on_clients_own_test_samples_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedquilt.setup.task._ON_TEST", ())
    one, other = worlds_of_leaf(tmp_path)
    assert "result.json: metadata.final_loss" in differing(one.public, other.public)


# The command without typer.


class SentAway:
    """A pool of processes, but for the processes: what it is given must be picklable."""

    def __init__(self, jobs: int, context: Any) -> None:
        assert jobs == 2
        assert context.get_start_method() == "spawn", "torch's threads do not survive a fork"

    def __enter__(self) -> SentAway:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, function: Any, names: list[str]) -> Iterator[Any]:
        sent = pickle.loads(pickle.dumps(function))
        return (pickle.loads(pickle.dumps(sent(name))) for name in names)


def test_the_module_replays_cases_in_several_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = whole_runs.main
    monkeypatch.setattr(whole_runs, "ProcessPoolExecutor", SentAway)
    cases = ["--case", "late buffer, sequential", "--case", "gradient buffer, sequential"]
    assert main(["--jobs", "2", *cases]) == 0
    shown = capsys.readouterr().out
    assert shown.index("late buffer") < shown.index("gradient buffer")
    assert "every case holds" in shown
    assert main(["--case", "no such"]) == 2
    assert main(["--jobs", "0", *cases]) == 2
    assert "jobs=0 must be" in capsys.readouterr().err
