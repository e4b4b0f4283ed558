"""Every example of README.md and docs/ runs.

A page is one folder and one namespace, its blocks run in order:

| block | what happens |
|---|---|
| python | executed |
| toml | must be a configuration; saved under the `name.toml` that the text before it ends on |
| console | lines `$ fedquilt ...` are executed; one that shows `error: ...` must fail with it, \
what else is shown must be said, word by word, whatever its figures are |
| bash | lines `fedquilt ...` are parsed |

After a line `<!-- not run -->` a python block is only compiled and a console block only parsed.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fedquilt.cli.app import app, main
from fedquilt.config import build_config
from fedquilt.data import specs
from fedquilt.models import MODELS
from tiers import rest_is_slow

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if path.is_file())
NOT_RUN = "<!-- not run -->"
FENCE = re.compile(r"^```(\w+)?\s*$")


@pytest.fixture(autouse=True)
def _same_names() -> Iterator[None]:
    """A page may register a data set or a model; the tests after it know nothing of that."""
    tables: list[dict[str, Any]] = [specs._KNOWN, MODELS]
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it starts, what it is, and the text before it."""

    line: int
    kind: str
    text: str
    before: str
    run: bool


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order."""
    lines = page.splitlines()
    number = 0
    prose: list[str] = []
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence is None:
            prose.append(lines[number])
            number += 1
            continue
        end = lines.index("```", number + 1)
        said = [line for line in prose if line.strip()]
        run = not said or said[-1].strip() != NOT_RUN
        text = "\n".join(lines[number + 1 : end]) + "\n"
        yield Block(number + 1, fence[1] or "", text, "\n".join(said), run)
        number, prose = end + 1, []


def commands(block: Block) -> Iterator[tuple[list[str], str]]:
    """Yield each fedquilt command of a block with the output shown after it."""
    console = block.kind == "console"
    sign = "$ fedquilt" if console else "fedquilt"
    lines = block.text.replace("\\\n", " ").splitlines()
    for number, line in enumerate(lines):
        if line.startswith(f"{sign} "):
            after = itertools.takewhile(lambda said: not said.startswith("$ "), lines[number + 1 :])
            shown = "\n".join(after) if console else ""
            yield shlex.split(line.removeprefix(sign), comments=True), shown


def words(text: str) -> list[str]:
    """Return the words of an output without figures, dates, ids, absolute paths and rules."""
    plain = re.sub(r"[-+]?[0-9a-f]*\d[0-9a-f.,_]*", "0", re.sub(r"[─-]{2,}", " ", text))
    return [word for word in plain.split() if not word.startswith("/")]


def missing(shown: str, said: str) -> list[str]:
    """Return the words of a shown output that a command did not say; "..." stands for more."""
    return sorted(set(words(shown)) - set(words(said)) - {"..."})


def parse(arguments: list[str]) -> None:
    """Fail unless command and options exist; nothing is executed."""
    command: Any = typer.main.get_command(app)
    rest = list(arguments)
    while hasattr(command, "commands"):
        assert rest[0] in command.commands, f"no command {rest[0]!r}"
        command = command.commands[rest.pop(0)]
    # A command keeps how its help is asked for from the first time that it is parsed.
    command.make_context(command.name, rest, **(app.info.context_settings or {}))


def execute(
    arguments: list[str],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run a command in this process and hold it to the error that the page shows."""
    monkeypatch.setattr(sys, "argv", ["fedquilt", *arguments])
    capsys.readouterr()
    code: object = 0
    try:
        main()
    except SystemExit as stopped:
        code = stopped.code or 0
    output = capsys.readouterr()
    said = output.err
    if shown.startswith("error: "):
        assert code == 2, said
        assert said.startswith(shown[:40])
    else:
        assert code == 0, said
        lost = missing(shown, output.out)
        assert not lost, f"{' '.join(arguments)} does not say {lost}"


def run_python(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    """Execute a block so that a failure points into the page."""
    padded = "\n" * block.line + block.text
    code = compile(padded, str(page), "exec", dont_inherit=True)
    if block.run:
        exec(code, namespace)


def save_toml(block: Block) -> None:
    """Save a configuration under the name the text gives it, and check it."""
    names = re.findall(r"`([\w.-]+\.toml)`", block.before)
    path = Path(names[-1] if names else "unnamed.toml")
    path.write_text(block.text)
    build_config(file=path)


LONG = ("tasks/image.md", "tasks/tabular.md", "tasks/text.md", "condense.md", "ledger.md")
TRAINING = [ROOT / "docs" / page for page in LONG]
"""Pages whose examples train for seconds: `make test` only reads them."""


@pytest.mark.parametrize("page", TRAINING, ids=lambda page: page.stem)
def test_a_page_is_written_as_it_can_run(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.kind == "python":
            run_python(dataclasses.replace(block, run=False), page, {})
        elif block.kind in ("console", "bash"):
            for arguments, _ in commands(block):
                parse(arguments)


@pytest.mark.parametrize(
    "page",
    rest_is_slow(PAGES, [page for page in PAGES if page not in TRAINING]),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    for example in ROOT.glob("*.toml"):
        if example.name != "pyproject.toml":
            shutil.copy(example, tmp_path)
    namespace: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks(page.read_text()):
        where = f"{page.name}:{block.line}"
        try:
            if block.kind == "python":
                run_python(block, page, namespace)
            elif block.kind == "toml":
                save_toml(block)
            elif block.kind in ("console", "bash"):
                for arguments, shown in commands(block):
                    parse(arguments)
                    if block.run and block.kind == "console":
                        execute(arguments, shown, monkeypatch, capsys)
        except Exception as error:
            raise AssertionError(f"{where}: {error}") from error


def test_an_output_that_is_not_said_is_noticed() -> None:
    said = "accuracy  0.9183 after round 20\nfolder    results/digits_seed0_20261118_223738\n"
    assert missing("accuracy  0.88 after round 7\n...", said) == []
    assert missing("folder    results/digits_seed0_20270101_000000", said) == []
    assert missing("accuracy  0.9 at the end", said) == ["at", "end", "the"]


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


SAMPLE = """Text about `a.toml` and `b.toml`:

```toml
seed = 1
```

```python
x = 1
```
<!-- not run -->

```console
$ fedquilt run --seed 1 \\
    --quiet  # a remark
error: something
$ ls
```
"""


def test_pages_are_read_as_described() -> None:
    first, second, third = blocks(SAMPLE)
    assert (first.kind, first.line, first.run) == ("toml", 3, True)
    assert first.before.endswith("`b.toml`:")
    assert (second.kind, second.text, second.run) == ("python", "x = 1\n", True)
    assert (third.kind, third.run) == ("console", False)
    assert list(commands(third)) == [(["run", "--seed", "1", "--quiet"], "error: something")]


@pytest.mark.parametrize(
    "arguments", [["runn"], ["run", "--sed", "1"], ["ledger", "shew", "x"], ["run", "--seed"]]
)
def test_a_command_that_does_not_exist_is_noticed(arguments: list[str]) -> None:
    with pytest.raises((AssertionError, Exception), match=r"no command|No such option|requires"):
        parse(arguments)
