"""Whole runs of other tasks than one class a sample: data, losses, optimisers, metrics, claims."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import fedquilt
from fedquilt.config import RunConfig
from fedquilt.errors import InvalidValueError
from fedquilt.report import generate_summary_table, plot_training_history
from fedquilt.report.series import headline
from fedquilt.training.task import learning_rate_at
from run_samples import assert_same_run

CLIENTS, SAMPLES, WORDS = 8, 6, 9
RANDOM = torch.Generator().manual_seed(4)
X = torch.randn(CLIENTS * SAMPLES, 5, generator=RANDOM)
NUMBERS = X[:, :1].squeeze(1) * 2
CLASSES = torch.arange(CLIENTS * SAMPLES) % 3
IDS = torch.randint(0, WORDS, (CLIENTS * SAMPLES, 7), generator=RANDOM)
PARTS = np.arange(CLIENTS * SAMPLES).reshape(CLIENTS, SAMPLES).tolist()
QUICK: dict[str, Any] = {
    "output_dir": None, "availability": "always", "clients_per_round": 1.0, "num_rounds": 2,
    "local_epochs": 1, "batch_size": 4, "eval_every": 1, "learning_rate": 0.1, "mode": "fedavg",
}  # fmt: skip
PRIVATE = {**QUICK, "mode": "certified", "noise_seed": 3, "clip_norm": 0.5, "policy": "worst_case"}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.head = nn.Linear(6, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids).cumsum(1).tanh())


def seeded(build: Any) -> Any:
    torch.manual_seed(1)
    return build()


def linear(outputs: int = 3) -> nn.Module:
    return seeded(lambda: nn.Linear(5, outputs))


def run(model: nn.Module, train: Any, test: Any, clients: Any = PARTS, **options: Any) -> Any:
    return fedquilt.run(model, train, test, clients, **{**QUICK, **options})


def test_a_regression_has_its_own_record(tmp_path: Path) -> None:
    data = (X, NUMBERS)
    done = run(
        linear(1), data, data, metrics="mae,mse", output_dir=str(tmp_path),
        **{k: v for k, v in PRIVATE.items() if k in ("mode", "clip_norm", "policy")},
    )  # fmt: skip
    assert list(done.metrics) == ["mae", "mse", "loss"], "the headline first"
    assert done.final_accuracy is None
    folder = done.folder
    result = json.loads((folder / "result.json").read_text())
    assert result["metadata"]["loss"] == "mse"
    assert result["metadata"]["metrics"] == ["mae", "mse"]
    assert result["metadata"]["final"] == pytest.approx(done.metrics)
    assert len(result["history"]["test_mae"]) == 2
    assert result["history"]["test_accuracy"] == [None, None]
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert all({"test_mae", "test_mse", "test_loss"} <= set(line) for line in lines)
    assert headline(result["history"]) == "test_mae"
    shown = generate_summary_table(
        None, result["metadata"]["final_loss"], "custom", 0, result["history"],
    )  # fmt: skip
    assert "Final MAE" in shown
    assert "Accuracy" not in shown
    path = plot_training_history(result["history"], "custom", 0, None, str(tmp_path / "a.png"))
    assert Path(path).stat().st_size > 1000
    again = fedquilt.load(folder, linear(1))
    assert again.metrics == done.metrics
    assert done.summary()["metrics"] == done.metrics


def test_a_metric_is_public_only_where_an_evaluation_measured_it() -> None:
    from fedquilt.record.result import split_private

    line = {"test_mae": 1.0, "test_own": 2.0, "train_loss": 3.0}
    public, private = split_private(line, looked=("test_mae", "train_loss"))
    assert public == {"test_mae": 1.0, "train_loss": None}
    assert private == {"test_own": 2.0, "train_loss": 3.0}


def test_resume_with_your_own_loss_and_optimiser(tmp_path: Path) -> None:
    def own(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.squeeze(1) - targets).abs().sqrt()

    def stop(config: RunConfig, line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt

    data = (X, NUMBERS)
    given = {
        **PRIVATE, "num_rounds": 4, "loss": own, "optimizer": torch.optim.Adam,
        "metrics": {"mine": lambda outputs, targets: outputs.mean()},
    }  # fmt: skip
    whole = run(linear(1), data, data, **{**given, "output_dir": str(tmp_path / "whole")})
    config = whole.result["metadata"]["hyperparameters"]
    assert (config["loss"], config["optimizer"], config["metrics"]) == ("custom",) * 3
    with pytest.raises(KeyboardInterrupt):
        run(linear(1), data, data, **{**given, "output_dir": str(tmp_path / "a")}, observer=stop)
    (folder,) = (tmp_path / "a").iterdir()
    own_parts = {key: given[key] for key in ("loss", "optimizer", "metrics")}
    done = fedquilt.run(linear(1), data, data, PARTS, resume=folder, **own_parts)
    assert_same_run(done, whole)
    assert done.metrics.keys() == {"mine", "loss"}
    for key in own_parts:
        rest = {name: part for name, part in own_parts.items() if name != key}
        with pytest.raises(InvalidValueError, match=f"{key}='custom' must be passed as an object"):
            run(linear(1), data, data, **{**QUICK, **rest, key: "custom"})


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_client_whose_samples_no_model_takes_sends_nothing(engine: str) -> None:
    """An unknown word, a class without a score: as if the client held nothing, and no word."""
    words = IDS.clone()
    words[1] = WORDS + 30
    negative = IDS.clone()
    negative[2, 3] = -7
    nobody = [[], *PARTS[1:]]
    options = {**PRIVATE, "loss": "next_token", "engine": engine}
    without = run(seeded(Words), (IDS, IDS), (IDS, IDS), nobody, **options)
    for held in (words, negative):
        done = run(seeded(Words), (held, held), (IDS, IDS), **options)
        assert_same_run(done, without)
    labels = CLASSES.clone()
    labels[0] = 3
    options = {**PRIVATE, "engine": engine}
    without = run(linear(), (X, CLASSES), (X, CLASSES), nobody, **options)
    assert_same_run(run(linear(), (X, labels), (X, CLASSES), **options), without)


def test_where_nobody_is_protected_it_is_an_error_that_names_the_sample() -> None:
    words = IDS.clone()
    words[4, 2] = WORDS
    message = r"training sample 4 holds 9 in inputs; the model takes 0\.\.8"
    with pytest.raises(InvalidValueError, match=message):
        run(seeded(Words), (words, IDS), (IDS, IDS), loss="next_token")
    with pytest.raises(InvalidValueError, match="test sample 4 holds 9 in inputs"):
        run(seeded(Words), (IDS, IDS), (words, IDS), **{**PRIVATE, "loss": "next_token"})


CARDINALITIES = (2, 50, 300)
TABLE = torch.stack([torch.arange(CLIENTS * SAMPLES) * 7 % size for size in CARDINALITIES], 1)


class Table(nn.Module):
    """An embedding a column; or one of all, in which columns begin at places of their own."""

    def __init__(self, joint: bool = False) -> None:
        super().__init__()
        sizes = (sum(CARDINALITIES),) if joint else CARDINALITIES
        self.columns = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
        self.begins = torch.tensor([0, 2, 52])
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.columns) == 1:
            return self.head(self.columns[0](x + self.begins).flatten(1))
        parts = zip(self.columns, x.unbind(1), strict=True)
        return self.head(torch.cat([table(part) for table, part in parts], 1))


@pytest.mark.parametrize("joint", [False, True])
def test_every_column_of_a_table_has_a_range_of_its_own(joint: bool) -> None:
    options = {**PRIVATE, "noise_seed": None, "engine": "sequential"}
    model, data = seeded(lambda: Table(joint)), (TABLE, CLASSES)
    for changes in ({}, options):
        run(model, data, data, **changes)  # nobody is refused
    ranges = ((0, 351), (-2, 349), (-52, 299)) if joint else ((0, 1), (0, 49), (0, 299))
    for column, (least, most) in enumerate(ranges):
        wrong = TABLE.clone()
        wrong[5, column] = most + 1
        where = f"{most + 1} in column {column} of inputs; the model takes {least}"
        message = rf"training sample 5 holds {where}\.\.{most}"
        with pytest.raises(InvalidValueError, match=message):
            run(model, (wrong, CLASSES), data)
        wrong[5, column] = most
        run(model, (wrong, CLASSES), data, num_rounds=1)


def test_who_is_left_out_is_in_the_owners_file_and_on_the_owners_screen_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = TABLE.clone()
    wrong[3 * SAMPLES + 1, 1] = 50
    nobody = [*PARTS[:3], [], *PARTS[4:]]
    options = {**PRIVATE, "engine": "sequential"}
    seen, public = [], []
    for place, (table, parts, terminal) in enumerate(
        [(TABLE, nobody, True), (wrong, PARTS, False), (wrong, PARTS, True)]
    ):
        monkeypatch.setattr(sys.stderr, "isatty", lambda there=terminal: there, raising=False)
        folder = tmp_path / str(place)
        made = seeded(Table), (table, CLASSES), (TABLE, CLASSES), parts
        done = run(*made, **{**options, "output_dir": str(folder), "progress": False})
        lines = (done.folder / "private.jsonl").read_text().splitlines()
        shown = capsys.readouterr()
        seen.append(([json.loads(line) for line in lines], shown.err))
        rounds = (done.folder / "rounds.jsonl").read_bytes()
        public.append((shown.out, rounds, done.summary()["statement"], len(done.result)))
    assert public[0] == public[1] == public[2]
    cohorts = [json.loads(line)["cohort"] for line in public[0][1].splitlines()]
    for (lines, _), left in zip(seen, ([], [3], [3]), strict=True):
        for line, cohort in zip(lines, cohorts, strict=True):
            assert cohort == list(range(CLIENTS))
            assert line.get("left_out", []) == left
            assert line["signal_norm"] > 0
    assert [("for the owner alone: 1 client " in err, ": number 3;" in err) for _, err in seen] == [
        (False, False), (False, False), (True, True),
    ]  # fmt: skip


def test_labels_from_one_get_a_hint() -> None:
    for mode, test in (("fedavg", CLASSES), ("certified", CLASSES + 1)):
        with pytest.raises(InvalidValueError, match="labels start at 0, yours at 1"):
            run(linear(), (X, CLASSES + 1), (X, test), mode=mode)


def test_a_softmax_under_cross_entropy_is_warned_of() -> None:
    model = nn.Sequential(linear(), nn.Softmax(1))
    with pytest.warns(UserWarning, match="ends in a softmax"):
        done = run(model, (X, CLASSES), (X, CLASSES))
    assert "ends in a softmax" in done.result["metadata"]["data_notes"][0]


def test_bytes_are_scaled_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pixels = (X.abs() * 80).clamp(max=255).to(torch.uint8)
    with caplog.at_level(logging.WARNING, "fedquilt"):
        done = run(linear(), (pixels, CLASSES), (pixels, CLASSES))
    assert "scaled from 0..255 to 0..1" in caplog.text
    assert "scaled from 0..255 to 0..1" in done.result["metadata"]["data_notes"][0]
    same = run(linear(), (pixels.float() / 255, CLASSES), (pixels.float() / 255, CLASSES))
    assert torch.equal(done.state_dict["weight"], same.state_dict["weight"])


def test_one_data_set_a_client_is_the_same_as_index_lists() -> None:
    whole = TensorDataset(X, CLASSES)
    own: dict[str, Any] = {f"c{i}": Subset(whole, part) for i, part in enumerate(PARTS)}
    own["c3"] = DataLoader(own["c3"], batch_size=2, shuffle=True)
    lists = run(linear(), (X, CLASSES), (X, CLASSES))
    for train in (own, list(own.values())):
        done = run(linear(), train, whole, None)
        assert torch.equal(done.state_dict["weight"], lists.state_dict["weight"])
    with pytest.raises(InvalidValueError, match="clients must say which samples of train"):
        run(linear(), (X, CLASSES), whole, None)
    with pytest.raises(InvalidValueError, match="clients must say which samples of train"):
        run(linear(), {"x": X, "labels": CLASSES}, whole, None)


@pytest.mark.parametrize("method", ["heterofl", "fjord", "depthfl", "scalefl"])
def test_methods_of_classes_say_so(method: str) -> None:
    model = nn.Sequential(linear(4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.raises(InvalidValueError, match=f"method='{method}' must be used with one class"):
        run(model, (X, NUMBERS), (X, NUMBERS), method=method, tiers="1,1/2")


@pytest.mark.parametrize("method", ["fedrolex", "dropout", "mfl", "fiarse", "smallest", "largest"])
def test_other_slices_take_any_loss(method: str) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)))
    done = run(model, (X, NUMBERS), (X, NUMBERS), method=method, tiers="1,1/2", loss="mae")
    assert math.isfinite(done.metrics["mae"])
    assert "slices" in done.result


def test_slices_of_a_model_with_named_inputs() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(5, 8), nn.Linear(5, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.head((self.left(a) + self.right(b)).relu())

    data = {"a": X, "b": X.flip(0), "labels": CLASSES}
    for method in ("heterofl", "fedrolex", "fjord"):
        done = run(seeded(Named), data, data, method=method, tiers="1,1/2")
        assert done.result["slices"]["tiers"][1]["parameters"] < 123


def test_condensation_says_that_it_needs_classes() -> None:
    images = torch.randn(CLIENTS * SAMPLES, 1, 8, 8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    settings = {"method": "condense", "num_rounds": 1, "ipc": 1, "output_dir": None}
    with pytest.raises(InvalidValueError, match="'condense' must be used with one class a sample"):
        fedquilt.run(model, (images, NUMBERS), (images, NUMBERS), PARTS, **settings)
    with pytest.raises(InvalidValueError, match="must be images"):
        fedquilt.run(linear(), (X, CLASSES), (X, CLASSES), PARTS, **settings)


@pytest.mark.parametrize(
    ("model", "targets", "options", "message"),
    [
        (linear(2), NUMBERS, {}, r"loss='mse' cannot be computed.*must have the shape"),
        (linear(), CLASSES, {"loss": "ce"}, "loss='ce' must be one of"),
        (linear(), CLASSES, {"metrics": "acuracy"}, "did you mean 'accuracy'"),
        (linear(), CLASSES, {"optimizer": "adm"}, "did you mean 'adam'"),
        (linear(), CLASSES, {"optimizer": "adam", "momentum": 0.9}, "momentum=0.9 must be left"),
        (linear(), CLASSES, {"optimizer": "nesterov"}, "needs momentum > 0"),
        (linear(), CLASSES, {"lr_schedule": "cosine", "lr_decay": 0.9}, "lr_decay=0.9 must be 1"),
        (linear(), CLASSES, {"loss": lambda outputs: outputs}, "must take two arguments"),
        (nn.Linear(4, 3), CLASSES, {}, r"must take training inputs of shape \(5,\)"),
        (nn.Flatten(0), CLASSES, {}, "no trainable parameter"),
    ],
)
def test_mistakes_are_told(
    model: nn.Module, targets: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        run(model, (X, targets), (X, targets), **options)


def test_targets_of_another_form_in_the_test_data() -> None:
    with pytest.raises(InvalidValueError, match="test targets of shape"):
        run(linear(), (X, CLASSES), (X, X))
    with pytest.raises(InvalidValueError, match=r"of torch.int64 must .* of torch.float32"):
        run(linear(1), (X, NUMBERS), (X, CLASSES))


@pytest.mark.parametrize("metric", ["accuracy", "auroc", "f1"])
def test_a_metric_of_classes_is_refused_where_targets_are_real_numbers(metric: str) -> None:
    """It would count numbers below one as the class 0: a share that means nothing."""
    with pytest.raises(InvalidValueError, match=f"'{metric}' is of classes, .* take 'mse', 'mae'"):
        run(linear(1), (X, NUMBERS), (X, NUMBERS), metrics=f"mse,{metric}")
    labels = (NUMBERS > 0).float()
    done = run(linear(1), (X, labels), (X, labels), metrics=metric)
    assert 0.0 <= done.metrics[metric] <= 1.0


HUGGING_FACE = {
    "BertForSequenceClassification": {"max_position_embeddings": 16},
    "DistilBertForSequenceClassification": {"n_layers": 1, "dim": 8, "n_heads": 2, "hidden_dim": 8},
    "GPT2LMHeadModel": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16},
    "LlamaForCausalLM": {"max_position_embeddings": 16},
    "ViTForImageClassification": {"image_size": 4, "patch_size": 2, "num_channels": 1},
}
SMALL = {
    "vocab_size": WORDS, "num_labels": 3, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_models_of_hugging_face_train_under_a_claim_as_without(name: str) -> None:
    """Little noise and no clip: along the plain update, one client less is an eighth less."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    model = seeded(lambda: kind(kind.config_class(**SMALL | HUGGING_FACE[name])))
    predicts = name in ("GPT2LMHeadModel", "LlamaForCausalLM")
    if name.startswith("ViT"):
        inputs = {"pixel_values": X[:, :4].repeat(1, 4).view(-1, 1, 4, 4)}
    else:
        inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    train = inputs, IDS if predicts else CLASSES
    quick = {
        **QUICK, "num_rounds": 1, "loss": "next_token" if predicts else "cross_entropy",
        "learning_rate": 0.2 if name.startswith("ViT") else 1.0,
    }  # fmt: skip
    claiming = {
        "mode": "certified", "noise_seed": 3, "epsilon": 1e4, "clip_norm": 2.0,
        "normalise_updates": False,
    }  # fmt: skip
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    plain, claimed = (
        nn.utils.parameters_to_vector(run(model, train, train, **quick | how).model.parameters())
        for how in ({}, claiming)
    )
    assert (plain - start).norm() > 0.05
    share = (plain - start) @ (claimed - start) / (plain - start).norm() ** 2
    assert float(share) == pytest.approx(1, abs=0.1)


def test_learning_rate_schedules() -> None:
    def rates(**options: Any) -> list[float]:
        config = RunConfig(num_rounds=6, learning_rate=1.0, **options)
        return [round(learning_rate_at(config, t), 6) for t in range(6)]

    assert rates() == [1.0] * 6
    assert rates(lr_decay=0.5) == [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert rates(lr_schedule="constant") == [1.0] * 6
    assert rates(lr_schedule="step", lr_decay=0.1, lr_step_rounds=2) == [
        1.0, 1.0, 0.1, 0.1, 0.01, 0.01,
    ]  # fmt: skip
    cosine = [round((1 + math.cos(math.pi * t / 6)) / 2, 6) for t in range(6)]
    assert rates(lr_schedule="cosine") == cosine
    assert rates(lr_warmup_rounds=3) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
