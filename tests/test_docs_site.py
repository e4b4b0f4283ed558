"""The documentation as a site: it builds without a warning, and its links lead somewhere."""

from __future__ import annotations

import functools
import html.parser
import http.server
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from browser import axe
from fedquilt.config import CondenseConfig, option_fields
from run_processes import environment

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")


class Links(html.parser.HTMLParser):
    """Collects what a page refers to, and the names it has."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            if name in ("id", "name") and value:
                self.names.add(value)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a word about it."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def read(path: Path) -> Links:
    links = Links()
    links.feed(path.read_text())
    return links


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    paths = environment()
    paths["PYTHONPATH"] = ":".join([paths["PYTHONPATH"], *(p for p in sys.path if p)])
    ended = subprocess.run(
        command, cwd=ROOT, env=paths, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return place


def test_every_link_leads_somewhere(site: Path) -> None:
    pages = {path: read(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 15
    lost = []
    for path, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = place / "index.html" if place.is_dir() else place
            named = (
                not parts.fragment
                or place not in pages
                or unquote(parts.fragment) in pages[place].names
            )
            if not place.exists() or not named:
                lost.append(f"{path.relative_to(site)}: {target}")
    assert lost == []


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert "fonts.googleapis" not in text
    assert "cdn" not in text


def test_every_option_is_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "configuration" / "index.html").read_text()
    assert not [
        name for name in option_fields(CondenseConfig) if f"<code>{name}</code>" not in page
    ]
    commands = (site / "reference" / "commands" / "index.html").read_text()
    for command in ("run", "report", "watch", "sweep", "ledger show"):
        assert f"<code>fedquilt {command}</code>" in commands
    python = (site / "reference" / "python" / "index.html").read_text()
    assert "Train your own model on your own data, and say" in python


def test_every_page_is_in_the_navigation() -> None:
    pages = {
        path.relative_to(ROOT / "docs").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if "reproduction/" not in path.as_posix()
    }
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(pages)


def test_formulas_are_set_and_long_tables_are_folded(site: Path) -> None:
    modes = (site / "modes" / "index.html").read_text()
    assert "<mfrac>" in modes
    assert "\\frac" not in modes
    papers = (site / "papers" / "index.html").read_text()
    assert papers.count("<details") == (ROOT / "docs" / "papers.md").read_text().count("| promised")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_any_page(site: Path, chrome: Any, scheme: str, width: int) -> None:
    view = {"width": width, "height": 900}
    context = chrome.new_context(viewport=view, color_scheme=scheme)
    page, found, bars = context.new_page(), [], 0
    handler = functools.partial(QuietHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for path in sorted(site.rglob("*.html")):
        page.goto(f"http://127.0.0.1:{server.server_port}/{path.relative_to(site).as_posix()}")
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        page.wait_for_timeout(100)  # the theme builds some of it in the browser
        bars += page.locator(".md-code__nav").count()
        found += [f"{path.relative_to(site)}: {one}" for one in axe(page)]
    context.close()
    server.shutdown()
    server.server_close()
    assert found == []
    assert bars > 50


def test_diagrams_are_those_of_the_script() -> None:
    command = [sys.executable, str(ROOT / "tools" / "diagrams.py"), "--check"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
