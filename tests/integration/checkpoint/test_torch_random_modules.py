"""Random modules restore what torch's own load_state_dict restores, or stay unchanged."""

import copy
import io
import random

import numpy as np
import pytest
import random_modules
import torch
from tries import tries

import mlstate
from mlstate import MLStateError

SHARE = 20  # modules of one test


def same(a, b):
    """Whether two values are equal in type and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if torch.nn.parameter.is_lazy(a):
            return True
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return (
            a.detach()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(b.detach().contiguous().reshape(-1).view(torch.uint8))
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, io.BytesIO):
        return (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    if isinstance(a, set):
        return a == b
    if hasattr(a, "__iter__") and not isinstance(a, str | bytes):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def content(module, *, calls=True):
    """Copies of all that a load may change: entries, memory, values, and counts of calls."""
    values = {
        "state": dict(module.state_dict()),
        "memory": {**dict(module.named_parameters()), **dict(module.named_buffers())},
    }
    for name, child in module.named_modules(remove_duplicate=False):
        # hooks derive and set these when the earlier state is loaded back, too
        derived = ("cached", "note", "calls") if calls else ()
        for key in ("extra", "values", "total", *derived):
            values[name, key] = child.__dict__.get(key)
    return snapshot(values)


def snapshot(value):
    if isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value):
        return value.detach().clone()
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: snapshot(inner) for key, inner in value.items()})
        return copied
    return copy.deepcopy(value)


def difference(a, b):
    for key in a:
        if isinstance(a[key], dict) and isinstance(b[key], dict) and a[key].keys() == b[key].keys():
            for inner in a[key]:
                if not same(a[key][inner], b[key][inner]):
                    return key, inner, a[key][inner], b[key][inner]
        elif not same(a[key], b[key]):
            return key, a[key], b[key]
    return None


def attempt(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return error
    return None


def check(seed, folder):
    """Save and load one module; return how it ended."""
    source, loaded, expected = (random_modules.make(random.Random(seed)) for _ in range(3))
    source_change = random.Random(seed + 1)
    random_modules.change(source, source_change)
    for target in (loaded, expected):
        random_modules.change(target, random.Random(seed + 2))
    saved = attempt(mlstate.save, folder, source)
    if saved is not None:
        assert isinstance(saved, MLStateError | TypeError | ValueError), saved
        return "not saved"
    before = content(loaded, calls=False)
    torch_error = attempt(expected.load_state_dict, source.state_dict())
    error = attempt(mlstate.load, folder, into={"model": loaded})
    if error is None:
        assert torch_error is None, f"torch raises {torch_error}"
        changed = difference(content(expected), content(loaded))
        assert changed is None, changed
        return "loaded"
    assert isinstance(error, MLStateError | TypeError), repr(error)
    assert torch_error is not None, f"torch loads it, mlstate raises {error}"
    if "which stay changed" not in str(error):
        changed = difference(before, content(loaded, calls=False))
        assert changed is None, (changed, error)
    return "refused"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(0, tries(60), SHARE))
def test_restores_like_torch_or_keeps_the_module(start, tmp_path):
    torch.manual_seed(start)
    ends = [check(seed * 1000, tmp_path / str(seed)) for seed in range(start, start + SHARE)]
    assert ends.count("loaded") >= SHARE // 4
