"""Caches that are stored and restored: kinds, damage, refusals, budgets."""

import logging
import pickle
import types

import child
import numpy as np
import pytest
from thread_team import run_in_threads
from toy_caches import (
    FULL,
    HYBRID,
    MODEL,
    TOKENS,
    check_every_match,
    empty_state,
    flip,
    is_zero,
    prefill,
    prefilled,
    same,
    spec_of,
    store_at,
)

from mlstate.errors import CapacityError, CompatibilityError, FormatError, StoreError
from mlstate.kv import CacheEntry, CacheSpec, CacheState, KVState, RollingKVState
from mlstate.prompts import Match, PromptStore

SPECS = {
    "full": FULL,
    "hybrid": HYBRID,
    "recurrent": spec_of("recurrent", "conv"),
    "sliding": spec_of("sliding", "full"),
    "sinks": spec_of("sliding", "full", sinks=3),
    "opaque": spec_of("opaque", "full"),
}


def torch_tokens(tokens):
    return pytest.importorskip("torch").tensor(tokens)


def restored(store, tokens, into, **options):
    with store.match(tokens, **options) as match:
        assert store.restore(match, into=into) == match.length
    return into


# ---- content ----


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 48, 99])
def test_a_cache_comes_back_with_every_token(store, spec, count):
    before = prefilled(spec, TOKENS[:count])
    assert store.put(TOKENS[:count], before) == count
    after = restored(store, TOKENS, empty_state(spec, np.ones))
    assert same(before, after) and is_zero(after, count)
    assert same(prefill(after, TOKENS), prefilled(spec, TOKENS))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_cache_survives_a_process_that_is_killed(tmp_path, spec):
    kinds = [entry.kind for entry in spec if not entry.name.endswith("values")]
    sinks = max(entry.sinks for entry in spec)
    program = (
        "import os, signal, sys; from pathlib import Path; from toy_caches import *\n"
        f"spec = spec_of(*{kinds}, sinks={sinks})\n"
        "store = store_at(Path(sys.argv[1]))\n"
        "store.put(TOKENS[:70], prefilled(spec, TOKENS[:70]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = child.attempt(program, tmp_path, **child.PATHS)
    assert process.returncode == -9, process.stderr
    with store_at(tmp_path) as store:
        assert same(restored(store, TOKENS, empty_state(spec)), prefilled(spec, TOKENS[:70]))


def test_a_restore_replaces_the_tokens_that_the_cache_had(store):
    store.put(TOKENS[:40], prefilled(HYBRID, TOKENS[:40]))
    other = prefilled(HYBRID, TOKENS[::-1])
    assert same(restored(store, TOKENS, other), prefilled(HYBRID, TOKENS[:40]))
    assert is_zero(other, 40)


def test_a_match_leaves_one_token_for_the_logits(store):
    store.put(TOKENS[:48], prefilled(FULL, TOKENS[:48]))
    for count, full, expected in [
        (48, False, 47),
        (48, True, 48),
        (30, False, 16),
        (49, False, 48),
        (100, False, 48),
    ]:
        with store.match(TOKENS[:count], full=full) as match:
            assert match.length == expected
    state = restored(store, TOKENS[:48], empty_state(FULL))
    assert state.length == 47 and is_zero(state, 47)
    assert same(state, prefilled(FULL, TOKENS[:47]))


def test_a_snapshot_is_used_only_at_its_exact_position(store):
    state = empty_state(HYBRID)
    for stop in (20, 64, 90):
        store.put(TOKENS[:stop], prefill(state, TOKENS[:stop]))
    for count, expected in [(100, 90), (90, 64), (64, 20), (20, 0)]:
        with store.match(TOKENS[:count]) as match:
            assert match.length == expected
    other = np.concatenate([TOKENS[:70], TOKENS[:30]])
    assert same(restored(store, other, empty_state(HYBRID)), prefilled(HYBRID, TOKENS[:64]))


def test_a_match_names_the_entry_that_ends_it(store):
    state = prefilled(HYBRID, TOKENS[:20])
    store.put(TOKENS[:20], state)
    with store.match(TOKENS[:21]) as match:
        assert (match.length, match.limit) == (20, None)
    store.put(TOKENS[:64], prefill(state, TOKENS[:64]), snapshot=False)
    with store.match(TOKENS) as match:
        assert (match.length, match.limit) == (20, "1.state")
        assert repr(match) == "Match(length=20, limit='1.state')"
        assert "ended by 1.state" in match._repr_html_()
    store.put(TOKENS, prefill(state, TOKENS))
    with store.match(np.append(TOKENS, [1, 2, 3])) as match:
        assert (match.length, match.limit) == (100, "0.keys")


def test_prompts_that_begin_alike_share_their_blocks(store):
    first, second = TOKENS.copy(), TOKENS.copy()
    second[70:] += 1
    store.put(first, prefilled(FULL, first))
    before = store.stats()["records"]
    store.put(second, prefilled(FULL, second))
    assert store.stats()["records"] == before + 3  # two blocks and the rest
    for tokens in (first, second):
        state = restored(store, tokens, empty_state(FULL), full=True)
        assert same(state, prefilled(FULL, tokens))


def test_a_longer_prompt_writes_its_new_blocks_only(store):
    state = prefilled(FULL, TOKENS[:64])
    store.put(TOKENS[:64], state)
    before = store.stats()["live_bytes"]
    store.put(TOKENS[:64], state)
    assert store.stats()["live_bytes"] == before
    store.put(TOKENS[:80], prefill(state, TOKENS[:80]))
    assert store.stats()["live_bytes"] - before < before / 2


def test_other_tokens_another_model_and_another_salt_do_not_match(store, tmp_path):
    store.put(TOKENS[:64], prefilled(FULL, TOKENS[:64]))
    with store.match(TOKENS + 1) as match:
        assert match.length == 0
    for options in ({"model": "other"}, {"model": MODEL, "salt": "x"}):
        other = PromptStore(tmp_path / "store", block_tokens=16, **options)
        with other, other.match(TOKENS) as match:
            assert (match.length, match.limit) == (0, None)
            assert is_zero_after(other, match)


def is_zero_after(store, match):
    state = prefilled(FULL, TOKENS[:9])
    return store.restore(match, into=state) == 0 and state.length == 0 and is_zero(state)


# ---- kinds of caches ----


def test_an_array_comes_back(store):
    rng = np.random.default_rng(1)
    cache = rng.random((2, 3, 64, 4)).astype(np.float16)
    store.put(TOKENS[:50], cache)
    target = np.ones((2, 3, 80, 4), np.float16)
    assert restored(store, TOKENS, target) is target
    assert np.array_equal(target[:, :, :50], cache[:, :, :50]) and not target[:, :, 50:].any()


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_arrays_with_another_sequence_axis_share_prompts(store, tmp_path, axis):
    cache = np.random.default_rng(1).random((2, 3, 64, 4)).astype(np.float32)
    store.put(TOKENS[:50], cache)
    shape = (*[(2, 3, 4)[i] for i in range(3)],)
    shape = (*shape[:axis], 64, *shape[axis:])
    spec = CacheSpec([CacheEntry("cache", "full", shape, "float32", axis)])
    with store_at(tmp_path, spec=spec) as other:
        target = restored(other, TOKENS, np.ones(shape, np.float32))
    assert np.array_equal(np.moveaxis(target, axis, -2)[:, :, :50], cache[:, :, :50])


def test_strided_and_foreign_endian_arrays_come_back(store):
    cache = np.random.default_rng(1).random((2, 3, 64, 4))
    store.put(TOKENS[:50], np.asfortranarray(cache.astype(">f8")))
    target = np.ones((2, 3, 128, 4), ">f8")[:, :, ::2]
    assert np.array_equal(restored(store, TOKENS, target)[:, :, :50], cache[:, :, :50])


def test_a_growing_cache_comes_back(store):
    cache = KVState((2, 3, 64, 4), capacity=128)
    cache.array[...] = np.random.default_rng(1).random((2, 3, 64, 4))
    store.put(TOKENS[:50], cache)
    other = restored(store, TOKENS, KVState((2, 3, 16, 4), capacity=64))
    assert other.seq_length == 50 and np.array_equal(other.array, cache.array[:, :, :50])


@pytest.mark.parametrize("count", [2, 5, 16, 30, 60])
def test_a_rolling_cache_comes_back_with_its_positions(store, count):
    cache = RollingKVState((2, 3, 16, 4), sinks=2)
    cache.append(np.random.default_rng(1).random((2, 3, count, 4)).astype(np.float16))
    store.put(TOKENS[:count], cache)
    other = RollingKVState((2, 3, 16, 4), sinks=2)
    other.append(np.ones((2, 3, 7, 4), np.float16))
    restored(store, TOKENS, other)
    assert np.array_equal(other.array, cache.array)
    assert np.array_equal(other.positions(), cache.positions())
    assert (other.next_position, other.evicted) == (cache.next_position, cache.evicted)


def test_a_ring_that_began_at_another_slot_comes_back(store):
    spec = CacheSpec([CacheEntry("k", "sliding", (2, 8, 4), "float32", window=8, next_slot=5)])
    before = CacheState(spec, {"k": np.random.default_rng(1).random((2, 8, 4), np.float32)}, 21)
    store.put(TOKENS[:21], before)
    after = CacheState(spec, {"k": np.ones((2, 8, 4), np.float32)}, 13)
    assert same(restored(store, TOKENS, after), before)


def test_quantized_caches_come_back(store):
    spec = CacheSpec([CacheEntry("k", "full", (1, 2, 64, 64), "float16")])
    array = np.random.default_rng(1).random((1, 2, 64, 64)).astype(np.float16)
    before = CacheState(spec, {"k": array}, 50)
    before.quantize(bits=4)
    store.put(TOKENS[:50], before)
    after = restored(store, TOKENS, empty_state(before.spec))
    assert all(np.array_equal(after.view(name), before.view(name)) for name in before.arrays)


def test_a_stack_of_layers_is_stored_and_restored_by_views_of_the_layers(store):
    """Core AI keeps the keys of all layers in one array, on iOS with the sequence last."""
    rng, tokens = np.random.default_rng(1), TOKENS[:40]
    stacked = rng.random((3, 1, 2, 64, 4), np.float32)  # layers, batch, heads, positions, head_dim

    def state(arrays, length):
        named = {f"{layer}.keys": array for layer, array in enumerate(arrays)}
        entries = [CacheEntry(n, "full", a.shape, "float32") for n, a in named.items()]
        return CacheState(CacheSpec(entries), named, length)

    store.put(tokens, state(stacked, 40))
    phone = np.ones((3, 1, 2 * 4, 1, 64), np.float32)  # heads * head_dim, and the sequence last
    views = [each.reshape(1, 2, 4, 64).swapaxes(-1, -2) for each in phone]
    restored(store, TOKENS, state(views, 0))
    assert np.array_equal(np.stack(views)[..., :40, :], stacked[..., :40, :])
    assert not phone[..., 40:].any()


# ---- damage ----


def distinct(spec, tokens):
    """A state whose rows differ, so that a row is found in a file."""
    state = prefilled(spec, tokens)
    rng = np.random.default_rng(5)
    for array in state.arrays.values():
        array[...] = np.where(array != 0, rng.random(array.shape), 0)
    return state


def put_damaged(store, folder, spec, positions):
    """Store a state, damage its keys at some positions, and return the state."""
    state = distinct(spec, TOKENS)
    store.put(TOKENS, state)
    for position in positions:
        flip(folder, np.ascontiguousarray(state.arrays["0.keys"][0, 0, position]).tobytes())
    return state


@pytest.mark.parametrize(("position", "expected"), [(0, 0), (17, 16), (40, 32), (95, 80), (98, 96)])
def test_a_damaged_block_shortens_the_restore_and_is_logged(
    store, tmp_path, caplog, position, expected
):
    before = distinct(FULL, TOKENS)
    store.put(TOKENS, before)
    name = flip(tmp_path, np.ascontiguousarray(before.arrays["1.values"][0, 1, position]).tobytes())
    with store.match(TOKENS, full=True) as match, caplog.at_level(logging.WARNING):
        after = distinct(FULL, TOKENS)
        assert match.length == 100
        assert store.restore(match, into=after) == after.length == expected
    assert is_zero(after, expected) and name.split(".")[0] in caplog.text
    assert "damaged" in caplog.text
    for key, array in after.arrays.items():
        assert np.array_equal(array[:, :, :expected], before.arrays[key][:, :, :expected])


@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["full", "hybrid"])
def test_the_next_put_stores_all_damaged_records_again(store, tmp_path, spec):
    before = put_damaged(store, tmp_path, spec, (40, 70, 90, 98))
    after = prefilled(spec, TOKENS)
    with store.match(TOKENS, full=True) as match:
        position = store.restore(match, into=after)
        assert position == (32 if spec is FULL else 0) and is_zero(after, position)
    assert store.put(TOKENS, before) == 100 and store.verify() == []
    assert same(restored(store, TOKENS, empty_state(spec), full=True), before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_put_stores_the_payload_that_a_power_failure_lost(store, tmp_path, asynchronous):
    before = put_damaged(store, tmp_path, FULL, (20, 98))
    with store_at(tmp_path) as other:
        length = other.put(TOKENS, before, asynchronous=asynchronous)
        assert (length.result() if asynchronous else length) == 100 and other.verify() == []
        assert same(restored(other, TOKENS, empty_state(FULL), full=True), before)


def test_a_block_that_was_stored_again_is_not_dropped(store, tmp_path):
    before = put_damaged(store, tmp_path, FULL, [20])
    with store.match(TOKENS) as match:
        assert store.restore(match, into=empty_state(FULL)) == 16
        store.put(TOKENS, before)
        assert store.restore(match, into=empty_state(FULL)) == 16  # the old bytes
    store.put(TOKENS[::-1], prefilled(FULL, TOKENS[::-1]))
    assert same(restored(store, TOKENS, empty_state(FULL), full=True), before)


def test_threads_may_put_after_damage(store, tmp_path):
    before = put_damaged(store, tmp_path, FULL, [20])
    with store.match(TOKENS) as match:
        for _ in range(40):
            store.restore(match, into=empty_state(FULL))
    assert run_in_threads(lambda _: store.put(TOKENS, before), 8) == [100] * 8
    assert same(restored(store, TOKENS, empty_state(FULL), full=True), before)


@pytest.mark.parametrize(("position", "expected"), [(70, 64), (40, 20), (5, 0)])
def test_a_hybrid_falls_back_to_the_newest_complete_position(store, tmp_path, position, expected):
    state = empty_state(HYBRID)
    rng, before = np.random.default_rng(5), {}
    for stop in (20, 64, 90):
        prefill(state, TOKENS[:stop])
        if stop == 20:
            state.arrays["0.keys"][...] = rng.random(state.arrays["0.keys"].shape)
        store.put(TOKENS[:stop], state)
        before[stop] = state.copy()
    keys = state.arrays["0.keys"]
    needle = np.ascontiguousarray(keys[0, 1, position - 1 : position + 1]).tobytes()
    flip(tmp_path, needle)
    after = prefilled(HYBRID, TOKENS)
    with store.match(TOKENS) as match:
        assert match.length == 90
        assert store.restore(match, into=after) == after.length == expected
    if expected:
        assert same(after, before[expected]) and is_zero(after, expected)
    else:
        assert is_zero(after)


def test_a_damaged_snapshot_falls_back_to_an_older_one(store, tmp_path):
    state = empty_state(HYBRID)
    before = {}
    for stop in (20, 64, 90):
        prefill(state, TOKENS[:stop])
        state.arrays["1.state"][...] = np.random.default_rng(stop).random((1, 3, 5))
        store.put(TOKENS[:stop], state)
        before[stop] = state.copy()
    flip(tmp_path, state.arrays["1.state"].tobytes())
    after = prefilled(HYBRID, TOKENS)
    with store.match(TOKENS) as match:
        assert store.restore(match, into=after) == 64
    assert same(after, before[64]) and is_zero(after, 64)


# ---- refusals ----


def test_tokens_other_than_integers_are_refused(store):
    for tokens in ([0.5, 1], ["a"], [True, False], np.zeros((2, 3), int), [-1], [1 << 32]):
        with pytest.raises((TypeError, ValueError), match="token"):
            store.match(tokens)
    with store.match([]) as match:
        assert match.length == 0


def test_a_cache_with_another_number_of_tokens_is_refused(store):
    with pytest.raises(CompatibilityError, match="the cache has 40 tokens, and tokens has 41"):
        store.put(TOKENS[:41], prefilled(FULL, TOKENS[:40]))
    with pytest.raises(CapacityError, match="41 tokens do not fit into 40 positions"):
        store.put(TOKENS[:41], np.zeros((1, 1, 40, 2)))
    assert store.stats()["records"] == 0


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (spec_of("full"), "lacks the entry '1.keys'"),
        (spec_of("full", "full", "full"), "also has '2.keys'"),
        (spec_of("full", "full", dtype="float64"), "dtype 'float64'"),
        (spec_of("full", "sliding"), "kind 'sliding'"),
    ],
)
def test_a_cache_with_other_entries_is_refused_and_not_written(store, tmp_path, other, text):
    store.put(TOKENS[:40], prefilled(FULL, TOKENS[:40]))
    state = prefilled(other, TOKENS[:40])
    before = state.copy()
    with store.match(TOKENS) as match, pytest.raises(CompatibilityError, match=text):
        store.restore(match, into=state)
    assert same(state, before)
    with pytest.raises(CompatibilityError, match=text):
        store.put(TOKENS[:40], state)
    with store_at(tmp_path) as fresh, pytest.raises(CompatibilityError, match=text):
        fresh.put(TOKENS[:40], state)


def test_a_store_for_a_spec_misses_prompts_of_another_one(store, tmp_path, caplog):
    store.put(TOKENS[:40], prefilled(FULL, TOKENS[:40]))
    other = store_at(tmp_path, spec=spec_of("full", "full", dtype="float64"))
    with caplog.at_level(logging.WARNING), other, other.match(TOKENS) as match:
        assert (match.length, match.limit) == (0, "0.keys")
    assert "other entries" in caplog.text


def test_a_cache_without_room_is_refused_and_not_written(store):
    store.put(TOKENS, prefilled(FULL, TOKENS))
    state = prefilled(spec_of("full", "full", positions=90), TOKENS[:80])
    before = state.copy()
    with (
        store.match(TOKENS) as match,
        pytest.raises(CapacityError, match="99 tokens do not fit into 90"),
    ):
        store.restore(match, into=state)
    assert same(state, before)


def test_a_window_that_needs_more_tokens_than_stored_is_refused(store):
    small, large = (spec_of("sliding", window=window) for window in (8, 16))
    store.put(TOKENS[:40], prefilled(small, TOKENS[:40]))
    with store.match(TOKENS) as match, pytest.raises(CompatibilityError, match="needs 16 tokens"):
        store.restore(match, into=empty_state(large))


def test_a_read_only_target_is_refused(store):
    store.put(TOKENS[:40], np.ones((1, 2, 40, 4)))
    target = np.zeros((1, 2, 40, 4))
    target.flags.writeable = False
    with store.match(TOKENS) as match, pytest.raises(CompatibilityError, match="read-only"):
        store.restore(match, into=target)


def test_wrong_types_are_refused(store, tmp_path):
    with pytest.raises(TypeError, match="cache must be a CacheState"):
        store.put(TOKENS, "cache")
    output = types.SimpleNamespace(past_key_values=None)  # of a model
    with pytest.raises(TypeError, match="got SimpleNamespace: pass its past_key_values"):
        store.put(TOKENS, output)
    with store.match(TOKENS) as match, pytest.raises(TypeError, match="into must be"):
        store.restore(match, into="cache")
    with pytest.raises(TypeError, match="match must be a Match"):
        store.restore(5, into=np.zeros((1, 2, 3)))
    with pytest.raises(TypeError, match="created by"):
        Match()
    times = [{"lock_timeout": seconds} for seconds in (-1, float("nan"))]
    for options in ({"block_tokens": 0}, {"max_bytes": 0}, {"snapshots": "x"}, {"spec": 5}, *times):
        with pytest.raises((TypeError, ValueError)):
            PromptStore(tmp_path / "other", model=MODEL, **options)
    assert not (tmp_path / "other").exists()


def test_a_refused_restore_leaves_the_tokens_that_the_cache_had(store):
    small, large = (spec_of("sliding", window=window) for window in (8, 16))
    store.put(TOKENS[:40], prefilled(small, TOKENS[:40]))
    state = prefilled(large, TOKENS[:30])
    with store.match(TOKENS) as match:
        with pytest.raises(CompatibilityError, match="needs 16 tokens"):
            store.restore(match, into=state)
        assert same(state, prefilled(large, TOKENS[:30]))


@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["full", "hybrid"])
def test_a_closed_match_is_refused_and_the_cache_not_written(store, spec):
    store.put(TOKENS[:40], prefilled(spec, TOKENS[:40]))
    match = store.match(TOKENS)
    match.close()
    state = prefilled(spec, TOKENS[:20])
    with pytest.raises(ValueError, match="the match is closed"):
        store.restore(match, into=state)
    assert same(state, prefilled(spec, TOKENS[:20]))


def test_a_match_of_another_model_is_refused(store, tmp_path):
    store.put(TOKENS[:40], prefilled(FULL, TOKENS[:40]))
    state = empty_state(FULL)
    with PromptStore(tmp_path / "store", model="other") as other, store.match(TOKENS) as match:
        with pytest.raises(ValueError, match="of another model"):
            other.restore(match, into=state)
        assert store_at(tmp_path).restore(match, into=state) == 40  # the same model


def test_a_refused_put_does_not_fix_the_entries_of_the_store(store, tmp_path):
    store.put(TOKENS[:40], prefilled(FULL, TOKENS[:40]))
    with store_at(tmp_path) as fresh:
        with pytest.raises(CompatibilityError, match="dtype 'float64'"):
            fresh.put(TOKENS[:40], prefilled(spec_of("full", "full", dtype="float64"), TOKENS[:40]))
        assert check_every_match(fresh, [TOKENS], FULL) == [40]
        assert fresh.put(TOKENS[:60], prefilled(FULL, TOKENS[:60])) == 60


def test_a_state_that_grows_is_checked_first(store):
    store.put(TOKENS, np.ones((1, 2, 128, 4), np.float32))
    cache = KVState((1, 2, 32, 4), 128, np.float64)
    with store.match(TOKENS) as match, pytest.raises(CompatibilityError, match="dtype 'float64'"):
        store.restore(match, into=cache)
    assert cache.seq_length == 32


def test_a_folder_that_cannot_be_created_is_an_error_of_the_store(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot create the folder"):
        PromptStore(tmp_path / "file" / "a" / "b", model=MODEL)


# ---- policies ----


def test_a_prefill_stops_at_the_positions_of_the_policy(tmp_path):
    policies = {
        "end": [99],
        "powers": [16, 32, 64, 99],
        40: [40, 80, 99],
        (10, 70, 300): [10, 70, 99],
    }
    for policy, expected in policies.items():
        with store_at(tmp_path, snapshots=policy) as store:
            assert store.stops(TOKENS) == expected
            assert store.stops(TOKENS, 64) == [each for each in expected if each > 64]
            assert store.stops(TOKENS[:1]) == [] and store.stops(TOKENS, 99) == []


def test_snapshots_at_the_stops_serve_every_later_prompt(tmp_path):
    with store_at(tmp_path, snapshots=32) as store:
        state = empty_state(HYBRID)
        for stop in store.stops(TOKENS):
            store.put(TOKENS[:stop], prefill(state, TOKENS[:stop]))
        with store.match(TOKENS) as match:
            assert match.length == 99
        fork = np.concatenate([TOKENS[:70], TOKENS[:30]])
        with store.match(fork) as match:
            assert (match.length, match.limit) == (64, "0.keys")


# ---- asynchronous puts, pins ----


def test_an_asynchronous_put_stores_the_cache_of_the_call(store):
    state = prefilled(HYBRID, TOKENS[:50])
    expected = state.copy()
    future = store.put(TOKENS[:50], state, asynchronous=True)
    prefill(state, TOKENS)  # the model continues in the same arrays
    assert future.result(timeout=60) == 50
    assert same(restored(store, TOKENS, empty_state(HYBRID)), expected)
    assert store.stats()["pending_bytes"] == 0


@pytest.mark.parametrize("as_tokens", [np.array, torch_tokens], ids=["numpy", "torch"])
def test_an_asynchronous_put_stores_the_tokens_of_the_call(store, as_tokens):
    for seed in range(10):
        expected = np.random.default_rng(seed).integers(0, 1000, 60)
        tokens = as_tokens(expected)
        future = store.put(tokens, prefilled(FULL, expected), asynchronous=True)
        tokens[:] = 1  # the caller uses the buffer again
        assert future.result(timeout=60) == 60
        assert check_every_match(store, [expected, np.ones(60, int)], FULL) == [60, 0]


@pytest.mark.parametrize("most", [0, 5000, 1 << 20])
def test_asynchronous_puts_stay_within_their_budget(tmp_path, most):
    with store_at(tmp_path, max_pending_bytes=most) as store:
        state = empty_state(FULL)
        futures = []
        for stop in range(10, 100, 10):
            prefill(state, TOKENS[:stop])
            futures.append(store.put(TOKENS[:stop], state, asynchronous=True))
            assert store.stats()["pending_bytes"] <= most
        assert [future.result(timeout=60) for future in futures] == list(range(10, 100, 10))
    with store_at(tmp_path) as store:
        assert same(restored(store, TOKENS, empty_state(FULL)), prefilled(FULL, TOKENS[:90]))


def test_close_waits_for_asynchronous_puts(tmp_path):
    with store_at(tmp_path) as store:
        store.put(TOKENS[:50], prefilled(FULL, TOKENS[:50]), asynchronous=True)
    with store_at(tmp_path) as store, store.match(TOKENS) as match:
        assert match.length == 50


def test_a_deleted_prompt_is_gone_and_its_shared_beginning_stays(store):
    first, second = TOKENS.copy(), TOKENS.copy()
    second[70:] += 1
    for tokens in (first, second):
        store.put(tokens, prefilled(HYBRID, tokens))
    assert store.delete(first) == 100
    with store.match(first, full=True) as match:
        assert match.length == 0
    assert same(restored(store, second, empty_state(HYBRID), full=True), prefilled(HYBRID, second))
    assert store.delete(second) == 100 and store.stats()["records"] == 0
    assert store.delete(second) == 0


def test_a_budget_evicts_the_least_recently_used_and_keeps_pins(tmp_path):
    prompts = [np.random.default_rng(seed).integers(0, 1000, 64) for seed in range(8)]
    size = prefilled(FULL, prompts[0]).nbytes // 4
    with store_at(tmp_path, max_bytes=6 * size) as store:
        store.put(prompts[0], prefilled(FULL, prompts[0]))
        assert store.pin(prompts[0]) == 64
        for tokens in prompts[1:]:
            store.put(tokens, prefilled(FULL, tokens))
        assert store.stats()["disk_bytes"] <= 6 * size
        lengths = []
        for tokens in prompts:
            with store.match(tokens, full=True) as match:
                lengths.append(match.length)
        assert lengths[0] == lengths[-1] == 64 and 0 in lengths
        assert store.unpin(prompts[0]) == 64


def test_verify_names_damage_and_repair_removes_it(store, tmp_path):
    before = distinct(FULL, TOKENS)
    store.put(TOKENS, before)
    assert store.verify() == []
    name = flip(tmp_path, np.ascontiguousarray(before.arrays["0.keys"][0, 0, 40]).tobytes())
    ((segment, offset, text),) = store.verify()
    assert name.startswith(segment) and offset >= 0 and text
    assert len(store.repair()) == 1 and store.verify() == []
    with store.match(TOKENS) as match:
        assert match.length == 32


def test_a_put_after_a_repair_finds_room_for_a_pinned_prompt(tmp_path):
    """The bytes of the removed record count until its file is written anew."""
    before = distinct(FULL, TOKENS)
    with store_at(tmp_path) as store:
        store.put(TOKENS, before)
        assert store.pin(TOKENS) == 100
        size = store.stats()["disk_bytes"]
    flip(tmp_path, np.ascontiguousarray(before.arrays["0.keys"][0, 0, 40]).tobytes())
    with store_at(tmp_path, max_bytes=size + 2000) as store:
        assert len(store.repair()) == 1
        assert store.put(TOKENS, before) == 100 and store.stats()["disk_bytes"] <= size + 2000
        assert store.stats()["pinned"] == 1


def test_damage_of_a_pinned_record_asks_to_pin_again(tmp_path):
    before = distinct(FULL, TOKENS)
    with store_at(tmp_path) as store:
        store.put(TOKENS, before)
        store.pin(TOKENS)
    flip(tmp_path, np.ascontiguousarray(before.arrays["0.keys"][0, 0, 99]).tobytes())
    with store_at(tmp_path) as store:
        ((_, _, text),) = store.repair()
        assert text.endswith("it was pinned: pin it again") and store.stats()["pinned"] == 0


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 30, 35])
def test_a_damaged_head_of_the_store_is_mended(tmp_path, offset):
    with store_at(tmp_path) as store:
        store.put(TOKENS, distinct(FULL, TOKENS))
    path = tmp_path / "store" / "store"
    good = path.read_bytes()
    path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
    with store_at(tmp_path) as store:
        assert store.verify() == [("store", 0, "the first 64 bytes are damaged")]
        with store.match(TOKENS, full=True) as match:
            assert match.length == 100
        assert store.repair() == [("store", 0, "the first 64 bytes are damaged")]
        assert store.verify() == []
    assert path.read_bytes() == good


def test_a_store_without_any_head_is_refused(tmp_path):
    with store_at(tmp_path):
        pass
    (tmp_path / "store" / "store").write_bytes(bytes(64))
    with pytest.raises(FormatError):
        store_at(tmp_path)


def test_a_flip_that_shortens_a_match_is_found_and_repaired(tmp_path):
    """Each byte of the headers, of records that share a block; a store without an index file."""
    prompts = [TOKENS[:40], np.concatenate([TOKENS[:16], TOKENS[60:90]])]
    with store_at(tmp_path) as store:
        for tokens in prompts:
            store.put(tokens, prefilled(FULL, tokens))
    (path,) = (tmp_path / "store").glob("segment-*")
    good = path.read_bytes()
    starts = [at for at in range(64, len(good), 64) if good[at : at + 4] == b"mspR"]
    assert len(starts) == 5

    def lengths():
        with store_at(tmp_path) as store:
            damage = store.verify()
            matches = [store.match(tokens, full=True) for tokens in prompts]
            return [match.length for match in matches], damage

    before = lengths()
    assert before == ([40, 46], [])
    for offset in (start + byte for start in starts for byte in range(0, 128, 3)):
        data = bytearray(good)
        data[offset] ^= 1 << offset % 8
        path.write_bytes(data)
        after, damage = lengths()
        assert after == before[0] or damage, offset
        with store_at(tmp_path) as store:
            assert store.repair() == damage
        assert lengths()[1] == []
        for other in (tmp_path / "store").glob("segment-*"):
            other.unlink()
        (tmp_path / "store" / "index").unlink(missing_ok=True)


def test_stores_and_matches_are_not_pickled(store):
    with store.match(TOKENS) as match:
        for each in (store, match):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                pickle.dumps(each)


def test_a_store_shows_itself(store):
    assert repr(store).startswith("PromptStore(") and "model='toy'" in repr(store)
    assert "records" in store._repr_html_()
    assert store.block_tokens == 16 and store.fingerprint.startswith("sha256:")
