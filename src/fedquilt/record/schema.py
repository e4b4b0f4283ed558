"""Every key of a run's files, declared once: what it holds, and whether it is public.

A run that is bounded (`Mechanism.is_bounded`) publishes what is declared with a reason here:
`ROUND_KEYS` for a line of rounds.jsonl and for an observer, `RESULT_KEYS` for result.json,
`STATE_KEYS` for the arrays of a checkpoint, the declared options for config.toml.  A key without a
reason stays private, and so does a key that is not declared, so that forgetting is safe.

The checks of files that may come from a stranger, the lists of the history and what a resumed
run expects of a checkpoint follow from the same tables.  Keys that an older version did not
write are not needed.  Every file says its version.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
    Anything,
    ListOf,
    MapOf,
    Nullable,
    Object,
    Scalar,
    Schema,
)

SCHEMA_VERSION = 1

_EPSILON = Scalar('a number >= 0 or "inf"', frozenset({int, float, str}), least=0, texts=("inf",))
_FLAG = Scalar("true or false", frozenset({bool}))
_STATS = MapOf(NUMBER)
_TEXTS = ListOf(TEXT)
_TIERS = MapOf(MapOf(ANY_NUMBER))

# Why a key is public.
_JOINS = "participation, public by the adjacency of the claim"
_OPTIONS = "decided before anybody trains"
_RELEASED = "released, or computed from releases alone"
_LOOKED = "the released model, looked at on data that no client holds"
_CHARGES = "what the ledger says; charges depend on participation only"
_SHAPES = "follows from the shape of what is sent, whatever is in it"
_LINES = "what the public lines say"
_OUTSIDE = "of the program or the clock, not of the data"
_HASH = "a hash over charges and releases"


@dataclass(frozen=True)
class Key:
    """A key of a file.

    Parameters
    ----------
    schema
        What its value must be.
    public
        Why anybody may see it of a bounded run; "": its owner only.
    needed
        Whether every file has it.
    """

    schema: Schema = ANY_NUMBER
    public: str = ""
    needed: bool = False


@dataclass(frozen=True, kw_only=True)
class RoundKey(Key):
    """A key of a round's line.

    Parameters
    ----------
    source
        Where a `RoundRecord` has it: itself (`record`) or its `noise`; "": somewhere else.
    sparse
        Left out of lines in which it is None or empty.
    column
        Private, and yet in every line of a bounded run, as null.  Any other private key is left
        out, because even its being there could tell something.
    history
        The name of its list in the history; "": it has none.
    listed
        Which rounds the list is over: of every run (`rounds`), or of one in whose lines the key
        is (`some`); those with an evaluation (`evaluations`), or likewise (`some evaluations`).
    """

    source: str = ""
    sparse: bool = False
    column: bool = False
    history: str = ""
    listed: str = "rounds"


def _round_key(public: str = "", schema: Schema = ANY_NUMBER, **more: Any) -> RoundKey:
    return RoundKey(schema=schema, public=public, **more)


def _of_server(name: str, public: str) -> RoundKey:
    """Return what a server reports of a round."""
    return _round_key(public, history=name, listed="some")


_CLIENTS = ListOf(COUNT)

ROUND_KEYS: dict[str, RoundKey] = {
    "round": _round_key(_OUTSIDE, COUNT, needed=True, source="record"),
    "cohort": _round_key(
        _JOINS, _CLIENTS, needed=True, source="record", history="client_participation"
    ),
    "train_loss": _round_key(needed=True, source="record", column=True, history="train_loss"),
    "clip_value": _round_key(
        "fixed in advance, or a private quantile whose cost is charged",
        needed=True,
        source="record",
        history="clip_values",
    ),
    "epsilon": _round_key(_OPTIONS, needed=True, source="noise", history="privacy_budgets"),
    "noise_std": _round_key(
        "follows from options, charges and who answered, times agg_scale where there is one",
        needed=True,
        source="noise",
        history="noise_levels",
    ),
    "noise_norm": _round_key(needed=True, source="noise", column=True),
    "signal_norm": _round_key(needed=True, source="noise", column=True),
    "clipped_fraction": _round_key(source="noise", column=True),
    "agg_scale": _round_key(
        "max_agg_norm over the norm of the noised mean: " + _RELEASED,
        source="noise",
        sparse=True,
        history="agg_scale",
        listed="some",
    ),
    "client_budgets": _round_key(
        schema=ListOf(ANY_NUMBER),
        source="noise",
        sparse=True,
        history="client_budgets",
        listed="some",
    ),
    "non_finite": _round_key(schema=Nullable(_CLIENTS), source="record", column=True),
    "without_allowance": _round_key(_CHARGES, source="record"),
    "absent": _round_key(
        "who was asked and did not answer in time: " + _JOINS,
        Nullable(_CLIENTS),
        source="record",
        sparse=True,
    ),
    # How long clients take tells how much they hold.
    "seconds": _round_key(column=True),
    "bytes_up": _of_server("bytes_up", _SHAPES),
    "bytes_down": _of_server("bytes_down", _SHAPES),
    "joules": _of_server("joules", "participation times a table that was given: " + _JOINS),
    "clock": _of_server("clock", _OPTIONS),
    "groups": _of_server("groups", ""),
    "matching_loss": _of_server("matching_loss", _RELEASED),
    "epoch_avg_loss": _of_server("epoch_avg_loss", _RELEASED),
    "epsilon_spent": _round_key(_CHARGES, Anything(), history="epsilon_spent", listed="some"),
    "test_accuracy": _round_key(_LOOKED, history="test_accuracy", listed="evaluations"),
    "test_loss": _round_key(_LOOKED, history="test_loss", listed="evaluations"),
    "participation_stats": _round_key(
        _JOINS, _STATS, history="participation_stats", listed="evaluations"
    ),
    "validation_accuracy": _round_key(_LOOKED),
    # What clients measured; the raw ones stand only in lines of modes that claim nothing.
    **{
        name: _round_key(public, Anything(), history=name, listed="some evaluations")
        for name, public in {
            "client_accuracy": "",
            "client_accuracy_worst_decile": "",
            "client_accuracy_gini": "",
            "noised_client_accuracy": "a noised mean of the clients' own measures, whose cost is "
            "charged",
            "noised_client_accuracy_std": "follows from options, charges and the noised mean",
        }.items()
    },
    "tiers": _round_key(
        "the slices of the released model that tiers hold, looked at on test data",
        _TIERS,
        history="tiers",
        listed="some evaluations",
    ),
    # What an observer is told beside the line.
    "noise_to_signal": _round_key("under a claim: follows from options and charges", Anything()),
    "schema_version": _round_key(_OUTSIDE, Anything()),
}

MEASURED = "test_"
"""How the keys begin of what a run measures on the test data, whatever the metric is called."""

OF_CLIENTS = "client_"
"""How the keys begin of the spread over clients of what each measures on its own samples, whatever
the metric is called: `client_auroc`, `client_auroc_worst_decile`, `client_auroc_gini`.  They are
declared for accuracy alone, private like all that is not declared."""

ROUND_PUBLIC = {name: key.public for name, key in ROUND_KEYS.items() if key.public}
"""Keys of a round's line that anybody may see of a bounded run, and why."""
WITHHELD = tuple(name for name, key in ROUND_KEYS.items() if key.column)
"""Columns of every line: null where they are withheld."""


def _object(keys: Mapping[str, Key]) -> Object:
    """Return what an object of these keys must be."""
    return Object(
        {name: key.schema for name, key in keys.items() if key.needed},
        {name: key.schema for name, key in keys.items() if not key.needed},
    )


ROUND = _object(ROUND_KEYS)

STATEMENT = Object(
    {
        **dict.fromkeys(("unit", "adjacency", "noise_source"), TEXT),
        "delta": Scalar("a number from 0 to 1", frozenset({int, float}), least=0, most=1),
        **dict.fromkeys(("epsilon_max", "epsilon_median"), _EPSILON),
        **dict.fromkeys(("covered", "uncovered", "notes"), _TEXTS),
    }
)


def _history_key(key: RoundKey) -> Key:
    """Return the list that the history has of a key of lines."""
    some = key.listed.startswith("some")
    lacks = some and key.schema is not ANY_NUMBER  # which may be null anyway
    schema = ListOf(Nullable(key.schema) if lacks else key.schema)
    shown = key.public or key.column  # a column of a bounded run is a list of nulls
    # Older versions did not list how often clients had joined.
    needed = not some and key.schema is not _STATS
    return Key(schema, _LINES if shown else "", needed)


_HISTORY = {
    **{key.history: _history_key(key) for key in ROUND_KEYS.values() if key.history},
    "without_allowance": Key(ListOf(ANY_NUMBER), _LINES),
    "noise_stats": Key(ListOf(MapOf(ANY_NUMBER)), _LINES),
    "evaluation_rounds": Key(_CLIENTS, _LINES, needed=True),
}

_SETTINGS = Object(
    {},
    {
        **dict.fromkeys(("epsilon", "target_accuracy", "num_clients", "min_group"), ANY_NUMBER),
        "init_method": ANY_TEXT,
    },
)

_METADATA = {
    "dataset": Key(NAME, _OPTIONS, needed=True),
    "seed": Key(COUNT, _OPTIONS, needed=True),
    "timestamp": Key(Anything(), _OUTSIDE),
    "target_accuracy": Key(ANY_NUMBER, _OPTIONS),
    "final_accuracy": Key(ANY_NUMBER, _LOOKED, needed=True),
    "final_loss": Key(ANY_NUMBER, _LOOKED, needed=True),
    "hyperparameters": Key(_SETTINGS, _OPTIONS, needed=True),
    "input_shape": Key(ListOf(POSITIVE), _SHAPES),
    # 0 where targets are no classes
    "num_classes": Key(COUNT, "the model's, public knowledge"),
    "model_width": Key(NAME, _OPTIONS),
    "loss": Key(Anything(), _OPTIONS),
    "metrics": Key(_TEXTS, _OPTIONS),
    "final": Key(MapOf(ANY_NUMBER), _LOOKED),
    "parts": Key(ANY_TEXT, "of the code and of shapes, whatever the samples are"),
    "data_notes": Key(Anything(), "said of types and public outputs, whatever the values are"),
}

_LEDGER = {
    "ledger": Key(TEXT, _OUTSIDE, needed=True),
    "population": Key(TEXT, "the name of the clients, or a digest of sample numbers", needed=True),
    "allowance": Key(Anything(), _OPTIONS),
    "delta": Key(Anything(), _OPTIONS),
    "adjacency": Key(Anything(), _OPTIONS),
    "created": Key(ANY_TEXT, _CHARGES),
    "enrolled": Key(COUNT, _CHARGES),
    "run_id": Key(Anything(), _OUTSIDE),
    "lifetime_epsilon_max": Key(Anything(), _CHARGES),
    "head": Key(TEXT, _HASH, needed=True),
}

_CONDENSATION = {
    "ipc": Key(Anything(), _OPTIONS),
    "images": Key(Anything(), _OPTIONS),
    "bytes_up": Key(COUNT, _LINES, needed=True),
    "bytes_down": Key(COUNT, _LINES, needed=True),
    "seconds": Key(ANY_NUMBER, _LINES, needed=True),
    "classes_not_sent": Key(_CLIENTS, "none: noise hides whether a class was sent", needed=True),
    "classes_too_small": Key(_CLIENTS),
}

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

# Objects whose keys are public one by one, and what else stands in result.json.
_PARTS = {
    "metadata": _METADATA,
    "history": _HISTORY,
    "ledger": _LEDGER,
    "condensation": _CONDENSATION,
}
RESULT_KEYS: dict[str, Key] = {
    "schema_version": Key(Anything(), _OUTSIDE),
    "mode": Key(NAME, _OPTIONS, needed=True),
    "rounds": Key(
        COUNT,
        "the rounds that were run: options, allowances and the released model decide",
        needed=True,
    ),
    "stopped": Key(ANY_TEXT, "why there were no more: allowances, or the released model"),
    "metadata": Key(_object(_METADATA), needed=True),
    "history": Key(_object(_HISTORY), needed=True),
    "ledger": Key(_object(_LEDGER)),
    "condensation": Key(_object(_CONDENSATION)),
    "cohorts": Key(ListOf(_CLIENTS), _JOINS),
    "joins": Key(_CLIENTS, _JOINS),
    "statement": Key(STATEMENT, "the claim itself", needed=True),
    "slices": Key(
        _SLICES,
        "who holds which slice is chosen without looking at data; what it scores: test data",
    ),
}
RESULT = _object(RESULT_KEYS)
RESULT_PUBLIC = {
    **{name: key.public for name, key in RESULT_KEYS.items() if key.public},
    **{
        f"{part}.{name}": key.public
        for part, keys in _PARTS.items()
        for name, key in keys.items()
        if key.public
    },
}
"""Keys of result.json, `outer.inner` by name; what stands below a named one is public too."""


Limits = Callable[[int], tuple[float, float]]
"""The least and the largest value after so many rounds."""


@dataclass(frozen=True)
class StateKey:
    """An array of a checkpoint's state.

    Parameters
    ----------
    public
        Why anybody may see it of a bounded run; "": its owner only.
    form
        `fixed`: type and shape are those before the first round; `vector`: floats of the size of
        the model; `step`: of the size of what the server's step is given.
    limits
        What its values may be.
    """

    public: str = ""
    form: str = "fixed"
    limits: Limits | None = None


def _rounds_so_far(rounds: int) -> tuple[float, float]:
    return 0, rounds


def _last_round(rounds: int) -> tuple[float, float]:
    return -math.inf, rounds


def _amount(rounds: int) -> tuple[float, float]:
    return 0, math.inf


STATE_KEYS: dict[str, StateKey] = {
    "fingerprint": StateKey(),
    "weights": StateKey(_RELEASED, "vector"),
    "tracker.total_rounds": StateKey(_JOINS, limits=lambda rounds: (rounds, rounds)),
    "tracker.participation_count": StateKey(_JOINS, limits=_rounds_so_far),
    "tracker.ema_value": StateKey(_JOINS, limits=_amount),
    "tracker.spent": StateKey(_JOINS, limits=_amount),
    "tracker.level": StateKey(_JOINS, limits=lambda rounds: (-1, sys.float_info.max)),
    "tracker.ema_round": StateKey(_JOINS, limits=_last_round),
    "mechanism.last_join": StateKey(_JOINS, limits=_last_round),
    "mechanism.nominal_epsilon": StateKey(_JOINS, limits=_amount),
    "mechanism.squared_gdp": StateKey(_CHARGES, limits=_amount),
    "mechanism.bound": StateKey(_OPTIONS, limits=_amount),
    "mechanism.quantile_bound": StateKey(
        "a private quantile whose cost is charged",
        limits=lambda rounds: (sys.float_info.min, sys.float_info.max),
    ),
    "mechanism.clipper.clip_value": StateKey(),
    "account.spent": StateKey(_CHARGES, limits=_amount),
    "server.first": StateKey(_RELEASED, "step"),
    "server.second": StateKey(_RELEASED, "step"),
    "late.sum": StateKey(_RELEASED, "vector"),
    "server.control": StateKey(_RELEASED, "step"),
    "server.images": StateKey(_RELEASED),
    "server.means_total": StateKey(_RELEASED),
    "server.head": StateKey(_RELEASED),
    "server.behind": StateKey("rounds so far", limits=lambda rounds: (-1, rounds)),
    "server.seen": StateKey("rounds so far", limits=_rounds_so_far),
}
"""Arrays of which something is known before they are loaded; a user's own part may have others."""

CHECKPOINT_PUBLIC: dict[str, str] = {
    "schema_version": _OUTSIDE,
    "rounds": _OUTSIDE,
    "config": "a digest of config.toml",
    "ledger_head": _HASH,
    "run_id": _OUTSIDE,
    "model/*": _RELEASED,
    **{f"state/{name}": key.public for name, key in STATE_KEYS.items() if key.public},
}
"""Names in the checkpoint: metadata, the model's tensors (`model/*`), state arrays."""

OWNER_FILES: dict[str, str] = {
    "private.jsonl": "raw measurements",
    "nodes.jsonl": "when each Flower node answered, what was refused of it, what it used",
    "ledger.json": "a digest of what clients hold",
    "ledger.sqlite.names.json": "what people call the clients",
    "clients.json": "digests of what clients hold",
    "client_metrics.jsonl": "what each client measures on its own samples",
    "client_vectors-*.safetensors": "what clients keep from round to round",
    "baselines.json": "computed from raw data",
    "monitor.jsonl": "what rounds and tiers used: how long clients take tells how much they hold",
    "monitor.png": "the same, drawn",
}
"""Files of a bounded run for its owner only, mode 0600."""

_BASIS = Object(
    {
        "sum": TEXT,
        "sensitivity": Nullable(NUMBER),
        **dict.fromkeys(("own", "digests", "doubts", "beliefs"), _TEXTS),
    }
)
ACCOUNT = Object({"ledger": TEXT, "run_id": TEXT}, {"clients": TEXT, "basis": _BASIS})

CLIENTS = Object(
    {"clients": TEXT, "salt": TEXT},
    dict.fromkeys(("held", "begins", "tested", "training", "test", "validation"), TEXT),
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


ATTACKS = Object(
    {},
    {
        "inversion": Object(
            {"client": COUNT, "images": COUNT, "psnr": MapOf(NUMBER), "blank": NUMBER, "png": TEXT}
        ),
        "membership": ListOf(
            Object(
                {
                    "attack": NAME,
                    **dict.fromkeys(("auc", "allowed_auc"), NUMBER),
                    **dict.fromkeys(("right_alarms", "allowed_alarms"), MapOf(NUMBER)),
                    **dict.fromkeys(("members", "others"), COUNT),
                }
            )
        ),
    },
)


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
