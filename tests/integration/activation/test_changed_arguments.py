"""Objects among a managed block's arguments that change before its recomputation."""

import gc
import logging
import random
import threading
import weakref
from collections import OrderedDict, deque
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="runs torch modules")

from torch import nn  # noqa: E402

from mlstate.activation import ActivationManager, IntervalStrategy  # noqa: E402
from mlstate.errors import GradientWarning  # noqa: E402

pytestmark = pytest.mark.torch


class Block(nn.Module):
    """Multiplies by a number or tensor that a function of an object and the block returns."""

    def __init__(self, function, number):
        super().__init__()
        self.linear, self.function, self.number = nn.Linear(4, 4), function, number

    def forward(self, x, *others, **named):
        value, *_ = *others, *named.values()
        return torch.tanh(self.linear(x) * self.function(value, self.number))


class Model(nn.Module):
    def __init__(self, function, count=3):
        super().__init__()
        self.layers = nn.ModuleList(Block(function, number) for number in range(count))

    def forward(self, x, *others, **named):
        for layer in self.layers:
            x = layer(x, *others, **named)
        return x


def managed(function, count=3):
    model = Model(function, count)
    ActivationManager(IntervalStrategy(1)).apply(model, "layers.*")
    return model


def train(model, *others, **named):
    model(torch.ones(2, 4), *others, **named).sum().backward()


def holder(**attributes):
    context = type("Holder", (), {})()
    vars(context).update(attributes)
    return context


class Slots:
    __slots__ = ("__dict__", "__items")

    def __init__(self):
        self.__items = 1

    def increase(self):
        self.__items += 1
        return self.__items


def set_value(context, number):
    context.value = float(number)
    return context.value


def write_in_place(context, _):
    context.layers[0].keys.add_(1)
    return context.layers[0].keys.clone()


def replace_freed(context, number):
    del context.value
    context.value = torch.full((4,), float(number))  # usually at the same address
    return context.value


def append(items, _):
    items.append(1)
    return len(items)


def write_by_last(context, number):
    if number == 2:
        context.value = 3
    return context.value


def reorder(items, _):
    key = next(iter(items))
    items.move_to_end(key)
    return items[key]


def cache():
    return holder(layers=[holder(keys=torch.ones(4))])


CHANGES = {
    "attribute": (lambda: holder(value=5), set_value, r"cache\.value"),
    "new attribute": (holder, set_value, r"cache\.value"),
    "namespace": (lambda: SimpleNamespace(value=5), set_value, r"cache\.value"),
    "one of many": (
        lambda: holder(**{f"value{i}": i for i in range(2000)}),
        set_value,
        "cache",
    ),
    "private slot": (Slots, lambda context, _: context.increase(), r"cache\._Slots__items"),
    "tensor in place": (cache, write_in_place, r"cache\.layers\[0\]\.keys"),
    "other block": (lambda: holder(value=2), write_by_last, r"cache\.value"),
    "list": (list, append, "cache"),
    "full deque": (lambda: deque([1, 2], 2), lambda d, _: d.append(sum(d)) or d[-1], r"cache\[1\]"),
    "dict": (dict, lambda d, number: d.setdefault(number, 2), r"cache\[2\]"),
    "order": (lambda: OrderedDict(a=1, b=2, c=3, d=4), reorder, "cache"),
    "array": (lambda: np.ones(4), lambda a, _: a.sort() or float(a.__iadd__(1)[0]), "cache"),
    "generator": (lambda: (v for v in [1, 2]), lambda items, _: 1 + sum(items), "cache"),
    "iterator": (lambda: iter([1, 2]), lambda items, _: 1 + sum(items), "cache"),
    "nested iterator": (
        lambda: zip([1], [2], strict=True),
        lambda pairs, _: 1 + len([*pairs]),
        "cache",
    ),
    "random": (lambda: random.Random(1), lambda r, _: r.random(), "cache"),
    "NumPy random": (np.random.default_rng, lambda r, _: r.random(), "cache"),
    "torch random": (torch.Generator, lambda r, _: torch.rand(4, generator=r), "cache"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_object_is_named_once_before_the_recomputation(change):
    make, function, path = CHANGES[change]
    model = managed(function)
    pattern = rf"layers\.\d: {path} changed in its forward pass or since"
    with pytest.warns(GradientWarning, match=pattern) as warned:
        train(model, cache=make())
    assert len(warned) == 1
    train(model, cache=make())  # no further warning, which would be an error in these tests


def test_a_new_tensor_in_the_memory_of_a_freed_one_is_noticed():
    # the warning names the attribute only if the new object has another address
    with pytest.warns(GradientWarning, match=r"cache(\.value)? changed"):
        train(managed(replace_freed), cache=holder(value=torch.ones(4)))


def test_positional_arguments_are_named_by_position():
    with pytest.warns(GradientWarning, match=r"layers\.2: argument 2\[1\]\.value changed"):
        train(managed(lambda pair, number: set_value(pair[1], number)), (1, holder()))


def test_another_change_of_the_same_argument_is_named_too():
    def change(context, number):
        context.count += 1
        if context.count > 4:
            context.value = number
        return 2

    model, context = managed(change, 1), holder(count=0)
    with pytest.warns(GradientWarning, match=r"context\.count changed"):
        train(model, context=context)
    train(model, context=context)
    with pytest.warns(GradientWarning, match=r"0: context\.value changed"):
        train(model, context=context)


def test_a_warning_that_is_an_error_leaves_gradients_unset():
    model = managed(append)
    loss = model(torch.ones(2, 4), []).sum()
    for _ in range(2):
        with pytest.raises(GradientWarning, match=r"argument 2 changed"):
            loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())


class Refuses:
    """Refuses every use of itself; a block does not use it."""

    def __init__(self):
        object.__setattr__(self, "value", 1)

    def _refuse(self, *_):
        raise AssertionError("used")

    __getattribute__ = __getattr__ = __eq__ = __hash__ = __iter__ = __len__ = _refuse
    __bool__ = __repr__ = __call__ = _refuse


class RefusesAsList(list):
    __iter__ = __len__ = __eq__ = __getitem__ = Refuses._refuse


class Masks:
    @cached_property
    def mask(self):
        return torch.ones(4)


def itself():
    context = holder(number=float("nan"))
    context.context = [context]
    return context


UNCHANGED = {
    "tuple": lambda: (torch.ones(4), None, (1, "text")),
    "no methods are called": lambda: holder(value=Refuses(), items=RefusesAsList([1])),
    "contains itself": itself,
    "cached property": Masks,
    "path": lambda: holder(path=Path("a"), logger=logging.getLogger("mlstate.example")),
    "lazy property of torch": lambda: torch.distributions.Categorical(logits=torch.ones(4)),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "threads": lambda: holder(lock=threading.Lock(), local=threading.local()),
    "many": lambda: {i: list(range(50)) for i in range(500)},
    "unused iterator": lambda: iter([1, 2]),
}


@pytest.mark.parametrize("arguments", UNCHANGED)
def test_unchanged_arguments_and_changed_modules_give_no_warning(arguments):
    def use(value, _):
        if isinstance(value, nn.Module):
            value(torch.ones(2, 4))
        if isinstance(value, torch.distributions.Categorical):
            return value.probs
        if hasattr(value, "path"):
            value.logger.debug(hash(value.path))
        return value.mask if type(value) is Masks else 2

    train(managed(use), UNCHANGED[arguments]())


def test_equal_values_that_a_block_sets_again_count_as_unchanged():
    def reset(context, _):
        context.values = [context.values[0], context.values[1]]
        context.device, context.call = torch.ones(1).device, context.values[1].append
        return 2

    context = holder(values=[1, []], device=torch.device("cpu"))
    context.call = context.values[1].append
    train(managed(reset), context)


def test_replaced_tensors_and_classes_are_freed():
    def replace(context, _):
        context.value = torch.ones(4)
        return 2

    context = holder(value=torch.zeros(4))
    before, model = weakref.ref(context.value), managed(replace, 1)
    out = model(torch.ones(2, 4), context)
    gc.disable()
    try:
        assert before() is None
        with pytest.warns(GradientWarning):
            out.sum().backward()
        references = weakref.ref(context), weakref.ref(context.value)
        del out, context
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["StaticCache", "DynamicCache"])
def test_caches_of_transformers_are_named(kind):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model, tokens = transformers.LlamaForCausalLM(config), torch.ones(1, 4, dtype=torch.long)
    ActivationManager(IntervalStrategy(1)).apply(model, "model.layers.*")
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    if kind == "StaticCache":
        named = {"cache": transformers.StaticCache(config=config, max_cache_len=8)}
    else:
        named = {}
    with pytest.warns(GradientWarning, match=r"layers\.1: cache\.layers\[1\]\.keys,") as warned:
        model(tokens, labels=tokens, use_cache=True, **named).loss.backward()
    assert len(warned) == 1
