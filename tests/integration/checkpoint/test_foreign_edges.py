"""Files and folders of other programs at their edges: copies, remnants, refused entries, links."""

import copy
import json
import os
import pickle

import numpy as np
import pytest
from checkpoint_model import flip

torch = pytest.importorskip("torch", reason="it writes the files")

import mlstate  # noqa: E402
from mlstate.checkpoint import Checkpoint, checksum  # noqa: E402
from mlstate.cli import main  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def refused_optimizer():
    """An optimizer with a sparse state, which cannot be read."""
    groups = [{"lr": 0.1, "params": [0]}]
    return {"state": {0: {"x": torch.eye(2).to_sparse()}}, "param_groups": groups}


@pytest.fixture
def step(tmp_path):
    """A step of a Trainer: weights, optimizer, scheduler, metadata; its module and optimizer."""
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    module = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(module.parameters())
    module(torch.ones(3)).sum().backward()
    adam.step()
    weights = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}
    mlstate.save_file(weights, folder / "model.safetensors")
    torch.save(adam.state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 7}')
    return folder


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_copies_of_a_step_load_all_of_it(step, copied):
    checkpoint = copied(Checkpoint(step))
    assert (checkpoint.step, list(checkpoint.states)) == (7, ["scheduler"])
    loaded = checkpoint.load()
    assert (loaded.step, len(loaded.optimizer)) == (7, 6)
    assert mlstate.load(step, into={"model": torch.nn.Linear(3, 2)}).step == 7


def test_tensors_of_a_step_become_states(step):
    for number in range(3):
        torch.save(torch.full((2,), number), step / f"custom_checkpoint_{number}.pkl")
    states = mlstate.load(step).states
    assert [states[f"custom_checkpoint_{n}"].tolist() for n in range(3)] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (["rng_state_1.pth"], mlstate.errors.StoreNotFoundError, "rank 0"),
        (["rng_state.pth", "rng_state_0.pth"], mlstate.CompatibilityError, "twice"),
    ],
)
def test_generators_of_another_job_are_refused(step, names, error, text):
    for name in names:
        torch.save({"cpu": torch.ones(2)}, step / name)
    with pytest.raises(error, match=text):
        mlstate.load(step)


@pytest.mark.parametrize("has_checksums", [False, True])
@pytest.mark.parametrize("form", ["step", "file"])
def test_verify_names_an_optimizer_that_load_refuses(step, tmp_path, capsys, form, has_checksums):
    path = step if form == "step" else tmp_path / "x.pt"
    if form == "step":
        torch.save(refused_optimizer(), step / "optimizer.pt")
    else:
        torch.save({"model": {"w": torch.ones(2)}, "optimizer": refused_optimizer()}, path)
    if has_checksums:
        checksum(path)
    with pytest.raises(mlstate.CompatibilityError, match="sparse"):
        mlstate.load(path)
    assert not mlstate.verify(path).good
    assert main(["inspect", str(path)]) == 2
    assert "sparse" in capsys.readouterr().err


def test_a_link_that_leads_nowhere_is_a_problem_of_its_file(step):
    (step / "optimizer.pt").unlink()
    (step / "optimizer.pt").symlink_to("nowhere")
    with pytest.raises(mlstate.StoreError):
        mlstate.load(step)
    [problem] = mlstate.verify(step).problems
    assert problem.path == "optimizer.pt" and "nowhere" in problem.text


def test_a_pipe_among_entries_is_a_problem(step):
    (step / "scheduler.pt").unlink()
    os.mkfifo(step / "scheduler.pt")
    [problem] = mlstate.verify(step).problems
    assert problem.path == "scheduler.pt"


def test_names_of_states_with_a_slash_are_not_mixed(tmp_path, capsys):
    for name, number in (("a.pt", 1.0), ("b.pt", 5.0)):
        states = {"a": {"b/c": torch.full((3,), number)}, "a/b": {"c": torch.zeros(3)}}
        torch.save({"model": {"w": torch.ones(2)}, **states}, tmp_path / name)
    assert main(["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) != 0
    with pytest.warns(mlstate.errors.CheckpointWarning, match="a/b"):
        assert list(mlstate.load(tmp_path / "a.pt").states) == ["a"]
    capsys.readouterr()


def test_an_optimizer_in_the_weights_of_a_folder_stays_one(tmp_path):
    mlstate.save(tmp_path / "own", {"w": np.ones(2)}, {"w.m": np.zeros(2)})
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "model.safetensors"
    assert main(["convert", str(tmp_path / "own"), str(file)]) == 0
    for path in (file, tmp_path / "folder"):
        loaded = mlstate.load(path)
        assert (list(loaded.model), list(loaded.optimizer)) == (["w"], ["w.m"])


def test_an_index_that_leaves_a_shard_out_is_refused(tmp_path):
    for number, name in ((1, "a"), (2, "b")):
        file = tmp_path / f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: torch.ones(2)}, file)
    index = '{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}'
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    with pytest.raises(mlstate.FormatError, match="00002-of-00002"):
        mlstate.load(tmp_path)


def test_a_pointer_among_shards_is_damage(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "pytorch_model-00002-of-00002.bin").write_text(pointer)
    [problem] = mlstate.verify(tmp_path).problems
    assert problem.path.startswith("pytorch_model-00002") and "git lfs pull" in problem.text


@pytest.mark.parametrize("has_checksums", [False, True])
def test_verify_of_an_index_reads_the_files_that_it_names(tmp_path, has_checksums):
    files = [tmp_path / f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for name, file in zip("ab", files, strict=True):
        torch.save({name: torch.ones(99)}, file)
    weights = {name: file.name for name, file in zip("ab", files, strict=True)}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    if has_checksums:
        checksum(tmp_path)
    report = mlstate.verify(index)
    assert report.good and report.checksums
    assert report.bytes >= sum(file.stat().st_size for file in files)
    flip(files[1], files[1].stat().st_size // 2)
    [problem] = mlstate.verify(index).problems
    assert problem.path == files[1].name and problem.kind in ("altered", "changed")
    files[1].unlink()
    [problem] = mlstate.verify(index).problems
    assert problem.path == files[1].name


class Extra(torch.nn.Linear):
    """A module with an entry that is not a tensor."""

    def get_extra_state(self):
        return {"n": 1}

    def set_extra_state(self, state):
        self.extra = state


def test_entries_of_modules_follow_a_rename(tmp_path):
    torch.save({"model": torch.nn.ModuleDict({"net": Extra(2, 2)}).state_dict()}, tmp_path / "e.pt")
    assert (
        main(["convert", str(tmp_path / "e.pt"), str(tmp_path / "e"), "--rename", "net.=m."]) == 0
    )
    target = torch.nn.ModuleDict({"m": Extra(2, 2)})
    mlstate.load(tmp_path / "e", into=target)
    assert target["m"].extra == {"n": 1}


@pytest.mark.parametrize(
    "options", [{"cast": "bfloat16"}, {"rank": 0, "world_size": 2, "layout": "rows"}]
)
def test_names_excuse_unreadable_tensors(tmp_path, options):
    torch.save({"w": torch.ones(2), "s": torch.eye(2).to_sparse()}, tmp_path / "a.pt")
    assert list(mlstate.load(tmp_path / "a.pt", names="w", **options).model) == ["w"]


def test_an_empty_target_of_a_steps_optimizer_is_compared_with_it(step):
    with pytest.raises(mlstate.CompatibilityError, match=r"Unexpected key.*exp_avg"):
        mlstate.load(step, into={"optimizer": {}})
    with pytest.raises(mlstate.CompatibilityError, match=r"Unexpected key.*exp_avg"):
        mlstate.load(step, into={"optimizer": mlstate.OptimizerStateDict()})


@pytest.mark.parametrize("choice", [["--skip", "optimizer"], ["--only", "model"]])
@pytest.mark.parametrize("content", [b"damaged", None])
def test_convert_reads_no_entry_of_a_step_that_it_leaves_out(step, tmp_path, choice, content):
    (step / "optimizer.pt").unlink()
    if content is None:
        os.mkfifo(step / "optimizer.pt")
    else:
        (step / "optimizer.pt").write_bytes(content)
    assert main(["convert", str(step), str(tmp_path / "own"), *choice]) == 0
    loaded = mlstate.load(tmp_path / "own")
    assert sorted(loaded.model) == ["bias", "weight"] and loaded.optimizer is None
    assert list(loaded.states) == (["scheduler"] if "--skip" in choice else [])


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_rank_files_beside_weights_are_named(tmp_path, weights):
    if weights == "model.safetensors":
        mlstate.save_file({"w": np.ones(2)}, tmp_path / weights)
    else:
        torch.save({"w": torch.ones(2)}, tmp_path / weights)
    name = "model_world_size_1_rank_0.pt"
    torch.save({"w": torch.zeros(2)}, tmp_path / name)
    with pytest.warns(mlstate.errors.CheckpointWarning, match=f"not read: '{name}'"):
        assert mlstate.load(tmp_path).model["w"].tolist() == [1, 1]
