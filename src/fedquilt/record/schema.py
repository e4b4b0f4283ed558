"""What the files of a run must hold, key by key, before anybody computes with them.

Keys that an older version did not write are known and not needed; keys that nobody computes
with are not named.  Every file says its version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedquilt.common import storage
from fedquilt.common.errors import FedquiltError, RunFolderError
from fedquilt.common.schema import (
    ANY_NUMBER,
    ANY_TEXT,
    COUNT,
    NAME,
    NUMBER,
    POSITIVE,
    TEXT,
    ListOf,
    MapOf,
    Nullable,
    Object,
    Scalar,
)

SCHEMA_VERSION = 1

_EPSILON = Scalar('a number >= 0 or "inf"', frozenset({int, float, str}), least=0, texts=("inf",))
_FLAG = Scalar("true or false", frozenset({bool}))
_STATS = MapOf(NUMBER)
_TEXTS = ListOf(TEXT)
_TIERS = MapOf(MapOf(ANY_NUMBER))

ROUND = Object(
    {
        "round": COUNT,
        "cohort": ListOf(COUNT),
        **dict.fromkeys(("train_loss", "clip_value", "epsilon", "noise_std"), ANY_NUMBER),
        **dict.fromkeys(("noise_norm", "signal_norm"), ANY_NUMBER),
    },
    {
        "test_accuracy": ANY_NUMBER,
        "test_loss": ANY_NUMBER,
        "validation_accuracy": ANY_NUMBER,
        "participation_stats": _STATS,
        "seconds": ANY_NUMBER,
        **dict.fromkeys(("bytes_up", "bytes_down", "matching_loss"), ANY_NUMBER),
        "epoch_avg_loss": ANY_NUMBER,
        "agg_scale": ANY_NUMBER,
        "client_budgets": ListOf(ANY_NUMBER),
        "tiers": _TIERS,
        **dict.fromkeys(("clipped_fraction", "without_allowance", "groups"), ANY_NUMBER),
        **dict.fromkeys(("non_finite", "absent"), Nullable(ListOf(COUNT))),
    },
)

STATEMENT = Object(
    {
        **dict.fromkeys(("unit", "adjacency", "noise_source"), TEXT),
        "delta": Scalar("a number from 0 to 1", frozenset({int, float}), least=0, most=1),
        **dict.fromkeys(("epsilon_max", "epsilon_median"), _EPSILON),
        **dict.fromkeys(("covered", "uncovered", "notes"), _TEXTS),
    }
)

_NUMBERS = ListOf(ANY_NUMBER)
_HISTORY = Object(
    {
        **dict.fromkeys(("train_loss", "clip_values", "noise_levels"), _NUMBERS),
        **dict.fromkeys(("privacy_budgets", "test_accuracy", "test_loss"), _NUMBERS),
        "client_participation": ListOf(ListOf(COUNT)),
        "evaluation_rounds": ListOf(COUNT),
    },
    {
        "noise_stats": ListOf(MapOf(ANY_NUMBER)),
        "participation_stats": ListOf(_STATS),
        **dict.fromkeys(("bytes_up", "bytes_down", "matching_loss", "epoch_avg_loss"), _NUMBERS),
        "agg_scale": _NUMBERS,
        "client_budgets": ListOf(Nullable(_NUMBERS)),
        "tiers": ListOf(Nullable(_TIERS)),
    },
)

_SETTINGS = Object(
    {},
    {
        **dict.fromkeys(("epsilon", "target_accuracy", "num_clients", "min_group"), ANY_NUMBER),
        "init_method": ANY_TEXT,
    },
)

_METADATA = Object(
    {
        "dataset": NAME,
        "seed": COUNT,
        "final_accuracy": ANY_NUMBER,
        "final_loss": ANY_NUMBER,
        "hyperparameters": _SETTINGS,
    },
    {
        "input_shape": ListOf(POSITIVE),
        "num_classes": COUNT,  # 0 where targets are no classes
        "model_width": NAME,
        "target_accuracy": ANY_NUMBER,
        "final": MapOf(ANY_NUMBER),
        "metrics": _TEXTS,
    },
)

_LEDGER = Object(
    {"ledger": TEXT, "population": TEXT, "head": TEXT},
    {"created": ANY_TEXT, "enrolled": COUNT},
)

_CONDENSATION = Object(
    {
        **dict.fromkeys(("bytes_up", "bytes_down"), COUNT),
        "seconds": ANY_NUMBER,
        "classes_not_sent": ListOf(COUNT),
    },
    {"classes_too_small": ListOf(COUNT)},
)

_COSTS = ("parameters", "bytes_up", "bytes_down", "multiply_adds")
_SLICES = Object(
    {
        "method": NAME,
        "tiers": ListOf(
            Object(
                {"width": NAME, **dict.fromkeys(("clients", *_COSTS), COUNT)},
                {"test": MapOf(ANY_NUMBER)},
            )
        ),
        "mean": Object(dict.fromkeys(_COSTS, NUMBER)),
    }
)

RESULT = Object(
    {
        "mode": NAME,
        "rounds": COUNT,
        "metadata": _METADATA,
        "history": _HISTORY,
        "statement": STATEMENT,
    },
    {
        "stopped": ANY_TEXT,
        "ledger": _LEDGER,
        "condensation": _CONDENSATION,
        "cohorts": ListOf(ListOf(COUNT)),
        "joins": ListOf(COUNT),
        "slices": _SLICES,
    },
)

ACCOUNT = Object({"ledger": TEXT, "run_id": TEXT}, {"clients": TEXT})

CLIENTS = Object(
    {"clients": TEXT, "salt": TEXT}, dict.fromkeys(("training", "test", "validation"), TEXT)
)

_MEASURED = Object({"client": COUNT}, {"name": TEXT, "width": NAME, "examples": COUNT})
CLIENT_METRICS = Object({"rounds": COUNT, "clients": ListOf(_MEASURED)})

_BASELINE = Object(
    {},
    {
        "name": NAME,
        **dict.fromkeys(("accuracy", "loss", "seconds"), ANY_NUMBER),
        **dict.fromkeys(("bytes_up", "bytes_down", "rounds"), COUNT),
        "raw": _FLAG,
        "note": TEXT,
    },
)

BASELINES = Object({"rows": MapOf(_BASELINE)}, {"wanted": Nullable(ListOf(NAME))})


def check_schema(record: Any, path: Path, wanted: int = SCHEMA_VERSION) -> None:
    """Refuse a record of another version."""
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version != wanted:
        raise RunFolderError(
            f"{path}: schema_version={version!r} must be {wanted}; "
            "it was written by another version of fedquilt or is no file of a run"
        )


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn failures to look into a run's folder into a `RunFolderError`."""
    try:
        yield
    except FedquiltError:
        raise
    except OSError as error:
        reason = storage.os_reason(error)
        raise RunFolderError(f"run folder {str(path)!r} cannot be read: {reason}") from error
