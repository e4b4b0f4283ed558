"""A real browser for the tests of pages: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """Return where a Chromium is: FEDQUILT_CHROMIUM, or one of the usual commands."""
    named = os.environ.get("FEDQUILT_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Seen:
    """What a page did that nobody should see: errors, and requests beyond itself."""

    trouble: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def watch(self, page: Any) -> None:
        """Listen to a page."""
        page.on("console", lambda m: self._say(m.type, m.text))
        page.on("pageerror", lambda error: self.trouble.append(str(error)))
        page.on("request", lambda request: self._ask(request.url))

    def _say(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.trouble.append(text)

    def _ask(self, url: str) -> None:
        if not url.startswith("data:"):
            self.requests.append(url)


@pytest.fixture(scope="session")
def chrome() -> Iterator[Any]:
    """A running browser; the test is skipped where there is none."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium, or FEDQUILT_CHROMIUM")
    with driver.sync_playwright() as playwright:
        # A container has no name space for Chromium's own sandbox.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chrome: Any) -> Iterator[Callable[..., tuple[Any, Seen]]]:
    """Open an address or a file; returns the page and what it did."""
    contexts = []

    def go(place: str | Path, **settings: Any) -> tuple[Any, Seen]:
        options: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}} | settings
        context = chrome.new_context(**options)
        contexts.append(context)
        page, seen = context.new_page(), Seen()
        seen.watch(page)
        page.goto(place.as_uri() if isinstance(place, Path) else place)
        drawn(page)
        return page, seen

    yield go
    for context in contexts:
        context.close()


def drawn(page: Any) -> None:
    """Wait until the charts are there; the page's policy forbids Playwright's own waiting."""
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=20_000)
    page.wait_for_selector("svg .axis, #main > .note", state="attached", timeout=20_000)


def axe(page: Any) -> list[dict[str, Any]]:
    """Return what axe-core finds wrong with a page.

    The page's own policy lets no foreign script in; the driver may put one into an
    isolated world beside it.
    """
    package = pytest.importorskip("axe_playwright_python", reason="axe is not installed")
    script = (Path(package.__file__).parent / "axe.min.js").read_text()
    page.evaluate(f"(() => {{ {script} }})()")
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        {"rule": v["id"], "nodes": [node["html"][:160] for node in v["nodes"]]}
        for v in found["violations"]
    ]
