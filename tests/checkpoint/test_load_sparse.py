"""Loading sparse shards: for any layers, the same bits as from plain shards."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint_model import flipped, same
from hypothesis import given, settings
from hypothesis import strategies as st
from index_tables import records_of
from sparse_checkpoint import (
    as_pairs,
    check_reads,
    checksums,
    merged_index,
    sparsen,
    stored_index,
)
from tries import tries

import mlstate
from mlstate import _core
from mlstate.checkpoint import Layout, inspect, load, plan_load, prune, reshard, verify
from mlstate.errors import ChecksumError


def tensors(rng):
    """A state with rows of zeros, zeros of all kinds, and arrays without elements."""
    rows = rng.normal(size=(40, 12)).astype(np.float32)
    rows[rng.random(40) < 0.6] = 0
    flat = rng.integers(0, 256, 700).astype(np.uint8)
    flat[rng.random(700) < 0.5] = 0
    deep = rng.normal(size=(6, 4, 5)).astype(np.float16)
    deep[1:3] = -0.0
    return {
        "rows": rows,
        "flat": flat,
        "deep": deep,
        "zero": np.zeros((9, 30)),
        "none": np.zeros((0, 4), np.int64),
        "one": np.float64(rng.normal()),
    }


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A plain checkpoint of each layout, and its content."""
    base = tmp_path_factory.mktemp("plain")
    state = tensors(np.random.default_rng(1))
    checkpoint = mlstate.save(base / "one", state, {"rows.m": state["rows"] * 2})
    folders = [Path(checkpoint.path)]
    for number, layout in enumerate(("rows", "flat")):
        reshard(checkpoint.path, base / str(number), layout=layout, world_size=3 + number)
        folders.append(base / str(number))
    wide = {key: state[key] for key in ("rows", "deep")}
    mlstate.save(base / "wide", wide)
    for number, layout in enumerate((Layout.axis(1, 2), Layout.axis(1, 2) * Layout.flat(3))):
        target = base / f"wide{number}"
        reshard(base / "wide", target, layout=layout, world_size=layout.parts)
        folders.append(target)
    return folders


@pytest.fixture
def sparse(dense, tmp_path):
    def make(which, seed, share=0.8):
        shutil.rmtree(tmp_path / "sparse", ignore_errors=True)
        shutil.copytree(dense[which], tmp_path / "sparse")
        sparsen(tmp_path / "sparse", seed, share)
        return tmp_path / "sparse"

    return make


@pytest.mark.parametrize("which", range(5))
def test_overlays_load_like_dense_shards(which, dense, sparse):
    before = load(dense[which])
    for seed in range(12):
        folder = sparse(which, seed)
        assert verify(folder).problems == []
        expected = [*before.model.values(), *(before.optimizer or {}).values()]
        for options in ({}, {"verify": False}, {"mmap": True}):
            counts = []
            loaded = load(folder, progress=counts.append, **options)
            same(loaded.model, before.model)
            same(loaded.optimizer or {}, before.optimizer or {})
            # zeros are counted too
            assert "mmap" in options or sum(counts) == sum(array.nbytes for array in expected)


@pytest.mark.parametrize(
    "layout", ["rows", "flat", Layout.axis(1, 4), Layout.axis(1, 2) * Layout.flat(2)]
)
@pytest.mark.parametrize("which", range(5))
def test_parts_of_other_layouts_are_read(which, layout, dense, sparse):
    names = ["rows", "deep"]
    world = 5 if isinstance(layout, str) else layout.parts
    for seed in (100, 101, 102):
        folder = sparse(which, seed)
        for rank in range(world):
            cut = {"rank": rank, "world_size": world, "layout": layout, "names": names}
            same(load(folder, **cut).model, load(dense[which], **cut).model)
            cut["verify"] = False
            same(load(folder, **cut).model, load(dense[which], **cut).model)


@pytest.mark.parametrize("which", range(5))
def test_targets_get_their_zeros(which, dense, sparse):
    before = load(dense[which]).model
    for seed in range(200, 206):
        folder = sparse(which, seed)
        targets, counts = {}, []
        for number, (key, array) in enumerate(before.items()):
            if number % 2 and array.ndim > 1:  # strided
                room = np.full((*array.shape[:-1], 2 * array.shape[-1] + 1), 7, array.dtype)
                targets[key] = room[..., ::2][..., : array.shape[-1]]
            else:
                targets[key] = np.full(array.shape, 7, array.dtype)
        load(folder, into={"model": targets}, progress=counts.append)
        same(targets, before)
        assert sum(counts) == sum(array.nbytes for array in before.values())


@pytest.mark.parametrize("which", [1, 2, 4])
def test_resharding_reads_layers_and_keeps_zeros_out(which, dense, sparse, tmp_path):
    folder = sparse(which, 3)
    resharded = reshard(folder, tmp_path / "again", layout="rows", world_size=2)
    same(load(tmp_path / "again").model, load(dense[which]).model)
    zeros = [t for t in resharded.tensors() if t.key == "zero"]
    assert all(t.stored_nbytes == 0 < t.nbytes for t in zeros)
    assert resharded.stored_nbytes == resharded.nbytes - sum(t.nbytes for t in zeros)
    assert verify(tmp_path / "again").problems == []


def test_plan_load_counts_overlay_bytes(dense, sparse):
    folder = sparse(1, 5, share=1.0)
    listed = plan_load(folder, verify=False)
    before = sum(
        shard.nbytes  # one layer that covers everything: the shard is plain
        if shard.layers is None
        else sum(layer.visible_nbytes for layer in shard.layers)
        for shard in inspect(folder).shards()
    )
    assert listed.nbytes == before


def test_records_locate_overlays(sparse):
    folder = sparse(0, 9, share=1.0)
    checkpoint = inspect(folder)
    index = records_of(json.loads(next((folder / "index").glob("*.json")).read_bytes()))
    records = {(s["section"], s["name"], s.get("state")): s for s in index["shards"]}
    for shard, tensor in zip(checkpoint.shards(), checkpoint.tensors(), strict=True):
        record = records[tensor.section, tensor.parameter, tensor.state]
        if "layers" not in record:
            assert shard.layers is None and shard.offset == record["offset"]
            continue
        layers = record["layers"]
        assert (shard.path, shard.offset, shard.crc32c) == (None, None, None)
        assert [(layer.offset, layer.nbytes, layer.crc32c) for layer in shard.layers] == [
            (layer["offset"], layer["bytes"], layer["crc32c"]) for layer in layers
        ]
        assert shard.stored_nbytes == tensor.stored_nbytes == sum(s["bytes"] for s in layers)
        assert tensor.sparse_shards == 1
    assert checkpoint.stored_nbytes == sum(shard.stored_nbytes for shard in checkpoint.shards())
    assert "stored" in repr(checkpoint)


def test_files_of_all_layers_are_kept(dense, sparse):
    folder = sparse(2, 4, share=1.0)
    needed = {
        layer.path
        for shard in inspect(folder).shards()
        for layer in ([shard] if shard.layers is None else shard.layers)
    }
    prune(folder)
    assert all((folder / path).exists() for path in needed)
    same(load(folder).model, load(dense[2]).model)


# ---- damage ----


def layers_of(folder):
    for shard in inspect(folder).shards():
        for layer in shard.layers or ():
            yield shard, layer


@pytest.mark.parametrize("which", [0, 2])
def test_damage_is_found_in_every_layer(which, sparse):
    folder = sparse(which, 21, share=1.0)
    overlays = list(layers_of(folder))
    assert len(overlays) > 5
    for shard, layer in overlays:
        path = folder / layer.path
        good = path.read_bytes()
        path.write_bytes(flipped(good, layer.offset + layer.nbytes // 2))
        [problem] = verify(folder).problems
        assert (problem.name, problem.part, problem.path) == (shard.key, shard.part, layer.path)
        assert "layer" in problem.text and problem.kind == "altered"
        if layer.visible_nbytes:
            with pytest.raises(ChecksumError) as caught:
                load(folder)
            assert caught.value.name == shard.key
            assert caught.value.path.endswith(layer.path)
        else:
            load(folder)  # no byte of this layer is visible, so it is not read
        path.write_bytes(good)
    assert verify(folder).problems == []


def test_a_lost_layer_is_named(sparse):
    folder = sparse(0, 21, share=1.0)
    shard, layer = next((s, x) for s, x in layers_of(folder) if x.visible_nbytes)
    (folder / layer.path).unlink()
    [problem] = verify(folder).problems
    assert (problem.kind, problem.name, problem.path) == ("missing", shard.key, layer.path)
    with pytest.raises(mlstate.errors.StoreError):
        load(folder)


# ---- random layers ----


@settings(max_examples=tries(60), deadline=None)
@given(st.data())
def test_any_layers_are_painted_in_their_order(tmp_path_factory, data):
    """Compared with a model that applies each layer over the earlier ones."""
    folder = tmp_path_factory.mktemp("any")
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3), label="shape")
    item = data.draw(st.sampled_from([1, 2, 4]), label="item")
    count = int(np.prod(shape))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    model = np.zeros((count, item), np.uint8)
    stored, layers = bytearray(8), []
    for number in range(data.draw(st.integers(0, 16), label="layers")):
        row = data.draw(st.integers(0 if number == 0 else 1, count + 2), label="row")
        rows = np.ones(1, bool) if row == 0 else rng.random(-(-count // row)) < rng.random()
        mask = np.repeat(rows, row or count)[:count]
        if not mask.any():
            continue
        model[mask] = bytes_ = rng.integers(0, 256, (int(mask.sum()), item), dtype=np.uint8)
        layer = {"file": 0, "offset": len(stored), "bytes": bytes_.size}
        layer["crc32c"] = f"{_core.crc32c(bytes_.tobytes()):08x}"
        if row:
            edges = np.flatnonzero(np.diff(np.concatenate(([0], rows, [0]))))
            pairs = np.diff(np.concatenate(([0], edges))).tolist()
            layer.update(row=row, rows=",".join(map(str, pairs)))
        layers.append(layer)
        stored += bytes_.tobytes()
    merged = stored_index(folder, stored, shape, item, layers)
    dtype = {1: np.uint8, 2: np.int16, 4: np.float32}[item]
    begin = data.draw(st.integers(0, count), label="begin")
    end = data.draw(st.integers(begin, count), label="end")
    axis = data.draw(st.integers(0, len(shape) - 1), label="axis")
    cut = Layout.axis(axis, data.draw(st.integers(1, 4), label="parts"))
    check_reads(folder, merged, model.view(dtype).reshape(shape), begin, end, cut)


def test_large_layers_are_read_block_by_block(tmp_path):
    """Several blocks, address ranges and threads; short rows and long runs."""
    rng = np.random.default_rng(4)
    rows, row = 9000, 384
    model = np.zeros((rows, row), np.float32)
    stored, layers = bytearray(8), []
    for share in (1.0, 0.3, 0.02):
        mask = rng.random(rows) < share
        mask[rows // 2 : rows // 2 + 900] |= 0.1 < share < 1
        if share == 1:
            mask[::3] = False
        model[mask] = values = rng.normal(size=(int(mask.sum()), row)).astype(np.float32)
        pairs, _ = as_pairs(mask)
        layer = {"file": 0, "offset": len(stored), "bytes": values.nbytes, "row": row}
        layers.append({**layer, "rows": pairs, **checksums(values.tobytes())})
        stored += values.tobytes()
    merged = stored_index(tmp_path, stored, [rows, row], 4, layers)
    for layout in (Layout.axis(0, 3), Layout.axis(1, 5), Layout.flat(7)):
        check_reads(tmp_path, merged, model, 1000, model.size - 5, layout)
    stored[layers[1]["offset"] + (1 << 20) + 5] ^= 1
    (tmp_path / "params/x.safetensors").write_bytes(stored)
    with pytest.raises(ChecksumError) as caught:
        merged.load(str(tmp_path), 0, ["w"], (None, 0, 0), True, False, None)
    assert caught.value.offset == layers[1]["offset"] + (1 << 20)


@pytest.mark.parametrize("verified", [False, True])
def test_part_zeros_stop_at_the_part_end(verified, tmp_path):
    """One layer of many blocks: bytes stored after a part do not affect it."""
    rng = np.random.default_rng(6)
    state = {"w": rng.normal(size=(4000, 300))}
    state["w"][rng.random(4000) < 0.6] = 0
    mlstate.save(tmp_path / "ckpt", state, sparse=True)
    room = np.empty(2 * state["w"].size)
    for layout in (Layout.flat(3), Layout.axis(0, 3), Layout.axis(0, 2) * Layout.flat(3)):
        for rank in range(layout.parts):
            expected = layout.take(state["w"], rank)
            room[:] = 7
            target = room[: expected.size].reshape(expected.shape)
            cut = {"rank": rank, "world_size": layout.parts, "layout": layout}
            counts = []
            into = {"model": {"w": target}}
            progress = counts.append
            loaded = load(tmp_path / "ckpt", into=into, verify=verified, progress=progress, **cut)
            same(loaded.model, {"w": expected})
            assert (room[expected.size :] == 7).all()
            assert sum(counts) == expected.nbytes


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for memory")
def test_zeros_that_were_never_stored_are_not_touched():
    """A gigabyte of zeros takes no memory until it is accessed."""
    merged = merged_index([1 << 30], 1, [], 8)
    before, counts = resident(), []
    [array] = merged.load(".", 0, ["w"], (None, 0, 0), True, False, counts.append).values()
    assert array.nbytes == sum(counts) == 1 << 30
    assert resident() - before < 1 << 26
    assert not array[:: 1 << 20].any()


def test_more_zeros_than_memory_are_an_error_and_no_crash():
    merged = merged_index([1 << 60], 4, [], 8)
    with pytest.raises(MemoryError):
        merged.load(".", 0, ["w"], (None, 0, 0), True, False, None)
