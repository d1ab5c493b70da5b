"""The extension module: loaded once, in the main interpreter only, with few imports."""

import inspect
import os
import re

import child
import pytest

import mlstate
from mlstate import _core, checkpoint, coreml, kv

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
    import mlstate._core
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
        "import mlstate._core",
        "spec = importlib.util.spec_from_file_location('mlstate._core', PATH); "
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))",
    ],
)
def test_a_second_load_is_refused(again):
    code = f"""
import importlib.util, sys
import mlstate, mlstate._core
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


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        ("MLSTATE_CPU", ("sse9", "AVX2", "scalar ")),
        ("MLSTATE_COPY", ("fast", "Plain", "stream2")),
    ],
)
def test_an_unknown_name_in_the_environment_fails_the_import(variable, names):
    for name in names:
        done = child.attempt("import mlstate.state", **{variable: name})
        assert done.returncode == 1
        assert re.search(rf"ImportError: {variable}: .*'{name}'", done.stderr)


def test_a_failed_import_can_be_tried_again():
    code = """
import os
os.environ["MLSTATE_CPU"] = "sse9"
try:
    import mlstate.state
except ImportError as error:
    assert "sse9" in str(error), error
else:
    raise AssertionError("imported")
os.environ["MLSTATE_CPU"] = "scalar"
import mlstate.state
print(mlstate._core.cpu_name())
"""
    assert child.run(code).strip() == "scalar"


@pytest.mark.skipif("COVERAGE_FILE" in os.environ, reason="coverage imports html")
def test_unused_modules_are_not_loaded():
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
    assert str(error) == "module 'mlstate' has no attribute 'laod'; did you mean 'load'?"
else:
    raise AssertionError
"""
    assert child.run(code).strip() == ""


def test_a_single_file_loads_none_of_the_checkpoints(tmp_path):
    code = f"""
import sys
import numpy as np
import mlstate
path = {str(tmp_path / "a.safetensors")!r}
mlstate.save_file({{"a": np.arange(5.0)}}, path)
assert list(mlstate.load_file(path)["a"]) == [0, 1, 2, 3, 4]
print(*(name for name in sys.modules if name.startswith("mlstate.checkpoint")))
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


NAMES_OF_THE_DESIGN = {
    mlstate: "save_file load_file MLStateError",
    coreml: "state_specs plan_transition FakeMLState",
    kv: """
        StateTransitionManager validate_state_shapes get_transition_info
        transition_coreml_state compact_coreml_state
        create_attention_size_mask create_decode_mask create_causal_mask
        KVState RollingKVState CacheEntry CacheSpec CacheState
        ContextLadder CombinedStrategy rotate_keys
    """,
}


def test_the_names_of_the_design():
    for module, names in NAMES_OF_THE_DESIGN.items():
        assert set(names.split()) <= set(module.__all__)
    for module in (mlstate, kv):
        assert {"transition_kv_state", "compact_kv_state"} <= set(module.__all__)


# ---- the private functions ----


FUNCTIONS = {
    name: len(inspect.signature(function).parameters)
    for name, function in inspect.getmembers(_core, inspect.isbuiltin)
}


@pytest.mark.parametrize(("name", "count"), FUNCTIONS.items(), ids=FUNCTIONS)
def test_functions_count_their_arguments(name, count):
    for argument_count in {0, count - 1, count + 1} - {-1, count}:
        with pytest.raises(
            TypeError, match=f"{name} takes {count} argument.*, got {argument_count}"
        ):
            getattr(_core, name)(*[None] * argument_count)


def test_the_buffer_counts_its_arguments():
    for arguments in ((), ((1, 1), 1, "f2"), ((1, 1), 1, "f2", -2, 1)):
        with pytest.raises(TypeError):
            _core.KVBuffer(*arguments)
    with pytest.raises(TypeError, match="no keywords"):
        _core.KVBuffer((1, 1), 1, "f2", -2, more=1)
    buffer = _core.KVBuffer((1, 2, 3, 4), 5, "f2", -2)
    assert buffer.extent() == ((1, 2, 3, 4), 5) and buffer.seq_axis == 2
    for arguments in ((), (1,), (1, 1, 1)):
        with pytest.raises(TypeError):
            buffer.resize(*arguments)
    with pytest.raises(TypeError):
        buffer.reserve()
    with pytest.raises(AttributeError):
        buffer.dtype = "f4"


# Every call below must return, or raise an exception other than SystemError: a SystemError, like a
# crash, is a defect of the binding.
WRONG_ARGUMENTS = """
import pathlib
import random
import sys
import numpy as np
import mlstate
from mlstate import _core
from mlstate.collectives._local_rendezvous import make_memory

SIMPLE = [None, 0, -1, 3, True, 2**31, 2**63 - 1, -(2**63), 2**200, 1.5, float("nan"), b"{}", "w"]
SIMPLE += ["sum", "float32", "params", chr(0xD800), bytearray(3), object(), int, np.zeros((2, 3))]
draw = random.Random(7)


def value(depth=0):
    kind = draw.randrange(8)
    if kind > 2 or depth == 3:
        return draw.choice(SIMPLE)
    inside = [value(depth + 1) for _ in range(draw.randrange(4))]
    return [inside, tuple(inside), {"w": inside}][kind]


def attack(owner, prefix=""):
    for name in dir(owner):
        function = getattr(owner, name)
        if name.startswith("__") or not callable(function):
            continue
        if name == "local_join":  # owns the descriptor that it takes, so 1 would close stdout
            continue
        print(prefix + name, file=sys.stderr, flush=True)  # the last one, if this crashes
        signature = getattr(function, "__text_signature__", None) or ""
        for count in [*range(14), *[signature.count(",")] * TRIES]:
            given = [value() for _ in range(count)]
            try:
                function(*given)
            except SystemError as error:
                raise AssertionError(f"{prefix}{name}(*{given})") from error
            except Exception:
                pass


attack(_core)
mlstate.save("ckpt", {"w": np.zeros(3)})
index = next(pathlib.Path("ckpt/index").iterdir())
for one in [
    _core.MergedIndex((index.read_bytes(),), (str(index),)),
    _core.Descriptor("ckpt", 0),
    _core.KVBuffer((1, 2, 3, 4), 5, "f2", -2),
    _core.StateDict(w=np.zeros(3)),
    _core.local_join(1, 0, make_memory(_core.local_measure(1))),
    _core.IntervalStrategy(2),
    _core.SelectiveStrategy(),
    _core.SizeBasedStrategy(3),
    _core.MemoryAwareStrategy(100, (), (), 0.5, lambda: 0.0),
    _core.SmartStrategy(),
]:
    attack(one, f"{type(one).__name__}.")
print("all")
"""


@pytest.mark.parametrize("tries", [30, pytest.param(150, marks=pytest.mark.long)])
def test_no_wrong_argument_is_a_system_error_or_a_crash(tmp_path, tries):
    code = f"import os; os.chdir({str(tmp_path)!r})\nTRIES = {tries}\n{WRONG_ARGUMENTS}"
    assert child.run(code).endswith("all\n")


def test_a_tuple_inside_an_argument_is_checked():
    for wrong in (None, 5, [0, 1]):
        with pytest.raises(TypeError, match="ranks must be a tuple"):
            _core.shards_collect(wrong, ({}, {}, None), checkpoint.Shard, None, ())
        with pytest.raises(TypeError, match="states must be a tuple"):
            _core.shards_collect((0, 1), wrong, checkpoint.Shard, None, ())
        with pytest.raises(TypeError, match="a section must be a tuple"):
            _core.targets_tied([wrong], 1)
