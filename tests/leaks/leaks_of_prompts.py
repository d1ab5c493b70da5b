"""Leak cases of stores of prompts."""

from concurrent.futures import CancelledError

import numpy as np
import pytest
from leak_cases import case, each, methods, raises, with_members

from mlstate import errors
from mlstate.prompts import Match, PromptStore, PutHandle, check_split, fingerprint

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


@case("PutHandle", *methods(PutHandle))
def handles(_):
    ended = []

    def written():
        handle = PutHandle()
        handle.add_done_callback(ended.append)
        assert handle.start() and handle.running() and not handle.cancel()
        handle.finish(7)
        assert handle.done() and handle.result() == 7 and handle.exception() is None
        ended.clear()

    def failed():
        handle = PutHandle()
        handle.finish(0, errors.StoreError("the disk is full"))
        raises(errors.StoreError, handle.result)()

    def cancelled():
        handle = PutHandle()
        assert handle.cancel() and handle.cancelled() and not handle.start()
        raises(CancelledError, handle.exception)()

    return each(written, failed, cancelled), [ended]


@case("check_split", calls=20)
def split_prefills(_):
    pytest.importorskip("torch", reason="transformers needs it")
    transformers = pytest.importorskip("transformers", reason="checks its models")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=11, num_hidden_layers=1, **sizes)
    model = transformers.LlamaForCausalLM(config)
    return each(lambda: check_split(model, tokens=4), raises(TypeError, check_split, model, "4")), [
        model,
        config,
    ]


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
