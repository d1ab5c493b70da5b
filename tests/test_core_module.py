"""The extension module itself: loaded once, in the main interpreter, importing little."""

import child
import pytest

import mlstate
from mlstate import _core, checkpoint, coreml, errors, kv, threads

# ---- loading ----

SUB_INTERPRETER = """
import importlib.util, sys
try:
    import _interpreters as interpreters
except ImportError:
    try:
        import _xxsubinterpreters as interpreters
    except ImportError:
        print("none here")
        sys.exit()
inside = '''
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
try:
    spec = spec_from_file_location("mlstate._core", PATH)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
except ImportError as error:
    text = f"refused: {error}"
else:
    text = "loaded"
import os
os.write(1, (text + chr(10)).encode())
'''.replace("PATH", repr(PATH))
if FIRST:
    import mlstate
interpreter = interpreters.create()
problem = interpreters.run_string(interpreter, inside)
if problem:
    print(problem)
interpreters.destroy(interpreter)
import mlstate
print(mlstate.kv.create_decode_mask(2, 0, 1, dtype="f4").tolist())
"""


@pytest.mark.parametrize("first", [False, True])
def test_a_sub_interpreter_is_refused(first):
    code = f"PATH, FIRST = {_core.__file__!r}, {first}\n" + SUB_INTERPRETER
    text = child.run(code, PYTHONWARNINGS="ignore")
    if text.startswith("none here"):
        pytest.skip("this Python has no sub-interpreters to try")
    refusal, _, rest = text.partition("\n")
    assert refusal.startswith("refused: ") and "interpreters" in refusal
    assert rest.strip() == "[[[[-inf, 0.0]]]]", "the main interpreter works as ever"


@pytest.mark.parametrize(
    "again",
    [
        "sys.modules.pop('mlstate._core', None); import mlstate._core",
        "[sys.modules.pop(n) for n in list(sys.modules) if n.startswith('mlstate')]; "
        "import mlstate",
        "spec = importlib.util.spec_from_file_location('mlstate._core', PATH); "
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))",
    ],
)
def test_a_second_load_is_refused(again):
    code = f"""
import importlib.util, sys
import mlstate
PATH = mlstate._core.__file__
mask = mlstate.kv.create_decode_mask
for _ in range(3):
    try:
        {again}
    except ImportError as error:
        assert "loaded before" in str(error), error
    else:
        raise AssertionError("loaded twice")
print(mask(2, 0, 1, dtype="f4").tolist())
"""
    assert child.run(code).strip() == "[[[[-inf, 0.0]]]]"


def test_a_module_that_was_never_run_is_dropped_quietly():
    code = f"""
import gc, importlib.util
spec = importlib.util.spec_from_file_location("mlstate._core", {_core.__file__!r})
for _ in range(10):
    module = importlib.util.module_from_spec(spec)
    gc.collect()
    del module
gc.collect()
import mlstate
"""
    child.run(code)


def test_an_unknown_instruction_set_fails_the_import():
    for name in ("sse9", "AVX2", "scalar "):
        done = child.attempt("import mlstate", MLSTATE_CPU=name)
        assert done.returncode == 1
        assert f"ImportError: MLSTATE_CPU: instruction set '{name}'" in done.stderr
        assert "choose one of: scalar" in done.stderr


def test_a_failed_import_can_be_tried_again():
    code = """
import os
os.environ["MLSTATE_CPU"] = "sse9"
try:
    import mlstate
except ImportError as error:
    assert "sse9" in str(error), error
else:
    raise AssertionError("imported")
os.environ["MLSTATE_CPU"] = "scalar"
import mlstate
print(mlstate._core.cpu_name())
"""
    assert child.run(code).strip() == "scalar"


def test_import_loads_no_framework():
    code = """
import sys, mlstate
print(*{"torch", "coremltools", "matplotlib", "ml_dtypes", "safetensors"} & set(sys.modules))
"""
    assert child.run(code).strip() == ""


def test_what_is_not_used_is_not_loaded():
    code = """
import sys, mlstate
late = {"mlstate.checkpoint", "mlstate.collectives", "mlstate.fsdp", "html"}
print(*late & set(sys.modules))
assert {"save", "load", "checkpoint", "fsdp"} <= set(dir(mlstate))
assert mlstate.save is mlstate.checkpoint.save and mlstate.save is sys.modules["mlstate"].save
from mlstate import fsdp, load, verify
assert mlstate.fsdp is fsdp is sys.modules["mlstate.fsdp"]
try:
    mlstate.laod
except AttributeError as error:
    assert str(error) == "module 'mlstate' has no attribute 'laod'"
else:
    raise AssertionError
"""
    assert child.run(code).strip() == ""


def test_working_loads_no_framework():
    code = """
import sys
import numpy as np
from mlstate import kv
cache = np.ones((1, 2, 3, 4), np.float16)
kv.transition_kv_state(cache, 8, dtype="float32", out=np.empty((1, 2, 8, 4), np.float32))
kv.KVState.from_array(cache, 9).resize(9)
kv.create_decode_mask(4, 1, 2)
for out in ([], cache):
    try:
        kv.transition_kv_state(cache, 8, out=out)
    except (TypeError, ValueError):
        pass
print(*{"torch", "coremltools", "matplotlib", "ml_dtypes", "safetensors"} & set(sys.modules))
"""
    assert child.run(code).strip() == ""


# ---- names ----


@pytest.mark.parametrize("module", [mlstate, checkpoint, coreml, errors, kv, threads], ids=str)
def test_exported_names_resolve(module):
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_the_names_of_the_design():
    for name in [
        "save_file",
        "load_file",
        "transition_kv_state",
        "compact_kv_state",
        "set_num_threads",
        "MLStateError",
    ]:
        assert name in mlstate.__all__
    for name in [
        "transition_kv_state",
        "compact_kv_state",
        "validate_state_shapes",
        "get_transition_info",
        "StateTransitionManager",
        "transition_coreml_state",
        "compact_coreml_state",
        "create_attention_size_mask",
        "create_decode_mask",
        "create_causal_mask",
        "KVState",
    ]:
        assert name in kv.__all__
    for name in ["state_specs", "plan_transition", "FakeMLState"]:
        assert name in coreml.__all__


# ---- the functions behind the public ones ----


@pytest.mark.parametrize(
    ("name", "count"), [("kv_move", 8), ("kv_check", 4), ("kv_check_shapes", 3), ("kv_mask", 7)]
)
def test_functions_count_their_arguments(name, count):
    for given in {0, count - 1, count + 1}:
        with pytest.raises(TypeError, match=f"{name} takes {count} arguments, got {given}"):
            getattr(_core, name)(*[None] * given)


def test_the_buffer_counts_its_arguments():
    for arguments in ((), (1, 1, 1, 1, 1), (1, 1, 1, 1, 1, "f2", 1)):
        with pytest.raises(TypeError):
            _core.KVBuffer(*arguments)
    with pytest.raises(TypeError, match="no keywords"):
        _core.KVBuffer(1, 1, 1, 1, 1, "f2", more=1)
    made = _core.KVBuffer(1, 2, 3, 4, 5, "f2")
    assert made.extent() == (1, 2, 3, 4, 5)
    for arguments in ((), (1,), (1, 1, 1)):
        with pytest.raises(TypeError):
            made.resize(*arguments)
    with pytest.raises(TypeError):
        made.reserve()
    with pytest.raises(AttributeError):
        made.dtype = "f4"
