"""Every optimizer that a Trainer can make here resumes with the same bits, or is refused early."""

import contextlib
import logging

import pytest
from needs import needs

from mlstate import CompatibilityError
from mlstate.integrations.transformers import MLStateCallback

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.long,
    needs("accelerate"),
    pytest.mark.filterwarnings("ignore"),  # of torch, transformers and the optimizers
]

NAMES = [name.value for name in transformers.training_args.OptimizerNames]
# pattern that the refusal names; None: another optim= is needed
REFUSED = {
    "galore_adamw": "*.projector",
    "galore_adafactor": "*.projector",
    "apollo_adamw": "*.projector",
    "grokadamw": "param_groups.*.state",
    "galore_adamw_layerwise": None,
    "apollo_adamw_layerwise": None,
}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # 4,096 weights: optimizers of 8 bits keep codes of so many
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)

    def forward(self, x, labels):
        return {"loss": (self.last(torch.tanh(self.first(x))) - labels).square().mean()}


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def trainer_of(folder, name, *callbacks):
    """Return a Trainer of four steps that saves every second one."""
    low_rank = "galore" in name or "apollo" in name
    arguments = transformers.TrainingArguments(
        str(folder),
        optim=name,
        max_steps=4,
        save_steps=2,
        save_only_model=True,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        optim_target_modules=["first", "last"] if low_rank else None,
        **({"optim_args": "rank=2,update_proj_gap=2"} if low_rank else {}),
    )
    numbers = torch.Generator().manual_seed(3)
    shapes = {"x": 64, "labels": 4}
    data = [{k: torch.randn(n, generator=numbers) for k, n in shapes.items()} for _ in range(16)]
    return transformers.Trainer(Net(), arguments, train_dataset=data, callbacks=[*callbacks])


def train(folder, name, resume=None, **options):
    trainer = trainer_of(folder, name, MLStateCallback(**options))
    with contextlib.redirect_stdout(None):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights_without_stop(folder, name):
    """Return the weights of a training; skip the test if the optimizer cannot be made here."""
    try:
        trainer = trainer_of(folder, name)
        with contextlib.redirect_stdout(None):
            trainer.train()
    except (ImportError, AssertionError, RuntimeError, ValueError) as error:
        pytest.skip(f"{type(error).__name__}: {str(error)[:60]}")
    return [*trainer.model.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_with_the_same_bits_or_is_refused(tmp_path, name):
    expected = weights_without_stop(tmp_path / "plain", name)
    options = {}
    if name in REFUSED:
        trainer = trainer_of(tmp_path / "refused", name, MLStateCallback())
        with pytest.raises(CompatibilityError, match=r"in a Trainer, pass .* choose another optim"):
            trainer.train()
        assert trainer.state.global_step == 0
        assert all(map(torch.equal, trainer.model.parameters(), Net().parameters()))
        if REFUSED[name] is None:
            return
        options = {"exclude": REFUSED[name]}
    train(tmp_path / "run", name, **options)
    trainer = train(tmp_path / "run", name, str(tmp_path / "run" / "checkpoint-2"), **options)
    assert trainer.state.global_step == 4
    pairs = zip(expected, trainer.model.parameters(), strict=True)
    assert options or all(torch.equal(*pair) for pair in pairs)
