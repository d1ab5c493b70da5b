"""A training with transformers.Trainer that resumes, for test_trainer_runs.py.

Usage: transformers_job.py FOLDER, alone or started by torch.distributed.run. Prints a line for
each step, and "done" with the digest of the weights and of the optimizer's states.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import transformers
from regression import Data, Model, digest

from mlstate.integrations.transformers import MLStateCallback

RANK = int(os.environ.get("RANK", "0"))


class Printer(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **others):
        print("step", state.global_step, flush=True)


def arguments_of(folder, **keywords):
    """Return the arguments of a short training on the CPU, which prints nothing."""
    return transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        learning_rate=0.05,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        **keywords,
    )


def trainer_of(folder):
    """Return a Trainer that saves every second step."""
    options = {"save_steps": 2, "save_only_model": True, "save_total_limit": 2}
    backend = "gloo" if "RANK" in os.environ else None
    arguments = arguments_of(folder, num_train_epochs=2, ddp_backend=backend, **options)
    return transformers.Trainer(
        Model(), arguments, train_dataset=Data(48), callbacks=[MLStateCallback(), Printer()]
    )


def main(folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.set_seed(0)
    trainer = trainer_of(folder)
    trainer.train(resume_from_checkpoint=MLStateCallback.last_checkpoint(folder))
    if RANK == 0:
        print("done", digest(trainer.model, trainer.optimizer), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
