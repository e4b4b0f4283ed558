"""Low-rank adapters: the same function before training, few numbers, and back again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.errors import InvalidValueError
from fedquilt.models import lora, merge_lora
from fedquilt.training.task import Task
from fedquilt.training.trainers.vmap import why_not_stacked

pytestmark = pytest.mark.usefixtures("one_thread")


class Small(nn.Module):
    """A made-up transformer over the rows of an image of 8 x 8."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        layer = nn.TransformerEncoderLayer(
            width, 2, 32, dropout=0.0, batch_first=True, norm_first=False
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = self.embed(images.flatten(0, -3).view(-1, 8, 8))
        return self.head(self.encoder(rows).mean(dim=1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6, padding_idx=0)
        self.conv = nn.Conv1d(6, 8, 3, stride=2, padding=1, padding_mode="circular")
        self.out = nn.Linear(8, 3, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.conv(self.words(tokens).transpose(1, 2)).mean(-1))


def images(count: int = 5) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def tokens() -> torch.Tensor:
    return torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(0))


def moved(model: nn.Module) -> nn.Module:
    """Give the adapters values as if they had been trained."""
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.3)
    return model


CASES: list[Any] = [
    pytest.param(Small, images, "all", id="transformer"),
    pytest.param(Small, images, "linear1,linear2", id="feed-forward"),
    pytest.param(Words, tokens, "all", id="embedding and convolution"),
    pytest.param(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, dilation=1), nn.Flatten()),
        images,
        "0",
        id="image convolution",
    ),
    pytest.param(
        lambda: nn.Sequential(nn.Unflatten(1, (1, 1)), nn.Conv3d(1, 2, (1, 3, 3), stride=2)),
        images,
        "all",
        id="volume",
    ),
    pytest.param(lambda: nn.Linear(8, 3), images, "all", id="a layer by itself"),
]


@pytest.mark.parametrize(("make", "samples", "target"), CASES)
def test_it_begins_as_the_model_and_ends_as_one(make: Any, samples: Any, target: str) -> None:
    torch.manual_seed(0)
    model = make().eval()
    adapted = lora(model, rank=2, target=target).eval()
    x = samples()
    torch.testing.assert_close(adapted(x), model(x))
    moved(adapted)
    with torch.no_grad():
        changed, plain = adapted(x), merge_lora(adapted).eval()
    assert not torch.allclose(changed, model(x), atol=1e-3)
    torch.testing.assert_close(plain(x), changed, rtol=1e-4, atol=1e-5)
    assert list(plain.state_dict()) == list(model.state_dict())
    assert [type(m) for m in plain.modules()] == [type(m) for m in model.modules()]


@pytest.mark.parametrize(("make", "samples", "target"), CASES)
def test_the_change_has_the_rank(make: Any, samples: Any, target: str) -> None:
    torch.manual_seed(0)
    model = make()
    merged = merge_lora(moved(lora(model, rank=1, target=target)))
    before, changes = dict(model.named_parameters()), 0
    for name, weight in merged.named_parameters():
        change = (weight - before[name]).detach()
        if change.abs().max() > 0:
            changes += 1
            flat = change.flatten(1)
            assert torch.linalg.matrix_rank(flat, atol=1e-5, rtol=0) == 1, name
    assert changes


def test_only_adapters_and_what_is_named_are_trained() -> None:
    model = Small()
    adapted = lora(model, rank=2, target="linear1,linear2", train="head.*")
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert [name for name in trained if "lora_" not in name] == ["head.weight", "head.bias"]
    assert sum("lora_" in name for name in trained) == 8
    assert all(p.requires_grad for p in model.parameters()), "the model itself is left alone"
    again = lora(model, rank=2, target="linear1,linear2", train="head.*")
    for ours, theirs in zip(adapted.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), "the first values are public"


def test_a_layer_that_is_held_twice_stays_one() -> None:
    shared = nn.Linear(4, 4)
    adapted = lora(nn.Sequential(shared, nn.ReLU(), shared), rank=1)
    assert isinstance(adapted, nn.Sequential)
    assert adapted[0] is adapted[2]
    merged = merge_lora(moved(adapted))
    assert isinstance(merged, nn.Sequential)
    assert merged[0] is merged[2]


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (nn.Linear(2, 2), {"rank": 0}, "rank=0"),
        (nn.Linear(2, 2), {"target": "conv*"}, "target='conv\\*' must match a linear"),
        (nn.Linear(2, 2), {"train": "head.*"}, "train='head.\\*' must match a parameter"),
        (nn.Conv2d(4, 4, 1, groups=2), {}, "a convolution of 2 groups"),
        (nn.Embedding(3, 2, max_norm=1.0), {}, "max_norm"),
    ],
)
def test_what_cannot_be_adapted(model: nn.Module, settings: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        lora(model, **settings)
    with pytest.raises(InvalidValueError, match="must have adapters"):
        merge_lora(model)


# In a run

SETTINGS: dict[str, Any] = {
    "availability": "always",
    "clients_per_round": 1.0,
    "num_rounds": 2,
    "local_epochs": 1,
    "learning_rate": 0.3,
    "output_dir": None,
}


def federation() -> tuple[Any, Any]:
    draws = torch.Generator().manual_seed(2)
    labels = torch.arange(48) % 10
    return (torch.rand(48, 1, 8, 8, generator=draws), labels), [
        list(range(k, k + 12)) for k in range(0, 48, 12)
    ]


def adapted_model() -> nn.Module:
    torch.manual_seed(3)
    return lora(Small(), rank=2, target="linear1,linear2", train="head.*")


@pytest.mark.parametrize("engine", ["sequential", "batched", "processes"])
def test_engines_train_the_adapters_alone(engine: str) -> None:
    data, clients = federation()
    model = adapted_model()
    done = fedquilt.run(model, data, data, clients, mode="fedavg", engine=engine, **SETTINGS)
    before = model.state_dict()
    for name, tensor in done.state_dict.items():
        trained = "lora_" in name or name.startswith("head.")
        assert torch.equal(tensor, before[name]) != trained, name


def test_the_batched_engine_computes_what_the_sequential_one_does() -> None:
    data, clients = federation()
    task = Task(data[0], data[1], [torch.tensor(c).numpy() for c in clients])
    assert why_not_stacked(adapted_model(), task) is None
    one, many = (
        fedquilt.run(
            adapted_model(), data, data, clients, mode="fedavg", engine=name, **SETTINGS
        ).state_dict
        for name in ("sequential", "batched")
    )
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, many[name], rtol=1e-4, atol=1e-5)


def test_a_bound_covers_the_adapters_and_the_rest_is_frozen() -> None:
    data, clients = federation()
    done = fedquilt.run(
        adapted_model(), data, data, clients, mode="certified", epsilon=6.0, **SETTINGS
    )
    assert done.statement.is_bounded
    assert done.statement.uncovered == ()
    assert {name.rpartition(".")[2] for name in done.statement.covered} == {
        "lora_a", "lora_b", "weight", "bias",
    }  # fmt: skip
    assert all("lora_" in name or name.startswith("head.") for name in done.statement.covered)
    (frozen,) = [note for note in done.statement.notes if note.startswith("frozen")]
    assert "more" in frozen, "of many names the first ones and a number"
    assert done.model is not None
    assert list(merge_lora(done.model).state_dict()) == list(Small().state_dict())
