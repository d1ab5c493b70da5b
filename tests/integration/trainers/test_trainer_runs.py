"""Which steps of a transformers.Trainer stay, and how a training resumes, with the same bits."""

import contextlib
import json
import logging
import os
import shutil
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import killed_jobs  # noqa: E402
from needs import needs  # noqa: E402
from regression import Model, digest  # noqa: E402
from s3_fault_proxy import StoreServer  # noqa: E402

import mlstate  # noqa: E402
from mlstate.checkpoint import CheckpointManager  # noqa: E402
from mlstate.integrations.transformers import MLStateCallback  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    needs("transformers", "accelerate"),
    pytest.mark.timeout(590),
    pytest.mark.filterwarnings("ignore"),  # torch and transformers warn about themselves
]


@pytest.fixture(scope="module")
def store():
    with StoreServer() as server:
        yield server


JOB = Path(__file__).with_name("transformers_job.py")
BEST = {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1}


@pytest.fixture(scope="module")
def runs():
    return killed_jobs.module_of(JOB.with_name("trainer_runs.py"))


@pytest.fixture(scope="module")
def job():
    return killed_jobs.module_of(JOB)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def train(runs, folder, *callbacks, resume=None, with_mlstate=True, callback=None, **options):
    """Train, and return the recorder of the digests."""
    options = {"max_steps": 4, "save_steps": 1, "save_only_model": True, **options}
    recorder = runs.Recorder({})
    own_callbacks = [callback or MLStateCallback()] if with_mlstate else []
    trainer = runs.trainer_of(folder, [*callbacks, *own_callbacks, recorder], 1, **options)
    trainer.train(resume_from_checkpoint=resume)
    return recorder


def steps_of(folder):
    """Return the steps of mlstate, and of the folders of the Trainer."""
    folders = sorted(int(path.name[11:]) for path in Path(folder).glob("checkpoint-*"))
    return sorted(CheckpointManager(folder / "mlstate").steps()), folders


# ---- which steps stay ----


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"save_total_limit": 2}, ([3, 4], [3, 4])),
        ({"save_total_limit": 0}, ([1, 2, 3, 4], [1, 2, 3, 4])),  # no limit
        ({"save_total_limit": 1}, ([4], [4])),
        ({"save_strategy": "no"}, ([], [])),
        ({"save_strategy": "epoch", "max_steps": 12}, ([6, 12], [6, 12])),
        ({"save_steps": 0.5}, ([2, 4], [2, 4])),
    ],
)
def test_steps_follow_the_options_of_the_trainer(tmp_path, runs, options, expected):
    train(runs, tmp_path, **options)
    assert steps_of(tmp_path) == expected


@pytest.mark.parametrize("greater", [False, True])
@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_step_stays(tmp_path, runs, limit, greater):
    options = {**BEST, "load_best_model_at_end": True, "greater_is_better": greater}
    train(runs, tmp_path, save_total_limit=limit, **options)
    steps, folders = steps_of(tmp_path)
    assert set(folders) <= set(steps) and len(steps) <= 2
    resumed = train(runs, tmp_path, resume=MLStateCallback.last_checkpoint(tmp_path), max_steps=6)
    assert resumed.resumed[0] == max(folders)


def test_only_a_new_best_metric_saves(tmp_path, runs):
    train(runs, tmp_path, save_strategy="best", greater_is_better=False, **BEST)
    steps, folders = steps_of(tmp_path)
    assert steps == folders and steps


def test_keep_retains_steps_after_folder_deletion(tmp_path, runs):
    train(runs, tmp_path, save_total_limit=1, callback=MLStateCallback(keep=3))
    assert steps_of(tmp_path) == ([2, 3, 4], [4])


def test_other_limits_in_later_runs_leave_a_step_for_both(tmp_path, runs):
    for limit, most in ((None, 3), (1, 5), (3, 8)):
        last = MLStateCallback.last_checkpoint(tmp_path)
        train(runs, tmp_path, resume=last, save_total_limit=limit, max_steps=most)
        steps, folders = steps_of(tmp_path)
        assert steps == folders and most in steps


# ---- how a training resumes ----


def test_a_kill_after_the_deletion_leaves_a_checkpoint(tmp_path, runs):
    killer = runs.Killer("before step", 3)
    with pytest.raises(runs.Killed):
        train(runs, tmp_path, killer, save_total_limit=1)
    assert steps_of(tmp_path) == ([2], [3])  # none of both
    last = MLStateCallback.last_checkpoint(tmp_path)
    assert last == str(tmp_path / "checkpoint-2")
    assert sorted(path.name for path in Path(last).iterdir()) == [
        "model.safetensors",
        "trainer_state.json",
    ]
    assert MLStateCallback.last_checkpoint(tmp_path) == last
    resumed = train(runs, tmp_path, resume=last, save_total_limit=1)
    uninterrupted = train(runs, tmp_path / "whole")
    assert resumed.resumed == (2, *uninterrupted.digests[2])
    assert resumed.digests[4] == uninterrupted.digests[4]
    assert steps_of(tmp_path) == ([4], [4])


@pytest.mark.parametrize("damage", ["model.safetensors", "trainer_state.json"])
def test_a_damaged_folder_is_written_again(tmp_path, runs, damage):
    train(runs, tmp_path, save_total_limit=1)
    path = tmp_path / "checkpoint-4" / damage
    path.write_bytes(path.read_bytes()[:-20])
    last = MLStateCallback.last_checkpoint(tmp_path)
    assert train(runs, tmp_path, resume=last, max_steps=5).resumed[0] == 4
    shutil.rmtree(last)
    for folder in tmp_path.glob("checkpoint-*"):
        shutil.rmtree(folder)
    assert MLStateCallback.last_checkpoint(tmp_path) is None  # the user starts anew


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_a_run_continues_on_a_new_machine_from_steps_elsewhere(tmp_path, runs, kind, request):
    place, options = tmp_path / "steps", {}
    if kind == "store":
        server = request.getfixturevalue("store")
        place, options = "s3://bucket/trainer", {"storage_options": server.options()}
    resumed = MLStateCallback.last_checkpoint(tmp_path / "old", place, **options)
    assert resumed is None  # nothing was saved yet
    train(runs, tmp_path / "old", callback=MLStateCallback(place, **options))
    with pytest.warns(mlstate.errors.CheckpointWarning, match="pass it to last_checkpoint too"):
        assert MLStateCallback.last_checkpoint(tmp_path / "old") is None
    last = MLStateCallback.last_checkpoint(tmp_path / "new", place, **options)
    assert last == str(tmp_path / "new" / "checkpoint-4")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["checkpoint-4"]
    callback = MLStateCallback(place, **options)
    resumed = train(runs, tmp_path / "new", resume=last, callback=callback, max_steps=5)
    assert resumed.resumed[0] == 4


def test_the_best_step_is_loaded_at_the_end_on_a_new_machine(tmp_path, runs):
    options = {**BEST, "load_best_model_at_end": True, "greater_is_better": True}
    options.update(save_steps=1, save_total_limit=2, save_only_model=True)
    place, models = tmp_path / "steps", []
    for folder, last_step in (("whole", 6), ("old", 4), ("new", 6)):
        callbacks, last = [MLStateCallback(place)], None
        if folder == "whole":
            callbacks = []
        if folder == "new":
            shutil.rmtree(tmp_path / "old")
            last = MLStateCallback.last_checkpoint(tmp_path / "new", place)
            assert last == str(tmp_path / "new/checkpoint-4")
        trainer = runs.trainer_of(tmp_path / folder, callbacks, 1, max_steps=last_step, **options)
        trainer.train(resume_from_checkpoint=last)
        assert trainer.state.best_global_step == 1  # the first step has the largest loss
        models.append(trainer.model.state_dict())
    assert all(torch.equal(models[0][name], value) for name, value in models[2].items())
    assert CheckpointManager(place).steps() == [1, 6]


def test_a_new_training_keeps_the_steps_of_its_directory(tmp_path, runs):
    place = tmp_path / "steps"
    train(runs, tmp_path / "old", callback=MLStateCallback(place, keep=2), save_total_limit=1)
    assert CheckpointManager(place).steps() == [3, 4]
    with pytest.warns(mlstate.errors.CheckpointWarning, match="another training: 3, 4"):
        callback = MLStateCallback(place)
        train(runs, tmp_path / "new", callback=callback, save_total_limit=1, max_steps=2)
    assert sorted(CheckpointManager(place).steps()) == [2, 3, 4]


def test_a_damaged_newest_step_warns(tmp_path, runs):
    train(runs, tmp_path)
    place = tmp_path / "mlstate"
    path = place / CheckpointManager(place).checkpoint(4).shards()[0].path
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.warns(mlstate.errors.CheckpointWarning, match="damaged steps.*: 4"):
        last = MLStateCallback.last_checkpoint(tmp_path)
    assert last == str(tmp_path / "checkpoint-3")


def test_a_store_that_fails_does_not_hide_the_newest_step(tmp_path, runs, store):
    place, options = "s3://bucket/failing", {"storage_options": store.options(timeout=2.0)}
    train(runs, tmp_path / "old", callback=MLStateCallback(place, keep=2, **options))
    files = CheckpointManager(place, **options).checkpoint(4).files()
    store.faults.reset(
        lambda _number, _method, path: "503" if path.endswith(tuple(files)) else None
    )
    with pytest.raises(mlstate.StoreError):
        MLStateCallback.last_checkpoint(tmp_path / "new", place, **options)
    store.faults.reset()
    assert not (tmp_path / "new").exists()


def test_a_start_anew_beside_steps_warns(tmp_path, runs):
    place = tmp_path / "steps"
    train(runs, tmp_path / "old", callback=MLStateCallback(place))
    shutil.rmtree(place / "states")
    with pytest.warns(mlstate.errors.CheckpointWarning, match="no step of the Trainer that is und"):
        assert MLStateCallback.last_checkpoint(tmp_path / "new", place) is None


def test_resume_of_a_trainer_only_checkpoint_warns(tmp_path, runs):
    train(runs, tmp_path, save_total_limit=2)
    train(runs, tmp_path, with_mlstate=False, max_steps=6, save_only_model=False)
    last = MLStateCallback.last_checkpoint(tmp_path)
    assert last == str(tmp_path / "checkpoint-6")
    with pytest.warns(UserWarning, match="the Trainer itself has saved"):
        resumed = train(runs, tmp_path, resume=last, max_steps=8)
    assert resumed.resumed[0] == 6
    assert 8 in steps_of(tmp_path)[0]


def test_a_good_checkpoint_resumes_without_a_warning(tmp_path, runs):
    train(runs, tmp_path, save_total_limit=2, max_steps=6)  # to the end of an epoch
    options = {"max_steps": 9, "save_total_limit": 1, "ignore_data_skip": True}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(runs, tmp_path, resume=True, eval_on_start=True, **options)
    assert not [each for each in caught if "mlstate" in str(each.filename)]


def test_a_step_of_another_run_is_refused(tmp_path, runs):
    train(runs, tmp_path / "first")
    train(runs, tmp_path / "second", **BEST, save_strategy="steps")
    with pytest.raises(mlstate.CompatibilityError, match=r"step 2 in .* belongs to another run"):
        train(runs, tmp_path / "first", resume=str(tmp_path / "second" / "checkpoint-2"))


def test_weights_newer_than_the_optimizer_are_passed_over(tmp_path, runs):
    train(runs, tmp_path, max_steps=2)
    train(runs, tmp_path, with_mlstate=False, max_steps=3, save_only_model=False)
    weights = tmp_path / "checkpoint-3" / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 10**9))
    with pytest.warns(UserWarning, match="checkpoint-3 is passed over"):
        last = MLStateCallback.last_checkpoint(tmp_path)
    assert last == str(tmp_path / "checkpoint-2")


def test_callback_after_a_failed_run_saves_to_the_next_folder(tmp_path, runs):
    callback = MLStateCallback()
    with pytest.raises(runs.Killed):
        train(runs, tmp_path / "a", runs.Killer("training", 3), callback=callback)
    train(runs, tmp_path / "b", callback=callback)
    assert steps_of(tmp_path / "a")[0] == [1, 2]
    assert steps_of(tmp_path / "b")[0] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("stop", "options"),
    [
        (4, {}),
        (6, {}),  # the end of an epoch
        (4, {"ignore_data_skip": True}),
        (6, {"eval_on_start": True, "eval_strategy": "epoch"}),
        (2, {"gradient_accumulation_steps": 4, "eval_on_start": True, **BEST}),
        (3, {"gradient_accumulation_steps": 2, "accelerator_config": {"use_seedable_sampler": 0}}),
        (4, {"lr_scheduler_type": "reduce_lr_on_plateau", **BEST}),
    ],
)
def test_resumed_training_draws_like_the_trainer(tmp_path, runs, stop, options):
    train(runs, tmp_path / "a", save_steps=stop, max_steps=stop, save_only_model=False, **options)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    options = {**options, "max_steps": stop + 4, "save_strategy": "no"}
    alone = train(runs, tmp_path / "a", resume=True, with_mlstate=False, **options)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (tmp_path / "b" / f"checkpoint-{stop}" / name).unlink()
    resumed = train(runs, tmp_path / "b", resume=True, **options)
    assert resumed.digests == alone.digests and len(alone.digests) >= 4


# ---- a signal, and options that are refused ----


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_the_save_of_a_signal_reaches_the_callback(tmp_path, runs, event):
    import transformers

    def request(self, args, state, control, **others):
        if state.global_step == 2:
            [callback] = (
                c for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager")
            )
            callback.jit_manager.is_checkpoint_requested = True

    events = ["on_step_end", "on_step_begin", "on_pre_optimizer_step", "on_step_end"]
    before = events[events.index(event, 1) - 1]  # the Trainer looks for a signal in each event
    kind = type("Request", (transformers.TrainerCallback,), {before: request})
    options = {"enable_jit_checkpoint": True, "save_strategy": "no", "save_only_model": True}
    callbacks = [kind(), MLStateCallback()]
    trainer = runs.trainer_of(tmp_path, callbacks, 1, max_steps=9, **options)
    trainer.train()
    steps, folders = steps_of(tmp_path)
    assert steps == folders == [3 if event == "on_step_end" else 2]
    last = MLStateCallback.last_checkpoint(tmp_path)
    assert train(runs, tmp_path, resume=last, max_steps=6).resumed[0] == steps[0]


def arguments(folder, **options):
    class Arguments:
        output_dir = str(folder)
        world_size = 1

    return type("Given", (Arguments,), options)()


class State:
    is_hyper_param_search = False
    global_step = 0


@pytest.mark.parametrize(
    ("option", "others", "directory"),
    [
        ("deepspeed", {}, None),
        ("push_to_hub", {}, None),
        ("push_to_hub", {}, "run/steps"),
        ("save_on_each_node", {"world_size": 2}, None),
        ("enable_jit_checkpoint", {"world_size": 2}, "steps"),
    ],
)
def test_an_option_that_cannot_work_is_refused(tmp_path, option, others, directory):
    callback = MLStateCallback(None if directory is None else tmp_path / directory)
    args = arguments(tmp_path / "run", **{option: True, **others})
    with pytest.raises(mlstate.CompatibilityError, match=f"does not support {option}: ") as caught:
        callback.on_train_begin(args, State, None)
    assert caught.value.name == option
    assert not (tmp_path / "run").exists()


def test_a_search_of_hyperparameters_is_refused(tmp_path):
    state = type("Searching", (State,), {"is_hyper_param_search": True})
    with pytest.raises(mlstate.CompatibilityError, match="hyperparameter_search"):
        MLStateCallback().on_train_begin(arguments(tmp_path), state, None)


def test_steps_outside_of_an_uploaded_folder_are_accepted(tmp_path):
    args = arguments(tmp_path / "run", push_to_hub=True, save_on_each_node=True)
    callback = MLStateCallback(tmp_path / "steps")
    callback.on_train_begin(args, State, None)
    callback.on_train_end(args, State, None)


@pytest.mark.parametrize("directory", ["~/run/steps", "link/steps"])
def test_steps_in_an_uploaded_folder_are_refused_under_each_name(tmp_path, monkeypatch, directory):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    args = arguments(tmp_path / "run", push_to_hub=True)
    with pytest.raises(mlstate.CompatibilityError, match="push_to_hub"):
        MLStateCallback(directory).on_train_begin(args, State, None)


def test_steps_in_a_store_are_not_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = MLStateCallback("memory://bucket/steps")  # refused later, as an unknown store
    with pytest.raises(ValueError, match="unknown scheme 'memory'"):
        callback.on_train_begin(arguments(".", push_to_hub=True), State, None)


def test_tensors_as_learning_rates_resume(tmp_path, runs):
    def trained(resume, most):
        trainer = runs.trainer_of(
            *(tmp_path, [MLStateCallback()], 1),
            **{"save_steps": 1, "save_only_model": True, "max_steps": most},
        )
        optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=torch.tensor(0.1))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        trainer.optimizer, trainer.lr_scheduler = optimizer, scheduler
        trainer.train(resume_from_checkpoint=resume)
        rate = optimizer.param_groups[0]["lr"]
        assert isinstance(rate, torch.Tensor)
        return float(rate)

    trained(None, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert trained(MLStateCallback.last_checkpoint(tmp_path), 5) == pytest.approx(0.1 / 6)


def test_a_gradient_scaler_is_restored(tmp_path, runs):
    import transformers

    class Prepared:  # as accelerate wraps an optimizer
        def __init__(self, parameters, scale):
            self.optimizer = torch.optim.AdamW(parameters)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            self.scaler.scale(torch.ones(1))  # creates the scale

    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    state = transformers.TrainerState(global_step=2, epoch=0.5)
    scales = []
    for scale in (8.0, 2.0):
        model = Model()
        optimizer = Prepared(model.parameters(), scale)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer)
        objects = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
        callback = MLStateCallback()
        begun = state if scales else transformers.TrainerState()
        callback.on_train_begin(args, begun, None, train_dataloader=[0] * 4, **objects)
        callback.on_save(args, state, None, **objects)
        scales.append(optimizer.scaler.get_scale())
    assert scales == [8.0, 8.0]


def test_the_position_of_the_trainer_is_recorded(tmp_path, runs):
    train(runs, tmp_path, max_steps=2)
    record = CheckpointManager(tmp_path / "mlstate").restore(2).states["trainer"]
    text = (tmp_path / "checkpoint-2" / "trainer_state.json").read_text()
    assert record == {"position": text} and json.loads(text)["global_step"] == 2


# ---- compared with an uninterrupted training ----


class Stop(Exception):
    """Ends a training."""


def train_job(job, folder, *, stop=None, seed=0):
    """Train until the end or until a step, and return the Trainer."""
    import transformers

    class Stopper(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            if state.global_step == stop:
                raise Stop

    transformers.set_seed(seed)
    trainer = job.trainer_of(folder)
    trainer.add_callback(Stopper())
    with contextlib.suppress(Stop):
        trainer.train(resume_from_checkpoint=MLStateCallback.last_checkpoint(folder))
    return trainer


def digest_of(trainer):
    return digest(trainer.model, trainer.optimizer)


@pytest.fixture(scope="module")
def expected(job, tmp_path_factory):
    """The digest of an uninterrupted training."""
    return digest_of(train_job(job, tmp_path_factory.mktemp("whole") / "run"))


# in the middle of the first epoch, and at its end
@pytest.mark.parametrize("stop", [5, pytest.param(13, marks=pytest.mark.long)])
def test_a_run_resumes_with_the_same_bits(tmp_path, job, expected, stop):
    train_job(job, tmp_path, stop=stop)
    assert MLStateCallback.last_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{stop - 1}")
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.pth"))  # no pickle
    assert digest_of(train_job(job, tmp_path, seed=7)) == expected
    assert CheckpointManager(tmp_path / "mlstate").steps() == [22, 24]


@pytest.mark.long
def test_an_incomplete_or_damaged_checkpoint_is_passed_over(tmp_path, job, expected):
    train_job(job, tmp_path, stop=9)
    manager = CheckpointManager(tmp_path / "mlstate")
    assert manager.steps() == [6, 8]
    (tmp_path / "checkpoint-8" / "trainer_state.json").unlink()  # killed while it was written
    (tmp_path / "checkpoint-10").mkdir()
    assert MLStateCallback.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    assert digest_of(train_job(job, tmp_path)) == expected
    shutil.rmtree(tmp_path / "mlstate" / "states")
    assert MLStateCallback.last_checkpoint(tmp_path) is None
    assert MLStateCallback.last_checkpoint(tmp_path / "absent") is None


def test_a_step_that_was_not_saved_is_an_error(tmp_path, job):
    train_job(job, tmp_path, stop=5)
    shutil.rmtree(tmp_path / "mlstate")
    with pytest.raises(mlstate.StoreError, match="step 4 does not exist"):
        job.trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"mlstate\[transformers\]"):
        MLStateCallback()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2] if killed_jobs.FULL else [2])
def test_a_killed_run_resumes_with_the_same_bits(tmp_path, ranks):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    start = [] if ranks == 1 else launch
    expected = killed_jobs.run([*start, JOB, tmp_path / "whole"])[0][-1]
    assert expected.startswith("done")
    digest = killed_jobs.run_killed(
        [*start, JOB, tmp_path / "run"], most_lines=14 * ranks, seed=ranks
    )
    assert digest == expected


@pytest.mark.long
def test_another_number_of_ranks_resumes_without_generators(tmp_path, job):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    killed_jobs.run([*launch, JOB, tmp_path], lines=14)
    last = MLStateCallback.last_checkpoint(tmp_path)
    trainer = job.trainer_of(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=last)
    assert not [each for each in caught if "mlstate" in str(each.filename)]
    assert trainer.state.global_step == 24
    assert trainer.lr_scheduler.last_epoch == 24


# ---- random sequences ----


@pytest.mark.parametrize(
    "seeds",
    [
        range(2),
        *(pytest.param(range(10 * n, 10 * n + 10), marks=pytest.mark.long) for n in range(1, 4)),
    ],
)
def test_after_any_sequence_of_runs_a_step_can_be_resumed(tmp_path, runs, seeds, monkeypatch):
    for seed in seeds:
        runs.run_sequence(str(tmp_path / f"{seed}"), seed, monkeypatch)
