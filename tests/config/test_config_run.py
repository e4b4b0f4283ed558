"""`RunConfig`: every field's rule is enforced, and a record that exists is valid."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from fedquilt.config import RunConfig, option_fields
from fedquilt.errors import InvalidValueError
from fedquilt.training.task import learning_rate_at

FIELDS = option_fields()


def kinds_of(name: str) -> set[str]:
    return {part.strip() for part in str(FIELDS[name].type).split("|")}


def rule_of(name: str) -> dict[str, Any]:
    return dict(FIELDS[name].metadata["rule"])


def number_kind(name: str) -> str:
    """The types of a field and which bounds it has: 'float: above, at_most'."""
    bounds = [key for key in rule_of(name) if key in BOUNDS]
    return f"{FIELDS[name].type}: {', '.join(bounds)}"


def step(name: str) -> float:
    return 1 if "int" in kinds_of(name) else 1e-9


def just_outside(name: str) -> list[Any]:
    """Values one step, and where there is one the next float, beyond each bound of a field."""
    beyond = {"above": 0, "below": 0, "at_least": -step(name), "at_most": step(name)}
    sides = {"above": -math.inf, "below": math.inf, "at_least": -math.inf, "at_most": math.inf}
    values = []
    for key, bound in rule_of(name).items():
        if key in BOUNDS:
            values.append(bound + beyond[key])
            if "float" in kinds_of(name):
                values.append(math.nextafter(bound, sides[key]))
            elif key == "at_least":
                values.append(-(10**30))
    return values


def nearest_inside(name: str) -> list[Any]:
    """Values on, or one step inside, each bound of a field."""
    inside = {"above": step(name), "below": -step(name), "at_least": 0, "at_most": 0}
    return [bound + inside[key] for key, bound in rule_of(name).items() if key in BOUNDS]


BOUNDS = ("above", "below", "at_least", "at_most")
NUMERIC = [name for name in FIELDS if kinds_of(name) & {"int", "float"}]
CHOICES = [name for name in FIELDS if "choices" in rule_of(name)]
BOUNDED = [name for name in NUMERIC if just_outside(name)]
KINDS = {
    kind: [name for name in NUMERIC if number_kind(name) == kind]
    for kind in map(number_kind, NUMERIC)
}


def test_the_defaults_are_the_api_documents() -> None:
    config = RunConfig()
    expected = {
        "num_rounds": 200,
        "local_epochs": 5,
        "batch_size": 32,
        "learning_rate": 0.01,
        "epsilon": 3.0,
        "delta": 1e-5,
        "budget_alpha": 0.5,
        "budget_beta": 2.0,
        "clip_quantile": 0.9,
        "clip_momentum": 0.95,
        "min_clip": 0.1,
        "max_clip": 10.0,
        "max_agg_norm": 10000.0,
    }
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.cohort_limit(100) == 30
    assert config.mode == "certified"  # the one value that is ours


def test_the_test_looks_at_fields_of_every_kind() -> None:
    assert len(BOUNDED) > 20
    # A cohort, a count or a share, has tests of its own below.
    assert set(NUMERIC) - set(BOUNDED) == {"clients_per_round"}, "a field accepts every number"
    assert len(CHOICES) > 5
    assert all(FIELDS[name].metadata["help"].strip() for name in FIELDS)


def refusal(name: str, value: Any) -> str:
    """Return what the refusal of a value says; one that is taken fails the test."""
    with pytest.raises(InvalidValueError) as caught:
        RunConfig(**{name: value})
    said = str(caught.value)
    assert said.startswith(f"{name}="), said
    assert " must be " in said
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_are_enforced_on_both_sides(kind: str) -> None:
    for name in KINDS[kind]:
        for value in just_outside(name):
            assert refusal(name, value).startswith(f"{name}={value!r} must be ")
        for value in nearest_inside(name):
            partner = {"max_clip": {"min_clip": 1e-12}, "min_clip": {"max_clip": 10.0}}
            config = RunConfig(**{**partner.get(name, {}), name: value})
            assert getattr(config, name) == value


NO_NUMBERS = ["1", True, [1], {}, math.nan, math.inf, -math.inf, 1j]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
def test_numbers_must_be_numbers(value: Any) -> None:
    for name in NUMERIC:
        refusal(name, value)


def test_fractions_where_whole_numbers_belong() -> None:
    for name in NUMERIC:
        if "float" not in kinds_of(name):
            assert refusal(name, 3.5).startswith(f"{name}=3.5 must be a whole number")


def test_numbers_beyond_every_float() -> None:
    """Whether too large is allowed is the option's business; a crash is not."""
    for name in NUMERIC:
        with contextlib.suppress(InvalidValueError):
            RunConfig(**{name: 10**400})


def test_none_is_only_for_optional_fields() -> None:
    for name in FIELDS:
        if "None" in kinds_of(name):
            assert getattr(RunConfig(**{name: None}), name) is None
        else:
            assert refusal(name, None).startswith(f"{name}=None")


def test_choices_are_closed() -> None:
    for name in CHOICES:
        assert refusal(name, "nonsense").startswith(f"{name}='nonsense' must be one of")


@pytest.mark.parametrize("value", [0, 1, "true"])
def test_switches_are_true_or_false(value: Any) -> None:
    for name in FIELDS:
        if "bool" in kinds_of(name):
            assert "must be true or false" in refusal(name, value)


@pytest.mark.parametrize("value", ["", 3])
def test_texts_are_not_empty(value: Any) -> None:
    for name in ("dataset", "model", "output_dir", "availability"):
        refusal(name, value)


def test_numbers_of_other_libraries_become_plain() -> None:
    config = RunConfig(
        num_clients=np.int64(9), clients_per_round=np.int32(3), epsilon=2, delta=np.float32(0.5)
    )
    assert (type(config.num_clients), type(config.clients_per_round)) == (int, int)
    assert (type(config.epsilon), type(config.delta)) == (float, float)
    assert type(RunConfig(clients_per_round=np.float64(0.5)).clients_per_round) is float


@pytest.mark.parametrize(
    ("value", "clients", "limit"),
    [(0.3, 100, 30), (1.0, 7, 7), (0.01, 5, 1), (0.5, 5, 2), (1, 7, 1), (7, 7, 7), (0.0001, 1, 1)],
)
def test_cohorts_are_whole_numbers_or_fractions(value: float, clients: int, limit: int) -> None:
    assert RunConfig(clients_per_round=value).cohort_limit(clients) == limit


@pytest.mark.parametrize("value", [0, -1, 0.0, 1.5, -0.2, True])
def test_bad_cohorts_are_refused(value: float) -> None:
    with pytest.raises(InvalidValueError, match="clients_per_round"):
        RunConfig(clients_per_round=value)


def test_a_cohort_is_not_larger_than_the_population() -> None:
    with pytest.raises(InvalidValueError, match=r"clients_per_round=8 must be <= num_clients=7"):
        RunConfig(clients_per_round=8, num_clients=7)
    with pytest.raises(InvalidValueError, match=r"clients_per_round=8 must be <= num_clients=7"):
        RunConfig(clients_per_round=8).cohort_limit(7)


def test_clip_limits_are_in_order() -> None:
    for low, high in ((1.0, 1.0), (2.0, 1.0)):
        with pytest.raises(InvalidValueError, match=r"max_clip=1\.0 must be > min_clip="):
            RunConfig(min_clip=low, max_clip=high)


@pytest.mark.parametrize("name", ["noise_layers", "trainable"])
def test_layer_patterns(name: str) -> None:
    assert RunConfig(**{name: " fc1 , head.* ,,conv"}).patterns(name) == ("fc1", "head.*", "conv")
    for empty in (",", " , "):
        with pytest.raises(InvalidValueError, match=name):
            RunConfig(**{name: empty})


def test_the_learning_rate_decays_by_round() -> None:
    config = RunConfig(learning_rate=0.2, lr_decay=0.5)
    assert [learning_rate_at(config, t) for t in range(4)] == [0.2, 0.1, 0.05, 0.025]


def test_records_are_frozen_and_copies_are_checked() -> None:
    config = RunConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.epsilon = 9.0  # type: ignore[misc]
    assert config.replace(epsilon=9.0).epsilon == 9.0
    assert config.epsilon == 3.0
    with pytest.raises(InvalidValueError, match="epsilon=-1"):
        config.replace(epsilon=-1)
    assert list(config.as_dict()) == list(FIELDS)
    assert RunConfig(**config.as_dict()) == config
