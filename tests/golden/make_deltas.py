"""Write the golden files of deltas in the formats of other programs, from their descriptions.

``python tests/golden/make_deltas.py``: it uses neither mlstate nor its writers, so that a common
mistake of reader and writer shows. docs/follow_format.md describes the bytes.
"""

import json
import struct
import zlib
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "deltas"

# Two parameters of bfloat16, as bits, and the elements that change.
BASES = {
    "model.norm.weight": np.full(3, 0x3F80, "<u2"),
    "model.proj.weight": np.arange(0x3F00, 0x3F00 + 70_000, dtype="<u4").astype("<u2"),
}
CHANGES = {
    "model.norm.weight": {0: 0xBF80, 2: 0x8000},
    "model.proj.weight": {5: 0x7FC1, 6: 0x0000, 300: 0xFF80, 69_999: 0x3F81},
}


def new_versions():
    """The parameters after the change."""
    versions = {name: array.copy() for name, array in BASES.items()}
    for name, changes in CHANGES.items():
        for number, bits in changes.items():
            versions[name][number] = bits
    return versions


def write_file(name, tensors, metadata):
    """Write a safetensors file of (dtype, shape, bytes)."""
    header, data = {"__metadata__": metadata}, b""
    for key, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (FOLDER / name).write_bytes(struct.pack("<Q", len(text)) + text + data)


def trl_metadata(encoding):
    """The header fields of TRL's patches, all strings."""
    changed = sum(map(len, CHANGES.values()))
    total = sum(map(len, BASES.values()))
    return {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": "True",
        "model_version": "7",
        "num_changed_params": "2",
        "total_changed_elements": str(changed),
        "total_elements": str(total),
        "sparsity": str(1.0 - changed / total),
        "encoding": encoding,
    }


def write_trl():
    """Gaps of 16 and of 32 bits, and absolute positions."""
    gaps, positions = {}, {}
    for name, changes in CHANGES.items():
        values = struct.pack(f"<{len(changes)}H", *changes.values())
        before, steps = -1, []
        for number in changes:
            steps.append(number - before - 1)
            before = number
        letter, dtype = ("H", "U16") if max(steps) <= 65535 else ("I", "U32")
        shape = [len(changes)]
        gaps[f"{name}.val"] = ("BF16", shape, values)
        gaps[f"{name}.idx"] = (dtype, shape, struct.pack(f"<{len(steps)}{letter}", *steps))
        positions[f"{name}.values"] = ("BF16", shape, values)
        numbers = struct.pack(f"<{len(changes)}i", *changes)
        positions[f"{name}.indices"] = ("I32", shape, numbers)
    write_file("trl_gaps.safetensors", gaps, trl_metadata("gap_delta"))
    write_file("trl_indices.safetensors", positions, trl_metadata("raw"))


def write_checkpoint(encoding):
    """A version folder: an index, and compressed bytes with the checksums of the tensors."""
    import zstandard

    tensors, checksums = {}, {}
    for name, new in new_versions().items():
        before, after = BASES[name].tobytes(), new.tobytes()
        raw = bytes(a ^ b for a, b in zip(before, after, strict=True))
        if encoding == "overwrite":
            positions = [i for i, bits in enumerate(raw) if bits]
            raw = struct.pack(f"<{len(positions) + 1}I", len(positions), *positions)
            raw += bytes(after[i] for i in positions)
        packed = zstandard.ZstdCompressor().compress(raw)
        tensors[name] = ("U8", [len(packed)], packed)
        checksums[name] = f"{zlib.adler32(after):08x}"
    file = f"{encoding}-00001-of-00001.safetensors"
    write_file(file, tensors, checksums)
    metadata = {
        "version": "000007",
        "base_version": "000006",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    index = {"metadata": metadata, "weight_map": dict.fromkeys(tensors, file)}
    (FOLDER / f"{encoding}.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    write_trl()
    write_checkpoint("overwrite")
    write_checkpoint("xor")
