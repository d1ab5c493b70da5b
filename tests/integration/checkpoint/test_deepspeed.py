"""DeepSpeed's optimizers and divided parameters: stored, or refused with a remedy that works."""

import sys

import pytest
from child import PATHS, run
from needs import needs

import mlstate
from mlstate.errors import UnstorableError

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="DeepSpeed is a library of torch")


class Wrapper:
    """An optimizer of float32 copies, as DeepSpeed's for bfloat16 without ZeRO."""

    def __init__(self, module):
        self.copies = [p.detach().double().requires_grad_() for p in module.parameters()]
        self.optimizer = torch.optim.SGD(self.copies, lr=0.1, momentum=0.9)

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        for copy in self.copies:
            copy.grad = torch.ones_like(copy)
        self.optimizer.step()

    def state_dict(self):
        return {"inner": self.optimizer.state_dict(), "copies": self.copies}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["inner"])
        for copy, saved in zip(self.copies, state["copies"], strict=True):
            copy.data.copy_(saved)


def test_a_wrapper_of_an_optimizer_is_stored_by_its_methods(tmp_path):
    module = torch.nn.Linear(2, 2)
    source, target = Wrapper(module), Wrapper(torch.nn.Linear(2, 2))
    source.step()
    mlstate.save(tmp_path / "c", module, source)
    mlstate.load(tmp_path / "c", into={"model": module, "optimizer": target})
    for each in (source, target):
        each.step()
    assert all(map(torch.equal, source.copies, target.copies))


def test_optimizers_of_zero_are_refused(tmp_path):
    module = torch.nn.Linear(2, 2)
    optimizer = Wrapper(module)
    optimizer.dp_process_group = None  # as DeepSpeed's
    for content in ({"optimizer": optimizer}, {"states": {"optimizer": optimizer}}):
        with pytest.raises(UnstorableError, match=r"^states\['optimizer'\] .*engine\.save_check"):
            mlstate.save(tmp_path / "c", **content)
    for parameter in module.parameters():
        parameter.get_full_hp_param = None
    with pytest.raises(ValueError, match=r"copies in DeepSpeed's ZeRO: .* engine\.save_checkpoint"):
        mlstate.save(tmp_path / "c", module, optimizer.optimizer)
    assert not (tmp_path / "c").exists()


def test_parameters_that_zero_has_divided_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", torch)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    mlstate.save(tmp_path / "whole", module)
    module[0].weight.ds_shape, gathered = (2, 2), module[0].weight.data
    module[0].weight.data = torch.empty(0)
    divided = r"'0\.weight' of shape \(2, 2\) is divided .*GatheredParameters"
    for call in (
        lambda: mlstate.save(tmp_path / "c", module),
        lambda: mlstate.load(tmp_path / "whole", into={"model": module}),
        lambda: mlstate.ModelStateDict.from_torch(module),
    ):
        with pytest.raises(UnstorableError, match=divided):
            call()
    module[0].weight.data = gathered  # as in the block
    mlstate.load(tmp_path / "whole", into={"model": module})


REMEDIES = """
import os, sys, torch
os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1",
                  LOCAL_RANK="0")
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/ranks", rank=0,
                                     world_size=1)
import deepspeed, mlstate

class Model(torch.nn.Sequential):
    def forward(self, value):
        return super().forward(value).sum()

def engine_of(stage):
    torch.manual_seed(0)
    model = Model(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero,
              "zero_allow_untested_optimizer": True, "bf16": {"enabled": True}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

def train(engine):
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)))
        engine.step()

def whole(engine):
    parameters = [*engine.module.parameters()]
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0, enabled=stage == 3)

for stage in range(4):
    folder = f"{sys.argv[1]}/{stage}"
    source, target = engine_of(stage), engine_of(stage)
    train(source)
    if stage == 0:
        mlstate.save(folder, source.module, source.optimizer)
        mlstate.load(folder, into={"model": target.module, "optimizer": target.optimizer})
    else:
        try:
            mlstate.save(folder, source.module, source.optimizer)
        except mlstate.errors.UnstorableError as error:
            assert "engine.save_checkpoint(folder)" in str(error), error
        source.save_checkpoint(folder)
        target.load_checkpoint(folder)
    train(source)
    train(target)
    with whole(source), whole(target):
        for left, right in zip(source.module.parameters(), target.module.parameters()):
            assert torch.equal(left, right), stage
        mlstate.save(folder + "weights", source.module)
    with whole(target):
        for parameter in target.module.parameters():
            parameter.data.zero_()
    with whole(target):
        mlstate.load(folder + "weights", into={"model": target.module})
    with whole(source), whole(target):
        for left, right in zip(source.module.parameters(), target.module.parameters()):
            assert torch.equal(left, right) and left.numel(), stage
    print("stage", stage)
"""


@pytest.mark.long
@needs("deepspeed")
def test_the_remedies_for_deepspeed_resume(tmp_path):
    output = run(REMEDIES, str(tmp_path), timeout=280, **PATHS)
    assert [line for line in output.splitlines() if line.startswith("stage")] == [
        f"stage {stage}" for stage in range(4)
    ]
