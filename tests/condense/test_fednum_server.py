"""`FedNumServer`: the document's flow, end to end on small pictures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedquilt.common.randomness import generator
from fedquilt.condense import Augmentation, FedNumClient, FedNumServer, SyntheticSet
from fedquilt.condense.training import TrainingSettings, train_on
from fedquilt.errors import InvalidValueError, RunFolderError
from fedquilt.record.result import load
from run_processes import environment

SIDE, OUTPUTS = 6, 8
CLASSES = (1, 4, 6)  # labels need not be contiguous
INFO = {"name": "blobs", "channel": 1, "img_size": SIDE, "num_classes": OUTPUTS}


class Net(nn.Module):
    """A small classifier with an embedding."""

    def __init__(self, outputs: int = OUTPUTS) -> None:
        super().__init__()
        self.front = nn.Conv2d(1, 8, 3, padding=1)
        self.classifier = nn.Linear(8 * 9, outputs)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.avg_pool2d(self.front(x).relu(), 2).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.embed(x))
        return logits


def network(seed: int = 0, outputs: int = OUTPUTS) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(outputs)


def pictures(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every class is a fixed pattern under noise."""
    patterns = torch.from_numpy(np.random.default_rng(99).standard_normal((3, 1, SIDE, SIDE)))
    source = np.random.default_rng(seed)
    labels = source.integers(3, size=count)
    noise = torch.from_numpy(source.standard_normal((count, 1, SIDE, SIDE)))
    images = (patterns[torch.from_numpy(labels)] + 0.7 * noise).float()
    return images, torch.tensor(CLASSES)[torch.from_numpy(labels)]


def members(count: int = 3, kind: type[FedNumClient] = FedNumClient, **changes: Any) -> list[Any]:
    """Clients with 60 pictures each; client k lacks the class CLASSES[k % 3]."""
    found = []
    for cid in range(count):
        listed = [c for place, c in enumerate(CLASSES) if place != cid % 3]
        settings = {"min_group": 4, **changes}
        data = pictures(60, seed=cid)
        found.append(kind(cid, data, listed, INFO, 2, 5, 8, "cpu", **settings))
    return found


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*pictures(90, seed=77)), batch_size=40)


def server(clients: list[Any] | None = None, **changes: Any) -> FedNumServer:
    settings: dict[str, Any] = {
        "global_model": network(),
        "clients": members() if clients is None else clients,
        "communication_rounds": 2,
        "join_ratio": 1.0,
        "batch_size": 4,
        "model_epochs": 10,
        "ipc": 2,
        "rho": 5,
        "avg_num": 8,
        "batch_num": 16,
        "dc_iterations": 20,
        "image_lr": 0.2,
        "dataset_info": INFO,
        "test_loader": loader(),
        "eval_gap": 1,
        "init_method": "random",
        "logit_loss_type": "l2",
        "loss_computation": "avg-loss",
        "device": "cpu",
    }
    kind = changes.pop("kind", FedNumServer)
    made: FedNumServer = kind(**{**settings, **changes})
    return made


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_flow_of_the_document_learns() -> None:
    model = network()
    made = server(global_model=model, communication_rounds=3, model_epochs=40, dc_iterations=60)
    before = made.evaluate()[0]
    assert made.fit() is model
    assert [line["round"] for line in made.history] == [0, 1, 2]
    accuracies = [line["evaluate_acc"] for line in made.history]
    assert accuracies[-1] > max(0.8, before)  # chance is a third
    for line in made.history:
        assert line["time"] > 0
        assert line["epoch_avg_loss"] > 0
        assert line["clients"] == [0, 1, 2]
    images, labels = pictures(90, seed=77)
    direct = float((model(images).argmax(dim=1) == labels).float().mean())
    assert made.evaluate()[0] == pytest.approx(direct)
    assert accuracies[-1] == pytest.approx(direct)


def test_images_move_towards_the_class_means() -> None:
    """With the identity as embedding the best image is the mean of the class."""

    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(SIDE * SIDE, OUTPUTS)

        def embed(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(x.flatten(1))
            return scores

    clients = members()
    made = server(
        clients,
        global_model=Pixels(),
        communication_rounds=1,
        dc_iterations=60,
        batch_num=None,
        logit_loss_type="none",
    )
    made.fit()
    for label, images in zip(CLASSES, made.synthetic.by_class(), strict=True):
        held = torch.cat([client.get_images(label) for client in clients]).numpy()
        np.testing.assert_allclose(images.mean(dim=0), held.mean(axis=0), atol=1e-4)


def test_synthetic_set_and_classes() -> None:
    made = server()
    assert made.all_classes == CLASSES
    assert isinstance(made.synthetic, SyntheticSet)
    assert made.synthetic.images.shape == (6, 1, SIDE, SIDE)
    assert made.synthetic.labels.tolist() == [1, 1, 4, 4, 6, 6]


def test_the_same_seed_gives_the_same_run() -> None:
    first, second, other = server(seed=5), server(seed=5), server(seed=6)
    for made in (first, second, other):
        torch.manual_seed(int(torch.randint(1000, ())))  # global state decides nothing
        made.fit()
    assert torch.equal(first.synthetic.images, second.synthetic.images)
    assert torch.equal(weights(first.global_model), weights(second.global_model))
    assert not torch.equal(first.synthetic.images, other.synthetic.images)


def test_clients_can_be_used_by_another_server() -> None:
    clients = members()
    first, second = server(clients), server(clients)
    first.fit()
    second.fit()
    assert torch.equal(first.synthetic.images, second.synthetic.images)


def test_join_ratio_takes_others_in_other_rounds() -> None:
    made = server(members(10), join_ratio=0.3, communication_rounds=4, dc_iterations=1)
    expected = [client.cid for client in made.select_clients()]
    assert expected == [client.cid for client in made.select_clients()]
    made.fit()
    cohorts = [tuple(line["clients"]) for line in made.history]
    assert list(cohorts[0]) == expected
    assert all(len(set(cohort)) == 3 for cohort in cohorts)
    assert len(set(cohorts)) > 1
    assert len(server(members(3), join_ratio=0.01).select_clients()) == 1
    assert len(server(members(3), join_ratio=1).select_clients()) == 3


def test_select_clients_can_be_overridden() -> None:
    class Second(FedNumServer):
        def select_clients(self) -> list[Any]:
            return self.clients[1:2]

    made = server(kind=Second)
    made.fit()
    assert [line["clients"] for line in made.history] == [[1], [1]]

    class Foreign(FedNumServer):
        def select_clients(self) -> list[Any]:
            return members(1)

    with pytest.raises(InvalidValueError, match="must return clients of the server"):
        server(kind=Foreign).fit()


def test_classes_that_nobody_sent_keep_their_images() -> None:
    made = server(members(1), communication_rounds=1)
    assert made.all_classes == (4, 6)
    lone = FedNumClient("x", [], [1], INFO, 2, 5, 8, "cpu")
    made = server([*members(1), lone], communication_rounds=1)
    before = made.synthetic.images.clone()
    made.fit()
    assert made.all_classes == CLASSES
    assert torch.equal(made.synthetic.images[:2], before[:2])
    assert not torch.equal(made.synthetic.images[2:], before[2:])


def test_clients_that_will_send_nothing_are_an_error_before_the_first_round() -> None:
    with pytest.raises(InvalidValueError, match=r"min_group=40 must be smaller: no client"):
        server(members(min_group=40))
    unknown = Silent(9, [], [1], INFO, 2, 5, 8, "cpu")
    assert server([*members(min_group=40), unknown]).history == []


class Silent(FedNumClient):
    """What it sends is known only when it has."""

    def train(self) -> dict[str, Any]:
        return super().train()


def test_rounds_without_statistics_are_an_error(caplog: pytest.LogCaptureFixture) -> None:
    clients = [Silent(cid, [], [1, 4], INFO, 2, 5, 8, "cpu") for cid in range(2)]
    made = server(clients)
    images, before = made.synthetic.images.clone(), weights(made.global_model)
    with pytest.raises(InvalidValueError, match=r"nobody has sent statistics.*min_group"):
        made.fit()
    assert torch.equal(made.synthetic.images, images)
    assert torch.equal(weights(made.global_model), before)
    assert "nothing was sent" in caplog.text
    assert [line["epoch_avg_loss"] for line in made.history] == [None, None]
    assert [line["groups"] for line in made.history] == [0, 0]


def test_evaluation_after_training_every_gap_and_at_the_end() -> None:
    made = server(communication_rounds=5, eval_gap=2, dc_iterations=1, model_epochs=1)
    made.fit()
    evaluated = [line["evaluate_acc"] is not None for line in made.history]
    assert evaluated == [False, True, False, True, True]
    silent = server(test_loader=None, dc_iterations=1, model_epochs=1)
    silent.fit()
    assert [line["evaluate_acc"] for line in silent.history] == [None, None]
    with pytest.raises(InvalidValueError, match="test_loader=None must be"):
        silent.evaluate()


def test_a_batch_smaller_than_a_group_still_uses_one() -> None:
    made = server(batch_num=1, communication_rounds=1)
    before = made.synthetic.images.clone()
    made.fit()
    assert not torch.equal(made.synthetic.images, before)


@pytest.mark.parametrize("kind", ["wasserstein", "kl", "l2", "wasserstein_sorted", "none"])
@pytest.mark.parametrize("computation", ["avg-loss", "loss-avg"])
def test_every_loss_runs_and_lowers_the_matching_loss(kind: str, computation: str) -> None:
    losses = []
    for iterations in (1, 40):
        made = server(
            logit_loss_type=kind,
            loss_computation=computation,
            dc_iterations=iterations,
            communication_rounds=1,
            batch_num=None,
            test_loader=None,
        )
        made.fit()
        losses.append(made.history[0]["matching_loss"])
    assert losses[1] < losses[0]  # the mean over forty steps is below the first


@pytest.mark.parametrize("kind", ["random_pool", "perturbed"])
def test_other_feature_models_and_augmentation(kind: str) -> None:
    clients = members()
    made = server(
        clients, feature_model=kind, model_n=2, augmentation="crop_scale", model_epochs=30
    )
    made.fit()
    # Two models look at everything: twice the groups of one.
    alone = server(dc_iterations=1)
    alone.fit()
    assert made.history[0]["groups"] == 2 * alone.history[0]["groups"]
    assert made.history[-1]["evaluate_acc"] > 0.5


@pytest.mark.parametrize(("kind", "restarts"), [("random_pool", True), ("global", False)])
def test_where_training_begins(kind: str, restarts: bool) -> None:
    """Under random models each round trains from the first weights; else it goes on."""
    made = server(feature_model=kind, model_n=1)
    made.fit()
    fresh, images = network(), made.synthetic
    settings = TrainingSettings(epochs=10, batch_size=4, schedule="constant")
    source = generator(0, "training", 1)
    train_on(fresh, images.images, images.labels, settings, Augmentation("none"), source)
    assert torch.equal(weights(fresh), weights(made.global_model)) is restarts


def test_an_embedding_from_a_layer() -> None:
    class Plain(nn.Sequential):
        pass

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Plain(nn.Flatten(), nn.Linear(SIDE * SIDE, 16), nn.ReLU(), nn.Linear(16, OUTPUTS))
    with pytest.raises(InvalidValueError, match="Plain has no embed"):
        server(global_model=model)
    made = server(global_model=model, embed_layer="2", model_epochs=40, dc_iterations=60)
    assert made.fit() is model
    assert made.history[-1]["evaluate_acc"] > 0.5


class Own(FedNumClient):
    """Sends one row of its own for each class, without counts."""

    def train(self) -> dict[str, Any]:
        rows = {c: torch.full((1, 72), 0.5) for c in self.classes}
        scores = {c: torch.zeros(1, OUTPUTS) for c in self.classes}
        return {"classes": self.classes, "avg_features": rows, "avg_logits": scores}


def test_a_client_may_send_its_own_dictionary() -> None:
    made = server(members(kind=Own), communication_rounds=1)
    made.fit()
    assert made.history[0]["groups"] == 6  # three clients of two classes
    assert "train() of their own" in " ".join(made.statement.notes)

    class Wrong(FedNumClient):
        def train(self) -> dict[str, Any]:
            return super().train() | {"classes": [0]}

    made = server(members(kind=Wrong))
    images = made.synthetic.images.clone()
    with pytest.raises(InvalidValueError, match=r"train\(\) of client 0: class 0 must be one of"):
        made.fit()
    assert made.history == []
    assert torch.equal(made.synthetic.images, images)
    assert made._experiment.federation.tracker.total_rounds == 0


def test_a_client_that_sends_nan_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Spoilt(FedNumClient):
        def train(self) -> dict[str, Any]:
            message = super().train()
            for rows in message["avg_features"].values():
                rows[:] = torch.nan
            return message

    good = members(2)
    bad = Spoilt("bad", pictures(60, seed=9), CLASSES, INFO, 2, 5, 8, "cpu")
    spoilt, without = server([*good, bad]), server(good)
    for made in (spoilt, without):
        made.fit()
    assert torch.equal(spoilt.synthetic.images, without.synthetic.images)
    assert "client 'bad' sent NaN or infinity" in caplog.text
    alone = server([bad])
    before = weights(alone.global_model).clone()
    with pytest.raises(InvalidValueError, match="nobody has sent statistics"):
        alone.fit()
    assert torch.equal(weights(alone.global_model), before)


def test_a_round_of_nobody_passes() -> None:
    class Nobody(FedNumServer):
        def select_clients(self) -> list[Any]:
            return self.clients if self.history else []

    made = server(kind=Nobody)
    made.fit()
    groups = [line["groups"] for line in made.history]
    assert groups[0] == 0 < groups[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_clients_and_server_may_lie_on_different_devices() -> None:
    here = server()
    here.fit()
    for ours, theirs in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")):
        clients = members()
        if theirs == "cuda":
            data = [pictures(60, seed=cid) for cid in range(3)]
            clients = [
                FedNumClient(c.cid, d, c.classes, INFO, 2, 5, 8, "cuda", min_group=4)
                for c, d in zip(clients, data, strict=True)
            ]
        made = server(clients, device=ours)
        model = made.fit()
        assert made.synthetic.images.device.type == ours
        assert next(model.parameters()).device.type == "cpu"  # where it was
        assert torch.allclose(
            made.synthetic.images.cpu(), here.synthetic.images, atol=1e-2, rtol=1e-2
        )


def test_any_object_with_the_methods_is_a_client() -> None:
    class Mine:
        cid = "mine"
        classes = (4,)

        def receive_model(self, model: nn.Module) -> None:
            self.model = model

        def train(self) -> dict[str, Any]:
            images = torch.ones(3, 1, SIDE, SIDE)
            return {
                "classes": [4],
                "avg_features": {4: self.model.embed(images)},
                "avg_logits": {4: self.model(images)},
                "counts": {4: [3, 4, 5]},
            }

    made = server([Mine()], communication_rounds=1)
    made.fit()
    assert made.history[0]["groups"] == 3
    with pytest.raises(InvalidValueError, match="client 'mine' has no receive_augmentation"):
        server([Mine()], augmentation="crop")
    with pytest.raises(InvalidValueError, match="client 'mine' has no get_images"):
        server([Mine()], init_method="real_sample")


def test_the_statement_says_what_leaves() -> None:
    made = server(dc_iterations=1, model_epochs=1)
    made.fit()
    assert made.statement.epsilon_max == np.inf
    assert "class statistics" in made.statement.uncovered
    text = made.statement.as_text()
    assert "groups of at least 4 samples" in text
    assert "real_sample" not in text
    alone = server(members(min_group=1)).statement.as_text()
    assert "groups of one sample leave" in alone


def test_real_sample_takes_images_of_clients_and_says_so() -> None:
    clients = members()
    made = server(clients, init_method="real_sample", ipc=3)
    for label, images in zip(CLASSES, made.synthetic.by_class(), strict=True):
        held = torch.cat([client.get_images(label) for client in clients])
        for image in images:
            assert bool((held == image).flatten(1).all(dim=1).any())
        assert not torch.equal(images[0], images[1])
    assert "images of clients leave them" in made.statement.as_text()
    few = FedNumClient(0, pictures(9, 0), [1], INFO, 2, 5, 8, "cpu", min_group=1)
    assert len(server([few], init_method="real_sample", ipc=12).synthetic.images) == 12


class Stops(FedNumClient):
    """Fails once a countdown, shared by all, is over."""

    left = 10**9

    def train(self) -> dict[str, Any]:
        if Stops.left == 0:
            raise ConnectionError("gone")
        Stops.left -= 1
        return super().train()


@pytest.mark.parametrize("changes", [{}, {"feature_model": "random_pool", "model_n": 2}])
def test_resume_ends_where_an_uninterrupted_run_does(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    changes = {"communication_rounds": 3, "join_ratio": 0.7, **changes}
    Stops.left = 10**9
    whole = server(members(kind=Stops), **changes)
    whole.fit()
    Stops.left = 3 * changes.get("model_n", 1)  # within the second round of two clients each
    broken = server(members(kind=Stops), output_dir=tmp_path / "run", **changes)
    with pytest.raises(ConnectionError):
        broken.fit()
    assert len(broken.history) == 1
    Stops.left = 10**9
    resumed = server(members(kind=Stops), output_dir=tmp_path / "run", **changes)
    model = resumed.fit()
    assert torch.equal(resumed.synthetic.images, whole.synthetic.images)
    assert torch.equal(weights(model), weights(whole.global_model))
    timeless = [[dict(line, time=0) for line in s.history] for s in (resumed, whole)]
    assert timeless[0] == timeless[1]
    # The server that failed can go on, too.
    assert torch.equal(weights(broken.fit()), weights(whole.global_model))


def test_a_failed_round_can_be_run_again_without_a_folder() -> None:
    whole = server(members(kind=Stops))
    Stops.left = 10**9
    whole.fit()
    Stops.left = 4
    made = server(members(kind=Stops))
    with pytest.raises(ConnectionError):
        made.fit()
    Stops.left = 10**9
    made.fit()
    assert torch.equal(made.synthetic.images, whole.synthetic.images)
    assert torch.equal(weights(made.global_model), weights(whole.global_model))


def test_a_finished_folder_is_read_back(tmp_path: Path) -> None:
    made = server(output_dir=tmp_path)
    made.fit()
    again = server(output_dir=tmp_path)
    again.fit()
    assert again.history == made.history
    assert torch.equal(again.synthetic.images, made.synthetic.images)
    result = load(tmp_path, network())
    assert result.final_accuracy == made.history[-1]["evaluate_acc"]
    assert result.model is not None
    assert torch.equal(weights(result.model), weights(made.global_model))
    assert result.statement == made.statement


def test_another_run_is_not_continued(tmp_path: Path) -> None:
    server(output_dir=tmp_path, dc_iterations=1, model_epochs=1).fit()
    for changes, message in (
        ({"ipc": 3}, "ipc=2, not 3"),
        ({"global_model": network(1)}, "other weights of the global model"),
        ({"clients": members(3, seed=0)[::-1]}, "or with other clients"),
    ):
        settings = {"output_dir": tmp_path, "dc_iterations": 1, "model_epochs": 1, **changes}
        with pytest.raises(RunFolderError, match=message):
            server(**settings).fit()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"communication_rounds": 0}, "communication_rounds=0 must be >= 1"),
        ({"join_ratio": 0}, "join_ratio=0 must be > 0"),
        ({"join_ratio": 1.5}, "join_ratio=1.5 must be > 0 and <= 1"),
        ({"eval_gap": 0}, "eval_gap=0 must be >= 1"),
        ({"batch_size": 0}, "batch_size=0 must be >= 1"),
        ({"model_epochs": 0}, "model_epochs=0 must be >= 1"),
        ({"ipc": 0}, "ipc=0 must be >= 1"),
        ({"rho": -1.0}, "rho=-1.0 must be >= 0"),
        ({"avg_num": 0}, "avg_num=0 must be >= 1"),
        ({"batch_num": 0}, "batch_num=0 must be >= 1"),
        ({"dc_iterations": 0}, "dc_iterations=0 must be >= 1"),
        ({"image_lr": 0.0}, "image_lr=0.0 must be > 0"),
        (
            {"init_method": "real"},
            "init_method='real' must be one of 'random', 'smooth', 'leaves', 'real_sample'",
        ),
        ({"logit_loss_type": "auto"}, "logit_loss_type='auto' must be one of"),
        ({"loss_computation": "loss"}, "loss_computation='loss' must be one of"),
        ({"feature_model": "pool"}, "feature_model='pool' must be one of"),
        ({"model_n": 2}, "model_n=2 must be 1 with feature_model='global'"),
        ({"augmentation": "swirl"}, "augmentation family='swirl' must be one of"),
        ({"device": "cuda:99"}, "device='cuda:99' must be a device"),
        ({"seed": -1}, "seed=-1 must be >= 0"),
        ({"clients": []}, r"clients=\[\] must hold at least one client"),
        ({"clients": [object()]}, "object must have cid, classes"),
        ({"clients": members(1) + members(1)}, "cid=0 must name one client only"),
        ({"clients": [FedNumClient(0, [], [], INFO, 2, 5, 8, "cpu")]}, "at least one class"),
        ({"global_model": network(0, 5)}, r"8 scores an image.*\(2, 5\)"),
        ({"dataset_info": INFO | {"channel": 3}, "test_loader": None}, r"shape \(3, 6, 6\)"),
        ({"dataset_info": {}}, "must have the key 'channel'"),
        ({"test_loader": []}, r"batches \(images, labels\) of tensors, at least one"),
        ({"test_loader": [([1], [2])]}, r"batches \(images, labels\) of tensors"),
        ({"test_loader": iter([])}, "must be iterable again and again"),
        ({"test_loader": [(torch.zeros(1, 1, 2, 2), torch.zeros(1))]}, "test_loader with images"),
    ],
)
def test_wrong_arguments_change_nothing(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model = network()
    before = weights(model).clone()
    with pytest.raises(InvalidValueError, match=message):
        server(**{"global_model": model, "output_dir": tmp_path / "run", **changes})
    assert torch.equal(weights(model), before)
    assert not (tmp_path / "run").exists()


def test_importing_the_package_loads_nothing_above_it(tmp_path: Path) -> None:
    script = (
        "import sys, fedquilt.condense\n"
        "above = ('training_loop', 'round', 'fednum', 'problem', 'privacy')\n"
        "print(*[name for name in above if f'fedquilt.{name}' in sys.modules])\n"
        "print('safetensors' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split() == ["False"]


def test_the_folder_is_that_of_any_condensation(tmp_path: Path) -> None:
    """What the server writes is read by `load` and taken up by the command line."""
    made = server(output_dir=tmp_path / "fn")
    model = made.fit()
    finished = load(tmp_path / "fn", network())
    assert finished.synthetic is not None
    assert torch.equal(finished.synthetic.images, made.synthetic.images.detach().cpu())
    record = finished.result["condensation"]
    assert (record["ipc"], record["classes_not_sent"]) == (made.config.ipc, [])
    assert record["bytes_up"] > 0
    assert finished.model is not None
    for name, tensor in model.state_dict().items():
        assert torch.equal(finished.model.state_dict()[name], tensor)
    command = [sys.executable, "-m", "fedquilt", "condense", "--resume", str(tmp_path / "fn")]
    ended = subprocess.run(
        [*command, "--json", "--quiet"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert '"condensation"' in ended.stdout


@pytest.mark.parametrize("schedule", [None, "step"])
def test_the_model_is_trained_at_one_rate_as_in_the_document(schedule: str | None) -> None:
    """SGD with momentum 0.9 and weight decay 5e-4 (document 2.5), written out: no step of it."""
    epochs, rate = 6, 0.01
    model = network()
    given = {} if schedule is None else {"model_schedule": schedule}
    made = server(
        global_model=model, communication_rounds=1, batch_size=6, model_epochs=epochs, **given
    )
    own = network()
    made.fit()
    images, labels = made.synthetic.images.detach(), made.synthetic.labels
    speeds = [torch.zeros_like(p) for p in own.parameters()]
    for epoch in range(epochs):
        loss = nn.functional.cross_entropy(own(images), labels)
        slopes = torch.autograd.grad(loss, list(own.parameters()))
        step = rate / 10 if schedule == "step" and epoch >= epochs // 2 else rate
        with torch.no_grad():
            for p, speed, slope in zip(own.parameters(), speeds, slopes, strict=True):
                speed.mul_(0.9).add_(slope + 5e-4 * p)
                p.sub_(step * speed)
    assert torch.allclose(weights(model), weights(own), atol=1e-6)
    assert not torch.allclose(weights(model), weights(network()), atol=1e-3)


def test_it_says_who_was_in_a_round_and_how_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    """What the document prints: ids (2.2), accuracy (2.1), statistics of the round (2.6)."""
    made = server()
    made.fit()
    said = capsys.readouterr().err.splitlines()
    for number, (line, entry) in enumerate(zip(said, made.history, strict=True), start=1):
        assert line.startswith(f"round {number} of 2: clients [0, 1, 2], {entry['groups']} groups")
        assert f"accuracy {entry['evaluate_acc']:.4f}, loss {entry['epoch_avg_loss']:.4f}" in line
        assert line.endswith(f"{entry['time']:.2f} s")
    server(verbose=False).fit()
    assert capsys.readouterr().err == ""
