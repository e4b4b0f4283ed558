"""One run as a page shows it: what is on the public lists, and more only when it is asked for."""

from __future__ import annotations

import base64
import contextlib
import io
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.common.errors import FedquiltError
from fedquilt.config import (
    MODE_TABLE,
    RunConfig,
    build_config,
    option_fields,
    write_config_file,
)
from fedquilt.config.recipe import BESIDE
from fedquilt.privacy.feasibility import HOPELESS, WORKABLE, NoiseSoFar
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import CUSTOM, published, split_private
from fedquilt.report.runs import parts_of
from fedquilt.report.series import headline, short, shorts
from fedquilt.report.views.claim import claim_view
from fedquilt.report.views.spend import spend_view

_COLUMNS = {
    "clip": "clip_value",
    "noise": "noise_std",
    "budget": "epsilon",
    "without_allowance": "without_allowance",
    "matching_loss": "matching_loss",
    "bytes_up": "bytes_up",
    "bytes_down": "bytes_down",
    "joules": "joules",
    "clock": "clock",
    # private, unless asked for
    "noise_norm": "noise_norm",
    "signal_norm": "signal_norm",
    "train_loss": "train_loss",
    "clipped": "clipped_fraction",
    "seconds": "seconds",
}
_MEASURED = "test_"
_PLACES = ("output_dir", "data_dir", "ledger")
"""Options that say where things lie on somebody's machine."""


def run_view(path: str | Path, *, private: bool = False) -> dict[str, Any]:
    """Return a run, finished or not, as plain data.

    Parameters
    ----------
    path
        Its folder.
    private
        Show also what is for the owner only: raw measurements and where files lie.
    """
    folder = RunFolder.open(path)
    config = folder.read_config()
    lines = read_lines(folder, private=private)
    found = folder.read_result()
    result = None if found is None else (found if private else published(found))
    cohorts = [list(line.get("cohort") or ()) for line in lines]
    num_clients = _num_clients(config, result, cohorts)
    spend = spend_view(folder, cohorts, num_clients, private=private)
    return {
        "name": folder.path.name,
        "folder": str(folder.path.resolve()) if private else folder.path.name,
        "mode": config.mode,
        "summary": MODE_TABLE[config.mode].summary,
        "method": config.method,
        "dataset": config.dataset,
        "parts": parts_of(result) if result is not None else "",
        "population": None if config.ledger is None or spend is None else spend.get("population"),
        "seed": config.seed,
        "finished": result is not None,
        "rounds": len(lines),
        "planned": config.num_releases,
        "resume": None
        if result is not None
        else resume_command(config, str(folder.path.resolve()) if private else folder.path.name),
        "stopped": None if result is None else result.get("stopped"),
        "roster_is": "available" if config.amplification else "joined",
        "claim": claim_view(
            result, len(lines), config, None if spend is None else spend.get("total"), private
        ),
        "evaluation": _evaluation(lines),
        "target": short(config.target_accuracy),
        "per_round": _per_round(lines),
        "noise_ratio": _noise_ratio(folder, lines, result),
        "noise_limits": [WORKABLE, HOPELESS],
        "num_clients": num_clients,
        "cohort_sizes": [len(cohort) for cohort in cohorts],
        "roster": [encode_roster(cohort, num_clients) for cohort in cohorts],
        "joins": _joins(cohorts, num_clients),
        "spend": spend,
        "slices": None if result is None else result.get("slices"),
        "tiers": _tiers(lines),
        "condensation": None if result is None else result.get("condensation"),
        "config": _settings(config, private),
        "repeat": _repeat(config, private),
        "ledger": _ledger(result, private),
        "private": private,
    }


def read_lines(folder: RunFolder, *, private: bool) -> list[dict[str, Any]]:
    """Return the rounds so far: what is on the public list, whatever the mode claims.

    A mode without a claim writes raw measurements into the same file; they are no less
    raw for that, and shown only with `private`.  What an evaluation on test data measured is
    public whatever the metric is called; where it is not, it is not in this file.
    """
    lines = folder.peek_rounds()
    if not private:
        measured = [[key for key in line if key.startswith(_MEASURED)] for line in lines]
        return [split_private(*pair)[0] for pair in zip(lines, measured, strict=True)]
    raw = {line["round"]: line for line in folder.peek_rounds("private.jsonl")}
    return [{**line, **raw.get(line["round"], {})} for line in lines]


def _num_clients(
    config: RunConfig, result: Mapping[str, Any] | None, cohorts: Sequence[Sequence[int]]
) -> int:
    """Return how many clients there are; of an unfinished run, at least who was seen."""
    if result is not None and isinstance(result.get("joins"), list):
        return max(1, len(result["joins"]))
    seen = max((max(cohort) + 1 for cohort in cohorts if cohort), default=1)
    return max(seen, config.num_clients or 1)


def _evaluation(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the run is judged by, and the test loss, at the rounds of its evaluations."""
    looked = [line for line in lines if any(key.startswith(_MEASURED) for key in line)]
    keys = dict.fromkeys(key for line in looked for key in line if key.startswith(_MEASURED))
    metric = headline({key: [line.get(key) for line in looked] for key in keys})
    return {
        "metric": metric.removeprefix(_MEASURED),
        "rounds": [line["round"] + 1 for line in looked],
        "values": shorts(line.get(metric) for line in looked),
        "loss": shorts(line.get("test_loss") for line in looked),
    }


def _tiers(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the test accuracy of each tier's own small model by round, widest first."""
    looked = [line for line in lines if line.get("tiers")]
    widths = dict.fromkeys(width for line in looked for width in line["tiers"])
    if not widths:
        return None
    values = {
        width: shorts(line["tiers"].get(width, {}).get("accuracy") for line in looked)
        for width in widths
    }
    return {"rounds": [line["round"] + 1 for line in looked], "widths": values}


def _per_round(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns that hold anything at all."""
    columns = {name: shorts(line.get(key) for line in lines) for name, key in _COLUMNS.items()}
    return {
        name: values
        for name, values in columns.items()
        if any(value is not None for value in values)
    }


def _noise_ratio(
    folder: RunFolder, lines: Sequence[Mapping[str, Any]], result: Mapping[str, Any] | None
) -> list[Any] | None:
    """Return the noise of all rounds so far (`NoiseSoFar`) after each of them.

    Where less than the whole model is noised it is not known from the folder, and neither for a
    condensation.
    """
    config = folder.read_config()
    covered = config.is_bounded(covered=config.patterns("noise_layers") == ("all",))
    size = _noised(folder, config, result) if covered and config.method != "condense" else 0
    noise = NoiseSoFar(size)
    return shorts((noise.after([line]) for line in lines), 4) if size else None


def resume_command(config: RunConfig, place: str) -> str:
    """Return how a run that has not ended goes on; `place` is its folder."""
    if CUSTOM in (config.model, config.method, config.dataset):
        return f"fedquilt.run(..., resume={place!r})"
    command = "condense" if config.method == "condense" else "run"
    return f"fedquilt {command} --resume {shlex.quote(place)}"


def _noised(folder: RunFolder, config: RunConfig, result: Mapping[str, Any] | None) -> int:
    """Return on how many numbers the noise falls, 0 where that is not known.

    A statement names the tensors; before it, those of the package's own models are known.
    """
    saved = folder.load_checkpoint()
    own = CUSTOM in (config.model, config.method) or config.trainable != "all"
    if saved is None or (result is None and own):
        return 0
    floats = [name for name, tensor in saved.model.items() if tensor.is_floating_point()]
    names = floats if result is None else (result.get("statement") or {}).get("covered") or ()
    if not set(names) <= saved.model.keys():
        return 0
    return sum(saved.model[name].numel() for name in names)


def _joins(cohorts: Sequence[Sequence[int]], num_clients: int) -> list[int]:
    counts = [0] * num_clients
    for cohort in cohorts:
        for client in cohort:
            if 0 <= client < num_clients:
                counts[client] += 1
    return counts


def _settings(config: RunConfig, private: bool) -> list[list[Any]]:
    """Return [option, value, whether it is what the mode has by default] for every option.

    What a default follows from (`config/recipe.py`) is as it was said.
    """
    fields, values = option_fields(type(config)), config.as_dict()
    usual = {name: item.default for name, item in fields.items()}
    with contextlib.suppress(FedquiltError):  # a mode of somebody's own data may ask for more
        asked = {"mode": config.mode, "method": config.method, "dataset": config.dataset}
        usual = build_config(asked).as_dict()
        said = {name: values[name] for name in BESIDE if values.get(name) != usual.get(name)}
        usual = build_config(asked | said).as_dict() | {name: usual[name] for name in said}
    chosen = ("mode", "method", "dataset", "seed")
    return [
        [
            name,
            _shown(name, values.get(name), private),
            name not in chosen and values.get(name) == usual.get(name),
        ]
        for name in fields
    ]


def _shown(name: str, value: Any, private: bool) -> str:
    if value is None:
        return "-"
    if name in _PLACES and not private:
        return str(value) if name == "output_dir" and value == "./results" else "(a path)"
    return str(value)


def _repeat(config: RunConfig, private: bool) -> dict[str, str]:
    """Return the configuration as a file, and the command that runs it again."""
    changes: dict[str, Any] = {} if private else {"output_dir": "./results", "data_dir": None}
    if not private and config.ledger is not None:
        changes["ledger"] = "LEDGER.sqlite"
    text = io.StringIO()
    write_config_file(config.replace(**changes), text)
    command = "condense" if config.method == "condense" else "run"
    return {"toml": text.getvalue(), "command": f"fedquilt {command} --config run.toml"}


def _ledger(result: Mapping[str, Any] | None, private: bool) -> dict[str, Any] | None:
    record = None if result is None else result.get("ledger")
    if not isinstance(record, Mapping):
        return None
    return {key: value for key, value in record.items() if private or key != "ledger"}


def encode_roster(cohort: Sequence[int], num_clients: int) -> str | list[int]:
    """Return who was there: a list, or one bit a client in base64 where that is shorter."""
    members = sorted(int(client) for client in cohort)
    digits = len(str(max(1, num_clients - 1))) + 1
    if len(members) * digits <= 4 * math.ceil(num_clients / 24):
        return members
    bits = np.zeros(num_clients, dtype=np.uint8)
    bits[[client for client in members if 0 <= client < num_clients]] = 1
    return base64.b64encode(np.packbits(bits).tobytes()).decode("ascii")
