"""Folders of chunks whose meta.yaml or names are false, endless, or point elsewhere.

Each must be refused with an exception of mlstate, within little time and memory.
"""

import os
import resource
import time
from pathlib import Path

import pytest
from anemll_models import STATE, write_combined, write_single_context
from checkpoint_model import flipped

from mlstate.coreml import StateSpecs, state_specs
from mlstate.errors import FormatError, MLStateError

pytest.importorskip("yaml", reason="meta.yaml is read with PyYAML")

LEAST = "model_info:\n  parameters:\n    ffn: qwen_FFN_PF_lut6_chunk_01of02.mlmodelc\n"


@pytest.fixture
def folder(tmp_path):
    return write_single_context(tmp_path / "m", 256)


def refusal(folder, text):
    """Return the exception for a meta.yaml with this text.

    A sanitizer keeps freed blocks for a while, so memory is measured only without one.
    """
    data = text if isinstance(text, bytes) else text.encode()
    (folder / "meta.yaml").write_bytes(data)
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MLStateError) as caught:
        state_specs(folder)
    assert time.process_time() - started < 20
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 100_000 or "MLSTATE_UNDER_SANITIZER" in os.environ
    assert len(str(caught.value)) < 2_000
    return caught.value


def parameters(**values):
    lines = "".join(f"    {key}: {value}\n" for key, value in values.items())
    return f"model_info:\n  parameters:\n{lines}"


FIRST = "qwen_FFN_PF_lut6_chunk_01of02.mlmodelc"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model_info",
        "model_info: 3",
        "model_info: {parameters: [1]}",
        "[" * 60_000,
        "{a: " * 15_000,
        "- " * 30_000,
        "? " * 30_000,
        "\0",
        "a: b: c",
        "a: *nothing",
        "a: &a [*a]",
        "'" + "x" * 60_000,
        "a" * (64 << 10) + "b",
        b"\xff\xfe\xff",
        "model_info: {parameters: {&a [*a]: 1}}",
        parameters(num_chunks=2),
        parameters(ffn="[a]", num_chunks=2),
        parameters(ffn="!!python/object/apply:os.system [touch pwned]", num_chunks=2),
        *(
            parameters(ffn=FIRST, num_chunks=count)
            for count in ("0", "-1", "1e9", "99999999999", "1000", "two", "[2]", "0x2", "2.0", "3")
        ),
        *(
            parameters(ffn=FIRST, num_chunks=2, state_transition_infer_contexts=contexts)
            for contexts in ("512", "[a]", "[0]", "[1, 1]", "[[1]]", "{1: 2}", f"[{'9' * 40}]")
        ),
        parameters(
            ffn=FIRST, num_chunks=2, state_transition_infer_contexts=f"[{', '.join('1' * 300)}]"
        ),
        *(
            parameters(ffn=FIRST, num_chunks=2, state_transition_infer_function_template=template)
            for template in ("infer", "'{context.__class__}'", "'{context:99999999999d}'", "[a]")
        ),
    ],
)
def test_false_values_are_refused(folder, text):
    error = refusal(folder, text)
    assert isinstance(error, FormatError), error
    assert os.fspath(folder) in str(error.path)
    assert not Path("pwned").exists()


def test_nested_aliases_of_yaml_are_refused_quickly(folder):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    bomb = "\n".join(lines) + "\n"
    for key in ("num_chunks", "ffn", "state_transition_infer_contexts", "model_prefix"):
        refusal(folder, bomb + "model_info:\n  parameters:\n    " + f"{key}: *a29\n")
    merges = "a0: &a0 {k: v}\n" + "".join(
        f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
    )
    refusal(folder, merges + "model_info: *a29\n")


@pytest.mark.parametrize(
    "name",
    [
        "../m/qwen_FFN_PF_lut6_chunk_01of02.mlmodelc",
        "/etc/qwen_chunk_01of02.mlmodelc",
        "a/../../b_chunk_01of02",
        '"a\\0_chunk_01of02"',
        "a\\b_chunk_01of02",
        "x" * 5000,
    ],
)
def test_names_that_leave_the_folder_are_refused(folder, name):
    for values in ({"ffn": name, "num_chunks": 2}, {"monolithic_model": ".."}):
        error = refusal(folder, parameters(**values))
        assert isinstance(error, FormatError) and "outside of the folder" in str(error)


@pytest.mark.parametrize("inside", [False, True])
def test_link_of_a_chunk_out_of_the_folder_is_refused(folder, inside):
    chunk = folder / FIRST
    target = folder / "chunks" / "first" if inside else folder.parent / "elsewhere"
    target.parent.mkdir(exist_ok=True)
    chunk.rename(target)
    chunk.symlink_to(target)
    if inside:
        assert state_specs(folder)[STATE].shape[2] == 256
    else:
        with pytest.raises(FormatError, match=f"{FIRST} is a link to a place outside"):
            state_specs(folder)


def test_special_files_in_the_place_of_a_folder_or_its_meta_are_refused(folder):
    chunk = folder / FIRST
    chunk.rename(folder / "kept")
    for make in (os.mkfifo, lambda path: path.symlink_to(path), Path.touch):
        make(chunk)
        with pytest.raises(MLStateError):
            state_specs(folder)
        chunk.unlink()
    meta = folder / "meta.yaml"
    for make in (os.mkfifo, lambda path: path.symlink_to(path), Path.mkdir):
        meta.unlink()
        make(meta)
        for source in (folder, meta):
            with pytest.raises(MLStateError):
                state_specs(source)


def test_truncated_and_mutated_metas_are_read_or_refused(tmp_path):
    folder = write_combined(tmp_path / "m", (256, 512))
    meta = folder / "meta.yaml"
    text = meta.read_bytes()
    start = text.index(b"  parameters")
    variants = [text[:length] for length in range(start, len(text), 7)]
    variants += [flipped(text, at, 1 << (at % 7)) for at in range(start, len(text), 3)]
    refused = 0
    for data in variants:
        meta.write_bytes(data)
        try:
            specs = state_specs(folder)
        except MLStateError as error:
            assert str(error)
            refused += 1
        else:
            assert isinstance(specs, StateSpecs) and specs[STATE].shape[2] in (256, 512)
    assert 0 < refused < len(variants)
