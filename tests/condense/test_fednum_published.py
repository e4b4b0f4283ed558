"""A program written for the published FedNum code: its sets, its dictionary, its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fedquilt
from fedquilt.condense import FedNumClient, FedNumServer
from fedquilt.config import CondenseConfig, build_config
from fedquilt.data import read_split_file, split_clients
from fedquilt.errors import DataError, InvalidValueError
from fedquilt.models import make_model

INFO = {
    "channel": 1,
    "im_size": (8, 8),
    "num_classes": 3,
    "classes_names": ["a", "b", "c"],
    "mean": [0.5],
    "std": [0.25],
}


class PerLabel:
    """Samples as the published set keeps them: all images, and their places by class."""

    def __init__(self, images: torch.Tensor, labels: list[int], classes: list[int]) -> None:
        self.images_all = images
        self.indices_class = {c: [i for i, y in enumerate(labels) if y == c] for c in classes}

    def __len__(self) -> int:
        return len(self.images_all)


class PublishedClient:
    """Sends what the published client sends: classes without samples are listed."""

    def __init__(self, cid: int, train_set: PerLabel, classes: list[int]) -> None:
        self.cid, self.train_set, self.classes = cid, train_set, classes

    def receive_model(self, model: Any) -> None:
        self.model = model

    def train(self) -> dict[str, Any]:
        features, logits = {}, {}
        for c in self.classes:
            at = self.train_set.indices_class[c]
            if at:
                with torch.no_grad():
                    features[c] = self.model.embed(self.train_set.images_all[at]).mean(0)[None]
                    logits[c] = self.model(self.train_set.images_all[at]).mean(0)[None]
        sent = {"cid": self.cid, "classes": self.classes, "ipc": 1}
        return {**sent, "avg_features": features, "avg_logits": logits}


def samples(seed: int, count: int = 24) -> tuple[torch.Tensor, list[int]]:
    """Return images whose brightness says their class, 0 or 1."""
    rng = np.random.default_rng(seed)
    labels = [int(i) for i in rng.integers(0, 2, count)]
    images = torch.tensor(rng.normal(size=(count, 1, 8, 8)), dtype=torch.float32)
    return images + torch.tensor(labels, dtype=torch.float32).view(-1, 1, 1, 1), labels


def clients(**changes: Any) -> list[FedNumClient]:
    """Return clients built as the published main program builds them."""
    made = []
    for cid in range(2):
        held = PerLabel(*samples(cid), classes=[0, 1, 2])
        named = {"ipc": 1, "rho": 5, "avg_num": 8, "device": torch.device("cpu"), **changes}
        made.append(
            FedNumClient(cid=cid, train_set=held, classes=[0, 1, 2], dataset_info=INFO, **named)
        )
    return made


def server(people: list[Any], **changes: Any) -> FedNumServer:
    """Return a server with the published arguments, by name; two are left to their defaults."""
    images, labels = samples(9)
    test_set = TensorDataset(images, torch.tensor(labels))
    settings = {
        "global_model": make_model("convnet-32", (1, 8, 8), 3, seed=0),
        "clients": people,
        "communication_rounds": 2,
        "join_ratio": 1.0,
        "batch_size": 256,
        "model_epochs": 2,
        "ipc": 1,
        "rho": 5,
        "avg_num": 8,
        "batch_num": 16,
        "dc_iterations": 2,
        "image_lr": 1,
        "init_method": "real_sample",
        "eval_gap": 1,
        "test_set": test_set,
        "test_loader": DataLoader(test_set, batch_size=8),
        "device": torch.device("cpu"),
        "model_identification": "fednum_toy/ConvNet_1ipc",
        "dataset_info": INFO,
    }
    return FedNumServer(**{**settings, **changes})


def test_the_published_call_runs() -> None:
    made = server(clients())
    made.fit()
    assert [entry["groups"] > 0 for entry in made.history] == [True, True]
    assert made.config.logit_loss_type == "wasserstein"
    assert made.config.loss_computation == "avg-loss"
    assert made.model_identification == "fednum_toy/ConvNet_1ipc"
    assert made.config.pixel_mean == "0.5"


def test_a_client_may_list_a_class_that_it_has_no_samples_of() -> None:
    people = [
        PublishedClient(cid, PerLabel(*samples(cid), classes=[0, 1, 2]), [0, 1, 2])
        for cid in range(2)
    ]
    made = server(people, init_method="random")
    made.fit()
    assert [entry["groups"] for entry in made.history] == [4, 4]


def test_images_by_class_are_read_as_they_are() -> None:
    images, labels = samples(3)
    client = FedNumClient(0, PerLabel(images, labels, [0, 1]), [0, 1], INFO, 1, 5, 8, "cpu")
    for label in (0, 1):
        at = [i for i, y in enumerate(labels) if y == label]
        assert torch.equal(client.get_images(label), images[at])


def test_first_images_that_clients_condense() -> None:
    made = server(clients(), init_method="dm")
    own = torch.cat([client.get_images(0) for client in made.clients])
    first = made.synthetic.by_class()[0, 0]
    assert not any(torch.equal(first, image) for image in own)  # they were moved
    assert min(float((first - image).norm()) for image in own) < float(first.norm())
    made.fit()
    sent = made._experiment.lines[0]["bytes_up"] - made._experiment.lines[1]["bytes_up"]
    assert sent == 4 * 2 * 2 * 64  # two clients, two classes, one image of each
    assert any("init_method=dm" in note for note in made.statement.notes)


def test_the_folder_keeps_images_and_pictures(tmp_path: Path) -> None:
    made = server(clients(), output_dir=tmp_path / "run")
    made.fit()
    done = fedquilt.load(tmp_path / "run")
    assert done.synthetic is not None
    assert torch.equal(done.synthetic.images, made.synthetic.of([0, 1]).images)
    assert (tmp_path / "run" / "condensed.png").exists()


class Kept:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.closed: list[bool] = []

    def log(self, line: Any) -> None:
        self.lines.append(dict(line))

    def close(self, *, failed: bool = False) -> None:
        self.closed.append(failed)


def test_trackers_get_every_round() -> None:
    tracker = Kept()
    server(clients(), tracker=tracker).fit()
    assert [line["round"] for line in tracker.lines] == [0, 1]
    assert all({"test_accuracy", "epoch_avg_loss", "seconds"} <= set(x) for x in tracker.lines)
    assert tracker.closed == [False]
    with pytest.raises(InvalidValueError, match="tracker='tensorboard' needs an output_dir"):
        server(clients(), tracker="tensorboard")
    with pytest.raises(InvalidValueError, match="tracker of type int must be"):
        server(clients(), tracker=3)


def test_the_documents_settings_are_one_name() -> None:
    config = build_config({"method": "condense"}, preset="fednum-document")
    assert isinstance(config, CondenseConfig)
    assert (config.num_clients, config.partition, config.dirichlet_alpha) == (50, "part", 0.1)
    assert (config.avg_num, config.batch_num, config.ipc, config.image_lr) == (32, 128, 10, 1.0)
    assert (config.feature_model, config.logit_loss) == ("global", "wasserstein_sorted")
    assert (config.tiles, config.moments, config.model_schedule) == (1, 1, "constant")
    with pytest.raises(InvalidValueError, match="preset='paper-mnist' must be"):
        build_config({"method": "condense"}, preset="paper-mnist")


def test_part_gives_everybody_a_few_classes() -> None:
    labels = np.repeat(np.arange(10), 100)
    parts = split_clients("part", labels, 20, np.random.default_rng(0), dirichlet_alpha=5.0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
    assert [len(np.unique(labels[part])) for part in parts] == [2] * 20
    many = split_clients("part", labels, 3, np.random.default_rng(0), classes_per_client=2)
    assert sorted(np.concatenate(many).tolist()) == list(range(1000))


def test_split_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"client_idx": [[3, 1], [], [0]], "client_classes": [[1], [], [0]]}))
    assert [part.tolist() for part in read_split_file(path, 4)] == [[3, 1], [0]]
    for wrong, message in (
        ({"client_idx": [[4]]}, "sample 4 must be"),
        ({"client_idx": [[0], [0]]}, "gives sample 0 twice"),
        ({"client_idx": [[]]}, "must give some client a sample"),
        ({"clients": []}, "must hold 'client_idx'"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(DataError, match=message):
            read_split_file(path, 4)
