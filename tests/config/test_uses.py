"""Options that would do nothing are refused; a default never is."""

from __future__ import annotations

import inspect
import runpy
import typing
from pathlib import Path
from typing import Any

import pytest
from config_samples import written

import fedquilt
from fedquilt.config import MODES, CondenseConfig, RunConfig, build_config, option_fields
from fedquilt.config.condense import ALIASES
from fedquilt.config.documents import PRESETS
from fedquilt.config.keywords import RunSettings, Settings
from fedquilt.config.option import CLIENTS, SPLIT, Flag
from fedquilt.config.run import old_names, option_names
from fedquilt.config.uses import USES, is_effective, modes_of, uses_in_words, uses_table
from fedquilt.errors import InvalidValueError
from fedquilt.experiment.api import run_config
from run_samples import tiny

ROOT = Path(__file__).parents[2]
IDLE: list[dict[str, Any]] = [
    {"mode": "fedavg", "epsilon": 3.0},
    {"mode": "fedavg", "epsilon": 3},
    {"mode": "fedavg", "policy": "cap"},
    {"mode": "fedavg", "clipping": "quantile"},
    {"mode": "fedavg", "allowance": 9.0},
    {"mode": "fedavg", "noise_seed": 1},
    {"mode": "quap_fl", "clipping": "fixed"},
    {"mode": "quap_fl", "adjacency": "replace_one"},
    {"mode": "fixed_dp", "clip_quantile": 0.9},
    {"mode": "certified", "noise_layers": "fc*"},
    {"mode": "certified", "max_joins": 3},
    {"mode": "certified", "private_quantile": 0.5},
    {"tiers": "1,1/2"},
    {"population": "x"},
    {"if_exhausted": "sit_out"},
    {"allow_unbounded": True},
    {"noise_layers": "fc*"},
    {"server_momentum": 0.5},
    {"validation_fraction": 0.2},
    {"partition": "iid", "dirichlet_alpha": 0.5},
    {"method": "condense", "epsilon": 3.0},
    {"method": "condense", "head_step": 0.5},
    {"method": "condense", "rho": 77.0},
    {"method": "condense", "pool_epochs": 7},
    {"method": "condense", "trained_n": 3},
    {"method": "condense", "discrimination": 5.0},
    {"method": "condense", "image_optimizer": "adam", "image_momentum": 0.1},
    {"method": "condense", "augmentation": "none", "model_families": 3},
    *(
        {"method": "condense", "mode": "certified", **only}
        for only in (
            {"avg_num": 8},
            {"min_group": 4},
            {"max_samples": 0},
            {"feature_model": "global"},
            {"model_n": 2},
            {"moments": 1},
            {"row_bits": 32},
            {"tiles": 1},
            {"init_method": "random"},
            {"dc_iterations": 10},
            {"batch_num": 8},
            {"image_optimizer": "sgd"},
            {"image_lr": 0.5},
            {"logit_loss_type": "l2"},
            {"loss_computation": "loss-avg"},
            {"embed_layer": "fc"},
            {"model_families": 2},
        )
    ),
]


@pytest.mark.parametrize("settings", IDLE, ids=str)
def test_what_would_do_nothing_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    name, value = list(settings.items())[-1]
    with pytest.raises(InvalidValueError, match=rf"^{name}=.* would do nothing: it is for ") as one:
        build_config(settings)
    assert repr(value) in str(one.value)
    path = tmp_path / "c.toml"
    path.write_text("".join(f"{k} = {_toml(v)}\n" for k, v in settings.items()))
    with pytest.raises(InvalidValueError, match=rf"^{name}=.* \(in .*c.toml\)$"):
        build_config(file=path)


def _toml(value: Any) -> str:
    return {True: "true"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)


USED: list[dict[str, Any]] = [
    {"mode": "fedavg", "ledger": "l", "epsilon": 3.0, "delta": 1e-6, "population": "p"},
    {"mode": "quap_fl", "ledger": "l", "allow_unbounded": True},
    {"mode": "certified", "policy": "cap", "max_joins": 3},
    {"mode": "certified", "policy": "paper", "budget_alpha": 0.4},
    {"mode": "certified", "clipping": "quantile", "private_quantile": 0.4},
    {"mode": "certified", "allowance": 9.0},
    {"method": "heterofl", "tiers": "1,1/2"},
    {"mode": "fixed_dp", "noise_layers": "all", "adjacency": "replace_one"},
    {"partition": "shards", "classes_per_client": 3},
    {"server_optimizer": "momentum", "server_momentum": 0.5},
    {"mode": "fedavg", "max_joins": None, "amplification": False},
    {"method": "condense", "mode": "certified", "epsilon": 3.0, "head_step": 0.5},
    {"method": "condense", "feature_model": "perturbed", "rho": 77.0},
    {"method": "condense", "init_method": "dm", "rho": 77.0},
    {"method": "condense", "feature_model": "trained_pool", "trained_n": 3, "pool_epochs": 7},
    {"method": "condense", "feature_model": "trained_pool", "discrimination": 5.0},
    {"method": "condense", "image_momentum": 0.1, "batch_num": 8, "loss_computation": "loss-avg"},
    {"method": "condense", "mode": "certified", "augmentation": "crop_flip", "model_families": 2},
]


@pytest.mark.parametrize("settings", USED, ids=str)
def test_what_does_something_is_taken(settings: dict[str, Any]) -> None:
    config = build_config(settings)
    assert {key: getattr(config, key) for key in settings} == settings


@pytest.mark.parametrize("mode", MODES)
def test_defaults_and_presets_are_never_refused(mode: str) -> None:
    assert build_config({"mode": mode}).mode == mode
    for name in PRESETS:
        config = build_config({"mode": mode}, preset=name)
        whole = {**config.as_dict(), CLIENTS: SPLIT}
        for key, value in PRESETS[name].items():
            if key != "mode" and is_effective(key, whole):
                assert getattr(config, key) == value
            elif key != "mode":  # what would do nothing is not even recorded
                assert getattr(config, key) == option_fields()[key].default


def test_the_file_of_a_run_is_taken_whole(tmp_path: Path) -> None:
    """It names every option; a person's file, a few."""
    path = tmp_path / "config.toml"
    for config in (RunConfig(mode="fedavg", epsilon=7.0), RunConfig(mode="quap_fl", policy="cap")):
        path.write_text(written(config), encoding="utf-8")
        assert build_config(file=path) == config


def test_a_file_for_several_modes(tmp_path: Path) -> None:
    path = tmp_path / "shared.toml"
    path.write_text("epsilon = 5.0\nnoise_layers = 'all'\n")
    assert build_config({"mode": "fedavg"}, file=path).noise_layers == "all"
    with pytest.raises(InvalidValueError, match="noise_layers='all' must be left out"):
        build_config(file=path)  # certified
    path.write_text("mode = 'fixed_dp'\nnoise_layers = 'all'\n")
    assert build_config({"mode": "certified"}, file=path).mode == "certified"
    path.write_text("tiers = '1,1/2'\n")
    with pytest.raises(InvalidValueError, match="tiers="):
        build_config({"mode": "fedavg"}, file=path)


def test_python_refuses_too_and_nothing_is_written(tmp_path: Path) -> None:
    import torch

    data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    run = [torch.nn.Linear(2, 2), data, data, [[0, 1], [2, 3]]]
    for settings in ({"mode": "fedavg", "epsilon": 3.0}, {"partition": "iid"}, {"tiers": "1"}):
        with pytest.raises(InvalidValueError, match="would do nothing"):
            fedquilt.run(*run, output_dir=str(tmp_path), quiet=True, **settings)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_every_entry_of_the_table_is_an_option() -> None:
    fields = {**option_fields(CondenseConfig), **option_fields(RunConfig)}
    assert set(USES) <= set(fields)
    for name, cases in USES.items():
        assert uses_in_words(name)
        for case in cases:
            for other, allowed in case.items():
                own = other == CLIENTS
                choices = {} if own else fields[other].metadata["rule"]
                if allowed is not None and "choices" in choices and other != "mode":
                    assert set(allowed) <= set(choices["choices"])


def test_modes_of_an_option() -> None:
    assert modes_of("seed") == MODES
    assert modes_of("policy") == ("certified",)
    assert modes_of("noise_layers") == ("fixed_dp", "quap_fl")
    assert modes_of("population") == MODES


def test_the_page_shows_the_table() -> None:
    assert uses_table() in (ROOT / "docs" / "modes.md").read_text()


def test_keywords_of_python_are_the_options() -> None:
    """Names and types that an editor completes, against what is declared."""
    elsewhere = {"model", "method", "engine", "output_dir", "loss", "metrics", "optimizer"}
    of_data = {name for name, cases in USES.items() if cases[0].get(CLIENTS) == (SPLIT,)}
    expected = {
        name: str(item.type)
        for name, item in option_fields().items()
        if name not in elsewhere | of_data
    }
    assert _kinds(RunSettings) == expected
    own = {
        name: str(item.type)
        for name, item in option_fields(CondenseConfig).items()
        if name not in {*option_fields(), "split_file"}
    }
    others = {**ALIASES, **old_names(CondenseConfig)}
    names = {other: str(option_fields(CondenseConfig)[name].type) for other, name in others.items()}
    assert _kinds(Settings) == {**expected, **own, **names}


def test_type_checkers_are_told_the_same() -> None:
    path = ROOT / "tools" / "keywords.py"
    tool = runpy.run_path(str(path))
    assert tool["STUB"].read_text() == tool["stub"](), f"run {path}"


def test_parameters_of_run_are_no_keywords() -> None:
    named = set(inspect.signature(fedquilt.run).parameters)
    assert set(option_names(Flag.PARAMETER)) <= named
    assert not set(option_names(Flag.PARAMETER)) & set(typing.get_type_hints(Settings))


def _kinds(kind: Any) -> dict[str, str]:
    found = typing.get_type_hints(kind)
    return {name: kind if isinstance(kind, str) else _plain(kind) for name, kind in found.items()}


def _plain(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def test_the_signature_and_the_help_name_every_keyword() -> None:
    parameters = inspect.signature(fedquilt.run).parameters
    assert not {"ipc", "cutmix", "join_ratio"} & set(parameters), "of condensations alone"
    for name in (*typing.get_type_hints(RunSettings), "preset", "progress", "quiet", "observer"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["epsilon"].default == 6.0
    assert parameters["availability"].default == "always"
    documented = inspect.getdoc(fedquilt.run) or ""
    for name in (*typing.get_type_hints(RunSettings), "preset", "progress", "quiet"):
        assert f"\n{name} : " in documented


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_precision_for_gpus_is_refused_on_a_cpu(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a folder is made; a condensation matches in it on any device."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = tiny(mode="fedavg", precision="bf16", device=device, output_dir=str(tmp_path))
    with pytest.raises(InvalidValueError, match=r"precision='bf16' must be left out.*do nothing"):
        run_config(config)
    assert not list(tmp_path.iterdir())
