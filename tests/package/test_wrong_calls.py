"""Calls that people get wrong: each error names the mistake and tells the remedy."""

import re

import numpy as np
import pytest

import mlstate
from mlstate._common import wrong_calls
from mlstate.activation import plan
from mlstate.checkpoint import CheckpointManager
from mlstate.collectives import LocalGroup
from mlstate.follow import Follower, Publisher
from mlstate.fsdp import FSDP, GradientAccumulator, clip_grad_norm
from mlstate.prompts import PromptStore
from mlstate.testing import assert_same_bits, run_ranks

W = {"w": np.ones((4, 2), np.float32)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a checkpoint, a run, a file, and a store of prompts."""
    monkeypatch.chdir(tmp_path)
    mlstate.save("ckpt", W)
    mlstate.save_file(W, "w.safetensors")
    CheckpointManager("run").save(1, W)
    return tmp_path


def manager():
    return CheckpointManager("run")


def store():
    return PromptStore("prompts", model="m")


def state():
    return mlstate.StateDict(W)


INTO, PATH = "into= has what to fill", "it comes first: save(path, model"
CALLS = [
    (lambda: mlstate.load("ckpt", map_location="cpu"), "'map_location'", "device= is where"),
    (lambda: mlstate.load("ckpt", device_map="auto"), "'device_map'", "did you mean 'device'?"),
    (lambda: mlstate.load("ckpt", torch_dtype="float16"), "'torch_dtype'", "did you mean 'cast'?"),
    (lambda: mlstate.load("ckpt", dtype="float16"), "'dtype'", "did you mean 'cast'?"),
    (lambda: mlstate.load("ckpt", ignore_missing=True), "'ignore_missing'", "pass strict=False"),
    (lambda: mlstate.load("ckpt", weights_only=True), "'weights_only'", "leave it out"),
    (lambda: mlstate.load("ckpt", W), "1 positional argument", "load(path, step=, into=, ...)"),
    (lambda: mlstate.load(W, "ckpt"), "1 positional argument", "load(path, step=, into=, ...)"),
    (lambda: mlstate.load("ckpt", model=W), "'model'", INTO),
    (lambda: mlstate.load("ckpt", state_dict=W), "'state_dict'", INTO),
    (lambda: mlstate.load("ckpt", optimizer=W), "'optimizer'", INTO),
    (lambda: mlstate.load("ckpt", into="w"), "got str", "into= takes {'model': ..."),
    (lambda: mlstate.load("ckpt")["model"], "several states", "use .model"),
    (lambda: mlstate.load("ckpt").items(), "'items'", ".model is a mapping"),
    (lambda: mlstate.load("ckpt").state_dict(), "'state_dict'", ".model is a mapping"),
    (lambda: mlstate.load(W), "got dict", PATH),
    (lambda: mlstate.save(W, "new"), "got dict", PATH),
    (lambda: mlstate.save(W), "got dict", PATH),
    (lambda: mlstate.save("new", W, epoch=3), "'epoch'", "pass metadata={'epoch': 3}"),
    (lambda: mlstate.save("new", W, loss=0.5), "'loss'", "pass metadata={'loss': 0.25}"),
    (lambda: mlstate.save("new", W, scheduler=W), "'scheduler'", "states={'scheduler'"),
    (lambda: mlstate.save("new", W, 3), "got int", "a keyword, step="),
    (lambda: mlstate.save("new", "ckpt"), "got str", "mlstate.load(path).model"),
    (lambda: mlstate.save(), "missing", "the call is save(path, model, optimizer, step=, ...)"),
    (lambda: mlstate.save_file("new.safetensors", W), "got str", "save_file(state, path)"),
    (lambda: mlstate.load_file("w.safetensors", framework="pt"), "'framework'", "from_numpy"),
    (lambda: mlstate.load_file("w.safetensors", device="cuda"), "'device'", "load(path, device="),
    (lambda: mlstate.load_file("ckpt"), "ckpt", "mlstate.load reads folders"),
    (lambda: mlstate.verify(W), "got dict", PATH),
    (lambda: mlstate.inspect(W), "got dict", PATH),
    (lambda: mlstate.export_huggingface(W, "new"), "got dict", PATH),
    (lambda: mlstate.export_huggingface("new", W, max_shard_size=5), "'max_shard_size'", "bytes'?"),
    (lambda: mlstate.diff(W, W, tolerance=1e-3), "'tolerance'", "rtol= and atol="),
    (lambda: mlstate.digest([1, 2]), "got list", "a mapping of str to arrays"),
    (lambda: mlstate.load_into("ckpt", W), "'ckpt'", "mlstate.load reads a path"),
    (lambda: mlstate.rename(W, prefix="module."), "'prefix'", "rename(state, {'module.': ''})"),
    (lambda: mlstate.reshard("ckpt", "new", ranks=4), "'ranks'", "did you mean 'world_size'?"),
    (lambda: state().to("cuda"), "'to'", "load(path, device='cuda')"),
    (lambda: state().half(), "'half'", "astype('float16')"),
    (lambda: state().state_dict(), "'state_dict'", "mapping of name to array by itself"),
    (lambda: state().load_state_dict(W), "'load_state_dict'", "mlstate.load_into(target"),
    (lambda: manager().save(W), "got dict", "manager.save(step, model"),
    (lambda: manager().save(W, 1), "got dict", "manager.save(step, model"),
    (lambda: manager().load(1), "'load'", "restore_latest() the last good"),
    (lambda: CheckpointManager("run", max_to_keep=3), "'max_to_keep'", "did you mean 'keep'?"),
    (lambda: plan(None, budget="1GB"), "'budget'", "did you mean 'budget_bytes'?"),
    (lambda: plan(None, memory_limit=3), "'memory_limit'", "did you mean 'budget_bytes'?"),
    (lambda: plan(W, budget_bytes=100), "got dict", "Chain.from_torch"),
    (lambda: store().put(input_ids=[1], cache=W), "'input_ids'", "tokens= has the ids of one"),
    (lambda: store().match({"input_ids": [1, 2]}), "got dict", "pass its ['input_ids']"),
    (lambda: store().match("hello"), "got text", "the model's tokenizer"),
    (lambda: store().put([[1, 2], [3, 4]], W), "shape (2, 2)", "pass one row at a time"),
    (lambda: store().get([1, 2]), "'get'", "match() finds a stored prompt"),
    (lambda: PromptStore("prompts", model="m", max_size="1GB"), "'max_size'", "'max_bytes'?"),
    (lambda: GradientAccumulator(gradient_accumulation_steps=4), "gradient_", "'accumulation_"),
    (lambda: clip_grad_norm(W, 1.0), "'group'", "clip_grad_norm(sharding_units, max_norm, group"),
    (lambda: Publisher("run2").publish(W), "'model'", "Publisher.publish(step, model, ...)"),
    (lambda: Follower("run2"), "'into'", "the call is Follower(path, into=, ...)"),
    (lambda: assert_same_bits(W, W, rtol=1e-3), "'rtol'", "ulps= is the tolerance"),
    (lambda: run_ranks(2, print, backend="gloo"), "'backend'", "'threads', 'gloo' or 'mpi'"),
    (lambda: manager().restore(1, map_location="cpu"), "'map_location'", "device= is where"),
    (lambda: CheckpointManager("run", save_top_k=3), "'save_top_k'", "did you mean 'keep_best'?"),
    (lambda: mlstate.save("new", W, force=True), "'force'", "did you mean 'overwrite'?"),
    (lambda: mlstate.save("new", state_dict=W), "'state_dict'", "did you mean 'model'?"),
    (lambda: mlstate.save_async("new", W, epoch=3), "'epoch'", "pass metadata={'epoch': 3}"),
    (lambda: mlstate.convert("ckpt"), "'target'", "convert(source, target, step=, ...)"),
    (lambda: mlstate.convert("ckpt", "new", prefix="a."), "'prefix'", "rename={'module.': ''}"),
    (lambda: mlstate.verify("ckpt", fix=True), "'fix'", "did you mean 'repair'?"),
    (lambda: mlstate.digest(W, algorithm="md5"), "'algorithm'", "the call is digest(what, group=)"),
    (lambda: mlstate.inspect("ckpt").keys(), "'keys'", "mlstate.load(path).model"),
    (lambda: mlstate.transition_kv_state(W["w"], new_size=8), "'new_size'", "'target_seq_length'?"),
    (lambda: mlstate.compact_kv_state(W["w"], 2), "'current_position'", "compact_kv_state(source_"),
    (lambda: FSDP(world_size=2), "'world_size'", "process_group= has the ranks"),
    (lambda: mlstate.Chain.from_torch(None), "'sample'", "from_torch(module, sample, ...)"),
    (lambda: LocalGroup(world_size=2), "'link'", "LocalGroup.threads(2) makes a group"),
    (lambda: GradientAccumulator(4).step(), "'step'", "get_and_clear_gradients() returns"),
    (lambda: Publisher("run2").push(W), "'push'", "publish(step, model)"),
    (lambda: Follower("run2", into=W).get(), "'get'", "poll() fetches the newest weights"),
    (lambda: mlstate.load_state_dict("ckpt"), "'load_state_dict'", "load(path, into=module)"),
    (lambda: mlstate.restore("run"), "'restore'", "restore_latest() reads the last good step"),
    (lambda: mlstate.compare("ckpt", "run"), "'compare'", "mlstate.diff(first, second)"),
    (lambda: mlstate.verfy("ckpt"), "'verfy'", "did you mean 'verify'?"),
    (lambda: mlstate.OptimizerStateDict(betas=(0.9, 0.99)), "'betas'", "param_groups=[{'betas'"),
    (lambda: mlstate.save("new", W, {"w.m": W["w"], "lr": 0.1}), "'lr'", "param_groups=[{'lr'"),
]


@pytest.mark.parametrize(("call", "mistake", "remedy"), CALLS)
def test_a_wrong_call_names_the_mistake_and_the_remedy(folder, call, mistake, remedy):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    with pytest.raises((TypeError, ValueError, AttributeError, OSError)) as caught:
        call()
    text = str(caught.value)
    assert mistake in text and remedy in text
    changed = {path for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert not {path for path in changed if "prompts" not in path.parts}
    assert not (folder / "new").exists() and not (folder / "new.safetensors").exists()


def test_remedies_for_missing_names_exist():
    for remedy in wrong_calls._NAMES.values():
        for path in re.findall(r"mlstate((?:\.\w+)+)", remedy):
            found = mlstate
            for name in path[1:].split("."):
                found = getattr(found, name)


def test_modules_where_a_path_is_meant_are_named(folder, torch):
    module = torch.nn.Linear(2, 4)
    for call in (mlstate.load, mlstate.verify, mlstate.save):
        with pytest.raises(TypeError, match=r"got Linear; it comes first"):
            call(module)
    with pytest.raises(TypeError, match=re.escape("Chain.from_torch")):
        plan(module, budget_bytes=100)


def test_an_error_in_the_body_of_a_call_stays_as_it_is(folder):
    def failing(done):
        raise TypeError("failing() got an unexpected keyword argument 'model'")

    with pytest.raises(TypeError) as caught:
        mlstate.load("ckpt", progress=failing)
    assert str(caught.value) == "failing() got an unexpected keyword argument 'model'"


def test_hidden_attributes_do_not_exist_for_hasattr_copies_and_pickles(folder):
    import copy
    import pickle

    loaded = mlstate.load("ckpt")
    for thing, name in ((state(), "to"), (loaded, "items"), (manager(), "load")):
        assert not hasattr(thing, name)
    assert mlstate.diff(copy.deepcopy(state()), pickle.loads(pickle.dumps(state()))).identical
    assert (copy.copy(loaded).model["w"] == pickle.loads(pickle.dumps(loaded)).model["w"]).all()
