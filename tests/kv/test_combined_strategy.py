"""Prefill large, compact, generate small with reduced attention, expand."""

import pickle

import numpy as np
import pytest
from kv_model import mask_by_loop

from mlstate import CapacityError, CompatibilityError
from mlstate.kv import CombinedStrategy, ContextLadder, compact_kv_state, transition_kv_state
from mlstate.kv.records import LadderStep

STRATEGY = CombinedStrategy(prefill=512, generate=(256, 128), expand_at=256)


def formula_rows(size, reach, start, stop):
    return mask_by_loop(size, reach, np.float32, rows=range(start, stop))


def attend(cache, mask):
    """The mean of the positions that the last row allows."""
    return cache[0, 0, mask[0, 0, -1] == 0].mean(axis=0)


def test_properties():
    assert (STRATEGY.prefill, STRATEGY.generate) == ((512, None), (256, 128))
    assert STRATEGY.expand_at == 256
    strategy = CombinedStrategy(prefill=[512, 400], generate=np.int32(256))
    assert (strategy.prefill, strategy.generate) == ((512, 400), (256, None))
    assert strategy.expand_at == 256 and type(strategy.generate[0]) is int


def test_the_stages_of_the_document():
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((600, 4)).astype(np.float32)

    # 1. prefill 180 tokens into the large state, with full attention
    cache = np.zeros((1, 1, 512, 4), np.float32)
    for start in range(0, 180, 64):
        stop = min(start + 64, 180)
        mask = STRATEGY.prefill_mask(start, stop - start, dtype=np.float32)
        assert np.array_equal(mask, formula_rows(512, 512, start, stop))
        cache[0, 0, start:stop] = tokens[start:stop]
        assert np.array_equal(attend(cache, mask), tokens[:stop].mean(axis=0))

    # 2. compact
    step = STRATEGY.after_prefill(180)
    assert step == LadderStep("shrink", 256, (range(180),))
    cache = compact_kv_state(cache, step.size, 180)

    # 3. generate with reduced attention, 4. expand when needed
    actions, size = {}, step.size
    for position in range(180, 513):
        step = STRATEGY.next_step(position, size)
        if step.action != "stay":
            actions[position] = (step.action, step.size)
            if step.action == "stop":
                break
            cache, size = transition_kv_state(cache, step.size, position), step.size
        cache[0, 0, position] = tokens[position]
        mask = STRATEGY.generate_mask(position, size, dtype=np.float32)
        assert np.array_equal(mask, formula_rows(size, 128, position, position + 1))
        expected = tokens[position - 128 : position + 1].mean(axis=0)
        assert np.array_equal(attend(cache, mask), expected)
    assert actions == {256: ("grow", 512), 512: ("stop", 512)}
    assert np.array_equal(cache[0, 0], tokens[:512])


def test_a_long_prompt_stays_in_the_large_cache():
    strategy = CombinedStrategy(prefill=512, generate=256, expand_at=250)
    assert strategy.after_prefill(249).size == 256
    for position in (250, 256, 512):
        assert strategy.after_prefill(position) == LadderStep("stay", 512, (range(position),))
    assert strategy.after_prefill(0) == LadderStep("shrink", 256, ())


def test_expansion_begins_at_its_position():
    strategy = CombinedStrategy(prefill=512, generate=256, expand_at=250)
    assert strategy.next_step(249, 256) == LadderStep("stay", 256, (range(249),))
    for position in (250, 251, 256):
        step = strategy.next_step(position, 256)
        assert step == LadderStep("grow", 512, (range(position),))
    assert strategy.next_step(240, 256, 10).action == "stay"
    assert strategy.next_step(240, 256, 11).action == "grow"
    assert strategy.next_step(240, 256, 273).action == "stop"
    assert strategy.next_step(100, 512).action == "stay"


def test_attention_widens_and_narrows():
    for size, reach in ((256, 1), (256, 200), (256, 256), (512, 400)):
        mask = STRATEGY.generate_mask(250, size, attention_size=reach, dtype=np.float32)
        assert np.array_equal(mask, formula_rows(size, reach, 250, 251))
    rows = STRATEGY.generate_mask(200, 256, 9, attention_size=30, dtype=np.float32, fill=-1.0)
    expected = np.where(formula_rows(256, 30, 200, 209) == 0, 0, -1)
    assert np.array_equal(rows, expected)
    full = CombinedStrategy(prefill=(16, 3), generate=8)
    assert np.array_equal(full.generate_mask(7, 8), np.zeros((1, 1, 1, 8)))
    assert np.array_equal(full.prefill_mask(0, 16), formula_rows(16, 3, 0, 16))
    assert full.prefill_mask(0).dtype == np.float16


@pytest.mark.parametrize("count", [1, 9])
def test_sinks_are_attended_in_addition(count):
    for position in (3, 200):
        mask = STRATEGY.generate_mask(position, 256, count, attention_size=30, sinks=5)
        assert mask.dtype == np.float16
        expected = formula_rows(256, 30, position, position + count)
        for row in range(count):
            expected[0, 0, row, : min(5, position + row + 1)] = 0
        assert np.array_equal(mask, expected)
        none = STRATEGY.generate_mask(position, 256, count, sinks=0)
        assert np.array_equal(none, STRATEGY.generate_mask(position, 256, count))


def test_sizes_of_models():
    STRATEGY.check_sizes([256, 512])
    STRATEGY.check_sizes(ContextLadder([128, 256, 512, 1024]).sizes)
    for sizes, size, stage in (([128, 512], 256, "generate"), ([256, 1024], 512, "prefill")):
        with pytest.raises(CompatibilityError) as caught:
            STRATEGY.check_sizes(sizes)
        listed = ", ".join(map(str, sizes))
        text = f"no model has the {size} positions of {stage}; models have {listed}"
        assert str(caught.value) == text
        assert (caught.value.name, caught.value.got) == (stage, str(size))
    with pytest.raises(ValueError, match="sizes is empty"):
        STRATEGY.check_sizes([])
    with pytest.raises(ValueError, match="sizes must rise"):
        STRATEGY.check_sizes([512, 256])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"generate": 512}, ValueError, "generate has 512 positions and prefill 512"),
        ({"generate": 600}, ValueError, "generate has 600 positions and prefill 512"),
        ({"generate": (256, 257)}, CapacityError, r"generate\[1\] 257 exceeds the 256 positions"),
        ({"prefill": (512, 513)}, CapacityError, r"prefill\[1\] 513 exceeds the 512 positions"),
        ({"generate": (256, 0)}, CapacityError, r"generate\[1\] must be at least 1, got 0"),
        ({"generate": 0}, CapacityError, "generate must be at least 1, got 0"),
        ({"generate": (256, 128, 1)}, ValueError, r"generate must be a size or \(size, attention"),
        ({"generate": True}, TypeError, "generate must be an integer, got bool"),
        ({"generate": "256"}, TypeError, "generate must be an integer, got str"),
        ({"prefill": None}, TypeError, "prefill must be an integer, got NoneType"),
        ({"prefill": (512, 1.5)}, TypeError, r"prefill\[1\] must be an integer, got float"),
        ({"expand_at": 257}, CapacityError, "expand_at 257 exceeds the 256 positions of the small"),
        ({"expand_at": 0}, CapacityError, "expand_at must be at least 1, got 0"),
        ({"expand_at": 200.0}, TypeError, "expand_at must be an integer, got float"),
    ],
)
def test_stages_that_are_refused(arguments, error, text):
    with pytest.raises(error, match=text) as caught:
        CombinedStrategy(**{"prefill": 512, "generate": 256, **arguments})
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: x.after_prefill(513), CapacityError, "position 513 is beyond the 512 posit"),
        (lambda x: x.after_prefill(-1), CapacityError, "position must be at least 0, got -1"),
        (lambda x: x.next_step(257, 256), CapacityError, "position 257 is beyond the 256 posit"),
        (lambda x: x.next_step(10, 128), ValueError, "size 128 is unknown; .* 256, 512"),
        (lambda x: x.next_step(10, 256, True), TypeError, "new_tokens must be an integer"),
        (lambda x: x.prefill_mask(500, 13), CapacityError, "13 new tokens after 500 do not fit"),
        (lambda x: x.generate_mask(256, 256), CapacityError, "1 new tokens after 256 do not fit"),
        (lambda x: x.generate_mask(1, 128), ValueError, "size 128 is unknown; .* 256, 512"),
        (
            lambda x: x.generate_mask(1, 256, attention_size=300),
            CapacityError,
            "attention_size 300 exceeds the 256 positions of the cache: pass at most 256",
        ),
        (lambda x: x.generate_mask(1, 256, sinks=-1), CapacityError, "sinks must be at least 0"),
        (lambda x: x.generate_mask(1, 256, sinks=1.5), TypeError, "sinks must be an integer"),
        (
            lambda x: x.generate_mask(1, 256, attention_size=0),
            CapacityError,
            "attention_size must be at least 1, got 0",
        ),
    ],
)
def test_positions_that_are_refused(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call(STRATEGY)
    assert type(caught.value) is error


def test_equality_pickle_and_texts():
    same = CombinedStrategy(prefill=(512, None), generate=[256, 128])
    assert same == STRATEGY and hash(same) == hash(STRATEGY) and same != (512, 256)
    assert CombinedStrategy(prefill=512, generate=(256, 64)) != STRATEGY
    assert pickle.loads(pickle.dumps(STRATEGY)) == STRATEGY
    text = "CombinedStrategy(prefill=(512, None), generate=(256, 128), expand_at=256)"
    assert repr(STRATEGY) == text and eval(text) == STRATEGY
    with pytest.raises(AttributeError):
        STRATEGY.expand_at = 3
    page = STRATEGY._repr_html_()
    for part in ("<td class=r>512</td>", "<td>full</td>", "expand after 256 tokens"):
        assert part in page
