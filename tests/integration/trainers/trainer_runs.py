"""Random sequences of runs of a transformers.Trainer in one folder, for test_trainer_runs.py.

Runs differ in their options, with or without MLStateCallback, and some are killed: an exception
ends them in the middle of a save, of a deletion, or between the two.
"""

import contextlib
import random
import shutil
import warnings
from pathlib import Path

import torch
import transformers
import transformers.trainer
from regression import Data, Model, digest
from transformers_job import arguments_of

from mlstate.checkpoint import CheckpointManager
from mlstate.integrations.transformers import MLStateCallback

PLACES = ("none", "weights", "position", "rotation", "deletion", "before step", "step", "training")


class Killed(BaseException):
    """Ends a run."""


class Recorder(transformers.TrainerCallback):
    """Records a digest for each saved step, and the digest with which a training resumes."""

    def __init__(self, digests):
        self.digests = digests
        self.resumed = None

    def on_train_begin(self, args, state, control, **objects):
        if state.global_step:
            optimizer = getattr(objects["optimizer"], "optimizer", objects["optimizer"])
            full = {p: optimizer.state.get(p, {}) for p in objects["model"].parameters()}
            assert all(full.values()), "a training resumes without the optimizer's states"
            self.resumed = state.global_step, digest_of(objects)

    def on_step_end(self, args, state, control, **objects):
        self.digests.setdefault(state.global_step, set()).add(digest_of(objects))

    on_evaluate = on_step_end


def digest_of(objects):
    epoch = objects["lr_scheduler"].last_epoch
    return f"{digest(objects['model'], objects['optimizer'])} in epoch {epoch}"


class Killer(transformers.TrainerCallback):
    """Ends a run before the step of mlstate is saved, or in the training."""

    def __init__(self, place, count):
        self.place = place
        self.count = count

    def countdown(self, place):
        if place == self.place:
            self.count -= 1
            if self.count == 0:
                raise Killed

    def on_save(self, args, state, control, **objects):
        self.countdown("before step")

    def on_step_begin(self, args, state, control, **objects):
        self.countdown("training")


def cut(folder, chance):
    """Delete or truncate some files of a folder, as an interrupted write or deletion does."""
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file() and chance.random() < 0.5:
            if chance.random() < 0.5:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def install(killer, trainer, monkeypatch, chance):
    """Make a run end at the killer's place."""
    save_model, rotate = trainer.save_model, transformers.trainer.rotate_checkpoints
    save, rmtree = CheckpointManager.save, shutil.rmtree

    def save_weights(output_dir=None, **keywords):
        save_model(output_dir, **keywords)
        if killer.place == "weights" and killer.count == 1:
            (Path(output_dir) / "trainer_state.json").unlink(missing_ok=True)
            cut(output_dir, chance)
        killer.countdown("weights")

    def rotate_folders(*arguments, **keywords):
        killer.countdown("position")
        rotate(*arguments, **keywords)
        killer.countdown("rotation")

    def delete_folder(path, *arguments, **keywords):
        if "checkpoint-" in str(path) and killer.place == "deletion":
            if killer.count == 1:
                cut(path, chance)
            killer.countdown("deletion")
        rmtree(path, *arguments, **keywords)

    def save_step(self, *arguments, **keywords):
        saved = save(self, *arguments, **keywords)
        killer.countdown("step")
        return saved

    monkeypatch.setattr(trainer, "save_model", save_weights)
    monkeypatch.setattr(transformers.trainer, "rotate_checkpoints", rotate_folders)
    monkeypatch.setattr(CheckpointManager, "save", save_step)
    monkeypatch.setattr(transformers.trainer_utils.shutil, "rmtree", delete_folder)


def options_of(chance):
    """Return random options of a run."""
    strategy = chance.choice(["steps", "steps", "epoch", "best"])
    options = {"save_strategy": strategy, "save_only_model": chance.random() < 0.7}
    options["save_total_limit"] = chance.choice([None, 0, 1, 1, 2, 3])
    if strategy == "steps":
        options["save_steps"] = chance.choice([1, 2, 3, 0.2])
    if strategy == "best" or chance.random() < 0.4:
        options |= {"metric_for_best_model": "loss", "greater_is_better": chance.random() < 0.5}
        options |= {"eval_strategy": "steps", "eval_steps": options.get("save_steps", 2)}
        if strategy == "epoch":
            options["eval_strategy"] = "epoch"
        if strategy != "best" or chance.random() < 0.5:
            options["load_best_model_at_end"] = strategy != "best"
    options["ignore_data_skip"] = chance.random() < 0.2
    options["restore_callback_states_from_checkpoint"] = chance.random() < 0.2
    options["eval_on_start"] = chance.random() < 0.2
    options["max_steps"] = chance.choice([4, 6, 9])
    options["lr_scheduler_type"] = chance.choice(["linear", "cosine", "constant"])
    return options


def trainer_of(folder, callbacks, seed, **options):
    arguments = arguments_of(folder, seed=seed, **options)
    torch.manual_seed(seed)
    data = Data(24)
    return transformers.Trainer(
        Model(), arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks
    )


def run_sequence(folder, seed, patcher, runs=5):
    """Run a sequence, and check after each run that a step can be resumed."""
    chance = random.Random(seed)
    digests = {}
    has_saved = False
    history = []
    for number in range(runs):
        options = options_of(chance)
        place = chance.choice(PLACES)
        with_mlstate = number == 0 or chance.random() < 0.75
        resumes = chance.random() < 0.7
        if not with_mlstate:
            options["save_only_model"] = chance.random() < 0.3
        recorder, killer = Recorder(digests), Killer(place, chance.randint(1, 3))
        callbacks_added = [MLStateCallback()] if with_mlstate else []
        path = MLStateCallback.last_checkpoint(folder) if resumes and has_saved else None
        if not with_mlstate and path and not (Path(path) / "optimizer.pt").exists():
            path = None
        history.append((options, place, killer.count, with_mlstate, path))
        trainer = trainer_of(
            folder, [killer, *callbacks_added, recorder], 10 * seed + number, **options
        )
        with patcher.context() as patch, warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            install(killer, trainer, patch, chance)
            with contextlib.suppress(Killed):
                trainer.train(resume_from_checkpoint=path)
        if with_mlstate and CheckpointManager(Path(folder) / "mlstate").steps():
            has_saved = True
        if has_saved:
            check_resume(folder, digests, history)
    return history


def check_resume(folder, digests, history):
    """Resume from the newest checkpoint, and compare all values with the saved ones."""
    path = MLStateCallback.last_checkpoint(folder)
    assert path is not None, history
    step = int(Path(path).name.partition("-")[2])
    copy = Path(f"{folder}-copy")
    shutil.copytree(folder, copy)
    try:
        recorder = Recorder(digests)
        killer = Killer("training", 1)
        callbacks = [MLStateCallback(), recorder, killer]
        trainer = trainer_of(copy, callbacks, 7, max_steps=99, save_strategy="no")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(Killed):
                trainer.train(resume_from_checkpoint=str(copy / Path(path).name))
        texts = [str(each.message) for each in caught]
        warned = any("the Trainer itself" in text for text in texts)
        assert recorder.resumed is not None and recorder.resumed[0] == step, history
        assert recorder.resumed[1] in digests[step], history
        steps = CheckpointManager(Path(folder) / "mlstate").steps()
        assert warned or step in steps, history
        assert not any("mlstate" in text for text in texts) or warned, (texts, history)
    finally:
        shutil.rmtree(copy)
