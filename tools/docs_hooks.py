"""What mkdocs does to the pages on the way: tables from the source, links that stay inside.

`<!-- options -->` becomes the tables of all options, `<!-- commands -->` the list of commands.
Blocks of `math` (LaTeX, as GitHub shows it) become MathML, which browsers draw by themselves.
The long tables of the papers are folded, one fold a section.
Links to files that are no pages (`../src/...`) become plain text: a site does not hold the source.
An empty head of a table is a cell, and the theme's search has a name, for those who hear the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

FORMULA = re.compile(r"^```math\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
PROMISES = re.compile(r"\n\| promised \|.*?(?=\n\n)", re.DOTALL)
EMPTY_HEAD = re.compile(r"<th([^>]*)></th>")
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!\w+\.md)[^)]*\)")


def on_page_markdown(markdown: str, **given: Any) -> str:
    """Fill the marks of a page."""
    if given["page"].file.src_uri.count("/") == 0:
        markdown = OUTSIDE.sub(r"\1", markdown)
    if "<!-- options -->" in markdown:
        markdown = markdown.replace("<!-- options -->", option_tables())
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", command_table())
    if given["page"].file.src_uri == "papers.md":
        markdown = folded(markdown)
    return FORMULA.sub(_mathml, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Make heads of tables without a word plain cells."""
    return EMPTY_HEAD.sub(r"<td\1></td>", html)


def on_post_page(output: str, **_: Any) -> str:
    """Name the search, a dialog of the theme."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


on_post_template = on_post_page  # the page of what is not found


def folded(markdown: str) -> str:
    """Return a page whose tables of promises are folded, each under how many rows it has."""

    def fold(table: re.Match[str]) -> str:
        rows = len(table[0].strip().splitlines()) - 2
        inside = table[0].strip()
        return (
            f'\n<details class="rows" markdown="1"><summary>{rows} promises</summary>\n\n'
            f"{inside}\n\n</details>\n"
        )

    return PROMISES.sub(fold, markdown)


def _mathml(block: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    return convert(block[1].strip(), display="block") + "\n"


def option_tables() -> str:
    """Return a table for every panel of options, those of a condensation after the others."""
    from fedquilt.config import CondenseConfig, RunConfig, option_fields

    common = option_fields(RunConfig)
    own = {k: v for k, v in option_fields(CondenseConfig).items() if k not in common}
    return "\n".join([*_tables(common, ""), *_tables(own, " (condensation)")])


def _tables(fields: dict[str, Any], suffix: str) -> list[str]:
    panels: dict[str, list[Any]] = {}
    for item in fields.values():
        panels.setdefault(item.metadata["panel"], []).append(item)
    lines = []
    for panel, items in panels.items():
        lines += [
            "",
            f"## {panel}{suffix}",
            "",
            "| option | default | what it is |",
            "|---|---|---|",
        ]
        lines += [_row(item) for item in items]
    return lines


def _row(item: Any) -> str:
    choices = item.metadata["rule"].get("choices")
    said = item.metadata["help"] + (f" One of {', '.join(map(str, choices))}." if choices else "")
    cells = (f"`{item.name}`", f"`{item.default}`", said)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def command_table() -> str:
    """Return every command with the first line of its help."""
    import typer.main

    from fedquilt.cli.app import app

    lines = ["| command | what it does |", "|---|---|"]
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        named = {name: command} if inner is None else {f"{name} {k}": v for k, v in inner.items()}
        for whole, one in named.items():
            first = (one.help or "").strip().split("\n\n")[0].replace("\n", " ")
            lines.append(f"| `fedquilt {whole}` | {first} |")
    return "\n".join(lines)
