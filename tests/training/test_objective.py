"""Losses by name against torch's own, a user's losses, and how a model's answer is read."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedquilt.config.choices import LOSSES
from fedquilt.errors import InvalidValueError
from fedquilt.training.objective import Objective, auto_loss, fitted, outputs_of, own_loss

RANDOM = torch.Generator().manual_seed(2)
LOGITS = torch.randn(6, 4, generator=RANDOM)
CLASSES = torch.randint(0, 4, (6,), generator=RANDOM)
TOKENS = torch.randn(6, 5, 7, generator=RANDOM)
IDS = torch.randint(0, 7, (6, 5), generator=RANDOM)
IDS[1, 3:] = -100
NUMBERS = torch.randn(6, 4, generator=RANDOM)
YES = (NUMBERS > 0).float()


class Says(nn.Module):
    """A model that returns what it was given, whatever it is asked."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.answer


def cases() -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Outputs, targets and the loss that torch computes of them, for every name."""
    shifted = functional.cross_entropy(TOKENS[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    return {
        "cross_entropy": (LOGITS, CLASSES, functional.cross_entropy(LOGITS, CLASSES)),
        "nll": (LOGITS.log_softmax(1), CLASSES, functional.cross_entropy(LOGITS, CLASSES)),
        "token_cross_entropy": (
            TOKENS, IDS, functional.cross_entropy(TOKENS.flatten(0, 1), IDS.flatten())
        ),
        "next_token": (TOKENS, IDS, shifted),
        "binary_cross_entropy": (
            LOGITS, YES, functional.binary_cross_entropy_with_logits(LOGITS, YES)
        ),
        "mse": (LOGITS, NUMBERS, functional.mse_loss(LOGITS, NUMBERS)),
        "mae": (LOGITS, NUMBERS, functional.l1_loss(LOGITS, NUMBERS)),
        "huber": (LOGITS, NUMBERS, functional.huber_loss(LOGITS, NUMBERS)),
    }  # fmt: skip


@pytest.mark.parametrize("name", cases())
def test_a_named_loss_is_torchs(name: str) -> None:
    outputs, targets, wanted = cases()[name]
    objective = Objective(name)
    value = objective(Says(outputs), LOGITS, targets)
    assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    # samples and counts say the same, so that a padded batch can be averaged
    sums, counts = objective.of_samples(outputs, targets), objective.counts(targets)
    assert sums.shape == counts.shape == (6,)
    assert float(sums.sum() / counts.sum()) == pytest.approx(float(wanted), rel=1e-6)
    total, count, seen = objective.total(Says(outputs), LOGITS, targets)
    assert float(total / count) == pytest.approx(float(wanted), rel=1e-6)
    assert seen is outputs


def test_every_name_is_tried() -> None:
    assert {*cases(), "auto", "model"} == set(LOSSES)


def test_another_index_can_be_left_out() -> None:
    padded = IDS.clamp(min=0)
    wanted = functional.cross_entropy(TOKENS.flatten(0, 1), padded.flatten(), ignore_index=0)
    objective = Objective("token_cross_entropy", ignore_index=0)
    assert float(objective(Says(TOKENS), LOGITS, padded)) == pytest.approx(float(wanted))
    assert int(objective.counts(padded).sum()) == int((padded != 0).sum())


def test_class_probabilities_are_targets_too() -> None:
    soft = NUMBERS.softmax(1)
    objective = Objective()
    wanted = functional.cross_entropy(LOGITS, soft)
    assert float(objective(Says(LOGITS), LOGITS, soft)) == pytest.approx(float(wanted))
    assert objective.counts(soft).tolist() == [1] * 6


def test_numbers_are_never_broadcast() -> None:
    ours, theirs = fitted(torch.zeros(5, 1), torch.ones(5, dtype=torch.int64))
    assert ours.shape == theirs.shape == (5,)
    assert theirs.dtype == torch.float32
    assert fitted(torch.zeros(5), torch.ones(5, 1))[1].shape == (5,)
    with pytest.raises(InvalidValueError, match=r"\(5, 2\) must have the shape of the targets"):
        fitted(torch.zeros(5, 2), torch.ones(5))


def on_outputs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.sum(1) - targets).square()


def on_batches(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return on_outputs(model(batch[0]), batch[1]).mean()


def annotated(it: nn.Module, given: Any) -> torch.Tensor:
    return on_batches(it, given)


@pytest.mark.parametrize("loss", [on_batches, annotated, on_outputs])
def test_the_first_parameter_says_what_a_loss_is_on(loss: Any) -> None:
    objective = Objective(loss)
    assert objective.name == "custom"
    assert objective.on_batches == (loss is not on_outputs)
    wanted = on_outputs(LOGITS, CLASSES).mean()
    for made in (objective, pickle.loads(pickle.dumps(objective))):
        assert float(made(Says(LOGITS), LOGITS, CLASSES)) == pytest.approx(float(wanted))
        total, count, _ = made.total(Says(LOGITS), LOGITS, CLASSES)
        assert float(total) / int(count) == pytest.approx(float(wanted))


def test_a_loss_of_samples_is_asked_about_one_at_a_time() -> None:
    objective = Objective(on_outputs)
    assert objective.obstacle(LOGITS, CLASSES) is None
    assert torch.allclose(objective.of_samples(LOGITS, CLASSES), on_outputs(LOGITS, CLASSES))

    def against_the_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - outputs.mean(0)).square().sum(1)

    mixing = Objective(against_the_mean)
    assert mixing.of_samples(LOGITS, CLASSES).tolist() == [0.0] * 6


def test_a_loss_module_is_on_outputs_and_moves_to_the_device() -> None:
    objective = Objective(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0])))
    assert not objective.on_batches
    assert "one number for a batch" in str(objective.obstacle(LOGITS, CLASSES))
    moved = objective.to(torch.device("meta"))
    assert moved.loss.weight.device.type == "meta"  # type: ignore[union-attr]
    assert objective.loss.weight.device.type == "cpu"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("crossentropy", "loss='crossentropy' must be one of"),
        (lambda outputs: outputs.sum(), "must take two arguments"),
        (lambda a, b, c: a, "must take two arguments"),
    ],
)
def test_a_loss_that_is_none(loss: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Objective(loss)


def test_a_loss_must_return_a_tensor() -> None:
    with pytest.raises(InvalidValueError, match="must return a tensor, got float"):
        Objective(lambda outputs, targets: 0.5)(Says(LOGITS), LOGITS, CLASSES)


def test_state_in_a_loss_is_put_back() -> None:
    seen: list[int] = []

    def remembering(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return outputs.sum() * len(seen)

    objective = Objective(remembering)
    values = []
    for _ in range(3):
        objective.begin()
        values += [float(objective(Says(LOGITS), LOGITS, CLASSES)) for _ in range(2)]
    assert values[:2] == values[2:4] == values[4:]
    assert values[0] != values[1]


ANSWERS = [
    LOGITS,
    (LOGITS, NUMBERS),
    [LOGITS],
    {"logits": LOGITS, "loss": None},
    SimpleNamespace(logits=LOGITS, loss=None),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=["tensor", "tuple", "list", "dict", "object"])
def test_answers_are_read(answer: Any) -> None:
    assert outputs_of(answer) is LOGITS


@pytest.mark.parametrize("answer", [7, SimpleNamespace(loss=LOGITS), {"scores": LOGITS}, ()])
def test_other_answers_are_refused(answer: Any) -> None:
    with pytest.raises(InvalidValueError, match="must return a tensor, a tuple"):
        outputs_of(answer)


def test_the_models_own_loss() -> None:
    number = torch.tensor(3.0)
    objective = Objective("model")
    for answer in (SimpleNamespace(loss=number), {"loss": number}, (number, LOGITS)):
        assert float(objective(Says(answer), LOGITS, CLASSES)) == 3.0
    assert "one number for the whole batch" in str(objective.obstacle(LOGITS, CLASSES))
    with pytest.raises(InvalidValueError, match="needs a model that takes `labels`"):
        own_loss(LOGITS)


def test_auto_follows_the_form_of_the_targets() -> None:
    assert auto_loss(LOGITS, CLASSES) == "cross_entropy"
    assert auto_loss(LOGITS, NUMBERS) == "mse"
    assert auto_loss(TOKENS, IDS) == "token_cross_entropy"
    assert auto_loss(TOKENS.movedim(2, 1), IDS) == "cross_entropy"
    assert auto_loss(None, CLASSES) == "model"
    with pytest.raises(InvalidValueError, match="cannot tell which dimension"):
        auto_loss(torch.zeros(2, 5, 5), torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(InvalidValueError, match="needs targets of one tensor, not dict"):
        auto_loss(LOGITS, {"a": CLASSES})


def test_a_batch_of_padding_alone_counts_nothing() -> None:
    nothing = torch.full((2, 5), -100)
    objective = Objective("token_cross_entropy")
    assert objective.counts(nothing).tolist() == [0, 0]
    assert float(objective.of_samples(TOKENS[:2], nothing).sum()) == 0.0
    assert float(objective(Says(TOKENS[:2]), LOGITS, nothing)) == 0.0
