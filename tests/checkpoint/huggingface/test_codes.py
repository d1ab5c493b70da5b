"""Codes are not values: every conversion of quantized weights uses their scales, or refuses."""

import json
import os
import random

import ml_dtypes
import numpy as np
import pytest
from quantized_layouts import (
    E4M3,
    LAYOUTS,
    PLACES,
    config_files,
    deepseek_v3,
    modelopt_nvfp4,
    mxfp4,
    packed_mxfp4,
    packed_rows,
    spread,
    write_folder,
)

import mlstate
from mlstate.checkpoint import Layout, Shard, export_huggingface, inspect, reshard
from mlstate.cli import main
from mlstate.errors import CompatibilityError, FormatError, MLStateError, TensorNotFoundError
from mlstate.testing import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow", "ignore::mlstate.errors.CheckpointWarning"
)
PARTS = [Layout.rows(2), Layout.axis(1, 3), Layout.flat(3), Layout.axis(1, 2) * Layout.rows(3)]
REFUSALS = (MLStateError, ValueError)


def write_layout(folder, layout, shape=(256, 128), place="top", seed=0):
    """Write a folder of a layout; return its path, and the values of its weight."""
    arrays, values, config = layout(np.random.default_rng(seed), shape)
    others = {"norm": np.arange(6, dtype=np.float32)}
    return write_folder(folder, arrays | others, config_files(config, place)), values


def run(*words):
    """Run a command; return whether it succeeded."""
    return main([str(word) for word in words]) == 0


# ---- every layout, everywhere ----


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_values_of_all_layouts_with_the_entry_anywhere(tmp_path, layout, place):
    folder, values = write_layout(tmp_path / "m", layout, place=place)
    for path in (folder, folder / "model.safetensors"):
        model = mlstate.load(path, cast="float32").model
        assert sorted(model) == ["l.weight", "norm"]
        assert np.array_equal(model["l.weight"], values)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("shape", [(256, 128), (96, 64)])
def test_parts_targets_and_own_checkpoints_of_all_layouts(tmp_path, layout, shape):
    folder, values = write_layout(tmp_path / "m", layout, shape)
    expected = mlstate.load(folder, cast="bfloat16").model["l.weight"]
    assert run("convert", folder, tmp_path / "own")
    reshard(tmp_path / "own", tmp_path / "four", layout="rows", world_size=4)
    for path in (folder, tmp_path / "own", tmp_path / "four"):
        for cut in PARTS:
            for rank in range(cut.parts):
                part = cut.take(values, rank)
                target = {"l.weight": np.zeros(part.shape, np.float32)}
                options = {"layout": cut, "rank": rank, "names": "l.weight"}
                model = mlstate.load(path, cast="float32", **options).model
                assert np.array_equal(model["l.weight"], part)
                del options["names"]
                mlstate.load(path, into={"model": target}, cast=True, strict=False, **options)
                assert np.array_equal(target["l.weight"], part)
    for name in ("export", "plain"):
        source = tmp_path / "own" if name == "plain" else folder
        words = ["convert", source, tmp_path / name, "--dtype", "bf16"]
        assert run(*words, *(["--to", "huggingface"] if name == "export" else []))
        model = mlstate.load(tmp_path / name).model
        assert model["l.weight"].tobytes() == expected.tobytes() and len(model) == 2
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config == {"dtype": "bfloat16"}
    assert inspect(tmp_path / "plain").quantization is None
    assert "weight" in inspect(tmp_path / "four").quantization


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.__name__)
def test_codes_in_memory_are_refused_with_their_scales(tmp_path, layout):
    folder, _ = write_layout(tmp_path / "m", layout)
    state = mlstate.load_file(folder / "model.safetensors")
    with pytest.raises(CompatibilityError, match=r"quantized \(its scales? (is|are) .*cast="):
        state.astype("bfloat16")
    for files_from in (None, folder):
        with pytest.raises(CompatibilityError, match="quantized"):
            export_huggingface(tmp_path / "e", state, dtype="bfloat16", files_from=files_from)
    assert not (tmp_path / "e").exists()
    mlstate.save(tmp_path / "own", state)
    for path in (state, tmp_path / "own"):
        with pytest.raises(CompatibilityError, match="a tolerance is of values"):
            mlstate.diff(path, changed(state), rtol=0.1)
    mlstate.save(tmp_path / "changed", changed(state))
    words = ["diff", tmp_path / "own", tmp_path / "changed"]
    assert main([*map(str, words)]) == 1
    assert main([*map(str, words), "--rtol", "0.1"]) == 2


def changed(state):
    """Return a copy of a state whose codes differ."""
    codes = {name for name in state if "scale" not in name and name not in ("norm", "scaled_fp8")}
    copies = {name: array.copy() for name, array in state.items()}
    for name in codes:
        copies[name].view(np.uint8)[0] ^= 1
    return copies


# ---- refusals, and other targets ----


def small(**arrays):
    codes = np.full((4, 4), 2, E4M3)
    named = {name.replace("__", "."): array for name, array in arrays.items()}
    return {"l.weight": codes, "norm": np.ones(2)} | named


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (small(l__weight_shift_scale=np.ones(1)), "'l.weight_shift_scale'"),
        (small(l__pre_quant_scale=np.ones(4), l__weight_scale=np.ones(1)), "pre_quant_scale"),
        (small(l__weight_scale=np.ones(1), l__scale=np.ones(1)), "'l.weight_scale', 'l.scale'"),
        (small(l__weight_scale=np.ones((3, 1))), r"\(3, 1\) instead of \(4, 1\) or \(1, 1\)"),
        (small(l__weight_scale=np.ones(1), l__weight_scale_2=np.ones(1)), "two scales"),
        (small(l__weight_scale=np.ones(1), l__weight_zero_point=np.ones(1)), "zero points"),
        (small(l__input_scale=np.ones(1), m__weight=np.ones((2, 2), E4M3),
               m__weight_scale=np.ones(1)), "'l.weight_scale', its scale, is missing"),
        ({"a._weight_qdata": np.ones((4, 4), E4M3), "a._weight_scale": np.ones((4, 1))},
         "'a._weight_scale'"),
        ({"a.qweight": np.ones((2, 8), np.int32), "a.scales": np.ones((1, 8))}, "gptq or awq"),
        ({"a.q_weight": np.ones((2, 8), np.int32), "a.q_scale": np.ones(2)}, "exl2"),
        ({"a.weight": np.ones((2, 8), np.int8), "a.SCB": np.ones(2, np.float32)}, "bitsandbytes"),
        ({"a.weight_packed": np.ones((2, 8), np.int32), "a.weight_scale": np.ones((2, 1))},
         "int32 packs"),
        ({"a.weight": np.ones((8, 8), np.uint8), "a.weight_scale": np.ones(1)}, "of float64"),
    ],
)  # fmt: skip
def test_unknown_scales_are_refused_and_named(tmp_path, arrays, text):
    mlstate.save_file(arrays, tmp_path / "m.safetensors")
    with pytest.raises((FormatError, CompatibilityError), match=text):
        mlstate.load(tmp_path / "m.safetensors", cast="float32")
    assert list(mlstate.load(tmp_path / "m.safetensors").model) == sorted(arrays)


@pytest.mark.parametrize("place", ["tensor", "metadata"])
def test_tiles_of_comfyui_are_refused(tmp_path, place):
    arrays, _, _ = LAYOUTS[7](np.random.default_rng(0), (128, 64))
    mark = {"a": "1"} if place == "tensor" else {"_quantization_metadata": '{"layers": {}}'}
    if place == "tensor":
        arrays["l.comfy_quant"] = np.frombuffer(b'{"format": "nvfp4"}', np.uint8)
    mlstate.save_file(arrays, tmp_path / "m.safetensors", metadata=mark)
    with pytest.raises(FormatError, match="scales of small blocks in tiles"):
        mlstate.load(tmp_path / "m.safetensors", cast="float32")


def test_floats_of_8_bits_without_scales_are_converted_by_value(tmp_path):
    arrays = {"l.weight": np.full((4, 4), 2, E4M3), "logit_scale": np.ones(1, np.float32)}
    mlstate.save_file(arrays, tmp_path / "m.safetensors")
    assert mlstate.load(tmp_path / "m.safetensors", cast="float32").model["l.weight"][0, 0] == 2
    target = {"l.weight": np.zeros((4, 4), ml_dtypes.bfloat16), "logit_scale": np.zeros(1)}
    mlstate.load(tmp_path / "m.safetensors", into={"model": target}, cast=True)
    assert target["l.weight"][0, 0] == 2 and target["logit_scale"] == 1
    assert mlstate.StateDict(arrays).astype("float16")["l.weight"][0, 0] == 2


def test_a_file_of_a_set_without_its_scales_is_refused(tmp_path):
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    mlstate.save_file({"l.weight": np.full((4, 4), 2, E4M3)}, tmp_path / names[0])
    mlstate.save_file({"l.weight_scale": np.full(1, 0.25, np.float32)}, tmp_path / names[1])
    assert mlstate.load(tmp_path, cast="float32").model["l.weight"][0, 0] == 0.5
    with pytest.raises(CompatibilityError, match="other files have the scales"):
        mlstate.load(tmp_path / names[0], cast="float32")


def test_shards_receive_their_part_of_the_values(tmp_path):
    folder, values = write_layout(tmp_path / "m", LAYOUTS[0])
    for index in range(2):
        shard = Shard(np.zeros((128, 128), np.float32), Layout.rows(2), index, shape=(256, 128))
        options = {"layout": "rows", "rank": 1, "world_size": 2, "strict": False, "cast": True}
        if index == 1:
            mlstate.load(folder, into={"model": {"l.weight": shard}}, **options)
            assert np.array_equal(shard.array, values[128:])
        else:
            with pytest.raises(CompatibilityError, match=r"part 0 of .* load reads part 1 of"):
                mlstate.load(folder, into={"model": {"l.weight": shard}}, **options)


def test_targets_of_codes_receive_codes_and_scales(tmp_path):
    codes, scale = np.full((4, 4), 2, E4M3), np.full(1, 0.25, np.float32)
    mlstate.save_file({"a.weight": codes, "a.weight_scale": scale}, tmp_path / "m.safetensors")
    target = {"a.weight": np.zeros((4, 4), E4M3), "a.weight_scale": np.zeros(1)}
    mlstate.load(tmp_path / "m.safetensors", into={"model": target}, cast=True)
    assert np.array_equal(target["a.weight"], codes) and target["a.weight_scale"] == 0.25
    wrong = {"a.weight": np.zeros((4, 5), np.float32)}
    with pytest.raises(CompatibilityError, match=r"size mismatch for a\.weight"):
        mlstate.load(tmp_path / "m.safetensors", into={"model": wrong}, cast=True)
    with pytest.raises(CompatibilityError, match="into= and cast=True computes values"):
        mlstate.state.load_into({"a.weight": np.zeros((4, 4))}, {"a.weight": codes})


@pytest.mark.parametrize("layout", [deepseek_v3, packed_mxfp4, mxfp4], ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_renamed", [False, True])
def test_names_choose_values_by_stored_and_decoded_names(tmp_path, layout, is_renamed):
    folder, values = write_layout(tmp_path / "m", layout)
    layer, rules = ("a", {"l.": "a."}) if is_renamed else ("l", None)
    codes = next(n for n in mlstate.load(folder).model if n.endswith(("_packed", "_blocks", "ht")))
    scale = next(n for n in mlstate.load(folder).model if n.startswith("l.") and n != codes)
    codes, scale, value = (name.replace("l.", f"{layer}.") for name in (codes, scale, "l.weight"))
    for names in (value, codes, layer, [codes, value], f"{value}*", [f"{layer}.*", "norm"]):
        target = {value: np.zeros_like(values), "norm": np.zeros(6, np.float32)}
        options = {"into": {"model": target}, "cast": True, "rename": rules}
        mlstate.load(folder, names=names, **options)
        assert np.array_equal(target[value], values)
        assert target["norm"].any() == ("norm" in names)
    target[value][:] = 0
    for names in ([value, "l.weigth"], f"{value}x*"):
        with pytest.raises(TensorNotFoundError):
            mlstate.load(folder, names=names, **options)
    for names in (scale, ["norm", scale], [f"*{scale[1:]}"]):  # the target has no scale
        with pytest.raises(CompatibilityError, match=f"Unexpected.*{scale}"):
            mlstate.load(folder, names=names, **options)
    assert not target[value].any()
    if codes != value:
        raw = mlstate.load(folder, rename=rules).model
        raw = {name: np.zeros_like(array) for name, array in raw.items()}
        with pytest.raises(CompatibilityError, match=f"Unexpected.*{value}"):
            mlstate.load(folder, names=value, into={"model": raw}, cast=True, rename=rules)
        assert not any(array.view(np.uint8).any() for array in raw.values())


@pytest.mark.parametrize("scale", ["scale", "weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("dtype", ["i1", "u1"])
def test_a_part_of_rows_has_the_scales_of_its_rows(tmp_path, scale, dtype):
    scales = np.arange(16, dtype=np.float32).reshape(16, 1)
    mlstate.save(tmp_path / "c", {"l.weight": np.ones((16, 8), dtype), f"l.{scale}": scales})
    part = {"rank": 1, "world_size": 2, "layout": "rows"}
    target = {"l.weight": np.zeros((8, 8), dtype), f"l.{scale}": np.zeros((8, 1), np.float32)}
    mlstate.load(tmp_path / "c", into={"model": target}, **part)
    loaded = mlstate.load(tmp_path / "c", **part).model
    assert np.array_equal(loaded[f"l.{scale}"], scales[8:])
    assert np.array_equal(target[f"l.{scale}"], scales[8:]) and target["l.weight"].all()


def test_decoded_weights_in_one_memory_are_refused(tmp_path):
    arrays = {name: np.full((4, 4), 2, E4M3) for name in ("a.weight", "b.weight")}
    arrays |= {f"{name}_scale": np.full(1, 0.25, np.float32) for name in arrays}
    mlstate.save_file(arrays, tmp_path / "m.safetensors")
    array = np.zeros((4, 4), np.float32)
    with pytest.raises(CompatibilityError, match="are one memory"):
        mlstate.load(
            tmp_path / "m.safetensors",
            into={"model": {"a.weight": array, "b.weight": array}},
            cast=True,
        )
    assert not array.any()


def test_modules_receive_values(tmp_path, torch):
    folder, values = write_layout(tmp_path / "m", LAYOUTS[0])
    module = torch.nn.Module()
    module.l = torch.nn.Linear(128, 256, bias=False, dtype=torch.bfloat16)
    module.norm = torch.nn.Parameter(torch.zeros(6))
    mlstate.load(folder, into=module, cast=True)
    assert torch.equal(module.l.weight, torch.from_numpy(values).bfloat16())


def test_named_states_are_decoded(tmp_path):
    codes = small(l__weight_scale=np.full(1, 0.25, np.float32))
    mlstate.save(tmp_path / "own", {"w": np.ones(2)}, states={"ema": codes})
    loaded = mlstate.load(tmp_path / "own", cast="float32").states["ema"]
    assert loaded["l.weight"][0, 0] == 0.5 and "l.weight_scale" not in loaded
    assert run("convert", tmp_path / "own", tmp_path / "own.pt")
    loaded = mlstate.load(tmp_path / "own.pt", cast="float32").states["ema"]
    assert loaded["l.weight"][0, 0] == 0.5 and "l.weight_scale" not in loaded


# ---- the entry ----


def test_entries_follow_the_written_codes(tmp_path):
    folder, values = write_layout(tmp_path / "m", LAYOUTS[0], (200, 130), "text_config")
    formats = ["own", "a.safetensors", "b.npz", "own2", "hf"]
    for source, target in zip([folder.name, *formats], formats, strict=False):
        words = ["convert", tmp_path / source, tmp_path / target]
        assert run(*words, *(["--to", "huggingface"] if target == "hf" else []))
        model = mlstate.load(tmp_path / target, cast="float32").model
        assert np.array_equal(model["l.weight"], values)
    entry = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert entry == {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tuned = mlstate.load(folder, cast="bfloat16").model
    export_huggingface(tmp_path / "tuned", tuned, files_from=folder)
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert config == {"dtype": "bfloat16", "text_config": {}}
    config = {"text_config": {"quantization_config": entry}}
    (folder / "config.json").write_text(json.dumps(config))
    export_huggingface(tmp_path / "same", mlstate.load(folder).model, files_from=folder)
    assert (tmp_path / "same" / "config.json").read_text() == (folder / "config.json").read_text()


@pytest.mark.parametrize("layout", [LAYOUTS[6], LAYOUTS[8]], ids=["modelopt", "mistral"])
def test_entries_of_other_files_go_with_the_codes(tmp_path, layout):
    folder, _ = write_layout(tmp_path / "m", layout, place="file")
    assert run("convert", folder, tmp_path / "e", "--to", "huggingface", "--dtype", "bf16")
    assert not (tmp_path / "e" / "hf_quant_config.json").exists()
    if (folder / "params.json").exists():
        assert json.loads((tmp_path / "e" / "params.json").read_text()) == {"dim": 8}
    assert run("convert", folder, tmp_path / "same", "--to", "huggingface")
    for path in folder.glob("*.json"):
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes()


def test_manifests_without_the_entry_keep_their_bytes(tmp_path):
    mlstate.save(tmp_path / "own", {"w": np.ones(2)})
    assert "quantization_config" not in (tmp_path / "own" / "manifest.json").read_text()


def test_a_code_without_its_scale_is_not_exported(tmp_path):
    folder, _ = write_layout(tmp_path / "m", LAYOUTS[0])
    state = mlstate.load(folder, names="l.weight").model
    with pytest.raises(CompatibilityError, match=r"'l\.weight' is quantized.*no scale"):
        export_huggingface(tmp_path / "e", state, dtype="bfloat16", files_from=folder)
    assert not (tmp_path / "e").exists()


def test_different_entries_are_refused(tmp_path):
    folder, _ = write_layout(tmp_path / "m", LAYOUTS[0])
    fp8 = {"quant_method": "fp8"}
    config = {"quantization_config": fp8 | {"x": 1}, "text_config": {"quantization_config": fp8}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CompatibilityError, match="several different entries"):
        mlstate.load(folder, cast="float32")


# ---- parts without cast= ----


def test_scales_of_touched_blocks_come_with_a_part(tmp_path):
    arrays = {"l.weight": np.ones((300, 256), E4M3)}
    arrays["l.weight_scale_inv"] = np.arange(6, dtype=np.float32).reshape(3, 2)
    arrays |= {"g.weight": np.ones((4, 4), E4M3), "g.weight_scale": np.ones(1, np.float32)}
    arrays |= {"g.weight_g_idx": np.arange(4), "g.weight_shape": np.array([4, 4])}
    arrays |= {"g.input_scale": np.ones(1, np.float32), "a.k_scale": np.ones(1, np.float32)}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = write_folder(tmp_path / "m", arrays, {"config.json": {"quantization_config": config}})
    for rank, (begin, end) in enumerate([(0, 2), (1, 3)]):
        part = mlstate.load(folder, layout="rows", rank=rank, world_size=2).model
        assert part["l.weight"].shape == (150, 256)
        expected = arrays["l.weight_scale_inv"][begin:end]
        assert np.array_equal(part["l.weight_scale_inv"], expected)
        for name in arrays.keys() - {"l.weight", "l.weight_scale_inv", "g.weight"}:
            assert np.array_equal(part[name], arrays[name])


def test_scales_of_unknown_blocks_come_whole(tmp_path):
    scales = np.arange(2, dtype=np.float32).reshape(2, 1)  # of blocks of 80 or 128 rows
    arrays = {"l.weight": np.ones((160, 64), E4M3), "l.weight_scale_inv": scales}
    mlstate.save_file(arrays, tmp_path / "m.safetensors")
    part = mlstate.load(tmp_path / "m.safetensors", layout="rows", rank=1, world_size=2).model
    assert np.array_equal(part["l.weight_scale_inv"], scales)


def test_packed_integers_have_several_scales(tmp_path):
    arrays = {"l.qweight": np.ones((128, 6), np.int32), "l.qzeros": np.ones((2, 6), np.int32)}
    arrays |= {"l.scales": np.arange(96.0).reshape(2, 48)}  # AWQ packs 8 columns
    arrays |= {"p.weight_packed": np.ones((64, 16), np.int32)}  # compressed-tensors
    arrays |= {"p.weight_scale": np.arange(64.0).reshape(64, 1)}
    arrays |= {"p.weight_zero_point": np.arange(8, dtype=np.int32).reshape(8, 1)}
    mlstate.save_file(arrays, tmp_path / "m.safetensors")
    for rank in range(3):
        for cut in (Layout.rows(3), Layout.axis(1, 3)):
            part = mlstate.load(tmp_path / "m.safetensors", layout=cut, rank=rank).model
            columns = cut.take(np.arange(6)[None].repeat(128, 0), rank)[0]
            groups = np.unique(cut.take(np.arange(128)[:, None].repeat(6, 1) // 64, rank))
            expected = arrays["l.scales"].reshape(2, 6, 8)[groups][:, columns]
            assert np.array_equal(part["l.scales"], expected.reshape(len(groups), -1))
            assert part["l.qzeros"].shape == (len(groups), len(columns))
            rows = cut.take(np.arange(64)[:, None].repeat(16, 1), rank)[:, 0]
            assert np.array_equal(part["p.weight_scale"], arrays["p.weight_scale"][rows])
            zero_points = arrays["p.weight_zero_point"][np.unique(rows // 8)]
            assert np.array_equal(part["p.weight_zero_point"], zero_points)


def test_groups_of_gptq_come_with_a_part(tmp_path):
    arrays = {"l.qweight": np.ones((16, 8), np.int32), "l.g_idx": np.arange(128, dtype=np.int32)}
    arrays |= {"l.scales": np.arange(16.0).reshape(2, 8), "l.qzeros": np.ones((2, 1), np.int32)}
    config = {"quant_method": "gptq", "desc_act": False}
    folder = write_folder(tmp_path / "m", arrays, {"config.json": {"quantization_config": config}})
    part = mlstate.load(folder, layout="rows", rank=2, world_size=4).model
    assert part["l.qweight"].shape == (4, 8) and part["l.g_idx"].shape == (128,)
    assert np.array_equal(part["l.scales"], arrays["l.scales"][1:])
    assert part["l.qzeros"].shape == (1, 1)
    config = {"quantization_config": config | {"desc_act": True}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CompatibilityError, match="gptq with desc_act have no parts"):
        mlstate.load(folder, layout="rows", rank=2, world_size=4)
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "exl2"}}')
    with pytest.raises(CompatibilityError, match="exl2 have no parts"):
        mlstate.load(folder, layout="rows", rank=2, world_size=4)


# ---- random folders ----


class _Journey:
    """One random folder, and the results of commands on it."""

    def __init__(self, folder, seed):
        self.random = random.Random(seed)
        self.folder, self.number = folder, 0
        layout = self.random.choice(LAYOUTS)
        shape = self.random.choice([(64, 32), (32, 96), (96, 64), (160, 256), (129, 64)])
        place = self.random.choice(PLACES)
        self.path, values = write_layout(folder / "m", layout, shape, place, seed)
        self.values = values
        self.text = f"seed {seed}: {layout.__name__} {shape} {place}"
        if self.random.random() < 0.3:
            self.path = self.path / "model.safetensors"

    def step(self):
        """Copy the last path by a random command."""
        self.number += 1
        target = self.folder / f"t{self.number}"
        kind = self.random.choice(["own", "reshard", "huggingface", "safetensors", "npz", "memory"])
        self.text += f" {kind}"
        if kind == "reshard":
            reshard(self.path, target, layout="rows", world_size=self.random.choice([2, 3]))
        elif kind == "memory":
            mlstate.save(target, mlstate.load(self.path).model, layout=self.random.choice([None]))
        elif kind == "huggingface":
            assert run("convert", self.path, target, "--to", "huggingface")
        else:
            target = target.with_suffix("" if kind == "own" else f".{kind}")
            assert run("convert", self.path, target)
        self.path = target

    def judge(self):
        """Compare a random conversion of the last path with the values."""
        dtype = self.random.choice(["float32", "bfloat16", "float64"])
        expected = self.values.astype(getattr(ml_dtypes, dtype, dtype))
        kind = self.random.choice(["load", "part", "into", "convert", "export"])
        self.text += f" {kind} {dtype}"
        cut, target = Layout(), self.folder / "end"
        if kind in ("part", "into"):
            cut = self.random.choice(PARTS)
        options = {"layout": cut, "rank": self.random.randrange(cut.parts)} if cut.steps else {}
        expected = cut.take(expected, options.get("rank", 0))
        if kind == "into":
            model = {"l.weight": np.zeros_like(expected)}
            mlstate.load(self.path, into={"model": model}, cast=True, strict=False, **options)
        elif kind in ("convert", "export"):
            words = ["--to", "huggingface"] if kind == "export" else []
            if not run("convert", self.path, target, "--dtype", dtype, *words):
                return "refused"
            model = mlstate.load(target, cast=dtype).model
            assert "quantization_config" not in str(
                [path.read_text() for path in target.glob("*.json")]
            )
        else:
            model = mlstate.load(self.path, cast=dtype, **options).model
        values = model["l.weight"]
        assert values.dtype == expected.dtype and np.array_equal(values, expected), self.text
        return "right"


def test_random_folders_have_their_values_or_are_refused(tmp_path, capsys):
    # all: MLSTATE_RANDOM_FOLDERS=3000
    count = int(os.environ.get("MLSTATE_RANDOM_FOLDERS", "60"))
    ends = {"right": 0, "refused": 0}
    for seed in range(count):
        folder = tmp_path / str(seed)
        folder.mkdir()
        journey = _Journey(folder, seed)
        try:
            for _ in range(journey.random.choice([0, 1, 1, 2, 3])):
                journey.step()
            ends[journey.judge()] += 1
        except REFUSALS as error:
            journey.text += f": {error}"
            ends["refused"] += 1
        except AssertionError as error:
            raise AssertionError(journey.text) from error
        capsys.readouterr()
    assert ends["right"] > count * 0.75, ends


# ---- targets of parts without cast= ----

CUTS = [Layout.rows(2), Layout.rows(3), Layout.axis(1, 3), Layout.flat(2), Layout.rows(1)]
# Indices of codes that share a scale.
BLOCKS = {deepseek_v3: (128, 128), packed_rows: (1, 160), packed_mxfp4: (1, 16),
          modelopt_nvfp4: (1, 8)}  # fmt: skip


def zeros(state, kind):
    """Return arrays of zeros like the arrays of a state, and targets of a kind in their memory."""
    arrays = {name: np.zeros_like(each) for name, each in state.items()}
    return arrays, mlstate.StateDict(arrays).to_torch() if kind == "torch" else arrays


def contents(state):
    return {name: (each.shape, each.tobytes()) for name, each in state.items()}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.__name__)
def test_targets_of_parts_receive_the_scales_of_their_blocks(tmp_path, request, layout, kind):
    if kind == "torch":
        request.getfixturevalue("torch")
    folder, _ = write_layout(tmp_path / "m", layout, (416, 160))
    assert run("convert", folder, tmp_path / "own")
    arrays = mlstate.load(folder).model
    for path in (folder, folder / "model.safetensors", tmp_path / "own"):
        for cut in CUTS:
            for rank in range(cut.parts):
                part = mlstate.load(path, layout=cut, rank=rank).model
                received, into = zeros(part, kind)
                mlstate.load(path, into={"model": into}, layout=cut, rank=rank)
                assert contents(received) == contents(part)
                if layout in BLOCKS and cut != Layout.flat(2):
                    scale = next(n for n in arrays if n.endswith(("weight_scale", "_scale_inv")))
                    codes = next(n for n in arrays if n.endswith(("weight", "_packed")))
                    order = np.arange(arrays[scale].size).reshape(arrays[scale].shape)
                    owners = spread(order, arrays[codes].shape, BLOCKS[layout])
                    expected = arrays[scale].reshape(-1)[np.unique(cut.take(owners, rank))]
                    assert received[scale].tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("source", ["file", "checkpoint"])
def test_targets_of_other_scales_than_the_part_needs_are_refused(tmp_path, request, source, kind):
    if kind == "torch":
        request.getfixturevalue("torch")
    scales = np.arange(4, dtype=np.float32).reshape(2, 2)
    state = {"l.weight": np.ones((256, 256), E4M3), "l.weight_scale_inv": scales}
    state |= {"bias": np.ones(8, np.float32)}
    path = tmp_path / "m.safetensors"
    if source == "file":
        mlstate.save_file(state, path)
    else:
        path = mlstate.save(tmp_path / "c", state).path
    for cut in (Layout.rows(4), Layout.rows(3)):
        for rank in range(cut.parts):
            part = mlstate.load(path, layout=cut, rank=rank).model
            for shape in [(0, 2), (1, 2), (2, 2), (1, 1), (2,)]:
                received, into = zeros(part | {"l.weight_scale_inv": np.zeros(shape, "f4")}, kind)
                if shape == part["l.weight_scale_inv"].shape:
                    mlstate.load(path, into={"model": into}, layout=cut, rank=rank)
                    assert contents(received) == contents(part)
                    continue
                with pytest.raises(CompatibilityError, match=r"weight_scale_inv'.* target") as info:
                    mlstate.load(path, into={"model": into}, layout=cut, rank=rank)
                assert info.value.name == "l.weight_scale_inv" and str(shape) in str(info.value)
                assert not any(map(np.any, received.values()))
    received, into = zeros(part | {"l.weight_scale_inv": scales[1:].astype("f2")}, kind)
    with pytest.raises(CompatibilityError, match="float16"):
        mlstate.load(path, into={"model": into}, layout=cut, rank=2)
    for value in into.values():
        value[:] = 1
    mlstate.load(path, into={"model": into}, layout=cut, rank=2, cast=True)
    assert np.array_equal(received["l.weight_scale_inv"], scales[1:])


def test_tied_targets_beside_scales_of_several_blocks(tmp_path):
    scales = np.arange(4, dtype=np.float32).reshape(2, 2)
    state = {
        "w": np.ones((256, 256), E4M3),
        "w_scale_inv": scales,
        "x": np.ones(4),
        "y": np.ones(4),
    }
    mlstate.save(tmp_path / "c", state)
    part = {"layout": "rows", "rank": 2, "world_size": 4}
    _, into = zeros(mlstate.load(tmp_path / "c", **part).model, "numpy")
    into["y"] = into["x"]
    mlstate.load(tmp_path / "c", into={"model": into}, **part)
    assert into["x"].all() and np.array_equal(into["w_scale_inv"], scales[1:])
    into |= {"u": into["w_scale_inv"]}
    mlstate.save(tmp_path / "u", state | {"u": np.ones((4, 2), np.float32)})
    with pytest.raises(CompatibilityError, match="are one memory, and values or"):
        mlstate.load(tmp_path / "u", into={"model": into}, **part)


def test_shards_of_scales_are_the_part_that_the_codes_need(tmp_path):
    scales = np.arange(4, dtype=np.float32).reshape(2, 2)
    mlstate.save(tmp_path / "c", {"w": np.ones((256, 256), E4M3), "w_scale_inv": scales})
    codes = np.zeros((64, 256), E4M3)
    for layout, rank, rows, fits in [
        (Layout.rows(2), 1, [1], True),
        (Layout.rows(2), 0, [0], False),
        (Layout.rows(4), 2, [], False),
        (Layout.whole(), 0, [0, 1], False),
    ]:
        shard = Shard(np.zeros((len(rows), 2), np.float32), layout, rank, shape=(2, 2))
        into = {"w": Shard(codes, Layout.rows(4), 2, shape=(256, 256)), "w_scale_inv": shard}
        options = {"into": {"model": into}, "layout": "rows", "rank": 2, "world_size": 4}
        if fits:
            mlstate.load(tmp_path / "c", **options)
            assert np.array_equal(shard.array, scales[rows])
            continue
        with pytest.raises(CompatibilityError, match=r"w_scale_inv.*shape"):
            mlstate.load(tmp_path / "c", **options)


@pytest.mark.parametrize("rows", [256, 192])
def test_parts_as_they_were_saved_have_the_scales_of_their_blocks(tmp_path, rows):
    def saved(rank):
        shape, scales = (rows, 64), np.arange(2, dtype="f4").reshape(2, 1)
        codes = np.full((rows // 2, 64), rank + 1, E4M3)
        codes = Shard(codes, Layout.rows(2), rank, shape=shape)
        own_scale = Shard(scales[rank : rank + 1], Layout.rows(2), rank, shape=(2, 1))
        return {"v": codes, "v_scale": scales, "w": codes, "w_scale": own_scale}

    def work(group):
        mlstate.save(tmp_path / "c", saved(group.rank), group=group)
        parts = {name: getattr(each, "array", each) for name, each in saved(group.rank).items()}
        received, into = zeros(parts, "numpy")
        loaded = mlstate.load(tmp_path / "c", rank=group.rank, world_size=2).model
        if rows == 256:
            mlstate.load(tmp_path / "c", into={"model": into}, group=group)
            assert contents(received) == contents(parts) == contents(loaded)
        else:  # blocks of 96 rows, or of 128
            with pytest.raises(
                CompatibilityError, match=r"'w_scale', which has the shape \(2, 1\)"
            ):
                mlstate.load(tmp_path / "c", into={"model": into}, group=group)
            assert loaded["w_scale"].shape == (2, 1)

    run_ranks(2, work)
    reshard(tmp_path / "c", tmp_path / "three", layout="rows", world_size=3)
    for rank in range(3):
        part = mlstate.load(tmp_path / "three", rank=rank, world_size=3).model
        first, last = 86 * rank // 128, -(-min(86 * (rank + 1), 256) // 128)
        blocks = slice(first, last) if rows == 256 else slice(0, 2)
        assert np.array_equal(part["w_scale"], np.arange(2)[blocks, None])
