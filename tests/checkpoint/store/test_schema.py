"""The published schemas and our readers agree on valid manifests and indexes.

Valid documents are changed in every place, one change at a time. The schema and our readers must
refuse the same documents, except for the rules listed below: these relate several members, which a
schema cannot express.
"""

import copy
import itertools
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from index_tables import records_of, tables_of
from json_checksums import renew_checksum, text_with_checksum

import mlstate
from mlstate import _core
from mlstate.checkpoint import Layout
from mlstate.checkpoint._store import manifest as _manifest
from mlstate.errors import FormatError

jsonschema = pytest.importorskip("jsonschema", reason="judges documents by the schemas")

FOLDER = Path(mlstate.__file__).parent / "schema"

# Errors of our readers for documents that a schema cannot refuse.
BETWEEN_MEMBERS = {
    "index": {
        "the rank is below the world's size": r'"rank" is not a whole number in its range',
        "numbers are in their range": r'"(bytes|offset|kind|part|version)" is not a whole number',
        "as many blocks as needed": r'"blocks" must have 8 digits',
        "columns are of one length": r"(one value|8 digits) for each|a \";\" after each",
        "columns are no longer": r"has more values than its table has rows",
        "layers are those of the shards": r"has too few layers for the shards",
        "no path appears twice": r'"path" appears twice',
        "the kind is one of the kinds": r'"kind" is not one of the kinds',
        "no dots in a name without state": r'"name" has a dot',
        "the shape fits memory": r'"shape" is larger',
        "the layout fits the shape, and has the part": r'"layout" (does not fit|is invalid)',
        "as many axes as dimensions": r'"axes" must have one entry for each dimension of the shape',
        "the file is one of the files": r'"file" is not one of the files',
        "the bytes are in the file": r'"offset" plus bytes exceeds the length of the file',
        "the bytes are in no other shard": r'"offset" overlaps another shard',
        "the bytes are those of the part": r'"bytes" does not match shape',
        "no bytes have the checksum 0": r'"crc32c" of an empty layer must be 00000000',
        "no shard appears twice": r'"part" appears twice',
        "rows with a length, frames with a codec": r"is not allowed in a layer without",
        "only the first layer is full": r"only the first layer is full",
        "rows are those of the shard": r'"rows" must alternate',
        "a layer's bytes are those of its rows": r'"bytes" does not match the elements',
        "frames are those of the layer": r'"frames" must have a length for each MiB',
        "the bytes are in no other layer": r'"offset" overlaps another layer of the shard',
        "ranks agree on a tensor": r"tensor.*differs",
    },
    "manifest": {
        "an index for each rank": r"digits for \d+ ranks|a list of \d+ numbers",
        "a pattern for each rank": r"each of \d+ ranks once",
    },
}


def schema_of(kind):
    return json.loads((FOLDER / f"{kind}.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def validators():
    return {
        kind: jsonschema.Draft202012Validator(schema_of(kind)) for kind in ("manifest", "index")
    }


def refusal(kind, text):
    """The reader's error for a text, or None."""
    try:
        if kind == "manifest":
            _manifest.parse(text)
        else:
            _core.MergedIndex((text,), ("index.json",))
    except FormatError as error:
        return str(error)
    return None


# ---- valid documents ----

LAYERED = {
    "checksum": "00000000",
    "format": "mlstate.index",
    "format_version": 3,
    "generation": "0123456789abcdef",
    "rank": 0,
    "world_size": 1,
    "files": {
        "path": ["params/w.safetensors", "params/x.safetensors"],
        "bytes": "4230,4096",
        "header_crc32c": "0123456789abcdef",
    },
    "kinds": [
        {"section": "params", "dtype": "I16", "layout": [[0, 2]]},
        {"section": "params", "dtype": "I16", "layout": []},
    ],
    "shards": {
        "name": ["w", "w", "x", "y"],
        "kind": "0,0,1,1",
        "shape": "6,5;6,5;27;40;",
        "part": "0,1,0,0",
        "version": "2,1,1,1",
        "layer_count": "2,0,1,1",
    },
    "layers": {
        "file": "0,0,0,0",
        "offset": "4096,4126,4146,4200",
        "bytes": "30,20,54,30",
        "crc32c": "0123456789abcdef7654321001234567",
        "row": "0,5,0,0",
        "rows": [None, "0,1,1,1", None, None],
        "codec": [None, None, None, "zlib"],
        "frames": [None, None, None, "30"],
    },
}


def saved(folder):
    rng = np.random.default_rng(3)
    flat = Layout.axis(1, 2) * Layout.flat(3)
    model = mlstate.ModelStateDict(
        {
            "layer.0.weight": flat.shard(rng.normal(size=(5, 7)), 4, tier="hot"),
            "layer.0.bias": np.zeros(7, np.float16),
            "long": np.zeros((1 << 20) + 8, np.uint8),
            "none": np.zeros((0, 3), np.int64),
            "scalar": np.float32(1),
        },
        model_type="small",
        layer_count=1,
    )
    optimizer = mlstate.OptimizerStateDict.create("adafactor")
    optimizer["layer.0.bias.m"] = np.zeros(7, np.float32)
    optimizer["layer.0.weight.row"] = np.zeros(5, np.float32)
    optimizer["count"] = np.int64(3)
    mlstate.save(folder, model, optimizer, step=7, metadata={"run": ["a", 1.5, None]})


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Valid documents of each kind, without the checksum's value."""
    folder = tmp_path_factory.mktemp("checkpoint")
    saved(str(folder))
    manifest = json.loads((folder / "manifest.json").read_bytes())
    [path] = (folder / "index").glob("*.json")
    index = json.loads(path.read_bytes())
    bare = {**manifest, "model": None, "optimizer": {"kind": "state"}, "step": None}
    wide = {
        **manifest,
        "world_size": 2,
        "indexes": {
            "bytes": [2**63 - 1, 1],
            "crc32c": "0123456789abcdef",
            "shards": [0, 2**63 - 1],
            "data_bytes": [0, 2**63 - 1],
        },
        "patterns": [{"ranks": [1], "parts": [[3], [0]]}, {"ranks": [0], "parts": []}],
        "later": {"anything": [1, {}]},
    }
    columns = {
        "files": {"path": [], "bytes": "", "header_crc32c": ""},
        "shards": {"name": [], "kind": "", "shape": "", "part": "", "version": ""},
        "layers": {"file": "", "offset": "", "bytes": "", "crc32c": ""},
    }
    empty = {**index, **columns, "kinds": [], "rank": 9, "world_size": 10}
    return {"manifest": [manifest, bare, wide], "index": [index, empty, LAYERED]}


@pytest.mark.parametrize("kind", ["manifest", "index"])
def test_written_documents_match_the_schema(kind, good, validators):
    for document in good[kind]:
        validators[kind].validate(document)
        assert refusal(kind, text_with_checksum(document)) is None


# ---- one change at a time ----

VALUES = [
    None, True, False, -1, 0, 1, 2, 7, 8, 15, 16, 4096, 16777215, 16777216, 16777217, 2**31,
    2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 0.5, -1.5, 1e300,
    "", " ", "0", "x", "a.b", "flat", "00000000", "0000000", "000000000", "0000000g", "FFFFFFFF",
    "89abcdef", "00000000\n", "0123456789abcdef", "0123456789abcdeF", "0123456789abcdef\n",
    "\x00", "é", "0" * 16, "0" * 24, "params", "optim_state", "optim_state ", "F32", "f32",
    "F8_E8M0", "F4", "F6_E2M3",
    "hot", "state", "model", "optimizer", "mlstate.index", "mlstate.manifest",
    "params/x.safetensors", "optim_state/x.y-1.safetensors", "params/../x.safetensors",
    "0,0", "1,2,", "0,01", "1;", ";", "16", "9" * 19, "9" * 20, "0,-1", "4096,4126",
    "../params/x.safetensors", "/params/x.safetensors", "params/X.safetensors",
    "params/.x.safetensors", "params/a/x.safetensors", "params/x.safetensors\n",
    "params/.safetensors", "params/" + "x" * 221 + ".safetensors",
    "params/" + "x" * 222 + ".safetensors",
    "index/0123456789abcdef.0.json", "index/0123456789abcdef.00.json", "index/../x.json",
    [], [0], [1, 1], [None], [[]], [[0, 1]], [[0, 0]], [["flat", 2]], [["flat", 2], [0, 2]],
    [[0, 1, 2]], [["row", 2]], [[16, 2]], [[0, 2**64]], [0] * 16, [1] * 17, [[0, 1]] * 5, [2**63],
    {}, {"kind": "state"}, {"kind": "model"}, {"kind": None}, {"a": [{}]},
]  # fmt: skip


TABLES = ("files", "shards", "layers")  # of an index


def places(value, path=()):
    """The path of every value in a document, except its checksum."""
    items = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for name, inner in items:
        if name != "checksum":
            yield (*path, name)
            yield from places(inner, (*path, name))


def at(document, path):
    for name in path:
        document = document[name]
    return document


def changed(document, path, change):
    """A copy, where `change` was applied to the parent of the value at a path."""
    copied = json.loads(json.dumps(document))
    change(at(copied, path[:-1]), path[-1])
    return copied


# What replaces one row of a column that is a text: a number, or eight digits of a checksum.
ROWS = ["0", "1", "2", "3", "5", "6", "20", "30", "4096", "4126", str(2**62), "0" * 8, "f" * 8]


def rows_changed(text):
    """Copies of a column, each with another value in one row."""
    rows = r"[0-9a-f]{8}" if re.fullmatch(r"([0-9a-f]{8})+", text) else r"\d+"
    for row in re.finditer(rows, text):
        for value in ROWS:
            yield text[: row.start()] + value + text[row.end() :]


def changes(document, every=1):
    """Documents that differ by one change, with a description: every `every`-th value."""
    for number, path in enumerate(places(document)):
        column = at(document, path)
        rows = ()
        if path[0] in TABLES and isinstance(column, str):
            rows = itertools.islice(rows_changed(column), number % every, None, every)
        for value in itertools.chain(rows, VALUES[number % every :: every]):
            other = changed(
                document, path, lambda holder, name, v=value: holder.__setitem__(name, v)
            )
            yield f"{path} = {value!r}", other
        yield f"{path} deleted", changed(document, path, lambda holder, name: holder.pop(name))
        holder = at(document, path[:-1])
        if isinstance(holder, list):
            twice = changed(document, path, lambda parent, name: parent.append(parent[name]))
            yield f"{path} twice", twice
        else:
            more = changed(document, path, lambda parent, _: parent.__setitem__("more", [{"x": 1}]))
            yield f"{path} with one more", more
            other = changed(document, path, lambda parent, name: parent.__setitem__(f"{name}_", 0))
            yield f"{path} with one more like it", other


@pytest.mark.parametrize("every", [11, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["manifest", "index"])
def test_schema_and_reader_agree(kind, every, good, validators):
    rules = BETWEEN_MEMBERS[kind]
    seen = dict.fromkeys(rules, 0)
    agreed = {True: 0, False: 0}
    wrong = []
    tried = (changes(document, every) for document in good[kind])
    for change, document in itertools.chain.from_iterable(tried):
        by_schema = validators[kind].is_valid(document)
        reason = refusal(kind, text_with_checksum(document))
        if by_schema == (reason is None):
            agreed[by_schema] += 1
            continue
        rule = next(
            (r for r, words in rules.items() if by_schema and re.search(words, reason)), None
        )
        if rule is None:
            wrong.append(f"{change}: schema {by_schema}, reader: {reason}")
        else:
            seen[rule] += 1
    assert not wrong, "\n".join(wrong[:20])
    assert min(agreed.values()) > 100
    # an unused rule would hide a difference
    unused = {rule for rule, count in seen.items() if not count} - {"ranks agree on a tensor"}
    assert not unused or every > 1, unused


@pytest.mark.parametrize("kind", ["manifest", "index"])
def test_without_a_member_both_refuse(kind, good, validators):
    document = good[kind][0]
    for name in schema_of(kind)["required"]:
        less = {key: value for key, value in document.items() if key != name}
        assert not validators[kind].is_valid(less), name
        if name != "checksum":
            assert refusal(kind, text_with_checksum(less)) is not None, name


# ---- rules for the text, which a schema cannot express ----

TEXTS = {
    "a whole number with a fraction": (b'"world_size": 1', b'"world_size": 1.0'),
    "a whole number with an exponent": (b'"world_size": 1', b'"world_size": 1e0'),
    "half of a surrogate pair": (b'"world_size": 1', b'"world_size": 1, "later": "\\udc00"'),
    "a key twice": (b'"world_size"', b'"world_size": 1, "world_size"'),
    "a key twice, in escapes": (b'"world_size"', b'"world_\\u0073ize": 1, "world_size"'),
    "NaN": (b'"world_size": 1', b'"world_size": NaN'),
    "a leading zero": (b'"world_size": 1', b'"world_size": 01'),
    "bytes that are no UTF-8": (b'"world_size"', b'"\xff": 1, "world_size"'),
    "a trailing comma": (b"}", b",}"),
    "text behind it": (b"}", b"}x"),
    "too many levels": (b"}", b', "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
}


@pytest.mark.parametrize("kind", ["manifest", "index"])
@pytest.mark.parametrize("name", TEXTS)
def test_text_is_refused(kind, name, good):
    old, new = TEXTS[name]
    text = text_with_checksum(good[kind][0])
    head, separator, tail = text.rpartition(old)
    assert separator == old
    assert refusal(kind, renew_checksum(head + new + tail)) is not None


# ---- the schemas themselves ----


@pytest.mark.parametrize("kind", ["manifest", "index"])
def test_schema_is_self_contained(kind):
    schema = schema_of(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(schema))
    assert references
    assert all(reference.startswith("#/$defs/") for reference in references)


def test_schema_knows_every_dtype(good, validators):
    dtypes = schema_of("index")["$defs"]["kind"]["properties"]["dtype"]["enum"]
    sizes = {"F16": 2, "BF16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4}
    sizes |= {"F64": 8, "I64": 8, "U64": 8, "C64": 8}
    document = records_of(copy.deepcopy(good["index"][0]))
    [shard] = [shard for shard in document["shards"] if shard["name"] == "scalar"]
    for dtype in dtypes:
        shard.update(dtype=dtype, bytes=sizes.get(dtype, 1), offset=4096)
        document["shards"] = [shard]
        tables = tables_of(document)
        assert refusal("index", text_with_checksum(tables)) is None, dtype
        assert validators["index"].is_valid(tables)


def test_every_member_is_documented():
    pages = sorted((Path(__file__).resolve().parents[3] / "docs").glob("format*.md"))
    if not pages:
        pytest.skip("no documentation beside these tests")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)

    def members(schema):
        if isinstance(schema, dict):
            yield from schema.get("properties", {})
            for inner in schema.values():
                yield from members(inner)

    for kind in ("manifest", "index"):
        assert f"mlstate/schema/{kind}.schema.json" in text
        missing = [name for name in set(members(schema_of(kind))) if f"`{name}`" not in text]
        assert not missing, missing


def test_the_wheel_has_the_schemas():
    project = Path(__file__).resolve().parents[3] / "pyproject.toml"
    if not project.exists():
        pytest.skip("no project beside these tests")
    data = tomllib.loads(project.read_text(encoding="utf-8"))
    assert "schema/*.json" in data["tool"]["setuptools"]["package-data"]["mlstate"]
