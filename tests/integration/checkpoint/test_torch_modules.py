"""Modules whose state is more than their memory: extra states, hooks, and own load methods."""

import inspect
import io
import random
import re
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from random_modules import EXTRAS, Extra, Fused, Metric, Migrating, Odd, Picky
from test_torch_random_modules import content, difference, same
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import mlstate
from mlstate import CompatibilityError, MLStateError
from mlstate.checkpoint import export_huggingface, save_async
from mlstate.errors import UnstorableError

pytestmark = pytest.mark.torch


def loaded(path, module, **options):
    mlstate.load(path, into={"model": module}, **options)
    return module


def mixed(extra=None):
    return nn.Sequential(nn.Linear(2, 2), Extra(extra), Fused(True))


@pytest.fixture
def saved(tmp_path):
    source = mixed({"scale": torch.ones(2)})
    mlstate.save(tmp_path / "mixed", source)
    return tmp_path / "mixed", source


# ---- extra states ----


@pytest.mark.parametrize("value", [torch.bfloat16, Path("a/b"), inspect.Parameter.VAR_KEYWORD])
def test_dtypes_paths_and_enums_in_extra_states_return(tmp_path, value):
    mlstate.save(tmp_path, Extra({"value": (value, 1)}))
    assert loaded(tmp_path, Extra(None)).extra == {"value": (value, 1)}


@pytest.mark.parametrize("kind", list(EXTRAS)[:-2])
def test_an_extra_state_returns_with_its_type_and_bits(tmp_path, kind):
    source = Extra(EXTRAS[kind](random.Random(4)))
    mlstate.save(tmp_path, source)
    target = loaded(tmp_path, Extra("other"))
    assert same(target.extra, source.extra), (target.extra, source.extra)
    assert target.calls == Counter(set=1)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        type("Named", (dict,), {})(a=1),
        type("Words", (list,), {})([1]),
        [np.ma.masked_array([1.0, 2.0], [True, False])],
        {"w": nn.Parameter(torch.ones(2))},
        nn.ParameterList([torch.ones(2)])[0],
        [io.StringIO("text")],
        [nn.Linear(1, 1)],
        [random.Random(1)],
    ],
)
def test_values_that_would_return_with_another_type_are_refused(tmp_path, value):
    with pytest.raises(UnstorableError, match="_extra_state"):
        mlstate.save(tmp_path / "c", nn.Sequential(Extra(value)))
    assert not (tmp_path / "c").exists() or not any((tmp_path / "c").iterdir())


def test_named_states_and_background_saves_keep_extra_states(tmp_path):
    source = mixed(io.BytesIO(b"abc"))
    save_async(tmp_path, source, states={"ema": source}).wait()
    model, ema = mixed(), mixed()
    mlstate.load(tmp_path, into={"model": model, "states": {"ema": ema}})
    for target in (model, ema):
        assert difference(content(source, calls=False), content(target, calls=False)) is None


def test_non_tensor_entries_have_a_named_state(saved):
    path, _ = saved
    states = mlstate.load(path).states
    assert list(states) == [".model"]
    assert list(states[".model"]["entries"]) == ["1._extra_state"]


def test_targets_without_the_extra_state_are_refused(saved):
    path, source = saved
    arrays = {k: torch.zeros_like(v) for k, v in source.state_dict().items() if hasattr(v, "shape")}
    unfused = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3), Fused(True))
    for target in (arrays, unfused):
        with pytest.raises(CompatibilityError, match=r"Unexpected key.*1\._extra_state"):
            loaded(path, target)
        loaded(path, target, strict=False)


def test_a_folder_of_hugging_face_holds_only_tensors(tmp_path, saved):
    with pytest.raises(CompatibilityError, match=r"'1\._extra_state' is not a tensor"):
        export_huggingface(tmp_path / "model", saved[1])
    source, target = Fused(True), Fused(True)
    export_huggingface(tmp_path / "model", source)
    assert torch.equal(loaded(tmp_path / "model", target).qkv, source.qkv)


# ---- a part of the names, other names, other dtypes ----


def test_names_select_all_entries_of_a_submodule_or_none(saved):
    path, source = saved
    target = mixed()
    before = content(target)
    with pytest.raises(CompatibilityError, match=r"'2' loads its entries .* leaves out '2\.k'"):
        loaded(path, target, names=["2.q", "0"])
    assert difference(before, content(target)) is None
    loaded(path, target, names=["1", "0.bias"])
    assert target[1].extra.keys() == {"scale"}
    assert torch.equal(target[1].weight, source[1].weight)
    assert torch.equal(target[0].bias, source[0].bias)
    assert not torch.equal(target[0].weight, source[0].weight)
    assert not target[2].calls


def test_entries_and_versions_are_renamed(tmp_path):
    source = nn.Sequential(Migrating(3), Extra(7))
    mlstate.save(tmp_path, source)
    target = nn.ModuleDict({"net": nn.Sequential(Migrating(3), Extra(0))})
    loaded(tmp_path, target, rename={"": "net."})
    assert difference(content(source, calls=False), content(target["net"], calls=False)) is None


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_load_receives_the_saved_version(tmp_path, version):
    source, by_mlstate, expected = Migrating(version), Migrating(3), Migrating(3)
    mlstate.save(tmp_path, source)
    expected.load_state_dict(source.state_dict())
    assert torch.equal(loaded(tmp_path, by_mlstate).weight, expected.weight)
    mlstate.save(tmp_path, source.state_dict(), states={"ema": source.state_dict()}, overwrite=True)
    assert list(mlstate.load(tmp_path).states) == ["ema"]
    ema = Migrating(3)
    mlstate.load(tmp_path, into={"model": by_mlstate, "states": {"ema": ema}})
    assert torch.equal(by_mlstate.weight, expected.weight)
    assert torch.equal(ema.weight, expected.weight)


def test_another_dtype_needs_cast(saved):
    path, source = saved
    target = mixed().bfloat16()
    with pytest.raises(CompatibilityError, match="float32 in the checkpoint, expected bfloat16"):
        loaded(path, target)
    loaded(path, target, cast=True)
    assert torch.equal(target[1].weight, source[1].weight.bfloat16())
    assert torch.equal(target[2].qkv, source[2].qkv.bfloat16())


@pytest.mark.parametrize("strict", [True, False])
def test_optimizer_of_unregistered_parameters_is_restored(tmp_path, strict):
    source, target = mixed(), mixed()
    optimizers = [torch.optim.Adam(module.parameters()) for module in (source, target)]
    for parameter in source.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    mlstate.save(tmp_path, source, optimizers[0])
    mlstate.load(tmp_path, into={"model": target, "optimizer": optimizers[1]}, strict=strict)
    for loaded, expected in zip(target.parameters(), source.parameters(), strict=True):
        states = [
            dict(sorted(o.state[p].items()))
            for o, p in zip(optimizers, (expected, loaded), strict=True)
        ]
        assert torch.equal(loaded, expected) and same(*states)


# ---- order and errors ----


def fused():
    """A layer whose weight is a parameter of a module that stores it as three entries."""
    module = nn.Sequential(nn.Linear(2, 3), Fused(True), nn.Linear(2, 6, bias=False))
    module[2].weight = module[1].qkv
    return module


def extra():
    """A layer that shares the weight of a module with an extra state."""
    module = nn.Sequential(nn.Linear(2, 3), Extra(1), nn.Linear(2, 3))
    module[2].weight = module[1].weight
    return module


def transposed():
    """As `extra`, with the transposed weight."""
    module = nn.Sequential(nn.Linear(2, 3), Extra(1), nn.Linear(3, 2))
    module[2].weight = nn.Parameter(module[1].weight.detach().t())
    return module


def whole():
    """A module with hooks loads all, and two of its children are tied."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(2, 3))
    module[2].weight = module[1].weight
    module.register_load_state_dict_post_hook(lambda *_: None)
    return module


@pytest.mark.parametrize("tied", [fused, extra, transposed, whole])
def test_modules_that_share_memory_need_equal_entries(tmp_path, tied):
    source, target = tied(), tied()
    mlstate.save(tmp_path / "equal", source)
    state = loaded(tmp_path / "equal", target).state_dict()
    assert all(same(state[name], value) for name, value in source.state_dict().items())
    source[2].weight = nn.Parameter(source[2].weight.detach() + 1)
    mlstate.save(tmp_path / "other", source)
    before = content(target, calls=False)
    with pytest.raises(CompatibilityError, match=r"'1\..*' and '2.weight' share memory"):
        loaded(tmp_path / "other", target)
    assert difference(content(target, calls=False), before) is None


def test_an_entry_that_is_not_stored_does_not_count_for_tied_modules(tmp_path):
    module = extra()
    mlstate.save(tmp_path, {"1.bias": torch.ones(3), "2.weight": torch.full((3, 2), 5.0)})
    assert loaded(tmp_path, module, strict=False)[1].weight.eq(5).all()


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("other", [1, 2])
def test_a_module_of_two_names_gets_one_extra_state_or_is_refused(tmp_path, part, other):
    model, second = nn.Sequential(Extra(1)), nn.Sequential(Extra(other))
    for to, source in zip(second.parameters(), model.parameters(), strict=True):
        to.data.copy_(source)
    mlstate.save(tmp_path, model, states={"m": second[0] if part else second})
    target = nn.Sequential(Extra(3))
    into = {"model": target, "states": {"m": target[0] if part else target}}
    if other == 1:
        mlstate.load(tmp_path, into=into)
        assert target[0].extra == 1
        return
    with pytest.raises(CompatibilityError, match=r"states\['m'\].* is also that of model"):
        mlstate.load(tmp_path, into=into)
    assert target[0].extra == 3


def test_two_states_may_fill_different_parts_of_a_module(tmp_path):
    model = nn.Sequential(Extra(1), Extra(2), nn.Linear(2, 2))
    rest = nn.ModuleDict({"1": model[1], "2": model[2]})
    mlstate.save(tmp_path, nn.ModuleDict({"0": model[0]}), states={"rest": rest})
    target = nn.Sequential(Extra(3), Extra(4), nn.Linear(2, 2))
    mlstate.load(tmp_path, into={"model": target, "states": {"rest": target}}, strict=False)
    assert (target[0].extra, target[1].extra) == (1, 2)
    assert torch.equal(target[2].weight, model[2].weight)


@pytest.mark.parametrize("value", [1.0, 2.0])
def test_a_module_that_is_the_model_and_nested_in_a_state_gets_one_value(tmp_path, value):
    first, second, target = (nn.Linear(2, 2, bias=False) for _ in range(3))
    for module, number in ((first, 1.0), (second, value), (target, 3.0)):
        nn.init.constant_(module.weight, number)
    mlstate.save(tmp_path, first, states={"trainer": {"model": second, "epoch": 1}})
    into = {"model": target, "states": {"trainer": {"model": target, "epoch": 0}}}
    if value == 1:
        mlstate.load(tmp_path, into=into)
        assert target.weight.eq(1).all()
        return
    with pytest.raises(CompatibilityError, match=r"trainer'\]\['model'\].* also that of model"):
        mlstate.load(tmp_path, into=into)
    assert target.weight.eq(3).all()


def test_an_optimizer_of_two_names_gets_one_rate_or_is_refused(tmp_path):
    def make(lr):
        return torch.optim.SGD(model.parameters(), lr=lr)

    model = nn.Linear(2, 2)
    for rate in (0.1, 0.2):
        mlstate.save(tmp_path, model, make(0.1), states={"o": make(rate)})
        target = make(0.3)
        into = {"model": model, "optimizer": target, "states": {"o": target}}
        if rate == 0.1:
            mlstate.load(tmp_path, into=into)
            assert target.param_groups[0]["lr"] == 0.1
            continue
        with pytest.raises(CompatibilityError, match=r"states\['o'\].* is also that of optimizer"):
            mlstate.load(tmp_path, into=into)
        assert target.param_groups[0]["lr"] == 0.3


def test_submodules_inside_of_checkpoint_wrappers_load_themselves(tmp_path):
    def wrapped(value):
        inner = nn.Sequential(checkpoint_wrapper(Extra(value)), checkpoint_wrapper(Fused(True)))
        return checkpoint_wrapper(nn.Sequential(checkpoint_wrapper(inner)))

    source = wrapped({"scale": 2})
    mlstate.save(tmp_path, source)
    target = loaded(tmp_path, wrapped(None))
    assert not difference(content(target, calls=False), content(source, calls=False))


def test_a_cache_is_derived_after_its_children_are_loaded(tmp_path):
    def cached():
        module = nn.Sequential(nn.Linear(2, 2))
        module.register_load_state_dict_post_hook(
            lambda module, _: setattr(module, "total", module[0].weight.sum().item())
        )
        return module

    source = cached()
    mlstate.save(tmp_path, source)
    assert loaded(tmp_path, cached()).total == source[0].weight.sum().item()


def test_lazy_module_takes_the_saved_shapes(tmp_path):
    source = nn.LazyLinear(2)
    source(torch.ones(1, 3))
    mlstate.save(tmp_path, source)
    assert torch.equal(loaded(tmp_path, nn.LazyLinear(2)).weight, source.weight)


@pytest.mark.filterwarnings("ignore")
def test_scripted_and_compiled_modules_are_loaded(tmp_path):
    source = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    mlstate.save(tmp_path, source)
    target = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    loaded(tmp_path, target)
    assert torch.equal(target.state_dict()["0.weight"], source.state_dict()["0.weight"])
    mlstate.save(tmp_path, nn.Sequential(torch.compile(Extra(b"x"))), overwrite=True)
    assert loaded(tmp_path, nn.Sequential(Extra(None)))[0].extra == b"x"


def test_error_after_custom_loads_rolls_back(tmp_path):
    source = nn.Sequential(Extra(4), Metric(random.Random(1)), Picky(3), nn.Linear(2, 2))
    mlstate.save(tmp_path, source)
    target = nn.Sequential(Extra(5), Metric(random.Random(1)), Picky(2), nn.Linear(2, 2))
    before = content(target, calls=False)
    with pytest.raises(CompatibilityError, match="'2': ValueError: odd"):
        loaded(tmp_path, target)
    assert difference(before, content(target, calls=False)) is None


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
def test_error_restores_scripted_modules_inside_custom_loads(tmp_path):
    class Holder(nn.Module):
        def __init__(self, fails):
            super().__init__()
            self.inner, self.fails = torch.jit.script(nn.Linear(2, 2)), fails

        def _load_from_state_dict(self, *arguments):
            if self.fails:
                self.fails = False
                raise ValueError("odd")
            super()._load_from_state_dict(*arguments)

    mlstate.save(tmp_path, nn.Sequential(Holder(False), Holder(False)))
    target = nn.Sequential(Holder(False), Holder(True))
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(CompatibilityError, match="nothing was restored"):
        loaded(tmp_path, target)
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())


def test_error_restores_replaced_parameters_and_buffers(tmp_path):
    class Replacing(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *others):
            self.weight = nn.Parameter(state_dict[prefix + "weight"].clone())
            self.register_buffer("seen", torch.ones(1))
            super()._load_from_state_dict(state_dict, prefix, *others)

    mlstate.save(tmp_path, nn.Sequential(Replacing(2, 2), Picky(3)))
    target = nn.Sequential(Replacing(2, 2), Picky(2))
    before, parameters = content(target, calls=False), list(target.parameters())
    with pytest.raises(CompatibilityError, match="'1'"):
        loaded(tmp_path, target)
    assert list(target.state_dict()) == list(before["state"])
    assert all(a is b for a, b in zip(parameters, target.parameters(), strict=True))
    assert difference(before, content(target, calls=False)) is None


def test_an_error_names_the_modules_that_stay_changed(tmp_path):
    mlstate.save(tmp_path, nn.Sequential(Extra(4), Picky(3)))
    with pytest.raises(
        CompatibilityError, match=r"stay changed.*: model: '1': ValueError: odd"
    ) as info:
        loaded(tmp_path, nn.Sequential(Extra(5), Picky(1)))
    assert "'0'" not in str(info.value)


def test_the_methods_of_a_save_run_once(tmp_path):
    calls = Counter()
    module = nn.Sequential(Extra(1))
    module[0].register_state_dict_pre_hook(lambda *_: calls.update(["pre"]))
    module.register_state_dict_post_hook(lambda *_: calls.update(["post"]))
    mlstate.save(tmp_path, module, torch.optim.SGD(module.parameters()))
    assert calls == Counter(pre=1, post=1)


def test_memory_is_filled_in_place(tmp_path):
    """Hooks that change nothing, and norms of torch, need no copies."""
    module = nn.Sequential(Odd(), nn.BatchNorm1d(3), nn.MultiheadAttention(4, 2))
    module.register_state_dict_post_hook(lambda *_: None)
    mlstate.save(tmp_path, module)
    versions = {name: tensor._version for name, tensor in module.named_parameters()}
    loaded(tmp_path, module)
    for name, tensor in module.named_parameters():
        assert tensor._version == versions[name] + 1, name


@pytest.mark.parametrize(
    "make",
    [lambda: torch.zeros(1).expand(3), lambda: torch.zeros(4).as_strided((3, 2), (1, 1))],
    ids=["expanded", "strided"],
)
def test_elements_that_share_memory_are_not_filled(tmp_path, make):
    module = nn.Module()
    module.weight = nn.Parameter(make())
    mlstate.save(tmp_path, {"weight": torch.zeros(module.weight.shape)})
    with pytest.raises(CompatibilityError, match="'weight' has elements that share memory"):
        loaded(tmp_path, module)


def test_modules_without_elements_are_refused(saved):
    with torch.device("meta"):
        target = nn.Sequential(nn.Linear(2, 2), Extra(None), Fused(True))
    with pytest.raises(MLStateError, match="meta device"):
        loaded(saved[0], target)


class Composed(nn.Module):
    """A module whose own method loads its entries, also of nested children."""

    def __init__(self, leaf):
        super().__init__()
        self.block = nn.ModuleDict({"fc": leaf})
        self.fails_on = None

    def _load_from_state_dict(self, state, prefix, *rest):
        if self.fails_on is not None:
            value = self.fails_on.pop(0)
            if value:
                raise ValueError(value)
        super()._load_from_state_dict(state, prefix, *rest)


def test_an_error_for_a_nested_tensor_of_an_own_load_has_its_whole_name(tmp_path):
    source = nn.ModuleDict({"outer": checkpoint_wrapper(Composed(nn.Linear(2, 2)))})
    mlstate.save(tmp_path, source)
    target = nn.ModuleDict({"outer": checkpoint_wrapper(Composed(nn.Linear(2, 2, device="meta")))})
    with pytest.raises(UnstorableError, match=r"'outer\.block\.fc\.weight'") as caught:
        loaded(tmp_path, target)
    assert caught.value.name == "outer.block.fc.weight"


@pytest.mark.parametrize("name", ["plain", "it's", 'a"b', "a'b\"c"])
def test_an_error_of_undoing_a_load_names_the_submodule_once(tmp_path, name):
    mlstate.save(tmp_path, nn.ModuleDict({name: Composed(nn.Linear(2, 2))}))
    target = nn.ModuleDict({name: Composed(nn.Linear(2, 2))})
    target[name].fails_on = ["no load", "no undo"]
    text = re.escape(f"loaded back: model: {name!r}: ValueError: no undo")
    with pytest.raises(CompatibilityError, match=text) as caught:
        loaded(tmp_path, target)
    assert caught.value.__cause__.name == name


# ---- tensors that cannot be stored ----


def few_bits():
    names = [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)]
    return [name for name in names if hasattr(torch, name)]


STRANGE = {
    **{
        name: lambda name=name: torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))
        for name in (*few_bits(), "bits8", "bits4x2")
        if hasattr(torch, name)
    },
    "complex32": lambda: torch.zeros(2).view(torch.complex32),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "rows": lambda: torch.eye(2).to_sparse_csr(),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
    "lazy": nn.parameter.UninitializedParameter,
    "meta": lambda: torch.zeros(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "subclass": lambda: torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})),
}
WAYS = {
    "array": lambda path, value: mlstate.save(path, {"a": torch.ones(2), "w": value}),
    "async": lambda path, value: save_async(path, {"w": value}).wait(),
    "module": lambda path, value: mlstate.save(path, holder(value)),
    "state": lambda path, value: mlstate.save(path, states={"s": {"w": value}}),
    "tree": lambda path, value: mlstate.save(path, states={"s": [{"w": value}]}),
    "extra": lambda path, value: mlstate.save(path, Extra({"w": value})),
    "file": lambda path, value: mlstate.save_file({"w": value}, path),
    "hugging face": lambda path, value: export_huggingface(path, {"w": value}),
}


def holder(value):
    module = nn.Module()
    if isinstance(value, nn.Parameter):
        module.w = value
    else:
        module.register_buffer("w", value)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", STRANGE)
def test_tensors_that_files_cannot_hold_are_refused_by_name(tmp_path, kind, way):
    with pytest.raises(MLStateError, match=r"\bw\b"):
        WAYS[way](tmp_path / "c", STRANGE[kind]())
    assert not (tmp_path / "c").is_file()


@pytest.mark.filterwarnings("ignore")  # torch warns at the first tensor of a kind
@pytest.mark.parametrize("kind", [kind for kind in STRANGE if kind != "meta"])
def test_states_have_no_arrays_over_such_tensors(kind):
    with pytest.raises(MLStateError, match="'w'"):
        mlstate.StateDict.from_torch(holder(STRANGE[kind]()))


def test_reordered_state_dict_is_loaded(tmp_path):
    """An override may return another kind of mapping, without metadata."""

    class Reversed(nn.Linear):
        def state_dict(self, *_, **__):
            return OrderedDict(reversed([*super().state_dict().items()]))

    source = Reversed(2, 2)
    mlstate.save(tmp_path, source)
    assert torch.equal(loaded(tmp_path, Reversed(2, 2)).weight, source.weight)
