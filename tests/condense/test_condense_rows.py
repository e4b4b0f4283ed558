"""Rows of few bits: how far they are off, what they cost, what strangers may send."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from condense_samples import certified, condense, small

from fedquilt.condense.method import Condensation
from fedquilt.condense.statistics import (
    ROW_BLOCK,
    StatisticsTable,
    coded_width,
    decode_rows,
    encode_rows,
)
from fedquilt.errors import InvalidValueError
from fedquilt.setup.build_task import build_task
from fedquilt.setup.federation import build_method


def rows(groups: int, numbers: int, scale: float = 1.0) -> torch.Tensor:
    values = np.random.default_rng(0).normal(size=(groups, numbers)) * scale
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("bits", [8, 12])
@pytest.mark.parametrize("numbers", [1, 2, 5, ROW_BLOCK, ROW_BLOCK + 1, 3 * ROW_BLOCK - 1])
def test_a_number_is_read_to_half_a_step_of_its_block(bits: int, numbers: int) -> None:
    sent = rows(4, numbers)
    sent[:, -1] = 9.0  # the last block has a range of its own
    coded = encode_rows(sent, bits)
    assert coded.shape == (4, coded_width(numbers, bits))
    assert coded.dtype == torch.float32
    read = decode_rows(coded, numbers, bits)
    for begin in range(0, numbers, ROW_BLOCK):
        part = slice(begin, begin + ROW_BLOCK)
        step = (sent[:, part].amax(dim=1) - sent[:, part].amin(dim=1)) / (2**bits - 1)
        off = (read - sent)[:, part].abs().amax(dim=1)
        assert bool((off <= 0.5 * step + 1e-5).all())


def test_codes_are_whole_numbers_that_float32_holds() -> None:
    coded = encode_rows(rows(3, 700), 8)
    whole = coded[:, 4:]
    assert torch.equal(whole, whole.round())
    assert float(whole.min()) >= 0
    assert float(whole.max()) < 2**24


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e37])
def test_equal_tiny_and_huge_numbers_survive(scale: float) -> None:
    sent = rows(2, 40, scale) if scale else torch.full((2, 40), 7.25)
    read = decode_rows(encode_rows(sent, 8), 40, 8)
    assert bool(torch.isfinite(read).all())
    spread = float(sent.max() - sent.min())
    assert float((read - sent).abs().max()) <= spread / 255


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    sent = rows(2, 40)
    sent[1, 3] = bad
    coded = encode_rows(sent, 8)
    assert bool(torch.isfinite(coded[0]).all())
    assert not bool(torch.isfinite(coded[1]).all())


def test_plain_rows_are_as_they_were_and_other_bits_are_refused() -> None:
    sent = rows(2, 10)
    assert encode_rows(sent, 32) is sent
    assert decode_rows(sent, 10, 32) is sent
    assert encode_rows(rows(0, 10), 8).shape == (0, coded_width(10, 8))
    for wrong in (
        lambda: encode_rows(sent, 16),
        lambda: decode_rows(sent, 10, 7),
        lambda: coded_width(3, 0),
    ):
        with pytest.raises(InvalidValueError, match="must be one of 32, 12, 8"):
            wrong()
    with pytest.raises(InvalidValueError, match="row_bits=16 must be one of 32, 12, 8"):
        small(row_bits=16)
    with pytest.raises(InvalidValueError, match="row_bits=8 must be 32 with mode='certified'"):
        certified(row_bits=8)


def test_tables_of_clients_are_laid_end_to_end_and_cost_what_they_send() -> None:
    whole = torch.arange(3)
    tables = [StatisticsTable(whole, whole + 1, whole + 9, rows(3, 20), rows(3, 2))] * 2
    vector = torch.cat([table.pack(8) for table in tables])
    assert 4 * vector.numel() == 2 * tables[0].num_bytes(8)
    read = StatisticsTable.unpack(vector, 20, 2, 8)
    assert read.counts.tolist() == [9, 10, 11] * 2
    assert read.features.shape == (6, 20)
    assert float((read.features[3:] - tables[0].features).abs().max()) < 0.05
    assert tables[0].num_bytes(8) < tables[0].num_bytes()


def test_a_run_with_few_bits_counts_them_and_ends_near_the_plain_one() -> None:
    plain, coded = condense(), condense(row_bits=12)
    up = [run.result["condensation"]["bytes_up"] for run in (plain, coded)]
    assert up[1] < up[0]
    assert coded.result["metadata"]["hyperparameters"]["row_bits"] == 12
    assert coded.statement.as_text() == plain.statement.as_text()
    apart = plain.synthetic.images - coded.synthetic.images
    assert 0 < float(apart.abs().max()) < 0.05


def test_coded_rows_from_elsewhere_that_read_as_infinite_are_refused() -> None:
    config, problem = build_task(small(row_bits=8))
    method = build_method(config, problem)
    assert isinstance(method, Condensation)
    models = method.source.round_models  # type: ignore[attr-defined]
    models.open(problem.flat.read(), 0)
    whole = torch.zeros(1, dtype=torch.int64)
    table = StatisticsTable(
        whole, whole, whole + 9, rows(1, models.num_features), rows(1, models.num_logits)
    )
    vector = table.pack(8)
    assert method.objection(vector) is None
    assert method.objection(vector[:-1]) is not None
    vector[3:7] = 3e38
    assert bool(torch.isfinite(vector).all())
    assert method.objection(vector) == "means must be finite"


def test_coded_logits_that_read_as_infinite_are_refused() -> None:
    config, problem = build_task(small(row_bits=8, logit_loss_type="l2"))
    method = build_method(config, problem)
    assert isinstance(method, Condensation)
    models = method.source.round_models  # type: ignore[attr-defined]
    models.open(problem.flat.read(), 0)
    assert models.num_logits > 3
    whole = torch.zeros(1, dtype=torch.int64)
    features, logits = torch.zeros(1, models.num_features), torch.zeros(1, models.num_logits)
    vector = StatisticsTable(whole, whole, whole + 9, features, logits).pack(8)
    blocks = -(-(models.num_features + models.num_logits) // ROW_BLOCK)
    vector[3 + blocks : 3 + 2 * blocks] = 3e38  # a step that only a code above zero shows
    assert method.objection(vector) is None
    vector[-1] = 255.0
    assert bool(torch.isfinite(vector).all())
    assert method.objection(vector) == "means must be finite"
