"""fedquilt.log: where records go, and that nobody waits for them."""

from __future__ import annotations

import io
import logging
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from fedquilt.errors import InvalidValueError, StorageError
from fedquilt.log import configure, log, logger, reset
from fedquilt.observe.delivery import Address, Delivery
from http_receiver import Receiver, wait_until
from run_processes import environment


def handlers() -> list[logging.Handler]:
    """The logger's handlers without those that pytest adds to every logger."""
    return [one for one in logger.handlers if not type(one).__module__.startswith("_pytest")]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    reset()
    assert handlers() == []
    assert (logger.level, logger.propagate) == (logging.NOTSET, True)
    alive = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("fedquilt") for name in alive)


def python(script: str) -> str:
    """Run a script in a fresh interpreter and return what it wrote."""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout + ended.stderr


def test_importing_changes_nothing() -> None:
    script = (
        "import logging; before = list(logging.root.handlers)\n"
        "from fedquilt.log import logger\n"
        "print(logger.name, logger.handlers, logger.level, logger.propagate)\n"
        "print(logging.root.handlers == before)"
    )
    assert python(script).split("\n")[:2] == ["fedquilt [] 0 True", "True"]


def test_unconfigured_records_go_to_the_applications_logging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log(logging.WARNING, "hello, %s", "world")
    assert caplog.messages == ["hello, world"]
    assert caplog.records[0].filename == "test_log.py"


def test_file_and_console_have_the_identifier_and_the_caller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "folder" / "app.log"
    configure("100% mine", file=file)
    log(logging.DEBUG, "hello, world!")
    line = file.read_text()
    assert line.startswith("100% mine | DEBUG fedquilt ")
    assert " | test_log.py:" in line
    assert line.endswith(" | hello, world!\n")
    assert capsys.readouterr().out == line


def test_the_console_follows_standard_output() -> None:
    configure("a")
    with redirect_stdout(io.StringIO()) as text:
        logger.info("moved")
    assert text.getvalue().endswith("moved\n")


def test_a_second_configure_replaces_the_first(tmp_path: Path, receiver: Receiver) -> None:
    configure("one", file=tmp_path / "one.log", host=receiver.host, console=False)
    logger.info("first")
    configure("two", file=tmp_path / "two.log", console=False)
    configure("two", file=tmp_path / "two.log", console=False)
    logger.info("second")
    assert len(handlers()) == 1
    assert (tmp_path / "one.log").read_text().count("\n") == 1
    assert (tmp_path / "two.log").read_text().count("second") == 1
    # What waited for the server was delivered before its handler went.
    assert [fields["message"] for _, fields in receiver.forms] == ["first"]


def test_no_line_appears_twice(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(root)
    try:
        configure("once")
        logger.info("only here")
        assert capsys.readouterr().out.count("only here") == 1
        reset()
        logger.warning("root again")
        assert capsys.readouterr().out.count("root again") == 1
    finally:
        logging.getLogger().removeHandler(root)


def test_simple_posts_the_message_alone(receiver: Receiver) -> None:
    configure("client-A", host=receiver.host, simple=True, console=False)
    logger.info("grüße & %d = %s", 1, "x+y")
    reset()
    fields = {"identifier": "client-A", "message": "grüße & 1 = x+y"}
    assert receiver.forms == [("/simple_log", fields)]


def test_the_whole_record_is_posted_without_simple(receiver: Receiver) -> None:
    configure("client-A", host=f"http://{receiver.host}", console=False)
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("failed in round %d", 3, extra={"round": 3})
    reset()
    ((path, fields),) = receiver.forms
    assert path == "/log"
    assert fields["identifier"] == "client-A"
    assert fields["message"] == fields["msg"] == "failed in round 3"
    assert (fields["levelname"], fields["name"], fields["round"]) == ("ERROR", "fedquilt", "3")
    assert fields["filename"] == "test_log.py"
    assert fields["exc_text"].endswith("KeyError: 'lost'")
    assert "args" not in fields


def test_nobody_waits_for_a_server_that_hangs(
    receiver: Receiver, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedquilt.log.CLOSE_SECONDS", 0.2)
    receiver.pause.clear()
    configure("a", host=receiver.host, console=False)
    began = time.monotonic()
    for number in range(100):
        logger.info("message %d", number)
    reset()
    assert time.monotonic() - began < 5, "half of what the server takes for one answer"
    assert "100 log records were not delivered to http://127.0.0.1" in capsys.readouterr().err


def test_an_outage_is_told_once_and_loses_nothing(
    receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver.statuses = [503, 503]
    configure("a", host=receiver.host, simple=True, console=False)
    for number in range(5):
        logger.info("%d", number)
    wait_until(lambda: len(receiver.forms) == 5)
    assert [fields["message"] for _, fields in receiver.forms] == list("01234")
    assert capsys.readouterr().err.count("cannot deliver") == 1


def test_a_server_that_refuses_is_told_at_the_end(
    receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver.statuses = [404]
    configure("a", host=receiver.host, simple=True, console=False)
    logger.info("refused")
    logger.info("taken")
    reset()
    assert [fields["message"] for _, fields in receiver.forms] == ["taken"]
    assert "1 log records were not delivered" in (said := capsys.readouterr().err)
    assert "status 404" in said


def test_records_are_delivered_when_the_program_just_ends(receiver: Receiver) -> None:
    script = f"from fedquilt.log import configure, logger\nconfigure('a', host={receiver.host!r})\n"
    python(script + "logger.info('last words')")
    assert [fields["message"] for _, fields in receiver.forms] == ["last words"]


def test_a_forked_child_delivers_its_own_records(receiver: Receiver) -> None:
    script = (
        "import os\nfrom fedquilt.log import configure, logger, reset\n"
        f"configure('a', host={receiver.host!r}, console=False)\nlogger.info('parent')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    logger.info('child'); reset(); os._exit(0)\n"
        "os.waitpid(pid, 0)"
    )
    python(script)
    messages = [fields["message"] for _, fields in receiver.forms]
    assert sorted(messages) == ["child", "parent"]


def test_a_full_queue_drops_and_counts(receiver: Receiver) -> None:
    receiver.pause.clear()
    delivery = Delivery(Address.parse(receiver.host), capacity=3)
    for number in range(5):
        delivery.put("/log", {"n": number})
    assert delivery.undelivered == 5
    receiver.pause.set()
    wait_until(lambda: len(receiver.forms) == 3)
    delivery.close(1.0)
    assert delivery.undelivered == 2
    assert [fields["n"] for _, fields in receiver.forms] == ["0", "1", "2"]


def test_a_server_that_is_not_there_costs_no_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    delivery = Delivery(Address.parse(f"127.0.0.1:{port}"))
    delivery.put("/log", {"n": 1})
    began = time.monotonic()
    delivery.close(60.0)
    assert time.monotonic() - began < 6, "a tenth of what it might have taken"
    assert delivery.undelivered == 1
    assert "ConnectionRefusedError" in (delivery.last_error or "")


def test_simple_without_a_host_warns() -> None:
    with pytest.warns(UserWarning, match="means nothing without host"):
        configure("a", simple=True, console=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configure("a", console=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"identifier": ""}, "identifier=''"),
        ({"identifier": 5}, "identifier=5"),
        ({"identifier": "a", "host": "no port:x"}, "host='no port:x'"),
        ({"identifier": "a", "host": "host:99999"}, "host='host:99999'"),
        ({"identifier": "a", "host": "ftp://host"}, "host='ftp://host'"),
        ({"identifier": "a", "host": "host:80/path"}, "host='host:80/path'"),
        ({"identifier": "a", "host": ""}, "host=''"),
        ({"identifier": "a", "simple": "yes"}, "simple='yes'"),
        ({"identifier": "a", "level": "LOUD"}, "level='LOUD'"),
        ({"identifier": "a", "console": 1}, "console=1"),
        ({"identifier": "a", "file": 7}, "file=7"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(
    arguments: dict[str, object], told: str, tmp_path: Path
) -> None:
    configure("before", file=tmp_path / "kept.log", console=False)
    kept = handlers()
    with pytest.raises(InvalidValueError, match="must be") as raised:
        configure(**arguments)  # type: ignore[arg-type]
    assert str(raised.value).startswith(told)
    assert handlers() == kept


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file='.*app\.log' cannot be written"):
        configure("a", file=tmp_path / "file" / "app.log")
    assert handlers() == []


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:5000", Address("http", "127.0.0.1", 5000)),
        ("[::1]:5000", Address("http", "::1", 5000)),
        ("https://logs.example.org", Address("https", "logs.example.org", None)),
        ("http://host:80/", Address("http", "host", 80)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address


def test_levels(tmp_path: Path) -> None:
    configure("a", file=tmp_path / "x.log", console=False, level="WARNING")
    logger.info("no")
    logger.warning("yes")
    assert "no" not in (text := (tmp_path / "x.log").read_text())
    assert text.endswith("yes\n")
