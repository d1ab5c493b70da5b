"""Lightning's Trainer with mlstate's checkpoints, compared with Lightning's own."""

import collections
import datetime
import enum
import errno
import os
import pathlib
import random
import shutil
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import child  # noqa: E402
import forked  # noqa: E402
import killed_jobs  # noqa: E402
from interruption import raise_once  # noqa: E402
from needs import needs  # noqa: E402
from regression import digest  # noqa: E402

import mlstate  # noqa: E402
from mlstate._common import atomic_file  # noqa: E402
from mlstate._common.atomic_file import Target  # noqa: E402
from mlstate.cli import main  # noqa: E402
from mlstate.integrations.lightning import MLStateCheckpointIO  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    needs("lightning"),
    pytest.mark.timeout(590),
    pytest.mark.filterwarnings("ignore"),  # Lightning warns about its own dependencies
]

JOB = Path(__file__).with_name("lightning_job.py")


class Color(enum.Enum):
    RED = "r"
    CRIMSON = "r"  # another name of RED
    BLUE = "b"


class Level(enum.IntEnum):
    HIGH = 3


class Access(enum.Flag):
    READ = 1
    WRITE = 2


Pair = collections.namedtuple("Pair", "a b")


class Text(str):
    pass


@pytest.fixture(scope="module")
def job():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return killed_jobs.module_of(JOB)


@pytest.fixture
def callbacks():
    import lightning.pytorch.callbacks

    return lightning.pytorch.callbacks


def fit(job, callbacks, plugins, *, resume=None, module=None, **options):
    torch.manual_seed(0)
    module = module or job.Module()
    trainer = job.trainer_with(callbacks, plugins, **options)
    trainer.fit(module, job.Batches(), ckpt_path=resume)
    return trainer, module


def round_trip(folder, **values):
    plugin = MLStateCheckpointIO()
    plugin.save_checkpoint({"hyper_parameters": values}, folder / "a.ckpt")
    return plugin.load_checkpoint(folder / "a.ckpt")["hyper_parameters"]


# ---- checkpoints ----


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


def test_other_files_at_a_temporary_name_are_never_deleted(tmp_path):
    plugin = MLStateCheckpointIO()
    plugin.save_checkpoint(checkpoint(), tmp_path / "a.ckpt")
    other = tmp_path / "a.ckpt.mlstate-removed"
    other.mkdir()
    (other / "notes").write_text("mine")
    with pytest.raises(mlstate.StoreError, match="not the rest of a checkpoint"):
        plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert mlstate.verify(tmp_path / "a.ckpt")
    shutil.rmtree(tmp_path / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    (tmp_path / "data").mkdir()
    (tmp_path / "data.mlstate-removed").mkdir()
    with pytest.raises(mlstate.StoreError, match="not a checkpoint"):
        plugin.remove_checkpoint(tmp_path / "data")
    assert (tmp_path / "data.mlstate-removed").exists()
    assert (other / "notes").read_text() == "mine"


def test_names_of_equal_crc_do_not_share_a_temporary_folder(tmp_path, monkeypatch):
    first, second = "plumless.ckpt", "buckeroo.ckpt"
    assert zlib.crc32(first[:8].encode()) == zlib.crc32(second[:8].encode())
    plugin, names = MLStateCheckpointIO(), []
    monkeypatch.setattr(Target, "put", lambda target, source: names.append(source))
    for name in (first, second):
        plugin.save_checkpoint({"global_step": 1}, tmp_path / name)
    assert len(set(names)) == 2


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_failed_rename_keeps_the_file_or_link(tmp_path, monkeypatch, kind):
    place = tmp_path / "last.ckpt"
    (tmp_path / "target").write_text("old")
    place.symlink_to("target") if kind == "link" else place.write_text("old")
    raise_once(monkeypatch, atomic_file._core, "path_rename", OSError(errno.ENOSPC, "full"))
    with pytest.raises(OSError, match="full"):
        MLStateCheckpointIO().save_checkpoint({"global_step": 1}, place)
    assert place.read_text() == "old" and place.is_symlink() == (kind == "link")
    monkeypatch.undo()
    MLStateCheckpointIO().save_checkpoint({"global_step": 2}, place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "target"]


def test_a_save_over_a_folder_of_others_leaves_no_other_folder(tmp_path):
    folder = tmp_path / "last.ckpt"
    folder.mkdir()
    (folder / "note").write_text("mine")
    with pytest.raises(OSError, match="the folder is not empty"):
        MLStateCheckpointIO().save_checkpoint(checkpoint(), folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["last.ckpt", "note"]


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


# ---- values ----


@pytest.mark.parametrize(
    "value",
    [
        pathlib.Path("data/x"),
        pathlib.PurePosixPath("/a"),
        pathlib.PureWindowsPath(r"c:\a"),
        Color.CRIMSON,
        Level.HIGH,
        Access.READ | Access.WRITE,
        Access(0),
        (1, (pathlib.Path("b"), [Color.BLUE])),
        {3: Color.BLUE, None: {"x": {1, 2}}},
        collections.OrderedDict(b=1, a=Level.HIGH),
        np.float32(0.5),
        np.bool_(True),
        b"bytes",
        float("inf"),
        2**70,
        1j,
        frozenset("ab"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_hyperparameter_is_stored_exactly(tmp_path, value):
    loaded = round_trip(tmp_path, value=value)["value"]
    assert type(loaded) is type(value) and loaded == value


class OwnPath(type(pathlib.Path())):
    pass


def local_member():
    class Hidden(enum.Enum):
        A = 1

    return Hidden.A


@pytest.mark.parametrize(
    "value",
    [
        type("AttributeDict", (dict,), {})(a=1),
        Pair(1, 2),
        type("Items", (list,), {})([1]),
        Text("a"),
        OwnPath("a"),
        local_member(),
        datetime.timedelta(1),
        range(3),
        torch.nn.Parameter(torch.zeros(1)),
        {Color.RED: 1},
        np.array(["a"]),
        print,
        torch.nn.MSELoss(),
        torch.Generator(),
        torch.optim.SGD([torch.zeros(1)], lr=0.1),
        random.Random(1),
        torch.nn.ReLU,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_would_change_is_refused_with_its_path(tmp_path, value):
    with pytest.raises(TypeError, match=r"\['hyper_parameters'\]\['values'\]\[1\]"):
        round_trip(tmp_path, values=[0, value])
    assert not os.path.lexists(tmp_path / "a.ckpt")


def test_an_enum_that_is_not_imported_is_named(tmp_path, monkeypatch):
    round_trip(tmp_path, color=Color.RED)
    monkeypatch.delitem(sys.modules, Color.__module__)
    with pytest.raises(ImportError, match=r"enum .*\.Color: import .* before you load it"):
        MLStateCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")


class Counting(torch.nn.Linear):
    """A module with a version, and an extra state that is not a tensor."""

    _version = 3

    def get_extra_state(self):
        return {"calls": 5, "path": pathlib.Path("a")}

    def set_extra_state(self, state):
        self.extra = state

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        self.version = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *others)


def test_versions_and_extra_states_of_modules_are_stored(tmp_path):
    module, plugin = Counting(2, 2), MLStateCheckpointIO()
    plugin.save_checkpoint({"state_dict": module.state_dict()}, tmp_path / "a.ckpt")
    loaded = plugin.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]
    assert list(loaded) == list(module.state_dict())
    other = Counting(2, 2)
    other.load_state_dict(loaded)
    assert other.version == 3 and other.extra == module.get_extra_state()
    assert torch.equal(other.weight, module.weight)
    plugin.save_checkpoint({"state_dict": {}}, tmp_path / "b.ckpt")
    assert plugin.load_checkpoint(tmp_path / "b.ckpt") == {"state_dict": {}}


# ---- options that save, link and delete ----

OPTIONS = {
    "last": {"save_last": True},
    "link": {"save_last": "link", "save_top_k": 2, "monitor": "loss"},
    "all": {"save_top_k": -1},
    "none": {"save_top_k": 0, "save_last": True},
    "steps": {"every_n_train_steps": 5, "save_top_k": 2, "monitor": "step", "mode": "max"},
    "best": {"monitor": "loss", "save_top_k": 1, "save_last": "link"},
    "best of many": {"monitor": "loss", "save_top_k": 2, "every_n_train_steps": 2},
    "epochs": {"every_n_epochs": 2, "filename": "{epoch}-{loss:.2f}", "monitor": "loss"},
    "time": {"train_time_interval": datetime.timedelta(0), "save_top_k": 2, "monitor": "loss"},
    "weights": {"save_weights_only": True, "save_on_train_epoch_end": True},
    "names": {"auto_insert_metric_name": False, "filename": "a/{epoch}", "save_top_k": -1},
    "one name": {"filename": "a", "enable_version_counter": False, "save_last": True},
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("link", "best of many") else pytest.mark.long)
        for name in OPTIONS
    ],
)
def test_an_option_works_as_with_files_of_lightning(tmp_path, job, callbacks, name, asynchronous):
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    if asynchronous and OPTIONS[name].get("save_last") == "link":
        pytest.skip("Lightning itself links to a file that may not exist yet")
    listings, states = [], []
    plugin = MLStateCheckpointIO()
    for plugins in ([], [AsyncCheckpointIO(plugin) if asynchronous else plugin]):
        folder = tmp_path / "run"
        checkpoints = callbacks.ModelCheckpoint(folder, **OPTIONS[name])
        fit(job, [checkpoints], plugins)
        links = {path: path.is_symlink() and path.readlink() for path in folder.rglob("*.ckpt")}
        listings.append({(str(path.relative_to(folder)), link) for path, link in links.items()})
        path = checkpoints.last_model_path or checkpoints.best_model_path
        if plugins:
            states.append(plugin.load_checkpoint(path))
        else:
            states.append(torch.load(path, weights_only=False))
        states[-1].pop("callbacks", None)  # it has times
        states[-1] = sorted(states[-1].items())
        folder.rename(tmp_path / f"run{len(plugins)}")
    # asynchronous saves may end after the deletion of their files, in Lightning too
    assert listings[0] == listings[1] or (asynchronous and listings[0] < listings[1])
    assert repr(states[0]) == repr(states[1])


def test_links_of_other_names_are_deleted(tmp_path, job, callbacks, monkeypatch):
    monkeypatch.setattr(callbacks.ModelCheckpoint, "CHECKPOINT_NAME_LAST", "{epoch}-last")
    checkpoints = callbacks.ModelCheckpoint(
        tmp_path, save_last="link", save_top_k=2, monitor="loss"
    )
    fit(job, [checkpoints], [MLStateCheckpointIO()], max_epochs=3)
    links = [path for path in tmp_path.iterdir() if path.is_symlink()]
    assert [path.name for path in links] == ["epoch=2-last.ckpt"]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_link_is_replaced_and_its_target_kept(tmp_path):
    plugin = MLStateCheckpointIO()
    plugin.save_checkpoint({"global_step": 1}, tmp_path / "best.ckpt")
    for place in ("best.ckpt", tmp_path / "best.ckpt", "absent.ckpt"):
        (tmp_path / "last.ckpt").symlink_to(place)
        plugin.save_checkpoint({"global_step": 2}, tmp_path / "last.ckpt")
        assert plugin.load_checkpoint(tmp_path / "best.ckpt") == {"global_step": 1}
        assert plugin.load_checkpoint(tmp_path / "last.ckpt") == {"global_step": 2}
        plugin.remove_checkpoint(tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["best.ckpt"]


def test_a_killed_save_leaves_no_name(tmp_path, monkeypatch):
    plugin = MLStateCheckpointIO()
    for _ in range(2):
        raise_once(monkeypatch, Target, "put", KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            plugin.save_checkpoint({"global_step": 1}, tmp_path / "last.ckpt")
        monkeypatch.undo()
        assert not (tmp_path / "last.ckpt").exists()
    plugin.save_checkpoint({"global_step": 2}, tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_an_exception_saves_a_checkpoint(tmp_path, job, callbacks):
    class Failing(callbacks.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index == 3:
                raise RuntimeError("stop")

    checkpoints = [
        callbacks.ModelCheckpoint(tmp_path / "a", save_on_exception=True),
        callbacks.OnExceptionCheckpoint(tmp_path / "b"),
        Failing(),
    ]
    with pytest.raises(RuntimeError, match="stop"):
        fit(job, checkpoints, [MLStateCheckpointIO()])
    paths = [*(tmp_path / "a").iterdir(), tmp_path / "b" / "on_exception.ckpt"]
    assert len(paths) == 2
    for path in paths:
        assert mlstate.load(path).step == 4
        trainer, _ = fit(job, [], [MLStateCheckpointIO()], resume=path, max_steps=5)
        assert trainer.global_step == 5


# ---- files of Lightning ----


def test_run_resumes_from_a_file_and_deletes_it(tmp_path, job, callbacks):
    def checkpoints():
        return callbacks.ModelCheckpoint(tmp_path, save_last=True, monitor="loss")

    fit(job, [checkpoints()], [], max_epochs=1)
    assert all(path.is_file() for path in tmp_path.iterdir())
    with pytest.warns(UserWarning, match="a file of Lightning, not a folder"):
        trainer, module = fit(
            job, [checkpoints()], [MLStateCheckpointIO()], resume="last", max_epochs=3
        )
    assert trainer.global_step == 36
    assert all(mlstate.verify(path) for path in tmp_path.iterdir())
    expected = digest(module, trainer.optimizers[0])
    trainer, module = fit(job, [], [], max_epochs=3)
    assert digest(module, trainer.optimizers[0]) == expected
    (tmp_path / "notes.ckpt").write_text("mine")
    with pytest.raises(mlstate.StoreError, match="not a checkpoint"):
        MLStateCheckpointIO().remove_checkpoint(tmp_path / "notes.ckpt")


def test_checkpoints_convert_to_and_from_files(tmp_path, job, callbacks, capsys):
    folder, file, again = (str(tmp_path / name) for name in ("a.ckpt", "b.ckpt", "c.ckpt"))
    trainer, module = fit(job, [], [MLStateCheckpointIO()], max_epochs=1)
    trainer.save_checkpoint(folder)
    remedy = "mlstate convert FOLDER OUT.ckpt --to lightning"
    with pytest.raises(IsADirectoryError, match=remedy):
        job.Module.load_from_checkpoint(folder)
    with pytest.raises(IsADirectoryError, match=remedy):
        fit(job, [], [], resume=folder, max_epochs=2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(IsADirectoryError, match="Is a directory"):  # Lightning's own text
        job.Module.load_from_checkpoint(tmp_path / "empty")
    assert main(["convert", folder, file, "--to", "lightning"]) == 0
    assert "b.ckpt (lightning): model of 4 tensors" in capsys.readouterr().out
    loaded = job.Module.load_from_checkpoint(file)
    assert all(map(torch.equal, loaded.state_dict().values(), module.state_dict().values()))
    digests = []
    assert main(["convert", file, again, "--to", "mlstate"]) == 0
    for path, uses_mlstate in ((folder, True), (file, False), (again, True)):
        plugins = [MLStateCheckpointIO()] if uses_mlstate else []
        resumed, other = fit(job, [], plugins, resume=path, max_epochs=2)
        digests.append(digest(other, resumed.optimizers[0]))
    assert len(set(digests)) == 1
    assert main(["convert", file, again, "--only", "model"]) == 2  # it would lose the optimizer
    assert main(["convert", file, again, "--to", "mlstate", "--overwrite"]) == 0
    assert main(["convert", file, str(tmp_path / "folder")]) == 0
    assert mlstate.load(tmp_path / "folder").step == 12
    capsys.readouterr()
    assert main(["convert", file, str(tmp_path / "w.safetensors")]) == 0
    assert "loops, lr_schedulers; step " in capsys.readouterr().out


# ---- files of Lightning from other sources ----


def convert(capsys, *arguments):
    """Run ``mlstate convert``; return its errors and warnings."""
    assert main(["convert", *map(str, arguments)]) == 0
    return capsys.readouterr().err


def test_a_trainer_resumes_from_a_checkpoint_of_save(tmp_path, job, capsys):
    expected = [digest(module, t.optimizers[0]) for t, module in [fit(job, [], [], max_epochs=2)]]
    trainer, module = fit(job, [], [], max_epochs=1)
    saved = tmp_path / "own"
    mlstate.save(
        saved,
        module,
        trainer.optimizers[0],
        step=trainer.global_step,
        states={"sched": trainer.lr_scheduler_configs[0].scheduler, "ema": {"w": np.ones(2)}},
    )
    warning = convert(capsys, saved, tmp_path / "own.ckpt")
    assert "does not restore these entries of the file itself: ema" in warning
    assert torch.load(tmp_path / "own.ckpt")["ema"]["w"].tolist() == [1, 1]
    for path, plugins in ((tmp_path / "own.ckpt", []), (saved, [MLStateCheckpointIO()])):
        resumed, again = fit(job, [], plugins, resume=path, max_epochs=-1, max_steps=24)
        assert resumed.global_step == 24
        expected.append(digest(again, resumed.optimizers[0]))
    assert len(set(expected)) == 1


def sources_of(folder, state):
    """Write the weights `state` in each format; return the paths."""
    import torch.distributed.checkpoint as dcp

    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    mlstate.save(folder / "own", state, step=7)
    mlstate.save_file(arrays, folder / "file.safetensors")
    mlstate.checkpoint.export_huggingface(folder / "huggingface", arrays)
    np.savez(folder / "file.npz", **arrays)
    torch.save(state, folder / "file.pt")
    dcp.save({"model": state}, checkpoint_id=folder / "file.dcp", no_dist=True)
    return sorted(folder.iterdir())


def boring_trainer(**options):
    import lightning

    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_train_batches=4,
        limit_val_batches=1,
        limit_test_batches=1,
        **options,
    )


def test_weights_of_any_format_become_a_file_of_lightning(tmp_path, capsys):
    from lightning.pytorch.demos.boring_classes import BoringModel

    state = BoringModel().state_dict()
    for source in sources_of(tmp_path, state):
        target = tmp_path / f"{source.name}.ckpt"
        assert not convert(capsys, source, target)
        loaded = BoringModel.load_from_checkpoint(target)
        assert same(dict(loaded.state_dict()), dict(state))
        assert torch.load(target)["global_step"] == (7 if source.name == "own" else 0)
        for name in ("validate", "test"):
            module = BoringModel()
            getattr(boring_trainer(), name)(module, ckpt_path=target, verbose=False)
            assert same(dict(module.state_dict()), dict(state))
        with pytest.raises(KeyError, match="checkpoint contains only the model"):
            boring_trainer(max_epochs=1).fit(BoringModel(), ckpt_path=target)


def test_bfloat16_tied_and_extra_entries_become_a_file_of_lightning(tmp_path, capsys):
    import lightning

    class Plain(Counting):
        def get_extra_state(self):
            return {"calls": 5}

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.first = self.second = Plain(4, 4).to(torch.bfloat16)

    module = Module()
    mlstate.save(tmp_path / "own", module)
    assert not convert(capsys, tmp_path / "own", tmp_path / "own.ckpt")
    loaded = Module.load_from_checkpoint(tmp_path / "own.ckpt")
    assert loaded.second.weight is loaded.first.weight
    assert loaded.first.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.first.weight, module.first.weight)
    assert loaded.first.version == 3 and loaded.first.extra["calls"] == 5


def test_optimizers_of_other_files_resume(tmp_path, capsys):
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Module(BoringModel):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    module = Module()
    optimizer = module.configure_optimizers()
    module(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": 11}
    torch.save(state, tmp_path / "a.pt")
    warning = convert(capsys, tmp_path / "a.pt", tmp_path / "a.ckpt")
    assert "no state of a learning rate scheduler" in warning
    assert same(torch.load(tmp_path / "a.ckpt")["optimizer_states"], [optimizer.state_dict()])
    trainer = boring_trainer(max_steps=15, max_epochs=-1)
    trainer.fit(Module(), ckpt_path=tmp_path / "a.ckpt")
    assert trainer.global_step == 15
    assert trainer.optimizers[0].state_dict()["state"][0]["step"] == 1 + 4
    trainer.validate(Module(), ckpt_path=tmp_path / "a.ckpt", verbose=False)


def test_a_changed_checkpoint_of_lightning_keeps_its_other_entries(tmp_path, capsys):
    saved = checkpoint()
    saved["optimizer_states"] *= 2
    saved["callbacks"] = {"Best": {"path": "a"}}
    torch.save(saved, tmp_path / "a.ckpt")
    assert not convert(capsys, tmp_path / "a.ckpt", tmp_path / "b.ckpt", "--dtype", "bfloat16")
    changed = torch.load(tmp_path / "b.ckpt")
    assert changed["state_dict"].pop("w").dtype == torch.bfloat16
    saved["state_dict"].pop("w")
    assert same(changed, saved)


def test_parts_that_a_file_of_lightning_cannot_have_are_named(tmp_path, capsys):
    mlstate.save(tmp_path / "a", {"w": np.ones(2)}, {"w.m": np.ones(2)})
    warning = convert(capsys, tmp_path / "a", tmp_path / "a.ckpt")
    assert "the optimizer is not converted: Lightning numbers its parameters" in warning
    assert "optimizer_states" not in torch.load(tmp_path / "a.ckpt")
    mlstate.save(tmp_path / "b", {"w": np.ones(2)}, states={"state_dict": {"a": 1}})
    mlstate.save(tmp_path / "c", optimizer={"w.m": np.ones(2)})
    MLStateCheckpointIO().save_checkpoint(checkpoint(), tmp_path / "d")
    for name, options, words in (
        ("b", [], "two entries have the name 'state_dict'"),
        ("c", [], "needs a model"),
        ("d", ["--dtype", "bf16"], "is converted as a whole"),
    ):
        assert main(["convert", str(tmp_path / name), str(tmp_path / "none.ckpt"), *options]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "none.ckpt").exists()


CHECKPOINT_WITHOUT_PLUGIN = """
import sys, torch, lightning
from lightning.pytorch.demos.boring_classes import BoringModel
assert "mlstate" not in sys.modules
trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
assert trainer.callbacks and not any("mlstate" in type(c).__module__ for c in trainer.callbacks)
for call in (
    lambda: trainer.fit(BoringModel(), ckpt_path=sys.argv[1]),
    lambda: BoringModel.load_from_checkpoint(sys.argv[1]),
    lambda: lightning.Fabric(accelerator="cpu").load(sys.argv[1]),
):
    try:
        call()
    except IsADirectoryError as error:
        print(error)
"""


def test_process_that_never_imported_mlstate_names_the_conversion(tmp_path):
    MLStateCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(2)}}, tmp_path / "a.ckpt")
    printed = child.run(CHECKPOINT_WITHOUT_PLUGIN, tmp_path / "a.ckpt")
    assert printed.count("mlstate convert FOLDER OUT.ckpt --to lightning") == 3


class Trap:
    def __reduce__(self):
        return os.system, ("false",)


STRATEGY = """
import sys, warnings
warnings.simplefilter("ignore")
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
import mlstate
from mlstate.integrations.lightning import MLStateCheckpointIO
from mlstate.integrations.torch import TorchGroup

folder, divides, plugins, resume = sys.argv[1:]

class Module(lightning.LightningModule):
    def configure_model(self):
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = torch.nn.Linear(4, 2)
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        return self.net(batch).square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

steps = 3 if resume else 2
strategy = ModelParallelStrategy(save_distributed_checkpoint=divides == "parts")
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, logger=False,
    plugins=[MLStateCheckpointIO()] if plugins == "plugin" else [], default_root_dir=folder,
    callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1, monitor=None)],
    enable_progress_bar=False, enable_model_summary=False)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", mlstate.errors.CheckpointWarning)
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(9, 4)), ckpt_path=resume or None)
print(*{str(each.message) for each in caught if each.category is mlstate.errors.CheckpointWarning})
with TorchGroup() as group:  # as a warning says
    state = module.net, trainer.optimizers[0]
    mlstate.save(folder + "/own", *state, group=group)
    mlstate.load(folder + "/own", into=dict(zip(["model", "optimizer"], state)), group=group)
print(trainer.global_step)
"""


def train_by_strategy(folder, *arguments):
    program = folder / "program.py"
    program.write_text(STRATEGY)
    [(status, out, err)] = forked.run(program, ([folder, *arguments], {}))
    assert status == 0, err
    *texts, step = out.splitlines()
    return texts[-1], int(step)


def test_a_strategy_that_stores_parts_itself_warns(tmp_path):
    text, _ = train_by_strategy(tmp_path, "parts", "plugin", "")
    assert text.startswith("ModelParallelStrategy stores the parts of each rank itself")
    [path] = tmp_path.glob("*.ckpt")  # the earlier one is deleted
    assert not (path / "manifest.json").exists()
    assert train_by_strategy(tmp_path, "parts", "none", str(path)) == ("", 3)


@pytest.mark.long
def test_the_remedy_for_a_strategy_that_reads_files_itself_resumes(tmp_path, capsys):
    text, _ = train_by_strategy(tmp_path, "whole", "plugin", "")
    assert "to resume, write the file that it reads by mlstate convert FOLDER OUT.ckpt" in text
    [path] = tmp_path.glob("*.ckpt")
    convert(capsys, path, tmp_path / "file.ckpt", "--to", "lightning")
    assert train_by_strategy(tmp_path, "whole", "none", str(tmp_path / "file.ckpt")) == ("", 3)


def test_no_code_of_a_file_runs(tmp_path):
    values = {"path": pathlib.Path("a"), "color": Color.BLUE, "number": np.float64(2)}
    good = {"state_dict": {"w": torch.ones(2)}, "hyper_parameters": values}
    torch.save(good, tmp_path / "a.ckpt")
    loaded = MLStateCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert loaded["hyper_parameters"] == values
    torch.save({**good, "trap": Trap()}, tmp_path / "b.ckpt")
    with pytest.raises(mlstate.CompatibilityError, match=r"holds a (posix|nt)\.system"):
        MLStateCheckpointIO().load_checkpoint(tmp_path / "b.ckpt")
    torch.save({"w": torch.ones(2)}, tmp_path / "c.ckpt")
    with pytest.raises(mlstate.CompatibilityError, match="no 'state_dict'"):
        MLStateCheckpointIO().load_checkpoint(tmp_path / "c.ckpt")
