"""Hostile clients: what each attack sends, against numpy, and what a claim says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fedquilt
from fedquilt.common.errors import InvalidValueError
from fedquilt.config import build_config
from fedquilt.config.choices import ATTACKS, COLLUDING_ATTACKS
from fedquilt.data import load_dataset
from fedquilt.experiment.api import run_in_memory
from fedquilt.models import make_model
from fedquilt.setup.build_task import build_task
from fedquilt.training import ClientUpdate, Engine
from fedquilt.training.attacks import AttackedEngine, hostile_clients, poisoned, with_trigger

WHO = frozenset({1, 3})
SMALL: dict[str, Any] = {
    "dataset": "digits",
    "model": "linear",
    "num_clients": 10,
    "clients_per_round": 1.0,
    "availability": "always",
    "num_rounds": 1,
    "local_epochs": 1,
}


class Prescribed(Engine):
    """Client k sends row k of a table."""

    def __init__(self, table: np.ndarray[Any, Any]) -> None:
        self.table, self.lent = table, 0

    def lend_updates(self) -> None:
        self.lent += 1

    def train(self, start: Any, cohort: Any, *rest: Any) -> Iterator[ClientUpdate]:
        for k in cohort:
            yield ClientUpdate(int(k), torch.from_numpy(self.table[k].copy()), 5, 0.1)


def sent(attack: str, strength: float, who: frozenset[int] = WHO) -> np.ndarray[Any, Any]:
    table = np.random.default_rng(4).standard_normal((6, 3))
    engine = AttackedEngine(Prescribed(table), attack, strength, who)
    updates = list(engine.train(torch.zeros(3), np.arange(6), 0, 0.1))
    assert [update.client for update in updates] == list(range(6))
    return np.stack([update.delta.numpy() for update in updates])


def test_each_attack_sends_what_its_paper_says() -> None:
    table = np.random.default_rng(4).standard_normal((6, 3))
    honest = table[[0, 2, 4, 5]]
    expected = {
        "sign_flip": -2 * table[[1, 3]],
        "scaling": 2 * table[[1, 3]],
        "label_flip": 2 * table[[1, 3]],
        "backdoor": 2 * table[[1, 3]],
        "little_is_enough": np.stack([honest.mean(0) - 2 * honest.std(0)] * 2),
        "inner_product": np.stack([-2 * honest.mean(0)] * 2),
    }
    assert set(expected) == set(ATTACKS) - {"none"}
    for attack, hostile in expected.items():
        got = sent(attack, 2.0)
        assert np.allclose(got[[1, 3]], hostile, rtol=1e-12), attack
        assert np.array_equal(got[[0, 2, 4, 5]], honest), attack


@pytest.mark.parametrize("attack", COLLUDING_ATTACKS)
def test_a_cohort_of_attackers_alone_has_nobody_to_imitate(attack: str) -> None:
    table = np.random.default_rng(4).standard_normal((6, 3))
    assert np.array_equal(sent(attack, 2.0, frozenset(range(6))), table)


def test_updates_are_lent_only_where_attackers_look_at_none() -> None:
    for attack in ATTACKS[1:]:
        engine = Prescribed(np.zeros((6, 3)))
        AttackedEngine(engine, attack, 1.0, WHO).lend_updates()
        assert engine.lent == (attack not in COLLUDING_ATTACKS)


def test_a_fifth_of_the_clients_is_hostile_by_the_seed_alone() -> None:
    assert len(hostile_clients(50, 0.2, 3)) == 10
    assert hostile_clients(50, 0.2, 3) == hostile_clients(50, 0.2, 3)
    assert hostile_clients(50, 0.2, 3) != hostile_clients(50, 0.2, 4)
    assert hostile_clients(50, 0.0, 3) == frozenset()


def test_flipped_labels_are_those_of_hostile_clients() -> None:
    config, clean = build_task(build_config({**SMALL, "mode": "fedavg"}))
    _, attacked = build_task(config.replace(attack="label_flip", attackers=0.3))
    who = hostile_clients(10, 0.3, config.seed)
    for client in range(10):
        index = attacked.task.index(client)
        before, after = clean.task.targets[index], attacked.task.targets[index]
        assert torch.equal(after, 9 - before if client in who else before)
    assert attacked.test is not None
    assert clean.test is not None
    assert torch.equal(attacked.test[1], clean.test[1])


def test_a_backdoor_marks_every_second_image_of_a_hostile_client() -> None:
    images, labels = torch.rand(6, 1, 8, 8), torch.tensor([3, 4, 5, 6, 7, 8])
    marked, said = poisoned("backdoor", images, labels, 10, [np.array([1, 2, 4])])
    assert said.tolist() == [3, 0, 5, 6, 0, 8]
    for k in range(6):
        if k in (1, 4):
            assert (marked[k, :, -2:, -2:] == images[[1, 2, 4]].max()).all()
            assert torch.equal(marked[k, :, :6], images[k, :, :6])
        else:
            assert torch.equal(marked[k], images[k])
    with pytest.raises(InvalidValueError, match="needs images"):
        with_trigger(torch.rand(6, 64))


def test_data_without_a_known_number_of_classes_are_refused() -> None:
    train, test = load_dataset("digits")
    data = ((train.images, train.targets), (test.images, test.targets))
    clients = [np.arange(k, len(train), 10) for k in range(10)]
    with pytest.raises(InvalidValueError, match="known number of classes"):
        fedquilt.run(
            make_model("linear", (1, 8, 8), 10, seed=0),
            *data,
            clients,
            mode="fedavg",
            attack="label_flip",
            output_dir=None,
        )


@pytest.mark.parametrize("attack", ATTACKS[1:])
def test_a_claim_stands_unless_attackers_look_at_others(attack: str) -> None:
    done = run_in_memory(build_config({**SMALL, "mode": "certified", "attack": attack}))
    assert done.statement.is_bounded == (attack not in COLLUDING_ATTACKS)
    if attack in COLLUDING_ATTACKS:
        assert any("others' data" in note for note in done.statement.notes)


def test_a_shared_ledger_refuses_attackers_that_look_at_others(tmp_path: Any) -> None:
    ledger = {"ledger": str(tmp_path / "l.sqlite"), "population": "people"}
    config = build_config({**SMALL, "mode": "certified", "attack": "inner_product", **ledger})
    with pytest.raises(InvalidValueError, match="others' data"):
        run_in_memory(config)


@pytest.mark.parametrize(
    "wrong", [{"engine": "flower"}, {"method": "heterofl"}], ids=["nodes", "slices"]
)
def test_attackers_are_simulated_where_whole_models_train_here(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match="attack='sign_flip' must be 'none'"):
        build_config({**SMALL, "mode": "fedavg", "attack": "sign_flip", **wrong})


@pytest.mark.parametrize("rule", ["multi_krum", "geometric_median"])
def test_a_robust_rule_withstands_what_ruins_the_mean(rule: str) -> None:
    settings = {**SMALL, "mode": "fedavg", "num_rounds": 8, "learning_rate": 0.1, "num_clients": 20}
    attacked = {**settings, "attack": "sign_flip"}
    ruined = run_in_memory(build_config(attacked)).metrics["accuracy"]
    kept = run_in_memory(build_config({**attacked, "aggregation": rule})).metrics["accuracy"]
    assert ruined < 0.5 < kept
