"""Leak cases of stores of prompts."""

import numpy as np
from leak_cases import case, each, methods, raises, with_members

from mlstate import errors
from mlstate.prompts import Match, PromptStore, fingerprint

TOKENS = np.arange(40)


def a_cache():
    return np.random.default_rng(0).random((2, 3, 64, 4)).astype(np.float32)


@case(*methods(PromptStore, "put"), "PromptStore", *with_members("Match", "close"), calls=30)
def stores(folder):
    array, target = a_cache(), a_cache()
    store = PromptStore(folder / "store", model="m", block_tokens=16)
    store.put(TOKENS, array)

    def restore():
        with store.match(TOKENS) as match:
            store.restore(match, into=target)
            repr(match), match._repr_html_()
        store.match(TOKENS).close()

    def change():
        store.pin(TOKENS)
        store.unpin(TOKENS)
        store.put(TOKENS, array)
        repr(store), store._repr_html_(), store.stats(), store.verify(), store.repair()

    def reopen():
        with PromptStore(folder / "store", model="m", block_tokens=16) as other:
            other.stops(TOKENS)
        other.close()

    return each(restore, change, reopen), [array, target]


@case("PromptStore.put", "PromptStore.delete", calls=20)
def puts(folder):
    array = a_cache()
    store = PromptStore(folder / "store", model="m", block_tokens=16)

    def put():
        store.put(TOKENS, array, asynchronous=True).result(timeout=60)
        store.delete(TOKENS + 1)  # is not stored: deletions leave entries until the next packing

    return put, [array]


@case("fingerprint", "Match")
def refusals(folder):
    store = PromptStore(folder / "store", model="m")
    array = a_cache()
    return each(
        lambda: fingerprint("m", adapters=["a"], salt="b"),
        raises(TypeError, fingerprint, 5),
        raises(errors.FormatError, fingerprint, folder),
        raises(TypeError, Match),
        raises(TypeError, store.match, [0.5]),
        raises(errors.CapacityError, store.put, np.arange(100), array),
        raises(TypeError, store.put, TOKENS, "cache"),
    ), [array]
