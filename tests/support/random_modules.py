"""Random torch modules whose state is more than their memory: hooks, extra states, own loads.

`make(seed)` returns the same structure for the same seed; `change(module, seed)` gives it other
values. `calls` of each module counts what torch's load calls.
"""

import io
from collections import Counter, OrderedDict, deque

import numpy as np
import torch
from torch import nn

# ---- extra states ----

EXTRAS = {
    "none": lambda r: None,
    "int": lambda r: r.randint(-(2**70), 2**70),
    "float": lambda r: r.choice([0.1, -0.0, float("inf"), r.random()]),
    "text": lambda r: "é" * r.randint(0, 3),
    "bytes": lambda r: r.randbytes(r.randint(0, 9)),
    "array": lambda r: np.arange(r.randint(0, 4), dtype="i2"),
    "tensor": lambda r: torch.full((r.randint(0, 3), 2), r.random()),
    "scalar": lambda r: torch.tensor(r.random(), dtype=torch.float64),
    "dict": lambda r: {"scale": r.random(), 3: (1, b"x"), "$": [None], "t": torch.ones(2) * 3},
    "ordered": lambda r: OrderedDict(b=np.float32(r.random()), a={1, 2}, c=Counter("aab")),
    "deque": lambda r: deque([r.random(), torch.arange(r.randint(1, 3))], maxlen=5),
    "file": lambda r: _file(r),
    "object": lambda r: object(),  # cannot be stored
    "subclass": lambda r: type("Named", (dict,), {})(a=1),  # cannot be stored as such
}


def _file(random):
    file = io.BytesIO(random.randbytes(random.randint(0, 20)))
    file.seek(random.randint(0, 20))
    return file


class Extra(nn.Linear):
    """A layer with an extra state."""

    def __init__(self, value):
        super().__init__(2, 3)
        self.extra, self.calls = value, Counter()

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.calls["set"] += 1
        self.extra = state


class Picky(Extra):
    """Refuses a part of the extra states, after it changed."""

    def set_extra_state(self, state):
        super().set_extra_state(state)
        if isinstance(state, int) and state % 2:
            raise ValueError("odd")


class Unset(nn.Linear):
    """Returns an extra state that it cannot load."""

    def __init__(self):
        super().__init__(2, 3)
        self.calls = Counter()

    def get_extra_state(self):
        return 1


# ---- own methods ----


class Fused(nn.Module):
    """Stores one parameter as three entries: copies of its parts, or views."""

    def __init__(self, copied):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(6, 2))
        self.copied, self.calls = copied, Counter()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        for name, part in zip("qkv", self.qkv.detach().split(2), strict=True):
            destination[prefix + name] = part.clone() if self.copied else part

    def _load_from_state_dict(self, state, prefix, *_):
        self.calls["load"] += 1
        with torch.no_grad():
            self.qkv.copy_(torch.cat([state[prefix + name] for name in "qkv"]))


class Metric(nn.Module):
    """Keeps lists of tensors and numbers, and overrides state_dict()."""

    def __init__(self, random):
        super().__init__()
        self.calls = Counter()
        self.values = [torch.randn(2) for _ in range(random.randint(0, 3))]
        self.total = torch.zeros(())

    def state_dict(self, destination=None, prefix="", keep_vars=False):
        destination = super().state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        destination[prefix + "values"] = [value.clone() for value in self.values]
        destination[prefix + "total"] = self.total.clone()
        return destination

    def _load_from_state_dict(self, state, prefix, meta, strict, missing, unexpected, errors):
        self.calls["load"] += 1
        for name in ("values", "total"):
            if prefix + name in state:
                value = state.pop(prefix + name)
                wide = isinstance(value, torch.Tensor)  # a hook may have cast it
                setattr(self, name, value.float() if wide else value)
            else:
                missing.append(prefix + name)
        super()._load_from_state_dict(state, prefix, meta, strict, missing, unexpected, errors)


class Migrating(nn.Linear):
    """Halves the weight of old versions."""

    def __init__(self, version):
        super().__init__(2, 2)
        self._version, self.calls = version, Counter()

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        self.calls["load"] += 1
        if metadata.get("version", None) != 3 and prefix + "weight" in state:
            state[prefix + "weight"] = state[prefix + "weight"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Root(nn.Sequential):
    """Overrides load_state_dict()."""

    def load_state_dict(self, state, strict=True):
        self.calls = Counter(root=1)
        return super().load_state_dict(state, strict=strict)


class Odd(nn.Module):
    """Parameters and buffers of unusual kinds, all plain memory."""

    def __init__(self):
        super().__init__()
        self.register_parameter("nothing", None)
        self.register_buffer("cache", torch.randn(2), persistent=False)
        self.register_buffer("count", torch.randint(9, ()))
        self.turned = nn.Parameter(torch.randn(3, 2).t())
        self.empty = nn.Parameter(torch.randn(0, 2))
        self.narrow = nn.Parameter(torch.randn(2).to(torch.bfloat16))


# ---- hooks ----


def _count(module, key):
    module.calls = getattr(module, "calls", Counter())
    module.calls[key] += 1


def _add_cast(module, random):
    module.to(torch.bfloat16)

    def cast(module, state, prefix, metadata):
        for key, value in state.items():
            if key.startswith(prefix) and type(value) is torch.Tensor:
                state[key] = value.float()

    module._register_state_dict_hook(cast)


def _add_wide_cast(module, random):
    """Cast the entries of modules before this one too."""
    module._register_state_dict_hook(
        lambda module, state, prefix, metadata: state.update(
            {
                key: value.double()
                for key, value in state.items()
                if type(value) is torch.Tensor and not key.endswith("_extra_state")
            }
        )
    )


def _add_rename(module, random):
    def save(module, state, prefix, metadata):
        for key in [key for key in state if key.startswith(prefix)]:
            state[prefix + "old." + key[len(prefix) :]] = state.pop(key)

    def load(state, prefix, *_):
        _count(module, "pre")
        start = prefix + "old."
        for key in [key for key in state if key.startswith(start)]:
            state[prefix + key[len(start) :]] = state.pop(key)

    module._register_state_dict_hook(save)
    module._register_load_state_dict_pre_hook(load)


def _add_cache(module, random):
    def derive(module, incompatible):
        _count(module, "post")
        module.cached = sum(p.detach().double().sum().item() for p in module.parameters())

    module.register_load_state_dict_post_hook(derive)


def _add_removal(module, random):
    def remove(module, state, prefix, metadata):
        for key in [key for key in state if key.startswith(prefix)][:1]:
            del state[key]

    module._register_state_dict_hook(remove)


def _add_forgiven_removal(module, random):
    _add_removal(module, random)
    module.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())


def _add_copies(module, random):
    def copy(module, state, prefix, metadata):
        for key in state:
            if key.startswith(prefix) and type(state[key]) is torch.Tensor:
                state[key] = state[key].detach().clone()

    module._register_state_dict_hook(copy)


def _add_listener(module, random):
    """Change nothing."""
    module.register_state_dict_post_hook(lambda *_: None)


def _add_note(module, random):
    module._register_state_dict_hook(
        lambda module, state, prefix, metadata: state.update({prefix + "note": "text"})
    )
    module._register_load_state_dict_pre_hook(
        lambda state, prefix, *_: module.__dict__.update(note=state.pop(prefix + "note", None))
    )


HOOKS = [
    _add_cast, _add_wide_cast, _add_rename, _add_cache, _add_removal, _add_forgiven_removal,
    _add_copies, _add_listener, _add_note,
]  # fmt: skip


# ---- modules ----


def _spectral(random):
    return nn.utils.spectral_norm(nn.Linear(3, 2))


LEAVES = [
    lambda r: nn.Linear(2, 3),
    lambda r: nn.Linear(2, 3, bias=False),
    lambda r: nn.BatchNorm1d(3),
    lambda r: nn.InstanceNorm1d(3, track_running_stats=r.random() < 0.5),
    lambda r: nn.Embedding(3, 2),
    lambda r: nn.MultiheadAttention(4, 2),
    lambda r: nn.LSTM(2, 2),
    lambda r: Extra(EXTRAS[r.choice(list(EXTRAS)[:-2])](r)),
    lambda r: Extra(EXTRAS[r.choice(list(EXTRAS)[:-2])](r)),
    lambda r: Extra(EXTRAS[r.choice(list(EXTRAS))](r)),
    lambda r: Picky(r.randint(0, 9)),
    lambda r: Unset(),
    lambda r: Fused(r.random() < 0.5),
    lambda r: Metric(r),
    lambda r: Migrating(r.choice([1, 2, 3])),
    lambda r: Odd(),
    lambda r: nn.LazyLinear(2),
    lambda r: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
    lambda r: nn.utils.parametrizations.orthogonal(nn.Linear(2, 3)),
    lambda r: nn.utils.weight_norm(nn.Linear(2, 3)),
    _spectral,
]  # fmt: skip


def _tree(random, depth):
    if depth == 0 or random.random() < 0.4:
        module = random.choice(LEAVES)(random)
    else:
        kind = Root if depth == 3 and random.random() < 0.15 else nn.Sequential
        module = kind(*(_tree(random, depth - 1) for _ in range(random.randint(1, 4))))
    if random.random() < 0.25:
        random.choice(HOOKS)(module, random)
    return module


def make(random):
    """Return a random module; the same for generators of the same state."""
    module = _tree(random, 3)
    linears = [
        each
        for each in module.modules()
        if type(each) in (nn.Linear, Extra, Picky) and "weight" in each._parameters
    ]
    if len(linears) > 1 and random.random() < 0.4:
        first, second = random.sample(linears, 2)
        if first.weight.shape == second.weight.shape:
            second.weight = first.weight
    if isinstance(module, nn.Sequential) and len(module) and random.random() < 0.15:
        module.append(module[0])
    if random.random() < 0.1:
        module = nn.DataParallel(module)
    return module


def change(module, random):
    """Give a module other values: memory, extra states and lists."""
    for child in module.modules():
        if isinstance(child, nn.LazyLinear) and random.random() < 0.7:
            child(torch.ones(1, 3, dtype=child.weight.dtype))
    generator = torch.Generator().manual_seed(random.randint(0, 99999))
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if nn.parameter.is_lazy(tensor):
                continue
            values = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(values if tensor.is_floating_point() else values.abs() * 9)
    for child in module.modules():
        if isinstance(child, Extra):
            like = child.extra
            kinds = [k for k in EXTRAS if type(EXTRAS[k](random)) is type(like)]
            child.extra = EXTRAS[kinds[0]](random) if kinds else like
        if isinstance(child, Metric):
            child.values = [torch.randn(2, generator=generator)]
            child.total = torch.randn((), generator=generator)
