"""`assert_digest`: a digest in a JSON file, with ranks and without; missing and other files."""

import json
import os

import numpy as np
import pytest

from mlstate import FormatError, StoreError, digest, errors
from mlstate.checkpoint import Layout
from mlstate.state import Digest
from mlstate.testing import assert_digest, run_ranks

STATE = {"w": np.arange(12.0).reshape(4, 3), "b": np.ones(3)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "golden.json"


def test_update_writes_the_digest_and_a_change_is_named(path):
    assert_digest(STATE, path, update=True)
    assert Digest.from_json(path.read_bytes()) == digest(STATE)
    assert_digest(STATE, os.fspath(path))
    before = path.read_bytes()
    with pytest.raises(AssertionError) as raised:
        assert_digest({"w": STATE["w"].T, "b": STATE["b"]}, path)
    text = str(raised.value)
    assert text.startswith(f"the digest is not the one in {path}; pass update=True to accept it\n")
    assert "1 changed, 1 unchanged" in text and "w       shape    (4, 3)  (3, 4)" in text
    assert path.read_bytes() == before


def test_the_file_has_a_line_for_each_tensor_in_the_order_of_names(path):
    assert_digest(STATE, path, update=True)
    assert [line[:5] for line in path.read_text().splitlines()[1:-1]] == ['  "b"', '  "w"']
    assert [*path.parent.iterdir()] == [path]  # no temporary file


def test_a_missing_file_names_the_remedy(path):
    with pytest.raises(errors.StoreNotFoundError, match="pass update=True to write it") as raised:
        assert_digest(STATE, path)
    assert raised.value.path == os.fspath(path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"version": 7, "tensors": {}}', "has version 7, and this mlstate computes version 1"),
        ("[]", "the text is not the JSON of a digest"),
    ],
)
def test_another_file_is_refused_until_it_is_replaced(path, text, reason):
    path.write_text(text)
    with pytest.raises(FormatError, match=reason) as raised:
        assert_digest(STATE, path)
    assert str(raised.value).startswith(f"{path}: ") and "pass update=True" in str(raised.value)
    assert path.read_text() == text
    assert_digest(STATE, path, update=True)
    assert json.loads(path.read_text())["version"] == 1


def test_a_file_that_cannot_be_written_or_read_is_named(path):
    path.mkdir()
    for update in (True, False):
        with pytest.raises(StoreError, match=r"golden\.json"):
            assert_digest(STATE, path, update=update)
    with pytest.raises(TypeError, match="update must be True or False, got int"):
        assert_digest(STATE, path, update=1)


def test_ranks_compare_their_parts_with_one_file(path):
    def divided(group, change=0, *, update=False):
        part = Layout.rows(3).shard(STATE["w"] + change, group.rank)
        state = {"w": part, "b": STATE["b"]}
        assert_digest(state, path, group=group, update=update)

    def refused(group, error, *arguments):
        with pytest.raises(error) as raised:
            divided(group, *arguments)
        return str(raised.value)

    texts = run_ranks(3, lambda group: refused(group, errors.StoreNotFoundError))
    assert all("pass update=True" in text for text in texts) and texts[1].startswith("rank 0: ")
    path.write_text('{"version": 2, "tensors": {}}')
    texts = run_ranks(3, lambda group: refused(group, FormatError))
    assert all("golden.json: the digest has version 2, " in text for text in texts)
    run_ranks(3, lambda group: divided(group, update=True))
    assert_digest(STATE, path)
    run_ranks(3, divided)
    texts = run_ranks(3, lambda group: refused(group, AssertionError, 1))
    assert len({*texts}) == 1 and "1 changed, 1 unchanged" in texts[0]
