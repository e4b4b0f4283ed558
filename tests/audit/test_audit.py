"""The replay finds nothing in the round as it is, and finds every way of breaking it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from audit_command import run

from fedquilt import audit, federation
from fedquilt.aggregation import RunningMean
from fedquilt.audit.cases import CASES, FAMILIES
from fedquilt.common.vectors import norm
from fedquilt.errors import InvalidValueError
from fedquilt.observe import progress
from fedquilt.privacy import certified, secure
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.clip import PrivateQuantile
from fedquilt.privacy.mechanism import (
    Contribution,
    NoiseReport,
    RoundPlan,
    RoundTally,
    Summed,
)
from fedquilt.privacy.noise import BandedNoise
from fedquilt.privacy.quap_mechanisms import LayerNoise
from fedquilt.privacy.secure import SecureCertified, skellam
from fedquilt.record import result as record
from fedquilt.slices.slicing import Slicing
from fedquilt.training.compression import compress
from fedquilt.training.task import ClientVectors

TENSORS = (16, 4, 12, 3)  # the sizes of the model's tensors
receive, clip, release = Certified.receive, Certified.clip, Certified.release


def failed(case: str) -> set[str]:
    """Return the names of the checks that a case fails."""
    return {f.case.removeprefix(f"{case}: ") for f in audit.replay([case]) if not f.ok}


@pytest.mark.parametrize("case", audit.CASES)
def test_every_check_holds(case: str) -> None:
    findings = audit.replay([case])
    assert {f.case for f in findings if not f.ok} == set()
    checks = {f.case.removeprefix(f"{case}: ") for f in findings}
    assert checks >= {"sum", "noise", "public"}
    if "quantile" in str(audit.CASES[case].settings):
        assert checks >= {"fraction", "bits", "bit noise"}


@pytest.mark.parametrize(
    "case", ["adaptive clips", "even clips", "private quantile", "secret coin"]
)
def test_the_bound_is_reached_so_the_check_is_not_empty(case: str) -> None:
    (moved,) = [f for f in audit.replay([case]) if f.case.endswith(": sum")]
    assert moved.measured == pytest.approx(moved.declared, rel=1e-9)
    assert moved.declared > 0.5


@pytest.mark.slow
def test_other_seeds_find_nothing_either() -> None:
    findings = [f for seed in range(1, 5) for f in audit.replay(["adaptive clips"], seed)]
    assert all(f.ok for f in findings)
    assert len({f.measured for f in findings}) > 2


def test_the_cap_lowers_what_is_declared() -> None:
    (capped,) = [f for f in audit.replay(["clips at their cap"]) if f.case.endswith("sum")]
    (free,) = [f for f in audit.replay(["adaptive clips"]) if f.case.endswith("sum")]
    assert capped.declared == pytest.approx(1.2, rel=1e-9)
    assert free.declared > 1.2


def no_clip(
    self: Certified, plan: RoundPlan, contribution: Contribution, tally: RoundTally
) -> Contribution:
    return contribution


def clip_each_tensor(
    self: Certified, plan: RoundPlan, contribution: Contribution, tally: RoundTally
) -> Contribution:
    limit = plan.clips[contribution.client]
    parts = torch.split(contribution.vector, TENSORS)
    inside = [part * min(1.0, limit / max(norm(part), 1e-300)) for part in parts]
    return Contribution(contribution.client, torch.cat(inside), 1.0, contribution.finite)


def clip_at_the_typical_bound(
    self: Certified, plan: RoundPlan, contribution: Contribution, tally: RoundTally
) -> Contribution:
    factor = min(1.0, self.bound / max(norm(contribution.vector), 1e-300))
    return Contribution(contribution.client, contribution.vector * factor, 1.0, True)


def weigh_by_examples(
    self: Certified, plan: RoundPlan, client: int, delta: torch.Tensor, n: int
) -> Contribution:
    received = receive(self, plan, client, delta, n)
    return Contribution(client, received.vector, float(n), received.finite)


def forget_to_look_for_nan(vector: torch.Tensor) -> bool:
    return True


def clip_the_mean_instead(
    self: Certified, plan: RoundPlan, summed: Summed, tally: RoundTally
) -> tuple[torch.Tensor, NoiseReport]:
    factor = min(1.0, self.bound / max(norm(summed.total), 1e-300))
    clipped = RunningMean(len(summed.total))
    clipped.add(summed.total * factor, summed.weight)
    return release(self, plan, clipped, tally)


@pytest.mark.parametrize(
    ("case", "name", "broken"),
    [
        ("even clips", "clip", no_clip),
        ("even clips", "clip", clip_each_tensor),
        ("correlated noise", "clip", clip_each_tensor),
        ("clips at their cap", "clip", clip_at_the_typical_bound),
        ("even clips", "receive", weigh_by_examples),
        ("secret coin", "receive", weigh_by_examples),
    ],
)
def test_a_wrong_clip_or_weight_is_found(
    monkeypatch: pytest.MonkeyPatch, case: str, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(Certified, name, broken)
    assert "sum" in failed(case)


def round_away_from_zero(vector: Any, limit: float, coins: Any) -> Any:
    return (np.sign(vector) * np.ceil(np.abs(vector))).astype(np.int64)


def shares_for_all_clients(variance: Any, *rest: Any) -> Any:
    return skellam(variance * 7 / 10, *rest)


def charge_half(self: SecureCertified, *args: Any) -> RoundPlan:
    plan = plan_round(self, *args)
    assert plan.charges is not None
    return replace(plan, charges=plan.charges / 2)


plan_round = SecureCertified.plan_round


@pytest.mark.parametrize(
    ("place", "name", "broken", "check"),
    [
        (Certified, "clip", no_clip, "sum"),
        (secure, "round_within", round_away_from_zero, "sum"),
        (secure, "skellam", shares_for_all_clients, "noise"),
        (SecureCertified, "plan_round", charge_half, "sum"),
    ],
)
def test_wrong_noise_of_clients_is_found(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, broken: Any, check: str
) -> None:
    monkeypatch.setattr(place, name, broken)
    if broken is charge_half:  # and nobody lowers the clips with the charges
        monkeypatch.setattr(SecureCertified, "shrink_to", lambda self, plan, granted: plan)
    assert failed("noise of the clients") == {check}


def test_slices_that_differ_with_a_client_s_data_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds: list[Slicing] = []
    importance = Slicing._importance

    def of_its_own(self: Slicing, round_index: int) -> Any:
        if self not in worlds:
            worlds.append(self)
        scores = importance(self, round_index)
        return [np.roll(own, worlds.index(self)) for own in scores]

    monkeypatch.setattr(Slicing, "_importance", of_its_own)
    assert "sum" in failed("slices of important units")


def test_one_clip_after_the_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Certified, "clip", no_clip)
    monkeypatch.setattr(Certified, "release", clip_the_mean_instead)
    assert "sum" in failed("even clips")


def test_a_clip_before_the_message_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def clip_then_compress(
        self: Certified, plan: RoundPlan, given: Contribution, tally: RoundTally
    ) -> Contribution:
        clipped = clip(self, plan, given, tally)
        read = compress("qsgd", clipped.vector, 3)[1]  # its rounding lengthens what it rounds
        return replace(clipped, sent=read, scale=None)

    monkeypatch.setattr(Certified, "clip", clip_then_compress)
    assert "sum" in failed("compressed updates")


@pytest.mark.parametrize("case", ["compressed updates", "local heads", "heads in turns"])
def test_one_vector_for_all_clients_is_found(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    get, put = ClientVectors.get, ClientVectors.put
    monkeypatch.setattr(ClientVectors, "get", lambda self, client: get(self, 0))
    monkeypatch.setattr(ClientVectors, "put", lambda self, client, vector: put(self, 0, vector))
    assert "sum" in failed(case)


def test_updates_that_are_not_finite_must_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified, "is_finite", forget_to_look_for_nan)
    assert "sum" in failed("not finite")


def test_a_divisor_that_counts_the_finite_updates_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def weigh_the_finite(
        self: Certified, plan: RoundPlan, client: int, delta: torch.Tensor, n: int
    ) -> Contribution:
        received = receive(self, plan, client, delta, n)
        return Contribution(client, received.vector, float(received.finite), received.finite)

    def divide_by_weight(
        self: Certified, plan: RoundPlan, summed: Summed, tally: RoundTally
    ) -> tuple[torch.Tensor, NoiseReport]:
        update, report = release(self, plan, summed, tally)
        return update * self.settings.divisor / summed.weight, report

    monkeypatch.setattr(Certified, "receive", weigh_the_finite)
    monkeypatch.setattr(Certified, "release", divide_by_weight)
    assert "sum" in failed("not finite")
    assert "noise" in failed("secret coin")


def test_a_crash_on_a_zero_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def divide(
        self: Certified, plan: RoundPlan, contribution: Contribution, tally: RoundTally
    ) -> Contribution:
        factor = min(1.0, plan.clips[contribution.client] / norm(contribution.vector))
        return Contribution(contribution.client, contribution.vector * factor, 1.0)

    monkeypatch.setattr(Certified, "clip", divide)
    (finding,) = audit.replay(["even clips"])
    assert not finding.ok
    assert finding.case == "even clips: runs"
    assert math.isinf(finding.measured)
    assert "ZeroDivisionError" in finding.detail


@pytest.mark.parametrize("factor", [0.0, 0.5, 1 - 1e-6])
def test_missing_noise_is_found(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    draw = BandedNoise.draw
    monkeypatch.setattr(BandedNoise, "draw", lambda self, t, size: factor * draw(self, t, size))
    assert "noise" in failed("even clips")


def test_noise_that_is_not_correlated_as_stated_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        BandedNoise, "draw", lambda self, t, size: self.source.stream(t).normal(size)
    )
    assert failed("correlated noise") == {"noise"}


def test_forgetting_what_correlation_costs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BandedNoise, "cost_factor", 1.0)
    assert "sum" in failed("correlated noise")


def test_joins_too_close_for_the_bands_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Certified, "eligible", lambda self, index, remaining: self.has_allowance(remaining)
    )
    assert "separation" in failed("correlated noise")


def test_a_client_that_counts_twice_in_a_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    once = federation._once_each

    def twice(updates: Any, cohort: Any) -> Any:
        for update in once(updates, cohort):
            again = replace(update, delta=update.delta.clone())
            yield update
            yield again

    monkeypatch.setattr(federation, "_once_each", twice)
    assert "sum" in failed("windows")


def test_a_charge_below_the_cost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Certified, "plan_round", cheaper(Certified.plan_round))
    assert failed("even clips") == set(), "the grant lowers the clips with the charges"
    monkeypatch.setattr(Certified, "shrink_to", lambda self, plan, granted: plan)
    assert "sum" in failed("even clips")


def cheaper(plan_round: Callable[..., RoundPlan]) -> Callable[..., RoundPlan]:
    """Return plans whose charges are too low."""

    def planned(*given: Any) -> RoundPlan:
        plan = plan_round(*given)
        assert plan.charges is not None
        return replace(plan, charges=0.9 * plan.charges)

    return planned


def test_a_bit_of_the_clipped_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(
        self: Certified, plan: RoundPlan, contribution: Contribution, tally: RoundTally
    ) -> Contribution:
        clipped = clip(self, plan, contribution, RoundTally())
        assert self.quantile is not None
        tally.bits += self.quantile.bit(norm(clipped.vector))
        return clipped

    monkeypatch.setattr(Certified, "clip", too_late)
    assert "bits" in failed("private quantile")


def test_the_bit_of_being_clipped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting clipped updates gives the feedback the wrong sign."""

    def count_the_clipped(self: PrivateQuantile, length: float) -> float:
        return 0.5 if length > self.bound else -0.5

    monkeypatch.setattr(PrivateQuantile, "bit", count_the_clipped)
    assert "bits" in failed("private quantile")


def test_a_bit_for_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no data gave the bit 1/2, a clipped client would move the sum of bits by 1."""

    def count_zero_too(self: PrivateQuantile, length: float) -> float:
        return 0.5 if length <= self.bound else -0.5

    monkeypatch.setattr(PrivateQuantile, "bit", count_zero_too)
    (moved,) = [f for f in audit.replay(["private quantile"]) if "fraction" in f.case]
    assert not moved.ok
    assert moved.measured == pytest.approx(2 * moved.declared)


def test_a_bit_without_its_cost_or_its_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    close = PrivateQuantile.close_round

    class Quiet:
        def normal(self, size: int) -> Any:
            return np.zeros(size)

    with monkeypatch.context() as broken:
        broken.setattr(
            PrivateQuantile, "close_round", lambda self, bits, noise: close(self, bits, Quiet())
        )
        assert "bit noise" in failed("private quantile")
    with monkeypatch.context() as broken:
        broken.setattr(PrivateQuantile, "cost", 1e-9)
        assert "bit noise" in failed("private quantile")
    with monkeypatch.context() as broken:
        plan_round = Certified.plan_round

        def without_bit(self: Certified, *given: Any) -> RoundPlan:
            plan = plan_round(self, *given)
            assert plan.charges is not None
            return replace(plan, charges=plan.charges - self.bit_cost)

        broken.setattr(Certified, "plan_round", without_bit)
        broken.setattr(Certified, "shrink_to", lambda self, plan, granted: plan)
        assert "sum" in failed("private quantile")


@pytest.mark.parametrize("name", ["train_loss", "signal_norm", "clipped_fraction", "non_finite"])
def test_a_raw_measurement_that_is_published_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(record.ROUND_PUBLIC, name, "a slip")
    case = "not finite" if name == "non_finite" else "even clips"
    (public,) = [f for f in audit.replay([case]) if f.case.endswith(": public")]
    assert not public.ok
    assert name in public.detail


def test_wall_time_tells_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(record.ROUND_PUBLIC, "seconds", "a slip")
    assert failed("wall time") == {"public"}


def test_leaving_out_who_sent_nonsense_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cohort that depends on what clients sent is a release of its own."""
    eligible = Certified.eligible

    def note(
        self: Certified, plan: RoundPlan, client: int, delta: torch.Tensor, n: int
    ) -> Contribution:
        received = receive(self, plan, client, delta, n)
        if not received.finite:
            self.__dict__.setdefault("bad", []).append(client)
        return received

    def shun(self: Certified, index: int, remaining: Any) -> Any:
        allowed = eligible(self, index, remaining)
        allowed[self.__dict__.get("bad", [])] = False
        return allowed

    monkeypatch.setattr(Certified, "receive", note)
    monkeypatch.setattr(Certified, "eligible", shun)
    assert failed("not finite") == {"public"}


def test_fixed_dp_is_held_to_its_charge_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    case = "fixed_dp over everything"
    with monkeypatch.context() as broken:
        broken.setattr(LayerNoise, "clip", no_clip)
        assert "sum" in failed(case)
    monkeypatch.setattr(LayerNoise, "plan_round", cheaper(LayerNoise.plan_round))
    assert "sum" in failed(case)


def test_the_command_prints_a_table_and_exits_with_the_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = run("--replay", "--case", "even clips", "--case", "zero updates")
    assert good.exit_code == 0, good.output
    assert "every check holds" in good.output
    assert good.stdout.startswith("every check holds (6 checks)\n"), "the verdict comes first"
    assert [line.split()[-1] for line in good.stdout.splitlines()[4:6]] == ["ok", "ok"]
    assert "even clips" not in good.stdout, "one line a family"
    every = run("--replay", "--case", "even clips", "--case", "zero updates", "--verbose")
    assert every.stdout.startswith("every check holds (6 checks)\n")
    assert every.stdout.count("ok") == 6
    monkeypatch.setattr(Certified, "clip", no_clip)
    bad = run("--replay", "--case", "even clips")
    assert bad.exit_code == 1
    assert bad.stdout.startswith("1 of 3 checks failed\n")
    assert re.search(r"even clips: sum .* FAILED", bad.stdout), "what failed is always shown"
    assert "even clips: noise" not in bad.stdout
    assert re.search(r"clips and policies .* 1 FAILED", bad.stdout)


def test_every_case_is_in_one_family() -> None:
    assert sorted(name for family in FAMILIES.values() for name in family) == sorted(CASES)


def test_the_replay_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    audit.replay(["even clips", "zero updates"], progress=True)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "audit: case 0 of 2 done (even clips)"
    assert re.fullmatch(r"audit: case 1 of 2 done, about \d+ s left", said[1])
    assert said[-1] == "audit: case 2 of 2 done"
    audit.replay(["even clips"])
    assert capsys.readouterr().err == ""


def test_the_command_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    good = run("--replay", "--case", "even clips", "--json")
    answer = json.loads(good.output)
    assert answer["ok"] is True
    assert {tuple(finding) for finding in answer["findings"]} == {
        ("case", "declared", "measured", "ok", "detail")
    }
    monkeypatch.setattr(certified, "is_finite", forget_to_look_for_nan)
    bad = run("--replay", "--case", "not finite", "--json")
    assert bad.exit_code == 1
    assert "NaN" not in bad.output, "JSON has no NaN"
    assert json.loads(bad.output)["ok"] is False


def test_what_the_command_refuses() -> None:
    assert isinstance(run("--without-clip").exception, InvalidValueError)
    unknown = run("--replay", "--case", "even clip").exception
    assert isinstance(unknown, InvalidValueError)
    assert "did you mean 'even clips'?" in str(unknown)
    with pytest.raises(InvalidValueError, match="seed=-1 must be >= 0"):
        audit.replay(["even clips"], seed=-1)
