"""Leak cases of Core ML states."""

from pathlib import Path

import numpy as np
from leak_cases import case, each, raises, with_members

import mlstate
from mlstate import coreml, errors

PACKAGE = Path(mlstate.__file__).parent / "demo" / "data" / "model_256.mlpackage"


@case(
    "state_specs",
    "StateSpec",
    "StateSpecs",
    "plan_transition",
    *with_members("TransitionPlan", "to_dict"),
    "StateMove",
)
def specs(_):
    path = str(PACKAGE)

    def run():
        state_specs = coreml.state_specs(path)
        plan = coreml.plan_transition(state_specs, state_specs, 5)
        plan.to_dict()
        coreml.plan_transition([path, path], path, 5)
        str(plan)
        plan._repr_html_()

    return each(run, raises(OSError, coreml.state_specs, path + "x")), [path]


@case()
def hostile_specs(tmp_path):
    # valid protobuf, but no Core ML specification: rejected late in the reader
    folder = tmp_path / "bad.mlpackage"
    for name in ("Manifest.json", "Data/com.apple.CoreML/model.mlmodel"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data = (PACKAGE / name).read_bytes()
        (folder / name).write_bytes(data if name.endswith("json") else data[: len(data) // 2])
    return raises(errors.FormatError, coreml.state_specs, folder), [folder]


@case(
    *with_members("FakeMLState", "read_state write_state"),
    "transition_coreml_state",
    "compact_coreml_state",
)
def carried(_):
    small, large = (coreml.FakeMLState({"kv": (2, 3, n, 4)}) for n in (8, 16))
    specs = {"kv": coreml.StateSpec("kv", (2, 3, 16, 4), np.dtype(np.float16))}
    return each(
        lambda: coreml.transition_coreml_state(small, large, "kv", 5),
        lambda: coreml.transition_coreml_state(small, large, "kv", 5, specs=specs),
        lambda: coreml.transition_coreml_state([small, small], [large, large], ["kv"], 5),
        raises(ValueError, coreml.transition_coreml_state, [small], [large, large], "kv", 5),
        lambda: coreml.compact_coreml_state(large, small, "kv", 5),
        raises(ValueError, coreml.compact_coreml_state, large, small, "kv", 9),
        raises(RuntimeError, small.read_state, "none"),
        lambda: coreml.FakeMLState({"kv": (1, 1, 2, 3)}),
    ), [small, large, specs]


class Model:
    def __init__(self, size):
        self.shapes = {"kv": (2, 3, size, 4), "conv": (5,)}

    def get_spec(self):
        return self.shapes

    def make_state(self):
        return coreml.FakeMLState(self.shapes)


@case("StateManager")
def managed(_):
    models = {8: lambda: Model(8), 16: Model(16)}
    tokens = list(range(20))

    def fail(*_):
        raise RuntimeError

    def run():
        manager = coreml.StateManager(models, batch_size=4)
        manager.state.write_state("conv", np.ones(5, np.float32))
        manager.grow_if_needed(8)
        manager.refill(tokens, lambda *_: None)
        raises(RuntimeError, manager.refill, tokens, fail)()
        raises(ValueError, manager.shrink, 9, 8)()
        manager.shrink(5)
        manager._repr_html_()
        manager.load_state_dict(manager.state_dict())
        raises(ValueError, manager.load_state_dict, {"size": 4, "states": None})()
        manager.reset()
        manager.grow_if_needed(0, 16)
        manager.release()

    return run, [models, tokens]
