"""`FedNumClient` against group means computed with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedquilt.condense import FedNumClient
from fedquilt.condense.augment import Augmentation
from fedquilt.errors import InvalidValueError, NotReadyError
from fedquilt.papers.fednum.client import ImageInfo, table_of

INFO = {"name": "squares", "channel": 1, "img_size": (2, 3), "num_classes": 10, "mean": [0.5]}


class Linear(nn.Module):
    """Embedding x -> A x and logits x -> B x, both known."""

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(3)
        self.front = nn.Parameter(torch.randn(4, 6, generator=source))
        self.head = nn.Parameter(torch.randn(10, 6, generator=source))

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) @ self.front.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) @ self.head.T


def samples(labels: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(len(labels), 1, 2, 3, generator=source), torch.tensor(labels)


def client(train_set: object, classes: Any, **changes: Any) -> FedNumClient:
    settings = {"cid": 0, "dataset_info": INFO, "ipc": 2, "rho": 5, "avg_num": 4, "device": "cpu"}
    return FedNumClient(train_set=train_set, classes=classes, **{**settings, **changes})


def sent(member: FedNumClient, model: nn.Module | None = None) -> dict[str, Any]:
    member.receive_model(model or Linear())
    return member.train()


def test_groups_of_whole_class_equal_numpy_means() -> None:
    images, labels = samples([2] * 9 + [5] * 11 + [7] * 3)
    message = sent(client((images, labels), [2, 5, 7], avg_num=100))
    model, flat = Linear(), images.flatten(1).numpy().astype(np.float64)
    assert message["cid"] == 0
    assert message["classes"] == [2, 5]  # 7 has fewer than min_group samples
    for label in (2, 5):
        mean = flat[labels.numpy() == label].mean(axis=0)
        features = mean @ model.front.detach().numpy().T
        logits = mean @ model.head.detach().numpy().T
        np.testing.assert_allclose(message["avg_features"][label], features[None], atol=1e-6)
        np.testing.assert_allclose(message["avg_logits"][label], logits[None], atol=1e-6)
        assert message["counts"][label].tolist() == [int((labels == label).sum())]


def test_every_sample_is_in_exactly_one_group() -> None:
    """One-hot embeddings show who is in which group: the mean's support is the group."""
    images = torch.eye(11).view(11, 1, 1, 11)
    labels = torch.full((11,), 4)
    info = {"channel": 1, "img_size": [1, 11], "num_classes": 5}

    class Identity(nn.Module):
        def embed(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, :5]

    member = client((images, labels), [4], dataset_info=info, avg_num=3, min_group=2, batch_size=4)
    first, second = sent(member, Identity()), sent(member, Identity())
    for message in (first, second):
        counts, means = message["counts"][4], message["avg_features"][4]
        assert sorted(counts.tolist()) == [3, 4, 4]  # 11 // 3 groups, the remainder in them
        torch.testing.assert_close(means * counts[:, None], (means > 0).float())
        torch.testing.assert_close((means * counts[:, None]).sum(dim=0), torch.ones(11))
    assert not torch.equal(first["avg_features"][4] > 0, second["avg_features"][4] > 0)


def test_equal_turns_shuffle_alike_and_clients_differ() -> None:
    data = samples([1] * 16)

    def features(turn: int, **changes: Any) -> torch.Tensor:
        member = client(data, [1], **changes)
        member.open_round(turn)
        return sent(member)["avg_features"][1]

    assert torch.equal(features(3), features(3))
    others = [features(4), features(3, cid=1), features(3, seed=1), features(3, cid="0")]
    assert not any(torch.equal(features(3), other) for other in others)


def test_train_takes_the_next_turn_by_itself() -> None:
    data = samples([1] * 16)
    one, two = client(data, [1]), client(data, [1])
    sent(one)
    two.open_round(1)
    assert torch.equal(sent(one)["avg_features"][1], sent(two)["avg_features"][1])


def test_unlisted_labels_are_not_used_and_empty_ones_not_sent() -> None:
    member = client(samples([1] * 8 + [9] * 8), [1, 3])
    assert len(member) == 8
    assert member.classes == [1, 3]
    assert sent(member)["classes"] == [1]
    assert member.get_images(9).shape == (0, 1, 2, 3)


def test_a_client_without_samples_sends_nothing() -> None:
    for empty in ([], (torch.zeros(0, 1, 2, 3), torch.zeros(0, dtype=torch.int64))):
        message = sent(client(empty, [0]))
        assert message["classes"] == []
        assert message["avg_features"] == message["avg_logits"] == message["counts"] == {}


def test_max_samples_bounds_what_is_looked_at() -> None:
    message = sent(client(samples([0] * 40), [0], max_samples=10))
    assert int(message["counts"][0].sum()) == 10


def test_the_forms_of_a_train_set_say_the_same() -> None:
    images, labels = samples([0] * 9 + [1] * 9)

    class Named:
        def __init__(self) -> None:
            self.images, self.targets = images, labels

    forms = [
        (images, labels),
        (images.numpy(), labels.numpy()),
        Named(),
        [(image, int(label)) for image, label in zip(images, labels, strict=True)],
        torch.utils.data.TensorDataset(images, labels),
    ]
    messages = [sent(client(form, [0, 1])) for form in forms]
    for message in messages[1:]:
        for label in (0, 1):
            assert torch.equal(message["avg_features"][label], messages[0]["avg_features"][label])


def test_the_model_is_copied_frozen_and_in_evaluation_mode() -> None:
    model = Linear().train()
    member = client(samples([0] * 8), [0])
    member.recieve_model(model)
    with torch.no_grad():
        model.front.zero_()
    message = member.train()
    assert float(message["avg_features"][0].abs().max()) > 0
    assert not message["avg_features"][0].requires_grad
    assert model.training
    assert model.front.requires_grad


def test_augmentation_uses_the_row_of_the_class() -> None:
    images, labels = samples([3] * 8 + [6] * 8)
    transform = Augmentation("color").draw(np.random.default_rng(0), 2)
    member = client((images, labels), [3, 6], avg_num=100)
    member.receive_augmentation(transform, [3, 6])
    message = sent(member)
    for row, label in enumerate((3, 6)):
        owner = torch.full((8,), row)
        expected = Linear().embed(transform.apply(images[labels == label], owner)).mean(dim=0)
        torch.testing.assert_close(message["avg_features"][label][0], expected.detach())


def test_what_is_sent_lies_on_the_cpu_whatever_the_device() -> None:
    member = client(samples([0] * 8), [0], device=torch.device("cpu"))
    assert member.device == torch.device("cpu")
    assert sent(member)["avg_features"][0].device.type == "cpu"


def test_train_before_receive_model() -> None:
    with pytest.raises(NotReadyError, match=r"client 0 must receive_model\(\) before train"):
        client(samples([0] * 8), [0]).train()


def test_a_model_without_embed_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="Flatten has no embed"):
        client(samples([0] * 8), [0]).receive_model(nn.Flatten())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"avg_num": 0}, "avg_num=0 must be >= 1"),
        ({"min_group": 0}, "min_group=0 must be >= 1"),
        ({"ipc": 0}, "ipc=0 must be >= 1"),
        ({"rho": -1}, "rho=-1 must be >= 0"),
        ({"max_samples": 2}, "max_samples=2 must be 0"),
        ({"seed": -1}, "seed=-1 must be >= 0"),
        ({"device": "nowhere"}, "device='nowhere' must be a device"),
        ({"device": "meta"}, "device='meta' must be a device that holds numbers"),
        ({"classes": [10]}, "classes=10 must be >= 0 and <= 9"),
        ({"classes": "01"}, "classes='01' must be a list of labels"),
        ({"classes": 3}, "classes=3 must be a list of labels"),
        ({"dataset_info": None}, "dataset_info of type NoneType must be a dictionary"),
        ({"dataset_info": {"channel": 1, "img_size": 2}}, "must have the key 'num_classes'"),
        ({"dataset_info": INFO | {"img_size": (1, 2, 3)}}, "img_size'\\]=\\(1, 2, 3\\) must be"),
        ({"dataset_info": INFO | {"channel": 3}}, r"images of shape \(3, 2, 3\)"),
        ({"train_set": 7}, "train_set of type int must be"),
        ({"train_set": [1, 2, 3]}, r"train_set\[0\] must be a pair"),
        ({"train_set": [(torch.zeros(2), 0)]}, r"train_set\[0\] of shape \(2,\) must be"),
        ({"train_set": (torch.zeros(2, 1, 2, 3), torch.zeros(2))}, "one whole number an image"),
        ({"train_set": (torch.zeros(2, 1, 2, 3), [0])}, "and 1 labels must have one label"),
        ({"train_set": (torch.full((1, 1, 2, 3), torch.nan), [0])}, "finite numbers"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    settings = {"train_set": samples([0] * 8), "classes": [0], **changes}
    with pytest.raises(InvalidValueError, match=message):
        client(**settings)


def test_dataset_info_takes_a_side_or_two() -> None:
    assert ImageInfo.read(INFO).shape == (1, 2, 3)
    square = ImageInfo.read({"channel": 3, "img_size": 32, "num_classes": 10})
    assert (square.shape, square.num_classes, square.name) == ((3, 32, 32), 10, "custom")


def test_table_of_a_message() -> None:
    message = {
        "classes": [2, 5],
        "avg_features": {2: torch.ones(2, 3), 5: 2 * torch.ones(1, 3)},
        "avg_logits": {2: torch.zeros(2, 4), 5: torch.zeros(1, 4)},
        "counts": {2: torch.tensor([8, 9]), 5: torch.tensor([10])},
    }
    table = table_of(message, 0, 1, (2, 5), 3, 4)
    assert table.models.tolist() == [1, 1, 1]
    assert table.classes.tolist() == [2, 2, 5]
    assert table.counts.tolist() == [8, 9, 10]
    assert table.features[:, 0].tolist() == [1, 1, 2]
    assert table.logits.shape == (3, 4)
    del message["counts"], message["avg_logits"]
    table = table_of(message, 0, 0, (2, 5), 3, 0)
    assert table.counts.tolist() == [1, 1, 1]
    assert table.logits.shape == (3, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": [3]}, r"train\(\) of client 'a': class 3 must be one of \(2,\)"),
        ({"avg_features": {2: "none"}}, r"must return a tensor as 'avg_features'\[2\]"),
        ({"avg_features": {2: torch.ones(2, 4)}}, r"of shape \(2, 4\) must have shape \(-1, 3\)"),
        ({"avg_logits": {2: torch.ones(1, 4)}}, r"of shape \(1, 4\) must have shape \(2, 4\)"),
        ({"counts": {2: torch.ones(3)}}, r"of shape \(3,\) must have shape \(2,\)"),
        ({"counts": {2: torch.tensor([0, 8])}}, r"'counts'\[2\]=\[0.0, 8.0\] must be >= 1"),
    ],
)
def test_messages_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    good = {
        "classes": [2],
        "avg_features": {2: torch.ones(2, 3)},
        "avg_logits": {2: torch.ones(2, 4)},
    }
    assert len(table_of(good, "a", 0, (2,), 3, 4)) == 2
    with pytest.raises(InvalidValueError, match=message):
        table_of({**good, **changes}, "a", 0, (2,), 3, 4)
    with pytest.raises(InvalidValueError, match="must return a dictionary"):
        table_of(None, "a", 0, (2,), 3, 4)
