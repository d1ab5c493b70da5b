"""Old pickles and torch files load, and refer to public modules only."""

import io
import pickle
import pickletools
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from golden.pickled_objects import OBJECTS, PUBLIC, model_state, optimizer_state, state_dict

from mlstate import checkpoint

FOLDER = Path(__file__).parents[1] / "golden" / "pickles"
STATES = {"state_dict": state_dict, "model_state": model_state, "optimizer_state": optimizer_state}
# Their objects hold locks, memory, processes or callables of the user.
NEVER_PICKLED = {
    *(
        "Follower",
        "Publisher",
        "Snapshot",
        "Work",
        "LocalGroup",
        "Match",
        "PutHandle",
        "PromptStore",
        "SaveHandle",
        "Staging",
        "StateManager",
        "TieredState",
        "TieredUnit",
    ),
    *("FSDP", "FSDPBackwardHook", "GradientAccumulator", "ReduceScatterOperation", "SpotCheck"),
    *("ActivationManager", "MPIGroup", "PlannedModel", "TorchGroup"),
    *("MLStateCallback", "MLStateCheckpointIO"),
    *("CheckpointStrategy", "ProcessGroup", "Stateful"),  # protocols
}


class Recorder(pickle.Unpickler):
    """An unpickler that records its imports."""

    def __init__(self, data):
        super().__init__(io.BytesIO(data))
        self.found = {}

    def find_class(self, module, name):
        self.found[module, name] = super().find_class(module, name)
        return self.found[module, name]


def loaded(data):
    """Return the object, and the globals it needed: {(module, name): class or function}."""
    recorder = Recorder(data)
    return recorder.load(), recorder.found


def content(thing):
    """The content of an object, in a comparable form."""
    if isinstance(thing, np.ndarray):
        return thing.dtype.str, thing.shape, thing.tobytes()
    if isinstance(thing, checkpoint.Checkpoint):  # each save has its own number and time
        return thing.path, thing.step, thing.world_size, thing.metadata, set(thing.written)
    if isinstance(thing, type) or thing is None or isinstance(thing, str | bytes | int | float):
        return type(thing), thing
    if isinstance(thing, list | tuple | set) and type(thing).__reduce__ is object.__reduce__:
        return type(thing), [content(item) for item in thing]
    if type(thing) is dict:
        return [(content(key), content(value)) for key, value in thing.items()]
    if callable(thing) and hasattr(thing, "__qualname__"):
        return thing.__qualname__, content(getattr(thing, "__self__", None))
    make, *rest = thing.__reduce_ex__(4)
    parts = [list(part) if hasattr(part, "__next__") else part for part in rest]
    return make, [content(part) for part in parts]


def private(modules):
    """The names that belong to private modules of mlstate, which may be renamed."""
    return {name for name in modules if re.match(r"mlstate(\.|$)", name)} - set(PUBLIC)


@pytest.mark.parametrize("name", OBJECTS)
def test_stored_pickle_equals_the_original_object(name):
    data = (FOLDER / f"{name}.pickle").read_bytes()
    back, _ = loaded(data)
    expected = OBJECTS[name]()
    if name == "public_names":
        assert {key: expected.get(key) for key in back} == back
    else:
        assert type(back) is type(expected) and content(back) == content(expected)


@pytest.mark.parametrize("name", OBJECTS)
def test_pickles_name_public_modules_only(name):
    stored, current = (FOLDER / f"{name}.pickle").read_bytes(), OBJECTS[name]()
    for data in (stored, *(pickle.dumps(current, protocol) for protocol in (2, 4, 5))):
        assert not private(module for module, _ in loaded(data)[1])


def test_every_public_class_has_a_stored_pickle():
    classes = {c.__name__ for c in OBJECTS["public_names"]().values() if isinstance(c, type)}
    stored = [path for path in FOLDER.glob("*.pickle") if path.stem != "public_names"]
    pickled = {name for path in stored for _, name in loaded(path.read_bytes())[1]}
    assert classes - pickled == NEVER_PICKLED


@pytest.mark.torch
@pytest.mark.parametrize("name", STATES)
def test_a_stored_torch_file_loads(torch, name):
    import mlstate.integrations.torch  # noqa: F401  # lets weights_only read state dicts

    path = FOLDER / f"{name}.pt"
    back, expected = torch.load(path, weights_only=True), STATES[name]()
    assert type(back) is type(expected) and content(back) == content(expected)
    with zipfile.ZipFile(path) as archive:
        (member,) = [n for n in archive.namelist() if n.endswith("/data.pkl")]
        named = [
            arg for op, arg, _ in pickletools.genops(archive.read(member)) if "GLOBAL" in op.name
        ]
    assert "mlstate.integrations.torch restore_state" in named
    assert not private(name.split(" ")[0] for name in named)


def test_a_checkpoint_keeps_its_save_in_a_pickle(tmp_path):
    first = checkpoint.save(tmp_path / "run", {"w": np.ones(3)}, step=1)
    inspected = checkpoint.inspect(tmp_path / "run")  # this reads the indexes
    checkpoint.save(tmp_path / "run", {"w": np.ones(3)}, step=2)
    for original in (first, inspected):
        back = pickle.loads(pickle.dumps(original))
        assert (back.path, back.generation, back.step) == (original.path, original.generation, 1)
        assert back.written == original.written
