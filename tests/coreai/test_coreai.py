"""Core AI models without Core AI: checks of files, declared states, plans, and the errors."""

import hashlib
import json
import sys

import child
import numpy as np
import pytest

from mlstate import errors
from mlstate.cli import main
from mlstate.coreai import StateSpec, StateSpecs, plan_transition, state_specs, verify
from mlstate.coreai._specs import _spec_of_text
from mlstate.errors import CompatibilityError

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
KV = (2, 1, 2, None, 8)  # layers, batch, heads, sequence, head dimension
PROGRAM = bytes(range(256)) * 40


@pytest.fixture
def asset(tmp_path):
    """A folder with the files of an .aimodel; its program is not a model."""
    folder = tmp_path / "m.aimodel"
    folder.mkdir()
    (folder / "main.mlirb").write_bytes(PROGRAM)
    (folder / "main.hash").write_bytes(hashlib.sha256(PROGRAM).digest())
    (folder / "metadata.json").write_text(json.dumps({"assetVersion": "2.0"}))
    return folder


def sized(length, **states):
    return {"k_cache": (2, 1, 2, length, 8), **states}


# ---- verify ----


def test_intact_model_has_its_hash(asset):
    digest = hashlib.sha256(PROGRAM).hexdigest()
    assert verify(asset) == verify(str(asset)) == digest
    (asset / "main.debuginfo").write_bytes(b"other files are not checked")
    assert verify(asset) == digest


@pytest.mark.parametrize("place", [0, 1, len(PROGRAM) // 2, len(PROGRAM) - 1])
@pytest.mark.parametrize("kind", ["truncated", "altered", "longer"])
def test_damaged_program_is_found_at_any_place(asset, place, kind):
    data = bytearray(PROGRAM)
    if kind == "truncated":
        del data[place:]
    elif kind == "altered":
        data[place] ^= 1
    else:
        data.insert(place, 0)
    (asset / "main.mlirb").write_bytes(data)
    with pytest.raises(errors.ChecksumError, match="truncated or altered; copy it again") as caught:
        verify(asset)
    assert caught.value.path == str(asset / "main.mlirb")
    assert caught.value.expected == hashlib.sha256(PROGRAM).hexdigest()
    assert caught.value.got == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("name", ["main.mlirb", "main.hash", "metadata.json"])
def test_missing_file_is_named(asset, name):
    (asset / name).unlink()
    with pytest.raises(errors.FormatError, match=r"the file is missing.*incomplete") as caught:
        verify(asset)
    assert caught.value.path == str(asset / name)


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("main.hash", b"", "expected the 32 bytes of a SHA-256, got 0"),
        ("main.hash", bytes(31), "expected the 32 bytes of a SHA-256, got 31"),
        ("main.hash", bytes(33), "more than 32 bytes"),
        ("metadata.json", b"", "not JSON"),
        ("metadata.json", b'{"a": ', "not JSON"),
        ("metadata.json", b"\xff\xfe\x00", "not JSON"),
        ("metadata.json", b"[" * 100_000, "not JSON"),
        ("metadata.json", b"[1]", "expected a JSON object, got list"),
    ],
)
def test_malformed_file_is_named(asset, name, data, text):
    (asset / name).write_bytes(data)
    with pytest.raises(errors.FormatError, match=text) as caught:
        verify(asset)
    assert caught.value.path == str(asset / name)


def test_folder_that_is_missing_or_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder") as caught:
        verify(tmp_path / "none.aimodel")
    assert caught.value.path == str(tmp_path / "none.aimodel")
    (tmp_path / "file.aimodel").write_bytes(b"")
    with pytest.raises(errors.StoreError, match=r"an \.aimodel is a folder"):
        verify(tmp_path / "file.aimodel")
    with pytest.raises(ValueError, match="s3://"):
        verify("s3://bucket/m.aimodel")


def test_file_that_cannot_be_read_is_a_store_error(asset):
    (asset / "main.mlirb").unlink()
    (asset / "main.mlirb").mkdir()
    with pytest.raises(errors.StoreError, match="directory") as caught:
        verify(asset)
    assert caught.value.path == str(asset / "main.mlirb")


def test_command_line_reports_damage_with_status_1(asset, capsys):
    assert main(["coreai", "verify", str(asset)]) == 0
    assert capsys.readouterr().out.startswith(f"{asset}: good, SHA-256 ")
    (asset / "main.mlirb").write_bytes(PROGRAM[:-1])
    assert main(["coreai", "verify", str(asset)]) == 1
    assert f"{asset}/main.mlirb: the SHA-256 of its 10239 bytes" in capsys.readouterr().out
    assert main(["coreai", "verify", str(asset), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["good"], facts["sha256"]) == (False, None)
    for command in (["verify"], ["states"], ["plan", str(asset), "--at", "3"]):
        assert main(["coreai", *command, str(asset / "none")]) == 2
        assert capsys.readouterr().err.startswith("mlstate: ")
    assert main(["verify", str(asset)]) == 2
    assert "`mlstate coreai states` lists its states" in capsys.readouterr().err


def test_damage_is_found_before_core_ai_is_imported(asset):
    (asset / "main.mlirb").write_bytes(PROGRAM[:-1])
    code = (
        "import sys; from mlstate import coreai, errors\n"
        "try:\n    coreai.state_specs(sys.argv[1])\n"
        "except errors.ChecksumError:\n    print('coreai' in sys.modules)"
    )
    assert child.run(code, asset) == "False\n"


def test_import_error_names_the_extra(asset, monkeypatch):
    monkeypatch.setitem(sys.modules, "coreai", None)
    for name in [name for name in sys.modules if name.startswith("coreai.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"pip install 'mlstate\[coreai\]' \(Linux on x86-64"):
        state_specs(asset)
    assert len(verify(asset)) == 64


# ---- states ----


def test_dynamic_dimension_is_the_sequence():
    specs = state_specs({"k": KV, "rows": (2, 1, 16, 1, None), "window": (2, 4, 3)})
    assert [spec.seq_axis for spec in specs.values()] == [3, 4, None]
    assert (specs["k"].nbytes, specs["k"].seq_length, specs["window"].nbytes) == (None, None, 48)
    small = specs["k"].with_size(64)
    assert (small.shape, small.seq_length, small.nbytes) == ((2, 1, 2, 64, 8), 64, 4096)
    assert specs["window"].with_size(64) is specs["window"]
    assert (specs.function, specs.default_function) == ("main", "main")
    assert "2x1x2x?x8" in specs._repr_html_()


def test_two_models_of_different_size_show_the_sequence():
    small = {"k": (2, 1, 2, 64, 8), "rows": (2, 1, 16, 1, 64), "window": (2, 4, 3)}
    large = {"k": (2, 1, 2, 128, 8), "rows": (2, 1, 16, 1, 128), "window": (2, 4, 3)}
    assert [s.seq_axis for s in state_specs(small, large).values()] == [3, 4, None]
    assert [s.seq_axis for s in state_specs(small).values()] == [None, None, None]
    specs = state_specs(small, seq_axis=-2)
    assert [s.seq_axis for s in specs.values()] == [3, 3, 1]
    assert state_specs({"k": KV}, seq_axis=0)["k"].seq_axis == 3, "a dynamic state keeps its axis"


@pytest.mark.parametrize(
    "other", [(2, 1, 4, 64, 8), (3, 1, 2, 64, 8), (2, 1, 2, 64, 16), (2, 1, 4, 128, 8)]
)
def test_another_axis_than_the_sequence_is_not_taken_for_it(other):
    with pytest.raises(CompatibilityError, match="k: the sequence axis is unknown") as caught:
        state_specs({"k": (2, 1, 2, 64, 8)}, {"k": other})
    assert (caught.value.name, caught.value.expected) == ("k", "2x1x2x64x8")


def test_axis_that_no_state_has():
    with pytest.raises(CompatibilityError, match=r"no state has the axis 5: k 2x1x2x64x8"):
        state_specs({"k": (2, 1, 2, 64, 8)}, seq_axis=5)
    for wrong, error in ((9, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="seq_axis"):
            state_specs({"k": (2, 1, 2, 64, 8)}, seq_axis=wrong)


def test_only_the_sequence_can_be_dynamic():
    spec = state_specs({"k": (2, None, 2, None, 8)})["k"]
    assert spec.seq_axis is None
    with pytest.raises(CompatibilityError, match=r"k: the dimensions \[1, 3\] of 2x\?x2x\?x8"):
        spec.with_size(64)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        StateSpec("k", KV, F16, 3).with_size(0)
    with pytest.raises(TypeError, match="size must be an integer, got str"):
        StateSpec("k", KV, F16, 3).with_size("64")


def test_function_is_chosen_by_name():
    functions = {"a": {"k": StateSpec("k", KV, F16, 3)}, "b": {}}
    specs = StateSpecs(functions, "a")
    assert state_specs(specs) == functions["a"]
    assert state_specs(specs, function="b") == {}
    for name in ("c", ""):
        with pytest.raises(CompatibilityError, match=f"no function '{name}'"):
            state_specs(specs, function=name)


def test_wrong_sources():
    with pytest.raises(TypeError, match=r"source must be a path to an \.aimodel.*got int"):
        state_specs(3)
    with pytest.raises(TypeError, match="state 'k': expected a StateSpec or a shape"):
        state_specs({"k": "2x1"})


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("NDArray (Float16, 2 \u00d7 1 \u00d7 ? \u00d7 8)", (2, 1, None, 8), "float16"),
        ("NDArray (Float32, 2 x ?)", (2, None), "float32"),
        ("NDArray (Int8, 7)", (7,), "int8"),
    ],
)
def test_text_of_a_summary_is_parsed(text, shape, dtype):
    spec = _spec_of_text("m.aimodel", "k", text)
    assert (spec.name, spec.shape, spec.dtype.name) == ("k", shape, dtype)


@pytest.mark.parametrize(
    "text", ["", "Token", "NDArray (Float16, )", "NDArray (Float16, 2 \u00d7 -1)", "Image (8)"]
)
def test_unknown_text_of_a_summary_names_the_model(text):
    with pytest.raises(errors.FormatError, match=r"m\.aimodel: state 'k': expected a text such as"):
        _spec_of_text("m.aimodel", "k", text)


def test_unsupported_dtype_is_named():
    with pytest.raises(CompatibilityError, match="k: states of dtype Int4 are not supported"):
        _spec_of_text("m.aimodel", "k", "NDArray (Int4, 2 x 8)")


# ---- plans ----


def test_plan_of_a_dynamic_model():
    model = sized(None, window=(2, 4, 3))
    plan = plan_transition(model, model, 50, source_size=64, target_size=128)
    assert plan.fits
    assert [(m.direction, m.copied_bytes, m.zeroed_bytes) for m in plan.moves] == [
        ("expand", 2 * 2 * 50 * 8 * 2, 2 * 2 * 78 * 8 * 2),
        ("same", 48, 0),
    ]
    assert (
        plan_transition(model, model, 50, source_size=128, target_size=64).moves[0][1] == "compact"
    )
    assert plan_transition(model, model, 70, source_size=128, target_size=64).problems == (
        "k_cache: 70 tokens do not fit the target state's 64 positions (sequence axis 3 of "
        "(2, 1, 2, 64, 8)); choose a model with at least 70",
    )


def test_plan_of_models_with_fixed_shapes():
    plan = plan_transition(sized(64, steps=(1,)), sized(128, steps=(1,)), 60)
    assert [move.direction for move in plan.moves] == ["expand", "same"]
    assert plan_transition(sized(64), sized(64), 60).moves[0].direction == "same"
    assert plan_transition(sized(64), sized(None), 60, target_size=256).moves[0][1] == "expand"
    other_axis = plan_transition({"k": (64, 2, 8)}, {"k": (128, 2, 8)}, 60, seq_axis=0)
    assert other_axis.fits
    missing = plan_transition(sized(64), {"v_cache": (2, 1, 2, 64, 8)}, 5)
    assert missing.problems == (
        "v_cache: the source model has no state of this name",
        "k_cache: the target model has no state of this name",
    )


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ((3, 1, 2, None, 8), "k_cache: lengths of axis 0 differ"),  # another layer count
        ((2, 1, 4, None, 8), "k_cache: lengths of axis 2 differ"),
        ((2, 1, 2, None, 16), "k_cache: lengths of axis 4 differ"),
        ((2, 2, None, 8), "k_cache: numbers of dimensions differ"),
        (StateSpec("k_cache", KV, np.dtype(np.int8), 3), "float16 in the source model, int8 in"),
    ],
)
def test_states_that_do_not_match_are_problems_of_the_plan(target, text):
    plan = plan_transition(sized(None), {"k_cache": target}, 5, source_size=64, target_size=128)
    assert not plan.fits
    assert text in plan.problems[0]


def test_sizes_of_a_plan_are_checked():
    with pytest.raises(CompatibilityError, match=r"dynamic \(2x1x2x\?x8\): pass source_size="):
        plan_transition(sized(None), sized(64), 5)
    with pytest.raises(CompatibilityError, match=r"target_size is 99, but .* have 128 pos"):
        plan_transition(sized(64), sized(128), 5, target_size=99)
    assert plan_transition(sized(64), sized(128), 5, source_size=64, target_size=128).fits
    flat = plan_transition(sized(None), {"k_cache": (2, 64, 8)}, 5, source_size=9, target_size=64)
    assert "seq_axis 3 is outside -3..2" in flat.problems[0]
    for size, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="size must be"):
            plan_transition(sized(None), sized(64), 5, source_size=size)
    for position, error in ((-1, errors.CapacityError), ("5", TypeError)):
        with pytest.raises(error, match="position"):
            plan_transition(sized(64), sized(128), position)


@pytest.mark.parametrize("state", [(2, 1, -1, 8), StateSpec("k", (2, -1), np.dtype("int8"))])
def test_a_negative_length_is_not_taken_for_a_dynamic_one(state):
    with pytest.raises(CompatibilityError, match="negative length: a dynamic dimension is None"):
        plan_transition({"k": state}, {"k": state}, 5)
