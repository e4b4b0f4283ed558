"""Feature models that the server trains on its own images, and why a class is missing."""

from __future__ import annotations

from pathlib import Path

import torch
from condense_samples import condense, small

from fedquilt.condense.method import make_condensation
from fedquilt.config import CondenseConfig
from fedquilt.data import load_dataset
from fedquilt.report import condensation_row
from fedquilt.setup.build_task import build_task
from reproduction.baselines.central import dm_images


def test_a_pool_is_trained_once_there_are_images_and_travels() -> None:
    config, problem = build_task(small(feature_model="trained_pool", trained_n=2, pool_epochs=1))
    assert isinstance(config, CondenseConfig)
    made = make_condensation(config, problem.flat.module, problem.task, problem.num_classes)
    models = made.source.round_models  # type: ignore[attr-defined]
    start = problem.flat.read().clone()
    tables = [update.delta for update in made.engine.train(start, range(3), 0, 0.0)]
    assert len(models.pool) == 0  # a seed alone decides: there are no images yet
    assert made.source.outgoing(start).numel() == 0
    made.images.step(start, torch.cat(tables))
    again = [update.delta for update in made.engine.train(start, range(3), 1, 0.0)]
    assert models.pool.shape == (2, start.numel())
    assert models.bytes_down() == 4 * 2 * start.numel() + 8
    sent = made.source.outgoing(start)
    there = make_condensation(config, problem.flat.module, problem.task, problem.num_classes)
    begun = there.source.incoming(sent)
    elsewhere = [update.delta for update in there.engine.train(begun, range(3), 1, 0.0)]
    for ours, theirs in zip(again, elsewhere, strict=True):
        assert torch.equal(ours, theirs)


def test_the_reason_why_a_class_is_missing_is_the_true_one(tmp_path: Path) -> None:
    train, _ = load_dataset("digits")
    nines = torch.nonzero(train.targets == 9).flatten().tolist()
    ones = torch.nonzero(train.targets == 1).flatten().tolist()
    others = torch.nonzero((train.targets != 9) & (train.targets != 1)).flatten().tolist()
    there = tmp_path / "there.csv"
    there.write_text("round,client\n0,0\n")
    done = condense(clients=[[*others, *ones[:2]], nines], availability=str(there), num_rounds=1)
    assert done.result["condensation"]["classes_not_sent"] == [1, 9]
    assert done.result["condensation"]["classes_too_small"] == [1]
    note = condensation_row(done.result)["note"]
    assert "the classes 1: no client holds min_group=4 samples of them" in note
    assert "the classes 9: no client that holds enough of them joined" in note
    assert condensation_row(condense().result)["note"] == ""


def test_dm_begins_with_real_images() -> None:
    config, problem = build_task(small(dc_iterations=1, num_rounds=1, image_lr=1e-12))
    assert isinstance(config, CondenseConfig)
    made, _ = dm_images(config, problem)
    for image, label in zip(made.images, made.labels, strict=True):
        apart = (problem.task.inputs - image).flatten(1).norm(dim=1)
        nearest = int(apart.argmin())
        assert float(apart[nearest]) < 1e-3
        assert int(problem.task.targets[nearest]) == int(label)
