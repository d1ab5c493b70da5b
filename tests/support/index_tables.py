"""Indexes as one record for each file and shard, and as the tables of docs/format_index.md.

Tests change records, also to invalid values, which are put into the tables unchanged.
"""

import json

KIND = ("section", "state", "dtype", "layout", "axes", "tier")
PLACE = ("file", "offset", "bytes", "crc32c", "blocks")
BLOCK = 1 << 20


def numbers(column):
    """The numbers in a column that is stored as a string."""
    return [int(number) for number in column.split(",")] if column else []


def digits(column):
    """The checksums of a column."""
    return [column[at : at + 8] for at in range(0, len(column), 8)]


def layers_of(table):
    """A record for each layer."""
    columns = {name: numbers(table[name]) for name in ("file", "offset", "bytes")}
    columns["crc32c"] = digits(table["crc32c"])
    columns["row"] = numbers(table.get("row", ",".join("0" * len(columns["file"]))))
    for name in ("rows", "codec", "frames"):
        columns[name] = table.get(name, [None] * len(columns["file"]))
    blocks = table.get("blocks", "")
    for values in zip(*columns.values(), strict=True):
        layer = {name: v for name, v in zip(columns, values, strict=True) if v is not None}
        if not layer["row"]:
            del layer["row"]
        count = -(-layer["bytes"] // BLOCK)
        if count > 1:
            layer["blocks"], blocks = blocks[: 8 * count], blocks[8 * count :]
        yield layer


def records_of(index):
    """An index with lists of files and shards; a single full layer is stored in its shard."""
    files, shards = index["files"], index["shards"]
    document = {name: value for name, value in index.items() if name not in ("kinds", "layers")}
    columns = (files["path"], numbers(files["bytes"]), digits(files["header_crc32c"]))
    document["files"] = [
        {"path": path, "bytes": count, "header_crc32c": crc}
        for path, count, crc in zip(*columns, strict=True)
    ]
    layers = layers_of(index["layers"])
    counts = shards.get("layer_count", ",".join("1" for _ in shards["name"]))
    document["shards"] = []
    for name, kind, shape, part, version, count in zip(
        shards["name"],
        numbers(shards["kind"]),
        shards["shape"].split(";")[:-1],
        numbers(shards["part"]),
        numbers(shards["version"]),
        numbers(counts),
        strict=True,
    ):
        shard = {**index["kinds"][kind], "name": name, "shape": numbers(shape), "part": part}
        shard["version"] = version
        shard_layers = [next(layers) for _ in range(count)]
        is_dense = count == 1 and "row" not in shard_layers[0] and "codec" not in shard_layers[0]
        shard.update(shard_layers[0] if is_dense else {"layers": shard_layers})
        document["shards"].append(shard)
    assert not list(layers)
    return document


def as_text(value):
    """The text of a value in a column of numbers."""
    return "" if value is ... else json.dumps(value)


def column_of(records, name, default=...):
    return ",".join(as_text(record.get(name, default)) for record in records)


def digits_of(records, name):
    values = [record.get(name, "") for record in records]
    return "".join(v if isinstance(v, str) else json.dumps(v) for v in values)


def shape_of(value):
    return ",".join(map(json.dumps, value)) if isinstance(value, list) else as_text(value)


def is_table(value):
    """Whether a value is a list of records, one for each row."""
    return isinstance(value, list) and all(isinstance(record, dict) for record in value)


def tables_of(index):
    """The tables for an index of records; anything but a list of records stays unchanged."""
    document = dict(index)
    files, shards = index.get("files"), index.get("shards")
    if is_table(files):
        document["files"] = {
            "path": [file.get("path") for file in files],
            "bytes": column_of(files, "bytes"),
            "header_crc32c": digits_of(files, "header_crc32c"),
        }
    if not is_table(shards):
        return document
    document["kinds"] = [{key: shard[key] for key in KIND if key in shard} for shard in shards]
    document["shards"] = {
        "name": [shard.get("name") for shard in shards],
        "kind": ",".join(map(str, range(len(shards)))),
        "shape": "".join(shape_of(shard.get("shape", ...)) + ";" for shard in shards),
        "part": column_of(shards, "part"),
        "version": column_of(shards, "version"),
    }
    layers = [shard.get("layers", [shard]) for shard in shards]
    counts = [
        as_text(len(shard_layers) if isinstance(shard_layers, list) else shard_layers)
        for shard_layers in layers
    ]
    if any("layers" in shard for shard in shards):
        document["shards"]["layer_count"] = ",".join(counts)
    rows = [
        layer for shard_layers in layers if isinstance(shard_layers, list) for layer in shard_layers
    ]
    rows = [layer if isinstance(layer, dict) else {} for layer in rows]
    document["layers"] = {name: column_of(rows, name) for name in ("file", "offset", "bytes")}
    document["layers"]["crc32c"] = digits_of(rows, "crc32c")
    if any("blocks" in layer for layer in rows):
        document["layers"]["blocks"] = digits_of(rows, "blocks")
    if any("row" in layer for layer in rows):
        document["layers"]["row"] = column_of(rows, "row", 0)
    for name in ("rows", "codec", "frames"):
        if any(name in layer for layer in rows):
            document["layers"][name] = [layer.get(name) for layer in rows]
    return document
