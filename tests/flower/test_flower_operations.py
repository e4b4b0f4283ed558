"""What an operator leaves running: the audit log, figures for Prometheus, logs that end."""

from __future__ import annotations

import json
import multiprocessing
import os
import pwd
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from starlette.testclient import TestClient

from command_line import Said
from fedquilt.cli.flower import _show_ends
from fedquilt.common.storage import open_log
from fedquilt.flower import journal, keys
from fedquilt.flower.federation import LocalFederation
from fedquilt.flower.journal import GrowingFile, cut_logs
from fedquilt.flower.metrics import Kept, ServerFigures, site_server
from fedquilt.flower.policy import policy_text, read_policy
from fedquilt.flower.proxy import Limits, make_proxy
from fedquilt.flower.run_notes import RUNNING, RunNotes, StoppedError
from fedquilt.flower.server import run_from
from fedquilt.flower.simulate import InProcessGrid
from flower_samples import COUNT, Tampered, make_model, test_data, with_token


def test_a_line_of_the_audit_log_that_is_changed_or_taken_out_is_found(tmp_path: Path) -> None:
    for place in range(5):
        journal.note(tmp_path, "enrolled", client=f"ward-{place}", account="key:ab")
    assert journal.broken(tmp_path) == []
    assert [line["client"] for line in journal.events(tmp_path)] == [f"ward-{i}" for i in range(5)]
    assert all(line["by"] and line["time"] for line in journal.events(tmp_path))
    path = tmp_path / journal.FILE
    assert path.stat().st_mode & 0o077 == 0
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines).replace("ward-1", "ward-9"))
    assert journal.broken(tmp_path) == [3]
    path.write_text("".join(lines[:2] + lines[3:]))
    assert journal.broken(tmp_path) == [3]


def test_the_log_does_not_believe_the_environment_about_who_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER", "SUDO_USER", "USERNAME"):
        monkeypatch.setenv(name, "somebody-else")
    journal.note(tmp_path, "enrolled")
    (event,) = journal.events(tmp_path)
    assert event["by"].endswith(pwd.getpwuid(os.getuid()).pw_name)
    assert "somebody-else" not in event["by"]
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    journal.note(tmp_path, "enrolled")
    assert "user 4000000" in journal.events(tmp_path)[-1]["by"]


def test_a_stop_by_the_operator_is_no_failure(tmp_path: Path) -> None:
    def ends(error: Exception) -> None:
        with journal.noting(tmp_path, "started", 7):
            raise error

    for error in (StoppedError("stopped by its operator"), ValueError("secret")):
        with pytest.raises(type(error)):
            ends(error)
    told = [(line["event"], line.get("why")) for line in journal.events(tmp_path)]
    assert {line["run"] for line in journal.events(tmp_path)} == {7}, "which of the runs it was"
    stopped = ("stopped", "stopped by its operator")
    assert told == [("started", None), stopped, ("started", None), ("failed", "ValueError")]


def test_a_long_audit_log_goes_on_in_another_file_and_its_chain_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Said]
) -> None:
    monkeypatch.setattr(journal, "_LARGEST", 500)
    for place in range(12):
        journal.note(tmp_path, "seats", count=place)
    assert len(list(tmp_path.glob("audit.jsonl.*"))) > 1
    assert [line["count"] for line in journal.events(tmp_path)] == list(range(12))
    whole = cli("flower", "audit", tmp_path, "--verify")
    assert whole.code == 0
    assert f"12 lines, 0 broken, head {journal.head(tmp_path)}" in whole.out
    shown = cli("flower", "audit", tmp_path).out.splitlines()
    assert len(shown) == 12
    assert shown[3].endswith("seats count=3")
    (tmp_path / "audit.jsonl.2").unlink()
    cut = cli("flower", "audit", tmp_path, "--verify")
    assert cut.code == 1
    assert "NOT WHOLE: line" in cut.out
    assert cli("flower", "audit", tmp_path / "elsewhere").code == 2


def _note_many(folder: Path) -> None:
    for _ in range(20):
        journal.note(folder, "refused")


@pytest.mark.processes
def test_processes_that_write_at_once_keep_the_chain(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_note_many, args=(tmp_path,)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(journal.events(tmp_path)) == 60
    assert journal.broken(tmp_path) == []


def test_a_log_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    journal.note(tmp_path / "file", "started")
    assert "the audit log lacks 'started'" in caplog.text


def ran(grid: InProcessGrid, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    monkeypatch.setenv("FEDQUILT_FLOWER_OUTPUT", str(folder))
    few: dict[str, Any] = {"num_rounds": 2, "local_epochs": 1, "clients_per_round": 1.0}
    options = {**few, "mode": "certified", "epsilon": 8.0, "policy": "worst_case", **more}
    run_from(grid, {**options, "num_clients": COUNT}, make_model, test_data)


def test_a_server_notes_who_was_refused_and_counts_in_public_what_is_public(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = Tampered(lambda order, reply: [with_token(reply, "f" * 32)], place=1)
    ran(forged, tmp_path, monkeypatch, flower_deadline=2.0)
    events = journal.events(tmp_path)
    assert [line["event"] for line in events] == ["started", "refused", "finished"]
    assert (events[1]["client"], events[1]["refused"]) == (1, "forged: another token")
    assert journal.broken(tmp_path) == []
    with pytest.raises(ValueError, match="mode"):
        ran(forged, tmp_path, monkeypatch, mode="best")
    counted = ServerFigures(tmp_path)
    figures = counted()
    lines = dict(line.rsplit(" ", 1) for line in figures.splitlines() if line[0] != "#")
    assert lines["fedquilt_rounds_total"] == "2"
    assert lines["fedquilt_absences_total"] == "1"
    assert lines["fedquilt_site_refusals_total"] == "0", "what is in a reply is not public"
    assert lines['fedquilt_runs{state="finished"}'] == "1"
    (folder,) = [path.parent for path in tmp_path.glob("*/rounds.jsonl")]
    last = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
    assert float(lines["fedquilt_epsilon"]) == pytest.approx(last["epsilon_spent"]["worst"])
    with TestClient(make_proxy("127.0.0.1:1", False, Limits(), lambda: figures)) as client:
        assert client.get("/metrics").text == figures
        assert client.post("/metrics").status_code == 403
    with TestClient(make_proxy("127.0.0.1:1", False, Limits())) as client:
        assert client.get("/metrics").status_code == 403
    refusal = json.dumps({"round": 1, "client": 0, "refused": "by its site: a dry run"})
    with (folder / "nodes.jsonl").open("a") as nodes:
        nodes.write(refusal + "\n" + refusal)  # the second line is not whole yet
    for _ in range(2):
        assert "fedquilt_site_refusals_total 1\n" in counted()
        assert "fedquilt_rounds_total 2\n" in counted()


def test_figures_read_what_is_new_and_not_every_round_of_every_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
        (tmp_path / name / "rounds.jsonl").write_text('{"round": 0, "absent": [1]}\n')
    counted = ServerFigures(tmp_path)
    assert "fedquilt_absences_total 2\n" in counted()
    lines = tmp_path / "a" / "rounds.jsonl"
    lines.write_text('{"round": 0, "absent": [1}]\n{"round": 1, "absent": [1]}\n')
    assert "fedquilt_rounds_total 3\n" in counted(), "a line that was read is not read again"
    lines.write_text("")
    assert "fedquilt_rounds_total 1\n" in counted(), "a run that begins anew is counted anew"


ODD = ["3", "[]", '"sent"', '{"absent": 3}', '{"sent": [[]]}', '{"client": []}', "[" * 99_999]


def test_odd_lines_of_what_was_noted_are_left_out(tmp_path: Path) -> None:
    federation = LocalFederation(tmp_path)
    run = tmp_path / "results" / "run"
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    RunNotes(run.parent, 7).write(RUNNING, folder=run)
    sent = json.dumps({"sent": [0, 1], "at": 0.0})
    lines = "\n".join([sent, *ODD, json.dumps({"client": 0}), ""])
    for path in (run / "nodes.jsonl", run / "rounds.jsonl", tmp_path / journal.FILE):
        path.write_text(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFederation, "config", lambda self: {"output": str(run.parent)})
        assert set(federation._waited_for()) == {1}
    assert "fedquilt_rounds_total 4\n" in ServerFigures(run.parent)()
    assert len(journal.broken(tmp_path)) == len(ODD) + 2
    assert len(journal.events(tmp_path)) == 5


def test_slow_figures_hold_up_nobody(tmp_path: Path) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        began.set()
        assert go_on.wait(20)
        return "fedquilt_rounds_total 1\n"

    with TestClient(make_proxy("127.0.0.1:1", False, Limits(), Kept(slow))) as client:
        scraped: list[str] = []
        scraper = threading.Thread(target=lambda: scraped.append(client.get("/metrics").text))
        scraper.start()
        assert began.wait(20)
        health: list[int] = []
        other = threading.Thread(target=lambda: health.append(client.get("/healthz").status_code))
        other.start()
        other.join(5)
        answered = list(health)
        go_on.set()
        scraper.join()
        other.join()
    assert answered == [200], "the gate answers nodes while files are read"
    assert scraped == ["fedquilt_rounds_total 1\n"]


def test_a_site_serves_its_figures_to_its_own_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedquilt.flower.metrics._KEPT_SECONDS", 0.0)
    policy = tmp_path / "site.toml"
    policy.write_text(policy_text(epsilon=3.0))
    with site_server(policy, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert server.server_address[0] == "127.0.0.1"
            root = f"http://127.0.0.1:{server.server_address[1]}"

            def said(path: str) -> str:
                with urllib.request.urlopen(root + path, timeout=20) as answer:
                    return str(answer.read().decode())

            assert "fedquilt_epsilon_left 3\n" in said("/metrics")
            assert said("/healthz") == "ok\n"
            assert said("/readyz") == "ready\n"
            policy.write_text("nothing")
            with pytest.raises(urllib.error.HTTPError, match="503"):
                said("/readyz")
            with pytest.raises(urllib.error.HTTPError, match="404"):
                said("/etc/passwd")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("collapses", [True, False])
def test_a_log_is_cut_under_its_writer_and_followed_over_the_cut(
    collapses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte is lost, also of what is written between the copy and the cut."""
    path, written = tmp_path / "node0.log", b""
    copy = journal.write_file
    with open(open_log(path), "ab", buffering=0) as writer:

        def copies_while_somebody_writes(*given: Any) -> None:
            copy(*given)
            writer.write(b"between\n")

        monkeypatch.setattr(journal, "write_file", copies_while_somebody_writes)
        if not collapses:
            monkeypatch.setattr(journal, "_took_off_head", lambda *_: False)
        writer.write(b"before\n")
        follower = GrowingFile(path, 0)
        assert follower.new() == []
        for count in (100, 900, 900):
            lines = b"".join(b"line %07d\n" % place for place in range(count))
            writer.write(lines)
            cut_logs(tmp_path, 5000)
            written = lines + (b"between\n" if count > 500 else b"")
            if count == 100:
                assert not (tmp_path / "node0.log.1").exists()
            else:
                kept = (tmp_path / "node0.log.1").read_bytes() + path.read_bytes()
                assert kept.endswith(written)
            assert b"".join(follower.new()) == written
        writer.write(b"half a ")
        assert follower.new() == []
        writer.write(b"line\n")
        assert follower.new() == [b"half a line\n"]
    assert path.stat().st_size < 5000
    path.unlink()
    path.write_text("begun anew\n")
    assert follower.new() == [b"begun anew\n"]


def test_logs_are_shown_without_colours_and_commands_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "node0.log").write_bytes(b"\x1b[92mINFO \x1b[0m:  started\x1b]0;title\x07\n")
    _show_ends([tmp_path / "node0.log"], 5, follow=False)
    assert capsys.readouterr().out == "INFO :  started\\x1b]0;title\\x07\n"


COMPOSE = Path(__file__).resolve().parents[2] / "deploy" / "compose.yaml"


def test_the_compose_file_runs_what_the_units_run() -> None:
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert [name for name, one in services.items() if "ports" in one] == ["gate"]
    for name in ("superlink", "serverapp"):
        assert services[name]["network_mode"] == "service:gate", "the SuperLink is on loopback"
    folder = COMPOSE.parent / "systemd"
    for name, service in services.items():
        (line,) = re.findall(
            r"^ExecStart=(.*)$",
            (folder / f"fedquilt-{name}.service").read_text().replace("\\\n", " "),
            re.MULTILINE,
        )
        unit, inside = line.split()[1:], service["command"].split()[1:]
        assert [w for w in inside if w not in ("8443",)] == [w for w in unit if w not in ("443",)]


def test_enrolment_is_noted_beside_the_roster(tmp_path: Path, cli: Callable[..., Said]) -> None:
    keys.make_node_key(tmp_path / "ward")
    roster = str(tmp_path / "roster.json")
    assert cli("flower", "enroll", "ward-7", tmp_path / "ward.pub", "--roster", roster).code == 0
    (event,) = journal.events(tmp_path)
    assert (event["event"], event["client"]) == ("enrolled", "ward-7")
    assert event["account"] == event["key"]
    handed = read_policy(tmp_path / "ward.site.toml")
    assert (handed.client, handed.modes) == (event["account"], ("certified",))
    assert handed.account == "/var/lib/fedquilt/site.sqlite", "units cannot write to /etc"
    for command in (("enroll", "ward-7", tmp_path / "ward.pub"), ("seats", "2")):
        cli("flower", *command, "--roster", roster)
    _, refused, seats = journal.events(tmp_path)
    assert (refused["event"], refused["client"]) == ("enrolment refused", "ward-7")
    assert (seats["event"], seats["count"]) == ("seats", 2)
