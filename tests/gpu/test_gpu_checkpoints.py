"""Saves and loads of CUDA tensors: the same training as without them, on any device and stream."""

import gc

import pytest

torch = pytest.importorskip("torch")

from device_training import ADAMW, Training, bits_of  # noqa: E402

import mlstate  # noqa: E402
from mlstate.checkpoint import CheckpointManager, Staging, save_async  # noqa: E402
from mlstate.errors import MLStateError  # noqa: E402

SECONDS = 60


def save(path, training, **options):
    return mlstate.save(
        path, training.model, training.optimizer, states=training.states(), **options
    )


# ---- training ----


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("kind", ADAMW)
def test_training_after_a_load_equals_uninterrupted_training(device, path, kind, is_new):
    training = Training(device, 1, kind)
    training.run(0, 3)
    save(path, training)
    training.run(3, 6)
    expected = training.bits()
    other = Training(device, 2, kind)
    other.run(0, 0 if is_new else 1)
    places = other.places()
    mlstate.load(path, into=other.targets())
    assert places.items() <= other.places().items()
    assert other.model.head.weight is other.model.embed.weight
    other.run(3, 6)
    assert other.bits() == expected


@pytest.mark.parametrize("kind", ["plain", "fused", "capturable"])
def test_torch_itself_would_restore_the_same(device, path, kind):
    training = Training(device, 1, kind)
    training.run(0, 3)
    save(path, training)
    by_torch, by_mlstate = Training(device, 2, kind), Training(device, 3, kind)
    by_torch.model.load_state_dict(training.model.state_dict())
    by_torch.optimizer.load_state_dict(training.optimizer.state_dict())
    mlstate.load(path, into={"model": by_mlstate.model, "optimizer": by_mlstate.optimizer})
    loaded, expected = by_mlstate.tensors(), by_torch.tensors()
    assert bits_of(loaded) == bits_of(expected)
    assert {n: each.device for n, each in loaded.items()} == {
        n: each.device for n, each in expected.items()
    }
    for first, second in zip(
        by_torch.optimizer.param_groups, by_mlstate.optimizer.param_groups, strict=True
    ):
        assert type(first["lr"]) is type(second["lr"]) and first["lr"] == second["lr"]


@pytest.mark.parametrize("is_from_cpu", [False, True])
def test_a_checkpoint_of_one_device_loads_into_a_model_on_another(device, path, is_from_cpu):
    cpu = torch.device("cpu")
    source = Training(cpu if is_from_cpu else device, 1)
    source.run(0, 3)
    mlstate.save(path, source.model, source.optimizer)
    target = Training(device if is_from_cpu else cpu, 2)
    places = target.places()
    mlstate.load(path, into={"model": target.model, "optimizer": target.optimizer})
    assert bits_of(source.tensors()) == bits_of(target.tensors())
    assert places.items() <= target.places().items()
    moments = {state["exp_avg"].device for state in target.optimizer.state.values()}
    assert moments == {next(target.model.parameters()).device}


@pytest.mark.parametrize("strict", [True, False])
def test_tensors_that_are_not_loaded_keep_their_bits(device, path, strict):
    source, target = Training(device, 1).model, Training(device, 2).model
    expected = bits_of({**target.state_dict(), "up.weight": source.up.weight})
    mlstate.save(path, source if strict else {"up.weight": source.up.weight})
    names = "up.weight" if strict else None
    mlstate.load(path, names=names, strict=strict, into={"model": target})
    assert bits_of(dict(target.state_dict())) == expected


def test_a_captured_graph_continues_from_the_loaded_state(device, stream, path):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    model = model.to(device)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
    x = torch.randn(8, 16, device=device)

    def step():
        adamw.zero_grad(set_to_none=True)
        model(x).square().sum().backward()
        adamw.step()

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    mlstate.save(path, model, adamw)
    graph.replay(), graph.replay()
    expected = bits_of([model.state_dict(), adamw.state_dict()["state"]])
    graph.replay()
    mlstate.load(path, into={"model": model, "optimizer": adamw})
    graph.replay(), graph.replay()
    assert bits_of([model.state_dict(), adamw.state_dict()["state"]]) == expected


def test_saves_and_loads_leave_no_memory_on_the_device(device, path):
    training, allocated = Training(device, 1), []
    training.run(0, 1)
    for _ in range(5):
        save(path, training)
        save_async(path, training.model, training.optimizer, states=training.states()).wait(SECONDS)
        mlstate.load(path, into=training.targets())
        mlstate.load(path, device=device)
        training.run(0, 1)
        gc.collect()
        allocated.append(torch.cuda.memory_allocated(device))
    # the first round allocates what libraries keep, such as workspaces
    assert allocated[2:] == allocated[1:2] * 3


# ---- tensors ----

DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "float16", "bfloat16",
    "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def tensors_on(device):
    """Tensors of each dtype, and of each kind of memory."""
    numbers = torch.arange(6000, device=device)
    tensors = {name: numbers[:97].float().to(getattr(torch, name)) for name in DTYPES}
    wide = numbers.float().reshape(60, 100)
    return tensors | {
        "transposed": wide.t(), "steps": wide[::2, 1::3], "a row": wide[7],
        "expanded": wide[0, :1].expand(9), "scalar": wide[3, 3], "empty": wide[:0],
        "parameter": torch.nn.Parameter(wide.bfloat16()),
        "channels last": wide.reshape(1, 6, 20, 50).contiguous(memory_format=torch.channels_last),
    }  # fmt: skip


@pytest.mark.parametrize("way", ["save", "save_async", "staging", "torch.save"])
def test_tensors_of_each_dtype_and_layout_keep_their_bits(device, path, way):
    tensors = tensors_on(device)
    if way == "torch.save":
        torch.save(mlstate.StateDict(tensors), path)
        loaded = dict(torch.load(path, weights_only=True))
        assert all(each.device == device for each in loaded.values())
    else:
        staging = Staging(1 << 20) if way == "staging" else None
        if way == "save":
            mlstate.save(path, tensors)
        else:
            save_async(path, tensors, staging=staging).wait(SECONDS)
        loaded = mlstate.load(path, device=device).model
        assert all(each.device == device for each in loaded.values())
    assert bits_of(dict(loaded)) == bits_of(tensors)


def test_a_mapping_of_device_tensors_is_filled_in_place(device, path):
    tensors = tensors_on(device)
    del tensors["expanded"]
    mlstate.save(path, tensors)
    targets = {name: torch.zeros_like(each) for name, each in tensors.items()}
    strides = {name: each.stride() for name, each in targets.items()}
    places = {name: each.data_ptr() for name, each in targets.items()}
    mlstate.load(path, into={"model": targets})
    assert bits_of(targets) == bits_of(tensors)
    assert places == {name: each.data_ptr() for name, each in targets.items()}
    assert strides == {name: each.stride() for name, each in targets.items()}


def test_pinned_memory_is_main_memory(device, path):
    pinned = {"w": torch.arange(100.0).pin_memory()}
    mlstate.save(path, pinned)
    target = {"w": torch.zeros(100).pin_memory()}
    mlstate.load(path, into={"model": target})
    assert torch.equal(target["w"], pinned["w"]) and target["w"].is_pinned()


# ---- streams ----


@pytest.mark.parametrize("how", ["save", "save_async", "manager"])
@pytest.mark.parametrize("is_awaited", [False, True])
def test_pending_kernels_of_a_stream_count(device, stream, path, how, is_awaited):
    """In the block of the stream, or outside if the current stream waits for it."""
    module, waiting = torch.nn.Linear(512, 512, device=device), []
    manager = CheckpointManager(path if how == "manager" else f"{path}-unused")
    views = {"rows": module.weight.detach()[::2], "columns": module.weight.detach().t()}

    def store():
        states, handle = {"views": views}, None
        if how == "save":
            mlstate.save(path, module, states=states)
        elif how == "save_async":
            handle = save_async(path, module, states=states)
        else:
            handle = manager.save_async(1, module, states=states)
        if handle is not None:
            waiting.append(handle)
            handle.staged(SECONDS)
        with torch.no_grad():
            module.weight.add_(1)  # after the call

    with torch.cuda.stream(stream), torch.no_grad():
        stream.wait_stream(torch.cuda.default_stream(device))
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        module.weight.fill_(3)
        if not is_awaited:
            store()
    if is_awaited:
        torch.cuda.current_stream().wait_stream(stream)
        store()
    torch.cuda.synchronize(device)
    manager.close()
    if how == "save_async":
        waiting[0].wait(SECONDS)
    loaded = mlstate.load(path)
    assert (loaded.model["weight"] == 3).all() and module.weight.eq(4).all()
    assert all((each == 3).all() for each in loaded.states["views"].values())


def test_changes_after_staged_are_not_stored(device, path):
    training = Training(device, 1)
    training.run(0, 2)
    with CheckpointManager(path) as manager:
        stored = {}
        for step in range(2, 6):
            stored[step] = training.bits()
            handle = manager.save_async(
                step, training.model, training.optimizer, states=training.states()
            )
            handle.staged(SECONDS)
            training.run(step, step + 1)
        handle.wait(SECONDS)
        other = Training(device, 2)
        for step, expected in stored.items():
            manager.restore(step, into=other.targets())
            assert other.bits() == expected
        assert manager.restore_latest(into=other.targets()).step == 5


# ---- failures ----


@pytest.mark.parametrize("fault", ["shape", "missing", "dtype", "optimizer", "damage", "state"])
def test_a_load_that_fails_leaves_the_bits_on_the_device_unchanged(device, path, fault):
    training, other = (Training(device, seed, "mixed precision") for seed in (1, 2))
    training.run(0, 2), other.run(0, 1)
    model, adamw = training.model.state_dict(), training.optimizer
    weight = model["down.weight"]
    if fault in ("shape", "dtype"):
        model["down.weight"] = weight[:3] if fault == "shape" else weight.double()
    if fault == "missing":
        del model["down.weight"]
    if fault == "optimizer":
        adamw = mlstate.OptimizerStateDict.from_torch(adamw, training.model)
        adamw["down.weight.exp_avg"] = weight[:3]
    states = training.states() | ({"scaler": {}} if fault == "state" else {})
    mlstate.save(path, model, adamw, states=states)
    if fault == "damage":
        largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    before = other.bits()
    with pytest.raises(MLStateError):
        mlstate.load(path, into=other.targets(), verify="first")
    assert other.bits() == before
