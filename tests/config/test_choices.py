"""Every list of values is declared once, and whoever builds from one knows all of it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import fedquilt
from fedquilt.config import MODE_TABLE, MODES, Claim, RunConfig, choices, modes, option_fields
from fedquilt.data import DATASETS
from fedquilt.models import MODELS
from fedquilt.models.features import _PUBLIC_IMAGES
from fedquilt.privacy.accounting import Adjacency
from fedquilt.privacy.policies import AdaptivePrivacyAllocator, make_policy
from fedquilt.report.style import COLORS

SOURCE = Path(fedquilt.__file__).resolve().parent
TABLES = {
    name: frozenset(values)
    for module in (choices, modes)
    for name, values in vars(module).items()
    if name.isupper() and isinstance(values, Collection) and len(values) > 1
}
# The documents' clipping_strategy is another option that happens to have the same values.
ANOTHER = {("quapfl.py", "CLIPPINGS")}


def literals(source: str) -> Iterator[tuple[int, frozenset[str]]]:
    """Yield (line, strings) of every tuple, list and set of strings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            values = [item.value for item in node.elts if isinstance(item, ast.Constant)]
            if len(values) == len(node.elts) and all(isinstance(v, str) for v in values):
                yield node.lineno, frozenset(values)


def test_no_list_of_values_is_written_twice() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line} repeats {name}"
        for path in SOURCE.rglob("*.py")
        if path.name not in ("choices.py", "modes.py")
        for line, values in literals(path.read_text())
        for name, table in TABLES.items()
        if values == table and (path.name, name) not in ANOTHER
    ]
    assert found == []


def test_a_list_that_is_written_twice_is_noticed() -> None:
    ((_, values),) = literals("POLICIES = ['paper', 'cap', 'worst_case', 'adaptive']")
    assert values == TABLES["POLICIES"]


def test_every_mode_has_all_its_facts() -> None:
    for name, mode in MODE_TABLE.items():
        assert mode.name == name
        assert mode.summary
        assert mode.color in COLORS
        assert mode.trains or mode.condenses
        assert mode.noised or mode.claim is Claim.NOTHING
    assert len({mode.color for mode in MODE_TABLE.values()}) == len(MODE_TABLE)


def test_the_lists_of_modes_are_read_from_the_table() -> None:
    assert MODES == ("fedavg", "fixed_dp", "quap_fl", "quap_fl_client", "certified")
    assert modes.CONDENSE_MODES == ("fednum", "certified")
    assert modes.SLICED_MODES == ("fedavg", "certified")
    assert modes.DOCUMENT_MODES == ("fedavg", "fixed_dp", "quap_fl", "quap_fl_client")


@pytest.mark.parametrize("policy", choices.POLICIES)
def test_every_policy_can_be_built(policy: str) -> None:
    allocator = AdaptivePrivacyAllocator(epsilon_base=0.1, alpha=0.5, beta=2.0, delta=1e-5)
    made = make_policy(
        policy,
        1.0,
        10,
        expected_rate=0.3,
        max_joins=2,
        allocator=allocator,
        warmup_rounds=0,
    )
    assert made.expected_charge > 0


def test_whoever_builds_from_a_list_knows_all_of_it() -> None:
    assert tuple(_PUBLIC_IMAGES) == choices.FEATURE_EXTRACTORS
    assert set(choices.FEATURE_EXTRACTORS) <= set(MODELS)
    assert {Adjacency.of(name).value for name in choices.ADJACENCIES} == set(choices.ADJACENCIES)


def test_the_help_of_open_options_names_what_there_is() -> None:
    fields = option_fields(RunConfig)
    for name, known in (
        ("dataset", DATASETS),
        ("availability", choices.AVAILABILITIES),
        ("mode", MODES),
    ):
        words = fields[name].metadata["help"]
        assert all(value in words for value in known), name
