"""Deltas that released code of vLLM, verl and SkyRL applies, and the deltas of SkyRL's publisher.

Single modules of these packages are loaded, without the packages around them, which need GPUs.
"""

import dataclasses
import importlib
import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest
from foreign_deltas import NAME, bases, check_deltas, news

from mlstate.checkpoint import load_file, load_metadata, save_file
from mlstate.follow._delta import compare_arrays
from mlstate.follow._formats.checkpoint_delta import read_checkpoint_delta, write_checkpoint_delta
from mlstate.follow._formats.weight_patch import write_patches

torch = pytest.importorskip("torch", reason="these packages apply deltas to torch tensors")
pytestmark = pytest.mark.torch

BUILD = Path(__file__).resolve().parents[3] / "build"  # `make test` installs packages there
PACKAGES = ("vllm", "verl", "skyrl")
SKYRL = "skyrl.backends.skyrl_train.weight_sync.delta.checkpoint"
VERL = "verl.workers.rollout.sglang_rollout.delta_loader"
VLLM = "vllm.model_executor.model_loader.checkpoint_weight_patch"
FILE = "model-00001-of-00001.safetensors"


def is_foreign(name):
    return name.split(".")[0] in PACKAGES


@pytest.fixture
def load(monkeypatch):
    """A function that loads a module by name; its packages are empty modules."""
    folders = [str(folder) for folder in BUILD.glob("readers-*")]
    monkeypatch.setattr(sys, "path", [*sys.path, *folders])
    before = {name: module for name, module in sys.modules.items() if is_foreign(name)}
    for name in before:
        del sys.modules[name]

    def load_module(name):
        top = name.split(".")[0]
        spec = PathFinder.find_spec(top)
        if spec is None:
            pytest.skip(f"needs the files of {top}: pip install --no-deps {top}")
        [folder] = list(spec.submodule_search_locations)[:1]
        parents = name.split(".")[:-1]
        for depth in range(len(parents)):
            package = ModuleType(".".join(parents[: depth + 1]))
            package.__path__ = [str(Path(folder, *parents[1 : depth + 1]))]
            sys.modules.setdefault(package.__name__, package)
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not is_foreign(error.name):
                raise
            pytest.skip(f"this version of {top} has no module {error.name}")

    yield load_module
    for name in [name for name in sys.modules if is_foreign(name)]:
        del sys.modules[name]
    sys.modules.update(before)


class Model(torch.nn.Module):
    """The parameters of the golden deltas, with the loader that inference engines call."""

    def __init__(self):
        super().__init__()
        self.tensors = {name: as_tensor(base) for name, base in bases().items()}

    def load_weights(self, weights):
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)
        return {name for name, _ in weights}


def as_tensor(array):
    """A torch tensor of bfloat16 from an array of ml_dtypes."""
    return torch.from_numpy(array.view("<i2").copy()).view(torch.bfloat16)


def finite_versions():
    """The new versions without the new NaN, which these receivers cannot set."""
    versions = news()
    versions[NAME][5] = 3
    return versions


def written_patches():
    """(name, int32 numbers, values, shape) of each parameter, as torch tensors."""
    pairs = {name: (base, finite_versions()[name]) for name, base in bases().items()}
    deltas = {name: compare_arrays(*pair) for name, pair in pairs.items()}
    shapes = {name: base.shape for name, base in bases().items()}
    for name, indices, values, shape in write_patches(deltas, shapes):
        yield name, torch.from_numpy(indices), as_tensor(values), shape


def assert_new_version(model):
    for name, new in finite_versions().items():
        expected = as_tensor(new).view(torch.int16)
        assert torch.equal(model.tensors[name].view(torch.int16), expected)


def test_vllm_loads_patches(load):
    vllm = load(VLLM)
    model = Model()
    patches = [
        vllm.CheckpointWeightPatch(name, shape, values.dtype, values, indices)
        for name, indices, values, shape in written_patches()
    ]
    assert vllm.load_checkpoint_weight_patches(model, patches) == bases().keys()
    assert_new_version(model)


def test_verl_applies_patches_in_sglang(load):
    encode = load("verl.checkpoint_engine.delta_sync.encode")
    verl = load(VERL)
    patches = list(written_patches())
    positions = torch.cat([indices for _, indices, _, _ in patches]).view(torch.uint8)
    values = torch.cat([values for _, _, values, _ in patches])
    params, start = [], 0
    for name, indices, _, shape in patches:
        end = start + len(indices)
        params.append(
            encode.DeltaParam(name, "bfloat16", list(shape), 4 * start, 4 * end, 4, start, end)
        )
        start = end
    checksum = encode.checksum(positions, values)
    facts = {"params": [dataclasses.asdict(param) for param in params], "checksum": checksum}
    spec = bytearray(json.dumps(facts | {"encoding": "indices"}).encode())
    tensors = {"__positions__": positions, "__values__": values}
    model = Model()
    verl.apply_delta(
        model, [*tensors.items(), ("__delta_spec__", torch.frombuffer(spec, dtype=torch.uint8))]
    )
    assert_new_version(model)


@pytest.fixture
def skyrl(load, tmp_path):
    """SkyRL's module; `tmp_path / "base"` has the base."""
    for name in ("zstandard", "xxhash"):
        if PathFinder.find_spec(name) is None:
            pytest.skip(f"SkyRL's deltas need the package {name}")
    pytest.importorskip("safetensors", reason="SkyRL reads and writes files with it")
    (tmp_path / "base").mkdir()
    save_file(bases(), tmp_path / "base" / "model.safetensors")
    return load(SKYRL)


def test_skyrl_applies_xors_of_checkpoints(skyrl, tmp_path):
    """It has the same compressed XORs and checksums in files with another manifest."""
    pairs = {name: (base, news()[name]) for name, base in bases().items()}
    _, files = write_checkpoint_delta(1, 0, pairs, encoding="xor", checksum_format="xxh3-128")
    [(tensors, checksums)] = files.values()
    version = tmp_path / "published" / "delta-00000001"
    version.mkdir(parents=True)
    save_file(tensors, version / FILE)
    records = [
        skyrl.DeltaTensorRecord(
            name,
            "BF16",
            list(base.shape),
            base.nbytes,
            tensors[name].nbytes,
            FILE,
            name,
            checksums[name],
        )
        for name, base in bases().items()
    ]
    manifest = skyrl.DeltaManifest(1, 0, records, payload_files=[FILE])
    (version / "manifest.json").write_text(json.dumps(manifest.to_json()), encoding="utf-8")
    store = skyrl.LocalCheckpointStore(str(tmp_path / "base"), str(tmp_path / "local"))
    store.fetch(1, sync_dir=str(tmp_path / "published"))
    # SkyRL changes the file in place, so it has the checksums of the base.
    weights = load_file(tmp_path / "local" / "weights" / "model.safetensors", verify=False)
    for name, new in news().items():
        assert weights[name].tobytes() == new.tobytes()


def test_deltas_of_skyrls_publisher_are_read(skyrl, tmp_path):
    publisher = skyrl.DeltaCheckpointPublisher(
        str(tmp_path / "base"), str(tmp_path / "published"), str(tmp_path / "staging")
    )
    source = [(name, as_tensor(new)) for name, new in news().items()]
    publisher.publish(publisher.create_delta_files(source))
    version = tmp_path / "published" / "delta-00000001"
    manifest = json.loads((version / "manifest.json").read_text(encoding="utf-8"))
    records = {record["name"]: record for record in manifest["tensors"]}
    metadata = {
        "version": f"{manifest['version']:06d}",
        "base_version": f"{manifest['base_version']:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": records["model.norm.weight"]["checksum_algorithm"],
    }
    [file] = manifest["payload_files"]
    checksums = {name: record["checksum"] for name, record in records.items()}
    files = {file: (load_file(version / file), checksums)}
    result = read_checkpoint_delta({"metadata": metadata}, files, bases())
    assert load_metadata(version / file) == {}
    check_deltas(result.deltas)
