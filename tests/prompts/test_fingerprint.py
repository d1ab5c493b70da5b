"""What identifies the model of a cache."""

import collections
import enum
import fractions
import functools
import hashlib
import json
import logging
import os
import pathlib
import types

import numpy as np
import pytest

from mlstate import save_file
from mlstate.errors import CompatibilityError, FormatError, StoreNotFoundError
from mlstate.prompts import fingerprint

CONFIG = {
    "model_type": "llama",
    "rope_theta": 10000.0,
    "dtype": "float16",
    "_name_or_path": "/here",
    "transformers_version": "5.23.0",
}


def model_folder(folder, config=CONFIG, weight=1.0, name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": np.full((2, 3), weight, np.float32)}, folder / name)
    return folder


def test_a_name_identifies_a_model():
    first = fingerprint("llama")
    assert first == fingerprint("llama") != fingerprint("llama-2")
    assert fingerprint(first) == first and len(first) == 71
    assert fingerprint(first, salt="image") != first
    assert len({fingerprint("llama", adapters=a) for a in ([], ["a"], ["a", "b"], ["b", "a"])}) == 4


@pytest.mark.parametrize(
    "change",
    [{"rope_theta": 5e5}, {"rope_scaling": {"type": "yarn"}}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_a_config_with_another_fact_is_another_model(tmp_path, change):
    same = (
        model_folder(tmp_path / "a"),
        model_folder(
            tmp_path / "b", CONFIG | {"_name_or_path": "/there", "transformers_version": "5.24.0"}
        ),
    )
    other = model_folder(tmp_path / "c", CONFIG | change)
    assert fingerprint(same[0]) == fingerprint(same[1]) != fingerprint(other)


def test_other_weights_are_another_model(tmp_path):
    first, second = model_folder(tmp_path / "a"), model_folder(tmp_path / "b", weight=2.0)
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first, adapters=[second]) != fingerprint(first)


def test_a_file_of_the_hub_is_known_by_its_name_and_not_read(tmp_path, monkeypatch):
    copied = fingerprint(model_folder(tmp_path / "copy"))
    snapshot = model_folder(tmp_path / "hub" / "snapshots" / "main")
    weights = snapshot / "model.safetensors"
    blobs = tmp_path / "hub" / "blobs"
    blobs.mkdir()
    blob = blobs / hashlib.sha256(weights.read_bytes()).hexdigest()
    weights.rename(blob)
    weights.symlink_to(blob)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert fingerprint(snapshot) == copied


def test_a_truncated_file_of_weights_is_refused(tmp_path):
    folder = model_folder(tmp_path / "a")
    os.truncate(folder / "model.safetensors", 50)
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        fingerprint(folder)


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(FormatError, match=r"no config\.json.*pass its name as a str"):
        fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match="no safetensors"):
        fingerprint(tmp_path)
    save_file({"w": np.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="not JSON"):
        fingerprint(tmp_path)
    with pytest.raises(StoreNotFoundError):
        fingerprint(tmp_path / "missing")
    with pytest.raises(OSError, match="a model is a folder"):
        fingerprint(tmp_path / "config.json")


def test_a_fifo_in_the_place_of_weights_is_refused(tmp_path):
    folder = model_folder(tmp_path / "a")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(FormatError, match="not a regular file"):
        fingerprint(folder)


@pytest.mark.parametrize("suffix", [".mlpackage", ".mlmodelc"])
def test_a_core_ml_model_is_identified_by_all_its_files(tmp_path, suffix):
    folders = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for folder in folders:
        (folder / "Data").mkdir(parents=True)
        (folder / "Data" / "weight.bin").write_bytes(b"weights")
    assert fingerprint(folders[0]) == fingerprint(folders[1])
    (folders[1] / "Data" / "weight.bin").write_bytes(b"Weights")
    assert fingerprint(folders[0]) != fingerprint(folders[1])


def test_a_core_ai_model_is_verified(tmp_path):
    folder = tmp_path / "m.aimodel"
    folder.mkdir()
    program = b"program"
    (folder / "main.mlirb").write_bytes(program)
    (folder / "main.hash").write_bytes(hashlib.sha256(program).digest())
    (folder / "metadata.json").write_text("{}")
    assert fingerprint(folder) != fingerprint("m")
    (folder / "main.mlirb").write_bytes(program[:-1])
    with pytest.raises(FormatError, match="truncated or altered"):
        fingerprint(folder)


def test_other_types_are_refused_with_a_remedy():
    for model in (5, None, {"a": 1}, b"name"):
        with pytest.raises(TypeError, match="does not identify a model: pass its name as a str"):
            fingerprint(model)
    with pytest.raises(ValueError, match="is empty"):
        fingerprint("")
    with pytest.raises(TypeError, match="salt must be a str"):
        fingerprint("a", salt=5)
    with pytest.raises(TypeError, match=r"pass \[adapter\]"):
        fingerprint("a", adapters="b")


@pytest.mark.torch
def test_a_torch_module_is_hashed_on_request_only():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(TypeError, match="pass hash_weights=True"):
        fingerprint(module)
    first = fingerprint(module, hash_weights=True)
    assert first == fingerprint(module, hash_weights=True)
    assert fingerprint(module.to(torch.bfloat16), hash_weights=True) != first
    module.to(torch.float32)
    assert fingerprint(module, hash_weights=True) != first  # rounded on the way
    second = fingerprint(module, hash_weights=True)
    with torch.no_grad():
        module[0].bias[0] += 1
    assert fingerprint(module, hash_weights=True) != second


def test_a_path_is_not_a_name(tmp_path, caplog):
    folder = model_folder(tmp_path / "a")
    with caplog.at_level(logging.WARNING):
        read = fingerprint(pathlib.Path(folder))
        assert not caplog.messages and fingerprint(str(folder)) != read
    assert "pass pathlib.Path(...) to read the folder" in caplog.text


def test_a_file_of_code_belongs_to_the_model(tmp_path):
    folder = model_folder(tmp_path / "a")
    first = fingerprint(folder)
    (folder / "modeling.py").write_text("SCALE = 1")
    second = fingerprint(folder)
    (folder / "modeling.py").write_text("SCALE = 2")
    assert len({first, second, fingerprint(folder)}) == 3


def test_names_and_versions_in_nested_configs_are_not_part_of_a_model(tmp_path):
    folders = [
        model_folder(tmp_path / name, CONFIG | {"text_config": {"_name_or_path": name, "n": n}})
        for name, n in (("a", 1), ("b", 1), ("c", 2))
    ]
    first, second, third = map(fingerprint, folders)
    assert first == second != third


def test_an_empty_iterator_of_adapters_equals_none():
    assert fingerprint(fingerprint("a"), adapters=iter(())) == fingerprint("a")


@pytest.mark.torch
def test_modules_with_another_computation_differ():
    torch = pytest.importorskip("torch")
    nn = torch.nn

    def block(activation, eps=1e-5, function=nn.functional.relu, scale=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), activation(), nn.LayerNorm(3, eps))
        model.function, model.settings = function, {"scale": scale}
        return fingerprint(model, hash_weights=True)

    first = block(nn.ReLU)
    others = (
        block(nn.GELU),
        block(nn.ReLU, 1e-6),
        block(nn.ReLU, function=nn.functional.silu),
        block(nn.ReLU, scale=2.0),
    )
    assert first == block(nn.ReLU) and len({first, *others}) == 5
    model = nn.Linear(2, 3)
    before = fingerprint(model, hash_weights=True)
    model.register_forward_hook(lambda *_: None)
    assert fingerprint(model.train(), hash_weights=True) == before
    model.hook_scale = 2.0  # an attribute of the model, not a hook of torch
    assert fingerprint(model, hash_weights=True) != before


def scaled(torch, scale):
    """Return a module that has an attribute, and the same weights each time."""
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 2)
    module.scale = scale
    return module


@pytest.mark.torch
@pytest.mark.parametrize(
    "kind",
    [
        "tensor",
        "list",
        "array",
        "scalar",
        "complex",
        "bytes",
        "enum",
        "partial",
        "range",
        "fraction",
        "mapping",
        "sequence",
    ],
)
def test_values_in_attributes_of_a_module_belong_to_it(kind):
    torch = pytest.importorskip("torch")
    colors = enum.Enum("Color", ["RED", "BLUE"])
    makers = {
        "tensor": lambda i: torch.tensor([1.0, i]),
        "list": lambda i: [torch.tensor([1.0, i])],
        "array": lambda i: {"a": np.array([1.0, i])},
        "scalar": np.float32,
        "complex": lambda i: complex(1, i),
        "range": range,
        "fraction": lambda i: fractions.Fraction(i, 7),
        "mapping": lambda i: types.MappingProxyType({"a": collections.UserDict(b=i)}),
        "sequence": lambda i: collections.deque([i]),
        "bytes": lambda i: bytes([i]),
        "enum": list(colors).__getitem__,
        "partial": lambda i: functools.partial(pow, i),
    }
    modules = [scaled(torch, makers[kind](i)) for i in (0, 1, 1)]
    prints = [fingerprint(module, hash_weights=True) for module in modules]
    assert prints[0] != prints[1] == prints[2]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_packed_weights_of_quantized_layers_belong_to_a_module():
    torch = pytest.importorskip("torch")

    def quantized(scale):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4))
        with torch.no_grad():
            module[0].weight.copy_(torch.eye(4) * scale)
            module[0].bias.zero_()
        return torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear})

    prints = [fingerprint(quantized(scale), hash_weights=True) for scale in (1, 2, 2)]
    assert prints[0] != prints[1] == prints[2]


@pytest.mark.torch
def test_an_attribute_that_is_a_buffer_too_is_hashed_once():
    torch = pytest.importorskip("torch")
    module = scaled(torch, None)
    module.register_buffer("angles", torch.arange(3.0))
    first = fingerprint(module, hash_weights=True)
    module.scale = module.angles
    assert fingerprint(module, hash_weights=True) == first


@pytest.mark.torch
def test_weights_without_elements_are_refused_by_name():
    torch = pytest.importorskip("torch")
    with pytest.raises(CompatibilityError, match="'weight' is a tensor on torch's meta device"):
        fingerprint(torch.nn.Linear(2, 2, device="meta"), hash_weights=True)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["tensor", "tuple", "called method", "decorated"])
def test_results_of_forward_are_not_part_of_a_module(kind):
    torch = pytest.importorskip("torch")

    def decorated(function):
        @functools.wraps(function)
        def call(*args):
            return function(*args)

        return call

    class Keeper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = torch.nn.Linear(2, 2), None
            self.table = torch.ones(2)

        def keep(self, result):
            self.last = (result,)

        def forward(self, values):
            if kind == "called method":
                self.keep(values)
            elif kind == "tuple":
                self.last, self.sizes = (values, 3), values.shape
            else:
                self.last = values * self.table
            return self.inner(values)

    if kind == "decorated":
        Keeper.forward = decorated(Keeper.forward)
    module = Keeper()
    before = fingerprint(module, hash_weights=True)
    module(torch.ones(1, 2))
    assert module.last is not None
    assert fingerprint(module, hash_weights=True) == before
    module.table = torch.zeros(2)
    assert fingerprint(module, hash_weights=True) != before


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "csr", "csc", "nested", "conjugated", "negated"])
def test_attributes_of_every_layout_belong_to_a_module(kind):
    torch = pytest.importorskip("torch")
    makers = {
        "sparse": lambda t: t.to_sparse(),
        "csr": lambda t: t.to_sparse_csr(),
        "csc": lambda t: t.to_sparse_csc(),
        "nested": lambda t: torch.nested.nested_tensor([t, t[:1]]),
        "conjugated": lambda t: (t * 1j).conj(),
        "negated": lambda t: (t * 1j).conj().imag,
    }
    values = [torch.tensor([[1.0, i], [0, 2]]) for i in (0, 1, 1)]
    modules = [scaled(torch, makers[kind](value)) for value in values]
    prints = [fingerprint(module, hash_weights=True) for module in modules]
    assert prints[0] != prints[1] == prints[2]


@pytest.mark.torch
def test_an_attribute_on_the_meta_device_counts_by_its_shape():
    torch = pytest.importorskip("torch")
    modules = [scaled(torch, torch.empty(size, device="meta")) for size in (1, 2, 2)]
    prints = [fingerprint(module, hash_weights=True) for module in modules]
    assert prints[0] != prints[1] == prints[2]


@pytest.mark.torch
def test_an_attribute_that_cannot_be_read_is_named():
    torch = pytest.importorskip("torch")

    class Config:
        def to_dict(self):
            raise RuntimeError("gone")

    module = torch.nn.Sequential(scaled(torch, Config()))
    with pytest.raises(CompatibilityError, match=r"'0.scale', a Config, cannot be read: gone"):
        fingerprint(module, hash_weights=True)


@pytest.mark.torch
def test_a_module_without_a_working_state_dict_has_a_fingerprint():
    torch = pytest.importorskip("torch")

    class Stateless(torch.nn.Linear):
        def state_dict(self, *_, **__):
            raise RuntimeError("a collective")

    class Stuck(Stateless):
        def get_extra_state(self):
            raise RuntimeError("no state")

    torch.manual_seed(0)
    for cls in (Stateless, Stuck):
        modules = torch.nn.Sequential(cls(2, 2)), torch.nn.Sequential(cls(2, 2))
        assert len({fingerprint(module, hash_weights=True) for module in modules}) == 2


@pytest.mark.torch
def test_an_attribute_whose_memory_was_freed_counts_by_its_shape():
    torch = pytest.importorskip("torch")
    prints = []
    for size in (1, 2, 2):
        tensor = torch.ones(size)
        tensor.untyped_storage().resize_(0)  # as FSDP1 does with parameters of other ranks
        prints.append(fingerprint(scaled(torch, tensor), hash_weights=True))
    assert prints[0] != prints[1] == prints[2]


def test_files_of_a_linked_folder_of_a_package_are_part_of_its_fingerprint(tmp_path):
    package, data = tmp_path / "m.mlpackage", tmp_path / "data"
    package.mkdir()
    data.mkdir()
    with pytest.raises(FormatError, match="no files"):
        fingerprint(package)
    (package / "Manifest.json").write_text("{}")
    (package / "Data").symlink_to(data)
    (data / "weight.bin").write_bytes(b"one")
    (data / "cycle").symlink_to(package)
    before = fingerprint(package)
    assert fingerprint(package) == before
    (data / "weight.bin").write_bytes(b"two")
    assert fingerprint(package) != before


def test_attributes_whose_items_have_no_stable_text_are_left_out():
    class Unreadable(collections.UserDict):
        def __getitem__(self, key):
            raise KeyError(key)

    def fingerprint_with(value):
        torch.manual_seed(0)
        module = torch.nn.Linear(2, 2)
        module.attribute = value
        return fingerprint(module, hash_weights=True)

    torch = pytest.importorskip("torch")
    plain = fingerprint_with(None)
    for make in (
        lambda: collections.UserDict({object(): 1}),
        lambda: Unreadable(a=1),
        lambda: collections.UserList(range(20_000)),
    ):
        assert fingerprint_with(make()) == plain
    assert fingerprint_with(collections.UserDict(a=1)) != plain


def test_links_to_other_folders_are_not_part_of_a_model_of_hugging_face(tmp_path):
    model = model_folder(tmp_path / "models" / "one")
    before = fingerprint(model)
    (model / "up").symlink_to(tmp_path / "models")
    (tmp_path / "models" / "other.py").write_text("print(1)")
    assert fingerprint(model) == before
