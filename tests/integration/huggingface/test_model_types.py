"""Caches of almost all model types of both engines: moved, stored and rolled back ones continue."""

from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import numpy as np
import pytest
from engines import LENGTH, TOKENS, model_of, restore_prompt
from model_types import FEW, TYPES, config_of
from needs import needs

import mlstate
from mlstate.errors import CompatibilityError
from mlstate.prompts import PromptStore

pytestmark = pytest.mark.filterwarnings("ignore")
TRANSFORMERS, KINDS = [], []
if find_spec("transformers") and find_spec("torch"):
    from cache_models import HAS_CACHE, one_thread  # noqa: F401
    from transformers import CONFIG_MAPPING

    TRANSFORMERS = [kind for kind in TYPES["transformers"] if kind in CONFIG_MAPPING and HAS_CACHE]
    marks = [pytest.mark.torch, needs("transformers")]
    KINDS = [
        pytest.param("transformers", kind, marks=[*marks, pytest.mark.long])
        for kind in TRANSFORMERS
    ]
    if HAS_CACHE:
        from packed_models import MODELS

        KINDS += [pytest.param("packed", kind, marks=marks) for kind in MODELS]
KINDS += [
    pytest.param(
        "mlx", kind, marks=[needs("mlx", "mlx_lm"), *[pytest.mark.long] * (kind not in FEW)]
    )
    for kind in TYPES["mlx"]
]
NEW_ONLY = ["deepseek_v41"]  # mlx-lm cannot empty its layers of an unknown class


@pytest.fixture
def model(engine, kind):
    return model_of(engine, kind)


@pytest.fixture(scope="module")
def other_process():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(("engine", "kind"), KINDS)
def test_a_moved_or_restored_cache_gives_the_same_bits(
    tmp_path, other_process, model, engine, kind
):
    to_cache, has_new = model.module.to_cache, model.new_cache() is not None
    cache = model.after(TOKENS[:LENGTH])
    state = model.module.from_cache(cache, length=LENGTH).copy()
    mlstate.save(tmp_path / "checkpoint", states={"prompt": state})
    loaded = mlstate.load(tmp_path / "checkpoint").states["prompt"]
    if has_new:
        with PromptStore(tmp_path / "store", model=kind, block_tokens=8) as store:
            assert store.put(TOKENS[:LENGTH], cache) == LENGTH
    expected = model.continued(cache)
    used = model.after(TOKENS[40:57])
    if kind in NEW_ONLY:
        with pytest.raises(CompatibilityError, match="has tokens: pass a new cache"):
            to_cache(state.copy(), into=used)
        used = model.new_cache()
    new = model.new_cache() if has_new else model.after(TOKENS[:3])
    targets = [(state, None), (state, used), (loaded, new)]
    if model.empty(emptied := model.after(TOKENS[40:57]), 17):
        targets.append((state, emptied))
    for source, into in targets:
        moved = to_cache(source.copy(), into=into)
        assert np.array_equal(model.continued(moved), expected)
    if has_new:
        assert np.array_equal(restore_prompt(engine, kind, tmp_path / "store"), expected)
        restored = other_process.submit(restore_prompt, engine, kind, tmp_path / "store")
        assert np.array_equal(restored.result(), expected)


@pytest.mark.parametrize(("engine", "kind"), KINDS)
def test_a_rollback_equals_a_cache_that_never_went_ahead(model, engine, kind):
    cache, unmoved = (model.after(TOKENS[:LENGTH]) for _ in range(2))
    for draft in (1, 5, 20):
        state = model.module.from_cache(cache, length=LENGTH)
        before = state.snapshot()
        step = 1 if engine == "packed" else draft  # minimax fails with several tokens
        for start in range(60, 60 + draft, step):
            _, cache = model.run(TOKENS[start : start + step], cache)  # rejected
        state.restore(before)
        cache = model.module.to_cache(state, into=None if kind in NEW_ONLY else cache)
    assert np.array_equal(model.continued(cache), model.continued(unmoved))


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_a_static_cache_continues_and_more_layers_are_refused(kind):
    from transformers import DynamicCache, StaticCache

    model = model_of("transformers", kind)
    cache = model.after(TOKENS[:LENGTH])
    state = model.module.from_cache(cache).copy()
    static, live = (StaticCache(model.model.config, 64) for _ in range(2))
    model.run(TOKENS[:LENGTH], live)
    moved = model.continued(model.module.to_cache(state, into=static))
    np.testing.assert_allclose(moved, model.continued(live), rtol=1e-4, atol=1e-4)
    larger = DynamicCache(config=config_of(kind, 3))
    if len(larger.layers) > len(cache.layers):
        with pytest.raises(CompatibilityError, match="no array of layer"):
            model.module.to_cache(state, into=larger)
