"""`fedquilt.utils`: the QuAP-FL API document's names, the self-check and the milestones."""

from __future__ import annotations

import logging
import math
import sys
import types
from typing import Any

import numpy as np
import pytest

from fedquilt import utils
from fedquilt.population import ParticipationTracker
from fedquilt.privacy.clip import QuantileClipper
from fedquilt.privacy.policies import AdaptivePrivacyAllocator

CHECKS = ["participation rates", "privacy budget", "quantile clipping", "noise level"]


class EveryoneJoined(ParticipationTracker):
    """Wrong: every client has the rate 1."""

    def get_participation_rate(self, client_id: int) -> float:
        return 1.0


class Crashing(ParticipationTracker):
    """Wrong: counting fails."""

    def update(self, participating_clients: Any) -> None:
        raise RuntimeError("broken")


class FlatBudget(AdaptivePrivacyAllocator):
    """Wrong: the budget does not depend on participation."""

    def compute_privacy_budget(self, participation_rate: float) -> float:
        return 0.015


class OtherBeta(AdaptivePrivacyAllocator):
    """Wrong: falls with participation, but not by the formula."""

    def compute_privacy_budget(self, participation_rate: float) -> float:
        return 0.015 * (1 + 0.5 * math.exp(-participation_rate))


class HalfNoise(AdaptivePrivacyAllocator):
    """Wrong: half the noise."""

    def compute_noise_multiplier(self, *args: Any, **options: Any) -> float:
        return 0.5 * super().compute_noise_multiplier(*args, **options)


class NoClip(QuantileClipper):
    """Wrong: updates pass as they are."""

    def clip_gradient(self, gradient: Any) -> Any:
        return gradient


class Unbounded(QuantileClipper):
    """Wrong: the bound leaves its range."""

    def update_clip_value(self, gradients_list: Any) -> float:
        return float(max(np.linalg.norm(g) for g in gradients_list))


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Put a module with the package's own classes, open to change, in framework's place."""
    module = types.ModuleType("fedquilt.papers.quapfl")
    for part in (ParticipationTracker, AdaptivePrivacyAllocator, QuantileClipper):
        setattr(module, part.__name__, part)
    monkeypatch.setitem(sys.modules, "fedquilt.papers.quapfl", module)
    return module


@pytest.mark.usefixtures("framework")
def test_the_package_s_parts_pass_all_four_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert utils.validate_implementation() is True
    assert capsys.readouterr().out.splitlines() == [f"{name}: ok" for name in CHECKS]


@pytest.mark.parametrize(
    ("name", "wrong", "failing", "reason"),
    [
        ("ParticipationTracker", EveryoneJoined, 0, "is 1, expected 0.5"),
        ("ParticipationTracker", Crashing, 0, "RuntimeError: broken"),
        ("AdaptivePrivacyAllocator", FlatBudget, 1, "must be > epsilon"),
        ("AdaptivePrivacyAllocator", OtherBeta, 1, "expected 0.021140"),
        ("AdaptivePrivacyAllocator", HalfNoise, 3, "expected 322.98"),
        ("QuantileClipper", NoClip, 2, "clipped norm"),
        ("QuantileClipper", Unbounded, 2, "must be in [0.1, 10]"),
    ],
)
def test_a_wrong_part_fails_its_own_check_and_no_other(
    framework: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    name: str,
    wrong: type,
    failing: int,
    reason: str,
) -> None:
    setattr(framework, name, wrong)
    assert utils.validate_implementation() is False
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    failed = [line for line in lines if "FAILED" in line]
    assert failed == [lines[failing]]
    assert reason in failed[0]


def test_the_module_of_the_seed_documents_passes() -> None:
    pytest.importorskip("fedquilt.framework")
    assert utils.validate_implementation()


@pytest.mark.parametrize(
    ("dataset", "round", "accuracy", "expected"),
    [
        ("mnist", 10, 0.65, True),
        ("mnist", 10, 0.70, True),
        ("mnist", 10, 0.649, False),
        ("mnist", 10, 0.71, False),
        ("cifar10", 200, 0.812, True),
        ("cifar10", 200, math.nan, False),
        ("mnist", 11, 0.0, True),
        ("digits", 10, 0.0, True),
    ],
)
def test_milestones(dataset: str, round: int, accuracy: float, expected: bool) -> None:
    assert utils.check_milestone(dataset, round, accuracy) is expected


def test_a_missed_milestone_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("somewhere")
    with caplog.at_level(logging.INFO, logger="somewhere"):
        utils.check_milestone("mnist", 50, 0.5, logger)
        utils.check_milestone("mnist", 50, 0.9, logger)
        utils.check_milestone("mnist", 51, 0.9, logger)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "0.5000 is outside the expected range 0.880 to 0.920" in caplog.messages[0]


def test_every_documented_name_is_here() -> None:
    for name in (
        "validate_implementation",
        "check_milestone",
        "plot_training_history",
        "plot_multi_seed_comparison",
        "generate_summary_table",
        "plot_paper_figures",
        "plot_privacy_consumption_by_group",
    ):
        assert callable(getattr(utils, name))
        assert name in utils.__all__
