"""Convert the demo's model into Core ML packages: ``mlstate/demo/data/model_*.mlpackage``.

Run from the root of a checkout after training: ``python tools/make_demo_packages.py``. Needs torch,
coremltools and safetensors. Every package holds the weights of ``model.safetensors`` in float16 and
a float16 state ``kv_cache``; coremltools converts them. The script writes

- ``model_256.mlpackage``: one token a call, context 256;
- ``model_512.mlpackage``: 64 tokens a call, context 512;
- ``model_multi.mlpackage``: both, as functions ``decode_256`` and ``prefill_512`` over one set
  of weights.

It reads the packages back and checks them before it puts them in place: the states of each
function, and every weight, bit for bit. Fixed identifiers and dates replace those that change in
each run of coremltools, so that a second run with the same versions changes nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.frontend.milproto.load import load as load_mil
from demo_torch_model import CharTransformer, Config, StatefulTransformer
from safetensors import safe_open

STATE = "kv_cache"
#: name of the function -> (context, tokens in one call)
FUNCTIONS = {"decode_256": (256, 1), "prefill_512": (512, 64)}
MULTI_NAME = "model_multi.mlpackage"
SINGLE_NAMES = {"decode_256": "model_256.mlpackage", "prefill_512": "model_512.mlpackage"}
#: Metadata keys that change from run to run.
VOLATILE_KEYS = ("com.github.apple.coremltools.conversion_date",)


def load_model(path: Path) -> CharTransformer:
    """Return the trained model; weights are float16 values held as float32."""
    with safe_open(path, framework="pt") as file:
        config = Config(**json.loads(file.metadata()["config"]))
        tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    model = CharTransformer(config)
    model.load_state_dict(tensors)
    return model.eval()


def state_shape(config: Config, context: int) -> tuple[int, int, int, int]:
    """Return the shape of the state at ``context``."""
    return (2 * config.layers, config.heads, context, config.head_dim)


def convert(model: CharTransformer, context: int, length: int) -> ct.models.MLModel:
    """Trace the stateful model and convert it; nothing is compiled or run."""
    module = StatefulTransformer(model, context, length).eval()
    example = (torch.zeros((1, length), dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, example, check_trace=False)
    state = ct.StateType(
        wrapped_type=ct.TensorType(shape=state_shape(model.config, context), dtype=np.float16),
        name=STATE,
    )
    return ct.convert(
        traced,
        inputs=[
            ct.TensorType("tokens", shape=(1, length), dtype=np.int32),
            ct.TensorType("position", shape=(1,), dtype=np.int32),
        ],
        outputs=[ct.TensorType("logits", dtype=np.float16)],
        states=[state],
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT16,
        compute_units=ct.ComputeUnit.CPU_ONLY,
        skip_model_load=True,
    )


def reported_states(path: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return {function: {state: shape}} as coremltools reads it; a single function is ``main``."""
    description = ct.utils.load_spec(str(path)).description
    owners = {function.name: function.state for function in description.functions}
    owners = owners or {"main": description.state}
    half = ct.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT16
    states_by_name: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, states in owners.items():
        states_by_name[name] = {}
        for state in states:
            array = state.type.stateType.arrayType
            if array.dataType != half:
                raise SystemExit(f"{path.name}: state {state.name!r} of {name!r} is not float16")
            states_by_name[name][state.name] = tuple(array.shape)
    return states_by_name


def stored_arrays(path: Path) -> list[np.ndarray]:
    """Return all float constants of a package, in coremltools' intermediate representation."""
    model = ct.models.MLModel(str(path), skip_model_load=True)
    program = load_mil(
        model.get_spec(),
        specification_version=model.get_spec().specificationVersion,
        file_weights_dir=model.weights_dir,
    )
    arrays = []
    for function in program.functions.values():
        for operation in function.find_ops(op_type="const"):
            value = operation.outputs[0].val
            if isinstance(value, np.ndarray) and value.dtype == np.float16:
                arrays.append(value)
    return arrays


def check_weights(path: Path, model: CharTransformer) -> None:
    """Raise SystemExit unless every weight is in the package, bit for bit.

    The gains of the last axis may be stored with leading axes of length one.
    """
    stored = {(array.size, array.tobytes()) for array in stored_arrays(path)}
    for name, tensor in model.state_dict().items():
        array = tensor.numpy().astype(np.float16)
        if (array.size, array.tobytes()) not in stored:
            raise SystemExit(f"{path.name}: weight {name} {array.shape} is not in the package")


def settle(path: Path) -> None:
    """Replace values that change in each run: dates and identifiers."""
    spec = ct.utils.load_spec(str(path))
    for key in VOLATILE_KEYS:
        spec.description.metadata.userDefined.pop(key, None)
    (inner,) = path.glob("Data/*/model.mlmodel")
    inner.write_bytes(spec.SerializeToString(deterministic=True))
    manifest = path / "Manifest.json"
    content = json.loads(manifest.read_text())
    names: dict[str, str] = {}
    entries = sorted(content["itemInfoEntries"].items(), key=lambda item: item[1]["path"])
    for number, (identifier, _) in enumerate(entries, start=1):
        names[identifier] = f"00000000-0000-4000-8000-{number:012d}"
    content["itemInfoEntries"] = {names[key]: value for key, value in entries}
    content["rootModelIdentifier"] = names[content["rootModelIdentifier"]]
    manifest.write_text(json.dumps(content, indent=4, sort_keys=True) + "\n")


def make_packages(model: CharTransformer, folder: Path) -> list[Path]:
    """Write the two single-function packages and the multi-function one into ``folder``."""
    parts = ct.utils.MultiFunctionDescriptor()
    paths = []
    for function, (context, length) in FUNCTIONS.items():
        path = folder / SINGLE_NAMES[function]
        package = convert(model, context, length)
        package.short_description = f"Character model of the demo, context {context}"
        package.save(str(path))
        parts.add_function(str(path), src_function_name="main", target_function_name=function)
        paths.append(path)
    parts.default_function_name = next(iter(FUNCTIONS))
    path = folder / MULTI_NAME
    ct.utils.save_multifunction(parts, str(path))
    return [*paths, path]


def expected_states(config: Config, name: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the expected ``reported_states`` of the package ``name``."""
    shapes = {key: {STATE: state_shape(config, size[0])} for key, size in FUNCTIONS.items()}
    if name == MULTI_NAME:
        return shapes
    (function,) = (key for key, single in SINGLE_NAMES.items() if single == name)
    return {"main": shapes[function]}


def main() -> None:
    """Convert, check and put the packages in place."""
    data = Path(__file__).resolve().parent.parent / "mlstate/demo/data"
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else data
    model = load_model(data / "model.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        for path in make_packages(model, Path(folder)):
            settle(path)
            states, expected = reported_states(path), expected_states(model.config, path.name)
            if states != expected:
                raise SystemExit(f"{path.name}: states {states}, expected {expected}")
            check_weights(path, model)
            final = target / path.name
            shutil.rmtree(final, ignore_errors=True)
            shutil.copytree(path, final)
            size = sum(file.stat().st_size for file in final.rglob("*") if file.is_file())
            print(f"{path.name}: {size} bytes, states {states}")


if __name__ == "__main__":
    main()
