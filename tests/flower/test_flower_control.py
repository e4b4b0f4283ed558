"""What a submitted run says of itself, how it is stopped, and what exit codes rest on."""

from __future__ import annotations

import json
import logging
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from command_line import Said
from fedquilt.cli.flower import _asked_how, _nodes_of, _overrides
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.flower.client_registry import NodeRoster, key_fingerprint, roster_of_keys
from fedquilt.flower.control import Control, check_overrides, going_on, stop
from fedquilt.flower.federation import LocalFederation
from fedquilt.flower.keys import make_node_key
from fedquilt.flower.node import client_app
from fedquilt.flower.run_notes import NOW, RunNotes, StoppedError, began_at, submitted
from fedquilt.flower.server import run_from
from fedquilt.flower.simulate import InProcessGrid
from fedquilt.flower.template import run_configuration, write_app
from fedquilt.privacy.ledger import Ledger
from fedquilt.privacy.ledger.files import id_of, names_path, read_names, write_names
from fedquilt.record.result import load
from fedquilt.report.views import ledger_view
from flower_samples import Tampered, client_data, honest, make_model, test_data

CERTIFIED = {"mode": "certified", "epsilon": 8.0, "num_rounds": 4, "eval_every": 1, "noise_seed": 3}
Cli = Callable[..., Said]


@pytest.fixture(autouse=True)
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDQUILT_FLOWER_OUTPUT", str(tmp_path / "results"))
    monkeypatch.delenv("FEDQUILT_FLOWER_ROSTER", raising=False)
    return tmp_path / "results"


def run(grid: InProcessGrid, **options: Any) -> Any:
    chosen = {**CERTIFIED, "learning_rate": 0.1, **options}
    return run_from(grid, run_configuration(**chosen), make_model, test_data)


def rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_a_finished_run_says_its_rounds_with_its_measure_and_where_it_is(output: Path) -> None:
    result = run(honest(), num_rounds=2)
    notes = RunNotes(output, 1)
    assert notes.is_finished()
    assert Path((notes.read() or {})["folder"]) == result.folder.resolve()
    said = [f"round {n + 1} of 2, accuracy {x['test_accuracy']:.4f}"
            for n, x in enumerate(rounds(result.folder))]  # fmt: skip
    assert notes.words()[-2:] == said
    (result.folder / "result.json").unlink()
    assert not notes.is_finished(), "its folder has to say so as well"


def test_a_run_that_is_stopped_before_it_begins_asks_nobody(output: Path) -> None:
    RunNotes(output, 1).ask_to_stop("round")
    grid = Tampered(lambda order, reply: [reply])
    with pytest.raises(StoppedError):
        run(grid)
    assert grid.orders == []
    assert (RunNotes(output, 1).read() or {})["state"] == "stopped"


@pytest.mark.parametrize(("when", "done"), [("now", 1), ("round", 2)])
def test_a_stop_charges_what_was_released_and_the_rest_goes_on_as_if_never_stopped(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, done: int
) -> None:
    """Asked in the middle of the second round: `now` leaves it, otherwise it is the last one."""
    whole = run(honest()).state_dict
    monkeypatch.setenv("FEDQUILT_FLOWER_OUTPUT", str(tmp_path / "other"))

    def ask(order: Any, reply: Any) -> list[Any]:
        RunNotes(tmp_path / "other", 1).ask_to_stop(when)
        return [reply]

    with pytest.raises(StoppedError, match="by its operator"):
        run(Tampered(ask, rounds=(1,)))
    notes = RunNotes(tmp_path / "other", 1)
    folder = Path((notes.read() or {})["folder"])
    assert len(rounds(folder)) == done
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        (population,) = ledger.populations()
        assert len(population.charges()) == done
    (notes.path / "stop").unlink()
    resumed = run(honest(), flower_resume=True)
    assert resumed.folder.resolve() == folder
    for name, tensor in whole.items():
        np.testing.assert_array_equal(tensor, load(folder).state_dict[name])


def test_a_refusal_is_one_line_and_its_traceback_is_kept(
    output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidValueError) as refused:
        run(honest(), epsilon=-1.0)
    notes = RunNotes(output, 1)
    note = notes.read() or {}
    assert (note["state"], note["why"]) == ("failed", str(refused.value))
    assert "\n" not in note["why"]
    assert notes.traceback().startswith("Traceback")
    with caplog.at_level(logging.ERROR, "flwr"):
        logging.getLogger("flwr").error("it raised", exc_info=refused.value)
        logging.getLogger("flwr").error("a bug", exc_info=KeyError("k"))
    ours, other = caplog.records
    assert ours.getMessage() == f"error: {refused.value}"
    assert not ours.exc_info
    assert other.exc_info, "what nobody meant for people stays whole"


# -- following


class Away(Control):
    """A SuperLink that answers nothing, or always the same."""

    def __init__(self, output: Path, says: tuple[str, str, str] | None = None) -> None:
        super().__init__(1, Path("ca.crt"), output)
        self._says = says

    def flower_says(self, run_id: int) -> tuple[str, str, str] | None:
        return self._says


def ended_process() -> dict[str, Any]:
    """Return a process as notes have it, which was there and is gone."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = {"pid": process.pid, "began": began_at(process.pid)}
    process.communicate(b"\n")
    return known


def noted(output: Path, state: str, folder: Path, process: dict[str, Any]) -> RunNotes:
    notes = RunNotes(output, 7)
    notes.path.mkdir(parents=True, exist_ok=True)
    note = {"state": state, "folder": str(folder), "why": "", **process}
    (notes.path / "note.json").write_text(json.dumps(note))
    return notes


def test_exit_codes_say_whether_the_run_was_finished_though_the_superlink_is_away(
    output: Path, tmp_path: Path
) -> None:
    gone, said = ended_process(), []
    killed = noted(output, "running", tmp_path, gone)
    assert Away(output).follow(killed, said.append) == 1
    assert "error: its process was killed" in said
    unfinished = noted(output, "finished", tmp_path, gone)
    assert Away(output).follow(unfinished, said.append) == 1, "its folder has no result"
    (tmp_path / "result.json").write_text("{}")
    assert Away(output).follow(unfinished, said.append) == 0
    assert said[-3:-1] == [f"finished: {tmp_path}", f"statement: fedquilt statement {tmp_path}"]


@pytest.mark.parametrize(("kind", "code"), [("completed", 0), ("failed", 1), ("stopped", 1)])
def test_an_app_that_never_said_anything_ends_as_the_superlink_says(
    output: Path, kind: str, code: int
) -> None:
    said: list[str] = []
    control = Away(output, ("finished", kind, "No module named 'x'"))
    assert control.follow(RunNotes(output, 8), said.append) == code
    assert said == ([] if code == 0 else ["error: No module named 'x'"])


def test_stop_now_terminates_a_process_that_does_not_look(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedquilt.flower.control._PATIENCE_SECONDS", 0.3)
    with pytest.raises(InvalidValueError, match="nothing to stop"):
        going_on(output)
    process = subprocess.Popen(["sleep", "60"])
    try:
        notes = noted(output, "running", tmp_path, _seen(process.pid))
        assert [found.run_id for found in submitted(output)] == [7]
        assert not stop(going_on(output), now=False, wait=0.3), "it is in a round"
        assert notes.asked() == "round"
        assert stop(going_on(output), now=True)
        assert notes.asked() == NOW
    finally:
        process.kill()
        process.wait()


def _seen(pid: int) -> dict[str, Any]:
    return {"pid": pid, "began": began_at(pid)}


# -- what a command line may say


def test_a_keyword_is_taken_as_a_refusal_writes_it() -> None:
    assert _overrides("new_population=True allow_overlap=false") == {
        "new_population": True, "allow_overlap": False,
    }  # fmt: skip


def test_options_without_an_effect_are_refused_by_name(tmp_path: Path) -> None:
    app = str(write_app(tmp_path / "app"))
    check_overrides(app, {"num_rounds": 3, "flower_deadline": 5.0})
    check_overrides(app, {"flower_deadline": 5.0}, resumes=True)
    with pytest.raises(InvalidValueError, match=r"'num_round' must stand.*'num_rounds' meant"):
        check_overrides(app, {"num_round": 3})
    with pytest.raises(InvalidValueError, match="num_rounds must be left out"):
        check_overrides(app, {"num_rounds": 3}, resumes=True)


def test_a_folder_of_data_names_the_nodes_and_templates_are_filled_in(tmp_path: Path) -> None:
    for name in ("clinic-07.npz", "clinic-03.npz"):
        (tmp_path / name).touch()
    names, told = _nodes_of("4", None, str(tmp_path))
    assert names == ["clinic-03", "clinic-07"]
    assert told["clinic-07"] == f'data="{tmp_path}/clinic-07.npz"'
    names, told = _nodes_of("a, b", 'x="/srv/{name}" i={place} n={nodes}', None)
    assert (names, told["b"]) == (["a", "b"], 'x="/srv/b" i=1 n=2')
    assert _nodes_of("2", None, None) == (["node0", "node1"], {})


def test_a_revoked_client_has_no_key_and_comes_back_with_another_on_its_account(
    cli: Cli, tmp_path: Path
) -> None:
    path = tmp_path / "roster.json"
    keys = {name: make_node_key(tmp_path / name) for name in ("a", "b", "new")}
    for name in ("a", "b"):
        assert cli("flower", "enroll", name, f"{tmp_path / name}.pub", "--roster", path).code == 0
    before = NodeRoster.read(path).client_ids
    assert cli("flower", "revoke", "nobody", "--roster", path).code == 2
    assert cli("flower", "revoke", "b", "--roster", path).code == 0
    roster = NodeRoster.read(path)
    assert (roster.is_revoked("a"), roster.is_revoked("b")) == (False, True)
    assert roster.client_of() == {key_fingerprint(keys["a"]): 0}
    assert cli("flower", "rotate", "b", "--key", tmp_path / "new.pub", "--roster", path).code == 0
    roster = NodeRoster.read(path)
    assert roster.client_ids == before
    assert roster.current_key("b") == key_fingerprint(keys["new"])
    assert not roster.is_revoked("b")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("typed", "meant"),
    [(b"a\n", "after its round"), (b"l\n", "leave"), (b"\n", "now"), (b"\x04", "now")],
)
def test_ctrl_c_on_a_terminal_asks_what_is_meant(
    typed: bytes, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, terminal = pty.openpty()
    with open(ours, "wb", buffering=0) as keyboard, open(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        keyboard.write(typed)
        assert _asked_how() == meant
    assert "[n]ow, [a]fter its round, or [l]eave it running?" in capsys.readouterr().out


@pytest.mark.parametrize("resumed", [False, True])
def test_what_was_spent_is_not_denied_to_whoever_resumes(output: Path, resumed: bool) -> None:
    hopeless: dict[str, Any] = {"epsilon": 0.01, "noise_seed": "", "num_rounds": 2}
    if resumed:

        def stop_later(order: Any, reply: Any) -> list[Any]:
            RunNotes(output, 1).ask_to_stop("round")
            return [reply]

        stopped = Tampered(stop_later)
        with pytest.raises(StoppedError):
            run(stopped, **hopeless)
        (RunNotes(output, 1).path / "stop").unlink()
        (RunNotes(output, 1).path / "words.log").unlink()
        hopeless = {"flower_resume": True}
    run(honest(), **hopeless)
    (advice,) = [line for line in RunNotes(output, 1).words() if "Ctrl-C" in line]
    assert ("nothing has been spent yet" in advice) is not resumed
    assert ("its rounds so far are charged" in advice) is resumed


def test_the_first_run_on_a_ledger_says_what_it_fixes_for_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: Path
) -> None:
    grid, _ = on_roster(tmp_path, monkeypatch)
    for _ in range(2):
        run(grid, num_rounds=1, noise_seed="", epsilon=2.0, allowance=6.0)
    told = [line for line in RunNotes(output, 1).words() if "in its life" in line]
    assert told == [
        "the ledger is new: every client may give away epsilon 6 in its life (`allowance`), "
        "and this run may take 2 of it"
    ]


def test_status_shows_the_run_that_goes_on_and_logs_why_one_ended(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, folder = write_app(tmp_path / "myapp"), tmp_path / "federation"
    federation = LocalFederation(folder)
    federation.prepare(app, ["clinic-07"])
    results = Path(federation.config()["output"])
    resumed, newer = results / "resumed", results / "newer"
    for made in (resumed, newer):
        made.mkdir(parents=True)
        (made / "config.toml").write_text("")
    RunNotes(results, 1).write("running", folder=resumed)
    failed = RunNotes(results, 2)
    failed.write("failed", why="epsilon='lots' must be a number")
    monkeypatch.setattr(LocalFederation, "online", lambda self: set())
    at = ("--folder", folder)
    shown = cli("flower", "status", *at).out
    assert f"last run: {resumed}" in shown
    assert "run 1: running\n" in shown
    said = cli("flower", "resume", *at)
    assert (said.code, "fedquilt flower stop" in said.words) == (2, True)
    assert "run 2: failed: epsilon='lots'" in shown
    assert cli("flower", "logs", *at).out.endswith("ended: epsilon='lots' must be a number\n")
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "clinic-07.log").write_text("started\n")
    assert cli("flower", "logs", "clinic-07.app", *at).out == "started\n"


def test_up_starts_nodes_with_the_key_that_counts_and_leaves_revoked_ones_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, names = LocalFederation(tmp_path / "federation"), ["a", "b", "c"]
    monkeypatch.setattr(LocalFederation, "_with_nodes", lambda self, act: None)
    app = write_app(tmp_path / "myapp")
    federation.prepare(app, names)
    federation.rotate("b")
    federation.revoke("c")
    nodes = federation.prepare(app, names)["nodes"]
    assert {name: node.get("key") for name, node in nodes.items()} == {"a": None, "b": "b-key2"}
    federation.join("c", "")
    assert federation.prepare(app, names)["nodes"]["c"]["key"] == "c-key2"


def test_the_next_command_names_a_folder_that_is_not_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert LocalFederation("federation").command("run") == "fedquilt flower run"
    elsewhere = tmp_path / "two words"
    federation = LocalFederation(elsewhere)
    assert federation.command("run") == f"fedquilt flower run --folder '{elsewhere}'"
    federation.prepare(write_app(tmp_path / "app"), ["clinic-07"])
    said: list[str] = []
    notes = noted(tmp_path, "failed", tmp_path / "run", ended_process())
    assert federation.control().follow(notes, said.append) == 1
    assert said[-1].endswith(f"continue with: fedquilt flower resume --folder '{elsewhere}'")


def test_stop_of_a_server_where_no_run_goes_on_is_refused(cli: Cli, output: Path) -> None:
    said = cli("flower", "stop", "--output", output)
    assert said.code == 2
    assert said.err.count("\n") == 1


# -- names


def on_roster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[InProcessGrid, Path]:
    """Return a grid of four clinics that are known by their keys, and their roster's file."""
    names = [f"clinic-{place:02}" for place in range(4)]
    keys = [make_node_key(tmp_path / name) for name in names]
    path = tmp_path / "roster.json"
    roster_of_keys(zip(names, keys, strict=True)).write(path)
    monkeypatch.setenv("FEDQUILT_FLOWER_ROSTER", str(path))
    monkeypatch.setenv("FEDQUILT_FLOWER_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setenv("FEDQUILT_FLOWER_POPULATION", "wards")
    app = client_app(make_model, client_data)
    return InProcessGrid(app, 4, public_keys=keys), path


def test_a_ledger_speaks_of_clients_by_name_and_its_chain_by_key(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, roster = on_roster(tmp_path, monkeypatch)
    result = run(grid, num_rounds=1, noise_seed="")
    lines = [json.loads(x) for x in (result.folder / "nodes.jsonl").read_text().splitlines()]
    assert {x["name"] for x in lines if "node" in x} == {f"clinic-{n:02}" for n in range(4)}
    ledger, account = tmp_path / "ledger.sqlite", NodeRoster.read(roster).client_ids[2]
    shown = cli("ledger", "show", ledger).out
    assert "clinic-02" in shown
    assert "key:" not in shown
    assert account[:20] in cli("ledger", "show", ledger, "--keys").out
    by_name = cli("ledger", "show", ledger, "--client", "clinic-02")
    by_key = cli("ledger", "show", ledger, "--client", account)
    assert by_name.code == 0
    assert by_name.out == by_key.out
    assert json.loads(cli("ledger", "show", ledger, "--client", "clinic-02", "--json").out)[0][
        "client_id"
    ] == account  # fmt: skip
    assert ledger_view(ledger)["ledger"]["populations"][0]["ids"][2] == "clinic-02"
    names_path(ledger).unlink()
    assert account[:20] in cli("ledger", "show", ledger).out, "as before there were names"
    assert cli("ledger", "verify", ledger).code == 0
    assert names_path(ledger).exists() is False


def test_a_refusal_names_the_client_that_cannot_pay(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, _ = on_roster(tmp_path, monkeypatch)
    run(grid, num_rounds=1, noise_seed="")
    with pytest.raises(FedquiltError):
        run(grid, num_rounds=1, noise_seed="")
    why = (RunNotes(output, 1).read() or {})["why"]
    assert "clinic-0" in why
    assert "key:" not in why


def test_names_are_kept_by_account_and_an_ambiguous_one_is_nobodys(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    write_names(ledger, {"key:1": "a", "key:2": "b"})
    write_names(ledger, {"key:2": "a", "key:3": "key:1"})
    names = read_names(ledger)
    assert names == {"key:1": "a", "key:2": "a", "key:3": "key:1"}
    assert [id_of(names, x) for x in ("a", "key:1", "c")] == ["a", "key:1", "c"]
    assert names_path(ledger).stat().st_mode & 0o077 == 0
    names_path(ledger).write_text("[1]")
    with pytest.raises(FedquiltError, match="JSON object"):
        read_names(ledger)


def test_a_run_on_nodes_may_begin_with_the_model_of_an_earlier_one(output: Path) -> None:
    """Weights travel with the orders: only the server's app has to load them."""
    before = run(honest(), num_rounds=2).state_dict

    def loaded() -> Any:
        model = make_model()
        model.load_state_dict(before)
        return model

    options = run_configuration(mode="fedavg", num_rounds=1, learning_rate=1e-9)
    after = run_from(honest(), options, loaded, test_data).state_dict
    for name, tensor in before.items():
        np.testing.assert_allclose(after[name], tensor, atol=1e-6)


def test_a_run_on_nodes_has_its_page_and_is_watched_as_any_run(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, roster = on_roster(tmp_path, monkeypatch)
    result = run(grid, num_rounds=2, noise_seed="")
    page = tmp_path / "page.html"
    assert cli("report", result.folder, "-o", page).code == 0
    text = page.read_text()
    assert result.folder.name in text
    told = [name for name in NodeRoster.read(roster).client_ids if name in text]
    assert not told, "who the clients are is their owner's"
    assert "clinic-0" not in text
    watched = cli("watch", result.folder, "--seconds", "0.5")
    assert watched.code == 0
    assert "http://127.0.0.1:" in watched.out + watched.err
