"""An export has the file names that the program of its other files looks for."""

import numpy as np
import pytest
from checkpoint_kinds import KINDS

import mlstate
from mlstate import CompatibilityError
from mlstate.cli import main
from mlstate.testing import run_ranks

SMALL = ["--max-shard-bytes", "20KB"]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def equal(state, expected):
    torch = pytest.importorskip("torch")
    assert state.keys() == expected.keys()
    return all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, when PEFT loads a model
@pytest.mark.parametrize("options", [[], SMALL], ids=["one file", "several files"])
@pytest.mark.parametrize("kind", ["Hugging Face", "diffusers", "PEFT"])
def test_the_own_library_reads_a_converted_folder(tmp_path, kind, options):
    writer = KINDS[kind]
    for module in writer.modules:
        pytest.importorskip(module)
    if kind == "PEFT":
        options = []
    source, copy = writer.write(tmp_path, 64), tmp_path / "copy"
    assert main(["convert", str(source), str(copy), "--to", "huggingface", *options]) == 0
    names = names_in(copy)
    assert any(name.endswith(".index.json") for name in names) is bool(options)
    assert equal(writer.read(copy), writer.read(source))
    assert mlstate.diff(source, copy).identical


WEIGHTS = {f"w{number}": np.full(5, number, np.float32) for number in range(4)}


@pytest.mark.parametrize(
    ("beside", "stem"),
    [
        ("model.safetensors", "model"),
        ("pytorch_model.bin", "model"),
        ("pytorch_model.bin.index.json", "model"),
        ("model-00001-of-00002.safetensors", "model"),
        ("consolidated.safetensors", "consolidated"),
        ("diffusion_pytorch_model.bin", "diffusion_pytorch_model"),
        ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model"),
        ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model"),
        ("config.json", "model"),
    ],
)
def test_files_have_the_stem_of_the_weights_beside_the_config(tmp_path, beside, stem):
    source = tmp_path / "source"
    source.mkdir()
    (source / beside).write_bytes(b"{}")
    for most, names in (
        ("5GB", [f"{stem}.safetensors"]),
        (40, [f"{stem}-0000{n}-of-00002.safetensors" for n in (1, 2)]),
    ):
        copy = tmp_path / f"copy {most}"
        mlstate.export_huggingface(copy, WEIGHTS, files_from=source, max_shard_bytes=most)
        written = [name for name in names_in(copy) if name.endswith(".safetensors")]
        assert written == names
        assert (copy / f"{stem}.safetensors.index.json").exists() is (len(names) > 1)
        assert mlstate.diff(copy, WEIGHTS).identical
        assert mlstate.verify(copy)


def test_ranks_agree_on_the_names_that_only_the_first_can_see(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "diffusion_pytorch_model.safetensors").write_bytes(b"")

    def export(group):
        layout = mlstate.checkpoint.Layout.rows(2)
        rows = np.full((2, 3), group.rank)
        shard = mlstate.checkpoint.Shard(rows, layout, group.rank, shape=(4, 3))
        own = source if group.rank == 0 else tmp_path / "absent"
        mlstate.export_huggingface(tmp_path / "copy", {"w": shard}, group=group, files_from=own)

    run_ranks(2, export)
    assert names_in(tmp_path / "copy") == ["diffusion_pytorch_model.safetensors"]
    assert mlstate.load(tmp_path / "copy").model["w"][:, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("stem", ["adapter_model", "pytorch_lora_weights"])
def test_an_adapter_that_would_be_several_files_is_refused(tmp_path, stem):
    source = tmp_path / "source"
    source.mkdir()
    (source / f"{stem}.safetensors").write_bytes(b"")
    with pytest.raises(CompatibilityError, match="pass a larger one"):
        mlstate.export_huggingface(
            tmp_path / "copy", WEIGHTS, files_from=source, max_shard_bytes=40
        )
    assert names_in(tmp_path) == ["source"]
