"""Write Hugging Face folders as other programs do: without checksums, in any order."""

import json

NAMES = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8", "bool": "BOOL"}
# File name of packed dtypes, and bits of an element.
PACKED = {
    "float4_e2m1fn_x2": ("F4", 4),
    "float6_e2m3fn_x4": ("F6_E2M3", 6),
    "float6_e3m2fn_x4": ("F6_E3M2", 6),
}


def _entry(array):
    """Return dtype and shape as a file has them: it counts the elements of packed dtypes."""
    label = (array.dtype.metadata or {}).get("mlstate.dtype")
    if label is None:
        return NAMES[array.dtype.name], array.shape
    name, bits = PACKED[label]
    return name, (*array.shape[:-1], array.shape[-1] * 8 // bits)


def write_header(path, entries, data=b""):
    """Write a file of {name: (dtype, shape, bytes)} in this order, then `data`."""
    header, at = {}, 0
    for name, (dtype, shape, nbytes) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_weight_file(path, arrays):
    """Write a safetensors file in the order of `arrays`, without alignment or checksums."""
    entries = {name: (*_entry(array), array.nbytes) for name, array in arrays.items()}
    write_header(path, entries, b"".join(array.tobytes() for array in arrays.values()))


def write_index(folder, tensors, total):
    index = {"metadata": {"total_size": total}, "weight_map": tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_folder(folder, arrays, files=1):
    """Write a folder of `files` files, each with every n-th array; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    if files == 1:
        write_weight_file(folder / "model.safetensors", arrays)
        return folder
    listed = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        file_arrays = {key: arrays[key] for key in list(arrays)[number::files]}
        write_weight_file(folder / name, file_arrays)
        listed |= dict.fromkeys(file_arrays, name)
    write_index(folder, listed, sum(array.nbytes for array in arrays.values()))
    return folder
