"""Adapters of unequal ranks, each method against the same round in a few lines of its own."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.errors import InvalidValueError
from fedquilt.experiment import loop
from fedquilt.models import merge_cores, with_cores
from fedquilt.slices.selection import client_widths
from fedquilt.slices.slicing import RankSlicer, tier_widths

METHODS = ("hetlora", "flexlora", "fedsb")
WIDTHS = ("1", "1/2", "1/4", "1/2")
RATE, SAMPLES, RANK = 0.7, 6, 4
DRAWN = torch.Generator().manual_seed(5)
X = torch.randn(SAMPLES * len(WIDTHS), 8, generator=DRAWN)
Y = torch.randint(0, 5, (len(X),), generator=DRAWN)
CLIENTS = [range(k * SAMPLES, (k + 1) * SAMPLES) for k in range(len(WIDTHS))]
SETTINGS: dict[str, Any] = {
    "mode": "fedavg", "num_rounds": 1, "local_epochs": 1, "batch_size": SAMPLES,
    "learning_rate": RATE, "lr_schedule": "constant", "availability": "always",
    "clients_per_round": 1.0, "output_dir": None, "quiet": True, "engine": "sequential",
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(8, 7)
        self.head = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.low(x)))


def adapted(method: str = "hetlora") -> nn.Module:
    """Return a model whose adapter has been trained before, with a head that is trained whole."""
    torch.manual_seed(1)
    layers = peft.LoraConfig(r=RANK, lora_alpha=6, target_modules=["low"], modules_to_save=["head"])
    model = peft.get_peft_model(Net(), layers)
    with torch.no_grad():
        low = model.base_model.model.low
        left, values, right = torch.linalg.svd(torch.randn(7, 8), full_matrices=False)
        low.lora_B.default.weight.copy_(left[:, :RANK] * values[:RANK])
        low.lora_A.default.weight.copy_(right[:RANK])
    return with_cores(model) if method == "fedsb" else model


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapted model, the change B R A in three of them."""
    low, head = model.base_model.model.low, model.base_model.model.head.modules_to_save.default
    a, b = low.lora_A.default, low.lora_B.default.weight.detach().clone()
    core = getattr(a, "core", torch.eye(RANK)).detach().clone()
    base = getattr(a, "base", a.weight).detach().clone()
    return {"a": base, "b": b, "r": core, "w": head.weight.detach().clone(),
            "c": head.bias.detach().clone()}  # fmt: skip


def one_step(start: dict[str, torch.Tensor], client: int, names: tuple[str, ...]) -> Any:
    """Return one full-batch step of plain SGD on the named tensors, without the package."""
    torch.manual_seed(1)
    frozen = Net().low
    held = {n: t.clone().requires_grad_(n in names) for n, t in start.items()}
    x, y = X[list(CLIENTS[client])], Y[list(CLIENTS[client])]
    change = held["b"] @ held["r"] @ held["a"] * 6 / RANK
    hidden = torch.tanh(x @ (frozen.weight.detach() + change).T + frozen.bias.detach())
    loss = nn.functional.cross_entropy(hidden @ held["w"].T + held["c"], y)
    grads = torch.autograd.grad(loss, [held[n] for n in names])
    return {n: -RATE * g for n, g in zip(names, grads, strict=True)}


def by_hand(method: str) -> dict[str, torch.Tensor]:
    """Return the model after a round."""
    start, count = tensors(adapted(method)), len(WIDTHS)
    names = ("r", "w", "c") if method == "fedsb" else ("a", "b", "w", "c")
    total = {n: torch.zeros_like(t) for n, t in start.items()}
    holders, product = torch.zeros(RANK, RANK), torch.zeros(7, 8)
    for client, width in enumerate(WIDTHS):
        k = int(RANK * Fraction(width))
        own = {**start, "a": start["a"][:k], "b": start["b"][:, :k], "r": start["r"][:k, :k]}
        moved = one_step(own, client, names)
        holders[:k, :k] += 1
        for name in ("w", "c"):
            total[name] += moved[name] / count
        if method == "fedsb":
            total["r"][:k, :k] += moved["r"]
        elif method == "hetlora":
            total["a"][:k] += moved["a"] / count
            total["b"][:, :k] += moved["b"] / count
        else:
            after = (own["b"] + moved["b"]) @ (own["a"] + moved["a"])
            product += (after - own["b"] @ own["a"]) / count
    if method == "fedsb":
        total["r"] /= holders
    end = {n: t + total[n] for n, t in start.items()}
    change = end["b"] @ end["r"] @ end["a"]
    if method == "flexlora":
        u, s, v = np.linalg.svd((change + product).double().numpy())
        change = torch.from_numpy((u[:, :RANK] * s[:RANK]) @ v[:RANK]).float()
    return {"change": change, "w": end["w"], "c": end["c"]}


@pytest.mark.parametrize("method", METHODS)
def test_a_round_of_unequal_ranks_is_what_the_method_says(method: str) -> None:
    tiers = "each:" + ",".join(WIDTHS)
    done = fedquilt.run(
        adapted(method), (X, Y), (X, Y), CLIENTS, method=method, tiers=tiers, **SETTINGS
    )
    ours, wanted = tensors(done.model), by_hand(method)
    change = ours["b"] @ ours["r"] @ ours["a"]
    torch.testing.assert_close(change, wanted["change"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["w"], wanted["w"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours["c"], wanted["c"], rtol=1e-5, atol=1e-6)


def test_where_all_hold_all_ranks_each_method_is_the_run_of_whole_models() -> None:
    for method in ("hetlora", "fedsb"):
        run = {**SETTINGS, "num_rounds": 3}
        ours, theirs = (
            fedquilt.run(adapted(method), (X, Y), (X, Y), CLIENTS, **how, **run).state_dict
            for how in ({"method": method, "tiers": "1"}, {})
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("method", METHODS)
def test_a_bound_says_which_method_and_covers_all_that_is_trained(method: str) -> None:
    model = adapted(method)
    run = {**SETTINGS, "mode": "certified", "epsilon": 8.0, "num_rounds": 2}
    done = fedquilt.run(model, (X, Y), (X, Y), CLIENTS, method=method, tiers="1,1/4", **run)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(done.statement.covered) == trained
    assert done.statement.uncovered == ()
    assert done.statement.epsilon_max <= 8.0
    said = {"hetlora": "count as zeros", "fedsb": "core between", "flexlora": "products B A"}
    assert sum(said[method] in note for note in done.statement.notes) == 1
    tiers = {tier["width"]: tier["parameters"] for tier in done.result["slices"]["tiers"]}
    head = 7 * 5 + 5
    ranks = {"1": RANK, "1/4": 1}
    size = {w: k * k if method == "fedsb" else k * (7 + 8) for w, k in ranks.items()}
    assert tiers == {w: size[w] + head for w in ranks}


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_goes_on_with_what_its_server_remembers(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments of FlexLoRA's server are of products, which are longer than the adapters."""
    run = {**SETTINGS, "num_rounds": 4, "server_optimizer": "adam", "server_lr": 0.05,
           "method": method, "tiers": "1,1/2"}  # fmt: skip
    whole = fedquilt.run(adapted(method), (X, Y), (X, Y), CLIENTS, **run)
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)

    def stop(config: object, line: Any) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt

    run["output_dir"] = tmp_path
    with pytest.raises(KeyboardInterrupt):
        fedquilt.run(adapted(method), (X, Y), (X, Y), CLIENTS, observer=stop, **run)
    (folder,) = tmp_path.iterdir()
    again = fedquilt.run(adapted(method), (X, Y), (X, Y), CLIENTS, resume=folder)
    assert all(torch.equal(again.state_dict[name], t) for name, t in whole.state_dict.items())


def test_a_merged_core_is_saved_by_peft_and_loads_with_peft_alone(tmp_path: Path) -> None:
    done = fedquilt.run(
        adapted("fedsb"), (X, Y), (X, Y), CLIENTS, method="fedsb", tiers="1,1/2", **SETTINGS
    )
    assert done.model is not None
    plain = merge_cores(done.model)
    plain.save_pretrained(tmp_path)  # type: ignore[operator]  # peft's
    torch.manual_seed(1)
    loaded = peft.PeftModel.from_pretrained(Net(), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(X), plain.eval()(X))
        torch.testing.assert_close(loaded(X), done.model.eval()(X))


def test_ranks_share_the_frozen_tensors_and_say_their_sizes() -> None:
    model: Any = adapted()
    small: Any = RankSlicer("hetlora", model).build(Fraction(1, 4))
    low, whole = small.base_model.model.low, model.base_model.model.low
    assert low.base_layer.weight is whole.base_layer.weight
    assert (low.lora_A.default.out_features, low.lora_B.default.in_features) == (1, 1)
    assert low.scaling == whole.scaling
    assert torch.equal(low.lora_A.default.weight, whole.lora_A.default.weight[:1])


def test_a_table_of_memories_gives_each_client_the_rank_that_fits(tmp_path: Path) -> None:
    """Frozen weights once, what is trained three times: weights, gradient, update."""
    model = adapted()
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    size = {k: 4 * (frozen + 3 * (k * (7 + 8) + 7 * 5 + 5)) / 2**20 for k in (4, 2, 1)}
    table = tmp_path / "devices.csv"
    rows = [f"{i},{size[k] * 1.001:.9f},1e9" for i, k in enumerate((4, 2, 1, 2))]
    table.write_text("\n".join(["client,memory_mb,flops", *rows]))
    from fedquilt.config import plain_config

    config = plain_config({"method": "hetlora", "tiers": str(table), "mode": "fedavg"})
    widths = tier_widths(config, model, X[:2], 4)
    assert [str(width) for width in widths] == ["1", "1/2", "1/4", "1/2"]
    assert client_widths("each:1,1/2", 2, np.random.default_rng(0), lambda w: (0, 0))[1] == 0.5


class Elsewhere:
    """An engine whose clients are on other machines."""

    def serve(self, method: Any) -> None:
        raise AssertionError("nobody may be asked")


@pytest.mark.parametrize(
    ("method", "model", "settings", "message"),
    [
        ("hetlora", Net, {}, "must have adapters of peft.LoraConfig"),
        ("fedsb", adapted, {}, "must train cores with method='fedsb'"),
        ("flexlora", lambda: adapted("fedsb"), {}, "without cores"),
        ("hetlora", adapted, {"tiers": "1,1/8"}, "width=1/8 must keep at least one of the 4"),
        (
            "flexlora",
            adapted,
            {"engine": Elsewhere(), "tiers": "1"},
            "'hetlora' or 'fedsb' with engine='flower'",
        ),
        ("flexlora", adapted, {"average_late": 0.5}, "average_late=0.5 must be 0"),
        ("hetlora", adapted, {"mode": "quap_fl"}, "mode='quap_fl' must be one of 'fedavg'"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    method: str, model: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        fedquilt.run(model(), (X, Y), (X, Y), CLIENTS, method=method, **{**SETTINGS, **settings})
