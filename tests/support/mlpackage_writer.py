"""Write Core ML packages byte by byte, valid or not, without coremltools."""

import json


def number(value):
    """A varint."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(tag, value):
    """A field: a number, text, bytes or a sub-message."""
    if isinstance(value, int):
        return number(tag << 3) + number(value)
    data = value.encode() if isinstance(value, str) else value
    return number(tag << 3 | 2) + number(len(data)) + data


def state(name, shape, dtype=65552, packed=True):
    """A state's FeatureDescription; float16 by default."""
    if packed:
        array = field(1, b"".join(map(number, shape)))
    else:
        array = b"".join(field(1, length) for length in shape)
    return field(1, name) + field(3, field(8, field(1, array + field(2, dtype))))


def spec_bytes(*states, functions=(), default=None):
    """A whole specification; `functions` are pairs of a name and a list of states."""
    body = b"".join(field(13, message) for message in states)
    for name, inner in functions:
        body += field(20, field(1, name) + b"".join(field(6, message) for message in inner))
    if default is not None:
        body += field(21, default)
    return field(1, 9) + field(2, body) + field(502, b"the program")


def write_package(folder, spec, inner="com.apple.CoreML/model.mlmodel"):
    """A .mlpackage folder around a specification."""
    file = folder / "Data" / inner
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(spec)
    manifest = {
        "fileFormatVersion": "1.0.0",
        "itemInfoEntries": {"ROOT": {"name": "model.mlmodel", "path": inner}},
        "rootModelIdentifier": "ROOT",
    }
    (folder / "Manifest.json").write_text(json.dumps(manifest))
    return folder


KV = (36, 1, 256, 256)
