"""The kinds of run that faults are tried on, and how two runs of a kind are compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedquilt.config import RunConfig, build_config
from fedquilt.data import load_condensed
from fedquilt.record.folder import RunFolder

_TINY: dict[str, Any] = {
    "dataset": "digits",
    "model": "linear",
    "num_clients": 10,
    "clients_per_round": 3,
    "availability": "always",
    "num_rounds": 4,
    "local_epochs": 1,
    "eval_every": 2,
}
_CERTIFIED = {**_TINY, "mode": "certified", "epsilon": 2.0, "allowance": 6.0}
_SEED = {"noise_seed": 11}
_CONDENSE: dict[str, Any] = {
    "method": "condense",
    "dataset": "digits",
    "num_rounds": 2,
    "ipc": 1,
    "eval_every": 1,
    "model_epochs": 1,
}


@dataclass(frozen=True)
class Kind:
    """A kind of run: its settings, and whether its noise is seeded so that runs are alike."""

    name: str
    settings: dict[str, Any]
    shared: bool = False

    @property
    def repeats(self) -> bool:
        """Whether two runs are equal bit by bit."""
        return not (self.is_certified and "noise_seed" not in self.settings)

    @property
    def is_certified(self) -> bool:
        """Whether the run has a ledger."""
        return self.settings.get("mode") == "certified"

    @property
    def counts_plainly(self) -> bool:
        """Whether each release costs (clip / noise)^2 and no round is a repetition."""
        special = {"amplification", "noise_seed", "method"}
        return self.is_certified and not special & self.settings.keys()

    def config(self, area: Path) -> RunConfig:
        """Return the configuration of a run whose files all lie in `area`."""
        where: dict[str, Any] = {"output_dir": str(area / "runs")}
        if self.shared:
            where |= {"ledger": str(area / "shared.sqlite"), "population": "everybody"}
        return build_config({**self.settings, **where})


KINDS = {
    kind.name: kind
    for kind in (
        Kind("fedavg", {**_TINY, "mode": "fedavg"}),
        Kind("fixed_dp", {**_TINY, **_SEED, "mode": "fixed_dp"}),
        Kind(
            "quap_fl",
            {**_TINY, **_SEED, "mode": "quap_fl", "participation_ema": 0.3},
        ),
        Kind("quap_fl_client", {**_TINY, **_SEED, "mode": "quap_fl_client"}),
        Kind("certified, seeded", {**_CERTIFIED, **_SEED, "clipping": "quantile"}),
        Kind("certified, correlated noise", {**_CERTIFIED, **_SEED, "noise_bands": 2}),
        Kind("certified, secret noise", _CERTIFIED),
        Kind("certified, shared ledger", {**_CERTIFIED, "if_exhausted": "sit_out"}, shared=True),
        Kind(
            "certified, amplified",
            {
                **_CERTIFIED,
                "selection": "poisson",
                "amplification": True,
                "policy": "worst_case",
                "allowance": 2.0,
            },
        ),
        Kind(
            "certified, heterofl",
            {**_CERTIFIED, **_SEED, "method": "heterofl", "model": "digits", "tiers": "1,1/2"},
        ),
        Kind(
            "fedrolex",
            {**_TINY, "mode": "fedavg", "method": "fedrolex", "model": "digits", "tiers": "1,1/2"},
        ),
        Kind(
            "depthfl",
            {**_TINY, "mode": "fedavg", "method": "depthfl", "model": "exits", "tiers": "1,1/2"},
        ),
        Kind(
            "condense",
            {
                **_CONDENSE,
                "model": "convnet-32",
                "num_clients": 3,
                "dc_iterations": 2,
                "model_n": 1,
                "min_group": 4,
            },
        ),
        Kind(
            "condense, certified",
            {
                **_CONDENSE,
                **_SEED,
                "mode": "certified",
                "num_clients": 4,
                "num_rounds": 3,
                "mean_rounds": 1,
                "eval_every": 3,
                "synthetic_images": 40,
                "epsilon": 6.0,
            },
        ),
        Kind("processes", {**_CERTIFIED, **_SEED, "engine": "processes"}),
    )
}


def same_runs(one: Path, other: Path) -> str:
    """Return in what two finished runs differ, "" when they are equal bit by bit."""
    if _rounds(one) != _rounds(other):
        return "rounds.jsonl"
    if _result(one) != _result(other):
        return "result.json"
    first, second = (RunFolder.open(path).load_checkpoint() for path in (one, other))
    if first is None or second is None or not _same_tensors(first.model, second.model):
        return "the model"
    for key, array in first.state.items():
        # A copy of what the ledger says; the ledger itself is looked at.
        if key != "account.spent" and array.tobytes() != second.state[key].tobytes():
            return f"state {key}"
    names = sorted(str(path.relative_to(one)) for path in _images(one))
    if names != sorted(str(path.relative_to(other)) for path in _images(other)):
        return "the files of images"
    for name in names:
        sets = [load_condensed(path / name) for path in (one, other)]
        if not torch.equal(sets[0].images, sets[1].images):
            return name
    return ""


def _images(folder: Path) -> list[Path]:
    return [*folder.glob("synthetic/*.safetensors"), *folder.glob("condensed.safetensors")]


def _rounds(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def _result(folder: Path) -> dict[str, Any]:
    """Return a result without when and where it was made."""
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    result["metadata"].pop("timestamp")
    result["metadata"]["hyperparameters"].pop("output_dir")
    for key in ("ledger", "run_id", "head"):
        result.get("ledger", {}).pop(key, None)
    return {key: _timeless(value) for key, value in result.items()}


def _timeless(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _timeless(item) for key, item in value.items() if "seconds" not in key}


def _same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
