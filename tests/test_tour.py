"""The notebook of the documentation is run, cell by cell, and what it shows is looked at."""

from __future__ import annotations

import ast
import html.parser
import json
from pathlib import Path
from typing import Any

import pytest

from fedquilt.common.colors import LIGHT
from fedquilt.experiment.api import run_in_memory
from fedquilt.privacy.statement import Statement
from fedquilt.record.result import result_as_html
from run_samples import tiny

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "tour.ipynb"


def shown(source: str, where: str, namespace: dict[str, Any]) -> Any:
    """Run a cell as a notebook does, and return the value of its last expression."""
    tree = ast.parse(source, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, where, "exec"), namespace)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), where, "eval"), namespace)


def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    namespace: dict[str, Any] = {}
    results = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            value = shown("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", namespace)
            if hasattr(value, "_repr_html_"):
                results.append(value._repr_html_())
    assert len(results) == 2
    assert "no guarantee" in results[0]
    assert "epsilon &lt;= 6" in results[1]
    assert namespace["done"].final_accuracy > 0.8, "the run it shows works"
    assert (tmp_path / "report.html").stat().st_size > 50_000


def test_the_tour_is_stored_with_what_it_shows() -> None:
    text = NOTEBOOK.read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert "".join(cells[-1]["source"]) == "done", "it ends with the result, shown by itself"
    assert "epsilon &lt;= 6" in "".join(cells[-1]["outputs"][0]["data"]["text/html"])
    assert "image/png" in cells[-2]["outputs"][0]["data"], "and a figure before that"
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds <= {"stream", "execute_result", "display_data"}, "no error"
    for place in ("/home/", "/root/", "/tmp/", "/Users/"):
        assert place not in text, "outputs name no folder of a machine"


class Tags(html.parser.HTMLParser):
    """Counts what is opened and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag != "line":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)


def test_a_result_shows_itself_escaped() -> None:
    done = run_in_memory(tiny(mode="fedavg"))
    tags = Tags()
    tags.feed(done._repr_html_())
    assert tags.open == []
    assert {"svg", "polyline", "table"} <= tags.seen
    assert f"stroke='{LIGHT['grey']}'" in done._repr_html_(), "the colour of fedavg everywhere"
    other = result_as_html({**done.result, "mode": "fixed_dp"}, done.statement)
    assert f"stroke='{LIGHT['orange']}' stroke-width='2' stroke-dasharray='7 3'" in other
    evil = "<script>alert(1)</script>"
    statement = Statement.without_bound(
        delta=1e-5, covered=(), uncovered=(evil,), noise_source=evil, notes=(evil,)
    )
    result = {**done.result, "mode": evil, "stopped": evil}
    assert "<script" not in result_as_html(result, statement)
    nothing = {
        **result,
        "history": {},
        "metadata": {**done.result["metadata"], "final_accuracy": None},
    }
    assert "<svg" not in result_as_html(nothing, statement)
