"""Write Hugging Face folders as other programs do: without checksums, in any order."""

import json

NAMES = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8", "bool": "BOOL"}


def write_weight_file(path, arrays):
    """Write a safetensors file in the order of `arrays`, without alignment or checksums."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


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
