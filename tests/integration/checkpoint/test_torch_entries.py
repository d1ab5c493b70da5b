"""Other entries of torch's files than model and optimizer become named states, or are left out."""

import pickle
import random
from argparse import Namespace
from io import BytesIO

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="it writes the files")
import torch.distributed.checkpoint as dcp  # noqa: E402
from any_format import read_any, write_any  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_state_dict,
)

import mlstate  # noqa: E402
from mlstate.checkpoint._files.parts import Selection  # noqa: E402
from mlstate.cli import main  # noqa: E402
from mlstate.errors import CompatibilityError, FormatError  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


class Custom:
    """An object that only unpickling can restore."""


def trained(seed=0, steps=2, lr=0.1):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups = [{"params": model[0].parameters(), "lr": lr}, {"params": model[1].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.5, betas=(0.8, 0.9))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def assert_same_run(run, other):
    """Parameters, states and hyperparameters are equal, and so is the next step."""
    for p, q in zip(run[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in run[1].state[p].items():
            assert torch.equal(value, other[1].state[q][name]), name
    for group, twin in zip(run[1].param_groups, other[1].param_groups, strict=True):
        assert {**group, "params": 0} == {**twin, "params": 0}
    for model, optimizer in (run, other):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    assert all(map(torch.equal, run[0].parameters(), other[0].parameters()))


def write(form, tree, path):
    if form == "pt":
        path = path.with_suffix(".pt")
        torch.save(tree, path)
    else:
        dcp.save(tree, checkpoint_id=path)
    return path


def convert(source, target, *options):
    assert main(["convert", str(source), str(target), *options]) == 0
    return target


both = pytest.mark.parametrize("form", ["pt", "dcp"])


@both
@pytest.mark.parametrize("wrapped", [True, False])
def test_an_application_with_generators_resumes(tmp_path, form, wrapped):
    run = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(run[1], 3)
    model, optimizer = get_state_dict(*run)
    app = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "epoch": 3,
    }
    source = write(form, {"app": app} if wrapped else app, tmp_path / "c")
    folder = convert(source, tmp_path / "own")
    expected = torch.rand(3), random.random()
    other = trained(seed=1, steps=1)
    target = torch.optim.lr_scheduler.StepLR(other[1], 3)
    states = {"scheduler": target, "rng": torch.random}
    into = {"model": other[0], "optimizer": other[1], "states": states}
    mlstate.load(folder, into=into)
    assert_same_run(run, other)
    assert target.state_dict() == scheduler.state_dict()
    assert torch.equal(torch.rand(3), expected[0])
    loaded = mlstate.load(folder)
    assert loaded.metadata == {"epoch": 3}
    assert set(loaded.states) == {"scheduler", "rng", "numpy", "python"}
    version, numbers, gauss = loaded.states["python"]
    random.setstate((version, tuple(numbers), gauss))
    assert random.random() == expected[1]
    np.testing.assert_array_equal(loaded.states["numpy"][1], app["numpy"][1])


@both
def test_second_state_dicts_are_states(tmp_path, form):
    model = {"w": torch.ones(2)}
    tree = {"state_dict": model, "state_dict_ema": {"w": torch.zeros(2)}, "arch": "a",
            "ema": {"module": {"w": torch.ones(3)}, "decay": 0.5}}  # fmt: skip
    source = write(form, tree, tmp_path / "c")
    loaded = mlstate.load(convert(source, tmp_path / "own"))
    assert loaded.metadata == {"arch": "a"}
    assert loaded.states["state_dict_ema"]["w"].tolist() == [0, 0]
    assert loaded.states["ema"]["decay"] == 0.5
    assert loaded.states["ema"]["module"]["w"].tolist() == [1, 1, 1]
    target = convert(source, tmp_path / "e.safetensors", "--only", "state_dict_ema")
    assert mlstate.load_file(target)["w"].tolist() == [0, 0]
    target = convert(source, tmp_path / "hf", "--only", "state_dict_ema", "--to", "huggingface")
    assert mlstate.load(target).model["w"].tolist() == [0, 0]


@both
def test_flattened_optimizers_resume(tmp_path, form):
    run = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(*run, options=options)
    assert any(key.startswith("param_groups.") for key in optimizer)
    source = write(form, {"model": model, "optimizer": optimizer}, tmp_path / "c")
    other = trained(seed=1, steps=1)
    folder = convert(source, tmp_path / "own")
    mlstate.load(folder, into={"model": other[0], "optimizer": other[1]})
    assert_same_run(run, other)


def test_flattened_states_may_be_nested(tmp_path):
    flat = {
        "param_groups.a.w.lr": 0.5, "param_groups.a.lr": 0.25,
        "state.a.w.step": torch.tensor(2.0), "state.a.w.inner.m": torch.ones(2),
        "state.a.step": torch.tensor(1.0),
    }  # fmt: skip
    torch.save({"optimizer": flat}, tmp_path / "a.pt")
    optimizer = read_any(tmp_path / "a.pt").optimizer
    assert {tuple(group["params"]): group["lr"] for group in optimizer.param_groups} == {
        ("a.w",): 0.5,
        ("a",): 0.25,
    }
    assert optimizer["a.w.step"] == 2 and optimizer["a.step"] == 1
    torch.save({"optimizer": flat | {"state.b.step": 1}}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"'state\.b\.step' of none of its groups"):
        read_any(tmp_path / "a.pt")


def test_a_model_below_an_entry_named_state_is_not_an_optimizer(tmp_path):
    torch.save({"state.w": torch.ones(1)}, tmp_path / "a.pt")
    assert set(read_any(tmp_path / "a.pt").model) == {"state.w"}


@both
@pytest.mark.parametrize("count", [1, 2])
def test_optimizers_of_lightning_are_found(tmp_path, form, count):
    runs = [trained(seed) for seed in range(count)]
    optimizers = [run[1].state_dict() for run in runs]
    tree = {"state_dict": runs[0][0].state_dict(), "optimizer_states": optimizers, "epoch": 1}
    parts = read_any(write(form, tree, tmp_path / "c"))
    assert parts.metadata == {"epoch": 1}
    expected = [mlstate.OptimizerStateDict.from_torch(run[1]) for run in runs]
    if count == 1:
        assert (parts.optimizer, parts.states) == (expected[0], {})
    else:
        assert parts.optimizer is None
        assert parts.states == {"optimizer_0": expected[0], "optimizer_1": expected[1]}


def test_a_folder_of_lightning_is_read_with_its_meta_file(tmp_path):
    run = trained()
    model, optimizer = get_state_dict(*run)
    dcp.save({"state_dict": model, "optimizer_0": optimizer}, checkpoint_id=tmp_path / "c")
    torch.save({"epoch": 2, "callbacks": {"x": {"best": torch.ones(1)}}}, tmp_path / "c/meta.pt")
    other = trained(seed=1, steps=1)
    folder = convert(tmp_path / "c", tmp_path / "own")
    loaded = mlstate.load(folder, into={"model": other[0], "optimizer": other[1]})
    assert_same_run(run, other)
    assert loaded.metadata == {"epoch": 2}
    assert set(mlstate.load(folder).states) == {"callbacks"}


@both
def test_bytes_arrays_and_scalars_are_exact(tmp_path, form):
    values = {
        "bytes": b"\x00x", "scalar": np.float64(0.1), "half": np.float16(2),
        "array": np.arange(3, dtype=np.int16), "set": {1}, "tuple": (1, (2.5, None)),
    }  # fmt: skip
    tree = {"model": {"w": torch.ones(2), "_extra_state": b"e", "note": "n"}, **values}
    source = write(form, tree, tmp_path / "c")
    loaded = mlstate.load(convert(source, tmp_path / "own"))
    array = loaded.states.pop("array")
    assert (array.dtype, array.tolist()) == (np.int16, [0, 1, 2])
    assert loaded.states.pop(".model") == {"entries": {"_extra_state": b"e"}, "metadata": {}}
    assert loaded.metadata == {"model.note": "n"}
    del values["array"]
    assert loaded.states == values
    assert all(type(loaded.states[name]) is type(value) for name, value in values.items())


def test_arguments_of_a_program_become_a_dict(tmp_path):
    tree = {"model": {"w": torch.ones(2)}, "args": Namespace(lr=0.5, inner=Namespace(a=[1]))}
    torch.save(tree, tmp_path / "a.pt")
    assert read_any(tmp_path / "a.pt").states == {"args": {"lr": 0.5, "inner": {"a": [1]}}}


@both
def test_states_return_to_files_of_torch(tmp_path, form):
    run = trained()
    model, optimizer = get_state_dict(*run)
    tree = {
        "model": model,
        "optimizer": optimizer,
        "ema": {"w": torch.ones(2)},
        "rng": torch.ones(3),
        "scheduler": {"a": [1, (2, None)]},
        "opt2": optimizer,
    }
    first = read_any(write("pt", tree, tmp_path / "a"))
    mlstate.save(tmp_path / "own", first.model, first.optimizer, states=first.states)
    target = tmp_path / ("b.pt" if form == "pt" else "b.dcp")
    convert(tmp_path / "own", target)
    again = read_any(target)
    assert again.model == first.model and again.optimizer == first.optimizer
    assert again.states["opt2"] == first.states["opt2"]
    assert torch.equal(again.states["rng"], torch.ones(3))
    assert again.states["scheduler"] == tree["scheduler"]
    if form == "pt":
        loaded = torch.load(target, weights_only=True)
        assert torch.equal(loaded["ema"]["w"], torch.ones(2))


def test_states_that_torch_cannot_hold_are_named(tmp_path):
    with pytest.raises(
        mlstate.errors.CompatibilityError, match=r"states\['a'\]\['b'\] is a Random"
    ):
        write_any(tmp_path / "a.pt", {"w": np.ones(1)}, states={"a": {"b": random.Random(0)}})
    with pytest.raises(ValueError, match="the name 'model' of another entry"):
        write_any(tmp_path / "a.pt", {"w": np.ones(1)}, states={"model": 1})
    assert not list(tmp_path.iterdir())


# ---- a choice of entries ----


@both
@pytest.mark.parametrize("wrapped", [True, False])
def test_only_and_skip_choose_entries(tmp_path, form, wrapped):
    model, optimizer = get_state_dict(*trained())
    app = {"model": model, "optim": optimizer, "rng": torch.ones(3), "epoch": 1}
    source = write(form, {"app": app} if wrapped else app, tmp_path / "c")
    for only, skip, expected in [
        (["model"], [], {"model"}),
        (["optimizer", "rng"], [], {"optimizer", "rng"}),
        ([], ["optimizer", "epoch"], {"model", "rng"}),
        (["model", "rng"], ["rng"], {"model"}),
    ]:
        parts = read_any(source, selection=Selection(only, skip))
        present = {name for name in ("model", "optimizer") if getattr(parts, name) is not None}
        assert present | set(parts.metadata) | set(parts.states) == expected
    with pytest.raises(ValueError, match=r"no entry 'rgn'; it has epoch, model, optimizer, rng"):
        read_any(source, selection=Selection(skip=["rgn"]))


def test_entries_of_a_folder_that_are_left_out_are_not_read(tmp_path):
    tree = {"model": {"w": torch.ones(2)}, "custom": Custom(), "big": torch.ones(1 << 18)}
    dcp.save(tree, checkpoint_id=tmp_path / "c")
    with pytest.raises(CompatibilityError, match=r"'custom' is a .*Custom, .* or --skip"):
        read_any(tmp_path / "c")
    data = next((tmp_path / "c").glob("*.distcp"))
    parts = read_any(tmp_path / "c", selection=Selection(skip=["custom"]))
    assert set(parts.states) == {"big"}
    infos = pickle.loads((tmp_path / "c/.metadata").read_bytes()).storage_data
    [big] = [info for index, info in infos.items() if index.fqn == "big"]
    with data.open("r+b") as file:  # its bytes are not torch's any more
        file.seek(big.offset)
        file.write(bytes(big.length))
    assert list(read_any(tmp_path / "c", selection=Selection(["model"])).model) == ["w"]


def test_a_checkpoint_of_lightning_gives_its_optimizer_if_chosen(tmp_path):
    run = trained()
    tree = {"state_dict": run[0].state_dict(), "optimizer_states": [run[1].state_dict()],
            "loops": {}, "pytorch-lightning_version": "2.0"}  # fmt: skip
    torch.save(tree, tmp_path / "a.ckpt")
    folder = convert(tmp_path / "a.ckpt", tmp_path / "own", "--only", "model,optimizer")
    loaded = mlstate.load(folder)
    assert loaded.optimizer == mlstate.OptimizerStateDict.from_torch(run[1])
    assert (loaded.metadata, loaded.states) == ({}, {})


# ---- hostile files ----


class Reduced:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def bomb(levels):
    value = [torch.ones(1)]
    for _ in range(levels):
        value = [value] * 10
    return value


@pytest.mark.parametrize(
    "value",
    [
        bomb(30),
        Reduced(np._core.multiarray._reconstruct, np.ndarray, (1 << 60,), b"d"),
        Reduced(np._core.multiarray._reconstruct, np.ndarray, "x", []),
        np.array([{}, print], dtype=object),
        Reduced(np.dtype, "O" * 1000),
        Reduced(Namespace, 1, 2),
        Reduced(open, "ran", "w"),
    ],
    ids=["bomb", "huge", "odd", "objects", "dtype", "namespace", "code"],
)
@both
def test_hostile_values_are_refused_or_empty(tmp_path, monkeypatch, form, value):
    monkeypatch.chdir(tmp_path)
    tree = {"model": {"w": torch.ones(1)}, "x": value}
    if form == "pt":
        torch.save(tree, tmp_path / "c")
    elif isinstance(value, list):
        return  # torch's own writer does not end
    else:
        dcp.save(tree, checkpoint_id=tmp_path / "c")
    try:
        states = read_any(tmp_path / "c", format="torch" if form == "pt" else "dcp").states
        mlstate.save(tmp_path / "own", {}, states=states)
    except (mlstate.MLStateError, TypeError, ValueError):
        pass
    else:
        assert np.size(mlstate.load(tmp_path / "own").states["x"]) == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "path", [(1 << 40,), ("a", -1), (), "w", ("a",) * 5000, ("a", 10**30), None, 3]
)
def test_a_hostile_place_in_the_state_is_refused(tmp_path, path):
    dcp.save({"a": torch.ones(1), "b": torch.ones(1)}, checkpoint_id=tmp_path / "c")
    place = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(place.read_bytes())
    metadata.planner_data["a"] = path
    buffer = BytesIO()
    pickle.dump(metadata, buffer)
    place.write_bytes(buffer.getvalue())
    with pytest.raises(FormatError):
        read_any(tmp_path / "c")


def test_names_of_a_flattened_optimizer_are_those_of_its_keys(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"z": torch.nn.Linear(2, 2), "a": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.named_parameters())  # the groups have `param_names`
    model["a"](model["z"](torch.rand(3, 2))).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    _, flat = get_state_dict(model, optimizer, options=options)
    torch.save({"optimizer": dict(sorted(flat.items()))}, tmp_path / "a.pt")
    read = read_any(tmp_path / "a.pt").optimizer
    for name, parameter in model.named_parameters():
        expected = optimizer.state[parameter]["exp_avg"].numpy()
        np.testing.assert_array_equal(read[f"{name}.exp_avg"], expected)


GROUP = {"state": {}, "param_groups": [{"params": [0], "lr": 1.0}]}


@pytest.mark.parametrize(
    "entries",
    [
        {1: torch.ones(1), "1": torch.zeros(1)},
        {"model": {"w": torch.ones(1), "text": "a"}, "model.text": torch.ones(1)},
        {"optimizer": GROUP | {"state": {0: {"m": torch.ones(1)}, "0": {"m": torch.zeros(1)}}}},
    ],
)
def test_entries_with_one_name_are_refused(tmp_path, entries):
    torch.save({"model": {"w": torch.ones(1)}, **entries}, tmp_path / "a.pt")
    with pytest.raises(CompatibilityError, match=r"two entries have the name|'param_0\.m' twice"):
        read_any(tmp_path / "a.pt")


def test_a_list_of_optimizers_stays_one_entry_if_its_names_are_taken(tmp_path):
    tree = {"optimizer_states": [GROUP, GROUP], "optimizer_0": {"a": torch.ones(1)}}
    torch.save({"model": {"w": torch.ones(1)}, **tree}, tmp_path / "a.pt")
    assert read_any(tmp_path / "a.pt").states == tree


def test_a_state_keeps_the_name_of_an_entry_of_the_metadata(tmp_path):
    model = mlstate.state.StateDict(w=np.ones(1))
    write_any(tmp_path / "a.pt", model, metadata={"epoch": 3}, states={"epoch": 5})
    parts = read_any(tmp_path / "a.pt")
    assert (parts.metadata, parts.states) == ({"epoch": 3}, {"epoch": 5})
