"""Figures for Prometheus: public ones of a server, at its gate; private ones of a site, at its own.

    python -m fedquilt.flower.gate ... --metrics /var/lib/fedquilt/results    # GET /metrics
    python -m fedquilt.flower.metrics /etc/fedquilt/site.toml --port 9109     # on loopback

A server's figures are those that a statement or a round's public line has as well: rounds, who was
absent, what was released so far, versions, and how many orders were refused by policies of sites,
which follow from no data.  Refusals by content are in `nodes.jsonl` and not here.  A site's are
what `fedquilt site show` says, for whoever holds the data: they are served to this machine alone.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fedquilt import __version__
from fedquilt.common.errors import FedquiltError
from fedquilt.common.schema import Object, Schema
from fedquilt.common.untrusted import read_lines, records
from fedquilt.flower.journal import GrowingFile
from fedquilt.record.schema import ROUND

_KEPT_SECONDS = 5.0
_ROUND = Object({}, {**ROUND.needed, **ROUND.known})
Row = tuple[str, str, dict[str, str], float]
"""Name, what it is, labels, value."""


class ServerFigures:
    """The public figures of the runs in a folder; lines of a run are read once."""

    def __init__(self, results: Path) -> None:
        self._results = results
        self._runs: dict[Path, _RunFigures] = {}

    def __call__(self) -> str:
        """Return the figures."""
        folders = sorted(path.parent for path in self._results.glob("*/config.toml"))
        self._runs = {folder: self._runs.get(folder) or _RunFigures(folder) for folder in folders}
        for run in self._runs.values():
            run.read()
        return _exposed(_server_rows(list(self._runs.values())))


class _RunFigures:
    """What the lines of a run's folder come to."""

    def __init__(self, folder: Path) -> None:
        self._rounds = GrowingFile(folder / "rounds.jsonl")
        self._nodes = GrowingFile(folder / "nodes.jsonl")
        self._result = folder / "result.json"
        self.rounds = self.absent = self.refused = 0
        self.last: dict[str, Any] = {}
        self.ended = False

    def read(self) -> None:
        """Take in what has been added since the last look."""
        self.ended = self._result.exists()
        lines = _records(self._rounds, _ROUND)
        if self._rounds.was_replaced:
            self.rounds = self.absent = 0
        self.rounds += len(lines)
        self.absent += sum(len(line.get("absent") or ()) for line in lines)
        self.last = lines[-1] if lines else self.last
        told = [str(line.get("refused", "")) for line in _records(self._nodes, Object({}))]
        if self._nodes.was_replaced:
            self.refused = 0
        self.refused += sum(reason.startswith("by its site") for reason in told)


def site_metrics(policy: Path) -> str:
    """Return the private figures of a site: its account, its refusals."""
    return _exposed(_site_rows(policy))


def _server_rows(runs: list[_RunFigures]) -> Iterator[Row]:
    yield "fedquilt_info", "The version that runs.", {"version": __version__}, 1
    ended = sum(run.ended for run in runs)
    for state, count in (("finished", ended), ("not finished", len(runs) - ended)):
        yield "fedquilt_runs", "Runs of this server.", {"state": state}, count
    for name, what, counted in (
        ("rounds", "Rounds that were released.", [run.rounds for run in runs]),
        ("absences", "Clients that were asked and did not come.", [run.absent for run in runs]),
        ("site_refusals", "Orders that policies of sites refused.", [run.refused for run in runs]),
    ):
        yield f"fedquilt_{name}_total", what, {}, sum(counted)
    last = runs[-1].last if runs else {}
    if last:
        number = float(last.get("round", 0)) + 1
        yield "fedquilt_round", "The round of the newest run.", {}, number
        epsilon = (last.get("epsilon_spent") or {}).get("worst")
        if isinstance(epsilon, int | float):
            yield "fedquilt_epsilon", "The largest epsilon of a client in that run.", {}, epsilon


def _site_rows(policy: Path) -> Iterator[Row]:
    from fedquilt.flower.policy import read_policy
    from fedquilt.flower.site import account_path, refusals_path, site_account

    yield "fedquilt_info", "The version that runs.", {"version": __version__}, 1
    told = refusals_path(policy)
    yield "fedquilt_refusals_total", "Orders that were refused.", {}, len(read_lines(told))
    chosen = read_policy(policy)
    yield "fedquilt_epsilon_allowed", "What may be given away in all.", {}, chosen.epsilon
    account = account_path(policy, chosen)
    spent, left, replies = 0.0, chosen.epsilon, 0
    if account.exists():
        ledger, population = site_account(account, chosen, read_only=True)
        with ledger:
            spent = float(population.epsilons()[0])
            left, replies = float(population.epsilon_left()[0]), int(population.joins()[0])
    yield "fedquilt_epsilon_spent", "What was given away.", {}, spent
    yield "fedquilt_epsilon_left", "What a new run may ask for.", {}, left
    yield "fedquilt_replies_total", "Replies that have left.", {}, replies


def _records(file: GrowingFile, schema: Schema) -> list[dict[str, Any]]:
    """Return the new lines of a file that a run may be writing; none where it cannot be read."""
    with contextlib.suppress(FedquiltError, OSError):
        return records(file.new(), schema)
    return []


def _exposed(rows: Iterable[Row]) -> str:
    """Return figures in the text format of Prometheus."""
    lines, seen = [], set()
    for name, what, labels, value in rows:
        if name not in seen:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
            seen.add(name)
        inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
        lines.append(f"{name}{{{inside}}} {value:g}" if inside else f"{name} {value:.9g}")
    return "\n".join(lines) + "\n"


class Kept:
    """Figures that are read at most once in a few seconds, by one caller; others get the last."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read
        self._text, self._until = "", 0.0
        self._first, self._reading = threading.Lock(), threading.Lock()

    def __call__(self) -> str:
        """Return the figures."""
        with self._first if not self._text else contextlib.nullcontext():
            if time.monotonic() > self._until and self._reading.acquire(blocking=False):
                try:
                    self._text = self._read()
                    self._until = time.monotonic() + _KEPT_SECONDS
                finally:
                    self._reading.release()
        return self._text


def main() -> None:
    """Serve the figures of a site to this machine."""
    command = argparse.ArgumentParser(prog="python -m fedquilt.flower.metrics")
    command.add_argument("policy", type=Path, metavar="site.toml")
    command.add_argument("--port", type=int, default=9109)
    given = command.parse_args()
    with site_server(given.policy, given.port) as server:
        server.serve_forever()


def site_server(policy: Path, port: int) -> http.server.HTTPServer:
    """Return the server of a site's figures and its health, on loopback."""
    kept = Kept(lambda: site_metrics(policy))

    class Answer(http.server.BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            try:
                status, text = 200, kept() if self.path in ("/metrics", "/readyz") else "ok\n"
                if self.path == "/readyz":
                    text = "ready\n"
                if self.path not in ("/metrics", "/readyz", "/healthz"):
                    status, text = 404, "not here\n"
            except (FedquiltError, OSError):
                status, text = 503, "the policy or the account of this site cannot be read\n"
            self.send_response(status)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Say nothing of who looks."""

    return http.server.HTTPServer(("127.0.0.1", port), Answer)


if __name__ == "__main__":
    main()
