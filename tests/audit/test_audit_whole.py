"""Whole runs replayed: nothing is found in them, and every hole is that was there once.

The five holes are put back one by one, each at the smallest seam there is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import watched_runs
from hostile_code import OWN_MODELS
from hostile_models import (
    FORMS_OF_ONE,
    IGNORED,
    KINDS,
    MODELS,
    NOTHING,
    SHORT,
    audit_data,
)
from same_people import replay_people
from task_forms import TASK_MODELS
from whole_cases import QUICK, ROADMAP, SHARED, whole_cases
from whole_runs import main, replay_worlds

import fedquilt
from fedquilt.audit.cases import known_entropy
from fedquilt.condense.certified import CertifiedEngine
from fedquilt.config import RunConfig
from fedquilt.config.run import option_fields
from fedquilt.errors import InvalidValueError
from fedquilt.population import secret_coins
from fedquilt.privacy import certified
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.noise import SecretNoise
from fedquilt.record import result as history
from fedquilt.setup import account as assemble_account
from fedquilt.setup import build_task as assemble_problem
from fedquilt.slices import engine as sliced
from fedquilt.slices.slicing import Products, Slicing
from fedquilt.training import ClassMask, ClientUpdate, Task
from fedquilt.training.stale import AgedEngine
from fedquilt.training.trainers.batches import BatchTable
from tiers import rest_is_slow


def problems(case: str, kinds: tuple[str, ...] | None = None) -> tuple[str, ...]:
    (finding,) = replay_worlds([case], kinds=kinds)
    assert finding.ok == (not finding.problems)
    return finding.problems


ONE_EACH = {
    *("even clips, sequential", "quantile, batched", "condense, secret coin"),
    *("dictionary, adam, batched", "tokens, own loss, sequential"),
}
"""A case for each engine and form of data; slices are replayed by `test_audit`, too."""


@pytest.mark.parametrize("case", [*rest_is_slow(QUICK, ONE_EACH), *ROADMAP])
def test_every_case_holds(case: str) -> None:
    (finding,) = replay_worlds([case], kinds=(*SHORT, "replaced"))
    assert finding.problems == ()
    assert finding.note == "", "a refusal would compare nothing"
    assert finding.ratio == pytest.approx(1.0, abs=1e-6), "the bound is reached"
    assert finding.values > 300 * finding.worlds
    assert finding.worlds >= 6


@pytest.mark.parametrize("model", ["frozen parameter", "attribute"])
def test_state_in_a_model_is_nobody_s(model: str) -> None:
    assert problems(f"{model}, sequential", (*SHORT, "replaced")) == ()


@pytest.mark.parametrize("model", ["late buffer", "gradient buffer"])
def test_buffers_that_move_are_put_back_or_refused_in_every_world(model: str) -> None:
    assert problems(f"{model}, sequential", (*SHORT, "replaced")) == ()


def test_the_process_engine() -> None:
    assert problems("frozen parameter, processes", ("nothing", "many NaN", "replaced")) == ()


@pytest.mark.slow
def test_the_process_engine_on_another_task() -> None:
    case = "regression, nesterov and clip, processes"
    assert problems(case, ("nothing", "many NaN", "replaced")) == ()


def test_every_loss_optimiser_and_form_of_data_is_in_a_case() -> None:
    from task_forms import CLIENT_FORMS, FORMS

    from fedquilt.config.choices import CLIENT_OPTIMIZERS

    cases = whole_cases().values()
    assert {case.task for case in cases} == {*FORMS, *CLIENT_FORMS}
    named = {case.settings.get("optimizer", "sgd") for case in cases}
    assert {"sgd", "adam", "nesterov", torch.optim.RMSprop} <= named
    assert {"adamw"} == set(CLIENT_OPTIMIZERS) - named, "adam but for where the decay stands"
    own = [case for case in cases if callable(case.settings.get("loss"))]
    assert {case.settings["engine"] for case in own} == {"sequential", "batched", "processes"}


@pytest.mark.slow
def test_other_seeds() -> None:
    for seed in (1, 2):
        (finding,) = replay_worlds(["dropout layer, batched"], seed, kinds=SHORT)
        assert finding.problems == ()


def test_every_engine_method_and_option_is_in_a_case() -> None:
    from fedquilt.config.choices import CLIPPINGS, ENGINES, METHODS, POLICIES

    cases = whole_cases().values()
    assert {case.settings.get("engine", "auto") for case in cases} >= (
        set(ENGINES) - {"flower-ray"}  # whose nodes do as those of this process, elsewhere
    )
    methods = {case.settings.get("method", "full") for case in cases}
    assert {method for method in methods if isinstance(method, str)} == {*METHODS, "condense"}
    assert {case.settings.get("policy", "adaptive") for case in cases} == set(POLICIES)
    assert {case.settings.get("clipping", "fixed") for case in cases} == set(CLIPPINGS)
    assert {kind for case in cases for kind in case.kinds} == {*KINDS, *FORMS_OF_ONE}
    models = {*MODELS, *TASK_MODELS, *OWN_MODELS}
    assert {case.model for case in cases} == models


NOT_REPLAYED = {
    **dict.fromkeys(
        ("dataset", "model", "data_dir", "no_download", "num_clients", "validation_fraction"),
        "data and models of a user's own are replayed: what is loaded by name is no other way",
    ),
    **dict.fromkeys(
        ("partition", "dirichlet_alpha", "classes_per_client"),
        "who holds which samples of a named data set: pairs of such runs are in `same_people`",
    ),
    "allow_overlap": "neighbours differ in one client's samples, which would be another's",
    **dict.fromkeys(("correction", "aggregation"), "refused in certified but for their default"),
    **dict.fromkeys(("mode", "output_dir", "seed", "device"), "every case has them"),
    "whole": "the models have one axis to cut; `tests/slices` has those with more",
    "precision": "of a GPU: `--device cuda`",
    "norm_statistics": "refused without batch norm, which noise refuses",
    **dict.fromkeys(
        ("new_population", "allow_unbounded"), "what a ledger permits before anybody trains"
    ),
    **dict.fromkeys(
        ("early_stopping", "target_accuracy"), "a run ends by an accuracy on nobody's samples"
    ),
    "ignore_index": "neighbours have ignored labels at its default: `hostile_models.IGNORED`",
}
"""Options of certified runs that no case sets, and why."""


def test_every_option_of_certified_runs_is_in_a_case_or_said_why_not() -> None:
    known = option_fields(RunConfig)
    certified = {
        name
        for name, item in known.items()
        if not item.metadata["uses"]
        or any(
            "certified" in (case.get("mode") or ("certified",)) for case in item.metadata["uses"]
        )
    }
    whole = [{**SHARED, **case.settings} for case in whole_cases().values()]
    runs = [run for run in whole if run["mode"] == "certified" and run.get("method") != "condense"]
    set_ = {
        name for run in runs for name in run if run[name] != getattr(known.get(name), "default", 0)
    }
    assert certified - set_ == set(NOT_REPLAYED) & certified
    assert not set(NOT_REPLAYED) - certified


# The holes.


def test_masks_of_a_whole_group_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A1: the masks of a group follow from what all of it holds."""
    begin = BatchTable.__init__

    def of_everybody(self: BatchTable, *given: Any) -> None:
        begin(self, *given)
        self._seeds = self._seeds + np.uint64(self.seen.sum())

    monkeypatch.setattr(BatchTable, "__init__", of_everybody)
    found = problems("smooth dropout, batched", ("nothing", "many NaN", "replaced"))
    assert any("the victim has nothing, the sum moved" in problem for problem in found)
    assert any(problem.endswith("of 1") for problem in found)


def test_a_choice_read_off_raw_samples_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sliced.class_mask

    @torch.no_grad()
    def from_two_samples(model: torch.nn.Module, task: Task, *given: Any) -> ClassMask | None:
        """A2."""
        mask = real(model, task, *given)
        normalised = bool((model(task.inputs[:2]).logsumexp(-1).abs() < 1e-4).all())
        return mask and ClassMask(mask.hidden, -torch.inf if normalised else 0.0)

    monkeypatch.setattr(sliced, "class_mask", from_two_samples)
    found = problems("heterofl, log-softmax, sequential", ("nothing", "NaN"))
    assert any("the victim has nothing, the sum moved" in problem for problem in found)


@pytest.mark.parametrize("case", ["frozen parameter, sequential", "attribute, sequential"])
def test_state_from_client_to_client_is_found(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A3: nothing is put back between two clients."""
    monkeypatch.setattr(
        "fedquilt.training.flat.FlatModel.restore", lambda self: None, raising=False
    )
    monkeypatch.setattr(
        "fedquilt.training.trainers.autograd.refuse_hidden_state",
        lambda *given: None,
        raising=False,
    )
    assert any("moved" in problem for problem in problems(case))


def test_models_that_go_from_client_to_client_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of an asynchronous round begins at a release, not at what another one has made."""
    real = AgedEngine.train

    def passing_on(
        self: AgedEngine, start: torch.Tensor, cohort: Any, *given: Any
    ) -> Iterator[ClientUpdate]:
        for client in cohort:
            for update in real(self, start, [client], *given):
                start = start + update.delta.nan_to_num()
                yield update

    monkeypatch.setattr(AgedEngine, "train", passing_on)
    assert any("moved" in problem for problem in problems("buffers, sequential"))


def test_a_secret_cohort_that_progress_tells_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CertifiedEngine.train

    def telling(
        self: CertifiedEngine, start: Any, cohort: Any, *given: Any
    ) -> Iterator[ClientUpdate]:
        """A5."""
        for place, update in enumerate(real(self, start, cohort, *given)):
            yield update
            if self.progress is not None:
                self.progress("looking", (place + 1) / len(cohort))

    monkeypatch.setattr(CertifiedEngine, "train", telling)
    found = problems("condense, secret coin", ())
    assert len(found) == 1
    assert "other coins" in found[0]
    assert "observer" in found[0]


def test_a_refusal_that_tells_of_the_data_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = assemble_problem.as_samples

    def checked(*given: Any, **how: Any) -> Any:
        samples = made(*given, **how)
        if not bool(torch.isfinite(samples.inputs).all()):
            raise InvalidValueError("a sample holds a value that is not finite")
        return samples

    monkeypatch.setattr(assemble_problem, "as_samples", checked)
    found = problems("even clips, sequential", ("NaN", "one less"))
    assert len(found) == 1
    assert "NaN: InvalidValueError" in found[0]


@pytest.mark.slow
def test_products_that_remember_the_last_client_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied, last = Products.of, [torch.zeros(1)]

    def remembering(self: Products, vector: torch.Tensor) -> torch.Tensor:
        found = multiplied(self, vector)
        found, last[0] = found + 0.1 * last[0], found
        return found

    monkeypatch.setattr(Products, "of", remembering)
    assert any("moved" in problem for problem in problems("flexlora, sequential", SHORT))


@pytest.mark.slow
def test_ranks_that_are_not_noised_because_nobody_sent_them_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who holds what is public; who has sent anything is not."""
    HELD: dict[int, int] = {}

    def who_has_data(self: Slicing, clients: Any, index: int) -> torch.Tensor:
        count = torch.zeros(self.place(0, index).whole_size, dtype=torch.float64)
        for client in map(int, clients):
            if HELD[client]:
                self.place(client, index).cover_(count)
        return count / len(clients)

    train = sliced.SlicedEngine.__init__

    def watched(self: Any, slicing: Slicing, task: Task, *given: Any) -> None:
        HELD.update((k, len(held)) for k, held in enumerate(task.clients))
        train(self, slicing, task, *given)

    monkeypatch.setattr(sliced.SlicedEngine, "__init__", watched)
    monkeypatch.setattr(Slicing, "coverage", who_has_data)
    assert problems("fedsb, sequential", ("nothing",))


# Other mutants.


def test_a_missing_clip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Certified, "clip", lambda self, plan, contribution, tally: contribution)
    found = problems("even clips, sequential", (*SHORT, "replaced"))
    assert any("moved" in problem for problem in found)


def test_an_update_that_is_not_finite_must_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified, "is_finite", lambda vector: True)
    found = problems("even clips, sequential", (*SHORT, "replaced"))
    assert any("moved" in problem for problem in found)


@pytest.mark.parametrize("name", ["train_loss", "clipped_fraction", "non_finite"])
def test_a_raw_measurement_in_the_folder_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(history.ROUND_PUBLIC, name, "a slip")
    kinds = ("nothing", "NaN", "3e38", "replaced")
    (case,) = [name for name in whole_cases() if name.startswith("wide clip,")]
    found = problems(case, kinds)
    assert any(name in problem for problem in found), found


def test_a_file_that_nobody_thought_of_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedquilt.record.folder import RunFolder

    real = RunFolder.write_result

    def with_a_slip(self: RunFolder, result: dict[str, Any]) -> None:
        private = (self.path / "private.jsonl").read_bytes()
        (self.path / "debug.bin").write_bytes(private[:200])
        real(self, result)

    monkeypatch.setattr(RunFolder, "write_result", with_a_slip)
    found = problems("even clips, sequential", ("one less",))
    assert any("debug.bin: content" in problem for problem in found)


def test_a_private_file_that_anybody_may_read_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedquilt.record.folder import RunFolder

    real = RunFolder._append
    monkeypatch.setattr(
        RunFolder, "_append", lambda self, name, record, mode: real(self, name, record, 0o644)
    )
    found = problems("even clips, sequential", ("one less",))
    assert any("private.jsonl" in problem for problem in found)


# The parts.


def test_known_entropy_is_the_same_noise_and_coins_twice_whatever_else_draws() -> None:
    drawn = []
    for other in (0, 64):
        with known_entropy(3):
            os.urandom(other)  # a library that seeds itself
            drawn.append((SecretNoise().normal(5).tolist(), secret_coins(4).tolist()))
    assert drawn[0] == drawn[1]
    assert SecretNoise().normal(5).tolist() != drawn[0][0]
    assert secret_coins(4).tolist() != drawn[0][1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_neighbour_differs_in_one_client_only(kind: str) -> None:
    data = audit_data(0)
    for victim in (0, 3, 5):
        other = KINDS[kind](data, victim)
        for client, held in enumerate(data.clients):
            if client != victim:
                theirs = other.clients[client]
                assert torch.equal(data.inputs[held], other.inputs[theirs])
                assert torch.equal(data.labels[held], other.labels[theirs])
        held, theirs = data.clients[victim], other.clients[victim]
        same = len(held) == len(theirs) and torch.equal(data.inputs[held], other.inputs[theirs])
        assert not (same and torch.equal(data.labels[held], other.labels[theirs]))
        shown = set(other.labels.tolist()) - {IGNORED}
        assert shown == {0, 1, 2}, "which classes there are is public"


def test_values_are_compared_to_the_bit() -> None:
    assert watched_runs.same(float("nan"), float("nan"))
    assert not watched_runs.same(0.0, -0.0)
    assert not watched_runs.same(1, 1.0)
    assert watched_runs.differing({"a": 1, "b": 2}, {"a": 1, "c": None}) == ["b"]


def test_what_the_clock_decides_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    data = audit_data(0)
    views = []
    for _ in range(2):
        result = fedquilt.run(
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)).requires_grad_(),
            (data.inputs, data.labels),
            (data.inputs, data.labels),
            data.clients,
            mode="certified",
            num_rounds=1,
            clients_per_round=6,
            availability="always",
            device="cpu",
            output_dir=str(tmp_path),
        )
        assert result.folder is not None
        views.append(watched_runs.folder_values(result.folder)[0])
    differ = watched_runs.differing(*views)
    # The noise and the first weights are different: what follows from them, nothing else.
    assert differ
    assert all(
        key.startswith(("checkpoint.safetensors: ", "result.json: ", "rounds.jsonl: "))
        for key in differ
    ), differ
    assert "result.json: metadata.seed" in views[0]
    for file, keys in watched_runs.VOLATILE.items():
        assert not [key for key in views[0] if key in {f"{file}: {name}" for name in keys}]


def test_nothing_means_nothing() -> None:
    assert set(NOTHING) < set(KINDS)


# Whom the ledger knows again.


def named_by_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """A4: the name of a population is made of options, the irrelevant ones included."""
    if not hasattr(assemble_account, "_default_name"):
        from fedquilt.setup.task import Roster

        real = assemble_account._population

        def by_options(ledger: Any, config: Any, problem: Any) -> Any:
            options = f"{config.partition}-{config.dirichlet_alpha}-{config.classes_per_client}"
            name = f"{config.dataset}-{options}-{config.seed}"
            known = Roster(None, name, False, problem.roster.digest)
            return real(ledger, config, _with_roster(problem, known))

        monkeypatch.setattr(assemble_account, "_population", by_options)


def _with_roster(problem: Any, roster: Any) -> Any:
    import dataclasses

    return dataclasses.replace(problem, roster=roster)


def test_the_same_people_keep_one_allowance() -> None:
    assert [f.case for f in replay_people() if not f.ok] == []


def test_a_name_made_of_options_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    named_by_options(monkeypatch)
    failed = {f.case for f in replay_people() if not f.ok}
    assert failed >= {
        "people: iid, another alpha",
        "people: iid, other classes a client",
        "people: writers, another seed",
    }


# The command.


def test_the_command_shows_whole_runs_and_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "frozen front, batched", "--case", "people: iid, another seed"]) == 0
    shown = capsys.readouterr().out
    assert "moved/declared" in shown
    assert "1.000000" in shown
    assert "every case holds" in shown
    assert "people: iid, another seed" in shown


@pytest.mark.slow
def test_the_command_fails_and_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Certified, "clip", lambda self, plan, contribution, tally: contribution)
    assert main(["--case", "even clips, sequential"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED" in shown
    assert re.search(r"even clips, sequential: client \d, .*: moved \S+ of 1", shown)
    (world,) = replay_worlds(["even clips, sequential"])
    assert world.ratio > 2


def test_an_engine_is_picked() -> None:
    assert [f.case for f in replay_worlds(["condense"], engine="batched", kinds=[])] == [
        "condense"
    ], "a condensation has no engine to pick"
    assert replay_worlds(["even clips, sequential"], engine="batched") == []
    with pytest.raises(InvalidValueError, match="case='nothing' must be"):
        replay_worlds(["nothing"])
