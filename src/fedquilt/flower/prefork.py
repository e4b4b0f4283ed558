"""A prefork server: it has torch imported, and forks for every message.

Flower starts a fresh process for every message, which imports torch: seconds each time.
This is Flower's own loop that takes up tasks (`flower-superexec`), with an executor that
forks instead.  Before a fork there are no threads and no CUDA here; a child ends with
`os._exit`, so that nothing of the parent's is closed twice.

    python -m fedquilt.flower.warm --runtime-api-address 127.0.0.1:9094 --insecure \\
        --superexec-auth-secret-file SECRET --trust FAB_HASH

`--trust` names the one app that this node runs: another is never unpacked.  With `--site`, a site's
policy, every order is first compared with it (`fedquilt.flower.site`).  An order that is refused is
answered: the node is free for the next.

A child dies with its parent, however that ends.  Of a ServerApp that was killed the
SuperLink is told at once; it would notice after a minute, and until then nodes wait for
orders that nobody finishes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.common.storage import open_log
from fedquilt.flower import internals

if TYPE_CHECKING:
    from fedquilt.flower.keeper import KeeperProcess
    from fedquilt.flower.site import Site

PRELOADED = (
    *("numpy", "torch", "sklearn.datasets", "fedquilt.experiment.api", "fedquilt.flower.node"),
    *("fedquilt.flower.server", "fedquilt.flower.site", "fedquilt.flower.keeper"),
    *("flwr.supernode.cli.flwr_clientapp", "flwr.superlink.cli.flwr_serverapp"),
    *("flwr.supernode.cli.flower_supernode", "flwr.supernode.main"),
)
POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
_CLIENT_APP, _SERVER_APP = "flwr-clientapp", "flwr-serverapp"
_SET_DEATH_SIGNAL = 1  # of prctl(2), on Linux


def preload() -> None:
    """Import what every child needs."""
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


class ForkExecutor:
    """Runs tasks in forks of this process; has the methods of Flower's executors."""

    def __init__(
        self,
        trusted: str | None = None,
        site: Site | None = None,
        keeper: KeeperProcess | None = None,
    ) -> None:
        self.trusted = trusted
        self.site = site
        self.keeper = keeper
        self._children: dict[int, Any] = {}

    def get_eligible_capacity(self, supported: Any, **_: Any) -> tuple[Any, set[str]]:
        """Take any task."""
        return supported, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """There is always room for a fork."""

    def launch(self, spec: Any) -> Any:
        """Fork, and run the task's command in the child."""
        from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND
        from flwr.supercore.superexec.executor import LaunchResult

        command = TASK_TYPE_TO_COMMAND[spec.task_type]
        if command not in (_CLIENT_APP, _SERVER_APP):
            return LaunchResult.failed(f"{command} is not run here")
        site = self.site if command == _CLIENT_APP else None
        refused = site is None and self.trusted is not None and spec.fab_hash != self.trusted
        if refused and command == _SERVER_APP:
            return LaunchResult.failed(f"the app {spec.fab_hash} is not the one to be trusted here")
        address = [TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type], spec.runtime_api_address]
        arguments = [command, *address, "--token", spec.token]
        if spec.insecure:
            arguments.append("--insecure")
        elif spec.root_certificates_path is not None:
            arguments += ["--root-certificates", spec.root_certificates_path]
        arguments += ["--parent-pid", str(os.getpid())]
        parent, keeper = os.getpid(), self.keeper if command == _CLIENT_APP else None
        if keeper is not None:
            keeper.start()  # again, should it have ended

        def work() -> None:
            _die_with(parent)
            if site is not None:
                site.guard()
            elif refused:
                internals.guard_client_app(refuse_app)
            elif keeper is not None:
                keeper.guard()
            _run_command(arguments)

        self._children[fork(work)] = spec if command == _SERVER_APP else None
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Bury the children that have ended."""
        for child, spec in list(self._children.items()):
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(child, os.WNOHANG)
                if not ended:
                    continue
                del self._children[child]
                if spec is not None and os.WIFSIGNALED(status):
                    internals.report_killed(spec)

    def close(self) -> None:
        """End the children that are left."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)


def refuse_app(message: Any, context: Any, app: str, load: Callable[..., Any]) -> Any:
    """Answer an order of an app that is not run here, and that nobody unpacks."""
    from flwr.app import Message

    from fedquilt.flower import wire

    reason = f"app {str(app)[:16]!r} is not the one that this node was told to trust"
    print(f"run {context.run_id} refused: {reason}", file=sys.stderr, flush=True)
    content = wire.pack_reply(wire.token_of(message), None, refusal=reason)
    return Message(content, reply_to=message)


def fork(work: Callable[[], object], log: Path | None = None) -> int:
    """Do something in a child; return its process id.  The child never comes back here."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if log is not None:
            _write_to(log)
        work()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    """Let this process be killed when its parent ends, where the kernel can do that."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before it could be said
        os._exit(1)


def _write_to(log: Path) -> None:
    """Let what this process says go to the end of a file."""
    handle = open_log(log)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _run_command(arguments: list[str]) -> None:
    """Be one of Flower's commands, with an empty list of handlers from the parent."""
    internals.forget_exit_handlers()
    sys.argv = arguments
    if arguments[0] == _CLIENT_APP:
        internals.retry_soon_in_client_app()
        from flwr.supernode.cli import flwr_clientapp as command
    else:
        from flwr.superlink.cli import flwr_serverapp as command
    command()


def serve(
    address: str,
    *,
    insecure: bool,
    root_certificates: str | None,
    secret_file: str | None,
    trusted: str | None,
    policy: str | None = None,
    key: str | None = None,
    roster: str | None = None,
) -> None:
    """Take up the tasks of a SuperNode or SuperLink, for ever.

    With the node's key and a roster of its own, it takes part in masked rounds.
    """
    from flwr.supercore.auth import load_superexec_auth_secret

    from fedquilt.flower.keeper import Identity, KeeperProcess, SecureNode
    from fedquilt.flower.site import Site

    internals.forget_exit_handlers()
    keeper = None
    if key is not None and roster is not None:
        parent = os.getpid()

        def forked(work: Callable[[], object]) -> int:
            def kept() -> None:
                _die_with(parent)
                work()

            return fork(kept)

        identity = Identity.of_files(Path(key).resolve(), Path(roster).resolve())
        keeper = KeeperProcess(identity, forked)
    secure = None if keeper is None else SecureNode(keeper)
    site = None if policy is None else Site(Path(policy), trusted, secure)

    secret = None if secret_file is None else load_superexec_auth_secret(secret_file=secret_file)
    internals.run_superexec_with(
        ForkExecutor(trusted, site, keeper),
        runtime_api_address=address,
        insecure=insecure,
        root_certificates_path=root_certificates,
        superexec_auth_secret=secret,
        runtime_dependency_install=False,
    )


def main() -> None:
    """Run a prefork server for one SuperNode, or for the apps of a SuperLink."""
    command = argparse.ArgumentParser(prog="python -m fedquilt.flower.warm")
    command.add_argument("--runtime-api-address", required=True)
    command.add_argument("--insecure", action="store_true", help="the address is on loopback")
    command.add_argument("--root-certificates")
    command.add_argument("--superexec-auth-secret-file")
    command.add_argument("--trust", metavar="FAB_HASH", help="the one app that is run")
    command.add_argument("--site", metavar="site.toml", help="the policy of who holds the data")
    command.add_argument("--key", help="the SuperNode's private key, which signs masked rounds")
    command.add_argument("--roster", help="this node's own copy of the roster: whom it knows")
    given = command.parse_args()
    if given.site is not None:
        from fedquilt.flower.policy import read_policy

        read_policy(Path(given.site))  # one that cannot be read is told before any order is
    os.environ.setdefault(POLL, "0.2")
    preload()
    serve(
        given.runtime_api_address,
        insecure=given.insecure,
        root_certificates=given.root_certificates,
        secret_file=given.superexec_auth_secret_file,
        trusted=given.trust,
        policy=given.site,
        key=given.key,
        roster=given.roster,
    )


if __name__ == "__main__":
    main()
