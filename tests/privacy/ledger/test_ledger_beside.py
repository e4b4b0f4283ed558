"""Making a ledger: on any file system, by many at once, killed in the middle."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from faults_at_calls import denying, needs_shim
from fedquilt.privacy.ledger import Ledger, LedgerError, files

fork = multiprocessing.get_context("fork")


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


@pytest.fixture(params=[errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def no_hard_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("no_hard_links")
def test_a_ledger_is_made_without_hard_links(path: Path) -> None:
    with Ledger.open(path, create=True) as ledger:
        ledger.population("p", num_clients=2, epsilon=1.0, delta=1e-5)
        assert ledger.verify().ok
    assert names(path) == ["ledger.sqlite"]


@pytest.mark.usefixtures("no_hard_links")
def test_of_many_who_make_a_ledger_one_wins_also_without_hard_links(path: Path) -> None:
    """A rename would replace what another one has just made, and charged."""
    barrier = fork.Barrier(6)

    def work(number: int) -> None:
        barrier.wait()
        with Ledger.open(path, create=True) as ledger:
            ledger.population(f"p{number}", num_clients=2, epsilon=1.0, delta=1e-5)

    workers = [fork.Process(target=work, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 6
    with Ledger.open(path) as ledger:
        assert len(ledger.populations()) == 6
        assert ledger.verify().ok
    assert names(path) == ["ledger.sqlite"]


def killed_at(function: str, path: Path) -> None:
    """Make a ledger in another process that dies when it calls a function of `files`."""

    def die(*given: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        setattr(files, function, die)
        Ledger.open(path, create=True)
        os._exit(70)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("moment", ["insert_entry", "appear"])
def test_what_a_kill_left_of_a_ledger_in_the_making_is_removed(path: Path, moment: str) -> None:
    killed_at(moment, path)
    assert len(names(path)) >= 2
    assert not path.exists()
    Ledger.open(path, create=True).close()
    assert names(path) == ["ledger.sqlite"]


def test_a_draft_beside_a_finished_ledger_is_removed_by_who_opens_it(path: Path) -> None:
    """Killed between giving the ledger its name and removing the draft."""
    Ledger.open(path, create=True).close()
    for name in (".ledger.sqlite.new", ".ledger.sqlite.new-lock"):
        path.with_name(name).touch()
    other = path.with_name(".ledger.sqlite.9c.new")  # by an older version, long ago
    other.touch()
    os.utime(other, (0, 0))
    Ledger.open(path, read_only=True).close()
    assert len(names(path)) == 4
    Ledger.open(path).close()
    assert names(path) == ["ledger.sqlite"]


def test_a_draft_that_somebody_works_on_is_left(path: Path) -> None:
    Ledger.open(path, create=True).close()
    with files.drafting(path) as draft:
        pid = os.fork()
        if pid == 0:
            Ledger.open(path).close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert draft.exists()
    assert names(path) == ["ledger.sqlite"]


MAKE = """
import sys
from fedquilt.privacy.ledger import Ledger, LedgerError
try:
    with Ledger.open(sys.argv[1], create=True, timeout=0.2) as ledger:
        ledger.population("p", num_clients=2, epsilon=1.0, delta=1e-5)
except LedgerError as error:
    sys.exit(str(error))
"""


def made(path: Path, **denied: int) -> str:
    """Make or open a ledger in a process whose system calls fail; return the error."""
    command = [sys.executable, "-c", MAKE, str(path)]
    done = subprocess.run(
        command, env=denying(**denied), capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    return done.stderr


@needs_shim
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
@pytest.mark.parametrize("there", [False, True])
def test_a_ledger_without_locks_is_refused_in_words(path: Path, there: bool, number: int) -> None:
    """SQLite takes "no locks available" for somebody else's lock."""
    if there:
        Ledger.open(path, create=True).close()
    said = made(path, flock=number, fcntl=number)
    assert "has no file locks" in said
    assert "--ledger FILE" in said
    assert "another process" not in said
    assert path.exists() == there
    assert not [name for name in names(path) if name.endswith((".new", ".tmp", "-journal"))]


@needs_shim
def test_a_ledger_without_flock_and_links_works(path: Path) -> None:
    assert made(path, flock=errno.ENOSYS, link=errno.EPERM) == ""
    with Ledger.open(path) as ledger:
        assert ledger.verify().ok


def test_a_ledger_that_no_lock_protects_is_refused_and_leaves_no_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def without(*given: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, without)
    with pytest.raises(LedgerError, match="no file locks"):
        Ledger.open(path, create=True)
    assert names(path) == []
