"""Whole condensations from Python: images, traffic, statements, files, odd clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from condense_samples import WIDTH, Linear, condense, images_of, small
from torch import nn

import fedquilt
from fedquilt.common.observer import Observer
from fedquilt.data import DATASETS, condensed_info, load_condensed, load_dataset
from fedquilt.errors import InvalidValueError
from fedquilt.experiment.api import run_config, run_in_memory
from run_samples import assert_same_run, folder_of, only_folder, same_tensors

NUMBERS = 64 * WIDTH + WIDTH + 10 * WIDTH + 10  # parameters of `Linear`


def test_the_same_seed_gives_the_same_bits() -> None:
    model = Linear()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first, second = condense(model), condense(model)
    assert torch.equal(images_of(first), images_of(second))
    assert same_tensors(first.state_dict, second.state_dict)
    assert first.result["history"]["matching_loss"] == second.result["history"]["matching_loss"]
    assert same_tensors(before, dict(model.state_dict())), "the user's model is copied"
    other = condense(model, seed=1)
    assert not torch.equal(images_of(other), images_of(first))


@pytest.mark.parametrize("kind", ["random_pool", "global", "perturbed"])
def test_named_models_and_data_repeat_too(kind: str) -> None:
    config = small(feature_model=kind, model_n=1, num_rounds=1)
    first, second = run_in_memory(config), run_in_memory(config)
    assert torch.equal(images_of(first), images_of(second))
    assert same_tensors(first.state_dict, second.state_dict)
    assert images_of(first).shape == (20, 1, 8, 8)
    assert first.model is not None


def sent_classes(clients: list[Any], least: int) -> int:
    """Count the classes that are sent: held by a client with enough samples."""
    labels = load_dataset("digits")[0].targets.numpy()
    return sum(int((np.bincount(labels[np.asarray(p)]) >= least).sum()) for p in clients)


@pytest.mark.parametrize(
    ("kind", "models", "logits", "down"),
    [
        ("random_pool", 2, 0, 8),
        ("global", 1, 10, 4 * NUMBERS),
        ("perturbed", 2, 10, 4 * NUMBERS + 8),
    ],
)
def test_traffic_against_a_hand_count(kind: str, models: int, logits: int, down: int) -> None:
    clients = [range(60), range(60, 100), range(100, 500)]
    result = condense(
        clients=clients, feature_model=kind, model_n=models, min_group=6, image_lr=0.01
    )
    # At most 64 samples of a class, in groups of 64: one row a class and model.
    rows = models * sent_classes(clients, 6)
    assert rows < models * 30, "some class is too small to be sent"
    up = rows * 4 * (3 + WIDTH + logits)
    history = result.result["history"]
    assert history["groups"] == [rows] * 2
    assert history["bytes_up"] == [up] * 2
    assert history["bytes_down"] == [3 * down] * 2
    record = result.result["condensation"]
    assert (record["bytes_up"], record["bytes_down"]) == (2 * up, 6 * down)
    assert (record["ipc"], record["images"]) == (2, 20)
    assert record["seconds"] > 0


def test_smaller_groups_are_more_rows() -> None:
    clients = [range(200)]
    result = condense(clients=clients, model_n=1, avg_num=5, min_group=5, max_samples=0)
    labels = load_dataset("digits")[0].targets.numpy()[:200]
    rows = sum(max(1, count // 5) for count in np.bincount(labels) if count >= 5)
    assert result.result["history"]["groups"] == [rows] * 2


def test_join_ratio_is_the_share_that_is_asked() -> None:
    clients = [range(start, start + 40) for start in range(0, 160, 40)]
    half = condense(clients=clients, join_ratio=0.5)
    assert [len(cohort) for cohort in half.result["cohorts"]] == [2, 2]
    everybody = condense(clients=clients, join_ratio=1)
    assert everybody.result["cohorts"] == [[0, 1, 2, 3]] * 2


def test_a_class_that_nobody_holds_has_no_images() -> None:
    labels = load_dataset("digits")[0].targets.numpy()
    some = np.flatnonzero(np.isin(labels, [2, 5, 7]))
    result = condense(clients=[some[:60], some[60:120]])
    assert result.synthetic is not None
    assert result.synthetic.targets.tolist() == [2, 2, 5, 5, 7, 7]
    assert result.synthetic.num_classes == 10
    assert result.final_accuracy is not None


def test_clients_too_small_for_any_group_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"min_group=\d must be smaller: no client holds"):
        condense(clients=[[0, 1], [2, 3]], output_dir=str(tmp_path))
    assert not list(tmp_path.rglob("condensed.safetensors"))


def test_one_class_and_two() -> None:
    train, test = load_dataset("digits")
    for count in (1, 2):
        at, there = train.targets < count, test.targets < count
        result = condense(
            Linear(count),
            clients=[range(40), range(40, 80)],
            train=(train.images[at], train.targets[at]),
            test=(test.images[there], test.targets[there]),
        )
        assert images_of(result).shape == (2 * count, 1, 8, 8)
        assert torch.isfinite(images_of(result)).all()


def test_inputs_must_be_images(tmp_path: Path) -> None:
    train, test = load_dataset("digits")
    flat = [(part.images.flatten(1), part.targets) for part in (train, test)]
    with pytest.raises(InvalidValueError, match=r"inputs of shape \(64,\) must be images"):
        condense(train=flat[0], test=flat[1], output_dir=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_layer": "bod"}, r"embed_layer='bod' must be one of .*'body'"),
        ({"embed_layer": None}, r"has no embed\(x\).*embed_layer"),
        ({"augmentation": "crop_twirl"}, "augmentation='crop_twirl'|twirl"),
        ({"max_samples": 2}, "max_samples=2 must be 0"),
        ({"num_clients": 3}, "num_clients=3 must be 2"),
        ({"join_ratio": 1, "clients_per_round": 2}, "join_ratio=1 must not be given beside"),
        ({"ipcs": 3}, "unknown key 'ipcs'.*'ipc'"),
    ],
    ids=str,
)
def test_mistakes_leave_no_folder(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        condense(**changes, output_dir=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_steps_that_are_too_long_end_with_a_clear_error() -> None:
    with pytest.raises(InvalidValueError, match=r"image_lr=1e\+09 must be smaller"):
        condense(image_lr=1e9, dc_iterations=30)


def test_an_unknown_layer_type_in_a_random_pool_is_named() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))
            self.fc = nn.Linear(64, 10)

        def embed(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x.flatten(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.embed(x))  # type: ignore[no-any-return]

    with pytest.raises(InvalidValueError, match=r"no reset_parameters\(\)"):
        condense(Own(), embed_layer=None)
    result = condense(Own(), embed_layer=None, feature_model="global", model_n=None)
    assert torch.isfinite(images_of(result)).all()


def test_the_statement_claims_nothing() -> None:
    statement = condense().statement
    assert statement.epsilon_max == float("inf")
    assert statement.covered == ()
    assert statement.uncovered[0] == "class statistics"
    text = statement.as_text()
    assert "epsilon: inf, no guarantee" in text
    assert "means over groups of at least 4 samples" in text
    assert "a mean is no guarantee" in text
    assert "leave them" not in text


def test_the_statement_says_when_images_or_samples_leave() -> None:
    real = condense(init_method="real_sample").statement.as_text()
    assert "images of clients leave them and are the first synthetic images" in real
    alone = condense(min_group=1, max_samples=1, avg_num=1).statement.as_text()
    assert "groups of one sample leave the clients" in alone
    assert "no sample leaves as it is" not in alone


def test_real_samples_start_from_clients_images(tmp_path: Path) -> None:
    result = condense(init_method="real_sample", output_dir=str(tmp_path))
    first = load_condensed(folder_of(result) / "synthetic" / "round_0000.safetensors")
    train = load_dataset("digits")[0]
    for image, label in zip(first.images, first.targets, strict=True):
        same = (train.images[:500] == image).flatten(1).all(dim=1)
        assert (train.targets[:500][same] == label).any()


def test_files_of_a_run_and_loading_it(tmp_path: Path) -> None:
    config = small(output_dir=str(tmp_path), num_rounds=3, eval_every=2)
    result = run_config(config)
    folder = only_folder(tmp_path)
    assert folder == folder_of(result)
    kept = sorted(path.name for path in (folder / "synthetic").iterdir())
    assert kept == [f"round_000{number}.safetensors" for number in (0, 2, 3)]
    final = load_condensed(folder / "condensed.safetensors")
    assert torch.equal(final.images, images_of(result))
    assert torch.equal(
        load_condensed(folder / "synthetic" / "round_0003.safetensors").images, final.images
    )
    info = condensed_info(folder / "condensed.safetensors")
    assert info["about"] == {"dataset": "digits", "mode": "fednum", "seed": 0, "rounds": 3}
    assert (info["mean"], info["std"]) == (
        list(DATASETS["digits"].mean),
        list(DATASETS["digits"].std),
    )
    loaded = fedquilt.load(folder)
    assert_same_run(loaded, result)
    assert torch.equal(images_of(loaded), images_of(result))
    assert loaded.synthetic is not None
    assert loaded.synthetic.targets.tolist() == np.repeat(np.arange(10), 2).tolist()
    line = json.loads((folder / "rounds.jsonl").read_text().splitlines()[0])
    assert line["seconds"] > 0
    assert "epoch_avg_loss" not in line, "a random pool needs no model before an evaluation"
    assert result.summary()["condensation"] == result.result["condensation"]


def test_any_model_trains_on_what_was_grown(tmp_path: Path) -> None:
    result = run_config(small(output_dir=str(tmp_path)))
    made = load_condensed(folder_of(result) / "condensed.safetensors")
    test = load_dataset("digits")[1]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    halves = [range(0, 20, 2), range(1, 20, 2)]
    trained = fedquilt.run(
        *(model, made, test, halves),
        mode="fedavg",
        num_rounds=2,
        output_dir=None,
        availability="always",
    )
    assert trained.final_accuracy is not None
    assert trained.synthetic is None


def test_condensing_teaches_digits() -> None:
    learning = {"dc_iterations": 60, "model_epochs": 100, "model_lr": 0.03, "model_n": 4}
    result = run_in_memory(small(**learning))
    assert result.final_accuracy is not None
    assert result.final_accuracy > 0.4


@pytest.mark.parametrize("computation", ["avg-loss", "loss-avg"])
@pytest.mark.parametrize("logit_loss", ["l2", "kl", "wasserstein", "wasserstein_sorted", "none"])
def test_every_loss_runs(computation: str, logit_loss: str) -> None:
    result = condense(
        loss_computation=computation, logit_loss_type=logit_loss, num_rounds=1, batch_num=128
    )
    assert torch.isfinite(images_of(result)).all()


def test_an_empty_evaluation_round_is_made_up_for(tmp_path: Path) -> None:
    """The model knows the images of round 1 although nobody came to round 2."""
    there = tmp_path / "there.csv"
    there.write_text("round,client\n0,0\n1,1\n")
    late = condense(availability=str(there), num_rounds=3, eval_every=3)
    history = late.result["history"]
    assert history["client_participation"] == [[0], [1], []]
    assert history["epoch_avg_loss"][:2] == [None, None]
    assert history["epoch_avg_loss"][2] > 0
    on_time = condense(availability=str(there), num_rounds=2, eval_every=2)
    assert torch.equal(images_of(late), images_of(on_time))
    assert same_tensors(late.state_dict, on_time.state_dict)


def test_nobody_ever_comes(tmp_path: Path) -> None:
    there = tmp_path / "there.csv"
    there.write_text("round,client\n7,0\n")
    with pytest.raises(InvalidValueError, match=r"nobody has sent statistics.*min_group"):
        condense(availability=str(there), output_dir=str(tmp_path / "runs"))
    assert not list(tmp_path.rglob("condensed.safetensors"))


class Watching(Observer):
    """Remembers everything an observer can be told."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.lines: list[int] = []
        self.kept_files: list[str] = []
        self.worked: set[str] = set()

    def opened(self, config: object, folder: Path) -> None:
        self.folder = folder

    def working(self, what: str, share: float) -> None:
        assert 0 <= share <= 1 + 1e-9
        self.worked.add(what)

    def on_artifact(self, path: Path) -> None:
        assert path.exists()
        self.kept_files.append(path.name)

    def __call__(self, config: object, line: dict[str, Any]) -> None:
        self.lines.append(line["round"])


def test_an_observer_is_told_what_happens(tmp_path: Path) -> None:
    watching = Watching()
    result = condense(output_dir=str(tmp_path), observer=watching)
    assert watching.folder == result.folder
    assert watching.lines == [0, 1]
    assert watching.worked == {"looking", "matching", "training"}
    assert watching.kept_files == [f"round_000{number}.safetensors" for number in range(3)]
    assert torch.equal(images_of(result), images_of(condense())), "watching changes nothing"


def test_early_stopping_ends_with_the_images_of_its_round(tmp_path: Path) -> None:
    config = small(early_stopping=True, target_accuracy=0.001, output_dir=str(tmp_path))
    result = run_config(config)
    assert result.result["rounds"] == 1
    assert torch.equal(
        load_condensed(folder_of(result) / "synthetic" / "round_0001.safetensors").images,
        images_of(result),
    )
