"""Which steps a manager keeps, when it saves, and the signal that ends a job."""

import os
import signal
import threading
import time
import warnings
from datetime import timedelta

import child
import numpy as np
import pytest

import mlstate
from mlstate.checkpoint import CheckpointManager
from mlstate.testing import run_ranks


def save_all(manager, losses, start=0):
    for step, loss in enumerate(losses, start):
        metadata = {} if loss is None else {"loss": loss}
        manager.save(step, {"w": np.full(3, float(step))}, metadata=metadata)
    return sorted(manager.steps())


def test_the_best_steps_and_the_newest_are_kept(tmp_path):
    losses = [0.9, 0.3, 0.5, 0.2, 0.8, 0.7]
    manager = CheckpointManager(tmp_path / "min", keep_best=2, monitor="loss")
    assert save_all(manager, losses) == [1, 3, 5] and manager.best_step() == 3
    manager = CheckpointManager(tmp_path / "max", keep=2, keep_best=1, monitor="loss", mode="max")
    assert save_all(manager, losses) == [0, 4, 5] and manager.best_step() == 0
    assert all(manager.restore(step).model["w"][0] == step for step in manager.steps())


def test_steps_without_a_number_are_not_the_best(tmp_path):
    manager = CheckpointManager(tmp_path, keep_best=1, monitor="loss")
    strange = [None, 5, True, "0.1", [1], None]
    with pytest.warns(UserWarning, match=r"step 0 has no number 'loss' .*keys: none"):
        assert save_all(manager, strange) == [1, 5] and manager.best_step() == 1


def test_a_wrong_name_of_the_metric_is_warned_of_once(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, keep_best=2, monitor="loss")
    with pytest.warns(UserWarning, match=r"'loss' .*keys: 'val_loss'\), so keep_best=2") as caught:
        for step in (1, 2):
            manager.save(step, {"w": np.full(3, step)}, metadata={"val_loss": 0.5})
    assert len(caught) == 1 and manager.steps() == [2]
    assert caught[0].filename == __file__
    other = CheckpointManager(tmp_path / "other", keep_best=1, monitor="loss")
    assert save_all(other, [0.5, None]) == [0, 1]  # evaluated at some steps only


def test_the_best_step_needs_the_name_of_the_metric(tmp_path):
    save_all(CheckpointManager(tmp_path), [0.5, 0.2, 0.4])
    with pytest.raises(ValueError, match="pass monitor='loss' or another key of the metadata to"):
        CheckpointManager(tmp_path).best_step()
    with pytest.raises(ValueError, match="pass monitor='loss'"):
        CheckpointManager(tmp_path).restore("best")
    manager = CheckpointManager(tmp_path, monitor="loss")
    assert manager.best_step() == 1 and manager.restore("best").step == 1
    assert manager.restore("latest").step == 2 and manager.checkpoint("best").step == 1
    with pytest.raises(ValueError, match="no step has a number 'acc' in its metadata"):
        CheckpointManager(tmp_path, monitor="acc").restore("best")
    with pytest.raises(FileNotFoundError, match="latest_step"):
        CheckpointManager(tmp_path / "none").restore("latest")
    with pytest.raises(TypeError, match="an int, 'latest' or 'best', got NoneType: None"):
        manager.restore(None)


@pytest.mark.parametrize("restore", ["restore_latest", "restore"])
def test_a_resumed_run_deletes_steps_without_a_warning(tmp_path, restore):
    save_all(CheckpointManager(tmp_path, keep=1), [0.5, 0.2])
    manager = CheckpointManager(tmp_path, keep=1)
    manager.restore_latest() if restore == "restore_latest" else manager.restore(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert save_all(manager, [0.3], start=2) == [2]
    other = CheckpointManager(tmp_path, keep=1)
    with pytest.warns(UserWarning, match="did not save: 2"):
        save_all(other, [0.3], start=3)


def test_a_run_that_goes_back_warns_before_it_deletes_newer_steps(tmp_path):
    save_all(CheckpointManager(tmp_path), [0.5, 0.2, 0.1])
    manager = CheckpointManager(tmp_path, keep=1)
    manager.restore(1)
    with pytest.warns(UserWarning, match="did not save: 2;"):
        save_all(manager, [0.3], start=1)


def test_the_newer_of_equal_steps_is_the_best(tmp_path):
    manager = CheckpointManager(tmp_path, keep_best=1, monitor="loss")
    assert save_all(manager, [0.5, 0.5, 0.9]) == [1, 2]


def test_a_damaged_step_is_not_counted_among_the_best(tmp_path):
    manager = CheckpointManager(tmp_path, keep_best=1, monitor="loss")
    save_all(manager, [0.1, 0.5])
    [file] = [
        p for p in (tmp_path / "params").iterdir() if manager.checkpoint(0).generation in p.name
    ]
    file.unlink()
    assert save_all(manager, [0.6, 0.7], start=2) == [1, 3]


def test_multiples_of_the_period_are_kept(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, keep_period=4)
    assert save_all(manager, [None] * 10) == [0, 4, 8, 9]


@pytest.mark.parametrize(
    "interval", [timedelta(hours=1), np.float32(3600)], ids=["timedelta", "float32"]
)
def test_one_step_of_each_interval_is_kept(tmp_path, monkeypatch, interval):
    from mlstate.checkpoint._save import commit

    times = iter(
        f"2026-01-01T{hour:02}:{minute:02}:00.000000Z"
        for hour in range(3)
        for minute in (0, 25, 50)
    )
    monkeypatch.setattr(commit, "creation_time", lambda: next(times))
    manager = CheckpointManager(tmp_path, keep_time_interval=interval)
    assert save_all(manager, [None] * 9) == [0, 3, 6, 8]


def test_steps_after_the_clock_was_set_back_are_kept(tmp_path, monkeypatch):
    from mlstate.checkpoint._save import commit

    days = ["2036-01-01", "2036-01-02", "2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04"]
    forms = "T00:00:00.000000Z", "T00:00:00"  # without a zone: UTC
    times = (day + forms[number % 2] for number, day in enumerate(days))
    monkeypatch.setattr(commit, "creation_time", lambda: next(times))
    manager = CheckpointManager(tmp_path, keep_time_interval=timedelta(days=2))
    assert save_all(manager, [None] * 6) == [0, 2, 4, 5]


def test_rules_hold_for_background_saves_and_other_managers(tmp_path):
    with CheckpointManager(tmp_path, keep_best=1, monitor="loss") as manager:
        for step, loss in enumerate([0.5, 0.1, 0.7, 0.6]):
            manager.save_async(step, {"w": np.full(3, step)}, metadata={"loss": loss})
    assert sorted(manager.steps()) == [1, 3]
    other = CheckpointManager(tmp_path, keep_best=1, monitor="loss")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.save(4, {"w": np.full(3, 4)}, metadata={"loss": 0.9})
    assert sorted(other.steps()) == [1, 4]


def test_foreign_steps_that_rules_keep_cause_no_warning(tmp_path):
    save_all(CheckpointManager(tmp_path), [None] * 3)
    manager = CheckpointManager(tmp_path, keep=2, keep_period=1)
    assert save_all(manager, [None], start=3) == [0, 1, 2, 3]  # warnings are errors
    with pytest.warns(UserWarning, match="keep=1 deletes steps"):
        save_all(CheckpointManager(tmp_path, keep=1, keep_period=2), [None], start=5)


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"keep_best": 1}, ValueError, "keep_best= needs monitor="),
        ({"keep_best": 0, "monitor": "x"}, ValueError, "keep_best must be 1 or more"),
        ({"keep_best": 1.5, "monitor": "x"}, TypeError, "keep_best must be an int"),
        ({"monitor": 3}, TypeError, "monitor must be a key"),
        ({"mode": "best"}, ValueError, "mode must be 'min' or 'max'"),
        ({"keep_period": -1}, ValueError, "keep_period must be 1 or more"),
        ({"keep_time_interval": 0}, ValueError, "keep_time_interval must be positive"),
        ({"keep_time_interval": "1h"}, TypeError, "keep_time_interval must be seconds"),
        ({"save_interval_steps": 0}, ValueError, "save_interval_steps must be 1 or more"),
        ({"save_time_interval": float("inf")}, ValueError, "save_time_interval must be positive"),
    ],
)
def test_wrong_rules_are_refused(tmp_path, keywords, error, text):
    with pytest.raises(error, match=text):
        CheckpointManager(tmp_path, **keywords)


# ---- when to save ----


def test_steps_are_due_after_a_number_of_steps_or_a_time(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    assert all(map(manager.should_save, range(5)))
    manager = CheckpointManager(tmp_path, save_interval_steps=3)
    assert [step for step in range(8) if manager.should_save(step)] == [0, 3, 6]
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    manager = CheckpointManager(tmp_path, save_interval_steps=100, save_time_interval=60)
    assert not manager.should_save(1)
    now += 60
    assert manager.should_save(2)
    manager.save(2, {"w": np.ones(1)})
    assert not manager.should_save(3) and manager.should_save(100)


def test_all_ranks_save_if_one_must(tmp_path):
    def ask(group):
        manager = CheckpointManager(tmp_path, save_interval_steps=10 + group.rank)
        return [step for step in (1, 10, 11, 12) if manager.should_save(step, group=group)]

    assert run_ranks(2, ask) == [[10, 11], [10, 11]]


def test_a_signal_asks_for_a_last_save(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, save_interval_steps=100) as manager:
        manager.watch_signals(signal.SIGTERM, signal.SIGUSR1)
        assert not manager.should_save(1) and not manager.reached_preemption()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.should_save(1) and manager.reached_preemption()
        assert signal.getsignal(signal.SIGTERM) != before
        manager.watch_signals()  # again: the flag starts anew
        assert not manager.reached_preemption()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_second_signal_has_its_old_effect(tmp_path):
    code = f"""
import os, signal
from mlstate.checkpoint import CheckpointManager
manager = CheckpointManager({str(tmp_path)!r})
manager.watch_signals()
os.kill(os.getpid(), signal.SIGTERM)
print(manager.reached_preemption(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("still there", flush=True)
"""
    result = child.attempt(code, timeout=60)
    assert result.returncode == -signal.SIGTERM and result.stdout == "True\n"


def test_signals_are_watched_by_the_main_thread_only(tmp_path):
    messages = []

    def watch():
        try:
            CheckpointManager(tmp_path).watch_signals()
        except ValueError as error:
            messages.append(str(error))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert "only by the main thread" in messages[0]
    manager = CheckpointManager(tmp_path)
    with pytest.raises((OSError, ValueError)):
        manager.watch_signals(signal.SIGTERM, signal.SIGKILL)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# ---- a model that does not change ----


def test_a_model_that_did_not_change_is_warned_of_once(tmp_path):
    model, optimizer = {"w": np.ones(5), "b": np.zeros(9000)}, {"w.m": np.zeros(5)}
    manager = CheckpointManager(tmp_path)
    manager.save(1, model, optimizer)
    optimizer["w.m"] += 1
    with pytest.warns(UserWarning, match="step 2 has the same bytes as that of step 1") as caught:
        manager.save(2, model, optimizer)
    assert caught[0].filename == __file__
    manager.save(3, model, optimizer)  # warnings are errors
    allowed = CheckpointManager(tmp_path, warn_unchanged=False)
    allowed.save(4, model)
    allowed.save(5, model)


def test_a_model_that_changed_a_little_is_not_warned_of(tmp_path):
    model = {"w": np.ones(100_000), "frozen": np.ones(100_000)}
    manager = CheckpointManager(tmp_path)
    for step in range(3):
        model["w"][step] += 1e-12
        manager.save(step, model, incremental=True, sparse=True)
    manager.save(2, model)  # the same step again
    manager.save(3, None, {"w.m": np.ones(2)})  # without a model
    manager.save(4, model)


def test_background_saves_warn_at_the_next_call(tmp_path):
    with pytest.warns(UserWarning, match="same bytes"), CheckpointManager(tmp_path) as manager:
        manager.save_async(1, {"w": np.ones(5)})
        manager.save_async(2, {"w": np.ones(5)})


def test_only_one_rank_warns(tmp_path):
    def save(group):
        manager = CheckpointManager(tmp_path)
        for step in (1, 2):
            manager.save(step, {"w": np.ones(5)}, group=group)
        return True

    with pytest.warns(UserWarning) as caught:
        run_ranks(2, save)
    assert len(caught) == 1 and mlstate.verify(tmp_path)
