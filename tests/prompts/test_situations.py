"""A store in a forked process, of several block sizes, and in a folder that is moved."""

import child
import numpy as np
import pytest
from toy_caches import FULL, HYBRID, check_every_match, prefilled, store_at

from mlstate.errors import CompatibilityError
from mlstate.kv import CacheState
from mlstate.prompts import PromptStore

TOKENS = np.random.default_rng(3).integers(0, 50, 200)

FORK = """
import os, sys
from pathlib import Path
from toy_caches import *

tokens = np.random.default_rng(3).integers(0, 50, 200)
store = store_at(Path(sys.argv[1]))
store.put(tokens[:50], prefilled(FULL, tokens[:50]), asynchronous=True).result()
process = os.fork()
if process == 0:
    future = store.put(tokens[:150], prefilled(FULL, tokens[:150]), asynchronous=True)
    length = future.result(timeout=20)
    store.close()
    os._exit(length)
assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 150
assert check_every_match(store, [tokens], FULL) == [150]
store.close()
"""


def test_a_forked_process_can_put_in_a_thread(tmp_path):
    """It does not have the thread of its parent, which would never finish the put."""
    child.run(FORK, tmp_path, **child.PATHS)


@pytest.mark.parametrize("spec", [FULL, HYBRID])
def test_stores_with_blocks_of_other_sizes_share_a_folder(tmp_path, spec):
    sizes = (1, 16, 64, 256)
    stores = [PromptStore(tmp_path, model="m", block_tokens=size) for size in sizes]
    prompts = [TOKENS[:40], np.append(TOKENS[:100], [7, 7]), TOKENS[:130]]
    for tokens in prompts:
        for store in stores:
            assert store.put(tokens, prefilled(spec, tokens)) == len(tokens)
            for other in stores:
                check_every_match(other, [*prompts, TOKENS], spec)
    for store in stores:
        assert check_every_match(store, prompts, spec) == [len(tokens) for tokens in prompts]
        store.close()


def test_an_open_store_follows_its_folder_when_it_is_moved(tmp_path):
    with PromptStore(tmp_path / "a", model="m", block_tokens=16) as store:
        store.put(TOKENS[:50], prefilled(FULL, TOKENS[:50]))
        (tmp_path / "a").rename(tmp_path / "b")
        assert store.put(TOKENS[:150], prefilled(FULL, TOKENS[:150])) == 150
    assert not (tmp_path / "a").exists()
    with PromptStore(tmp_path / "b", model="m", block_tokens=16) as store:
        assert check_every_match(store, [TOKENS], FULL) == [150]


def test_arrays_that_share_memory_are_refused(tmp_path):
    """The values would overwrite the keys."""
    stack = np.zeros((256, 4, 1, 2, 4), np.float32)
    arrays = {entry.name: stack[:, i].transpose(1, 2, 0, 3) for i, entry in enumerate(FULL)}
    with store_at(tmp_path) as store:
        store.put(TOKENS[:50], prefilled(FULL, TOKENS[:50]))
        with store.match(TOKENS) as match:
            assert store.restore(match, into=CacheState(FULL, arrays, 0)) == 50  # interleaved
            arrays["1.values"] = arrays["0.keys"]
            before = stack.copy()
            with pytest.raises(CompatibilityError, match=r"0\.keys: it shares elements with '1"):
                store.restore(match, into=CacheState(FULL, arrays, 0))
    assert np.array_equal(stack, before)
