"""Lightning and transformers.Trainer on a CUDA device: resumed runs equal uninterrupted ones."""

import pytest
from needs import needs

torch = pytest.importorskip("torch")

from device_training import bits_of  # noqa: E402


def bits_of_run(model, optimizer):
    optimizer = getattr(optimizer, "optimizer", optimizer)  # of accelerate
    states = [optimizer.state[p] for p in model.parameters()]
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return bits_of([list(model.parameters()), states, rates])


@needs("lightning")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_lightning_resumes_on_the_device(device, tmp_path, precision):
    import lightning
    import lightning_job
    from lightning.pytorch.callbacks import ModelCheckpoint

    from mlstate.integrations.lightning import MLStateCheckpointIO

    class Module(lightning_job.Module):
        def training_step(self, batch, index):
            assert batch.device.type == self.device.type == device.type
            return torch.nn.functional.mse_loss(self.net(batch), batch[:, :1])

    def fit(folder, epochs, resume=None):
        torch.manual_seed(0 if resume is None else 1)
        trainer = lightning.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, max_epochs=epochs,
            precision=precision if device.type == "cuda" else "32-true", logger=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            callbacks=[ModelCheckpoint(folder, save_last=True)], plugins=[MLStateCheckpointIO()],
        )  # fmt: skip
        module = Module()
        trainer.fit(module, lightning_job.Batches(), ckpt_path=resume)
        return bits_of_run(module, trainer.optimizers[0])

    expected = fit(tmp_path / "whole", 2)
    fit(tmp_path / "part", 1)
    assert fit(tmp_path / "part", 2, tmp_path / "part" / "last.ckpt") == expected


@needs("transformers", "accelerate")
@pytest.mark.parametrize("is_half", [False, True])
def test_transformers_trainer_resumes_on_the_device(device, tmp_path, is_half):
    import transformers
    from regression import Data, Model

    from mlstate.integrations.transformers import MLStateCallback

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            control.should_training_stop = state.global_step == 5

    def fit(folder, *callbacks, resume=None):
        transformers.set_seed(0)
        arguments = transformers.TrainingArguments(
            str(folder), per_device_train_batch_size=4, learning_rate=0.05, num_train_epochs=2,
            save_steps=2, save_only_model=True, save_total_limit=2, use_cpu=device.type == "cpu",
            fp16=is_half and device.type == "cuda", report_to=[], disable_tqdm=True,
            logging_strategy="no", optim="adamw_torch_fused",
        )  # fmt: skip
        trainer = transformers.Trainer(
            Model(), arguments, train_dataset=Data(48), callbacks=[MLStateCallback(), *callbacks]
        )
        trainer.train(resume_from_checkpoint=resume)
        assert next(trainer.model.parameters()).device.type == device.type
        return bits_of_run(trainer.model, trainer.optimizer)

    expected = fit(tmp_path / "whole")
    fit(tmp_path / "part", Stop())
    last = MLStateCallback.last_checkpoint(tmp_path / "part")
    assert last is not None
    assert fit(tmp_path / "part", resume=last) == expected
