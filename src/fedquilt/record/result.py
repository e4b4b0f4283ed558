"""What a run leaves behind: its rounds, its history, its model, its statement.

Which keys there are, and which of them are public, stands in `record/schema.py`.
"""

from __future__ import annotations

import copy
import html
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common.colors import LIGHT, identities
from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.common.formatting import format_bound
from fedquilt.config import RunConfig
from fedquilt.config.modes import mode_colors
from fedquilt.data import ImageDataset, load_condensed
from fedquilt.privacy.statement import Statement
from fedquilt.record.folder import RunFolder, finite
from fedquilt.record.schema import (
    MEASURED,
    OF_CLIENTS,
    RESULT_PUBLIC,
    ROUND_KEYS,
    ROUND_PUBLIC,
    WITHHELD,
)
from fedquilt.round import RoundRecord
from fedquilt.slices import slice_model


def as_line(record: RoundRecord, seconds: float) -> dict[str, Any]:
    """Return a round as the flat dictionary of rounds.jsonl."""
    line: dict[str, Any] = {}
    for name, key in ROUND_KEYS.items():
        if name == "seconds":
            line[name] = round(seconds, 6)
        elif key.source:
            value = getattr(record.noise if key.source == "noise" else record, name)
            if not key.sparse or (value is not None and value != []):
                line[name] = value
    if "client_budgets" in line:
        line["client_budgets"] = [line["client_budgets"].get(client) for client in record.cohort]
    return line | record.server


def split_private(
    line: dict[str, Any], looked: Collection[str] = (), withheld: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part a line into what is on the list of public keys and all the rest.

    `looked` names what an evaluation of the released model measured: under `test_`, and
    whatever the metric is called, it is public for the reason that `test_loss` is.
    What begins with one of `withheld` is not: some client made the samples.
    """

    def is_public(key: str) -> bool:
        if key.startswith(withheld):
            return False
        return key in ROUND_PUBLIC or (key in looked and key.startswith(MEASURED))

    private = {key: value for key, value in line.items() if not is_public(key)}
    public = {
        key: None if key in private else value
        for key, value in line.items()
        if key not in private or key in WITHHELD
    }
    return public, private


def published(result: dict[str, Any]) -> dict[str, Any]:
    """Return what of a bounded run's result is on the list of public keys."""
    return _listed(result, "")


def _listed(record: dict[str, Any], outer: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in record.items():
        name = outer + key
        if name in RESULT_PUBLIC or (outer == "history." and key.startswith(MEASURED)):
            kept[key] = value  # lists of the history hold what the public lines say
        elif isinstance(value, dict) and any(k.startswith(f"{name}.") for k in RESULT_PUBLIC):
            kept[key] = _listed(value, f"{name}.")
    return kept


def build_history(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Gather the rounds into the documented lists.

    Lists per round: train_loss, clip_values, noise_levels, noise_stats,
    privacy_budgets, client_participation; entries are None where a mode has no
    such thing; agg_scale where max_agg_norm has shortened an update, client_budgets (in the
    order of client_participation) where every client has its own; a condensation has
    bytes_up, bytes_down, groups, matching_loss and epoch_avg_loss beside them.  Lists per
    evaluation: test_accuracy (None where it is not measured), test_loss, what else is measured
    under `test_` and, where clients evaluate and nothing is claimed, the spread of it over clients
    under `client_`, evaluation_rounds (finished rounds, from 1), participation_stats.
    """
    lists = {name: key for name, key in ROUND_KEYS.items() if key.history}

    def gathered(listed: str, lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
        names = [name for name, key in lists.items() if key.listed == listed]
        if listed.startswith("some"):
            names = [name for name in names if any(name in line for line in lines)]
        return {lists[name].history: [line.get(name) for line in lines] for name in names}

    history = gathered("rounds", lines) | gathered("some", lines)
    if "epsilon_spent" in history:
        history["without_allowance"] = [line.get("without_allowance") for line in lines]
    history["noise_stats"] = [
        {
            "sigma": line["noise_std"],
            "noise_norm": line["noise_norm"],
            "signal_norm": line["signal_norm"],
        }
        for line in lines
    ]
    evaluated = [line for line in lines if was_evaluated(line)]
    history["evaluation_rounds"] = [line["round"] + 1 for line in evaluated]
    history |= gathered("evaluations", evaluated) | gathered("some evaluations", evaluated)
    for name in dict.fromkeys(key for line in evaluated for key in line):
        own = name.startswith(OF_CLIENTS) and name not in ROUND_KEYS
        if own or name.startswith(MEASURED):
            history.pop(name, None)  # in the order of the lines: the headline comes first
            history[name] = [line.get(name) for line in evaluated]
    return history


def was_evaluated(line: dict[str, Any]) -> bool:
    """Tell whether the model was evaluated after the round of a line."""
    return "test_loss" in line or "test_accuracy" in line or "participation_stats" in line


CUSTOM = "custom"


@dataclass(frozen=True, eq=False)
class RunResult:
    """A finished run: its record, its trained model, its statement, its folder.

    Attributes
    ----------
    result : dict
        The content of result.json: `mode`, `rounds`, `metadata` (settings, final accuracy and
        loss), `history` (lists by round and by evaluation, see `build_history`), `cohorts`,
        `joins`, `statement`; with a ledger `ledger`, on slices `slices`, of a condensation
        `condensation`; `stopped`, why the run ended before its last round.
    statement : Statement
        What may be claimed about every client: `epsilon_max`, `delta`, `is_bounded`,
        `as_text()`.
    model : nn.Module or None
        A copy of the model with the trained weights, on the CPU, in evaluation mode; None only
        when a run of somebody's own model is loaded without passing that model.
    state_dict : dict
        The trained tensors, in any case.
    folder : Path or None
        Where the run is kept; None when it was kept in memory.
    synthetic : ImageDataset or None
        The synthetic set that a condensation has grown.
    client_metrics : list of dict or None
        What each client measured last on the samples it holds back: raw, for the owner's eyes.
    for_owner : tuple of str
        What clients' data did to the run, for the owner's eyes: who holds missing values, who
        counted for nothing.
    """

    result: dict[str, Any] = field(repr=False)
    statement: Statement
    state_dict: dict[str, torch.Tensor] = field(repr=False)
    model: nn.Module | None = field(repr=False)
    folder: Path | None
    synthetic: ImageDataset | None = field(default=None, repr=False)
    client_metrics: list[dict[str, Any]] | None = field(default=None, repr=False)
    for_owner: tuple[str, ...] = field(default=(), repr=False)

    @property
    def metrics(self) -> dict[str, float]:
        """What was measured on the test set after the last round; the headline first."""
        metadata = self.result["metadata"]
        final: dict[str, float] = metadata.get("final") or {}
        first = [name for name in metadata.get("metrics", ()) if name in final]
        return {name: final[name] for name in (*first, *(n for n in final if n not in first))}

    @property
    def final_accuracy(self) -> float | None:
        """Accuracy on the test set after the last round; None where it is not measured."""
        accuracy: float | None = self.result["metadata"]["final_accuracy"]
        return accuracy

    def _repr_html_(self) -> str:
        """Return the run for a notebook: the claim first, then accuracy and settings."""
        return result_as_html(self.result, self.statement)

    def summary(self) -> dict[str, Any]:
        """Return the object that `fedquilt run --json` prints."""
        metadata = self.result["metadata"]
        own: dict[str, Any] = {
            k: self.result[k] for k in ("slices", "condensation", "ledger") if k in self.result
        }
        if self.result.get("stopped"):
            own["stopped"] = self.result["stopped"]
        return {
            "mode": self.result["mode"],
            "dataset": metadata["dataset"],
            "seed": metadata["seed"],
            "rounds": self.result["rounds"],
            "final_accuracy": metadata["final_accuracy"],
            "final_loss": metadata["final_loss"],
            "metrics": self.metrics,
            "statement": self.result["statement"],
            "output": None if self.folder is None else str(self.folder),
            **own,
        }


def load(path: str | Path, model: nn.Module | None = None) -> RunResult:
    """Load a finished run: record, statement and trained model.

    Models that fedquilt knows by name are rebuilt; for a model of your own pass
    it as `model`, and a copy with the trained weights comes back.
    """
    folder = RunFolder.open(path)
    result = folder.read_result()
    if result is None:
        raise RunFolderError(f"run folder {str(path)!r} is not finished: resume it first")
    checkpoint = folder.load_checkpoint()
    if checkpoint is None:
        raise RunFolderError(f"run folder {str(path)!r} has no checkpoint.safetensors")
    tensors, config = checkpoint.model, folder.read_config()
    statement = Statement.from_json(result["statement"])
    if config.method == "condense" and "condensation" not in result:
        raise RunFolderError(f"{folder.path / 'result.json'} lacks 'condensation'")
    if model is not None:
        rebuilt: nn.Module | None = copy.deepcopy(model)
    else:
        rebuilt = _rebuild(config, result, tensors, folder.path)
    if rebuilt is not None:
        load_tensors(rebuilt.eval(), tensors, folder.path)
    grown = folder.synthetic_path()
    synthetic = load_condensed(grown) if grown.exists() else None
    metrics = folder.read_client_metrics()
    last = metrics[max(metrics)] if metrics else None
    return RunResult(result, statement, tensors, rebuilt, folder.path, synthetic, last)


def build_result(
    config: RunConfig,
    lines: list[dict[str, Any]],
    statement: Statement,
    counts: NDArray[np.float64],
) -> dict[str, Any]:
    """Return the content of result.json."""
    history = finite(build_history(lines))
    accuracy, loss = history["test_accuracy"], history["test_loss"]
    final = {
        key.removeprefix(MEASURED): values[-1]
        for key, values in history.items()
        if key.startswith(MEASURED) and values and values[-1] is not None
    }
    return {
        "mode": config.mode,
        "rounds": len(lines),
        "metadata": {
            "dataset": config.dataset,
            "seed": config.seed,
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "target_accuracy": config.target_accuracy,
            "final_accuracy": accuracy[-1] if accuracy else None,
            "final_loss": loss[-1] if loss else None,
            "final": final,
            "hyperparameters": config.as_dict(),
        },
        "history": history,
        "cohorts": history["client_participation"],
        "joins": counts.astype(np.int64).tolist(),
        "statement": statement.as_json(),
    }


def _rebuild(
    config: RunConfig, result: dict[str, Any], tensors: dict[str, torch.Tensor], path: Path
) -> nn.Module | None:
    """Build the named model of a run anew, None for a model fedquilt does not know."""
    from fedquilt.models import make_model

    if config.model == CUSTOM:
        return None
    metadata = result["metadata"]
    try:
        shape, classes = metadata["input_shape"], metadata["num_classes"]
        width = metadata.get("model_width", "1")
        _check_size(config.model, shape, classes, tensors)
        model = make_model(config.model, shape, classes, 0)
        if width == "1":
            return model
        sample = torch.zeros(2, *shape)
        return slice_model(model, width, sample=sample, whole=config.patterns("whole"))
    except (KeyError, InvalidValueError) as error:
        raise RunFolderError(
            f"{path / 'result.json'} does not say what model this is: {error}"
        ) from error


_LARGEST_INPUT = 2**24
_MOST_TIMES = 2**12  # how much larger a model may be than its slices
_SMALL = 2**26  # values that any model of ours may have without being asked
_NEEDS_VALUES = "scatter-linear"  # computes its filters when it is made


def _check_size(
    name: str, shape: list[int], classes: int, tensors: dict[str, torch.Tensor]
) -> None:
    """Refuse to build what is much larger than what was saved: memory is taken only then."""
    from fedquilt.models import make_model

    saved = sum(tensor.numel() for tensor in tensors.values())
    if math.prod(shape) > _LARGEST_INPUT or classes > _MOST_TIMES * saved:
        raise InvalidValueError(
            f"input_shape={shape} and num_classes={classes} must be those of a model of "
            f"{saved} values"
        )
    if name == _NEEDS_VALUES or math.prod(shape) * max(classes, 1000) <= _SMALL:
        return
    with torch.device("meta"):  # shapes without memory
        made = sum(tensor.numel() for tensor in make_model(name, shape, classes, 0).parameters())
    if made > _MOST_TIMES * saved:
        raise InvalidValueError(f"its model has {made} parameters, and {saved} values were saved")


def load_tensors(module: nn.Module, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Put saved tensors into a module, whose names, types and shapes they must have."""
    wanted = module.state_dict()
    for name in wanted.keys() & tensors.keys():
        if tensors[name].dtype != wanted[name].dtype:
            raise RunFolderError(
                f"{path}: the model does not fit the saved weights: {name} is "
                f"{tensors[name].dtype} and must be {wanted[name].dtype}"
            )
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:500]
        raise RunFolderError(
            f"{path}: the model does not fit the saved weights: {reason}"
        ) from error


# A finished run in a notebook: text and inline SVG, escaped; no script.
_WIDTH, _HEIGHT = 360, 120
_GOOD, _BAD = "#00694d", "#b00020"


def result_as_html(result: Mapping[str, Any], statement: Statement) -> str:
    """Return the HTML of a result and its statement."""
    metadata, history = result["metadata"], result["history"]
    bounded = statement.is_bounded
    claim, *others = statement.as_text().splitlines()
    alone = claim.removeprefix("claim").strip()
    lifetime = lifetime_of(result, statement)
    whole = "every client, over all runs of its ledger: epsilon <= "
    head = html.escape(alone if lifetime is None else f"{whole}{format_bound(lifetime)}")
    metric, values = _headline(history)
    facts = [
        ("run", f"{metadata['dataset']}, {result['mode']}, seed {metadata['seed']}"),
        (
            "rounds",
            f"{result['rounds']}" + (f" ({result['stopped']})" if result.get("stopped") else ""),
        ),
        (f"final {metric}", _number(values[-1] if values else None)),
        *([] if lifetime is None else [("this run", alone)]),
        *((line[:11].strip(), line[11:]) for line in others),
    ]
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in facts
    )
    chart = _chart(result["mode"], metric, history.get("evaluation_rounds") or (), values)
    color = _GOOD if bounded else _BAD
    return (
        f"<div><p style='border-left:5px solid {color};padding-left:.6em'><strong>{head}</strong>"
        f"</p>{chart}<table>{rows}</table></div>"
    )


def lifetime_of(result: Mapping[str, Any], statement: Statement) -> float | None:
    """Return the worst client's epsilon over all runs of a shared ledger, until this one ended.

    None where this run is all of it.
    """
    ledger = result.get("ledger") or {}
    settings = result["metadata"].get("hyperparameters") or {}
    worst = float(ledger.get("lifetime_epsilon_max", 0.0))
    shared = settings.get("ledger") is not None and not settings.get("amplification")
    return worst if shared and worst > statement.epsilon_max * (1 + 1e-6) else None


def _headline(history: Mapping[str, Any]) -> tuple[str, Sequence[float | None]]:
    """Return what the run is judged by: its first metric, where it has none the loss."""
    keys = [key for key in history if key.startswith("test_")]
    known = [key for key in keys if any(value is not None for value in history[key] or ())]
    key = (*(key for key in known if key != "test_loss"), *known, "test_accuracy")[0]
    return key.removeprefix("test_").replace("_", " "), history.get(key) or ()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _chart(mode: str, metric: str, rounds: Sequence[float], values: Sequence[float | None]) -> str:
    """Return the metric by round as an SVG; nothing where there is nothing to draw."""
    points = [
        (float(x), float(y))
        for x, y in zip(rounds, values, strict=False)
        if y is not None and math.isfinite(y)
    ]
    if not points:
        return ""
    last = max(x for x, _ in points)
    first = min(x for x, _ in points)
    span = last - first or 1.0
    top = max(1.0 if metric == "accuracy" else 0.0, max(y for _, y in points)) or 1.0
    placed = " ".join(
        f"{30 + (x - first) / span * (_WIDTH - 40):.1f},"
        f"{_HEIGHT - 20 - y / top * (_HEIGHT - 30):.1f}"
        for x, y in points
    )
    (look,) = identities([mode], mode_colors())
    stroke = f"stroke='{LIGHT[look.color]}' stroke-width='2'"
    if look.dash:
        stroke += f" stroke-dasharray='{' '.join(map(str, look.dash))}'"
    name = html.escape(metric, quote=True)
    label = f"test {name} from round {first:.0f} to {last:.0f}, at last {points[-1][1]:.4f}"
    return (
        f"<svg role='img' aria-label='{label}' width='{_WIDTH}' height='{_HEIGHT}' "
        f"viewBox='0 0 {_WIDTH} {_HEIGHT}'>"
        f"<line x1='30' x2='{_WIDTH - 10}' y1='{_HEIGHT - 20}' y2='{_HEIGHT - 20}' stroke='#888'/>"
        f"<polyline points='{placed}' fill='none' {stroke}/>"
        f"<text x='0' y='16' font-size='11' fill='#888'>{top:.3g}</text>"
        f"<text x='0' y='{_HEIGHT - 16}' font-size='11' fill='#888'>0</text>"
        f"<text x='{_WIDTH // 2}' y='{_HEIGHT - 4}' font-size='11' fill='#888' "
        f"text-anchor='middle'>{name} by round</text></svg>"
    )
