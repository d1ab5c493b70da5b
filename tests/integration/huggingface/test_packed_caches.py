"""Layers and caches of unknown classes: stored whole and restored bit for bit, or refused."""

import copy

import numpy as np
import pytest
from needs import needs

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
pytest.importorskip("transformers", reason="its models run")

from cache_models import HAS_CACHE, one_thread  # noqa: E402, F401

if not HAS_CACHE:
    pytest.skip("the models are of transformers 5.24", allow_module_level=True)

from engines import LENGTH, TOKENS  # noqa: E402
from packed_models import MODELS, new_recurrent_gemma  # noqa: E402
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer  # noqa: E402

from mlstate.errors import CompatibilityError  # noqa: E402
from mlstate.integrations.transformers import from_cache, to_cache  # noqa: E402
from mlstate.prompts import PromptStore  # noqa: E402


@pytest.fixture(scope="module")
def made():
    return {}


@pytest.fixture
def model(name, made):
    return made.setdefault(name, MODELS[name]())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "rwkv"])
def test_prompts_of_several_lengths_are_stored_and_restored(tmp_path, name, model):
    for count in (3, LENGTH):  # some tensors exist only after more tokens
        with PromptStore(tmp_path, model=name, block_tokens=8) as store:
            assert store.put(TOKENS[:count], model.after(TOKENS[:count])) == count
    with PromptStore(tmp_path, model=name, block_tokens=8) as store:
        for count, stored in ((LENGTH, LENGTH), (12, 3)):
            cache = model.new_cache()
            with store.match(TOKENS[: count + 1]) as match:
                assert store.restore(match, into=cache) == stored
            expected = model.continued(model.after(TOKENS[:stored]), stored)
            assert np.array_equal(model.continued(cache, stored), expected)
        if name != "xlstm":  # its constructor has the number of sequences
            batch = model.new_cache()
            model.model(torch.tensor([TOKENS[:5]] * 2), use_cache=True, cache=batch)
            with pytest.raises(CompatibilityError, match="2 sequences: store each of them by"):
                store.put(TOKENS[:5], batch)
        used = model.after(TOKENS[:17])
        with store.match([1, *TOKENS]) as match:
            if name == "minimax":
                with pytest.raises(CompatibilityError, match=r"reset\(\) leaves linear_cache\.0"):
                    store.restore(match, into=used)
                return
            assert store.restore(match, into=used) == 0
        assert np.array_equal(*(model.run(TOKENS[:9], c)[0] for c in (used, model.new_cache())))


@pytest.mark.parametrize("name", ["minimax_m3 static"])
def test_tensors_of_compiled_classes_keep_their_addresses(name, model):
    used, state = model.after(TOKENS[:17]), from_cache(model.after(TOKENS[:LENGTH]))
    tensors = {key: value for key, value in vars(used.layers[1]).items() if torch.is_tensor(value)}
    assert to_cache(state, into=used) is used and len(tensors) == 5
    assert all(getattr(used.layers[1], key) is value for key, value in tensors.items())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "rwkv"])
def test_an_empty_cache_is_refused(name, model):
    with pytest.raises(CompatibilityError, match="no layer of the cache has a token"):
        from_cache(model.new_cache(), length=LENGTH)


def test_a_model_that_keeps_its_state_elsewhere_is_refused(tmp_path):
    cache = new_recurrent_gemma().after(TOKENS[:LENGTH])
    with pytest.raises(CompatibilityError, match="layer 0 is a LinearAttentionLayer without a tok"):
        from_cache(cache)
    with (
        PromptStore(tmp_path, model="m") as store,
        pytest.raises(CompatibilityError, match="keeps this layer's state elsewhere"),
    ):
        store.put(TOKENS[:LENGTH], cache)


class OwnLayer(DynamicLayer):
    """A layer that mlstate does not know, with an option and a table."""

    def __init__(self, scale=1):
        super().__init__()
        self.scale, self.table = scale, {"sums": [None], 3: (torch.zeros(2), 1.5)}

    def update(self, keys, values, *args, **kwargs):
        self.table["sums"][0] = keys.sum(2)
        return super().update(keys, values)

    def reset(self):
        super().reset()
        self.table = {"sums": [None], 3: (torch.zeros(2), 1.5)}


def own_cache(count=5, **options):
    layer = OwnLayer(**options)
    if count:
        generator = torch.Generator().manual_seed(count)
        layer.update(*torch.randn(2, 1, 2, count, 4, generator=generator))
    return Cache(layers=[layer])


def test_containers_aliases_and_dtypes_are_restored():
    cache = own_cache()
    layer = cache.layers[0]
    layer.alias, layer.table["half"] = layer.keys, torch.ones(3, dtype=torch.bfloat16)
    layer.table["codes"] = torch.arange(4.0).to(torch.float8_e4m3fn)
    layer.empty, layer.mask = torch.zeros(0, 3), torch.tensor(True)
    layer.dtype = torch.float16
    new = to_cache(from_cache(cache)).layers[0]
    assert new.alias is new.keys and torch.equal(new.keys, layer.keys)
    assert new.table["half"].dtype == torch.bfloat16 and new.table[3][1] == 1.5
    assert torch.equal(new.table["codes"].view(torch.uint8), layer.table["codes"].view(torch.uint8))
    assert new.empty.shape == (0, 3) and bool(new.mask) and new.dtype is torch.float16
    assert type(new.table[3]) is tuple and torch.equal(new.table["sums"][0], layer.table["sums"][0])
    assert new.device == layer.device


def _shared(layer):
    layer.part = layer.keys[:, :, :2]


def _twice(layer):
    layer.again = layer.table


def _with(name, value):
    return lambda layer: setattr(layer, name, value)


class _Tensor(torch.Tensor):
    pass


REFUSED = {
    "object": (_with("extra", object()), "its extra is of type object: this value would be lost"),
    "nested": (_with("extra", {"a": [{1}]}), r"its extra\.a\.0 is of type set"),
    "key": (_with("extra", {2.5: 1}), "its extra is of type dict"),
    "function": (_with("hook", print), "its hook is of type builtin_function_or_method"),
    "parameter": (_with("w", torch.nn.Parameter(torch.ones(2))), "its w is of type Parameter"),
    "subclass": (_with("w", torch.ones(2).as_subclass(_Tensor)), "its w is of type _Tensor"),
    "sparse": (_with("w", torch.eye(3).to_sparse()), "its w is of type Tensor"),
    "shared": (_shared, "its tensors share memory"),
    "twice": (_twice, "its again is the same object as another value"),
    "device": (_with("place", torch.device("meta")), "its place is meta, and not the device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_attributes_are_refused_with_the_class(name):
    change, text = REFUSED[name]
    cache = own_cache()
    change(cache.layers[0])
    with pytest.raises(CompatibilityError, match=f"layer 0 is a OwnLayer, .* {text}"):
        from_cache(cache)


def test_a_target_that_does_not_fit_is_unchanged():
    state = from_cache(own_cache())
    plain = Cache(layers=[DynamicLayer()])
    static = Cache(layers=[StaticLayer(9)])
    other, wide = own_cache(7, scale=2), own_cache(7)
    wide.layers[0].keys = torch.zeros(1, 2, 7, 8)
    strange = own_cache(7)
    strange.layers[0].more = 1
    for target, text in (
        (plain, r"no place for '0\.whole'"),
        (static, r"no place for '0\.whole'"),
        (other, "layer 0 has scale=2, and the array is of one with 1"),
        (wide, r"layer 0: keys has \(1, 2, 7, 8\)"),
        (strange, "layer 0 has the attribute more, which the array lacks"),
    ):
        before = copy.deepcopy(vars(target.layers[0]))
        with pytest.raises(CompatibilityError, match=text):
            to_cache(state, into=target)
        assert repr(vars(target.layers[0])) == repr(before)


def test_changed_bytes_are_refused():
    state = from_cache(own_cache())
    for start, stop in ((0, 8), (8, 200), (20, 60)):
        damaged = state.copy()
        damaged.arrays["0.whole"][start:stop] = 7
        with pytest.raises(CompatibilityError, match="not of a packed object"):
            to_cache(damaged)
