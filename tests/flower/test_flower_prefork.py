"""The prefork server: forks, their ends, and the one app that it runs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.constant import TaskType

from fedquilt.flower import internals, prefork, wire

pytestmark = pytest.mark.processes


def spec(**given: Any) -> SimpleNamespace:
    usual = {
        "task_type": TaskType.CLIENT_APP,
        "runtime_api_address": "127.0.0.1:1",
        "token": "t",
        "insecure": True,
        "root_certificates_path": None,
        "fab_hash": "trusted",
    }
    return SimpleNamespace(**{**usual, **given})


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_ends_with_the_code_of_its_work_and_writes_to_its_log(tmp_path: Path) -> None:
    def fails() -> None:
        raise ValueError("on purpose")

    assert ended(prefork.fork(lambda: os.write(1, b"said"), tmp_path / "log")) == 0
    assert ended(prefork.fork(fails, tmp_path / "log")) == 1
    assert ended(prefork.fork(lambda: sys.exit(7), tmp_path / "log")) == 7
    assert (tmp_path / "log").read_text() == "said"


def test_an_order_of_another_app_is_answered_and_the_app_is_never_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A SuperNode whose task nobody takes up waits for ever, and answers no later order."""
    answers: list[Any] = []
    monkeypatch.setattr(prefork, "fork", lambda work, log=None: work() or 1)
    monkeypatch.setattr(prefork, "_die_with", lambda parent: None)
    monkeypatch.setattr(prefork, "_run_command", lambda arguments: answers.append("run"))
    monkeypatch.setattr(internals, "guard_client_app", answers.append)
    executor = prefork.ForkExecutor(trusted="trusted")
    for value in ("another", None):
        assert executor.launch(spec(fab_hash=value)).status.name == "ACCEPTED"
    assert answers == [prefork.refuse_app, "run"] * 2
    assert executor.launch(spec()).status.name == "ACCEPTED"
    assert answers[4:] == ["run"]
    assert executor.launch(spec(task_type=TaskType.MODEL)).status.name == "FAILED"
    stranger = spec(task_type=TaskType.SERVER_APP, fab_hash="another")
    assert executor.launch(stranger).status.name == "FAILED"


def test_who_is_refused_is_told_so_without_its_app() -> None:
    facts = ConfigRecord({"token": "f" * 32})
    for content in (RecordDict({"config": facts}), RecordDict()):
        with internals.acting_as(1, 77):
            order = Message(content, 77, "train")
            context = Context(1, 77, {}, RecordDict(), {})
            reply = prefork.refuse_app(order, context, "ab" * 32, lambda: pytest.fail("loaded"))
        said = wire.unpack_reply(reply.content, 1 << 20)
        assert said.failed
        assert "is not the one that this node was told to trust" in said.refusal
        assert said.token == wire.reply_token(order.content)


def test_children_that_have_ended_are_buried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefork, "_run_command", lambda arguments: None)
    executor = prefork.ForkExecutor()
    executor.launch(spec())
    (child,) = executor._children
    until = time.monotonic() + 20
    while executor._children and time.monotonic() < until:
        executor.reconcile()
        time.sleep(0.02)
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel must be Linux")
def test_a_child_dies_with_its_parent_however_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(arguments: list[str]) -> None:
        (tmp_path / "child").write_text(str(os.getpid()))
        time.sleep(60)

    def parent() -> None:
        monkeypatch.setattr(prefork, "_run_command", stuck)
        prefork.ForkExecutor().launch(spec())
        time.sleep(60)

    above = prefork.fork(parent, tmp_path / "log")
    until = time.monotonic() + 20
    while not (tmp_path / "child").exists() and time.monotonic() < until:
        time.sleep(0.02)
    child = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    os.kill(above, signal.SIGKILL)
    ended(above)
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.02)
    assert not child.exists() or child.read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    ("kind", "number", "told"),
    [
        (TaskType.SERVER_APP, signal.SIGKILL, True),
        (TaskType.SERVER_APP, None, False),
        (TaskType.CLIENT_APP, signal.SIGKILL, False),
    ],
)
def test_the_superlink_is_told_of_a_serverapp_that_was_killed(
    kind: TaskType, number: int | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(internals, "report_killed", killed.append)
    monkeypatch.setattr(
        prefork, "_run_command", lambda arguments: number and os.kill(os.getpid(), number)
    )
    executor = prefork.ForkExecutor()
    given = spec(task_type=kind)
    executor.launch(given)
    until = time.monotonic() + 20
    while executor._children and time.monotonic() < until:
        executor.reconcile()
        time.sleep(0.02)
    assert killed == ([given] if told else [])


def test_a_superlink_that_is_away_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    internals.report_killed(spec(task_type=TaskType.SERVER_APP))
    assert "was not told" in caplog.text
