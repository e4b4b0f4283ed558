"""FedPer, FedRep, Ditto and fine-tuning against loops written from their papers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import torch_seed
from fedquilt.config import build_config
from fedquilt.experiment import loop

SIZES = (9, 14, 12, 8)
RATE, BATCH, EPOCHS, ROUNDS, SEED, LAMBDA = 0.2, 4, 2, 3, 7, 0.7
OWN_EPOCHS = 3


def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = np.random.default_rng(2)
    return [
        (
            torch.tensor(draws.standard_normal((size, 5)) + number, dtype=torch.float32),
            torch.tensor(draws.integers(0, 3, size)),
        )
        for number, size in enumerate(SIZES)
    ]


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def run(personal: str, **more: Any) -> Any:
    if personal in ("fedrep", "ditto", "finetune"):
        more["personal_epochs"] = OWN_EPOCHS
    if personal == "ditto":
        more["ditto_lambda"] = LAMBDA
    settings = {"output_dir": None, "mode": "fedavg", "clients_per_round": 3, **more}
    return fedquilt.run(
        model(),
        clients(),
        test=clients()[0],
        personal=personal,
        availability="always",
        num_rounds=ROUNDS,
        local_epochs=EPOCHS,
        batch_size=BATCH,
        learning_rate=RATE,
        seed=SEED,
        eval_every=ROUNDS,
        **settings,
    )


def trained(
    net: nn.Module, client: int, t: int, seed: int, epochs: int, names: str, pull: Any = None
) -> None:
    """Train some parameters of a network in place, on the batches that engines draw."""
    x, y = clients()[client]
    shuffle = torch.Generator().manual_seed(torch_seed(seed, "local", t, client))
    moving = [p for name, p in net.named_parameters() if name.startswith(tuple(names.split()))]
    for _ in range(epochs):
        order = torch.randperm(len(y), generator=shuffle)
        for batch in order.split(BATCH):
            loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
            if pull is not None:
                loss = loss + LAMBDA / 2 * sum(
                    ((p - q) ** 2).sum()
                    for p, q in zip(net.parameters(), pull.parameters(), strict=True)
                )
            for p, g in zip(moving, torch.autograd.grad(loss, moving), strict=True):
                p.data -= RATE * g


def vector(net: nn.Module, part: str = "0 2") -> torch.Tensor:
    names = tuple(part.split())
    return torch.cat(
        [p.detach().flatten() for name, p in net.named_parameters() if name.startswith(names)]
    )


def by_hand(personal: str, cohorts: list[list[int]]) -> tuple[nn.Module, dict[int, nn.Module]]:
    shared, own = model(), {k: model() for k in range(len(SIZES))}
    alone = torch_seed(SEED, "personal")
    for t, cohort in enumerate(cohorts):
        moves, start = {}, vector(shared)
        for k in cohort:
            net = copy.deepcopy(shared)
            if personal == "ditto":
                if not hasattr(own[k], "joined"):
                    own[k] = copy.deepcopy(shared)
                    own[k].joined = True  # type: ignore[assignment]
                trained(own[k], k, t, alone, OWN_EPOCHS, "0 2", pull=shared)
                trained(net, k, t, SEED, EPOCHS, "0 2")
            else:
                net[2].load_state_dict(own[k][2].state_dict())
                if personal == "fedrep":
                    trained(net, k, t, alone, OWN_EPOCHS, "2")
                    trained(net, k, t, SEED, EPOCHS, "0")
                else:
                    trained(net, k, t, SEED, EPOCHS, "0 2")
                own[k] = copy.deepcopy(net)
                net[2].load_state_dict(shared[2].state_dict())
            moves[k] = vector(net) - start
        total = sum(SIZES[k] for k in cohort)
        mean = sum(SIZES[k] / total * moves[k] for k in cohort)
        nn.utils.vector_to_parameters(start + mean, shared.parameters())
    return shared, own


def kept_of(folder: Path) -> dict[int, torch.Tensor]:
    from safetensors.torch import load_file

    (path,) = folder.glob("client_vectors-*")
    assert path.stat().st_mode & 0o077 == 0
    arrays = load_file(path)
    rows = zip(arrays["personal.clients"].tolist(), arrays["personal.values"], strict=True)
    return dict(rows)


@pytest.mark.parametrize("personal", ["fedper", "fedrep", "ditto"])
def test_a_run_is_what_the_paper_says(personal: str, tmp_path: Path) -> None:
    done = run(personal, output_dir=tmp_path)
    cohorts = done.result["history"]["client_participation"]
    shared, own = by_hand(personal, cohorts)
    assert torch.allclose(vector(done.model), vector(shared), rtol=1e-4, atol=1e-5)
    kept = kept_of(done.folder)
    assert set(kept) == {k for cohort in cohorts for k in cohort}
    for k, mine in kept.items():
        part = "0 2" if personal == "ditto" else "2"
        assert torch.allclose(mine, vector(own[k], part), rtol=1e-4, atol=1e-5), k


def test_a_resumed_run_goes_on_with_its_heads_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    whole, real = run("fedrep"), loop.Experiment.run_round

    def dies(self: Any, index: int) -> Any:
        if index == 2:
            raise KeyboardInterrupt
        return real(self, index)

    monkeypatch.setattr(loop.Experiment, "run_round", dies)
    with pytest.raises(KeyboardInterrupt):
        run("fedrep", output_dir=tmp_path)
    monkeypatch.setattr(loop.Experiment, "run_round", real)
    (folder,) = tmp_path.iterdir()
    again = fedquilt.run(model(), clients(), test=clients()[0], resume=folder)
    assert torch.equal(vector(whole.model), vector(again.model))


def test_each_client_evaluates_both_models() -> None:
    done = run("finetune", client_test_fraction=0.3, clients_per_round=4)
    rows = done.client_metrics
    assert rows is not None
    assert all({"accuracy", "own_accuracy", "loss", "own_loss"} <= set(row) for row in rows)
    assert any(row["own_loss"] != row["loss"] for row in rows)
    plain = run("none", client_test_fraction=0.3, clients_per_round=4)
    assert torch.equal(vector(done.model), vector(plain.model))  # tuning leaves the shared one


def test_the_statement_says_what_never_leaves_and_is_not_charged() -> None:
    done = run("fedper", mode="certified", epsilon=8.0)
    (said,) = [note for note in done.statement.notes if "to itself" in note]
    assert "2.bias, 2.weight" in said
    assert "nothing is charged" in said
    assert set(done.statement.covered) == {"0.weight", "0.bias"}
    start = vector(model(), "2")
    assert torch.equal(vector(done.model, "2"), start)  # not even noise reaches it
    assert not torch.equal(vector(done.model, "0"), vector(model(), "0"))


def test_what_clients_keep_costs_nothing() -> None:
    settings = {"mode": "certified", "epsilon": 8.0, "noise_seed": 3}
    spent = [
        run(personal, **settings).result["history"]["epsilon_spent"]
        for personal in ("none", "ditto")
    ]
    assert spent[0] == spent[1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mode": "quap_fl"}, "dealt by layers"),
        ({"method": "heterofl"}, "the whole model"),
        ({"mode": "fedavg", "correction": "scaffold"}, "shared models"),
        ({"mode": "fedavg", "engine": "batched"}, "one by one"),
    ],
)
def test_what_does_not_go_with_personal_models_is_refused(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        build_config({**settings, "personal": "fedper"})


@pytest.mark.parametrize(("layers", "reason"), [("head*", "must match"), ("0,2", "together")])
def test_layers_that_are_nothing_or_everything_are_refused(layers: str, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        run("fedper", personal_layers=layers)
