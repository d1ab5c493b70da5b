"""transformers.Trainer with mlstate's states, compared with an uninterrupted training."""

import contextlib
import shutil
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import killed_jobs  # noqa: E402
from needs import needs  # noqa: E402
from regression import digest  # noqa: E402

import mlstate  # noqa: E402
from mlstate.checkpoint import CheckpointManager  # noqa: E402
from mlstate.integrations.transformers import MLStateCallback  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    needs("transformers", "accelerate"),
    pytest.mark.timeout(590),
    pytest.mark.filterwarnings("ignore"),  # torch and transformers warn about themselves
]

JOB = Path(__file__).with_name("transformers_job.py")


@pytest.fixture(scope="module")
def job():
    return killed_jobs.module_of(JOB)


class Stop(Exception):
    """Ends a training."""


def train(job, folder, *, stop=None, seed=0, **keywords):
    """Train until the end or until a step, and return the Trainer."""
    import transformers

    class Stopper(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            if state.global_step == stop:
                raise Stop

    transformers.set_seed(seed)
    trainer = job.trainer_of(folder, **keywords)
    trainer.add_callback(Stopper())
    with contextlib.suppress(Stop):
        trainer.train(resume_from_checkpoint=MLStateCallback.last_checkpoint(folder))
    return trainer


def digest_of(trainer):
    return digest(trainer.model, trainer.optimizer)


@pytest.fixture(scope="module")
def expected(job, tmp_path_factory):
    """The digest of an uninterrupted training."""
    return digest_of(train(job, tmp_path_factory.mktemp("whole") / "run"))


# in the middle of the first epoch, and at its end
@pytest.mark.parametrize("stop", [5, pytest.param(13, marks=pytest.mark.long)])
def test_a_run_resumes_with_the_same_bits(tmp_path, job, expected, stop):
    train(job, tmp_path, stop=stop)
    assert MLStateCallback.last_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{stop - 1}")
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.pth"))  # no pickle
    assert digest_of(train(job, tmp_path, seed=7)) == expected
    assert CheckpointManager(tmp_path / "mlstate").steps() == [22, 24]


@pytest.mark.long
def test_an_incomplete_or_damaged_checkpoint_is_passed_over(tmp_path, job, expected):
    train(job, tmp_path, stop=9)
    manager = CheckpointManager(tmp_path / "mlstate")
    assert manager.steps() == [6, 8]
    (tmp_path / "checkpoint-8" / "trainer_state.json").unlink()  # killed while it was written
    (tmp_path / "checkpoint-10").mkdir()
    assert MLStateCallback.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    assert digest_of(train(job, tmp_path)) == expected
    shutil.rmtree(tmp_path / "mlstate" / "states")
    assert MLStateCallback.last_checkpoint(tmp_path) is None
    assert MLStateCallback.last_checkpoint(tmp_path / "absent") is None


def test_a_step_that_was_not_saved_is_an_error(tmp_path, job):
    train(job, tmp_path, stop=5)
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
