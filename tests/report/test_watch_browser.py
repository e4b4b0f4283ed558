"""The live page in a browser: a run that is killed and resumed, and a ledger."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser import axe
from fedquilt.config import build_config
from fedquilt.experiment.api import run_config
from fedquilt.report.watch import LedgerSource, RunsSource, WatchServer
from run_processes import Nursery
from run_samples import flags, wait_for_lines

Visit = Callable[..., Any]


def test_a_run_killed_and_resumed_under_the_page_s_eyes(
    nursery: Nursery, visit: Visit, tmp_path: Path
) -> None:
    options = flags(mode="certified", noise_seed=None, num_rounds=12, output_dir=tmp_path)
    with WatchServer(RunsSource([tmp_path])) as server:
        page, seen = visit(server.address)
        assert "No run has begun" in page.locator("#main").inner_text()
        child = nursery.start("run", *options, "--quiet", slow_rounds=0.25)
        folder = wait_for_lines(tmp_path, 3)
        page.wait_for_selector("#spend path", state="attached", timeout=15_000)
        assert "No statement yet" in page.locator("#claim").inner_text()
        card = page.locator(".state-card")
        assert "The run goes on" in card.inner_text()
        assert re.search(r"Last sign of life: \d+ s ago", card.inner_text())
        child.kill(signal.SIGKILL)
        assert child.wait().code == -signal.SIGKILL
        page.wait_for_selector(".state-card:has-text('no process works on it')", timeout=5_000)
        assert f"fedquilt run --resume {folder}" in card.inner_text()
        drawn = int(page.locator("html").get_attribute("data-drawn"))
        again = nursery.start("run", "--resume", folder, "--quiet", slow_rounds=0.05)
        claim = page.locator("#claim", has_text=re.compile("Every client: ε ≤"))
        claim.wait_for(timeout=30_000)
        assert again.wait().code == 0
        assert int(page.locator("html").get_attribute("data-drawn")) > drawn
        assert page.locator("#tools .state").inner_text() == "connected"
        assert page.locator("#main > section").count() == page.locator("#contents a").count()
        assert seen.trouble == []
        inside = f"http://127.0.0.1:{server.port}/{server.token}/"
        assert all(request.startswith(inside) for request in seen.requests)


def test_what_is_typed_stays_while_the_page_changes(visit: Visit, tmp_path: Path) -> None:
    from run_samples import tiny

    run_config(tiny(mode="fedavg", output_dir=str(tmp_path)))
    with WatchServer(RunsSource([tmp_path])) as server:
        page, _ = visit(server.address)
        page.fill("#filter", "joins>=1")
        page.focus("#filter")
        run_config(tiny(mode="fedavg", seed=1, output_dir=str(tmp_path)))
        page.wait_for_selector("#run option:nth-child(2)", state="attached", timeout=15_000)
        assert page.input_value("#filter") == "joins>=1"
        assert page.evaluate("() => document.activeElement.id") == "filter"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with two runs of the same clients, some of them near the end."""
    place = tmp_path_factory.mktemp("ledger")
    common = {"dataset": "digits", "model": "linear", "num_clients": 12, "clients_per_round": 5}
    common |= {"num_rounds": 6, "local_epochs": 1, "mode": "certified", "allowance": 4.0}
    for epsilon in (1.5, 2.0):
        settings = {**common, "epsilon": epsilon, "ledger": str(place / "clients.sqlite")}
        run_config(build_config({**settings, "output_dir": str(place / "runs")}))
    return place / "clients.sqlite"


def test_the_operator_s_page(ledger: Path, visit: Visit) -> None:
    with WatchServer(LedgerSource(ledger)) as server:
        page, seen = visit(server.address)
        assert "FOR THE OPERATOR" in page.locator(".warning").inner_text()
        assert page.locator("#populations tbody tr").count() == 1
        assert page.locator("#runs tbody tr").count() == 2
        page.click("#clients .pick >> nth=0")
        page.wait_for_selector("#history table tbody tr")
        last = page.locator("#history tbody tr td:nth-child(5)").first.inner_text()
        assert last == page.locator("#clients tbody tr td:nth-child(2)").first.inner_text()
        page.fill("#plan", "1")
        page.click("#planned button")
        page.wait_for_selector("#planned dd")
        assert "12 clients" in page.locator("#planned").inner_text()
        page.fill("#plan", "3.9")
        page.click("#planned button")
        page.wait_for_selector("#planned dd:has-text('...'), #planned dd:has-text(':')")
        page.click("#clients button:has-text('near the end')")
        assert re.match(r"\d+ of 12 clients", page.locator("#clients [role=status]").inner_text())
        assert axe(page) == []
        assert seen.trouble == []
        page.set_viewport_size({"width": 340, "height": 700})
        assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0
