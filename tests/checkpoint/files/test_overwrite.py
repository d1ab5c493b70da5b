"""One rule for a target that exists: every writer, by what exists and by `overwrite`."""

import errno
from pathlib import Path

import numpy as np
import pytest
from checkpoint_model import files_of, same
from weight_folder import write_weight_file

import mlstate
from mlstate import _core
from mlstate._common.store_error import store_error
from mlstate.checkpoint import (
    CheckpointManager,
    export_huggingface,
    export_huggingface_async,
    load_file,
    reshard,
    save_async,
)
from mlstate.cli import main
from mlstate.follow import Publisher
from mlstate.prompts import PromptStore
from mlstate.testing import assert_digest, run_ranks

STATE = {"w": np.arange(6.0), "b": np.ones(2)}
AGAIN = {"w": np.arange(6.0) + 1, "b": np.zeros(2)}
OTHER = {"w": np.arange(5.0), "b": np.ones(2)}


def _source(state):
    """Save the state as the source of a conversion; return its path."""
    mlstate.save("source", state, overwrite=True)
    return "source"


def _convert(format):
    return lambda path, state, **how: mlstate.convert(_source(state), path, format=format, **how)


def _reshard(path, state, **how):
    reshard(_source(state), path, layout="rows", world_size=2, **how)


WRITERS = {
    "save": lambda path, state, **how: mlstate.save(path, state, **how),
    "save_async": lambda path, state, **how: save_async(path, state, **how).wait(),
    "reshard": _reshard,
    "convert mlstate": _convert("mlstate"),
    "save_file": lambda path, state, **how: mlstate.save_file(state, path, **how),
    "convert safetensors": _convert("safetensors"),
    "convert npz": _convert("npz"),
    "convert torch": _convert("torch"),
    "convert lightning": _convert("lightning"),
    "convert dcp": _convert("dcp"),
    "convert huggingface": _convert("huggingface"),
    "export_huggingface": lambda path, state, **how: export_huggingface(path, state, **how),
    "export_huggingface_async": lambda path, state, **how: export_huggingface_async(
        path, state, **how
    ).wait(),
}
CHECKPOINTS = ("save", "save_async", "reshard", "convert mlstate")
FILES = ("save_file", "convert safetensors", "convert npz", "convert torch", "convert lightning")
WITH_MARK = ("save_file", "convert safetensors")
NEEDS_TORCH = ("convert torch", "convert lightning", "convert dcp")


def _content(folder):
    """The bytes of all files below a folder, and the paths of its folders."""
    return files_of(folder), sorted(folder.rglob("*"))


def _cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def _damage(path):
    """Damage what a writer wrote, so that its tensors are unknown."""
    if path.is_file():
        size = path.stat().st_size
        _cut(path, size - 3 if path.read_bytes()[8:9] == b"{" else size // 2)
    elif (path / "manifest.json").exists():
        _cut(path / "manifest.json", 20)
    elif (path / ".metadata").exists():
        _cut(path / ".metadata", 20)
    else:
        _cut(path / "model.safetensors", 20)


def _foreign_folder(path):
    path.mkdir()
    (path / "letter").write_text("dear")
    (path / "params").mkdir()


def _other_kind(path, writer):
    """Write another kind of ours: a file for a writer of files, else a folder."""
    if writer in FILES:
        format = "npz" if writer != "convert npz" else "safetensors"
        mlstate.convert(_source(STATE), path, format=format)
    elif writer in CHECKPOINTS:
        export_huggingface(path, STATE)
    else:
        mlstate.save(path, STATE)


SITUATIONS = {
    "absent": lambda path, _: None,
    "empty folder": lambda path, _: path.mkdir(),
    "same": lambda path, writer: WRITERS[writer](path, STATE),
    "reshaped": lambda path, writer: WRITERS[writer](path, OTHER),
    "other names": lambda path, writer: WRITERS[writer](path, {"w": np.arange(6.0)}),
    "damaged": lambda path, writer: (WRITERS[writer](path, STATE), _damage(path)),
    "another kind": _other_kind,
    "foreign file": lambda path, _: path.write_text("dear"),
    "foreign folder": lambda path, _: _foreign_folder(path),
}
FREE = ("absent", "empty folder")


def outcome_of(writer, situation, overwrite):
    """Return what docs/files.md tells: "written", "replaced", "warned" or "refused"."""
    if situation == "empty folder" and writer in FILES:
        return "refused"
    if situation in FREE:
        return "written"
    if overwrite is False or situation.startswith("foreign"):
        return "refused"
    if situation == "same":
        return "replaced"
    if situation == "another kind":
        return "replaced" if overwrite and writer in FILES else "refused"
    if situation == "damaged" and not overwrite:
        is_readable = writer in WITH_MARK or "huggingface" in writer or writer in CHECKPOINTS
        return "warned" if is_readable else "refused"
    return "replaced" if overwrite else "refused"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("overwrite", [None, True, False])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.filterwarnings("ignore:the existing checkpoint is damaged")
def test_every_writer_follows_the_rule(writer, situation, overwrite, recwarn):
    if writer in NEEDS_TORCH:
        pytest.importorskip("torch", reason="it writes these files")
    path = Path("there/target")
    path.parent.mkdir()
    SITUATIONS[situation](path, writer)
    before = _content(path.parent)
    recwarn.clear()
    expected = outcome_of(writer, situation, overwrite)
    if expected == "refused":
        with pytest.raises(mlstate.StoreError) as caught:
            WRITERS[writer](path, AGAIN, overwrite=overwrite)
        assert caught.value.errno == errno.EEXIST
        assert "overwrite=True" in str(caught.value)
        assert situation != "empty folder" or "is a folder, not a file" in str(caught.value)
        assert str(path) in str(caught.value)
        assert _content(path.parent) == before
        return
    WRITERS[writer](path, AGAIN, overwrite=overwrite)
    loaded = load_file(path) if writer == "save_file" else mlstate.load(path).model
    assert same(AGAIN, {name: np.asarray(value) for name, value in loaded.items()})
    assert [*path.parent.iterdir()] == [path]
    damaged = [str(each.message) for each in recwarn if "is damaged" in str(each.message)]
    if situation == "damaged" and writer in CHECKPOINTS:  # also with overwrite=True
        expected = "warned"
    assert len(damaged) == (expected == "warned")


@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_creates_missing_parents(writer):
    if writer in NEEDS_TORCH:
        pytest.importorskip("torch", reason="it writes these files")
    WRITERS[writer]("new/folder/target", STATE)
    assert same(
        STATE, {name: np.asarray(a) for name, a in mlstate.load("new/folder/target").model.items()}
    )


def test_other_writers_refuse_a_folder(capsys):
    Path("d/mlstate.checksums.json").mkdir(parents=True)
    mlstate.save_file(STATE, "d/model.safetensors")
    for call in (
        lambda: assert_digest(STATE, "d", update=True),
        lambda: mlstate.checkpoint.checksum("d"),
    ):
        with pytest.raises(mlstate.StoreError, match="is a folder, not a file"):
            call()
    assert_digest(STATE, "new/digest.json", update=True)
    assert main(["demo", "--quiet", "--picture", "d"]) == 2
    assert "/d: cannot write the target: it exists already, and is a folder, not a file" in (
        capsys.readouterr().err
    )


# ---- runs ----

RUN_WRITERS = {name: WRITERS[name] for name in CHECKPOINTS}
COMMANDS = {
    "reshard": ["reshard", "source", "run", "--layout", "rows=2"],
    "convert": ["convert", "source", "run"],
}


@pytest.fixture
def run():
    """A run of three steps, and the source of a conversion."""
    _source(STATE)
    manager = CheckpointManager("run", keep=None)
    for step in (1, 2, 3):
        manager.save(step, {"old": np.full(3, step)})


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_refuse_and_replace_a_run(run, name, capsys):
    before = files_of("run")
    assert main(COMMANDS[name]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert files_of("run") == before
    assert main([*COMMANDS[name], "--overwrite"]) == 0
    assert same(STATE, mlstate.load("run").model)
    assert CheckpointManager("run").steps() == []


@pytest.mark.parametrize("writer", RUN_WRITERS)
def test_only_overwrite_replaces_the_steps_of_a_run(run, writer):
    before = files_of("run")
    with pytest.raises(mlstate.StoreError, match=r"steps of a CheckpointManager.*overwrite=True"):
        WRITERS[writer]("run", STATE)
    assert files_of("run") == before
    WRITERS[writer]("run", STATE, overwrite=True)
    assert same(STATE, mlstate.load("run").model)
    assert CheckpointManager("run").steps() == []
    report = mlstate.verify("run")
    assert report
    assert not report.leftover
    with pytest.raises(FileNotFoundError, match=r"checkpoint of mlstate\.save"):
        CheckpointManager("run").restore_latest()


def test_a_step_replaces_a_step_of_other_tensors():
    mlstate.save("c", STATE, step=1)
    mlstate.save("c", OTHER, step=2)
    with pytest.raises(mlstate.StoreError, match="overwrite=True"):
        mlstate.save("c", STATE)
    with pytest.raises(mlstate.StoreError, match="overwrite=True"):
        reshard(_source(STATE), "c", layout="rows", world_size=2)
    assert mlstate.load("c").step == 2


def test_dtype_layout_and_metadata_may_change():
    mlstate.save("c", STATE, metadata={"a": 1})
    cast = {name: array.astype(np.float32) for name, array in STATE.items()}
    mlstate.save("c", cast, layout=mlstate.checkpoint.Layout.rows(2), metadata={"b": 2})
    assert mlstate.load("c").model["w"].dtype == np.float32


def test_optimizer_and_named_states_count():
    mlstate.save("c", STATE)
    for more in ({"optimizer": {"w.m": np.ones(6)}}, {"states": {"ema": STATE}}):
        with pytest.raises(mlstate.StoreError, match="lacks"):
            mlstate.save("c", STATE, **more)


def _outcomes(ranks, path, rows, **how):
    """Save on each rank; return errno and text of its StoreError, or None."""

    def save(group):
        weight = np.arange(12.0).reshape(rows, -1)
        shard = mlstate.checkpoint.Layout.rows(group.world_size).shard(weight, group.rank)
        try:
            mlstate.save(path, {f"w{group.rank}": np.ones(3), "cut": shard}, group=group, **how)
        except mlstate.StoreError as error:
            return error.errno, str(error)
        return None

    return run_ranks(ranks, save)


def test_every_rank_raises_the_refusal():
    path = Path("c").absolute()
    for _ in range(2):
        assert _outcomes(3, path, 4) == [None] * 3
    before = files_of(path)
    for ranks, rows, how in ((3, 6, {}), (2, 4, {}), (3, 4, {"overwrite": False})):
        outcomes = _outcomes(ranks, path, rows, **how)
        assert [number for number, _ in outcomes] == [errno.EEXIST] * ranks
        assert all("overwrite=True" in text for _, text in outcomes)
        assert files_of(path) == before
    assert _outcomes(2, path, 6, overwrite=True) == [None] * 2
    assert mlstate.load(path).model["cut"].shape == (6, 2)


@pytest.mark.parametrize("writer", RUN_WRITERS)
def test_a_failed_overwrite_leaves_the_run(run, writer, monkeypatch):
    replace = _core.file_replace

    def fail(path, *rest):
        if "source" in path:
            return replace(path, *rest)
        raise store_error(OSError(errno.ENOSPC, "full"), "cannot write", path)

    with monkeypatch.context() as patch:
        patch.setattr(_core, "file_replace", fail)
        with pytest.raises(mlstate.StoreError, match="full"):
            WRITERS[writer]("run", STATE, overwrite=True)
    assert CheckpointManager("run").steps() == [1, 2, 3]
    assert mlstate.load("run").step == 3
    assert mlstate.verify("run")


@pytest.mark.parametrize("writer", RUN_WRITERS)
def test_overwriting_a_damaged_checkpoint_removes_old_files(run, writer):
    Path("run/manifest.json").write_bytes(b"{")
    for root in Path("run/roots").iterdir():
        root.write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        WRITERS[writer]("run", STATE, overwrite=True)
    assert mlstate.verify("run")
    assert not mlstate.verify("run").leftover


# ---- folders that count as empty, and others ----


def stop(_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("writer", RUN_WRITERS)
def test_the_folder_of_a_stopped_first_save_needs_no_overwrite(writer):
    with pytest.raises(KeyboardInterrupt):
        mlstate.save("stopped", {"w": np.ones(2)}, progress=stop)
    Path("stopped/params/w.0123456789abcdef-0.safetensors").touch()  # of a killed save
    WRITERS[writer]("stopped", STATE)
    assert same(STATE, mlstate.load("stopped").model)


@pytest.mark.parametrize("other", ["params/letter", "letter", "roots/letter"])
@pytest.mark.parametrize("writer", RUN_WRITERS)
def test_other_files_in_the_folders_of_a_save_are_refused(writer, other):
    path = Path("other") / other
    path.parent.mkdir(parents=True)
    path.write_text("dear")
    for part in ("params", "roots", "index"):
        Path("other", part).mkdir(exist_ok=True)
    before = _content(Path("other"))
    for overwrite in (None, True):
        with pytest.raises(mlstate.StoreError, match=f"exists already, .* holds '{other}'"):
            WRITERS[writer]("other", STATE, overwrite=overwrite)
    assert _content(Path("other")) == before


def test_other_files_beside_a_checkpoint_stay():
    mlstate.save("c", STATE)
    Path("c/letter").write_text("dear")
    mlstate.save("c", AGAIN)
    mlstate.save("c", OTHER, overwrite=True)
    assert Path("c/letter").read_text() == "dear"


@pytest.mark.parametrize("name", ["letter", "config.json", "sub"])
def test_an_export_never_loses_a_file(name):
    export_huggingface("m", STATE)
    if name == "sub":
        Path("m/sub").mkdir()
    else:
        Path("m", name).write_text("{}")
    before = _content(Path("m"))
    for overwrite in (None, True):
        with pytest.raises(mlstate.StoreError, match=f"would lose '{name}', which files_from="):
            export_huggingface("m", AGAIN, overwrite=overwrite)
    assert _content(Path("m")) == before
    if name != "sub":
        export_huggingface("m", AGAIN, files_from="m")
        assert Path("m", name).read_text() == "{}"
        assert same(AGAIN, mlstate.load("m").model)


def test_a_file_of_another_program_needs_overwrite():
    state = {"w": np.ones(3, np.float32)}
    write_weight_file(Path("x.safetensors"), state)
    with pytest.raises(mlstate.StoreError, match=r"of another program; overwrite=True"):
        mlstate.save_file(state, "x.safetensors")
    mlstate.save_file(state, "x.safetensors", overwrite=True)
    mlstate.save_file(state, "x.safetensors")
    Path("y.safetensors").touch()
    mlstate.save_file(STATE, "y.safetensors", overwrite=False)  # an empty file is free


@pytest.mark.parametrize("overwrite", [1, "yes", 0.0])
@pytest.mark.parametrize("writer", WRITERS)
def test_overwrite_is_a_flag(writer, overwrite):
    with pytest.raises(TypeError, match="overwrite must be True, False or None"):
        WRITERS[writer]("x", STATE, overwrite=overwrite)
    assert not Path("x").exists()


@pytest.mark.parametrize("fill", [_foreign_folder, lambda path: mlstate.save(path, STATE)])
def test_a_publisher_and_a_prompt_store_refuse_a_foreign_folder(fill):
    fill(Path("f"))
    before = _content(Path("f"))
    with pytest.raises(mlstate.StoreError, match=r"it holds|and holds"):
        Publisher("f").publish(0, STATE)
    with pytest.raises(mlstate.FormatError, match="not a prompt store"):
        PromptStore("f", model="m")
    assert _content(Path("f")) == before


def test_reshard_refuses_a_link_to_itself():
    _source(STATE)
    Path("loop").symlink_to("loop")
    with pytest.raises(mlstate.StoreError, match="it exists already"):
        reshard("source", "loop", layout="rows", world_size=2)


def test_reshard_names_a_missing_source():
    Path("target").mkdir()
    with pytest.raises(mlstate.StoreError) as caught:
        reshard("missing", "target", layout="rows", world_size=2)
    assert caught.value.path
