"""Lightning's Trainer with mlstate's checkpoints, compared with Lightning's own."""

import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import killed_jobs  # noqa: E402
from needs import needs  # noqa: E402
from regression import digest  # noqa: E402

import mlstate  # noqa: E402
from mlstate.integrations.lightning import MLStateCheckpointIO  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    needs("lightning"),
    pytest.mark.timeout(590),
    pytest.mark.filterwarnings("ignore"),  # Lightning warns about its own dependencies
]

JOB = Path(__file__).with_name("lightning_job.py")


@pytest.fixture(scope="module")
def job():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return killed_jobs.module_of(JOB)


def checkpoint():
    weight = torch.nn.Parameter(torch.arange(4.0))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    return {
        "epoch": 1,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {"w": weight.detach(), "n": torch.tensor(3)},
        "loops": {"fit_loop": {"state_dict": {}, "progress": {"total": {"ready": 1}}}},
        "callbacks": {"Best{'monitor': None}": {"score": torch.tensor(0.5), "path": ""}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hyper_parameters": {"sizes": (1, 2), "name": None},
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_a_checkpoint_returns_as_it_was(tmp_path):
    plugin, saved = MLStateCheckpointIO(), checkpoint()
    plugin.save_checkpoint(saved, tmp_path / "a.ckpt")
    assert same(plugin.load_checkpoint(tmp_path / "a.ckpt"), saved)
    assert mlstate.load(tmp_path / "a.ckpt").step == 7
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(4))
    mlstate.load(tmp_path / "a.ckpt", names="w", into={"model": module})
    assert torch.equal(module.w, saved["state_dict"]["w"])
    saved["state_dict"]["w"] += 1
    plugin.save_checkpoint(saved, tmp_path / "a.ckpt")  # replaces it
    assert same(plugin.load_checkpoint(tmp_path / "a.ckpt", map_location="cpu"), saved)


def test_only_checkpoints_are_removed(tmp_path):
    plugin = MLStateCheckpointIO(compress="zlib")
    plugin.save_checkpoint(checkpoint(), tmp_path / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    (tmp_path / "data").mkdir()
    with pytest.raises(mlstate.StoreError, match="not a checkpoint"):
        plugin.remove_checkpoint(tmp_path / "data")
    assert (tmp_path / "data").exists()
    plugin.save_checkpoint(checkpoint(), tmp_path / "a.ckpt")
    (tmp_path / "link").symlink_to(tmp_path / "a.ckpt")
    with pytest.raises(mlstate.StoreError, match="the path is a symbolic link"):
        plugin.remove_checkpoint(tmp_path / "link")
    assert mlstate.verify(tmp_path / "link")


@pytest.mark.parametrize("deleted", ["nothing", "manifest.json", "params"])
def test_an_interrupted_deletion_can_be_repeated(tmp_path, monkeypatch, deleted):
    plugin = MLStateCheckpointIO()
    plugin.save_checkpoint(checkpoint(), tmp_path / "a.ckpt")

    def interrupted(folder):
        monkeypatch.undo()
        place = Path(folder, deleted)
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_value_that_needs_pickle_is_named(tmp_path):
    saved = {**checkpoint(), "hyper_parameters": {"activation": torch.nn.ReLU}}
    with pytest.raises(
        TypeError, match=r"\['hyper_parameters'\]\['activation'\] is a builtins.type"
    ):
        MLStateCheckpointIO().save_checkpoint(saved, tmp_path / "a.ckpt")
    with pytest.raises(TypeError, match="no storage_options"):
        MLStateCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
    with pytest.raises(FileNotFoundError):
        MLStateCheckpointIO().load_checkpoint(tmp_path / "absent.ckpt")


def test_a_damaged_checkpoint_is_not_loaded(tmp_path):
    plugin = MLStateCheckpointIO(pack_below_bytes=0)
    plugin.save_checkpoint(checkpoint(), tmp_path / "a.ckpt")
    [file] = (tmp_path / "a.ckpt" / "params").glob("w*")
    file.write_bytes(file.read_bytes()[:-1] + b"\x99")
    with pytest.raises(mlstate.ChecksumError):
        plugin.load_checkpoint(tmp_path / "a.ckpt")


def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path, job):
    torch.manual_seed(0)
    uninterrupted = job.Module()
    trainer = job.trainer_of(tmp_path / "whole")
    trainer.fit(uninterrupted, job.Batches())
    expected = digest(uninterrupted, trainer.optimizers[0])
    torch.manual_seed(0)
    job.trainer_of(tmp_path / "ckpt", max_steps=15).fit(job.Module(), job.Batches())
    file_names = sorted(path.name for path in (tmp_path / "ckpt").iterdir())
    assert (
        len(file_names) == 3
        and "last.ckpt" in file_names
        and all(mlstate.verify(tmp_path / "ckpt" / p) for p in file_names)
    )
    again = job.Module()
    resumed = job.trainer_of(tmp_path / "ckpt")
    resumed.fit(again, job.Batches(), ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    assert digest(again, resumed.optimizers[0]) == expected
    assert np.isfinite(again.net[0].weight.detach().numpy()).all()


def test_without_lightning_the_extra_is_named(monkeypatch):
    imported = [name for name in sys.modules if name.startswith("lightning")]
    for name in ["lightning", "lightning_fabric", *imported]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"mlstate\[lightning\]"):
        MLStateCheckpointIO()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2] if killed_jobs.FULL else [1])
def test_a_killed_run_resumes_with_the_same_bits(tmp_path, ranks):
    expected = killed_jobs.run([JOB, tmp_path / "whole", ranks])[0][-1]
    assert expected.startswith("done")
    digest = killed_jobs.run_killed(
        [JOB, tmp_path / "ckpt", ranks], most_lines=12 * ranks, seed=ranks
    )
    assert digest == expected
