"""The app that `fedquilt flower new` writes, HeFlwr's examples, and the commands."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from command_line import Said
from fedquilt.common.errors import InvalidValueError
from fedquilt.flower.federation import LocalFederation, commands_for_hosts
from fedquilt.flower.node import client_app
from fedquilt.flower.policy import SitePolicy, read_policy
from fedquilt.flower.server import run_from
from fedquilt.flower.settings import FlowerSettings, split_settings
from fedquilt.flower.simulate import InProcessGrid
from fedquilt.flower.template import CHOSEN, fab_hash, run_configuration, write_app
from tiers import rest_is_slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "heflwr"


@pytest.fixture(autouse=True)
def _no_other_app() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "quiltapp"]:
        del sys.modules[name]


def task_of(app: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(app))
    return importlib.import_module("quiltapp.task")


def options_of(app: Path) -> dict[str, Any]:
    return tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def test_a_new_app_runs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = write_app(tmp_path / "My App")
    task = task_of(app, monkeypatch)
    for name in ("client_app", "server_app"):
        assert importlib.import_module(f"quiltapp.{name}").app is not None
    monkeypatch.setenv("FEDQUILT_FLOWER_OUTPUT", str(tmp_path / "results"))
    monkeypatch.setenv("FEDQUILT_FLOWER_TRACKER", "tensorboard")
    grid = InProcessGrid(client_app(task.make_model, task.client_data), 4)
    options = {**options_of(app), "mode": "fedavg"}
    result = run_from(grid, options, task.make_model, task.test_data)
    assert result.final_accuracy > 0.85
    assert result.folder is not None
    (events,) = result.folder.rglob("events.out.tfevents.*")
    assert b"accuracy" in events.read_bytes()
    assert result.folder.parent == tmp_path / "results"


def test_a_new_app_has_the_defaults_of_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = write_app(tmp_path / "app")
    task = task_of(app, monkeypatch)
    monkeypatch.setenv("FEDQUILT_FLOWER_OUTPUT", str(tmp_path / "results"))
    grid = InProcessGrid(client_app(task.make_model, task.client_data), 4)
    options = {**options_of(app), "num_rounds": 1}
    result = run_from(grid, options, task.make_model, task.test_data)
    said = capsys.readouterr().out
    assert said.startswith("all 4 clients join every round\nnoise"), "before anything is spent"
    assert "round 1 of 1" in said
    assert result.statement.is_bounded
    assert result.statement.epsilon_max <= 6.0
    assert result.folder is not None
    kept = tomllib.loads((result.folder / "config.toml").read_text())
    assert (kept["epsilon"], kept["batch_size"], kept["normalise_updates"]) == (6.0, 16, True)
    assert kept["learning_rate"] == CHOSEN["learning_rate"], "what stands in the app is kept"


def test_a_node_reads_the_file_that_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(write_app(tmp_path / "app"), monkeypatch)
    x, y = np.zeros((3, 64), np.float32), np.arange(3)
    np.savez(tmp_path / "own.npz", x=x, y=y)

    class Context:
        node_config = {"data": str(tmp_path / "own.npz")}  # noqa: RUF012

    held = task.client_data(Context())
    assert np.array_equal(held[0], x)
    assert np.array_equal(held[1], y)


def test_every_option_of_a_run_can_be_set_and_none_of_the_operators() -> None:
    table = run_configuration()
    options, settings = split_settings(table)
    assert settings == FlowerSettings()
    assert options["mode"] == "certified"
    assert "noise_seed" not in options, "an empty text is an option that is not given"
    assert table["noise_seed"] == ""
    assert not {"ledger", "output_dir", "population", "engine", "dataset"} & table.keys()
    assert not {"allow_unbounded", "evaluation_share"} & table.keys()
    with pytest.raises(InvalidValueError, match="nonesuch must be an option"):
        run_configuration(nonesuch=1)
    with pytest.raises(InvalidValueError, match="flower_nonesuch must be one of"):
        split_settings({"flower-nonesuch": 1})


def test_the_hash_of_an_app_is_of_its_source(tmp_path: Path) -> None:
    one, other = write_app(tmp_path / "a" / "app"), write_app(tmp_path / "b" / "app")
    assert fab_hash(one) == fab_hash(other)
    (other / "quiltapp" / "task.py").write_text("print('something else')\n")
    assert fab_hash(one) != fab_hash(other)
    assert fab_hash(one) in commands_for_hosts({"trusted": fab_hash(one)})


def test_an_app_takes_no_files_of_runs_to_the_nodes(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    value = fab_hash(app)
    for path in ("results/run/clients.json", "elsewhere/federation.json", "nodes.jsonl"):
        (app / path).parent.mkdir(parents=True, exist_ok=True)
        (app / path).write_text("{}")
    assert fab_hash(app) == value, "the template names what is sent"
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace("fab-include", "# fab-include"))
    with pytest.raises(InvalidValueError, match="must not take 'elsewhere/federation"):
        fab_hash(app)


def test_an_app_that_has_changed_is_not_run_before_nodes_trust_it(tmp_path: Path) -> None:
    federation = LocalFederation(tmp_path / "federation")
    app = write_app(tmp_path / "app")
    federation.prepare(app, 1, reserved_slots=1)
    (app / "quiltapp" / "task.py").write_text("print('something else')\n")
    with pytest.raises(InvalidValueError, match="must be the one that nodes trust"):
        federation.run()
    federation.trust(fab_hash(app))
    assert federation.config()["trusted"] == fab_hash(app)
    account = federation.roster().client_ids[1]
    assert federation.join("late", "partition-id=1 num-partitions=2"), "there is a seat"
    assert federation.roster().keys["late"][0] == account
    policy = read_policy(federation.folder / "sites" / "late" / "site.toml")
    assert policy == SitePolicy(apps=(fab_hash(app),), client=account), "certified runs alone"
    assert not federation.join("later", "partition-id=1 num-partitions=2"), "there is none"
    value = federation.rotate("late")
    assert federation.roster().keys["late"][0] == account
    assert federation.roster().keys["late"][-1] == value
    assert len(federation.roster().revoked) == 1


def test_the_options_of_heflwrs_examples_are_those_of_a_new_app() -> None:
    for name in ("mnist", "cifar10"):
        assert options_of(EXAMPLES / name).keys() == run_configuration().keys()


def test_a_preset_stands_in_an_apps_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = write_app(tmp_path / "app")
    task = task_of(app, monkeypatch)
    monkeypatch.setenv("FEDQUILT_FLOWER_OUTPUT", str(tmp_path / "results"))
    grid = InProcessGrid(client_app(task.make_model, task.client_data), 4)
    given = {"preset": "paper-mnist", "mode": "", "num_rounds": 1, "noise_layers": "3*"}
    options = {**options_of(app), **given}
    result = run_from(grid, options, task.make_model, task.test_data)
    kept = tomllib.loads((result.folder / "config.toml").read_text())  # type: ignore[operator]
    assert kept["mode"] == "quap_fl"
    assert kept["max_clip"] == 1.0


METHODS = ["heterofl", "fedrolex", "dropout", "mfl", "fjord", "full"]


@pytest.mark.parametrize("method", rest_is_slow(METHODS, ["heterofl", "full"]))
def test_heflwrs_mnist_example_runs(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(EXAMPLES / "mnist", monkeypatch)
    rng = np.random.default_rng(0)

    def samples(count: int) -> tuple[Any, Any]:
        y = rng.integers(0, 10, count)
        return rng.normal(size=(count, 1, 28, 28)).astype(np.float32), y

    monkeypatch.setenv("FEDQUILT_FLOWER_OUTPUT", str(tmp_path))
    grid = InProcessGrid(client_app(task.make_model, lambda context: samples(20)), 4)
    options = {**options_of(EXAMPLES / "mnist"), "method": method, "num_rounds": 2}
    if method == "full":
        options["tiers"] = ""  # everybody holds the whole model
    result = run_from(grid, options, task.make_model, lambda: samples(30))
    assert result.result["rounds"] == 2
    assert "monitor" in (result.folder / "nodes.jsonl").read_text()  # type: ignore[operator]


def test_heflwrs_cifar_example_can_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from fedquilt.slices import slice_model

    task = task_of(EXAMPLES / "cifar10", monkeypatch)
    small = slice_model(task.make_model(), "1/4", sample=torch.zeros(2, 3, 32, 32))
    assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert options_of(EXAMPLES / "cifar10")["method"] == "heterofl"


def test_the_commands(
    cli: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = cli("flower", "new", "mine")
    assert said.code == 0
    assert (tmp_path / "mine" / "quiltapp" / "task.py").exists()
    assert cli("flower", "new", "mine").code == 2, "it is not overwritten"
    for command in ("status", "run", "resume"):
        said = cli("flower", command)
        assert said.code == 2
        assert "must be the folder of a federation" in said.words
    assert cli("flower", "down").code == 0
    said = cli("flower", "trust", "mine")
    assert said.out.split()[-1] == fab_hash(tmp_path / "mine"), "without a federation, too"
    assert cli("flower", "setup", "server", "etc", "--host", "10.1.2.3").code == 0
    assert (tmp_path / "etc" / "server.key").stat().st_mode & 0o077 == 0
    assert cli("flower", "setup", "node", "host").out.startswith("key:")
    assert {"node", "node.pub", "node.secret"} <= {x.name for x in (tmp_path / "host").iterdir()}
    assert cli("flower", "setup", "node", "host", "--host", "a").code == 2
    assert cli("flower", "setup", "other", "host").code == 2
    said = cli("flower", "up", "nowhere")
    assert said.code == 2
    assert "must hold a pyproject.toml" in said.words


def test_run_and_resume_with_the_engine_flower(
    cli: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["--num-clients", "4", "--num-rounds", "2", "--local-epochs", "1", "--mode", "fedavg"]
    said = cli("run", "--engine", "flower", *few, "--quiet")
    assert said.code == 0, said.err
    (folder,) = (tmp_path / "results").iterdir()
    assert (folder / "nodes.jsonl").exists()
    assert cli("run", "--resume", str(folder), "--quiet").code == 0, "a finished run is shown"
    (folder / "result.json").unlink()
    assert cli("run", "--resume", str(folder), "--quiet").code == 0
    assert (folder / "result.json").exists()
    assert cli("compare", "--engine", "flower", *few[:6], "--modes", "fedavg").code == 2
