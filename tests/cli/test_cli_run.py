"""`fedquilt run`: what it prints, what it leaves, where its settings come from."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedquilt
from fedquilt.cli.options import parse_count
from fedquilt.config import MODES, RunConfig, build_config, option_fields
from fedquilt.config.choices import EXIT_METHODS, METHODS, RANK_METHODS
from fedquilt.config.option import CLIENTS
from fedquilt.config.uses import USES
from fedquilt.experiment.api import run_config
from run_samples import assert_same_run, flags, only_folder, rounds_without_clock, tiny
from tiers import rest_is_slow

Cli = Callable[..., Any]
KEYS = [
    *("mode", "dataset", "seed", "rounds", "final_accuracy", "final_loss", "metrics"),
    *("statement", "output"),
]
STATEMENT = ["unit", "adjacency", "delta", "epsilon_max", "epsilon_median"]
STATEMENT += ["covered", "uncovered", "noise_source", "notes"]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Collect the configurations that would be run, and run none."""
    seen: list[RunConfig] = []

    def remember(config: RunConfig, observer: object = None) -> None:
        seen.append(config)
        raise SystemExit(0)

    monkeypatch.setattr("fedquilt.experiment.api.run_config", remember)
    return seen


def test_the_folder_of_a_run(cli: Cli, here: Path) -> None:
    said = cli("run", *flags(mode="quap_fl"), "--statement")
    assert said.code == 0
    folder = only_folder(here / "results")
    names = {path.name for path in folder.iterdir()} - {".lock"}
    assert names == {
        *(
            "config.toml",
            "clients.json",
            "rounds.jsonl",
            "checkpoint.safetensors",
            "result.json",
            "training.png",
        )
    }
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert str(Path("results") / folder.name) in said.out
    result = json.loads((folder / "result.json").read_text())
    assert f"{result['metadata']['final_accuracy']:.4f}" in said.out
    assert "epsilon: inf" in said.out
    assert "covered    fc.weight, fc.bias" in said.out
    loaded = fedquilt.load(folder)
    assert loaded.model is not None
    assert_same_run(loaded, run_config(tiny(mode="quap_fl", output_dir=str(here / "other"))))


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("mode", MODES)
def test_json_is_one_object_and_nothing_else(cli: Cli, here: Path, mode: str) -> None:
    said = cli("run", *flags(mode=mode, seed=3), "--json")
    record = said.json()
    assert list(record) == KEYS + ["ledger"] * (mode == "certified")
    assert sorted(record["statement"]) == sorted(STATEMENT)
    assert (record["mode"], record["dataset"], record["seed"]) == (mode, "digits", 3)
    assert record["rounds"] == 4
    folder = only_folder(here / "results")
    assert Path(record["output"]) == Path("results") / folder.name
    result = json.loads((folder / "result.json").read_text())
    assert record["final_accuracy"] == result["metadata"]["final_accuracy"]
    assert record["final_loss"] == result["metadata"]["final_loss"]
    assert record["statement"] == result["statement"]
    assert record["statement"]["epsilon_max"] == "inf"  # the noise has a seed
    assert said.err == ""


@pytest.mark.usefixtures("no_figures")
def test_json_of_a_bounded_run_has_a_number(cli: Cli) -> None:
    options = flags(mode="fixed_dp", noise_layers="all", noise_seed=None)
    record = cli("run", *options, "--json").json()
    assert 0 < record["statement"]["epsilon_max"] < 10


@pytest.mark.parametrize("changes", [{"server_lr": 1e300}, {"learning_rate": 1e6}], ids=str)
def test_json_of_a_run_that_diverged(cli: Cli, here: Path, changes: dict[str, float]) -> None:
    record = cli("run", *flags(mode="fedavg", **changes), "--json").json()
    if "server_lr" in changes:
        assert record["final_loss"] is None
    again = cli("run", "--resume", record["output"], "--json").json()
    assert again == record
    assert (here / record["output"] / "training.png").is_file()


def test_the_report_of_a_run_that_diverged(cli: Cli) -> None:
    said = cli("run", *flags(mode="quap_fl", server_lr=1e300))
    assert said.code == 0
    assert "claim     epsilon: inf, no guarantee" in said.out


@pytest.mark.usefixtures("no_figures")
def test_quiet_and_progress_stay_off_standard_output(cli: Cli) -> None:
    loud, quiet = cli("run", *flags()), cli("run", *flags(), "--quiet")
    assert quiet.err == ""
    names = [[line.split()[0] for line in said.out.splitlines()] for said in (loud, quiet)]
    assert names[0] == names[1] == ["accuracy", "claim", "folder", "next"]


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "fedavg", "clients_per_round": 0.35, "availability": "beta"},
        {"mode": "quap_fl", "partition": "shards", "participation_ema": 0.2},
        {"mode": "fixed_dp", "early_stopping": True, "target_accuracy": 0.9, "num_clients": None},
    ],
    ids=str,
)
def test_config_toml_fed_back_reproduces_the_run(
    cli: Cli, here: Path, changes: dict[str, Any]
) -> None:
    first = cli("run", *flags(**changes), "--json").json()
    path = here / first["output"] / "config.toml"
    again = cli("run", "--config", path, "--output-dir", "again", "--json").json()
    folders = here / first["output"], here / again["output"]
    assert rounds_without_clock(folders[0]) == rounds_without_clock(folders[1])
    assert_same_run(fedquilt.load(folders[0]), fedquilt.load(folders[1]))
    texts = [(folder / "config.toml").read_text() for folder in folders]
    # Why `auto` took its engine is said below; the second run was told which.
    said, given = (text.split("\n# ")[0].rstrip() for text in texts)
    assert said.replace('"./results"', '"again"') == given


def test_resume_of_a_finished_run_prints_its_result(
    cli: Cli, here: Path, uninterrupted: Callable[..., Any]
) -> None:
    shutil.copytree(uninterrupted(mode="fedavg").folder, here / "copy")
    record = cli("run", "--resume", "copy", "--json").json()
    assert record == {**uninterrupted(mode="fedavg").summary(), "output": "copy"}
    assert (here / "copy" / "training.png").is_file()  # it was missing, so it is drawn now
    stamp = (here / "copy" / "training.png").stat().st_mtime_ns
    assert cli("run", "--resume", "copy").code == 0
    assert (here / "copy" / "training.png").stat().st_mtime_ns == stamp


def test_paper_mnist(cli: Cli, configured: list[RunConfig]) -> None:
    cli("run", "--preset", "paper-mnist")
    (config,) = configured
    expected = {
        "dataset": "mnist",
        "num_clients": 100,
        "num_rounds": 200,
        "clients_per_round": 30,
        "warmup_rounds": 5,
        "local_epochs": 3,
        "batch_size": 32,
        "learning_rate": 0.005,
        "lr_decay": 0.995,
        "epsilon": 6.0,
        "delta": 1e-5,
        "budget_alpha": 0.5,
        "budget_beta": 2.0,
        "clip_quantile": 0.9,
        "clip_momentum": 0.95,
        "min_clip": 0.1,
        "max_clip": 1.0,
        "noise_layers": "fc*",
        "partition": "dirichlet",
        "dirichlet_alpha": 0.5,
        "availability": "always",
        "selection": "weighted",
        "target_accuracy": 0.932,
        "mode": "quap_fl",
    }
    assert {key: getattr(config, key) for key in expected} == expected
    others = {key: value for key, value in config.as_dict().items() if key not in expected}
    assert others == {key: option_fields()[key].default for key in others}


def test_later_sources_win(cli: Cli, here: Path, configured: list[RunConfig]) -> None:
    file = here / "settings.toml"
    file.write_text("epsilon = 5.0\nlearning_rate = 0.5\n")
    cli("run")
    cli("run", "--preset", "paper-cifar10")
    cli("run", "--preset", "paper-cifar10", "--config", file)
    cli("run", "--preset", "paper-cifar10", "--config", file, "--epsilon", "4")
    chosen = [(c.dataset, c.lr_decay, c.learning_rate, c.epsilon) for c in configured]
    assert chosen == [
        ("digits", option_fields()["lr_decay"].default, 0.2, 6.0),
        ("cifar10", 0.995, 0.005, 6.0),
        ("cifar10", 0.995, 0.5, 5.0),
        ("cifar10", 0.995, 0.5, 4.0),
    ]
    file.write_text('preset = "paper-mnist"\nepsilon = 5.0\n')
    cli("run", "--config", file)
    assert (configured[-1].dataset, configured[-1].epsilon) == ("mnist", 5.0)


SAMPLES: dict[str, Any] = {"str": "x", "int": 3, "float": 0.25, "int | float": 7, "bool": True}


# Left out: what is for clients of one's own, from Python.
OPTIONS = [name for name in option_fields() if name != "allow_overlap"]


def test_every_field_is_an_option_and_a_key_of_the_file(
    cli: Cli, here: Path, configured: list[RunConfig]
) -> None:
    assert len(OPTIONS) > 70
    for name in OPTIONS:
        configured.clear()
        is_an_option_and_a_key(name, cli, here, configured)


def is_an_option_and_a_key(name: str, cli: Cli, here: Path, configured: list[RunConfig]) -> None:
    item = option_fields()[name]
    kind = str(item.type).removesuffix(" | None")
    value = item.metadata["rule"].get("choices", (SAMPLES[kind],))[-1]
    value = {"max_clip": 3.5, "clip_cap": 3.5, "optimizer": "adam", "engine": "processes"}.get(
        name, value
    )
    changes = {"clients_per_round": 0.5} if name == "num_clients" else {}
    settings = {**partners(name), name: value}
    typed = [
        word
        for key, said in settings.items()
        for word in (f"--{key.replace('_', '-')}", *([] if said is True else [said]))
    ]
    cli("run", *typed)
    lines = (f"{key} = {json.dumps(said)}\n" for key, said in settings.items())
    (here / "file.toml").write_text("".join(lines))
    cli("run", "--config", "file.toml")
    expected = build_config({**settings, **changes})
    assert [getattr(config, name) for config in configured] == [value, value], name
    if not changes:
        assert configured == [expected, expected], name


def partners(name: str) -> dict[str, Any]:
    """Return settings beside which an option does something."""
    needed: dict[str, Any] = {
        "amplification": {"selection": "poisson", "policy": "worst_case"},
        "aggregation": {"mode": "fedavg", "server_lr": 0.01},
        "correction": {"mode": "fedavg"},
        "attackers": {"attack": "scaling"},
        "attack_strength": {"attack": "scaling"},
        "in_flight": {"buffer_size": 2},
        "device_spread": {"buffer_size": 2},
    }.get(name, {})
    case = USES.get(name, ({},))[0]
    found = {
        key: "l.sqlite" if allowed is None else allowed[0]
        for key, allowed in case.items()
        if key not in (CLIENTS, name)
    }
    return {**found, **needed}


@pytest.mark.parametrize(
    ("text", "value"), [("30", 30), ("0.3", 0.3), ("1.0", 1.0), ("1", 1), ("1.", 1.0)]
)
def test_a_decimal_point_makes_a_fraction(
    cli: Cli, configured: list[RunConfig], text: str, value: float
) -> None:
    assert parse_count(text) == value
    cli("run", "--num-clients", 50, "--clients-per-round", text)
    assert configured[0].clients_per_round == value
    assert type(configured[0].clients_per_round) is type(value)


def test_one_key_in_the_written_file_for_every_set_option(cli: Cli, here: Path) -> None:
    folder = run_config(tiny(output_dir=str(here))).folder
    assert folder is not None
    written = tomllib.loads((folder / "config.toml").read_text())
    assert set(written) - {"schema_version"} <= set(option_fields())


# No model by name has adapters; what a run with one says is in tests/slices.
SLICED = [method for method in METHODS if method not in ("full", *RANK_METHODS)]
EVERY = [(method, mode) for method in SLICED for mode in (None, "certified")]
DIAGONAL = [(method, (None, "certified")[place % 2]) for place, method in enumerate(SLICED)]


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(("method", "mode"), rest_is_slow(EVERY, DIAGONAL, names=2))
def test_every_method_on_slices_runs(cli: Cli, here: Path, method: str, mode: str | None) -> None:
    model = "exits" if method in EXIT_METHODS else "digits"
    options = flags(method=method, tiers="1,1/2,1/4,1/8", mode=mode, model=model, noise_seed=None)
    record = cli("run", *options, "--json").json()
    assert record["mode"] == (mode or "fedavg")
    assert record["slices"]["method"] == method
    widths = [tier["width"] for tier in record["slices"]["tiers"]]
    own = {"smallest": ["1/8"], "largest_only": ["1"]}
    assert widths == own.get(method, ["1", "1/2", "1/4", "1/8"])
    notes = " ".join(record["statement"]["notes"])
    assert ("clients hold slices" in notes) == (
        mode == "certified" and method not in ("smallest", "largest_only")
    )
    assert (record["statement"]["epsilon_max"] == "inf") == (mode is None)


@pytest.mark.usefixtures("no_figures")
def test_what_a_client_holds_is_printed(cli: Cli) -> None:
    said = cli("run", *flags(method="fedrolex", mode=None, model="digits", noise_seed=None))
    assert said.code == 0
    assert "What a client holds (fedrolex)" in said.out
    assert "8,714" in said.out  # the parameters of the whole model


def test_a_seed_mode_refuses_slices(cli: Cli, here: Path) -> None:
    said = cli("run", *flags(method="fedrolex", mode="quap_fl", model="digits"))
    assert said.code == 2
    assert "mode='quap_fl' must be one of 'fedavg', 'certified'" in said.err
    assert not (here / "results").exists()


def test_depthfl_brings_its_model(configured: list[RunConfig], cli: Cli) -> None:
    cli("run", "--method", "depthfl")
    assert (configured[0].mode, configured[0].model) == ("fedavg", "exits")


@pytest.mark.usefixtures("no_figures")
def test_what_stands_beside_the_configuration_in_a_file(cli: Cli, here: Path) -> None:
    """`quiet`, `tracker` and `preset` are keys too."""
    (here / "c.toml").write_text("quiet = true\ntracker = 'tensorboard'\n")
    said = cli("run", "--config", "c.toml", *flags(mode="fedavg"))
    assert (said.code, said.err) == (0, "")
    assert list((here / "results").rglob("events.out.*"))
    for text, words in (
        ("quiet = 1", "quiet=1 must be true or false"),
        ("tracker = 3", "tracker=3"),
    ):
        (here / "c.toml").write_text(text)
        refused = cli("run", "--config", "c.toml")
        assert refused.code == 2
        assert words in refused.words


@pytest.mark.usefixtures("no_figures")
def test_scaling_up_can_be_turned_off(cli: Cli, configured: list[RunConfig]) -> None:
    cli("run")
    cli("run", "--no-normalise-updates")
    cli("run", "--clipping", "quantile")
    assert [one.normalise_updates for one in configured] == [True, False, False]
