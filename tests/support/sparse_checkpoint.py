"""Checkpoints with sparse shards, made from plain ones by the rules of docs/format_shards.md.

The package does not choose the layers; random numbers do, so that a reader sees layers that our
writer would not write.
"""

import json
from pathlib import Path

import numpy as np
from index_tables import PLACE, records_of, tables_of
from json_checksums import text_with_checksum

from mlstate import _core

BLOCK = 1 << 20
SIZES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I64": 8, "U8": 1, "BOOL": 1, "I8": 1, "I16": 2}


def checksums(data):
    """The members of a record that are checksums."""
    blocks = [f"{_core.crc32c(data[at : at + BLOCK]):08x}" for at in range(0, len(data), BLOCK)]
    fields = {"crc32c": f"{_core.crc32c(data):08x}"}
    return {**fields, "blocks": "".join(blocks)} if len(blocks) > 1 else fields


def as_pairs(rows):
    """The rows of a layer, as an index lists them, and as ranges."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], rows.astype(np.int8), [0]))))
    begins, ends = edges[::2], edges[1::2]
    skips = begins - np.concatenate(([0], ends[:-1]))
    pairs = np.column_stack((skips, ends - begins)).ravel().tolist()
    return ",".join(map(str, pairs)), list(zip(begins.tolist(), ends.tolist(), strict=True))


class Layers:
    """Random layers that together contain given bytes."""

    def __init__(self, data, item, rng):
        self.rng = rng
        self.item = item
        self.data = np.frombuffer(data, np.uint8).reshape(-1, item)
        self.layers = []  # the rows and bytes of each layer
        count = len(self.data)
        if count == 0:
            return
        nonzero = self.data.any(axis=1)
        covered = np.zeros(count, bool)
        if rng.random() < 0.3:
            self._add(0, np.ones(count, bool))
            covered[:] = True
        for _ in range(rng.integers(0, 5)):
            row = int(rng.integers(1, max(2, min(count, 40))))
            mask = self._rows(row, count, rng.random(-(-count // row)) < rng.random())
            covered |= self._add(row, mask)
        lacking = nonzero & ~covered
        if lacking.any():
            row = int(rng.integers(1, 9))
            rows = np.add.reduceat(lacking, np.arange(0, count, row)) > 0
            self._add(row, self._rows(row, count, rows))
        self._hide()

    def _rows(self, row, count, rows):
        return np.repeat(rows, row)[:count]

    def _add(self, row, mask):
        if mask.any():
            self.layers.append([row, mask, self.data[mask].copy()])
        return mask

    def _hide(self):
        """Bytes that a later layer also holds may have any value in an earlier one."""
        later = np.zeros(len(self.data), bool)
        for _, mask, data in reversed(self.layers):
            data[later[mask]] = self.rng.integers(1, 256, self.item, dtype=np.uint8)
            later |= mask

    def write(self, folder, name, dtype, files):
        """Write each layer to a separate file; return the layers for the index."""
        records = []
        for number, (row, mask, data) in enumerate(self.layers):
            path = f"{name}-{number}.safetensors"
            data = data.tobytes()
            offset = store(folder / path, data, "U8" if row else dtype, files, path)
            layer = {"file": len(files) - 1, "offset": offset, "bytes": len(data)}
            layer.update(checksums(data))
            if row:
                rows = mask[::row]
                layer.update(row=row, rows=as_pairs(rows)[0])
            records.append(layer)
        return records


def store(path, data, dtype, files, listed_path):
    """Write a shard file with one tensor; return the offset of its bytes."""
    count = len(data) // SIZES[dtype]
    checksums_of_data = checksums(data)
    metadata = {
        "mlstate.blocks.crc32c": checksums_of_data.get("blocks", checksums_of_data["crc32c"]),
        "mlstate.header.crc32c": "0" * 8,
    }
    tensor = {"dtype": dtype, "shape": [count], "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": metadata, "w": tensor}).encode()
    header = header.ljust(504)
    start = len(header).to_bytes(8, "little") + header
    crc = f"{_core.crc32c(start):08x}"
    start = start.replace(
        b'"mlstate.header.crc32c": "00000000"', (f'"mlstate.header.crc32c": "{crc}"'.encode())
    )
    path.write_bytes(start + data)
    files.append({"path": listed_path, "bytes": len(start) + len(data), "header_crc32c": crc})
    return len(start)


def bytes_of(folder, index, shard):
    with (folder / index["files"][shard["file"]]["path"]).open("rb") as file:
        file.seek(shard["offset"])
        return file.read(shard["bytes"])


def index_path(manifest, rank):
    return f"index/{manifest['generation']}.{rank}.json"


def put_index(folder, manifest, rank, index):
    """Replace an index by one made from records, and describe it in its manifest."""
    text = text_with_checksum(tables_of(index))
    (folder / index_path(manifest, rank)).write_bytes(text)
    columns = manifest["indexes"]
    columns["bytes"][rank] = len(text)
    crcs = columns["crc32c"]
    columns["crc32c"] = f"{crcs[: 8 * rank]}{_core.crc32c(text):08x}{crcs[8 * rank + 8 :]}"
    (folder / "manifest.json").write_bytes(text_with_checksum(manifest))


def merged_index(shape, item, layers, file_bytes):
    """A merged index of one tensor with these layers, in one file."""
    dtype = {1: "U8", 2: "I16", 4: "F32", 8: "F64"}[item]
    shard = {"section": "params", "name": "w", "dtype": dtype, "shape": shape, "layout": []}
    shard.update(part=0, version=1, layers=layers)
    document = {"format": "mlstate.index", "format_version": 3, "generation": "0" * 16}
    document.update(rank=0, world_size=1, shards=[shard])
    document["files"] = [
        {"path": "params/x.safetensors", "bytes": file_bytes, "header_crc32c": "00000000"}
    ]
    text = b'{"checksum":"00000000",' + json.dumps(tables_of(document)).encode()[1:]
    return _core.MergedIndex((_core.json_checksum_set(text),), ("index",))


def stored_index(folder, stored, shape, item, layers):
    """Write the bytes of all layers to one file, and return the merged index."""
    (folder / "params").mkdir()
    (folder / "params/x.safetensors").write_bytes(stored)
    return merged_index(shape, item, layers, len(stored))


def check_reads(folder, merged, array, begin, end, layout):
    """Check loads of `whole`: all of it, a range of its elements, and all parts of a layout."""
    for verified in (False, True):

        def load(*cutting, verified=verified):
            return merged.load(str(folder), 0, ["w"], cutting, verified, False, None)["w"]

        assert load(None, 0, 0).tobytes() == array.tobytes()
        target = np.full(end - begin, 9, array.dtype)
        place = [(array.shape, begin, end)]
        merged.load_into(str(folder), 0, ["w"], place, {"w": target}, verified, None)
        assert target.tobytes() == array.reshape(-1)[begin:end].tobytes()
        for part in range(layout.parts):
            loaded = load(layout.steps, part, 0)
            assert loaded.tobytes() == layout.take(array, part).tobytes()


def sparsen(folder, seed=0, share=0.8):
    """Give shards of a plain checkpoint layers; the content stays the same."""
    folder = Path(folder)
    rng = np.random.default_rng(seed)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    changed = 0
    for rank in range(manifest["world_size"]):
        index = records_of(json.loads((folder / index_path(manifest, rank)).read_bytes()))
        for number, shard in enumerate(index["shards"]):
            if rng.random() > share:
                continue
            data = bytes_of(folder, index, shard)
            layers = Layers(data, SIZES[shard["dtype"]], rng)
            name = f"{shard['section']}/sparse-{rank}-{number}"
            shard["layers"] = layers.write(folder, name, shard["dtype"], index["files"])
            for key in PLACE:
                shard.pop(key, None)
            changed += 1
        put_index(folder, manifest, rank, index)
    return changed
