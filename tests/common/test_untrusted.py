"""Files from elsewhere: what is beyond the limits is one message that names the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.common import untrusted
from fedquilt.common.errors import DataError, IrregularFileError, RunFolderError
from fedquilt.common.untrusted import MOST_DEPTH, MOST_DIGITS, parse_json, parse_toml, read_json
from tiers import rest_is_slow


@pytest.mark.parametrize("text", ["[1]", "3", "{", "", "\udce4", '{"a": NaN}', '{"a": Infinity}'])
def test_json_that_is_no_object_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"x\.json must be a JSON object"):
        read_json(path)
    with pytest.raises(RunFolderError, match=r"x\.json must be a JSON object"):
        read_json(path, RunFolderError)


def test_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": [1, null]}')
    assert read_json(tmp_path / "x.json") == {"a": [1, None]}
    with pytest.raises(DataError, match=r"y\.json.*No such file"):
        read_json(tmp_path / "y.json")


def nested(depth: int) -> str:
    """A list of lists, `depth` of them."""
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [MOST_DEPTH + 1, 900, 100_000])
def test_deep_json_and_toml_are_refused(depth: int) -> None:
    with pytest.raises(
        DataError, match=f"f must be a JSON value: it is nested deeper than {MOST_DEPTH}"
    ):
        parse_json(nested(depth), "f")
    with pytest.raises(DataError, match="nested deeper"):
        parse_json('{"a":' * depth + "1" + "}" * depth, "f")
    with pytest.raises(ValueError, match="nested deeper"):
        parse_toml(f"a = {nested(depth)}".encode())
    with pytest.raises(ValueError, match="nested deeper"):
        parse_toml((".".join("a" * min(depth, 5_000)) + " = 1").encode())


def test_what_is_as_deep_as_may_be_is_read() -> None:
    assert parse_json(nested(MOST_DEPTH), "f") == json.loads(nested(MOST_DEPTH))


@pytest.mark.parametrize("digits", [MOST_DIGITS + 1, 4_000, 6_000])
def test_long_numbers_are_refused(digits: int) -> None:
    for number in ("9" * digits, "-" + "9" * digits):
        with pytest.raises(DataError, match="f must be a JSON value: "):
            parse_json(f'{{"a": [1, null, {number}]}}', "f")
        with pytest.raises(ValueError, match="digits"):
            parse_toml(f"a = {number}".encode())
    assert parse_json("9" * MOST_DIGITS, "f") == int("9" * MOST_DIGITS)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_ordinary_values_survive(value: object) -> None:
    assert parse_json(json.dumps(value), "f") == value


@pytest.mark.parametrize("part", ["[]", "{}", '{"a":1}', "[[[0]]]"])
def test_more_lists_and_objects_than_any_run_has_are_refused_unread(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """99 MB of empty lists would take 3 GB; a run of 200,000 rounds has ten a round."""
    assert untrusted.MOST_CONTAINERS * len("[],") < 10_000_000
    assert untrusted.MOST_CONTAINERS >= 2_000_000
    text = '{"x":[' + (part + ",") * untrusted.MOST_CONTAINERS + "0]}"
    (tmp_path / "result.json").write_text(text)
    (tmp_path / "rounds.jsonl").write_text(text.replace(part * 100, part * 100 + "\n"))
    monkeypatch.setattr(untrusted.json, "loads", pytest.fail)
    with pytest.raises(DataError, match=r"result\.json must be a JSON object: it holds more"):
        read_json(tmp_path / "result.json")
    with pytest.raises(DataError, match=r"rounds\.jsonl must be lines of JSON: it holds more"):
        untrusted.read_lines(tmp_path / "rounds.jsonl")


def test_files_without_an_end_cost_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)  # a hole: no disk is used
    with pytest.raises(DataError, match="must be a file of at most 1000 bytes; it is larger"):
        untrusted.read_bytes(path, 1000)
    with pytest.raises(ValueError, match="larger than 1000 bytes"):
        untrusted.read_named("/dev/zero", 1000)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        (tmp_path / "other").write_text("{}")
        path.symlink_to("other")
    with pytest.raises(IrregularFileError, match=r"file\.json' must be a regular file"):
        read_json(path)


@pytest.mark.parametrize("share", rest_is_slow([8, 1], [8]))  # the parser takes the square of it
def test_the_worst_configuration_takes_seconds(share: int) -> None:
    dotted = (".".join("a" * (untrusted.TOML_BYTES // share // 2 - 4)) + "=1").encode()
    with pytest.raises(ValueError, match="nested deeper"):
        parse_toml(dotted)


def test_tensors_are_known_before_they_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    safetensors.numpy.save_file({"a": np.zeros((2, 3), np.float32)}, path, {"k": "v"})
    with untrusted.opened_tensors(path, "is no file", framework="np") as opened:
        assert opened.metadata == {"k": "v"}
        assert opened.specs == {"a": untrusted.TensorSpec("F32", (2, 3))}
        assert opened.get("a").shape == (2, 3)
    safetensors.numpy.save_file({"a" * 2000: np.zeros(1)}, path)
    with (
        pytest.raises(DataError, match="names of at most 1000"),
        untrusted.opened_tensors(path, "x"),
    ):
        pass
    path.write_bytes(b"\xff" * 100)
    with (
        pytest.raises(RunFolderError, match="is not a thing: "),
        untrusted.opened_tensors(path, "is not a thing", RunFolderError),
    ):
        pass


def test_a_pipe_is_read_when_somebody_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(untrusted, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(ValueError, match="nobody writes to"):
        untrusted.read_named(pipe, 1000)
    reader, writer = os.pipe()
    os.write(writer, b"seed = 3")
    os.close(writer)
    assert untrusted.read_named(f"/dev/fd/{reader}", 1000) == b"seed = 3"
    os.close(reader)
    with pytest.raises(DataError, match="it is no file"), untrusted.opened_tensors(pipe, "x"):
        pass


def test_half_a_character_is_refused() -> None:
    assert parse_json('{"a": "\\ud83d\\ude00"}', "f") == {"a": "\U0001f600"}  # two halves
    for text in ('{"a": "\\ud800"}', '["\\uDFFF x"]', '{"\\ud800": 1}'):
        with pytest.raises(DataError, match=r"f must be a JSON value: .*surrogates"):
            parse_json(text, "f")
