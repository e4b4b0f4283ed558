"""`fedquilt condense`: what it prints, what it leaves, where its settings come from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedquilt import load
from fedquilt.config import CondenseConfig, build_config
from fedquilt.data import load_condensed
from fedquilt.experiment.api import run_config
from run_samples import contents, only_folder, same_tensors

Cli = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {
    "num_clients": 2,
    "model": "convnet-32",
    "num_rounds": 2,
    "eval_every": 1,
    "ipc": 1,
    "dc_iterations": 3,
    "model_epochs": 2,
    "model_n": 1,
}
SUMMARY = ["mode", "dataset", "seed", "rounds", "final_accuracy", "final_loss", "metrics"]
SUMMARY += ["statement", "output", "condensation", "table", "pictures"]
ROW = {"name", "accuracy", "loss", "bytes_up", "bytes_down", "rounds", "seconds", "raw", "note"}
PNG, GIF = b"\x89PNG\r\n\x1a\n", b"GIF89a"


def flags(**changes: Any) -> list[str]:
    settings = {**SMALL, **changes}
    return [part for k, v in settings.items() for part in (f"--{k.replace('_', '-')}", str(v))]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[CondenseConfig]:
    """Collect the configurations that would be run, and run none."""
    seen: list[CondenseConfig] = []

    def remember(config: CondenseConfig, observer: object = None) -> None:
        seen.append(config)
        raise SystemExit(0)

    monkeypatch.setattr("fedquilt.experiment.api.run_config", remember)
    return seen


def test_options_make_the_configuration(cli: Cli, configured: list[CondenseConfig]) -> None:
    cli("condense", "--ipc", 3, "--image-lr", 0.5, "--feature-model", "global", "--seed", 4)
    cli("condense")
    cli("condense", "--mode", "certified", "--mean-rounds", 2, "--normalise-updates")
    plain = {"method": "condense"}
    assert configured == [
        build_config({**plain, "ipc": 3, "image_lr": 0.5, "feature_model": "global", "seed": 4}),
        build_config(plain),
        build_config({**plain, "mode": "certified", "mean_rounds": 2}),
    ]


def test_the_documents_names(cli: Cli, here: Path, configured: list[CondenseConfig]) -> None:
    words = ("--communication-rounds", 7, "--join-ratio", 0.5, "--eval-gap", 2)
    cli("condense", *words)
    (here / "settings.toml").write_text("communication_rounds = 7\njoin_ratio = 0.5\neval_gap = 2")
    cli("condense", "--config", "settings.toml")
    assert configured[0] == configured[1]
    (config, _) = configured
    assert (config.num_rounds, config.clients_per_round, config.eval_every) == (7, 0.5, 2)
    cli("condense", "--config", "settings.toml", "--num-rounds", 3, "--join-ratio", 1)
    assert configured[2].num_rounds == 3
    assert configured[2].cohort_limit(50) == 50


@pytest.mark.parametrize("share", ["1", "1.0"])
def test_a_join_ratio_of_one_is_everybody(
    cli: Cli, configured: list[CondenseConfig], share: str
) -> None:
    cli("condense", "--join-ratio", share)
    cli("condense", "--clients-per-round", 1)
    assert [config.cohort_limit(40) for config in configured] == [40, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--join-ratio", "1", "--clients-per-round", "2"], ["join_ratio=1", "beside"]),
        (["--num-rounds", "1", "--communication-rounds", "2"], ["communication_rounds=2"]),
        (["--join-ratio", "7"], ["join_ratio=7", "<= 1"]),
        (["--join-ratio", "half"], ["join_ratio='half'", "must be a number"]),
        (["--eval-gap", "1.5"], ["eval_gap='1.5'", "must be a whole number"]),
        (["--ipc", "0"], ["ipc=0 must be >= 1"]),
        (["--ipcs", "1"], ["--ipcs"]),
        (["--local-epochs", "1"], ["--local-epochs"]),
        (["--tracker", "foo"], ["'foo'", "'tensorboard'"]),
        (["--baselines", "dm"], ["baselines='dm'", "python -m reproduction fednum-baselines RUN"]),
        (["--model", "mlpp"], ["mlpp"]),
        (["--mode", "certified", "--init-method", "real_sample"], ["may leave it"]),
        (["--config", "nowhere.toml"], ["nowhere.toml"]),
        (["--resume", "nowhere"], ["must be a folder"]),
        (["--resume", "nowhere", "--ipc", "2"], ["must stand alone"]),
    ],
    ids=" ".join,
)
def test_mistakes_are_named_and_leave_nothing(
    cli: Cli, here: Path, arguments: list[str], words: list[str]
) -> None:
    said = cli("condense", *arguments)
    assert said.code == 2
    assert said.out == ""
    assert "Traceback" not in said.err
    for word in words:
        assert word in said.words
    assert not list(here.iterdir())


def test_help_lists_the_panels(cli: Cli) -> None:
    said = cli("condense", "--help-all")
    assert said.code == 0
    for panel in (
        "Choose data",
        "Say who",
        "Training",
        "Statistics",
        "Synthetic",
        "Promise privacy",
    ):
        assert f"─ {panel} " in said.out
    assert "─ Certified condensation ─" in said.out
    for flag in ("--ipc", "--join-ratio", "--communication-rounds", "--eval-gap"):
        assert flag in said.out
    for foreign in ("--local-epochs", "--tiers", "--server-lr", "--warmup-rounds"):
        assert foreign not in said.out
    short = cli("condense", "--help").out
    assert len(short.splitlines()) < 75
    assert "--ipc" in short
    assert "--head-step" not in short


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small condensation, for what only looks at one."""
    config = build_config({"method": "condense", **SMALL})
    return run_config(config.replace(output_dir=str(tmp_path_factory.mktemp("f")))).folder  # type: ignore[return-value]


def test_what_is_printed_and_left(cli: Cli, here: Path, finished: Path) -> None:
    said = cli("condense", *flags(), "--quiet")
    assert said.code == 0, said.err
    assert said.err == ""
    folder = only_folder(here / "results")
    result = json.loads((folder / "result.json").read_text())
    lines = said.out.splitlines()
    assert lines[0].split()[:2] == ["method", "accuracy"]
    assert [line.split()[0] for line in lines[2:3]] == ["fednum"]
    assert lines[3] == ""
    assert f"{result['metadata']['final_accuracy']:.4f}" in lines[2]
    assert "claim      epsilon: inf, no guarantee for the released model" in said.out
    assert f"images    {Path('results') / folder.name / 'condensed.safetensors'}" in said.out
    assert lines[-1] == str(Path("results") / folder.name)
    pictures = ["condensed.png", "condensed_strip.png"]
    pictures += [f"synthetic/round_000{number}.png" for number in range(3)]
    for name in pictures:
        assert (folder / name).read_bytes().startswith(PNG), name
    assert (folder / "condensed_rounds.gif").read_bytes().startswith(GIF)
    # The same from Python, bit by bit.
    assert same_tensors(load(folder).state_dict, load(finished).state_dict)
    ours, theirs = (load_condensed(f / "condensed.safetensors").images for f in (folder, finished))
    assert torch.equal(ours, theirs)


def test_progress_is_shown_on_the_error_stream(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as rich can tell
    said = cli("condense", *flags(num_rounds=1))
    assert said.code == 0
    assert "digits fednum" in said.err
    assert "digits fednum" not in said.out


def test_json_is_one_object_and_nothing_else(cli: Cli, here: Path) -> None:
    said = cli("condense", *flags(seed=3), "--json")
    record = said.json()
    assert said.err == ""
    assert list(record) == SUMMARY
    assert (record["mode"], record["dataset"], record["seed"]) == ("fednum", "digits", 3)
    assert record["statement"]["epsilon_max"] == "inf"
    assert [row["name"] for row in record["table"]] == ["fednum"]
    assert all(set(row) == ROW for row in record["table"])
    assert [row["raw"] for row in record["table"]] == [False]
    assert record["table"][0]["bytes_up"] == record["condensation"]["bytes_up"] > 0
    assert [Path(path).name for path in record["pictures"]] == [
        *("condensed.png", "condensed_strip.png", "condensed_rounds.gif")
    ]
    assert all((here / path).exists() for path in record["pictures"])
    assert Path(record["output"]) == Path("results") / only_folder(here / "results").name


def test_json_of_a_certified_run(cli: Cli, here: Path) -> None:
    bounded = {"mode": "certified", "num_clients": 2, "num_rounds": 2, "mean_rounds": 1}
    bounded |= {"eval_every": 2, "ipc": 1, "synthetic_images": 20, "model_epochs": 2, "epsilon": 6}
    given = [part for k, v in bounded.items() for part in (f"--{k.replace('_', '-')}", v)]
    record = cli("condense", *given, "--json").json()
    assert 0 < record["statement"]["epsilon_max"] <= 6
    assert record["statement"]["uncovered"] == []
    (row,) = record["table"]
    assert row["name"] == "certified"
    assert row["seconds"] is None
    assert not (only_folder(here / "results") / "baselines.json").exists()


def test_a_picture_that_is_missing_is_drawn_on_resume(cli: Cli, here: Path, finished: Path) -> None:
    for name in ("condensed.png", "condensed_rounds.gif"):
        (finished / name).unlink(missing_ok=True)
    said = cli("condense", "--resume", finished, "--quiet")
    assert said.code == 0, said.err
    assert (finished / "condensed.png").read_bytes().startswith(PNG)
    assert (finished / "condensed_rounds.gif").read_bytes().startswith(GIF)


def test_rounds_that_were_removed_are_not_drawn(cli: Cli, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "synthetic")
    for path in folder.glob("condensed*.*g*"):
        path.unlink()
    record = cli("condense", "--resume", folder, "--json").json()
    assert [Path(path).name for path in record["pictures"]] == ["condensed.png"]


def test_a_torn_set_of_images_is_named(cli: Cli, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    (folder / "condensed.safetensors").write_bytes(b"torn")
    assert "condensed.safetensors must be a whole" in cli("condense", "--resume", folder).words


def test_a_folder_with_rows_of_an_earlier_version_is_resumed(
    cli: Cli, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    kept = folder / "baselines.json"
    kept.write_text(json.dumps({"schema_version": 1, "wanted": ["coreset"], "rows": {}}))
    before = contents(folder)
    assert cli("condense", "--resume", folder, "--json").json()["table"][0]["name"] == "fednum"
    assert contents(folder)["baselines.json"] == before["baselines.json"]


def test_ctrl_c_after_the_rounds_says_where_the_run_is(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedquilt.papers.fednum.pictures.draw_pictures", interrupt)
        said = cli("condense", *flags(num_rounds=1), "--quiet")
    assert said.code == 130
    folder = only_folder(here / "results")
    line = f"interrupted: continue with  fedquilt condense --resume results/{folder.name}"
    assert said.err.strip() == line
    assert cli("condense", "--resume", folder, "--quiet").code == 0


def test_ctrl_c_before_anything_is_kept(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedquilt.experiment.api.build_task", interrupt)
    said = cli("condense", "--quiet")
    assert (said.code, said.err.strip()) == (130, "interrupted: nothing was kept")
    assert not list(here.iterdir())


def test_tensorboard_gets_the_measurements(cli: Cli, here: Path) -> None:
    said = cli("condense", *flags(), "--quiet", "--tracker", "tensorboard")
    assert said.code == 0, said.err
    folder = only_folder(here / "results")
    (events,) = folder.rglob("events.out.tfevents.*")
    for name in (b"accuracy", b"train_loss", b"matching_loss", b"bytes_up"):
        assert name in events.read_bytes()


def test_run_tracks_too(cli: Cli, here: Path) -> None:
    trained = ("--model", "linear", "--mode", "fedavg", "--num-rounds", 1, "--local-epochs", 1)
    said = cli("run", *trained, "--quiet", "--tracker", "tensorboard")
    assert said.code == 0, said.err
    (events,) = only_folder(here / "results").rglob("events.out.tfevents.*")
    assert b"accuracy" in events.read_bytes()
    refused = cli("run", *trained, "--output-dir", "other", "--tracker", "foo")
    assert refused.code == 2
    assert not (here / "other").exists()


def test_classes_without_images_and_a_class_a_client(cli: Cli, here: Path) -> None:
    said = cli(
        *("condense", *flags(num_clients=10), "--partition", "shards", "--quiet"),
        *("--classes-per-client", 1),
    )
    assert said.code == 0, said.err
    made = load_condensed(only_folder(here / "results") / "condensed.safetensors")
    assert made.targets.tolist() == list(range(10))


def test_other_commands_read_a_condensation(cli: Cli, finished: Path) -> None:
    said = cli("statement", finished)
    assert said.code == 0
    assert "a mean is no guarantee" in said.out
    assert cli("run", "--resume", finished, "--json").json()["mode"] == "fednum"
