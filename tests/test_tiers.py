"""The two tiers of the tests: what the first one leaves out, and who runs both."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tiers import one_of_each, rest_is_slow

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def is_slow(node: ast.AST) -> bool:
    """Tell whether a test or a class of tests carries one of the marks that `make test` skips."""
    marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
    return any(re.fullmatch(r"pytest\.mark\.(slow|deploy)", mark) for mark in marks)


def is_test(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name.startswith("test")
    return isinstance(node, ast.ClassDef) and node.name.startswith("Test")


def only_slow(source: str) -> bool:
    """Tell whether a file of tests has nothing for the first tier."""
    body = ast.parse(source).body
    # What stands outside of functions marks a whole file.
    whole = any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and re.search(r"pytest\.mark\.(slow|deploy)", ast.unparse(node.value))
        for node in body
    )
    return whole or all(is_slow(node) for node in body if is_test(node))


WHOLLY_SLOW = {
    "tests/flower/test_flower_attacks_deploy.py",
    "tests/flower/test_flower_control_deploy.py",
    "tests/flower/test_flower_deploy.py",
    "tests/flower/test_flower_masks_deploy.py",
    "tests/flower/test_flower_masks_server_deploy.py",
    "tests/flower/test_flower_site_deploy.py",
}
"""Files of tests that the first tier does without."""


def test_no_file_of_tests_is_hidden_from_the_first_tier() -> None:
    found = {str(path.relative_to(ROOT)) for path in FILES if only_slow(path.read_text())}
    assert found == WHOLLY_SLOW, "a change there would be noticed by `make test-all` only"


@pytest.mark.parametrize(
    ("source", "hidden"),
    [
        ("@pytest.mark.slow\ndef test_a(): ...\ndef test_b(): ...", False),
        ("@pytest.mark.slow\ndef test_a(): ...\ndef helper(): ...", True),
        ("@pytest.mark.slow\nclass TestA: ...\n@pytest.mark.processes\ndef test_b(): ...", False),
        ("pytestmark = [pytest.mark.slow]\ndef test_a(): ...", True),
    ],
)
def test_a_hidden_file_is_noticed(source: str, hidden: bool) -> None:
    assert only_slow(source) == hidden


def recipe(target: str) -> str:
    """Return what the Makefile does for a target."""
    found = re.search(rf"^{target}: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert found is not None, target
    return found[1]


def test_make_test_is_the_first_tier_and_what_must_pass_is_all_of_it() -> None:
    assert '-m "not deploy and not slow"' in recipe("test")
    assert '-m "not deploy"' in recipe("test-all")
    assert "-m deploy" in recipe("test-deploy")
    ran = re.findall(r"^make ([\w-]+)", (ROOT / ".ci" / "run").read_text(), re.M)
    assert ran == ["install", "check", "test-all", "test-deploy", "demo"]
    read = set(re.findall(r"make (test[\w-]*)", (ROOT / "README.md").read_text()))
    assert {"test", "test-all"} <= read


def test_cases_are_marked() -> None:
    moments = [("a", 1), ("a", 2), ("a", 3), ("b", 1)]
    quick = one_of_each(moments, lambda moment: moment[0])
    assert quick == [("a", 2), ("b", 1)]
    first, second, third, last = rest_is_slow(moments, quick)
    assert (second, last) == (("a", 2), ("b", 1))
    assert first.values == (("a", 1),)
    assert [mark.name for mark in third.marks] == ["slow"]
    assert rest_is_slow([(1, 2), (3, 4)], [(1, 2)], names=2)[1].values == (3, 4)
    with pytest.raises(AssertionError, match="no such cases"):
        rest_is_slow([1, 2], [3])
    with pytest.raises(AssertionError, match="nothing would be left"):
        rest_is_slow([1, 2], [])
