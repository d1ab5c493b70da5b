"""Random histories of a store: every restore equals a prefill of as many tokens."""

import numpy as np
import pytest
from thread_team import run_in_threads
from toy_caches import (
    FULL,
    HYBRID,
    check_every_match,
    empty_state,
    extra_before,
    flip,
    prefill,
    prefilled,
    spec_of,
    store_at,
)

SPECS = {"full": FULL, "hybrid": HYBRID, "sinks": spec_of("sliding", "full", sinks=3)}


def random_prompt(rng):
    """A prompt that shares its beginning with many others."""
    parts = [np.random.default_rng(int(rng.integers(0, 3))).integers(0, 9, 24) for _ in range(4)]
    return np.concatenate(parts)[: int(rng.integers(1, 97))]


def random_extra(rng, length):
    """No image, or one of two at one of three positions, or several."""
    places = (5, 30, 48)
    chosen = {p: "ab"[int(rng.integers(0, 2))] for p in places if rng.random() < 0.3}
    return extra_before(chosen, length)


def random_step(store, spec, rng, folder, puts):
    """Put, restore, pin, delete, verify or damage; return whether the store was damaged.

    `puts`: gets the handles of asynchronous puts. These also delete files.
    """
    tokens = random_prompt(rng)
    extra = random_extra(rng, len(tokens))
    match int(rng.integers(0, 10)):
        case 0 | 1 | 2:
            state = empty_state(spec)
            for stop in sorted({int(rng.integers(1, len(tokens) + 1)), len(tokens)}):
                is_asynchronous, has_snapshot = rng.random(2) < (0.3, 0.8)
                prefill(state, tokens[:stop], extra)
                put = store.put(
                    tokens[:stop],
                    state,
                    extra=extra_before(extra, stop),
                    asynchronous=bool(is_asynchronous),
                    snapshot=bool(has_snapshot),
                )
                puts += [put] if is_asynchronous else []
        case 3:
            store.delete(tokens, extra=extra)
        case 4:
            (store.pin if rng.random() < 0.3 else store.unpin)(tokens, extra=extra)
        case 5 if rng.random() < 0.3:
            name = next(entry.name for entry in spec if entry.kind == "full")
            for put in puts:
                put.exception()  # waits
            row = np.ascontiguousarray(prefilled(spec, tokens, extra).ordered(name)[0, 0, -1])
            try:
                flip(folder, row.tobytes())
            except AssertionError:
                return False
            return True
        case _:
            check_every_match(store, [tokens], spec, extra)
    return False


@pytest.mark.parametrize("max_bytes", [None, 60_000])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("seed", range(4))
def test_a_random_history_never_restores_wrong_tokens(tmp_path, spec, max_bytes, seed):
    rng = np.random.default_rng(seed)
    is_damaged = False
    for _ in range(4):  # the store is opened again
        with store_at(tmp_path, max_bytes=max_bytes) as store:
            puts = []
            for _ in range(25):
                is_damaged |= random_step(store, spec, rng, tmp_path, puts)
            if not is_damaged:
                assert store.verify() == []
            store.repair()
            assert store.verify() == []
            tokens = random_prompt(rng)
            extra = random_extra(rng, len(tokens))
            length = store.put(tokens, prefilled(spec, tokens, extra), extra=extra)
            assert check_every_match(store, [tokens], spec, extra) == [length]
            if max_bytes is None:
                assert length == len(tokens)


def test_threads_share_a_store(tmp_path):
    with store_at(tmp_path) as store:

        def work(seed):
            rng = np.random.default_rng(seed)
            for _ in range(40):
                tokens = random_prompt(rng)
                store.put(tokens, prefilled(HYBRID, tokens), asynchronous=bool(rng.random() < 0.5))
                check_every_match(store, [tokens, random_prompt(rng)], HYBRID)

        run_in_threads(work, 4, seconds=120)
        assert store.verify() == []
