"""Take pictures of the pages in a real browser: python tools/pictures.py FOLDER [SCENE...]

Every scene is made by the commands that its owner would type, with settings of seconds each: a
comparison of modes, two runs on one ledger, the ledger, a sweep, a condensation, a run that was
stopped, and `fedquilt watch` after a kill.  Each is taken at 1280 and at 390 pixels, light and
dark, the first screen and the whole page; of the comparison and the ledger also the pictures of
docs/images.  It needs playwright, and a Chromium (FEDQUILT_CHROMIUM).
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

FEDQUILT = [sys.executable, "-c", "from fedquilt.cli import main; main()"]
DIGITS = "--dataset digits --model hog-linear --num-clients 40"
LEDGER = "--ledger people.sqlite --population people --allowance 8 --epsilon 3"
LONG = f"run {DIGITS} --learning-rate 0.2 --num-rounds 5000 --output-dir"
MODES = "fedavg,fixed_dp:54,certified:worst_case,certified"
SIZES = {1280: 900, 390: 844}
SCHEMES = ("light", "dark")


def call(line: str) -> None:
    """Run one command to its end."""
    subprocess.run([*FEDQUILT, *shlex.split(line)], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def page_of(pattern: str) -> Iterator[str]:
    """Make one page of the folders that a pattern means; gives its address."""
    found = sorted(map(str, Path().glob(pattern)))
    call(f"report {shlex.join(found)} --output page.html")
    yield Path("page.html").resolve().as_uri()


@contextmanager
def watching(*what: str) -> Iterator[str]:
    """Watch runs or a ledger for a while; gives the address."""
    command = [*FEDQUILT, "watch", *what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.send_signal(signal.SIGINT)


def ended_by(how: signal.Signals, folder: str) -> None:
    """Start a run and end it by a signal once it has had some rounds."""
    command = [*FEDQUILT, *shlex.split(LONG), folder]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
        while not [f for f in Path(folder).glob("*/rounds.jsonl") if f.stat().st_size > 30_000]:
            if child.poll() is not None:
                raise RuntimeError(f"the run in {folder!r} ended by itself: {child.returncode}")
            time.sleep(0.05)
        child.send_signal(how)


@contextmanager
def comparison() -> Iterator[str]:
    few = "--num-rounds 30 --eval-every 2 --output-dir compared"
    call(f"compare --config demo.toml --modes {MODES} {few}")
    with page_of("compared/*") as address:
        yield address


@contextmanager
def shared() -> Iterator[str]:
    for rate in ("0.2", "0.3"):
        few = f"--num-rounds 12 --learning-rate {rate} --output-dir shared --quiet"
        call(f"run {DIGITS} {LEDGER} {few}")
    with page_of("shared") as address:
        yield address


@contextmanager
def ledger() -> Iterator[str]:
    with watching("people.sqlite") as address:
        yield address


@contextmanager
def sweep() -> Iterator[str]:
    grid = "--over epsilon=1,3,6 --seeds 0,1,2 --num-rounds 10 --folder swept --quiet"
    call(f"sweep {DIGITS} {grid}")
    with page_of("swept") as address:
        yield address


@contextmanager
def condensation() -> Iterator[str]:
    few = "--num-clients 40 --num-rounds 6 --model-epochs 50 --quiet"
    call(f"condense --mode certified {few} --output-dir condensed")
    with page_of("condensed") as address:
        yield address


@contextmanager
def stopped() -> Iterator[str]:
    ended_by(signal.SIGINT, "stopped")
    with page_of("stopped") as address:
        yield address


@contextmanager
def killed() -> Iterator[str]:
    ended_by(signal.SIGKILL, "killed")
    with watching("killed") as address:
        yield address


SCENES: dict[str, Callable[[], Any]] = {
    scene.__name__: scene
    for scene in (comparison, shared, ledger, sweep, condensation, stopped, killed)
}


@dataclass(frozen=True)
class Picture:
    """A picture: its name, the screen it is taken on, and how much of the page."""

    name: str
    width: int
    height: int
    scheme: str = "light"
    scale: int = 1
    whole: bool = False


DOCUMENTS = {
    "comparison": [
        Picture("report_light", 1200, 1000),
        Picture("report_dark", 1200, 1000, "dark"),
        Picture("report_phone", 390, 844, scale=2),
    ],
    "ledger": [Picture("watch_ledger", 1200, 1000)],
}
"""Those of docs/images, by scene."""


def pictures(scene: str) -> Iterator[Picture]:
    """Yield what is taken of a scene."""
    yield from DOCUMENTS.get(scene, [])
    for width, height in SIZES.items():
        for scheme in SCHEMES:
            name = f"{scene}_{width}_{scheme}"
            yield Picture(name, width, height, scheme)
            yield Picture(f"{name}_whole", width, height, scheme, whole=True)


def take(browser: Any, address: str, place: Path, one: Picture) -> None:
    """Take one picture of an address."""
    screen = {"width": one.width, "height": one.height}
    context = browser.new_context(
        viewport=screen, color_scheme=one.scheme, device_scale_factor=one.scale
    )
    page = context.new_page()
    page.on("console", lambda said: print(f"{one.name}: {said.text}", file=sys.stderr))
    page.on("pageerror", lambda error: print(f"{one.name}: {error}", file=sys.stderr))
    page.goto(address)
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
    page.wait_for_timeout(300)  # charts are drawn as they come into view
    page.screenshot(path=place / f"{one.name}.png", full_page=one.whole)
    context.close()


def main(folder: str, *asked: str) -> None:
    """Make the scenes that are asked for, in order, and take their pictures."""
    place = Path(folder).resolve()
    place.mkdir(parents=True, exist_ok=True)
    demo = Path(__file__).resolve().parents[1] / "demo.toml"
    found = os.environ.get("FEDQUILT_CHROMIUM") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        os.chdir(work)
        shutil.copy(demo, work)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for name in asked or SCENES:
            print(name, flush=True)
            with SCENES[name]() as address:
                for one in pictures(name):
                    take(browser, address, place, one)
        browser.close()
        os.chdir(place)


if __name__ == "__main__":
    main(*sys.argv[1:])
