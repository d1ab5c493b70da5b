"""Core ML states: reading, planning and transferring them, with a fake of Core ML's states."""

import json
import os
import pickle
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlpackage_writer import KV, field, spec_bytes, state, write_package

import mlstate
from mlstate import kv
from mlstate.coreml import (
    FakeMLState,
    StateShapeWarning,
    StateSpec,
    StateSpecs,
    compact_coreml_state,
    plan_transition,
    state_specs,
    transition_coreml_state,
)
from mlstate.coreml.records import StateMove
from mlstate.errors import CapacityError, CompatibilityError, FormatError, StoreError

F16 = np.dtype(np.float16)


# ---- reading ----


@pytest.mark.parametrize("packed", [True, False])
def test_reads_states_in_declared_order(packed):
    specs = state_specs(
        spec_bytes(
            state("keys", (4, 2, 64, 32), packed=packed),
            state("été", (4, 2, 64, 32), 65568, packed=packed),
            state("count", (32,), 131104, packed=packed),
        )
    )
    assert list(specs) == ["keys", "été", "count"]
    assert [spec.dtype.name for spec in specs.values()] == ["float16", "float32", "int32"]
    assert specs["keys"] == StateSpec("keys", (4, 2, 64, 32), F16)
    assert specs["keys"].nbytes == 4 * 2 * 64 * 32 * 2
    assert specs["keys"].seq_length == 64
    assert specs["count"].seq_length is None
    assert specs.default_function == specs.function == "main"
    assert specs.functions == {"main": dict(specs)}


@pytest.mark.parametrize(
    "kind", ["bytes", "bytearray", "memoryview", "str", "path", "file", "slash"]
)
def test_reads_every_kind_of_source(tmp_path, kind):
    spec = spec_bytes(state("kv", KV))
    package = write_package(tmp_path / "modèle 模型.mlpackage", spec)
    source = {
        "bytes": spec,
        "bytearray": bytearray(spec),
        "memoryview": memoryview(spec),
        "str": str(package),
        "path": package,
        "file": package / "Data/com.apple.CoreML/model.mlmodel",
        "slash": f"{package}/",
    }[kind]
    assert state_specs(source)["kv"].shape == KV


def test_follows_the_links_of_a_download_cache(tmp_path):
    blob = tmp_path / "blobs" / "0123"
    blob.parent.mkdir()
    package = write_package(tmp_path / "m.mlpackage", spec_bytes(state("kv", KV)))
    file = package / "Data/com.apple.CoreML/model.mlmodel"
    shutil.move(file, blob)
    file.symlink_to(os.path.relpath(blob, file.parent))
    (tmp_path / "link").symlink_to(package, target_is_directory=True)
    assert list(state_specs(tmp_path / "link")) == ["kv"]


FUNCTIONS = (
    ("short", [state("kv", (2, 1, 256, 32))]),
    ("long", [state("kv", (2, 1, 512, 32))]),
)


def test_reads_every_function_and_takes_the_default():
    specs = state_specs(spec_bytes(functions=FUNCTIONS, default="long"))
    assert specs.default_function == specs.function == "long"
    assert specs["kv"].seq_length == 512
    assert specs.functions["short"]["kv"].seq_length == 256


def test_takes_the_function_asked_for():
    spec = spec_bytes(functions=FUNCTIONS, default="long")
    specs = state_specs(spec, function="short")
    assert specs["kv"].seq_length == 256
    assert (specs.function, specs.default_function) == ("short", "long")
    assert state_specs(specs, function="long")["kv"].seq_length == 512


def test_unknown_function_is_named_with_those_that_exist():
    with pytest.raises(
        CompatibilityError, match=r"no function 'big'; there are 'short', 'long'"
    ) as e:
        state_specs(spec_bytes(functions=FUNCTIONS, default="long"), function="big")
    assert (e.value.name, e.value.got) == ("big", "big")
    with pytest.raises(CompatibilityError, match="no function ''"):
        state_specs(spec_bytes(functions=FUNCTIONS, default="long"), function="")


def test_missing_default_function_is_an_error():
    with pytest.raises(CompatibilityError, match=r"2 functions and names no default: choose one"):
        state_specs(spec_bytes(functions=FUNCTIONS))
    assert state_specs(spec_bytes(functions=FUNCTIONS[:1])).function == "short"


def test_a_model_without_states_has_none():
    specs = state_specs(spec_bytes())
    assert specs == {}
    assert specs.functions == {"main": {}}


def test_specs_survive_pickling():
    specs = state_specs(spec_bytes(functions=FUNCTIONS, default="long"))
    again = pickle.loads(pickle.dumps(specs))
    assert type(again) is StateSpecs
    assert again == specs
    assert again.functions == specs.functions
    assert again.default_function == "long"


class Description:
    def __init__(self, spec):
        self.spec = spec

    def SerializeToString(self):
        return self.spec


class Spec:
    """The two attributes of a specification object that are used."""

    def __init__(self, *states):
        self.description = Description(b"".join(field(13, feature) for feature in states))


class Model:
    function_name = None

    def __init__(self, spec):
        self.kept = spec

    def get_spec(self):
        return self.kept


def test_reads_a_specification_object_and_a_model():
    spec = Spec(*(state(f"kv_{i}", KV) for i in range(40)))  # lengths of more than one byte
    assert len(state_specs(spec)) == 40
    assert len(state_specs(Model(spec))) == 40


def test_takes_shapes_by_name():
    specs = state_specs({"kv": [2, 1, 256, 32], "other": StateSpec("other", (64,), F16)})
    assert specs["kv"] == StateSpec("kv", (2, 1, 256, 32), F16)
    assert plan_transition({"kv": (2, 1, 256, 32)}, {"kv": (2, 1, 512, 32)}, 9).fits
    with pytest.raises(TypeError, match=r"state 'kv': expected a StateSpec or a shape .* got str"):
        state_specs({"kv": "2x1x256"})


def test_specs_of_a_target_that_do_not_have_the_state():
    source, target = FakeMLState({"kv": (2, 1, 4, 8)}), FakeMLState({"kv": (2, 1, 8, 8)})
    with pytest.raises(CompatibilityError, match="no state of this name; did you mean 'kv_0'"):
        transition_coreml_state(source, target, "kv", 3, specs={"kv_0": (2, 1, 8, 8)})
    with pytest.raises(TypeError, match=r"specs must be the target model's state_specs.* got list"):
        compact_coreml_state(source, target, "kv", 3, specs=["kv"])


def compiled(folder, document):
    folder.mkdir(exist_ok=True)
    text = document if isinstance(document, str) else json.dumps(document)
    (folder / "metadata.json").write_text(text)
    return folder


def listed(name, shape="[2, 1, 256, 32]", dtype="Float16"):
    """The part that is read of a state as Core ML's compiler lists it."""
    return {"dataType": dtype, "shape": shape, "name": name}


def test_reads_the_metadata_of_a_compiled_model(tmp_path):
    states = [listed("kv"), listed("positions", "[64]", "Int32")]
    specs = state_specs(compiled(tmp_path / "m.mlmodelc", [{"stateSchema": states}]))
    assert list(specs.values()) == [
        StateSpec("kv", (2, 1, 256, 32), F16),
        StateSpec("positions", (64,), np.dtype(np.int32)),
    ]
    assert (specs.function, specs.default_function) == ("main", "main")
    assert state_specs(compiled(tmp_path / "none.mlmodelc", [{"inputSchema": []}])) == {}


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([], "expected a list of one object"),
        ([{}, {}], "expected a list of one object"),
        ({"stateSchema": []}, "expected a list of one object"),
        ([{"stateSchema": 3}], "'stateSchema' is not a list of objects"),
        ([{"stateSchema": [{"dataType": "Float16"}]}], "expected text for 'name', got NoneType"),
        ([{"stateSchema": [listed("kv", dtype="Q4")]}], "state 'kv': unknown dataType 'Q4'"),
        ([{"stateSchema": [listed("kv", "[2, -1]")]}], r"expected a shape .* got '\[2, -1\]'"),
        ([{"stateSchema": [listed("kv", "")]}], "state 'kv': expected a shape"),
        ([{"stateSchema": [listed("kv")] * 2}], "several states have the same name"),
    ],
)
def test_damaged_metadata_is_refused_by_name(tmp_path, document, text):
    path = compiled(tmp_path / "m.mlmodelc", document)
    with pytest.raises(FormatError, match=text) as caught:
        state_specs(path)
    assert Path(caught.value.path) == path / "metadata.json"


def test_refuses_other_objects():
    with pytest.raises(TypeError, match=r"source must be a path .* got int"):
        state_specs(3)


def test_missing_package_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.mlpackage") as caught:
        state_specs(tmp_path / "none.mlpackage")
    assert isinstance(caught.value, StoreError)
    assert Path(caught.value.path) == tmp_path / "none.mlpackage"


def test_damage_is_reported_with_file_and_offset(tmp_path):
    package = write_package(tmp_path / "m.mlpackage", spec_bytes(state("kv", (2, 1, 0, 32))))
    with pytest.raises(
        FormatError, match=r"^Data/com.apple.CoreML/model.mlmodel: byte \d+: state kv: "
    ) as e:
        state_specs(package)
    assert e.value.name == "kv"
    assert e.value.expected == "a positive dimension"
    assert e.value.got == "0"
    assert e.value.offset > 0
    assert Path(e.value.path) == package


def test_unknown_data_type_is_reported_by_number():
    with pytest.raises(FormatError, match=r"data type 12345, which is unknown") as e:
        state_specs(spec_bytes(state("kv", KV, 12345)))
    assert e.value.got == "data type 12345"


@given(
    st.lists(
        st.tuples(
            st.text(
                st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
                min_size=1,
                max_size=20,
            ),
            st.lists(st.integers(1, 1 << 12), min_size=1, max_size=5),
            st.sampled_from([65552, 65568, 65600, 131104, 131080]),
            st.booleans(),
        ),
        max_size=6,
        unique_by=lambda item: item[0],
    )
)
@settings(deadline=None)
def test_declared_states_round_trip(states):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateShapeWarning)
        specs = state_specs(spec_bytes(*(state(*declaration) for declaration in states)))
    assert [(spec.name, list(spec.shape)) for spec in specs.values()] == [
        (name, shape) for name, shape, _, _ in states
    ]


# ---- the Neural Engine's rule of 32 ----


@pytest.mark.parametrize(
    "shape", [KV, (5, 3, 64, 32), (28, 8, 2048, 128), (7, 1, 1, 64), (3, 64), (96,), (5, 32, 32)]
)
def test_good_shapes_do_not_warn(shape):
    assert state_specs(spec_bytes(state("kv", shape)))["kv"].shape == shape


@pytest.mark.parametrize(
    ("shape", "axis", "length", "better"),
    [
        ((1, 3, 256, 270), r"3 \(head dimension\)", 270, 288),
        ((1, 3, 100, 64), r"2 \(sequence\)", 100, 128),
        ((2, 100, 64), "1", 100, 128),
        ((2, 1), "1", 1, 32),
        ((33,), "0", 33, 64),
    ],
)
def test_warns_of_a_dimension_off_32(shape, axis, length, better):
    with pytest.warns(
        StateShapeWarning, match=rf"axis {axis} is {length}, .* convert the model with {better},"
    ) as caught:
        state_specs(spec_bytes(state("kv", shape)))
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_plan_warns_at_the_callers_line():
    spec = spec_bytes(state("kv", (2, 1, 100, 32)))
    with pytest.warns(StateShapeWarning) as caught:
        plan_transition(spec, spec_bytes(state("kv", (2, 1, 128, 32))), 5)
    assert [warning.filename for warning in caught] == [__file__]


# ---- planning ----


def model(length, *, name="kv_cache", layers=36, heads=1, dim=256, dtype=F16):
    return {name: StateSpec(name, (layers, heads, length, dim), np.dtype(dtype))}


def specs_of(*models):
    joined = {}
    for states in models:
        joined.update(states)
    return StateSpecs({"main": joined}, "main", default_function="main")


def test_plan_of_an_expansion_counts_every_byte():
    plan = plan_transition(specs_of(model(256)), specs_of(model(512)), 200)
    row = 36 * 256 * 2
    assert plan.fits
    assert plan.moves == (
        StateMove("kv_cache", "expand", KV, (36, 1, 512, 256), 200 * row, 312 * row, None),
    )
    assert (plan.copied_bytes, plan.zeroed_bytes) == (200 * row, 312 * row)
    assert (plan.source_bytes, plan.target_bytes) == (256 * row, 512 * row)


def test_plan_of_a_compaction_that_does_not_fit():
    plan = plan_transition(specs_of(model(512)), specs_of(model(256)), 300)
    assert not plan.fits
    assert plan.moves[0].direction == "none"
    assert plan.moves[0].copied_bytes == plan.moves[0].zeroed_bytes == 0
    assert "300 tokens do not fit the target state's 256 positions" in plan.problems[0]


@pytest.mark.parametrize(
    ("source", "target", "position", "text"),
    [
        (model(256), model(512), 257, "beyond the source state's 256 positions"),
        (model(256), model(512, layers=35), 9, "layers differ"),
        (model(256), model(512, heads=2), 9, "heads differ"),
        (model(256), model(512, dim=128), 9, "head dimension differs"),
        (model(256), model(512, dtype=np.int32), 9, "float16 in the source model, int32 in the"),
        (model(256), model(512, name="other"), 9, "the target model has no state of this name"),
        (
            {"kv_cache": StateSpec("kv_cache", (4,), F16)},
            model(512),
            9,
            r"source state has the shape \(4,\); a KV state has 2 to 8 dimensions",
        ),
        (
            {"kv_cache": StateSpec("kv_cache", (4, 4), F16)},
            model(512),
            9,
            r"numbers of dimensions differ: the source state is \(4, 4\), the target state",
        ),
    ],
)
def test_plan_names_each_problem(source, target, position, text):
    plan = plan_transition(specs_of(source), specs_of(target), position)
    assert not plan.fits
    assert any(re.search(text, problem) for problem in plan.problems)


def test_plan_covers_states_of_either_model():
    plan = plan_transition(
        specs_of(model(256, name="a"), model(256, name="b")),
        specs_of(model(256, name="c"), model(256, name="b")),
        256,
    )
    assert [(move.name, move.direction) for move in plan.moves] == [
        ("c", "none"),
        ("b", "same"),
        ("a", "none"),
    ]
    assert plan.moves[0].source_shape is None
    assert plan.moves[2].target_shape is None
    assert plan.moves[1].zeroed_bytes == 0
    assert len(plan.problems) == 2


def test_plan_between_functions_of_one_package(tmp_path):
    package = write_package(tmp_path / "m", spec_bytes(functions=FUNCTIONS, default="short"))
    plan = plan_transition(package, package, 100, target_function="long")
    assert plan.moves[0].direction == "expand"
    plan = plan_transition(package, package, 300, source_function="long")
    assert not plan.fits


@pytest.mark.parametrize("position", [-1, -(1 << 70)])
def test_plan_refuses_a_negative_position(position):
    with pytest.raises(CapacityError, match=rf"position {position} is negative") as e:
        plan_transition(specs_of(model(256)), specs_of(model(512)), position)
    assert (e.value.expected, e.value.got) == ("0 or more", str(position))


@pytest.mark.parametrize("position", [1.5, "3", None])
def test_plan_refuses_non_integer_positions(position):
    with pytest.raises(TypeError, match="position must be an integer"):
        plan_transition(specs_of(model(256)), specs_of(model(512)), position)


def test_plan_is_json_data_and_escaped_html():
    plan = plan_transition(specs_of(model(256, name="<script>")), specs_of(model(512)), np.int64(5))
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["fits"] is False
    assert data["position"] == 5
    assert [move["name"] for move in data["moves"]] == ["kv_cache", "<script>"]
    html = plan._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_specs_are_a_table_that_names_other_functions():
    specs = specs_of(model(256, name="<b>"))
    page = specs._repr_html_()
    assert "StateSpecs: 1 state of function &#x27;main&#x27;</caption>" in page
    assert "&lt;b&gt;</td><td>36x1x256x256</td><td>float16</td><td class=r>4.50 MiB</td>" in page
    two = StateSpecs({"main": {}, "<i>": dict(specs)}, "<i>")
    assert (
        "other functions: &#x27;main&#x27;" in two._repr_html_() and "<i>" not in two._repr_html_()
    )


def test_plan_prints_a_table():
    lines = str(plan_transition(specs_of(model(512)), specs_of(model(256)), 200)).splitlines()
    assert lines[0].split() == ["state", "move", "source", "target", "copied", "zeroed"]
    assert lines[1].split()[:4] == ["kv_cache", "compact", "36x1x512x256", "36x1x256x256"]
    assert lines[2].startswith("200 tokens: fits; 3.52 MiB copied")


# ---- the fake ----


def test_double_reads_float16_as_a_fresh_float32_copy():
    fake = FakeMLState({"kv": (2, 1, 4, 8)})
    first = fake.read_state(name="kv")
    assert first.dtype == np.float32
    assert first.flags.c_contiguous
    assert first.flags.writeable
    first[...] = 7
    assert not fake.read_state("kv").any()


def test_double_rounds_writes_to_float16():
    fake = FakeMLState({"kv": (3,)})
    fake.write_state(name="kv", value=np.array([1 + 2**-12, 1e9, np.nan], np.float64))
    np.testing.assert_array_equal(fake.read_state("kv"), np.float32([1, np.inf, np.nan]))


@pytest.mark.parametrize(
    ("dtype", "read"), [("float16", "float32"), ("float32", "float32"), ("int32", "int32")]
)
def test_double_is_created_from_specs(dtype, read):
    fake = FakeMLState({"s": StateSpec("s", (4,), np.dtype(dtype))})
    assert fake.read_state("s").dtype == read
    fake.write_state("s", np.arange(4, dtype=np.int32))
    assert fake.read_state("s").tolist() == [0, 1, 2, 3]


def test_double_refuses_dtypes_that_core_ml_has_no_states_of():
    with pytest.raises(CompatibilityError, match=r"Core ML has no states of float64"):
        FakeMLState({"s": StateSpec("s", (4,), np.dtype(np.float64))})


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros((2, 3), np.float16), "value type not convertible: float16"),
        (np.zeros((2, 3), np.int64), "value type not convertible: int64"),
        (np.zeros((2, 3), ">f4"), "value type not convertible: >f4"),
        ([[0.0] * 3] * 2, "value type not convertible: list"),
        (np.zeros((3, 2), np.float32), r"shape \(3, 2\), the state \(2, 3\)"),
        (np.zeros((3, 2), np.float32).T, "not contiguous"),
        (np.zeros((2, 6), np.float32)[:, ::2], "not contiguous"),
        (read_only(np.zeros((2, 3), np.float32)), "read-only"),
    ],
)
def test_double_refuses_the_same_writes_as_core_ml(value, text):
    fake = FakeMLState({"kv": (2, 3)})
    fake.write_state("kv", np.ones((2, 3), np.float32))
    with pytest.raises(RuntimeError, match=text):
        fake.write_state("kv", value)
    assert (fake.read_state("kv") == 1).all()
    assert fake.writes == 1


@pytest.mark.parametrize("name", ["other", 3, ["kv"]])
def test_double_refuses_unknown_names(name):
    fake = FakeMLState({"kv": (2, 3)})
    with pytest.raises(RuntimeError, match=r"the model has 'kv'"):
        fake.read_state(name)
    with pytest.raises(RuntimeError, match=r"the model has 'kv'"):
        fake.write_state(name, np.zeros((2, 3), np.float32))


# ---- transferring ----


class Spy(FakeMLState):
    """Records its arguments; accepts only coremltools' keywords."""

    def read_state(self, *, name):
        return super().read_state(name)

    def write_state(self, *, name, value):
        self.written = value
        super().write_state(name, value)


def pair(source_length, target_length, shape=(2, 3, None, 8)):
    layers, heads, _, dim = shape
    source = Spy({"kv": (layers, heads, source_length, dim)})
    target = Spy({"kv": (layers, heads, target_length, dim)})
    rng = np.random.default_rng(1)
    value = rng.standard_normal((layers, heads, source_length, dim)).astype(np.float16)
    source.write_state(name="kv", value=value.astype(np.float32))
    source.writes = 0
    return source, target, value


def specs_for(length, name="kv"):
    return {name: StateSpec(name, (2, 3, length, 8), F16)}


@pytest.mark.parametrize("with_specs", [True, False])
@pytest.mark.parametrize("position", [0, 1, 5, 16])
def test_expansion_keeps_tokens_bit_for_bit(position, with_specs):
    source, target, value = pair(16, 40)
    specs = specs_for(40) if with_specs else None
    transition_coreml_state(source, target, "kv", position, specs=specs)
    assert (source.reads, source.writes) == (1, 0)
    assert (target.reads, target.writes) == (0 if with_specs else 1, 1)
    got = target.read_state(name="kv").astype(np.float16)
    assert got[:, :, :position].tobytes() == value[:, :, :position].tobytes()
    assert not got[:, :, position:].any()


@pytest.mark.parametrize("specs", [None, specs_for(40), {"kv": (2, 3, 40, 8)}])
def test_a_padding_that_the_state_cannot_hold_is_refused(specs):
    source, target, _ = pair(16, 40)
    for pad_value in (1e6, -65520.0):
        with pytest.raises(ValueError, match=r"'kv': .* beyond the range of float16"):
            transition_coreml_state(source, target, "kv", 5, pad_value, specs=specs)
    assert target.writes == 0
    for pad_value in (-65504.0, -np.inf):
        transition_coreml_state(source, target, "kv", 5, pad_value, specs=specs)
        assert (target.read_state(name="kv")[:, :, 5:] == pad_value).all()
    wide = {"kv": StateSpec("kv", (2, 3, 40, 8), np.dtype(np.float32))}
    target = FakeMLState(wide)
    transition_coreml_state(source, target, "kv", 5, 1e6, specs=wide)
    assert (target.read_state(name="kv")[:, :, 5:] == 1e6).all()


def test_every_finite_float16_survives_the_way_over_float32():
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    bits = bits[np.isfinite(bits)]
    source = Spy({"kv": (1, 1, bits.size // 32, 32)})
    target = Spy({"kv": (1, 1, bits.size // 32 + 8, 32)})
    source.write_state(name="kv", value=bits.reshape(1, 1, -1, 32).astype(np.float32))
    transition_coreml_state(source, target, "kv", bits.size // 32)
    got = target.read_state(name="kv").astype(np.float16)[:, :, : bits.size // 32]
    assert got.tobytes() == bits.tobytes()


@pytest.mark.parametrize("move", [transition_coreml_state, compact_coreml_state])
def test_equal_lengths_work_either_way(move):
    source, target, value = pair(16, 16)
    move(source, target, "kv", 16)
    assert target.read_state(name="kv").astype(np.float16).tobytes() == value.tobytes()


@pytest.mark.parametrize("kind", ["f2", "f4", ">f4", "strided", "read-only", "bfloat16"])
def test_core_ml_is_handed_float32_for_floats_of_up_to_32_bits(kind):
    class Odd(Spy):
        def read_state(self, *, name):
            value = super().read_state(name=name)
            if kind == "strided":
                return np.asfortranarray(value)
            if kind == "read-only":
                return read_only(value)
            if kind == "bfloat16":
                return value.astype(pytest.importorskip("ml_dtypes").bfloat16)
            return value.astype(kind)

    for move, lengths in ((transition_coreml_state, (16, 40)), (compact_coreml_state, (40, 16))):
        _, target, value = pair(*lengths)
        source = Odd({"kv": value.shape})
        source.write_state(name="kv", value=np.round(value * 4).astype(np.float32))
        move(source, target, "kv", 7)
        written = target.written
        assert written.dtype == np.float32
        assert written.flags.c_contiguous
        assert written.flags.writeable
        np.testing.assert_array_equal(written[:, :, :7], np.round(value * 4)[:, :, :7])


@pytest.mark.parametrize("dtype", ["<f8", ">f8"])
def test_a_float64_state_keeps_every_bit(dtype):
    value = np.full((1, 1, 4, 4), 1e300)
    value[..., 0] = 1 / 3

    class Wide(Spy):
        def read_state(self, *, name):
            return value.astype(dtype)

    for move, length in ((transition_coreml_state, 8), (compact_coreml_state, 3)):
        target = Spy({"kv": (1, 1, length, 4)})
        move(Wide({"kv": value.shape}), target, "kv", 3)
        assert target.written.dtype == np.float64 and target.written.dtype.isnative
        np.testing.assert_array_equal(target.written[:, :, :3], value[:, :, :3])


@pytest.mark.parametrize("dtype", ["u1", "u4", "i2", "i8", "?", "c8"])
def test_dtypes_that_core_ml_does_not_take_are_refused(dtype):
    class Odd(Spy):
        def read_state(self, *, name):
            return super().read_state(name=name).astype(dtype)

    target = Spy({"kv": (1, 1, 8, 4)})
    with pytest.raises(CompatibilityError, match=r"kv: read_state gave .* float32, float64, int32"):
        transition_coreml_state(Odd({"kv": (1, 1, 4, 4)}), target, "kv", 3)
    assert target.writes == 0


def test_an_int32_state_stays_int32():
    shape = {"n": StateSpec("n", (1, 1, 4, 4), np.dtype(np.int32))}
    source, target = Spy(shape), Spy({"n": shape["n"]._replace(shape=(1, 1, 8, 4))})
    source.write_state(name="n", value=np.full((1, 1, 4, 4), 1 << 30, np.int32))
    transition_coreml_state(source, target, "n", 4)
    assert target.written.dtype == np.int32
    assert (target.read_state(name="n")[:, :, :4] == 1 << 30).all()


BAD = [
    # move, source shape, target shape, position, error, text, name
    ("t", (2, 3, 16, 8), (2, 3, 40, 8), -1, CapacityError, "position -1 is negative", "position"),
    ("t", (2, 3, 16, 8), (2, 3, 40, 8), 17, CapacityError, "beyond the source state's 16", "kv"),
    ("t", (2, 3, 16, 8), (2, 3, 40, 8), 41, CapacityError, "41 tokens do not fit", "kv"),
    ("c", (2, 3, 40, 8), (2, 3, 16, 8), 17, CapacityError, "17 tokens do not fit", "kv"),
    ("c", (2, 3, 40, 8), (2, 3, 16, 8), -3, CapacityError, "position -3 is negative", "position"),
    ("t", (2, 3, 40, 8), (2, 3, 16, 8), 9, CapacityError, "use compact_coreml_state", "kv"),
    ("t", (3, 3, 16, 8), (2, 3, 40, 8), 9, CompatibilityError, "kv: layers differ", "kv"),
    ("t", (2, 1, 16, 8), (2, 3, 40, 8), 9, CompatibilityError, "kv: heads differ", "kv"),
    ("c", (2, 3, 40, 4), (2, 3, 16, 8), 9, CompatibilityError, "head dimension differs", "kv"),
    ("t", (2, 3, 16), (2, 3, 40, 8), 9, CompatibilityError, "numbers of dimensions differ", "kv"),
    ("t", (2,), (2, 3, 40, 8), 9, CompatibilityError, "source state has the shape", "kv"),
    ("t", (2, 3, 16, 8), (2,), 9, CompatibilityError, "target state has the shape", "kv"),
    ("t", (2, 3, 16, 8), (2, 3, 40, 8), 1.5, TypeError, "position must be an integer", None),
]


LAYOUTS = [((3, 1, 2, 16, 8), -2), ((3, 1, 64, 1, 16), -1), ((3, 1, 64, 1, 16), 4), ((16, 5), 0)]


def longer(shape, axis, length):
    """The shape with another number of positions."""
    shape_list = list(shape)
    shape_list[axis] = length
    return tuple(shape_list)


@pytest.mark.parametrize("with_specs", [True, False])
@pytest.mark.parametrize(("shape", "axis"), LAYOUTS)
def test_states_of_any_layout(shape, axis, with_specs):
    specs = {"k": longer(shape, axis, 40)} if with_specs else None
    source, target = FakeMLState({"k": shape}), FakeMLState({"k": longer(shape, axis, 40)})
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 2000
    source.write_state("k", value)
    transition_coreml_state(source, target, "k", 9, 2.5, specs=specs, seq_axis=axis)
    assert (source.reads, target.reads, target.writes) == (1, 0 if with_specs else 1, 1)
    tokens = np.moveaxis(target.read_state("k"), axis, 0)
    np.testing.assert_array_equal(tokens[:9], np.moveaxis(value, axis, 0)[:9])
    assert (tokens[9:] == 2.5).all() and tokens.shape[0] == 40
    specs = {"k": shape} if with_specs else None
    compact_coreml_state(target, source, "k", 7, specs=specs, seq_axis=axis)
    tokens = np.moveaxis(source.read_state("k"), axis, 0)
    np.testing.assert_array_equal(tokens[:7], np.moveaxis(value, axis, 0)[:7])
    assert not tokens[7:].any()


@pytest.mark.filterwarnings("ignore::mlstate.coreml.StateShapeWarning")
@pytest.mark.parametrize(
    ("have", "want", "position", "axis", "error", "text"),
    [
        ((3, 1, 64, 1, 16), (3, 1, 64, 1, 40), 9, -2, CapacityError,
         r"9 tokens do not fit the target state's 1 positions \(sequence axis 3 of \(3, 1, 64"),
        ((3, 1, 64, 1, 16), (3, 1, 64, 1, 40), 17, -1, CapacityError,
         r"beyond the source state's 16 positions \(sequence axis 4 of \(3, 1, 64, 1, 16\)\)"),
        ((3, 1, 64, 1, 16), (3, 1, 32, 1, 40), 9, -1, CompatibilityError,
         r"kv: lengths of axis 2 differ: the source state is \(3, 1, 64, 1, 16\), the target st"),
        ((2, 3, 8, 16), (2, 3, 8, 40), 9, 4, CompatibilityError,
         r"kv: seq_axis 4 is outside -4..3: the target state has the shape \(2, 3, 8, 40\)"),
        ((2, 3, 8, 16), (2, 3, 8, 40), 9, 8, CompatibilityError, r"seq_axis 8 is outside -8..7"),
        ((2, 3, 8, 16), (2, 3, 8, 40), 9, True, TypeError, r"seq_axis must be an integer"),
        ((2, 3, 8, 16), (2, 3, 8, 40), 9, 1.0, TypeError, r"must be an integer, got float"),
    ],
)  # fmt: skip
def test_wrong_axes_are_refused_before_the_write(have, want, position, axis, error, text):
    source, target = Spy({"kv": have}), Spy({"kv": want})
    for move in (transition_coreml_state, compact_coreml_state):
        with pytest.raises(error, match=text):
            move(source, target, "kv", position, specs={"kv": want}, seq_axis=axis)
    assert target.writes == 0
    if error is TypeError or axis == 8:
        with pytest.raises(error, match=text):
            plan_transition({"kv": have}, {"kv": want}, position, seq_axis=axis)
    else:
        plan = plan_transition({"kv": have}, {"kv": want}, position, seq_axis=axis)
        assert not plan.fits and plan.problems[0].startswith("kv: ")


@pytest.mark.filterwarnings("ignore::mlstate.coreml.StateShapeWarning")
@pytest.mark.parametrize(("shape", "axis"), LAYOUTS)
def test_plans_of_any_layout(shape, axis):
    states = {"k": shape}, {"k": longer(shape, axis, 40)}
    row = np.prod(shape) // 16 * 2
    plan = plan_transition(*states, 9, seq_axis=axis)
    assert plan.fits and plan.moves[0].direction == "expand"
    assert (plan.copied_bytes, plan.zeroed_bytes) == (9 * row, 31 * row)
    assert plan_transition(*states[::-1], 9, seq_axis=axis).moves[0].direction == "compact"


def test_compaction_into_a_longer_state_matches_compact_kv_state():
    source, target = FakeMLState({"kv": (2, 3, 16, 8)}), FakeMLState({"kv": (2, 3, 40, 8)})
    source.write_state("kv", np.ones((2, 3, 16, 8), np.float32))
    compact_coreml_state(source, target, "kv", 16)
    assert target.read_state("kv").sum() == 2 * 3 * 16 * 8


@pytest.mark.parametrize("with_specs", [True, False])
@pytest.mark.parametrize(("move", "have", "want", "position", "error", "text", "name"), BAD)
def test_arguments_are_checked_before_the_write(
    move, have, want, position, error, text, name, with_specs
):
    source, target = Spy({"kv": have}), Spy({"kv": want})
    target.write_state(name="kv", value=np.full(want, 3, np.float32))
    function = transition_coreml_state if move == "t" else compact_coreml_state
    specs = {"kv": StateSpec("kv", want, F16)} if with_specs else None
    with pytest.raises(error, match=text) as caught:
        function(source, target, "kv", position, specs=specs)
    assert target.writes == 1
    assert (target.read_state(name="kv") == 3).all()
    if name is not None:
        assert caught.value.name == name
        assert caught.value.expected
        assert caught.value.got


def test_name_missing_in_the_target_is_refused_before_reading():
    source, target, _ = pair(16, 40)
    with pytest.raises(
        CompatibilityError, match=r"other: .* no state of this name; there are 'kv'"
    ):
        transition_coreml_state(source, target, "other", 5, specs=specs_for(40))
    assert source.reads == target.reads == target.writes == 0


@pytest.mark.parametrize("names", [{"kv"}, None, b"kv", [], ["kv", 3]])
@pytest.mark.parametrize("move", [transition_coreml_state, compact_coreml_state])
def test_names_of_other_types_are_refused_with_those_that_exist(move, names):
    source, target, _ = pair(16, 40)
    for specs, hint in ((specs_for(40), "there are 'kv'"), (None, r"state_specs\(model\) lists")):
        with pytest.raises(TypeError, match=rf"name of a state, or a list .*got .*{hint}"):
            move(source, target, names, 5, specs=specs)
    with pytest.raises(ValueError, match="name more than once: 'kv', 'kv'"):
        move(source, target, ["kv", "kv"], 5)
    assert source.reads == target.reads == target.writes == 0


def test_name_missing_in_core_ml_raises_its_error():
    source, target, _ = pair(16, 40)
    with pytest.raises(RuntimeError, match=r"no state is called 'other'"):
        transition_coreml_state(source, target, "other", 5)
    assert target.writes == 0


def test_the_kv_module_offers_the_same_functions():
    assert kv.transition_coreml_state is transition_coreml_state
    assert kv.compact_coreml_state is compact_coreml_state
    assert mlstate.coreml.state_specs is state_specs


def test_several_states_move_by_the_plan():
    specs = {
        length: specs_of(*(model(length, name=n, layers=2, dim=32) for n in "kv"))
        for length in (32, 64)
    }
    source, target = FakeMLState(specs[32]), FakeMLState(specs[64])
    for name in "kv":
        source.write_state(name, np.full((2, 1, 32, 32), ord(name), np.float32))
    plan = plan_transition(specs[32], specs[64], 20)
    assert plan.fits
    for move in plan.moves:
        transition_coreml_state(source, target, move.name, plan.position, specs=specs[64])
    for name, move in zip("kv", plan.moves, strict=True):
        copied_bytes = np.count_nonzero(target.read_state(name)) * 2
        assert copied_bytes == move.copied_bytes
    assert (source.reads, target.writes) == (2, 2)


def test_a_plan_between_equal_states_does_not_claim_that_tokens_fit():
    plan = plan_transition(specs_of(model(256)), specs_of(model(256)), 300)
    assert plan.fits and "300 tokens: fits" not in str(plan)
    assert "same shape in both models, so length is not checked" in str(plan)


@pytest.mark.parametrize("shape", [(2, 1, -1, 8), (-2, 1, 64, 8)])
def test_a_shape_with_a_negative_length_is_refused(shape):
    for declared in (shape, StateSpec("kv", shape, np.dtype(np.float16))):
        with pytest.raises(CompatibilityError, match=r"'kv': the shape .* has a negative length"):
            plan_transition({"kv": declared}, {"kv": declared}, 5)
        with pytest.raises(CompatibilityError, match="negative length"):
            FakeMLState({"kv": declared})


def test_a_spec_with_an_unknown_length_is_refused():
    spec = StateSpec("kv", (1, None, 3), np.dtype(np.float16))
    with pytest.raises(CompatibilityError, match=r"'kv': the shape .* has an unknown length"):
        FakeMLState({"kv": spec})
