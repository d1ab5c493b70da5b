"""Mutated stores of prompts: fewer tokens or an error, never wrong ones."""

import json
import os
import shutil
import time

import numpy as np
import pytest
from toy_caches import (
    FULL,
    HYBRID,
    MODEL,
    TOKENS,
    check_every_match,
    empty_state,
    prefill,
    spec_of,
    store_at,
)

from mlstate import _core
from mlstate.errors import FormatError, StoreError
from mlstate.prompts import PromptStore
from mlstate.prompts._layout import StoredSpec
from mlstate.prompts._match import BLOCK, SNAPSHOT, pack_meta

FORK = np.concatenate([TOKENS[:50], TOKENS[:40]])
SPECS = {"full": FULL, "hybrid": HYBRID}


@pytest.fixture(scope="module", params=SPECS)
def stored(request, tmp_path_factory):
    """A folder with prompts that share a beginning, and the entries of their caches."""
    folder, spec = tmp_path_factory.mktemp("stored"), SPECS[request.param]
    with store_at(folder) as store:
        for tokens in (TOKENS, FORK):
            state = empty_state(spec)
            for stop in (20, 48, len(tokens)):
                store.put(tokens[:stop], prefill(state, tokens[:stop]))
    return folder, spec


def mutate(path, rng):
    data = bytearray(path.read_bytes())
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, max(len(data), 1)))
        match int(rng.integers(0, 5)):
            case 0 | 1 if data:
                data[at] ^= 1 << int(rng.integers(0, 8))
            case 2:
                del data[at:]
            case 3:
                data[at : at + 8] = rng.bytes(8)
            case 4:
                data[at:at] = data[: int(rng.integers(0, 200))]
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(60))
def test_mutated_files_give_fewer_tokens_and_no_wrong_ones(stored, tmp_path, seed):
    folder, spec = stored
    shutil.copytree(folder / "store", tmp_path / "store")
    rng = np.random.default_rng(seed)
    paths = sorted(path for path in (tmp_path / "store").iterdir() if path.stat().st_size)
    mutate(paths[int(rng.integers(0, len(paths)))], rng)
    try:
        with store_at(tmp_path) as store:
            lengths = check_every_match(store, [TOKENS, FORK], spec)
            assert all(length <= 100 for length in lengths)
            store.repair()
            assert store.verify() == []
            check_every_match(store, [TOKENS, FORK], spec)
            for tokens in (TOKENS, FORK):
                store.put(tokens, prefill(empty_state(spec), tokens))
            assert check_every_match(store, [TOKENS, FORK], spec) == [len(TOKENS), len(FORK)]
    except (FormatError, StoreError):
        pass  # the head of the store is damaged


GOOD = pack_meta(StoredSpec(FULL), "m", [])
HEADS = {
    "no head": b"",
    "another digest": StoredSpec(HYBRID).digest + GOOD[8:],
    "no JSON": GOOD.replace(b"{", b"["),
    "a long head": GOOD[:8] + b"\xff" * 40,
    "another name": GOOD.replace(b"keys", b"kezs"),
    "huge shapes": GOOD.replace(b"[1,2,4]", b"[1,2,40000000000000]"),
    "negative shapes": GOOD.replace(b"[1,2,4]", b"[1,2,-4]"),
    "texts as shapes": GOOD.replace(b"[1,2,4]", b'["a"]'),
    "deep": GOOD.replace(b"[1,2,4]", b"[" * 5000 + b"]" * 5000),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_crafted_description_of_a_block_is_a_miss(tmp_path, head):
    """The checksums of a crafted store are right, unlike its content."""
    with store_at(tmp_path) as store:
        log = _core.PromptLog(str(tmp_path / "store"), False)
        parts = [np.zeros((1, 2, 16, 4), np.float32)] * 4
        log.put(store._key, TOKENS[:16], 16, [(BLOCK, 16, head, parts)], None, 1.0)
        with store.match(TOKENS) as match:
            assert match.length == 0
            assert store.restore(match, into=empty_state(FULL)) == 0


PARTS = {
    "no list": 5,
    "no parts": [],
    "other names": [["x", None, [1, 3, 5]]],
    "no shape": [["0.state", None, None]],
    "a negative shape": [["0.state", None, [1, -3, -5]]],
    "a huge shape": [["0.state", None, [1 << 40, 3, 5]]],
    "a text": [["0.state", None, "abc"]],
    "tokens": [["0.state", [20], None]],
    "too many": [["0.state", None, [1, 3, 5]]] * 2,
}


@pytest.mark.parametrize("listed", PARTS.values(), ids=PARTS)
def test_a_crafted_description_of_a_snapshot_is_a_miss(tmp_path, listed):
    spec = spec_of("recurrent")
    with store_at(tmp_path) as store:
        log = _core.PromptLog(str(tmp_path / "store"), False)
        meta = pack_meta(StoredSpec(spec), "m", [])[:-2] + json.dumps(listed).encode()
        record = (SNAPSHOT, 10, meta, [np.zeros((1, 3, 5), np.float32)])
        log.put(store._key, TOKENS[:10], 16, [record], None, 1.0)
        with store.match(TOKENS) as match:
            assert store.restore(match, into=empty_state(spec)) == 0


def test_folders_that_are_no_store_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(b"x")
    for name in ("file", "other"):
        with pytest.raises((FormatError, StoreError)):
            PromptStore(tmp_path / name, model=MODEL)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["segment", "index", "store"])
@pytest.mark.parametrize("kind", ["fifo", "link", "dangling link", "folder"])
def test_other_kinds_of_files_are_refused(stored, tmp_path, kind, name):
    folder, _ = stored
    shutil.copytree(folder / "store", tmp_path / "store")
    (tmp_path / "store" / "index").touch()
    for path in sorted((tmp_path / "store").iterdir()):
        if path.name.startswith(name):
            path.rename(tmp_path / "segment")
            if kind == "dangling link":
                (tmp_path / "segment").unlink()
            if kind == "fifo":
                os.mkfifo(path)
            elif kind == "folder":
                path.mkdir()
            else:
                path.symlink_to(tmp_path / "segment")
    with pytest.raises(FormatError, match=f"{name}.*regular"):
        store_at(tmp_path)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("length", [1 << 33, 1 << 40])
def test_a_sparse_tail_is_skipped(stored, tmp_path, length, behind):
    folder, _ = stored
    shutil.copytree(folder / "store", tmp_path / "store")
    (tmp_path / "store" / "index").unlink(missing_ok=True)
    segment = max((tmp_path / "store").glob("segment-*"))
    content = segment.read_bytes()
    try:
        os.truncate(segment, length)
    except OSError:
        pytest.skip("the file system does not have files of 1 TiB")
    if behind:  # records behind the hole are found
        with segment.open("r+b") as file:
            file.seek(length)
            file.write(content[64:])
    began = time.process_time()
    with store_at(tmp_path) as store:
        assert store.match(TOKENS, full=True).length > 0
        assert store.stats()["records"] > 0
    assert time.process_time() - began < 5


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(StoreError):
        store_at(tmp_path / "closed")
