"""What a run leaves behind: its rounds, its history, its model, its statement.

In a run that is bounded (`Mechanism.is_bounded`) only what the lists below name is public:
`ROUND_PUBLIC` for a line of rounds.jsonl and for an observer, `RESULT_PUBLIC`
for result.json, `CHECKPOINT_PUBLIC` for the checkpoint, the declared options for
config.toml.  Whatever is not on a list stays private, so that forgetting is safe.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.config import RunConfig
from fedquilt.data import ImageDataset, load_condensed
from fedquilt.privacy.statement import Statement
from fedquilt.record.folder import RunFolder, finite
from fedquilt.round import RoundRecord
from fedquilt.slices import slice_model

_PER_ROUND = {
    "train_loss": "train_loss",
    "clip_values": "clip_value",
    "noise_levels": "noise_std",
    "privacy_budgets": "epsilon",
    "client_participation": "cohort",
}


# What a condensing server says of its rounds.
_SERVER = ("bytes_up", "bytes_down", "groups", "matching_loss", "epoch_avg_loss")

# What clients measured; the raw ones stand only in lines of modes that claim nothing.
_BY_CLIENTS = (
    *("client_accuracy", "client_accuracy_worst_decile", "client_accuracy_gini"),
    *("noised_client_accuracy", "noised_client_accuracy_std"),
)

_JOINS = "participation, public by the adjacency of the claim"
_OPTIONS = "decided before anybody trains"
_RELEASED = "released, or computed from releases alone"
_LOOKED = "the released model, looked at on data that no client holds"
_CHARGES = "what the ledger says; charges depend on participation only"
_SHAPES = "follows from the shape of what is sent, whatever is in it"
_LINES = "what the public lines say"
_OUTSIDE = "of the program or the clock, not of the data"

# Keys of a round's line that anybody may see of a bounded run, and why.
ROUND_PUBLIC: dict[str, str] = {
    "schema_version": _OUTSIDE,
    "round": _OUTSIDE,
    "cohort": _JOINS,
    "absent": "who was asked and did not answer in time: " + _JOINS,
    "participation_stats": _JOINS,
    "clip_value": "fixed in advance, or a private quantile whose cost is charged",
    "epsilon": _OPTIONS,
    "noise_std": "follows from options and charges, times agg_scale where there is one",
    "agg_scale": "max_agg_norm over the length of the noised mean: " + _RELEASED,
    "without_allowance": _CHARGES,
    "epsilon_spent": _CHARGES,
    "test_accuracy": _LOOKED,
    "test_loss": _LOOKED,
    "validation_accuracy": _LOOKED,
    "tiers": "the slices of the released model that tiers hold, looked at on test data",
    "noised_client_accuracy": "a noised mean of the clients' own measures, whose cost is charged",
    "noised_client_accuracy_std": "follows from options, charges and the noised mean",
    # what an observer is told beside the line
    "noise_to_signal": "under a claim: follows from options and charges",
    # what a server reports
    "bytes_up": _SHAPES,
    "bytes_down": _SHAPES,
    "matching_loss": _RELEASED,
    "epoch_avg_loss": _RELEASED,
}

# What a run measures on the test data, whatever it is called: see `split_private`.
_MEASURED = "test_"

# Columns of every line: null where they are withheld.  Any other private key is left out,
# because even its being there could tell something.
WITHHELD = (
    "train_loss",
    "noise_norm",
    "signal_norm",
    "clipped_fraction",
    "non_finite",
    "seconds",  # how long clients take tells how much they hold
)

# Keys of result.json, `outer.inner` by name; what stands below a named one is public too.
RESULT_PUBLIC: dict[str, str] = {
    "schema_version": _OUTSIDE,
    "mode": _OPTIONS,
    "rounds": "the rounds that were run: options, allowances and the released model decide",
    "stopped": "why there were no more: allowances, or the released model",
    "metadata.dataset": _OPTIONS,
    "metadata.seed": _OPTIONS,
    "metadata.timestamp": _OUTSIDE,
    "metadata.target_accuracy": _OPTIONS,
    "metadata.final_accuracy": _LOOKED,
    "metadata.final_loss": _LOOKED,
    "metadata.hyperparameters": _OPTIONS,
    "metadata.input_shape": _SHAPES,
    "metadata.num_classes": "the model's, public knowledge",
    "metadata.model_width": _OPTIONS,
    "metadata.loss": _OPTIONS,
    "metadata.metrics": _OPTIONS,
    "metadata.final": _LOOKED,
    "metadata.parts": "of the code and of shapes, whatever the samples are",
    "metadata.data_notes": "said of types and public outputs, whatever the values are",
    "history.train_loss": _LINES,
    "history.clip_values": _LINES,
    "history.noise_levels": _LINES,
    "history.noise_stats": _LINES,
    "history.privacy_budgets": _LINES,
    "history.client_participation": _LINES,
    "history.evaluation_rounds": _LINES,
    "history.test_accuracy": _LINES,
    "history.test_loss": _LINES,
    "history.participation_stats": _LINES,
    "history.epsilon_spent": _LINES,
    "history.without_allowance": _LINES,
    "history.agg_scale": _LINES,
    "history.tiers": _LINES,
    "history.noised_client_accuracy": _LINES,
    "history.noised_client_accuracy_std": _LINES,
    "history.bytes_up": _LINES,
    "history.bytes_down": _LINES,
    "history.matching_loss": _LINES,
    "history.epoch_avg_loss": _LINES,
    "cohorts": _JOINS,
    "joins": _JOINS,
    "statement": "the claim itself",
    "slices": "who holds which slice is chosen without looking at data; what it scores: test data",
    "condensation.ipc": _OPTIONS,
    "condensation.images": _OPTIONS,
    "condensation.bytes_up": _LINES,
    "condensation.bytes_down": _LINES,
    "condensation.seconds": _LINES,
    "condensation.classes_not_sent": "none: noise hides whether a class was sent",
    "ledger.ledger": _OUTSIDE,
    "ledger.population": "the name of the clients, or a digest of sample numbers",
    "ledger.allowance": _OPTIONS,
    "ledger.delta": _OPTIONS,
    "ledger.adjacency": _OPTIONS,
    "ledger.created": _CHARGES,
    "ledger.enrolled": _CHARGES,
    "ledger.run_id": _OUTSIDE,
    "ledger.lifetime_epsilon_max": _CHARGES,
    "ledger.head": "a hash over charges and releases",
}

# Names in the checkpoint: metadata, the model's tensors (`model/*`), state arrays.
CHECKPOINT_PUBLIC: dict[str, str] = {
    "schema_version": _OUTSIDE,
    "rounds": _OUTSIDE,
    "config": "a digest of config.toml",
    "ledger_head": "a hash over charges and releases",
    "run_id": _OUTSIDE,
    "model/*": _RELEASED,
    "state/weights": _RELEASED,
    "state/tracker.total_rounds": _JOINS,
    "state/tracker.participation_count": _JOINS,
    "state/tracker.ema_value": _JOINS,
    "state/tracker.ema_round": _JOINS,
    "state/mechanism.last_join": _JOINS,
    "state/mechanism.quantile_bound": "a private quantile whose cost is charged",
    "state/mechanism.nominal_epsilon": _JOINS,
    "state/mechanism.squared_gdp": _CHARGES,
    "state/mechanism.bound": _OPTIONS,
    "state/account.spent": _CHARGES,
    "state/server.first": _RELEASED,
    "state/server.second": _RELEASED,
    "state/server.images": _RELEASED,
    "state/server.means_total": _RELEASED,
    "state/server.head": _RELEASED,
    "state/server.seen": "rounds so far",
    "state/server.behind": "rounds so far",
}

# Files of a bounded run for its owner only, mode 0600.
OWNER_FILES: dict[str, str] = {
    "private.jsonl": "raw measurements",
    "nodes.jsonl": "when each Flower node answered, what was refused of it, what it used",
    "ledger.json": "a digest of what clients hold",
    "clients.json": "digests of what clients hold",
    "client_metrics.jsonl": "what each client measures on its own samples",
    "baselines.json": "computed from raw data",
    "monitor.jsonl": "what rounds and tiers used: how long clients take tells how much they hold",
    "monitor.png": "the same, drawn",
}


def as_line(record: RoundRecord, seconds: float) -> dict[str, Any]:
    """Return a round as the flat dictionary of rounds.jsonl."""
    return {
        "round": record.round,
        "cohort": record.cohort,
        "train_loss": record.train_loss,
        "clip_value": record.clip_value,
        "epsilon": record.noise.epsilon,
        "noise_std": record.noise.noise_std,
        "noise_norm": record.noise.noise_norm,
        "signal_norm": record.noise.signal_norm,
        "clipped_fraction": record.noise.clipped_fraction,
        **({} if record.noise.agg_scale is None else {"agg_scale": record.noise.agg_scale}),
        **_client_budgets(record),
        "non_finite": record.non_finite,
        "without_allowance": record.without_allowance,
        **({"absent": record.absent} if record.absent else {}),
        "seconds": round(seconds, 6),
        **record.server,
    }


def _client_budgets(record: RoundRecord) -> dict[str, list[float | None]]:
    """Return the nominal budget of each client of the cohort, where they are noised one by one."""
    budgets = record.noise.client_budgets
    if budgets is None:
        return {}
    return {"client_budgets": [budgets.get(client) for client in record.cohort]}


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
        return key in ROUND_PUBLIC or (key in looked and key.startswith(_MEASURED))

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
        if name in RESULT_PUBLIC or (outer == "history." and key.startswith(_MEASURED)):
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
    under `test_`, evaluation_rounds (finished rounds, from 1), participation_stats.
    """
    history: dict[str, list[Any]] = {
        name: [line[key] for line in lines] for name, key in _PER_ROUND.items()
    }
    for name in _SERVER:
        if any(name in line for line in lines):
            history[name] = [line.get(name) for line in lines]
    for name in ("agg_scale", "client_budgets"):
        if any(name in line for line in lines):
            history[name] = [line.get(name) for line in lines]
    if any("epsilon_spent" in line for line in lines):
        for name in ("epsilon_spent", "without_allowance"):
            history[name] = [line.get(name) for line in lines]
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
    measured = {key: None for line in evaluated for key in line if key.startswith(_MEASURED)}
    by_clients = {name: None for name in _BY_CLIENTS if any(name in line for line in evaluated)}
    by_clients |= {"tiers": None} if any("tiers" in line for line in evaluated) else {}
    usual = ("test_accuracy", "test_loss", "participation_stats")
    for name in {**dict.fromkeys(usual), **measured, **by_clients}:
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
    """

    result: dict[str, Any] = field(repr=False)
    statement: Statement
    state_dict: dict[str, torch.Tensor] = field(repr=False)
    model: nn.Module | None = field(repr=False)
    folder: Path | None
    synthetic: ImageDataset | None = field(default=None, repr=False)
    client_metrics: list[dict[str, Any]] | None = field(default=None, repr=False)

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
        from fedquilt.record.html import result_as_html

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
        key.removeprefix(_MEASURED): values[-1]
        for key, values in history.items()
        if key.startswith(_MEASURED) and values and values[-1] is not None
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
