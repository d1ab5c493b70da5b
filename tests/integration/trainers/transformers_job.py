"""A training with transformers.Trainer that resumes, for test_transformers.py.

Usage: transformers_job.py FOLDER, alone or started by torch.distributed.run. Prints a line for
each step, and "done" with the digest of the weights and of the optimizer's states.
"""

import hashlib
import os
import sys
import warnings
from pathlib import Path

import torch
import transformers

from mlstate.integrations.transformers import MLStateCallback

RANK = int(os.environ.get("RANK", "0"))


class Model(torch.nn.Module):
    """A model with dropout, so that generators matter."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.dropout = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(16, 1)

    def forward(self, x, labels=None):
        predictions = self.last(self.dropout(torch.tanh(self.first(x)))).squeeze(-1)
        return {"loss": (predictions - labels).square().mean(), "logits": predictions}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, number):
        x = torch.randn(8, generator=torch.Generator().manual_seed(number))
        return {"x": x, "labels": x.sum()}


class Printer(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **others):
        print("step", state.global_step, flush=True)


def trainer_of(folder, **keywords):
    """Return a Trainer that saves every second step."""
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        save_steps=2,
        save_only_model=True,
        save_total_limit=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        ddp_backend="gloo" if "RANK" in os.environ else None,
        dataloader_pin_memory=False,
        **keywords,
    )
    return transformers.Trainer(
        Model(), arguments, train_dataset=Data(), callbacks=[MLStateCallback(), Printer()]
    )


def digest(trainer):
    """Return a digest of all bits of weights and optimizer states."""
    hasher = hashlib.sha256()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    for parameter in trainer.model.parameters():
        hasher.update(parameter.detach().numpy().tobytes())
        for name, value in sorted(optimizer.state[parameter].items()):
            hasher.update(name.encode() + value.numpy().tobytes())
    hasher.update(repr([group["lr"] for group in optimizer.param_groups]).encode())
    return hasher.hexdigest()


def main(folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.set_seed(0)
    trainer = trainer_of(folder)
    trainer.train(resume_from_checkpoint=MLStateCallback.last_checkpoint(folder))
    if RANK == 0:
        print("done", digest(trainer), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
