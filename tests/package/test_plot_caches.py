"""Plots of caches and masks: every pixel shows the content of the cache at its position."""

import numpy as np
import pytest
from kv_model import dtype_of

from mlstate.kv import (
    KVState,
    RollingKVState,
    create_attention_size_mask,
    create_causal_mask,
    create_decode_mask,
)
from mlstate.plot import plot_cache, plot_cache_memory, plot_mask

pytest.importorskip("matplotlib", reason="matplotlib draws")

EVICTED, ZERO, TOKEN, SINK, MISSING, STALE = range(6)


def pixels(figure):
    """The drawn integers, and the picture's extent."""
    (image,) = figure.axes[0].images
    return np.asarray(image.get_array()), image.get_extent()


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def title(figure):
    return figure.axes[0].get_title(loc="left")


def test_a_cache_shows_tokens_sinks_and_zeros():
    cache = np.zeros((3, 2, 16, 4), np.float16)
    cache[:, 1, :9, 2] = -0.5  # one element is enough
    figure = plot_cache(cache, sinks=2)
    kinds, extent = pixels(figure)
    assert kinds.tolist() == [[SINK] * 2 + [TOKEN] * 7 + [ZERO] * 7] * 3
    assert extent == [0, 16, 2.5, -0.5]
    assert legend(figure) == ["zero", "token", "sink"]
    assert title(figure) == "9 tokens in 16 positions"
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_lost_tokens_and_stale_entries_are_marked():
    cache = np.ones((2, 1, 8, 4), np.float32)
    cache[:, :, 5:] = 0
    cache[1, :, 2] = -0.0
    cache[0, :, 6] = np.nan
    kinds, _ = pixels(plot_cache(cache, length=5))
    assert kinds[0].tolist() == [TOKEN] * 5 + [ZERO, STALE, ZERO]
    assert kinds[1].tolist() == [TOKEN, TOKEN, MISSING, TOKEN, TOKEN, ZERO, ZERO, ZERO]
    figure = plot_cache(cache)  # the last position that is not zero
    assert title(figure) == "7 tokens in 8 positions"
    assert "zero before the last token" in legend(figure)


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1])
@pytest.mark.parametrize("dtype", ["int8", "bool", "bfloat16"])
def test_any_sequence_axis_and_dtype(axis, dtype):
    cache = np.zeros((4, 5, 6, 7), dtype_of(dtype))
    tokens = np.moveaxis(cache, axis, 0)
    tokens[:3] = 1
    kinds, _ = pixels(plot_cache(cache, seq_axis=axis))
    layers = 1 if axis == 0 else 4
    assert kinds.tolist() == [[TOKEN] * 3 + [ZERO] * (len(tokens) - 3)] * layers


def test_a_growing_state_knows_its_axis():
    state = KVState((2, 3, 8, 4), capacity=32, seq_axis=1)
    state.array[:, :2] = 1
    kinds, _ = pixels(plot_cache(state, length=2))
    assert kinds.tolist() == [[TOKEN] * 2 + [ZERO]] * 2


@pytest.mark.parametrize("count", [0, 2, 5, 8, 9, 30])
def test_rolling_state_shows_evicted_tokens(count):
    state = RollingKVState((2, 1, 8, 1), dtype=np.float32, sinks=2)
    state.append(np.ones((2, 1, count, 1), np.float32))
    figure = plot_cache(state)
    kinds, extent = pixels(figure)
    evicted = max(count - 8, 0)
    expected = [SINK] * min(count, 2) + [EVICTED] * evicted
    expected += [TOKEN] * (count - len(expected))
    expected += [ZERO] * (8 - len(expected))
    assert kinds.tolist() == [expected] * 2
    assert extent[1] == max(count, 8)
    assert f"{min(count, 8)} tokens in 8 positions, {evicted} evicted" == title(figure)


def test_a_zero_token_and_a_trimmed_one_of_a_ring():
    state = RollingKVState((1, 1, 4, 1), dtype=np.float32, sinks=1)
    state.append(np.array([1, 1, 1, 1, 1, 0, 1], np.float32).reshape(1, 1, 7, 1))
    state.trim(1)
    kinds, _ = pixels(plot_cache(state))
    assert kinds[0].tolist() == [SINK, EVICTED, EVICTED, EVICTED, TOKEN, MISSING]


def test_a_single_wrong_position_of_a_long_cache_is_visible():
    cache = np.zeros((1, 1, 100_000, 1), np.int8)
    cache[:, :, :50_000] = 1
    cache[:, :, 1234] = 0
    cache[:, :, 77_777] = 1
    kinds, extent = pixels(plot_cache(cache, length=50_000))
    assert kinds.shape[1] <= 2048 and extent[1] == 100_000
    assert (kinds == MISSING).sum() == 1 and (kinds == STALE).sum() == 1


def test_caches_that_cannot_be_drawn():
    cache = np.zeros((2, 1, 8, 4))
    for length in (-1, 9):
        with pytest.raises(ValueError, match=rf"length {length} is outside 0\.\.8"):
            plot_cache(cache, length=length)
    for empty in (cache[:0], cache[:, :, :0]):
        with pytest.raises(ValueError, match="no positions or no layers"):
            plot_cache(empty)


@pytest.mark.parametrize(("shape", "axis"), [((5,), -2), ((2, 3, 4), 3), ((2, 3, 4), -4)])
def test_plot_cache_refuses_an_axis_that_the_cache_lacks(shape, axis):
    with pytest.raises(ValueError, match=f"seq_axis is {axis}, and the cache has the shape"):
        plot_cache(np.ones(shape), seq_axis=axis)


def test_memory_is_a_step_for_each_change():
    curves = {"large": [(0, 9 << 20)], "$_small": [(184, 9 << 19), (256, 9 << 20), (900, 1)]}
    figure = plot_cache_memory(curves, 400)
    (axes,) = figure.axes
    lines = [(*line.get_xydata().T.tolist(), line.get_drawstyle()) for line in axes.lines]
    assert lines == [
        ([0, 400], [9, 9], "steps-post"),
        ([184, 256, 400], [4.5, 9, 9], "steps-post"),
    ]
    assert axes.get_ylabel() == "memory of the cache, MiB"
    assert legend(figure) == ["large", "$_small"]
    assert plot_cache_memory(curves).axes[0].get_xlim()[1] == 900
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("curves", "text"),
    [
        ({}, "curves is empty"),
        ({"a": []}, "'a' needs points"),
        ({"b": [(5, 1), (4, 1)]}, r"\[5, 4\]"),
    ],
)
def test_impossible_curves_are_refused(curves, text):
    with pytest.raises(ValueError, match=text):
        plot_cache_memory(curves)


def test_a_mask_shows_the_attended_positions():
    mask = create_attention_size_mask(30, 5, 0, sinks=2, rows=(10, 20), fill=-3.0)
    figure = plot_mask(mask, first_row=10)
    drawn, extent = pixels(figure)
    assert np.array_equal(drawn, mask[0, 0] == 0)
    assert extent == [0, 30, 20, 10]
    assert title(figure) == "Each token attends to 8 positions"
    assert np.array_equal(pixels(plot_mask(mask[0, 0]))[0], drawn)
    assert title(plot_mask(create_decode_mask(9, 2, 0))) == "Each token attends to 1 position"


def test_a_long_mask_is_sampled_without_a_copy():
    figure = plot_mask(create_causal_mask(50_000, 7_000))
    drawn, extent = pixels(figure)
    assert max(drawn.shape) <= 2048 and extent == [0, 50_000, 50_000, 0]
    assert title(figure) == "Each token attends to 1 to 7,001 positions"


@pytest.mark.parametrize("shape", [(4,), (2, 1, 3, 3), (1, 3, 3), (0, 3)])
def test_plot_mask_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match="pass a mask of"):
        plot_mask(np.zeros(shape))
