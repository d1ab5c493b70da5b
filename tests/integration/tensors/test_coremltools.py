"""Packages made by coremltools' converter, read as coremltools reads them."""

import gc
import logging
import sys
import warnings

import numpy as np
import pytest

from mlstate.coreml import (
    FakeMLState,
    StateManager,
    StateShapeWarning,
    StateSpecs,
    plan_transition,
    state_specs,
    transition_coreml_state,
)

pytestmark = [pytest.mark.coremltools, pytest.mark.torch]


with warnings.catch_warnings():
    # The libraries warn about untested versions and their own internals.
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="torch makes the models to convert")
    ct = pytest.importorskip("coremltools", reason="coremltools is the peer to agree with")
logging.getLogger("coremltools").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def peers_may_warn():
    """Only warnings of the libraries are ignored; a warning of mlstate still fails a test."""
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("error", category=StateShapeWarning)


@pytest.fixture(scope="module", autouse=True)
def peers_may_litter():
    """coremltools leaves temporary folders to the garbage collector, which warns of each."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


class Cache(torch.nn.Module):
    """Writes the first position of every state, and sums the states."""

    def __init__(self, states):
        super().__init__()
        self.names = list(states)
        for name, shape in states.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float16))

    def forward(self, tokens):
        total = tokens.sum()
        for name in self.names:
            buffer = getattr(self, name)
            buffer[:, :, 0:1, :] = buffer[:, :, 1:2, :] + tokens
            total = total + buffer.sum()
        return total.reshape(1)


def convert(states):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        width = next(iter(states.values()))[-1]
        traced = torch.jit.trace(Cache(states).eval(), torch.ones(1, width, dtype=torch.float16))
        return ct.convert(
            traced,
            inputs=[ct.TensorType(name="tokens", shape=(1, width), dtype=np.float16)],
            outputs=[ct.TensorType(name="total", dtype=np.float16)],
            states=[
                ct.StateType(wrapped_type=ct.TensorType(shape=shape, dtype=np.float16), name=name)
                for name, shape in states.items()
            ],
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )


def peer_functions(spec):
    """{function: [(state, dtype number, shape)]}, as coremltools' protobuf reads it."""
    owners = [(function.name, function.state) for function in spec.description.functions]
    owners = owners or [("main", spec.description.state)]
    return {
        name: [
            (
                state.name,
                state.type.stateType.arrayType.dataType,
                tuple(state.type.stateType.arrayType.shape),
            )
            for state in states
        ]
        for name, states in owners
    }


NUMBERS = {"float16": 65552, "float32": 65568, "float64": 65600, "int32": 131104, "int8": 131080}


def our_functions(specs):
    return {
        name: [(spec.name, NUMBERS[spec.dtype.name], spec.shape) for spec in states.values()]
        for name, states in specs.functions.items()
    }


def agree(source, path):
    specs = state_specs(source)
    assert our_functions(specs) == peer_functions(ct.utils.load_spec(str(path)))
    return specs


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    models = {
        "small": {"kv_cache": (4, 1, 64, 32)},
        "large": {"kv_cache": (4, 1, 128, 32)},
        "several": {f"layer_{i}_{kind}": (1, 2, 64, 32) for i in range(3) for kind in "kv"},
    }
    paths = {}
    for name, states in models.items():
        paths[name] = folder / f"{name}.mlpackage"
        convert(states).save(str(paths[name]))
    joined = ct.utils.MultiFunctionDescriptor()
    joined.add_function(str(paths["small"]), src_function_name="main", target_function_name="c64")
    joined.add_function(str(paths["large"]), src_function_name="main", target_function_name="c128")
    joined.default_function_name = "c64"
    paths["multi"] = folder / "multi.mlpackage"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ct.utils.save_multifunction(joined, str(paths["multi"]))
    return paths


@pytest.mark.parametrize("name", ["small", "large", "several", "multi"])
def test_agrees_with_coremltools_on_its_packages(packages, name):
    path = packages[name]
    specs = agree(path, path)
    assert specs.default_function == ("c64" if name == "multi" else "main")
    assert len(specs) == (6 if name == "several" else 1)
    (file,) = path.glob("Data/*/model.mlmodel")
    assert our_functions(state_specs(file)) == our_functions(specs)
    assert our_functions(state_specs(file.read_bytes())) == our_functions(specs)


@pytest.mark.parametrize("name", ["small", "several", "multi"])
def test_reads_models_and_specifications(packages, name):
    path = packages[name]
    model = ct.models.MLModel(str(path), skip_model_load=True)
    functions = our_functions(agree(path, path))
    assert our_functions(state_specs(model)) == functions
    assert our_functions(state_specs(model.get_spec())) == functions
    assert our_functions(state_specs(ct.utils.load_spec(str(path)))) == functions


def test_takes_the_function_that_a_model_was_loaded_for(packages):
    model = ct.models.MLModel(str(packages["multi"]), skip_model_load=True, function_name="c128")
    specs = state_specs(model)
    assert (specs.function, specs.default_function) == ("c128", "c64")
    assert specs["kv_cache"].seq_length == 128


def test_chunks_of_several_contexts_are_read_as_anemll_combines_them(packages, tmp_path):
    yaml = pytest.importorskip("yaml", reason="meta.yaml is written and read with PyYAML")
    names = [f"qwen_FFN_PF_statex_chunk_{i:02d}of02.mlpackage" for i in (1, 2)]
    for name in names:
        chunk = ct.utils.MultiFunctionDescriptor()
        for size, source in ((64, "small"), (128, "large")):
            chunk.add_function(str(packages[source]), "main", f"infer_ctx{size}")
        chunk.default_function_name = "infer_ctx64"
        ct.utils.save_multifunction(chunk, str(tmp_path / name))
    parameters = {
        "context_length": 128,
        "num_chunks": 2,
        "ffn": names[0].replace("mlpackage", "mlmodelc"),
        "state_transition_infer_contexts": [64, 128],
        "state_transition_infer_function_template": "infer_ctx{context}",
        "state_transition_infer_default_function": "infer_ctx128",
    }
    info = {"name": "m", "description": "two\nlines: {a}", "parameters": parameters}
    (tmp_path / "meta.yaml").write_text(yaml.safe_dump({"model_info": info}, sort_keys=False))
    specs = state_specs(tmp_path)
    assert our_functions(specs) == our_functions(agree(tmp_path / names[0], tmp_path / names[1]))
    assert specs.function == "infer_ctx128" and specs["kv_cache"].seq_length == 128
    plan = plan_transition(tmp_path / "*.mlpackage", tmp_path, 50)
    assert plan.fits and plan.moves[0].direction == "expand"
    chunks = [
        ct.models.MLModel(str(tmp_path / name), skip_model_load=True, function_name="infer_ctx128")
        for name in names
    ]
    assert state_specs(chunks) == specs


def test_reads_the_new_name_of_a_renamed_state(packages):
    model = ct.models.MLModel(str(packages["small"]), skip_model_load=True)
    spec = model.get_spec()
    spec.description.state[0].name = "renamed"
    assert list(state_specs(spec)) == ["renamed"]


@pytest.mark.parametrize(
    ("kind", "suffix"), [("mlprogram", "mlpackage"), ("neuralnetwork", "mlmodel")]
)
def test_agrees_on_models_without_states(tmp_path, kind, suffix):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(torch.nn.ReLU().eval(), torch.ones(1, 4))
        inputs = [ct.TensorType(shape=(1, 4))]
        model = ct.convert(traced, inputs=inputs, convert_to=kind, skip_model_load=True)
    path = tmp_path / f"m.{suffix}"
    model.save(str(path))
    assert agree(path, path) == {}


def test_a_real_package_off_32_warns(tmp_path):
    path = tmp_path / "m.mlpackage"
    convert({"kv_cache": (1, 3, 64, 270)}).save(str(path))
    with pytest.warns(StateShapeWarning, match=r"axis 3 \(head dimension\) is 270"):
        state_specs(path)


DTYPES = sorted(NUMBERS.values())


@pytest.mark.parametrize("seed", range(20))
def test_agrees_on_random_specifications(seed):
    """Specifications written by protobuf itself, with unrelated fields."""
    rng = np.random.default_rng(seed)
    spec = ct.proto.Model_pb2.Model()
    spec.specificationVersion = 9
    spec.description.metadata.shortDescription = "x" * int(rng.integers(0, 300))
    spec.description.input.add().name = "tokens"
    spec.mlProgram.version = 1

    def add_states(owner):
        for i in range(int(rng.integers(0, 5))):
            state = owner.state.add()
            state.name = f"état_{i}"
            state.shortDescription = "unread"
            state.type.isOptional = bool(rng.integers(2))
            array = state.type.stateType.arrayType
            array.shape.extend(int(n) for n in rng.integers(1, 1 << 9, rng.integers(1, 6)))
            array.dataType = int(rng.choice(DTYPES))

    if rng.integers(2):
        for i in range(int(rng.integers(1, 4))):
            function = spec.description.functions.add()
            function.name = f"function_{i}"
            function.input.add().name = "tokens"
            add_states(function)
        spec.description.defaultFunctionName = "function_0"
    else:
        add_states(spec.description)
    warnings.filterwarnings("ignore", category=StateShapeWarning)
    for source in (spec, spec.SerializeToString()):
        assert our_functions(state_specs(source)) == peer_functions(spec)


def unpack_shapes(spec):
    """The same specification with every shape unpacked, number by number."""
    from mlpackage_writer import spec_bytes, state

    return spec_bytes(
        *(
            state(name, shape, dtype, packed=False)
            for states in peer_functions(spec).values()
            for name, dtype, shape in states
        )
    )


def test_unpacked_shapes_read_the_same_in_both(packages):
    spec = ct.utils.load_spec(str(packages["several"]))
    unpacked = unpack_shapes(spec)[: -len(b"\xb2\x1f\x0bthe program")]
    peer = ct.proto.Model_pb2.Model.FromString(unpacked)
    assert peer_functions(peer) == peer_functions(spec)
    assert our_functions(state_specs(unpacked)) == peer_functions(spec)


def test_packages_plan_and_carry_a_state(packages):
    small, large = state_specs(packages["small"]), state_specs(packages["large"])
    assert isinstance(small, StateSpecs)
    plan = plan_transition(packages["small"], packages["large"], 50)
    assert plan.fits
    assert plan == plan_transition(packages["multi"], packages["multi"], 50, target_function="c128")
    source, target = FakeMLState(small), FakeMLState(large)
    source.write_state("kv_cache", np.ones(small["kv_cache"].shape, np.float32))
    transition_coreml_state(source, target, "kv_cache", 50, specs=large)
    assert np.count_nonzero(target.read_state("kv_cache")) * 2 == plan.copied_bytes
    assert (source.reads, target.writes) == (1, 1)


def test_the_double_has_the_methods_of_the_real_state():
    """Same method names and parameters, so that keyword calls work on either."""
    import inspect

    for name in ("read_state", "write_state"):
        real = inspect.signature(getattr(ct.models.model.MLState, name))
        signature = inspect.signature(getattr(FakeMLState, name))
        assert list(real.parameters) == list(signature.parameters)


@pytest.mark.parametrize("names", [{64: "small", 128: "large"}, {64: "multi", 128: "multi"}])
def test_a_manager_reads_the_states_of_loaded_models(packages, names):
    def load(size):
        function = f"c{size}" if names[size] == "multi" else None
        return ct.models.MLModel(
            str(packages[names[size]]), function_name=function, skip_model_load=True
        )

    manager = StateManager({size: load(size) for size in names})
    assert "kv_cache (4, 1, 64, 32)" in manager._repr_html_()
    assert "kv_cache (4, 1, 128, 32)" in manager._repr_html_()
    if sys.platform != "darwin":
        with pytest.raises(Exception, match="only supported on macOS"):
            manager.state  # noqa: B018
    with pytest.raises(ValueError, match=r"no state of 65 positions at axis -2.* \(4, 1, 64, 32\)"):
        StateManager({65: load(64)})
