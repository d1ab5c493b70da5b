"""`extra=`: prompts with other images differ, and share the blocks before them."""

import numpy as np
import pytest
from toy_caches import (
    FULL,
    HYBRID,
    TOKENS,
    check_every_match,
    extra_before,
    flip,
    prefilled,
    store_at,
)

from mlstate.prompts import PromptStore


def stored(store, spec, extra, tokens=TOKENS, **options):
    return store.put(tokens, prefilled(spec, tokens, extra), extra=extra, **options)


def length(store, extra, tokens=TOKENS):
    with store.match(tokens, extra=extra, full=True) as match:
        return match.length


@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["full", "hybrid"])
def test_prompts_with_other_images_never_share_their_tokens(store, spec):
    extras = [None, {40: "a"}, {40: b"a"}, {40: "b"}, {41: "a"}, {40: "a", 60: 5}, {0: "a"}]
    for extra in extras:
        assert stored(store, spec, extra) == 100
    for extra in extras:
        assert check_every_match(store, [TOKENS], spec, extra) == [100]
    for extra in ({40: "c"}, {39: "a"}, {40: "a", 60: 6}, {60: 5}, {0: "b", 40: "a"}):
        assert length(store, extra) < 100


def test_blocks_before_an_image_are_shared(store):
    stored(store, FULL, {40: "a"})
    blocks = store.stats()["blocks"]
    for extra, shared in [({40: "b"}, 32), (None, 32), ({40: "a", 64: "b"}, 64), ({15: "b"}, 0)]:
        assert length(store, extra) == shared
    assert stored(store, FULL, {40: "b"}) == 100
    assert store.stats()["blocks"] == blocks + 4  # from token 32 on
    assert length(store, None, TOKENS[:40]) == 32
    assert stored(store, FULL, None, TOKENS[:40]) == 40
    assert length(store, {40: "a"}, TOKENS[:60]) == 48  # longer than the tail of text
    assert length(store, {40: "c"}) == 40  # the tail ends before the image


def test_the_order_and_the_integer_types_of_extra_do_not_matter(store):
    stored(store, FULL, {40: "a", 60: 5})
    assert length(store, {np.int64(60): np.uint8(5), np.int32(40): "a"}) == 100
    assert length(store, {}) == length(store, None) == 32


@pytest.mark.parametrize(
    "extra",
    [
        [(40, "a")],
        "a",
        {40: None},
        {40: 1.5},
        {40: True},
        {True: "a"},
        {"40": "a"},
        {40.0: "a"},
        {100: "a"},
        {-1: "a"},
        {40: -1},
        {40: ""},
        {40: b""},
    ],
    ids=repr,
)
def test_a_malformed_extra_is_refused_before_a_write(store, extra):
    cache = prefilled(FULL, TOKENS)
    for call in (
        lambda: store.put(TOKENS, cache, extra=extra),
        lambda: store.match(TOKENS, extra=extra),
        lambda: store.pin(TOKENS, extra=extra),
        lambda: store.unpin(TOKENS, extra=extra),
        lambda: store.delete(TOKENS, extra=extra),
    ):
        with pytest.raises((TypeError, ValueError), match="extra"):
            call()
    assert store.stats()["records"] == 0


def test_pins_and_deletions_concern_one_image(store):
    extras = [None, {40: "a"}, {40: "b"}]
    for extra in extras:
        stored(store, HYBRID, extra)
    assert store.pin(TOKENS, extra=extras[1]) == 100
    assert store.delete(TOKENS, extra=extras[2]) == 100
    assert [length(store, extra) for extra in extras] == [100, 100, 0]
    store._log.prune(1, 5.0)
    assert [length(store, extra) for extra in extras] == [0, 100, 0]
    assert store.unpin(TOKENS, extra=extras[1]) == 100


def test_asynchronous_puts_of_two_images_store_both(store):
    puts = [stored(store, FULL, {40: image}, asynchronous=True) for image in "ab"]
    assert [put.result() for put in puts] == [100, 100]
    for image in "ab":
        assert check_every_match(store, [TOKENS], FULL, {40: image}) == [100]


def test_damage_of_one_image_is_repaired_by_its_next_put(tmp_path):
    extras = [{40: "a"}, {40: "b"}]
    with store_at(tmp_path) as store:
        for extra in extras:
            stored(store, FULL, extra)
        row = prefilled(FULL, TOKENS, extras[1]).arrays["1.values"][0, :, 48:64]
        flip(tmp_path, np.ascontiguousarray(row).tobytes())
        assert check_every_match(store, [TOKENS], FULL, extras[1]) == [48]
        assert check_every_match(store, [TOKENS], FULL, extras[0]) == [100]
        assert stored(store, FULL, extras[1]) == 100
        assert check_every_match(store, [TOKENS], FULL, extras[1]) == [100]


def test_a_match_ends_before_the_first_other_image(tmp_path):
    """All images of a short prompt against all others: the match ends at the first difference."""
    tokens = TOKENS[:12]
    extras = [None] + [{place: name} for place in range(12) for name in "ab"]
    for count in (12, 10, 7):
        folder = tmp_path / str(count)
        for put in extras:
            with PromptStore(folder, model="m", block_tokens=4) as store:
                before = extra_before(put, count)
                cache = prefilled(FULL, tokens[:count], before)
                assert store.put(tokens[:count], cache, extra=before) == count
                for asked in extras:
                    with store.match(tokens, extra=asked, full=True) as match:
                        differ = {*(before or {}).items()} ^ {*(asked or {}).items()}
                        first = min([count, *(place for place, _ in differ)])
                        whole = first if first == count else first // 4 * 4
                        assert match.length == whole, (put, asked)
                store.delete(tokens[:count], extra=before)
