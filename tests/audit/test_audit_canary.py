"""Canaries in real rounds with secret noise: the claims hold, and the clip is missed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fedquilt import audit, federation
from fedquilt.audit.__main__ import main
from fedquilt.audit.canary import CanaryFinding
from fedquilt.cli.audit import audit as command
from fedquilt.errors import InvalidValueError
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.noise import BandedNoise


def test_one_round_keeps_its_claim_and_uses_it_up() -> None:
    (found,) = audit.canary([6.0], trials=120)
    assert found.theory_mu == pytest.approx(1.3101, abs=1e-3)
    # Secret noise is different every time: five standard errors.
    assert abs(found.measured_mu - found.theory_mu) < 5 * found.standard_error
    assert found.lower_bound < 6.0
    assert found.trials == 240


def test_who_comes_in_every_round_of_a_window_pays_and_shows_once() -> None:
    (found,) = audit.canary([6.0], trials=60, window=3)
    assert found.test == "windows of 3 rounds"
    assert abs(found.measured_mu - found.theory_mu) < 5 * found.standard_error


def test_who_counts_twice_in_a_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    once = federation._once_each

    def twice(updates: Any, cohort: Any) -> Iterator[Any]:
        for update in once(updates, cohort):
            again = replace(update, delta=update.delta.clone())
            yield update
            yield again

    monkeypatch.setattr(federation, "_once_each", twice)
    (found,) = audit.canary([6.0], trials=60, window=3)
    assert not found.ok
    assert found.measured_mu == pytest.approx(2 * found.theory_mu, rel=0.3)


def test_a_missing_clip_breaks_the_claim() -> None:
    (found,) = audit.canary([1.0], trials=60, without_clip=True)
    assert not found.ok
    assert found.lower_bound > 1.0
    assert found.measured_mu > 2.0
    assert Certified.clip.__name__ == "clip", "the clip is back"


def test_noise_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = BandedNoise.draw
    monkeypatch.setattr(BandedNoise, "draw", lambda self, t, size: 0.1 * draw(self, t, size))
    (found,) = audit.canary([1.0], trials=60)
    assert not found.ok
    assert found.measured_mu == pytest.approx(10 * found.theory_mu, rel=0.5)


def test_one_run_keeps_its_claim_and_uses_it_up() -> None:
    (found,) = audit.one_run([6.0], canaries=400, rounds=4)
    assert abs(found.measured_mu - found.theory_mu) < 5 * found.standard_error
    assert found.lower_bound < 6.0
    assert found.estimate is not None
    assert 1.5 < found.estimate < 12.0


def test_one_run_misses_the_clip() -> None:
    (found,) = audit.one_run([1.0], canaries=300, rounds=2, without_clip=True)
    assert not found.ok
    assert found.lower_bound > 1.0


def finding(mu: float, bound: float) -> CanaryFinding:
    return CanaryFinding("t", 1.0, 1e-5, 0.268, mu, 0.1, bound, 100)


def test_the_verdict() -> None:
    assert finding(0.6, 0.9).ok
    assert not finding(0.7, 0.0).ok
    assert not finding(0.2, 1.1).ok
    table = audit.canary_table([finding(0.6, 0.9), finding(0.7, 0.0)])
    assert "0.600 +- 0.100" in table
    assert "1 of 2 claims broken" in table


def test_what_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="trials=2 must be >= 8"):
        audit.canary([1.0], trials=2)
    with pytest.raises(InvalidValueError, match="canaries=1 must be >= 8"):
        audit.one_run([1.0], canaries=1)


@pytest.mark.slow
def test_the_command() -> None:
    app = typer.Typer()
    app.command()(command)
    good = CliRunner().invoke(app, ["--canary", "--trials", "20"])
    assert good.exit_code == 0, good.output
    assert "no claim was broken" in good.output
    bad = CliRunner().invoke(app, ["--canary", "--trials", "20", "--without-clip", "--json"])
    assert bad.exit_code == 1
    said = json.loads(bad.output)
    assert said["ok"] is False
    assert len(said["canaries"]) == 4
    assert {"epsilon", "theory_mu", "measured_mu", "standard_error", "lower_bound", "ok"} <= set(
        said["canaries"][0]
    )


@pytest.mark.slow
def test_without_the_command_line_s_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--canary", "--trials", "20"]) == 0
    assert "two hypotheses" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([])
