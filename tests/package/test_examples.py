"""The notebooks of examples/ run from top to bottom; they are stored with outputs."""

import hashlib
import importlib.util
import json
import os
import re
from pathlib import Path

import child
import pytest

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

needs_notebooks = pytest.mark.skipif(
    not NOTEBOOKS, reason="no examples beside these tests: they are not installed"
)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


# In its own process, because the kernel's client leaves sockets open.
EXECUTE = """
import sys
import nbformat
tools, source, target, folder = sys.argv[1:]
sys.path.insert(0, tools)
from notebooks import run_notebook
nbformat.write(run_notebook(source, folder), target)
"""


def execute(path, folder):
    """Run a notebook in `folder`; return the finished process, and the cells with outputs."""
    for name in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(name, reason="notebooks are run with nbclient and ipykernel")
    done = folder / "done.ipynb"
    # The package under test, which may not be installed; no configuration of the user's IPython.
    variables = child.PATHS | {"IPYTHONDIR": str(folder / "ipython")}
    arguments = [EXAMPLES.parent / "tools", path, done, folder]
    process = child.attempt(EXECUTE, *arguments, timeout=200, **variables)
    return process, read(done)["cells"] if done.exists() else []


def outputs(cells, kind):
    """All outputs of one MIME type, or of a stream, in order."""
    texts = []
    for output in (output for cell in cells for output in cell.get("outputs", ())):
        if kind in output.get("data", {}):
            texts.append("".join(output["data"][kind]))
        elif output.get("name") == kind:
            texts.append("".join(output["text"]))
    return texts


def runs_a_notebook(test):
    """Mark a test that runs one of the examples."""
    sanitized = "MLSTATE_UNDER_SANITIZER" in os.environ
    unbuilt = pytest.mark.skipif(sanitized, reason="the kernel is not built with the sanitizer")
    return needs_notebooks(pytest.mark.slow(unbuilt(test)))


def shown(name, folder):
    """Run an example; return its HTML outputs, its printed text, and its images."""
    process, cells = execute(EXAMPLES / f"{name}.ipynb", folder)
    assert process.returncode == 0, process.stderr
    printed = "".join(outputs(cells, "stdout"))
    return outputs(cells, "text/html"), printed, outputs(cells, "image/png")


ABSOLUTE = re.compile(r"(?<![\w.:/<])(?:/[a-z]\w*){2,}|\b[A-Z]:\\\\")


def faults_of_stored(notebook):
    """The defects of the outputs that a notebook is stored with."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    produced = [output for cell in code for output in cell["outputs"]]
    sources = "\0".join("".join(cell["source"]) for cell in code)
    texts = [output["text"] for output in produced if "text" in output]
    for output in produced:
        data = output.get("data", {})
        texts += [text for kind, text in data.items() if kind.startswith("text/")]
    faults = []
    if notebook["metadata"].get("executed") != {
        "sha256": hashlib.sha256(sources.encode()).hexdigest()
    }:
        faults.append("edited since it ran")
    if [cell["execution_count"] for cell in code] != list(range(1, len(code) + 1)):
        faults.append("cells did not run once each, from top to bottom")
    if not texts:
        faults.append("no outputs")
    if any(o["output_type"] == "error" or o.get("name") == "stderr" for o in produced):
        faults.append("errors or warnings")
    paths = [match[0] for text in texts for match in ABSOLUTE.finditer("".join(text))]
    return faults + [f"the path {path}" for path in paths]


@needs_notebooks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_its_outputs(path):
    assert not faults_of_stored(read(path)), "run: make notebooks"


def test_wrong_outputs_are_noticed():
    def notebook(output, count=1, source="1", of="1"):
        cell = {"cell_type": "code", "source": [source], "execution_count": count}
        digest = hashlib.sha256(of.encode()).hexdigest()
        return {
            "cells": [cell | {"outputs": output}],
            "metadata": {"executed": {"sha256": digest}},
        }

    good = {"output_type": "stream", "name": "stdout", "text": ["run/step_1: 2 of 3\n"]}
    assert not faults_of_stored(notebook([good]))
    assert faults_of_stored(notebook([])) == ["no outputs"]
    assert faults_of_stored(notebook([good], source="2")) == ["edited since it ran"]
    assert len(faults_of_stored(notebook([good], count=2))) == 1
    assert len(faults_of_stored(notebook([good | {"name": "stderr"}]))) == 1
    assert len(faults_of_stored(notebook([good, {"output_type": "error"}]))) == 1
    html_output = {"output_type": "execute_result", "data": {"text/html": ["<b>/tmp/x1/a</b>"]}}
    assert faults_of_stored(notebook([html_output])) == ["the path /tmp/x1/a"]


@runs_a_notebook
def test_coreml_transition_notebook_outputs(tmp_path):
    (fits, too_long), printed, images = shown("coreml_transition", tmp_path)
    assert "184 tokens: fits" in fits and "<table>" in fits
    assert "300 tokens: does not fit" in too_long
    assert "300 tokens do not fit the target state's 256 positions" in printed
    assert printed.count("class Cache:") == 2  # the prompt, and the text generated from it
    if importlib.util.find_spec("matplotlib"):
        assert images


@runs_a_notebook
@pytest.mark.coreai
def test_coreai_notebook_outputs(tmp_path):
    if not importlib.util.find_spec("coreai_torch"):
        pytest.skip("coreai-torch converts its model")
    (specs, fits, too_long, growing, static), printed, _ = shown("coreai", tmp_path)
    assert "2x1x2x?x8" in specs
    assert "100 tokens: fits" in fits and "100 tokens: does not fit" in too_long
    assert "state of 512 positions, in use" in growing and "empty" in static
    for position in (64, 128, 256):
        assert f"position {position}: grow to {2 * position}\n" in printed
    assert "refill\n48 kept, dropped range(4, 21)\n" in printed
    assert "half.aimodel/main.mlirb True" in printed


@runs_a_notebook
def test_state_dicts_notebook_outputs(tmp_path):
    (model, layer, result, tuned, loaded), printed, _ = shown("state_dicts", tmp_path)
    assert "<details" in model and "26 tensors" in model
    assert "out.weight" in layer and "layers" not in layer.split("</style>")[-1]
    assert "module." in result
    assert "1 changed" in tuned and "layers.3.out.weight" in tuned and "25 unchanged" in tuned
    assert "1 changed" in loaded
    assert "size mismatch for norm.weight" in printed and "(32,)" in printed


@runs_a_notebook
def test_checkpoints_notebook_outputs(tmp_path):
    (saved, damaged, resharded), printed, images = shown("checkpoints", tmp_path)
    assert "18 tensors" in saved and "1 rank, step 150" in saved and "<details" in saved
    assert "1 problem" in damaged and "altered" in damaged and "layers.1.weight" in damaged
    assert "4 ranks, step 150" in resharded
    assert "its bytes have changed since they were written" in printed
    assert "restored: step 120" in printed
    assert "3 {'layers.1.weight': (64, 256), 'out.weight': (0, 256)}" in printed
    if importlib.util.find_spec("matplotlib"):
        assert images


@runs_a_notebook
def test_gradients_notebook_outputs(tmp_path):
    (report, verified), printed, images = shown("gradients", tmp_path)
    assert "1.01 MiB of gradients in 5 buckets" in report and "<table>" in report
    assert "1 of 12 gradients differs" in verified and "layers.3.weight" in verified
    steps = re.findall(r"step (\d+): accuracy (\S+), norm", printed)
    assert [step for step, _ in steps] == ["40", "80", "120"]
    assert float(steps[-1][1]) > 0.9
    assert "bytes, the same for each size of buckets" in printed
    prefix = "scatter_multiple on rank 0: a gradient was"
    refused = f"{prefix} refused, nothing was stored on any rank:"
    failed = f"{prefix} not reduced, all others were:"
    assert f"{failed} 'layers.2.weight': NaN or infinite elements (rank 1: 1)" in printed
    assert f"{refused} 'layers.1.bias': rank 1: no gradient was passed" in printed
    assert f"{refused} 'out.weight': rank 1: the gradient has shape (256, 1), expected" in printed
    assert re.findall(r"\((\d+) of 12 are reduced\)", printed) == ["11", "0", "0"]
    assert "'layers.1.bias': missing on rank 1 (rank 1 reduces 'layers.0.bias')" in printed
    if importlib.util.find_spec("torch"):
        assert "1 {'0.weight': (32, 2), '0.bias': (32,), '2.weight': (0, 64)" in printed
    if importlib.util.find_spec("matplotlib"):
        assert len(images) == 2


@runs_a_notebook
def test_activation_notebook_outputs(tmp_path):
    pytest.importorskip("torch", reason="its model is one of torch")
    (chain, curve, planned_page, noisy), printed, images = shown("activation", tmp_path)
    assert "8 blocks" in chain and "layers.7" in chain
    assert "points from" in curve and "found to the byte" in curve
    assert "the fastest of all persistent schedules within the budget" in planned_page
    assert "3 blocks were run again: 1 finding" in noisy and "elements differ" in noisy
    assert "blocks were run again: all gave the same bits" in printed
    peaks = re.findall(r"predicted (\S+) MiB, measured (\S+)", printed)
    (unplanned, before), (planned, after) = [tuple(map(float, pair)) for pair in peaks]
    assert abs(before - unplanned) < 0.02 * unplanned
    assert abs(after - planned) < 0.02 * planned
    assert after < 0.46 * before
    assert "gradients: bit-identical" in printed
    first, last = re.findall(r"loss (\S+) -> (\S+)", printed)[0]
    assert float(last) < float(first)
    if importlib.util.find_spec("matplotlib"):
        assert len(images) == 2


@runs_a_notebook
def test_training_notebook_outputs(tmp_path):
    (handle, tiers), printed, images = shown("training", tmp_path)
    assert "24.00 MiB of 24.00 MiB" in handle and "the caller waited" in handle
    assert "8 units, 24.00 MiB: 3 warm (9.00 MiB of 9.00 MiB), 5 cold" in tiers
    assert "warm to cold: " in tiers and "experts.7" in tiers
    under_way = re.findall(r"step (\d+): loss (\S+), while step \d+ is written", printed)
    assert under_way[0][0] == "20"
    assert float(under_way[-1][1]) < float(under_way[0][1])
    shares = [
        int(share) for share in re.search(r"^0%, .*100%$", printed, re.M)[0].split("%, ")[:-1]
    ]
    assert shares == sorted(shares)
    assert "saved: [40, 60] by <SaveHandle of" in printed
    assert "ended by SIGKILL" in printed
    newest = re.search(r"checkpoints: \[(?:\d+, )*(\d+)\] True", printed)[1]
    assert int(newest) in (20, 30) and f"resumed from step {newest}\n" in printed
    assert "step 60 is bit-identical: True" in printed
    assert "'experts.0': 'warm'" in printed and "'experts.7': 'cold'" in printed
    assert "step 120 is what memory for all would have given: True" in printed
    assert printed.endswith("cold warm\n")
    if importlib.util.find_spec("matplotlib"):
        assert len(images) == 1


@runs_a_notebook
def test_rolling_cache_notebook_outputs(tmp_path):
    pytest.importorskip("matplotlib", reason="its plots")
    (ring, rolled, strategy, ladder), printed, images = shown("rolling_cache", tmp_path)
    assert "RollingKVState: 8 of 8 positions" in ring
    assert "RollingKVState: 256 of 256 positions" in rolled and "744" in rolled
    assert "CombinedStrategy: prefill 512, generate 256" in strategy
    assert "grow to 128" in ladder
    assert "positions [ 0  1  8  9 10  5  6  7]" in printed
    assert "256 tokens held, 744 evicted, 256 KiB" in printed
    assert "(1, 1, 64, 512) 65536 bytes" in printed
    assert "below 0.001: True" in printed
    assert len(images) == 3


@runs_a_notebook
def test_mlx_prompt_cache_notebook_outputs(tmp_path):
    pytest.importorskip("mlx_lm", reason="its model is one of mlx-lm")
    (state, moved, quantized), printed, _ = shown("mlx_prompt_cache", tmp_path)
    assert "60 of 256 positions" in state and "window 32" in state
    assert "100 of 1,024 positions" in moved
    assert "8 bits, groups of 64" in quantized
    assert printed.count("the same 40 tokens: True") == 3
    assert "prompt cache of mlx-lm 0.32 or later, 4 layers, 60 tokens" in printed
    assert "its bytes have changed since they were written" in printed
    assert "moved: 256 positions, 60 tokens" in printed
    assert "older ones were evicted" in printed
    assert "mlx-lm can trim it: False" in printed


@runs_a_notebook
def test_transformers_caches_notebook_outputs(tmp_path):
    pytest.importorskip("transformers", reason="its model and caches")
    pytest.importorskip("matplotlib", reason="its plot")
    (ladder, state), printed, images = shown("transformers_caches", tmp_path)
    assert "grow to 128" in ladder and "grow to 256" in ladder
    assert "CacheState: 199 of 256 positions" in state
    assert "64 tokens: 64 -> 128 positions\n128 tokens: 128 -> 256 positions\n" in printed
    assert "all tokens are equal: True" in printed
    assert "the next 20 tokens are equal: True" in printed
    assert len(images) == 1


@runs_a_notebook
def test_follow_notebook_outputs(tmp_path):
    pytest.importorskip("torch", reason="its policy")
    pytest.importorskip("matplotlib", reason="its plot")
    _, printed, images = shown("follow", tmp_path)
    assert "rollout ended by SIGKILL\ntrainer ended by SIGKILL\n" in printed
    assert "the trainer ended with status 0\n" in printed
    assert "weights: the publisher started a new lineage at step " in printed
    versions, wrong = re.search(r"(\d+) versions were followed, (\d+) of", printed).groups()
    assert int(versions) >= 90 and wrong == "0"
    assert float(re.search(r"median delta: (\S+)% of a copy", printed)[1]) < 25
    assert len(images) == 1


@pytest.mark.slow
def test_a_notebook_that_fails_is_noticed(tmp_path):
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "source": "1 / 0"}
    wrong = {"cells": [cell | {"execution_count": None}], "metadata": {}}
    path = tmp_path / "wrong.ipynb"
    path.write_text(json.dumps(wrong | {"nbformat": 4, "nbformat_minor": 5}), encoding="utf-8")
    process, cells = execute(path, tmp_path)
    assert process.returncode != 0 and "ZeroDivisionError" in process.stderr
    assert not cells
