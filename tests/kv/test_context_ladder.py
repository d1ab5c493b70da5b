"""Decisions on the size of a cache, against formulas written independently of the ladder."""

import pickle
import random
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from mlstate import CapacityError
from mlstate.kv import ContextLadder, create_causal_mask, create_decode_mask
from mlstate.kv.records import LadderStep

SIZES = (512, 1024, 2048, 3072, 4096)


def refilled(tokens, context, batch_size, reserve_batches, prompt):
    """The tokens that a refill keeps, None if it stops, or "refused" for a prompt without room.

    The formula of the growing-inference client as its description words it, on lists of tokens.
    The client keeps the prompt alone if the formula has no token for others, and loses the newest
    token: these prompts are followed by one batch of the newest tokens instead.
    """
    valid = len(tokens)
    if len(prompt) == valid <= context:
        return None
    token_limit = max(1, context // batch_size - reserve_batches) * batch_size
    token_limit = max(1, min(context, token_limit, context - min(batch_size, context - 1)))
    if token_limit <= len(prompt):
        newest = batch_size
        while newest > 1 and len(prompt) + newest + batch_size > context:
            newest -= 1
        token_limit = len(prompt) + newest
        if len(prompt) + batch_size > context:
            return "refused"
    others = tokens[len(prompt) :]
    result = prompt + others[max(0, len(others) - (token_limit - len(prompt))) :]
    return None if len(result) >= valid else result


def taken(step, tokens):
    return [tokens[i] for i in step.indices]


@st.composite
def ladders(draw, overflow="shift_refill"):
    sizes = sorted(draw(st.sets(st.integers(1, 700), min_size=1, max_size=5)))
    return ContextLadder(
        sizes,
        overflow=overflow,
        batch_size=draw(st.integers(1, 800)),
        reserve_batches=draw(st.integers(0, 12)),
        prompt_tokens=draw(st.one_of(st.just(0), st.integers(0, 800))),
    )


# ---- growing ----


@pytest.mark.parametrize("sizes", [SIZES, list(SIZES), np.array(SIZES), iter(SIZES)])
def test_sizes_of_any_sequence(sizes):
    ladder = ContextLadder(sizes)
    assert ladder.sizes == SIZES and all(type(size) is int for size in ladder.sizes)


def test_defaults_and_properties():
    ladder = ContextLadder([8])
    assert (ladder.overflow, ladder.batch_size) == ("stop", None)
    assert (ladder.reserve_batches, ladder.prompt_tokens) == (2, 0)
    ladder = ContextLadder(
        [8], overflow="roll", batch_size=np.int8(4), reserve_batches=0, prompt_tokens=3
    )
    assert (ladder.overflow, ladder.batch_size) == ("roll", 4)
    assert (ladder.reserve_batches, ladder.prompt_tokens) == (0, 3)


@given(ladders("stop"), st.integers(0, 800))
@settings(max_examples=tries(200), deadline=None)
def test_the_size_is_the_smallest_that_holds_the_tokens(ladder, position):
    fits = [size for size in ladder.sizes if size >= position]
    if fits:
        assert ladder.size_for(position) == min(fits)
    else:
        with pytest.raises(CapacityError, match="the largest size of the ladder"):
            ladder.size_for(position)


def test_growth_begins_when_the_next_token_does_not_fit():
    ladder = ContextLadder(SIZES)
    assert ladder.next_step(0, 512) == LadderStep("stay", 512, ())
    for size, larger in pairwise(SIZES):
        assert ladder.next_step(size - 1, size) == LadderStep("stay", size, (range(size - 1),))
        assert ladder.next_step(size, size) == LadderStep("grow", larger, (range(size),))
    assert ladder.next_step(512, 512, new_tokens=2000).size == 3072
    assert ladder.next_step(512, 512, new_tokens=3584).size == 4096
    assert ladder.next_step(0, 512, new_tokens=512).action == "stay"
    for new_tokens in (3585, 9000):
        step = ladder.next_step(512, 512, new_tokens=new_tokens)
        assert step == LadderStep("stop", 512, (range(512),))
    assert ladder.next_step(4096, 4096).action == "stop"
    assert ladder.next_step(4095, 4096).action == "stay"


# ---- shift and refill ----


def check_next_step(ladder, position, new_tokens, size):
    position, top = min(position, size), ladder.sizes[-1]
    tokens = [7 * i + 3 for i in range(position + new_tokens)]
    step = partial(ladder.next_step, position, size, new_tokens)
    if len(tokens) <= top:
        smallest = min(s for s in ladder.sizes if s >= len(tokens))
        action = "stay" if len(tokens) <= size else "grow"
        kept_ranges = (range(position),) if position else ()
        assert step() == LadderStep(action, max(smallest, size), kept_ranges)
    else:
        check_refill(ladder, step, tokens, top)


def check_shrink(ladder, position, size):
    tokens = list(range(1000, 1000 + position))
    refill = partial(ladder.refill, position, size)
    check_refill(ladder, refill, tokens, size)
    if position <= size:
        step = ladder.shrink(position, size)
        assert step == LadderStep("shrink", size, (range(position),) if position else ())
        assert ladder.shrink(position, size, refill=True) == step
    else:
        with pytest.raises(CapacityError, match=f"{position} tokens do not fit into {size} pos"):
            ladder.shrink(position, size)
        check_refill(ladder, partial(ladder.shrink, position, size, refill=True), tokens, size)


def check_refill(ladder, refill, tokens, size):
    """The step keeps the tokens of the formula, in batches that cover the new cache once."""
    prompt = tokens[: ladder.prompt_tokens]
    expected = refilled(tokens, size, ladder.batch_size, ladder.reserve_batches, prompt)
    if expected == "refused":
        with pytest.raises(CapacityError, match="pass prompt_tokens of at most") as caught:
            refill()
        assert caught.value.name == "prompt_tokens"
        return
    step = refill()
    if expected is None:
        assert step.action == "stop" and step.indices == list(range(len(tokens)))
        assert not step.batches and not step.dropped
        return
    assert (step.action, step.size) == ("refill", size)
    assert taken(step, tokens) == expected and expected[-1] == tokens[-1]
    assert step.kept_tokens == len(expected) <= size
    assert sorted({*step.indices, *step.dropped}) == list(range(len(tokens)))
    assert len(step.dropped) == len(tokens) - len(expected) > 0
    positions = [i for start, stop in step.batches for i in range(start, stop)]
    assert positions == list(range(len(expected)))
    lengths = [stop - start for start, stop in step.batches]
    assert all(length == ladder.batch_size for length in lengths[:-1])
    assert 0 < lengths[-1] <= ladder.batch_size


@given(ladders(), st.integers(0, 400), st.integers(1, 900), st.data())
@settings(max_examples=tries(600), deadline=None)
def test_a_refill_keeps_the_tokens_of_the_formula(ladder, position, new_tokens, data):
    size = data.draw(st.sampled_from(ladder.sizes))
    check_next_step(ladder, position, new_tokens, size)
    check_shrink(ladder, position + new_tokens, size)


def test_ladder_stops_without_droppable_tokens():
    ladder = ContextLadder([256, 512], batch_size=64, prompt_tokens=200, reserve_batches=6)
    for position in (0, 200, 264):
        kept_ranges = (range(position),) if position else ()
        assert ladder.refill(position) == LadderStep("stop", 512, kept_ranges)
    step = ladder.refill(265)
    assert (step.action, step.kept) == ("refill", (range(200), range(201, 265)))
    assert step.batches[-2:] == ((192, 256), (256, 264))


def test_a_long_prompt_is_followed_by_the_newest_tokens():
    def kept(prompt_tokens, **settings):
        settings = {"batch_size": 64, "reserve_batches": 2} | settings
        ladder = ContextLadder([512], prompt_tokens=prompt_tokens, **settings)
        return ladder.refill(513).kept

    assert kept(383) == (range(383), range(512, 513))  # whole batches: 384 tokens
    assert kept(384) == (range(384), range(449, 513))  # a batch, then one more fits
    assert kept(400) == (range(400), range(465, 513))  # as many as leave room for one more batch
    assert kept(100, reserve_batches=7) == (range(100), range(449, 513))
    assert kept(447) == (range(447), range(512, 513))
    assert kept(448) == (range(448), range(512, 513))


def test_a_prompt_without_room_for_a_batch_is_refused_by_name():
    ladder = ContextLadder([8, 16], overflow="shift_refill", batch_size=4, prompt_tokens=13)
    for refill in (
        lambda: ladder.next_step(16, 16),
        lambda: ladder.refill(14),
        lambda: ladder.shrink(17, refill=True),
    ):
        with pytest.raises(CapacityError) as caught:
            refill()
        assert str(caught.value) == (
            "prompt_tokens keeps 13 tokens, which do not fit into 16 positions together with a "
            "batch of 4: pass prompt_tokens of at most 12, or a larger size"
        )
        error = caught.value
        assert (error.name, error.expected, error.got) == ("prompt_tokens", "0..12", "13")
    assert ladder.next_step(0, 8, new_tokens=16).action == "grow"
    assert ladder.refill(13).action == "stop"  # all of it is the prompt, and it fits
    with pytest.raises(CapacityError, match="keeps 9 tokens, which do not fit into 8 positions"):
        ladder.refill(9, 8)
    assert "raise CapacityError: 13 prompt_tokens leave no room" in ladder._repr_html_()


def random_ladder(rng):
    sizes = sorted(rng.sample(range(1, 48), rng.randint(1, 4)))
    return ContextLadder(
        sizes,
        overflow=rng.choice(["stop", "shift_refill", "shift_refill", "roll"]),
        batch_size=rng.choice([1, 2, 3, 4, 8, 16, 50]),
        reserve_batches=rng.choice([0, 0, 1, 2, 5]),
        prompt_tokens=rng.choice([0, 0, 1, rng.randint(0, 50)]),
    )


def follow(ladder, rng, calls):
    """Generate by the steps of a ladder; check the tokens in the cache after each step."""
    size, cache, count, refills = ladder.sizes[0], [], 0, []
    for _ in range(calls):
        position = count if ladder.overflow == "roll" else len(cache)
        new = list(range(count, count + rng.choice([1, 1, 1, 2, 7])))
        try:
            step = ladder.next_step(position, size, len(new))
        except CapacityError as error:
            assert error.name == "prompt_tokens" or "new tokens exceed" in str(error)
            return refills
        candidates = list(range(count)) if step.action == "roll" else cache
        candidates = candidates + new
        kept_tokens = [candidates[i] for i in step.indices]
        assert all(a < b for a, b in pairwise(step.indices))
        if step.action == "stop":
            assert ladder.overflow == "stop" and kept_tokens == cache
            return refills
        if step.action == "refill":
            refills.append(count)
            prompt = candidates[: ladder.prompt_tokens]
            assert kept_tokens[: len(prompt)] == prompt and kept_tokens[len(prompt) :]
            assert kept_tokens[-1] == new[-1]
            assert kept_tokens[len(prompt) :] == candidates[len(prompt) - len(kept_tokens) :]
            assert [b for a, b in step.batches][-1] == len(kept_tokens)
            room = step.size - len(kept_tokens)
            batch = min(ladder.batch_size, step.size - 1)
            one_less = len(prompt) + 1 + batch > step.size
            assert room >= (batch - 1 if one_less else batch)
            cache = kept_tokens
        else:
            assert step.action == "roll" or kept_tokens == cache
            dropped = {candidates[i] for i in step.dropped}
            assert kept_tokens == [token for token in cache if token not in dropped]
            cache = kept_tokens + new
        count, size = count + len(new), step.size
        assert cache[-1] == count - 1 and len(cache) <= size
        assert cache[: ladder.prompt_tokens] == list(range(min(ladder.prompt_tokens, len(cache))))
    return refills


def check_any_refill(ladder, position, size):
    """A refill to any size keeps prompt and newest token, drops nothing, or is refused."""
    batch, prompt = ladder.batch_size, min(ladder.prompt_tokens, position)
    fits = prompt + batch * (1 + ladder.reserve_batches) <= size
    try:
        steps = ladder.refill(position, size), ladder.shrink(position, size, refill=True)
    except CapacityError as error:
        assert error.name == "prompt_tokens" and not fits and prompt + batch > size
        return
    for step in steps:
        assert step.indices[-1:] == ([position - 1] if position else [])
        assert step.indices[:prompt] == list(range(prompt)) and step.kept_tokens <= step.size
        assert step.action == "refill" or step.indices == list(range(position))


def test_random_ladders_never_lose_the_newest_token():
    rng, refills = random.Random(6), 0
    for _ in range(3000):
        ladder = random_ladder(rng)
        refills += len(follow(ladder, rng, 30))
        check_any_refill(ladder, rng.randint(0, 99), rng.choice(ladder.sizes))
    assert refills > 5000


# ---- rolling ----


@given(ladders("roll"), st.lists(st.integers(1, 40), max_size=60))
@settings(max_examples=tries(300), deadline=None)
def test_a_roll_drops_the_oldest_tokens_after_the_prompt(ladder, writes):
    top, size, position, stored = ladder.sizes[-1], ladder.sizes[0], 0, []
    sinks = ladder.prompt_tokens
    for new_tokens in writes:
        if sinks >= top and position + new_tokens > top:
            with pytest.raises(CapacityError, match="together with one new token") as caught:
                ladder.next_step(position, size, new_tokens)
            assert caught.value.name == "prompt_tokens"
            return
        if new_tokens > top - sinks and position + new_tokens > top:
            with pytest.raises(CapacityError, match=f"write at most {top - sinks} at once"):
                ladder.next_step(position, size, new_tokens)
            return
        step = ladder.next_step(position, size, new_tokens)
        excess = max(0, len(stored) + new_tokens - top)
        assert (step.action == "roll") == (excess > 0)
        assert list(step.dropped) == stored[sinks : sinks + excess]
        del stored[sinks : sinks + excess]
        assert step.indices == stored and not step.batches
        stored += range(position, position + new_tokens)
        position, size = position + new_tokens, step.size
        assert len(stored) <= size


def test_a_roll_can_begin_below_the_largest_size():
    ladder = ContextLadder([4, 8], overflow="roll", prompt_tokens=1)
    assert ladder.next_step(4, 4, 6) == LadderStep("roll", 8, (range(1), range(3, 4)), range(1, 3))


# ---- shrinking ----


def test_shrinking_to_the_smallest_size():
    ladder = ContextLadder([256, 512, 1024], batch_size=64)
    assert ladder.shrink(180) == LadderStep("shrink", 256, (range(180),))
    assert ladder.shrink(256).size == 256 and ladder.shrink(257).size == 512
    assert ladder.shrink(0, 512) == LadderStep("shrink", 512, ())


def test_shrinking_below_the_tokens_names_the_remedy():
    ladder = ContextLadder([256, 512, 1024], batch_size=64)
    with pytest.raises(CapacityError) as caught:
        ladder.shrink(300, 256)
    assert str(caught.value) == (
        "300 tokens do not fit into 256 positions: pass size=512, or drop tokens by a refill"
    )
    assert (caught.value.expected, caught.value.got) == ("0..256", "300")
    for size in (None, 1024):
        with pytest.raises(CapacityError, match=r"into 1024 positions: drop tokens by"):
            ladder.shrink(2000, size)
        assert ladder.shrink(2000, size, refill=True) == ladder.refill(2000)
    assert ladder.shrink(300, 256, refill=True).kept == (range(172, 300),)


# ---- batches and masks ----


def test_prefill_batches():
    ladder = ContextLadder([256], batch_size=64)
    assert ladder.prefill_batches(0) == ()
    assert ladder.prefill_batches(64) == ((0, 64),)
    assert ladder.prefill_batches(65, 1) == ((1, 65),)
    assert ladder.prefill_batches(150, 20) == ((20, 84), (84, 148), (148, 150))


@pytest.mark.parametrize("overflow", ["stop", "roll"])
def test_masks_are_rows_of_the_causal_mask(overflow):
    ladder = ContextLadder([5, 9], overflow=overflow)
    for size in ladder.sizes:
        full = create_causal_mask(size)
        for position in range(size):
            row = ladder.mask(position, size)
            assert row.dtype == np.float16
            assert np.array_equal(row, create_decode_mask(size, size, position))
            for count in range(1, size - position + 1):
                rows = ladder.mask(position, size, count)
                assert np.array_equal(rows, full[:, :, position : position + count])
    mask = ladder.mask(1, 5, 2, dtype=np.float32, fill=-9.0)
    assert mask.tolist() == [[[[0, 0, -9, -9, -9], [0, 0, 0, -9, -9]]]]
    assert mask.dtype == np.float32


def test_rolled_cache_mask_is_all_visible():
    ladder = ContextLadder([5, 9], overflow="roll")
    for position in (9, 10, 500):
        assert np.array_equal(ladder.mask(position, 9), np.zeros((1, 1, 1, 9)))
    with pytest.raises(CapacityError, match="has a mask for one new token, got 2"):
        ladder.mask(8, 9, 2)
    with pytest.raises(CapacityError, match="follow next_step first"):
        ladder.mask(5, 5)


# ---- bad input ----


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ([], ValueError, "sizes is empty"),
        ([512, 512], ValueError, r"sizes must rise, but sizes\[0\] is 512 and sizes\[1\] is 512"),
        ([256, 1024, 512], ValueError, r"sizes\[1\] is 1024 and sizes\[2\] is 512"),
        ([0, 512], CapacityError, r"sizes\[0\] must be at least 1, got 0"),
        ([-512, 512], CapacityError, r"sizes\[0\] must be at least 1, got -512"),
        ([512, 1 << 63], CapacityError, r"sizes\[1\] does not fit into 64 bits"),
        ([512, 1024.0], TypeError, r"sizes\[1\] must be an integer, got float"),
        ([True, 512], TypeError, r"sizes\[0\] must be an integer, got bool"),
        (np.array([True]), TypeError, r"sizes\[0\] must be an integer, got bool"),
        (["512"], TypeError, r"sizes\[0\] must be an integer, got str"),
        ("512", TypeError, "sizes must be a sequence of integers, got str"),
        (512, TypeError, "sizes must be a sequence of integers, got int"),
        (None, TypeError, "sizes must be a sequence of integers, got NoneType"),
    ],
)
def test_sizes_that_are_refused(sizes, error, text):
    with pytest.raises(error, match=text) as caught:
        ContextLadder(sizes)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"overflow": "shift-refill"}, ValueError, "one of 'stop', 'shift_refill', 'roll', got 's"),
        ({"overflow": None}, ValueError, "got None"),
        ({"overflow": "shift_refill"}, ValueError, "'shift_refill' needs batch_size="),
        ({"batch_size": 0}, CapacityError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 64.0}, TypeError, "batch_size must be an integer, got float"),
        ({"batch_size": True}, TypeError, "batch_size must be an integer, got bool"),
        ({"reserve_batches": -1}, CapacityError, "reserve_batches must be at least 0, got -1"),
        ({"reserve_batches": None}, TypeError, "reserve_batches must be an integer, got NoneType"),
        ({"prompt_tokens": -1}, CapacityError, "prompt_tokens must be at least 0, got -1"),
        ({"prompt_tokens": [1, 2]}, TypeError, "prompt_tokens must be an integer, got list"),
    ],
)
def test_settings_that_are_refused(arguments, error, text):
    with pytest.raises(error, match=text) as caught:
        ContextLadder([512], **arguments)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: x.size_for(-1), CapacityError, "position must be at least 0, got -1"),
        (lambda x: x.size_for(513), CapacityError, "513 tokens do not fit into 512 positions"),
        (lambda x: x.size_for(1.0), TypeError, "position must be an integer, got float"),
        (lambda x: x.size_for(False), TypeError, "position must be an integer, got bool"),
        (lambda x: x.next_step(-1, 256), CapacityError, "position must be at least 0, got -1"),
        (lambda x: x.next_step(257, 256), CapacityError, "position 257 is beyond the 256 posit"),
        (lambda x: x.next_step(513, 512), CapacityError, "position 513 is beyond the 512 posit"),
        (lambda x: x.next_step(0, 300), ValueError, "size 300 is unknown; the sizes are 256, 512"),
        (lambda x: x.next_step(0, True), TypeError, "size must be an integer, got bool"),
        (lambda x: x.next_step(0, 256, 0), CapacityError, "new_tokens must be at least 1, got 0"),
        (lambda x: x.refill(300), ValueError, "the ladder has no batch_size"),
        (lambda x: x.refill(-1), CapacityError, "position must be at least 0, got -1"),
        (lambda x: x.refill(300, 300), ValueError, "size 300 is unknown"),
        (lambda x: x.shrink(100, 300), ValueError, "size 300 is unknown"),
        (lambda x: x.shrink(300, 256, refill=True), ValueError, "the ladder has no batch_size"),
        (lambda x: x.prefill_batches(9), ValueError, "the ladder has no batch_size"),
        (lambda x: x.prefill_batches(3, 5), CapacityError, "start 5 is beyond stop 3"),
        (lambda x: x.mask(256, 256), CapacityError, "1 new tokens after 256 do not fit into 256"),
        (lambda x: x.mask(0, 300), ValueError, "size 300 is unknown"),
    ],
)
def test_positions_that_are_refused(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call(ContextLadder([256, 512]))
    assert type(caught.value) is error


def test_rolled_position_requires_the_largest_size():
    ladder = ContextLadder([256, 512], overflow="roll")
    assert ladder.next_step(600, 512).dropped == range(88, 89)
    with pytest.raises(CapacityError, match="position 600 is beyond the 256 positions"):
        ladder.next_step(600, 256)


# ---- objects ----


def test_equality_hash_and_pickle():
    ladder = ContextLadder(SIZES, overflow="shift_refill", batch_size=64, prompt_tokens=97)
    same = ContextLadder(list(SIZES), overflow="shift_refill", batch_size=64, prompt_tokens=97)
    assert ladder == same and hash(ladder) == hash(same) and ladder != SIZES
    assert ladder != ContextLadder(SIZES, overflow="shift_refill", batch_size=64)
    assert pickle.loads(pickle.dumps(ladder)) == ladder
    step = ladder.next_step(4096, 4096)
    assert pickle.loads(pickle.dumps(step)) == step
    with pytest.raises(AttributeError):
        ladder.sizes = (1, 2)


def test_texts():
    ladder = ContextLadder(SIZES, overflow="shift_refill", batch_size=64, prompt_tokens=97)
    assert repr(ladder) == (
        "ContextLadder((512, 1024, 2048, 3072, 4096), overflow='shift_refill', batch_size=64, "
        "reserve_batches=2, prompt_tokens=97)"
    )
    assert eval(repr(ladder)) == ladder
    assert repr(ladder.next_step(4096, 4096)) == (
        "LadderStep(action='refill', size=4096, kept=(range(0, 97), range(226, 4097)), "
        "dropped=range(97, 226), batches=((0, 64), ..., (3904, 3968)) of 62)"
    )
    page = ladder._repr_html_()
    for text in ("grow to 1,024", "513 to 1,024", "keep 3,968 of 4,097 tokens, prefill 62 batches"):
        assert text in page
    assert "<td>stop</td>" in ContextLadder([8])._repr_html_()
    page = ContextLadder([8], overflow="roll", prompt_tokens=2)._repr_html_()
    assert "replace token 2, then the next" in page


def test_a_ladder_of_many_sizes_has_a_short_repr():
    text = repr(ContextLadder(range(1, 20_001)))
    assert len(text) < 400 and text.startswith("ContextLadder((1, 2, 3, ") and "…, 20000)" in text
    assert repr(ContextLadder([8, 16])).startswith("ContextLadder((8, 16), ")
