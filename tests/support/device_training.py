"""A small training on any device, and comparisons of tensors by their bits."""

import numpy as np
import torch

ADAMW = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "mixed precision": {"foreach": True},
}


class Net(torch.nn.Module):
    """A language model of two layers: dropout, a buffer, and one weight under two names."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 32)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.norm, self.dropout = torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(self.dropout(self.down(torch.tanh(self.up(x))))))


class Training:
    """A model, AdamW, a scheduler, a scaler and the generators; a batch depends on its step."""

    def __init__(self, device, seed, kind="plain"):
        torch.manual_seed(seed)
        self.device, self.is_mixed = device, kind == "mixed precision"
        self.model = Net().to(device)
        options = ADAMW[kind]
        rate = torch.tensor(0.01, device=device) if options.get("capturable") else 0.01
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.is_mixed)

    def run(self, first, last):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(50, (16,), generator=generator).to(self.device)
            with torch.autocast(self.device.type, torch.float16, enabled=self.is_mixed):
                loss = torch.nn.functional.cross_entropy(self.model(tokens), tokens.roll(1))
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def states(self):
        generators = {"cpu": torch.random, "cuda": torch.cuda}
        return {"scheduler": self.scheduler, "scaler": self.scaler, "generators": generators}

    def targets(self):
        return {"model": self.model, "optimizer": self.optimizer, "states": self.states()}

    def tensors(self):
        """The tensors of the model and the optimizer, by name."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        states = {
            f"{names[parameter]}.{name}": value
            for parameter, values in self.optimizer.state.items()
            for name, value in values.items()
        }
        return {**dict(self.model.state_dict()), **states}

    def places(self):
        return {name: (each.data_ptr(), each.device) for name, each in self.tensors().items()}

    def bits(self):
        """The bits of all that a checkpoint must restore."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        generators = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        scheduler = {k: v for k, v in self.scheduler.state_dict().items() if k[0] != "_"}
        return bits_of([self.tensors(), rates, scheduler, self.scaler.state_dict(), generators])


def bits_of(value):
    """The value with dtype, shape and bytes instead of each tensor or array."""
    if isinstance(value, dict):
        return {key: bits_of(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits_of(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    if not isinstance(value, torch.Tensor):
        return value
    flat = value.detach().cpu().contiguous().reshape(-1)
    return str(value.dtype)[6:], tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
