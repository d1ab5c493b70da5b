"""A training with Lightning that resumes from its last checkpoint, for test_lightning.py.

Usage: lightning_job.py FOLDER RANKS. Prints a line for each step, and "done" with the digest of
the weights and of the optimizer's states.
"""

import logging
import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from regression import digest

from mlstate.integrations.lightning import MLStateCheckpointIO

STEPS = 12  # of an epoch
EPOCHS = 2
RANK = int(os.environ.get("LOCAL_RANK", "0"))


class Batches:
    """A data loader with a state: the batch of each position has its own seed."""

    def __init__(self):
        self.position = 0

    def __len__(self):
        return STEPS

    def __iter__(self):
        if self.position == STEPS:
            self.position = 0
        while self.position < STEPS:
            self.position += 1
            generator = torch.Generator().manual_seed(2 * self.position + RANK)
            yield torch.randn(4, 8, generator=generator)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Module(lightning.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        layers = torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch, index):
        print("step", self.global_step, flush=True)
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def trainer_with(callbacks, plugins, **options):
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        plugins=plugins,
        enable_checkpointing=bool(callbacks),  # otherwise it saves into the current folder
        **{"max_epochs": EPOCHS, **options},
    )


def trainer_of(folder, ranks=1, **options):
    """Return a Trainer that saves every second step with mlstate."""
    checkpoints = ModelCheckpoint(
        folder, save_top_k=2, monitor="loss", every_n_train_steps=2, save_last=True
    )
    options |= {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto"}
    return trainer_with([checkpoints], [MLStateCheckpointIO()], **options)


def main(folder, ranks):
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # about few workers
    torch.set_num_threads(1)
    torch.manual_seed(0 if not folder.exists() else 1)  # a resumed run ignores its first weights
    last = folder / "last.ckpt"
    trainer = trainer_of(folder, ranks)
    module = Module()
    trainer.fit(module, Batches(), ckpt_path=last if last.exists() else None)
    if RANK == 0:
        print("done", digest(module, trainer.optimizers[0]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
