"""Core ML models in several packages: compiled functions, lists, patterns, folders of ANEMLL."""

import inspect
import json
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from anemll_models import (
    STATE,
    compiled_document,
    write_combined,
    write_compiled,
    write_single_context,
    write_uncompiled,
)

from mlstate.cli import main
from mlstate.coreml import (
    FakeMLState,
    StateManager,
    StateShapeWarning,
    StateSpecs,
    compact_coreml_state,
    plan_transition,
    state_specs,
    transition_coreml_state,
)
from mlstate.errors import (
    CapacityError,
    CompatibilityError,
    FormatError,
    MLStateError,
    StoreNotFoundError,
)

pytest.importorskip("yaml", reason="meta.yaml is read with PyYAML")

SHAPES = {context: (8, 1, context, 32) for context in (256, 512, 1024)}


@pytest.fixture
def folder(tmp_path):
    return write_combined(tmp_path / "combined", (256, 512, 1024))


def edit_meta(folder, *replacements):
    text = (folder / "meta.yaml").read_text()
    for former, new in replacements:
        assert former in text
        text = text.replace(former, new)
    (folder / "meta.yaml").write_text(text)


# ---- functions of a compiled model ----


def test_functions_of_a_compiled_model_have_their_own_states(tmp_path):
    functions = {"infer_ctx256": {"kv": SHAPES[256]}, "infer_ctx512": {"kv": SHAPES[512]}}
    model = write_compiled(tmp_path / "m.mlmodelc", functions, "infer_ctx512")
    specs = state_specs(model)
    assert (specs.function, specs.default_function) == ("infer_ctx512", "infer_ctx512")
    assert specs["kv"].shape == SHAPES[512]
    assert list(specs.functions) == list(functions)
    assert state_specs(model, function="infer_ctx256")["kv"].shape == SHAPES[256]
    plan = plan_transition(model, model, 200, source_function="infer_ctx256")
    assert plan.moves[0].direction == "expand"
    package = write_uncompiled(tmp_path / "m.mlpackage", functions, "infer_ctx512")
    assert state_specs(package).functions == specs.functions


def changed_document(change):
    document = compiled_document({"a": {"kv": SHAPES[256]}, "b": {"kv": SHAPES[512]}})
    change(document[0])
    return document


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m["functions"][1].update(name="a"), "several functions have the name 'a'"),
        (lambda m: m["functions"][0].pop("name"), "expected text for 'name'"),
        (lambda m: m["functions"][0].pop("stateSchema"), r"'a' has no 'stateSchema'.*\.mlpackage"),
        (lambda m: m.update(defaultFunctionName="c"), "default function 'c' is not listed"),
        (lambda m: m.update(defaultFunctionName=3), "expected text for 'defaultFunctionName'"),
        (lambda m: m["functions"][1].update(name="b" * 2000), "2000 characters; at most 1024"),
        (lambda m: m.update(functions={"a": 1}), "'functions' is not a list of objects"),
        (
            lambda m: m["functions"][1]["stateSchema"].append(m["functions"][1]["stateSchema"][0]),
            "several states have the same name",
        ),
        (
            lambda m: m["functions"][0]["stateSchema"][0].update(shape="[0, 3]"),
            "empty or too large",
        ),
        (
            lambda m: m["functions"][0]["stateSchema"][0].update(shape=f"[{10**17}, {10**17}]"),
            "empty or too large",
        ),
    ],
)
def test_damaged_lists_of_functions_are_refused(tmp_path, change, text):
    model = write_compiled(tmp_path / "m.mlmodelc", {"a": {}})
    (model / "metadata.json").write_text(json.dumps(changed_document(change)))
    with pytest.raises(FormatError, match=text):
        state_specs(model)


def test_functions_without_a_default_need_a_choice(tmp_path):
    model = write_compiled(tmp_path / "m.mlmodelc", {"a": {}})
    document = changed_document(lambda m: m.pop("defaultFunctionName"))
    (model / "metadata.json").write_text(json.dumps(document))
    with pytest.raises(CompatibilityError, match=r"2 functions and names no default.*'a', 'b'"):
        state_specs(model)
    assert state_specs(model, function="b")["kv"].shape == SHAPES[512]


def test_single_function_without_a_schema_has_the_states_of_the_model(tmp_path):
    model = write_compiled(tmp_path / "m.mlmodelc", {"infer": {"kv": SHAPES[256]}})
    document = json.loads((model / "metadata.json").read_text())
    del document[0]["functions"][0]["stateSchema"]
    (model / "metadata.json").write_text(json.dumps(document))
    specs = state_specs(model)
    assert (specs.function, specs["kv"].shape) == ("infer", SHAPES[256])


# ---- places of chunks ----


def forms(folder, extension):
    chunks = sorted(map(str, folder.glob("*_chunk_*")))
    return {
        "folder": folder,
        "text": str(folder),
        "meta.yaml": folder / "meta.yaml",
        "list": chunks,
        "paths": tuple(folder / chunk for chunk in chunks),
        "pattern": str(folder / f"*_chunk_*.{extension}"),
        "pattern path": folder / "qwen_FFN_PF_*",
        "questions": str(folder / f"qwen_FFN_PF_lut6_chunk_??of02.{extension}"),
        "specs": [state_specs(chunk) for chunk in chunks],
    }


@pytest.mark.parametrize("write", [write_compiled, write_uncompiled])
def test_every_form_of_chunks_is_read_and_planned(tmp_path, write):
    extension = "mlmodelc" if write is write_compiled else "mlpackage"
    small = write_single_context(tmp_path / "small", 256, write=write)
    large = write_single_context(tmp_path / "large", 512, write=write)
    sources, targets = forms(small, extension), forms(large, extension)
    for name, source in sources.items():
        specs = state_specs(source)
        assert specs[STATE].shape == SHAPES[256], name
        assert list(specs.functions) == ["infer", "prefill"]
        plan = plan_transition(source, targets[name], 200)
        [move] = plan.moves
        assert (move.direction, move.copied_bytes) == ("expand", 8 * 200 * 32 * 2)
        assert plan.target_bytes == 8 * 512 * 32 * 2


def test_contexts_of_a_combined_model_are_its_functions(folder):
    specs = state_specs(folder)
    assert specs.default_function == "infer_ctx1024" and specs[STATE].shape == SHAPES[1024]
    assert state_specs(folder, function="infer_ctx256")[STATE].shape == SHAPES[256]
    plan = plan_transition(
        folder, folder, 300, source_function="infer_ctx512", target_function="infer_ctx256"
    )
    assert not plan.fits and "300 tokens do not fit" in plan.problems[0]


def test_flow_lists_and_other_templates_are_read(folder):
    blocks = "contexts:\n    - 256\n    - 512\n    - 1024\n"
    edit_meta(
        folder,
        (blocks, "contexts: [256, 512]\n"),
        ("infer_ctx{context}", '"prefill_ctx{context}"'),
        ("default_function: infer_ctx1024", "default_function: prefill_ctx512"),
    )
    assert state_specs(folder).default_function == "prefill_ctx512"
    manager = StateManager({256: Model(256), 512: Model(512)}, specs=folder)
    assert manager.size == 256


def test_names_are_derived_from_the_prefix_in_older_files(tmp_path):
    for bits, inner in (("4", "_lut4"), ("none", ""), ("-1", "")):
        folder = tmp_path / f"m{bits}"
        for i in (1, 2):
            name = f"llama_FFN_PF{inner}_chunk_0{i}of02.mlmodelc"
            write_compiled(folder / name, {"infer": {"kv": SHAPES[256]}})
        parameters = f"    lut_ffn: {bits}\n    num_chunks: 2\n    model_prefix: llama\n"
        (folder / "meta.yaml").write_text(f"model_info:\n  parameters:\n{parameters}")
        assert state_specs(folder)["kv"].shape == SHAPES[256]


def test_packages_replace_compiled_chunks_that_were_not_distributed(tmp_path):
    folder = write_single_context(tmp_path, 256, write=write_uncompiled)
    assert "chunk_01of02.mlmodelc" in (folder / "meta.yaml").read_text()
    assert state_specs(folder)[STATE].shape == SHAPES[256]


@pytest.mark.parametrize("place", ["num_chunks", "model_info", "other"])
def test_keys_that_appear_twice_are_refused(folder, place):
    """YAML forbids them; PyYAML takes the last value, so the model would lack chunks."""
    file = folder / "meta.yaml"
    parameters, other = "    num_chunks: 1\n", "other:\n- {other: 1, x: 2, other: 3}\n"
    text = {"num_chunks": parameters, "model_info": f"model_info:\n  parameters:\n{parameters}"}
    file.write_text(f"{file.read_text().rstrip()}\n{text.get(place, other)}")
    line = len(file.read_text().splitlines()) - 2 * (place == "model_info")
    with pytest.raises(
        FormatError, match=f"line {line}: the key '{place}' appears twice"
    ) as caught:
        state_specs(folder)
    assert (caught.value.path, caught.value.name) == (str(file), place)


@pytest.mark.parametrize(
    ("named", "stored"),
    [
        ("monolithic_model: gemma.mlmodelc\n    model_prefix: gemma", ".mlmodelc"),
        ("ffn: gemma.mlmodelc\n    model_prefix: gemma", ".mlmodelc"),
        ("ffn: gemma.mlmodelc\n    num_chunks: 1", ".mlpackage"),
        ("ffn: gemma\n    num_chunks: 1", ".mlmodelc"),
    ],
)
def test_model_in_one_package_may_have_another_extension_than_its_name(tmp_path, named, stored):
    write = write_compiled if stored == ".mlmodelc" else write_uncompiled
    write(tmp_path / f"gemma{stored}", {"infer": {"kv": SHAPES[256]}})
    (tmp_path / "meta.yaml").write_text(f"model_info:\n  parameters:\n    {named}\n")
    assert state_specs(tmp_path)["kv"].shape == SHAPES[256]


@pytest.mark.parametrize("null", ["", "null", "~", "''"])
def test_empty_values_of_meta_yaml_count_as_absent(tmp_path, null):
    chunks(tmp_path, "llama_FFN_PF_chunk_01of02.mlmodelc", "llama_FFN_PF_chunk_02of02.mlmodelc")
    lines = "    num_chunks: 2\n    model_prefix: llama\n"
    for key in ("ffn", "lut_ffn", "monolithic_model", "state_transition_infer_contexts"):
        lines += f"    {key}: {null}\n"
    (tmp_path / "meta.yaml").write_text(f"model_info:\n  parameters:\n{lines}")
    assert state_specs(tmp_path)["kv"].shape == SHAPES[256]


@pytest.mark.parametrize("name", ["\\ud800", "a\\e[31m", "a\\n"])
def test_names_with_control_characters_and_halves_of_pairs_are_shown_escaped(tmp_path, name):
    (tmp_path / "meta.yaml").write_text(f'model_info:\n  parameters:\n    ffn: "{name}x"\n')
    with pytest.raises(StoreNotFoundError, match="chunk 1 of 1 missing") as caught:
        state_specs(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\r\n", "\r"])
def test_meta_yaml_of_other_editors_is_read(folder, encoding, newline):
    text = (folder / "meta.yaml").read_text()
    (folder / "meta.yaml").write_bytes(text.replace("\n", newline).encode(encoding))
    assert state_specs(folder)[STATE].shape == SHAPES[1024]


def test_pattern_of_one_package_and_literal_names_with_brackets(tmp_path):
    write_compiled(tmp_path / "m[1].mlmodelc", {"infer": {"kv": SHAPES[256]}})
    assert state_specs(tmp_path / "m[1].mlmodelc") == state_specs(tmp_path / "*.mlmodelc")


def test_more_than_nine_chunks_are_ordered_by_number(tmp_path):
    for i in range(1, 12):
        write_compiled(tmp_path / f"m_chunk_{i}.mlmodelc", {"infer": {f"kv{i}": SHAPES[256]}})
    plan = plan_transition(tmp_path / "m_*", tmp_path / "m_*", 8, shared_state=False)
    assert [move.name for move in plan.moves] == [f"chunk {i}: kv{i}" for i in range(1, 12)]


def test_numbers_without_a_total_may_begin_with_zero(tmp_path):
    listed = chunks(tmp_path, "m_chunk_0.mlmodelc", "m_chunk_1.mlmodelc")
    assert state_specs(listed)["kv"].shape == state_specs(tmp_path / "m_*")["kv"].shape


def test_links_of_a_download_cache_are_followed(tmp_path):
    folder = write_single_context(tmp_path / "snapshots" / "abc", 256)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    files = [path for path in folder.rglob("*") if path.is_file()]
    for i, path in enumerate(files):
        path.rename(blobs / str(i))
        path.symlink_to(blobs / str(i))
    assert state_specs(folder)[STATE].shape == SHAPES[256]
    (tmp_path / "link").symlink_to(folder)
    assert state_specs(tmp_path / "link")[STATE].shape == SHAPES[256]


def test_dimension_that_fails_on_the_neural_engine_warns_for_chunks(tmp_path):
    for i in (1, 2):
        write_compiled(tmp_path / f"m_chunk_{i}.mlmodelc", {"infer": {"kv": (2, 1, 250, 32)}})
    with pytest.warns(StateShapeWarning, match="250, not a multiple"):
        state_specs(tmp_path / "m_*")
    with pytest.warns(StateShapeWarning) as caught:
        plan_transition(tmp_path / "m_*", {"kv": (2, 1, 256, 32)}, 9)
    assert caught[0].filename == __file__


# ---- chunks that do not belong together ----


def remove(folder, pattern):
    [path] = folder.glob(pattern)
    shutil.rmtree(path)


def test_missing_chunks_are_named(folder):
    remove(folder, "*_chunk_02of02*")
    with pytest.raises(StoreNotFoundError, match=r"chunk 2 of 2 missing .*chunk_02of02") as caught:
        state_specs(folder)
    assert caught.value.path == str(folder / "meta.yaml")
    with pytest.raises(CompatibilityError, match="chunk 2 of 2 missing"):
        state_specs(folder / "*_chunk_*")
    with pytest.raises(CompatibilityError, match="chunk 2 of 2 missing"):
        plan_transition(folder / "*_chunk_*", {"kv": (1, 1, 8, 32)}, 3)
    with pytest.raises(StoreNotFoundError, match="no file or folder matches"):
        state_specs(folder / "*_part_*")


def chunks(tmp_path, *names):
    for name in names:
        write_compiled(tmp_path / name, {"infer": {"kv": SHAPES[256]}})
    return [tmp_path / name for name in names]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a_chunk_01of02.mlmodelc", "b_chunk_02of02.mlmodelc"], "not the chunks of one model"),
        (["a_chunk_01of02.mlmodelc", "a_chunk_02of03.mlmodelc"], "not the chunks of one model"),
        (["a_chunk_01of02.mlmodelc", "a_embeddings.mlmodelc"], "not the chunks of one model"),
        (["a_chunk_1.mlmodelc", "a_chunk_3.mlmodelc"], "chunk 2 of 3 missing"),
        (["a_chunk_0.mlmodelc", "a_chunk_2.mlmodelc"], "chunk 1 of 3 missing"),
        (["a_chunk_2.mlmodelc"], "chunk 1 of 2 missing"),
        (["a_chunk_1of1.mlmodelc", "a_chunk_2of1.mlmodelc"], "chunk 2 of 1"),
        (["a_chunk_0of2.mlmodelc", "a_chunk_1of2.mlmodelc"], "chunk 2 of 2 missing"),
        (
            ["a_chunk_01of01.mlmodelc", "a_chunk_01of01.mlpackage"],
            "chunk 1 appears more than once: 'a_chunk_01of01.mlmodelc', 'a_chunk_01of01.mlpackage'",
        ),
    ],
)
def test_names_of_several_models_are_refused(tmp_path, names, text):
    listed = chunks(tmp_path, *names)
    for source in (listed, tmp_path / "*"):
        with pytest.raises(CompatibilityError, match=text):
            state_specs(source)


def test_list_in_another_order_than_its_numbers_is_refused(tmp_path):
    listed = chunks(tmp_path, "a_chunk_01of02", "a_chunk_02of02")
    with pytest.raises(CompatibilityError, match="02', 'a_chunk_01of02' are not in the order"):
        plan_transition(listed, listed[::-1], 9, shared_state=False)


def test_damaged_chunk_is_named(tmp_path):
    listed = chunks(tmp_path, "a_chunk_1.mlmodelc")
    (tmp_path / "a_chunk_2.mlpackage").mkdir()
    second = tmp_path / "a_chunk_2.mlpackage"
    for source, label in ((second, "a_chunk_2.mlpackage"), (b"\x03", "chunk 2"), (None, "chunk 2")):
        error = TypeError if source is None else FormatError
        with pytest.raises(error, match=f"^{label}: "):
            state_specs([*listed, source])


def test_pattern_for_a_folder_with_brackets_names_the_remedy(tmp_path):
    chunks(tmp_path, "b[1]/a_chunk_1.mlmodelc", "b[1]/a_chunk_2.mlmodelc")
    with pytest.raises(StoreNotFoundError, match=r"write \[\[\] for a bracket"):
        state_specs(tmp_path / "b[1]" / "a_*")
    assert state_specs(f"{tmp_path}/b[[]1]/a_*")["kv"].shape == SHAPES[256]


def test_unnumbered_packages_need_a_list(tmp_path):
    listed = chunks(tmp_path, "first.mlmodelc", "second.mlmodelc")
    with pytest.raises(CompatibilityError, match=r"are not numbered as chunks.*pass a list"):
        state_specs(tmp_path / "*.mlmodelc")
    assert state_specs(listed)["kv"].shape == SHAPES[256]
    with pytest.raises(TypeError, match="empty sequence"):
        state_specs([])
    with pytest.raises(TypeError, match="sequence of sequences"):
        state_specs([listed])
    with pytest.raises(TypeError, match="source must be a path"):
        state_specs([listed[0], 3])


@pytest.mark.parametrize(
    ("functions", "text"),
    [
        ({"infer": {"kv": SHAPES[512]}}, "kv of function infer has 256 positions and 512"),
        ({"prefill": {"kv": SHAPES[256]}}, "functions infer and prefill"),
        ({"infer": {}, "prefill": {"kv": SHAPES[256]}}, "functions infer and infer, prefill"),
    ],
)
def test_chunks_of_other_contexts_or_functions_are_refused(tmp_path, functions, text):
    first = write_compiled(tmp_path / "m_chunk_1.mlmodelc", {"infer": {"kv": SHAPES[256]}})
    pair = [first, write_compiled(tmp_path / "m_chunk_2.mlmodelc", functions)]
    text = f"m_chunk_1.mlmodelc and m_chunk_2.mlmodelc do not belong together: {text}"
    with pytest.raises(CompatibilityError, match=text):
        state_specs(pair)
    with pytest.raises(CompatibilityError, match=text):
        plan_transition(pair, pair, 9, shared_state=False)


def test_chunks_with_separate_states_need_the_flag(tmp_path):
    states = {"infer": {"kv": (8, 1, 256, 32)}}, {"infer": {"kv": (6, 1, 256, 32)}}
    pair = [write_compiled(tmp_path / f"m_chunk_{i + 1}", states[i]) for i in (0, 1)]
    with pytest.raises(CompatibilityError, match=r"kv \(8.* and kv \(6.*pass shared_state=False"):
        plan_transition(pair, pair, 9)
    plan = plan_transition(pair, pair, 9, shared_state=False)
    assert [move.source_shape[0] for move in plan.moves] == [8, 6]


def test_chunks_with_other_default_functions_are_refused(tmp_path):
    functions = {"a": {"kv": SHAPES[256]}, "b": {"kv": SHAPES[512]}}
    listed = [write_compiled(tmp_path / f"m_chunk_{i + 1}", functions, "ab"[i]) for i in (0, 1)]
    with pytest.raises(CompatibilityError, match="default function a and b"):
        state_specs(listed)
    specs = [state_specs(listed[0], function=name) for name in "ab"]
    with pytest.raises(CompatibilityError, match=r"chunk 1 and chunk 2 .*function a and b"):
        plan_transition(specs, specs, 9)


def test_errors_of_chunks_with_many_states_and_functions_are_short():
    pairs = [{f"{i}{'x' * 99}": (1, 1, 32, 32) for i in range(first, 999)} for first in (0, 1)]
    states = state_specs({"k": (1, 1, 32, 32)})
    many = [StateSpecs(dict.fromkeys(names, states), min(names)) for names in pairs]
    for source in (pairs, many):
        with pytest.raises(CompatibilityError) as caught:
            plan_transition(source, source, 3)
        assert len(str(caught.value)) < 900


def test_chunks_without_states_are_skipped(tmp_path):
    empty = write_compiled(tmp_path / "embeddings.mlmodelc", {"main": {}})
    full = write_compiled(tmp_path / "body.mlmodelc", {"infer": {"kv": SHAPES[256]}})
    assert state_specs([empty, full, full])["kv"].shape == SHAPES[256]
    plan = plan_transition([empty, full], [empty, full], 9, shared_state=False)
    assert [move.name for move in plan.moves] == ["chunk 2: kv"]
    assert state_specs([empty, empty]) == {}


def test_models_with_other_numbers_of_chunks_do_not_fit(tmp_path):
    two = write_single_context(tmp_path / "two", 256, chunks=2)
    three = write_single_context(tmp_path / "three", 512, chunks=3)
    assert plan_transition(two, three, 9).fits  # they share one state
    plan = plan_transition(two, three, 9, shared_state=False)
    assert plan.problems == (f"chunk 3: {STATE}: the source model has no state of this name",)
    with pytest.raises(TypeError, match="shared_state must be True or False"):
        plan_transition(two, three, 9, shared_state=1)


def test_default_function_that_no_chunk_has_is_refused(folder):
    edit_meta(folder, ("default_function: infer_ctx1024", "default_function: infer_ctx2048"))
    with pytest.raises(FormatError, match="'infer_ctx2048' is not in qwen_FFN_PF_statex_chunk_01"):
        state_specs(folder)


def test_missing_yaml_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"meta.yaml is read with PyYAML: .*mlstate\[anemll\]"):
        state_specs(folder)
    assert state_specs(folder / "*_chunk_*", function="infer_ctx256")[STATE].shape == SHAPES[256]


# ---- moves of all chunks ----


class Model:
    """A model with a state of one context size."""

    def __init__(self, size, fail=False):
        self.shapes = {STATE: (8, 1, size, 32)}
        self.fail = fail

    def get_spec(self):
        raise AssertionError("the states come from specs=")

    def make_state(self):
        return (FailingState if self.fail else FakeMLState)(self.shapes)


class FailingState(FakeMLState):
    """Refuses a write, the first or a later one, and the later ones too if `lasts`."""

    fails_at = 1
    failure = RuntimeError("out of memory")
    lasts = False

    def write_state(self, name, value):
        self.fails_at -= 1
        if self.fails_at == 0 or (self.lasts and self.fails_at < 0):
            raise self.failure
        super().write_state(name, value)


def filled(shapes, seed, cls=FakeMLState):
    state = cls(shapes)
    state.fails_at = 99
    rng = np.random.default_rng(seed)
    for name, shape in shapes.items():
        state.write_state(name, rng.standard_normal(shape).astype(np.float16).astype(np.float32))
    return state


def values(*states):
    return [state.read_state(name).tobytes() for state in states for name in state._states]


SMALL, LARGE = ({"k": (2, 1, size, 32), "v": (3, 1, size, 32)} for size in (64, 96))


def test_one_call_moves_all_states_of_all_chunks():
    sources = [filled(SMALL, 1), None, filled(SMALL, 2)]
    targets = [filled(LARGE, 3), None, filled(LARGE, 4)]
    transition_coreml_state(sources, targets, ["k", "v"], 50)
    for source, target in zip(sources, targets, strict=True):
        for name in ("k", "v") if source else ():
            moved = target.read_state(name)
            assert np.array_equal(moved[:, :, :50], source.read_state(name)[:, :, :50])
            assert not moved[:, :, 50:].any()
    back = [FakeMLState(SMALL), None, FakeMLState(SMALL)]
    compact_coreml_state(targets, back, ("k", "v"), 50, specs=[SMALL, {}, SMALL])
    assert np.array_equal(back[2].read_state("v")[:, :, :50], sources[2].read_state("v")[:, :, :50])


def test_states_whose_lengths_do_not_follow_from_the_contexts_are_refused():
    source = filled({"kv": (2, 1, 64, 32), "scales": (2, 1, 8, 32)}, 1)
    target = filled({"kv": (2, 1, 96, 32), "scales": (2, 1, 12, 32)}, 2)
    before = values(target)
    with pytest.raises(CompatibilityError, match="scales: 8 positions for a context of 64"):
        transition_coreml_state(source, target, ["kv", "scales"], 5)
    assert values(target) == before


def test_chunks_that_share_a_state_move_it_once():
    source, target = filled(SMALL, 1), FakeMLState(LARGE)
    transition_coreml_state([source] * 3, [target] * 3, "k", 50, specs=LARGE)
    assert (target.writes, target.reads) == (1, 0)


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("write", [1, 2])
def test_failed_write_leaves_every_chunk_unchanged(chunk, write, failure):
    sources = [filled(SMALL, seed) for seed in range(3)]
    targets = [filled(LARGE, seed, FailingState) for seed in range(3, 6)]
    targets[chunk].fails_at, targets[chunk].failure = write, failure
    before = values(*sources, *targets)
    with pytest.raises(type(failure)):
        transition_coreml_state(sources, targets, ["k", "v"], 50)
    assert values(*sources, *targets) == before
    transition_coreml_state(sources, targets, ["k", "v"], 50)
    assert values(*targets) != before[6:]


def interrupted_move(sources, targets, at):
    """Move with Ctrl-C at one line of the module; return whether the line was reached."""
    count = 0
    file = inspect.getsourcefile(inspect.unwrap(transition_coreml_state))

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename != file:
            return None
        if event == "line":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    try:
        sys.settrace(trace)
        transition_coreml_state(sources, targets, ["k", "v"], 50, specs=LARGE)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(former)
    return False


def test_interrupt_at_any_line_moves_no_chunk():
    sources = [filled(SMALL, seed) for seed in range(2)]
    targets = [filled(LARGE, seed) for seed in range(2, 4)]
    before = values(*sources, *targets)
    at = 1
    while interrupted_move(sources, targets, at):
        assert values(*sources, *targets) == before
        at += 1
    assert at > 100 and values(*targets) != before[4:]


def test_failures_before_the_first_write_keep_the_states():
    sources = [filled(SMALL, 1), filled({"k": (2, 1, 64, 32)}, 2)]  # no state "v"
    targets = [filled(LARGE, 3), filled(LARGE, 4)]
    before = values(*targets)
    with pytest.raises(RuntimeError, match="no state is called 'v'"):
        transition_coreml_state(sources, targets, ["k", "v"], 50)
    with pytest.raises(CapacityError, match="70 is beyond the source state's 64"):
        transition_coreml_state(sources, targets, ["k"], 70)
    assert values(*targets) == before


def test_former_values_that_cannot_be_written_back_are_named():
    targets = [filled(LARGE, 3, FailingState), filled(LARGE, 4, FailingState)]
    targets[0].fails_at, targets[1].fails_at = 2, 1
    text = "not moved: out of memory.*could not be written back: state 'k' of chunk 1"
    with pytest.raises(MLStateError, match=text):
        transition_coreml_state([filled(SMALL, 1), filled(SMALL, 2)], targets, "k", 50)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), SystemExit()])
def test_second_interrupt_restores_other_chunks_and_keeps_its_type(failure):
    targets = [filled(LARGE, 3), filled(LARGE, 4, FailingState)]
    targets[1].fails_at, targets[1].failure, targets[1].lasts = 1, failure, True
    before = values(targets[0])
    with pytest.raises(type(failure)) as caught:
        transition_coreml_state([filled(SMALL, 1), filled(SMALL, 2)], targets, "k", 50)
    assert values(targets[0]) == before
    assert "state 'k' of chunk 2" in caught.value.__notes__[0]


class SharingState:
    """Its reads return the memory of the state; Core ML makes a copy."""

    def __init__(self, shapes, seed):
        rng = np.random.default_rng(seed)
        self._states = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
        self.fails_at = 99

    def read_state(self, name):
        return self._states[name]

    def write_state(self, name, value):
        self.fails_at -= 1
        if self.fails_at == 0:
            raise RuntimeError("out of memory")
        self._states[name][...] = value


def test_failed_write_restores_states_that_are_read_in_place():
    source, target = SharingState(SMALL, 1), SharingState(LARGE, 2)
    target.fails_at = 2
    before = values(source, target)
    with pytest.raises(RuntimeError, match="out of memory"):
        transition_coreml_state(source, target, ["k", "v"], 50)
    assert values(source, target) == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda value: value.astype(np.int8), "k: read_state gave int8, and Core ML takes"),
        (lambda value: value[0], r"k: the target state has the shape \(1, 96, 32\), and specs"),
        (lambda value: None, r"k: the target state has the shape \(\), and specs declare"),
    ],
)
def test_former_values_that_could_not_be_written_back_are_refused(change, text):
    class ChangedState(FakeMLState):
        def read_state(self, name):
            return change(super().read_state(name))

    target = ChangedState(LARGE)
    with pytest.raises(CompatibilityError, match=text):
        transition_coreml_state(filled(SMALL, 1), target, ["k", "v"], 50, specs=LARGE)
    assert target.writes == 0


def test_lists_of_states_that_do_not_match_are_refused():
    source, target = filled(SMALL, 1), filled(LARGE, 2)
    before = values(target)
    for sources, targets, specs, text in (
        ([source], [target, target], None, "1 source states, 2 target states"),
        ([source, source], [target, target], [LARGE], "and 1 specs"),
        ([], [], None, "0 source states"),
        ([source, None], [target, target], None, "chunk 2: the source has no state"),
        ([source, filled(SMALL, 3)], [target, target], None, "chunk 2: its target state is also"),
        ([source, target], [target, source], None, "chunk 1: its source state is also the target"),
        ([None, None], [None, None], None, "no chunk has a state"),
    ):
        with pytest.raises(CompatibilityError, match=text):
            transition_coreml_state(sources, targets, "k", 5, specs=specs)
    assert values(target) == before


# ---- managers ----


def test_manager_takes_the_states_of_all_contexts_from_a_folder(folder):
    sizes = (256, 512, 1024)
    models = {size: [Model(size)] * 2 for size in sizes}
    for source in (folder, str(folder / "meta.yaml")):
        manager = StateManager(models, specs=source)
        state = manager.state
        value = np.random.default_rng(0).integers(0, 9, SHAPES[256]).astype(np.float32)
        state.write_state(STATE, value)
        assert manager.grow_if_needed(256).size == 512
        assert np.array_equal(manager.state.read_state(STATE)[:, :, :256], value)
    with pytest.raises(CompatibilityError, match="no context of 128 positions; there are 256, 512"):
        StateManager({128: Model(128)}, specs=folder)
    with pytest.raises(CompatibilityError, match="does not list contexts"):
        StateManager(models, specs=folder / "*_chunk_*")
    with pytest.raises(StoreNotFoundError, match="missing_folder"):
        StateManager(models, specs=folder / "missing_folder")


def test_manager_takes_the_function_of_each_size_from_a_folder_of_all_contexts(folder):
    models = {size: [Model(size)] * 2 for size in (256, 512)}
    manager = StateManager(models, specs=dict.fromkeys(models, folder))
    assert manager.state.read_state(STATE).shape == SHAPES[256]
    assert manager.grow_if_needed(256).size == 512
    with pytest.raises(CompatibilityError, match="no context of 128 positions; there are 256, 512"):
        StateManager({128: Model(128)}, specs={128: folder})


def test_manager_takes_lists_and_folders_for_each_size(tmp_path):
    folders = {
        size: write_single_context(tmp_path / str(size), size, write=write_uncompiled)
        for size in (256, 512)
    }
    specs = {256: folders[256], 512: sorted(map(str, folders[512].glob("*_chunk_*")))}
    models = {size: [Model(size)] * 2 for size in specs}
    for shared_state in (True, False):
        manager = StateManager(models, specs=specs, shared_state=shared_state)
        states = manager.state if isinstance(manager.state, tuple) else (manager.state,)
        assert len(states) == (1 if shared_state else 2)
        assert manager.grow_if_needed(256).size == 512
    with pytest.raises(CompatibilityError, match="256 positions have 2 chunks, and there are 3"):
        StateManager({256: [Model(256)] * 3}, specs={256: folders[256]}, shared_state=False)


def test_manager_reads_the_functions_of_compiled_models(folder):
    def load(size):
        paths = sorted(map(str, folder.glob("*_chunk_*")))
        return [
            SimpleNamespace(
                path_or_asset=path,
                function_name=f"infer_ctx{size}",
                make_state=lambda: FakeMLState({STATE: SHAPES[size]}),
            )
            for path in paths
        ]

    manager = StateManager({size: partial(load, size) for size in (256, 512)})
    manager.state.write_state(STATE, np.ones(SHAPES[256], np.float32))
    assert manager.grow_if_needed(256).size == 512
    assert manager.state.read_state(STATE).sum() == 8 * 256 * 32


def test_manager_keeps_all_chunks_if_the_second_one_fails(folder):
    models = {256: [Model(256)] * 2, 512: [Model(512), Model(512, fail=True)]}
    manager = StateManager(models, specs=folder, shared_state=False)
    states = manager.state
    for i, state in enumerate(states):
        state.write_state(STATE, np.full(SHAPES[256], i + 1, np.float32))
    before = values(*states)
    with pytest.raises(MLStateError, match="not moved from 256 to 512 positions: out of memory"):
        manager.grow_if_needed(256)
    assert manager.size == 256 and manager.state == states and values(*states) == before


# ---- commands ----


def run(capsys, *words):
    status = main(["coreml", *map(str, words)])
    return status, capsys.readouterr()


def test_commands_take_folders_patterns_and_lists(tmp_path, capsys):
    small = write_single_context(tmp_path / "small", 256)
    large = write_single_context(tmp_path / "large", 512)
    listed = ",".join(sorted(map(str, large.glob("*_chunk_*"))))
    status, shown = run(capsys, "states", small)
    assert status == 0 and shown.out.splitlines()[0] == "infer (default)"
    assert run(capsys, "states", f"{small}/*_chunk_*")[1].out == shown.out
    assert f"{STATE}  float16  8x1x512x32" in run(capsys, "states", listed)[1].out
    status, shown = run(capsys, "plan", small, listed, "--at", 200)
    assert status == 0 and "200 tokens: fits" in shown.out
    status, shown = run(capsys, "plan", small, large, "--at", 300, "--no-shared-state", "--json")
    assert status == 1
    assert [move["name"][:8] for move in json.loads(shown.out)["moves"]] == ["chunk 1:", "chunk 2:"]


def test_command_fails_with_one_line_for_a_missing_chunk(folder, capsys):
    remove(folder, "*_chunk_01of02*")
    status, shown = run(capsys, "plan", folder, folder, "--at", 3)
    assert status == 2 and shown.out == ""
    assert shown.err.count("\n") == 1 and "chunk 1 of 2 missing" in shown.err
