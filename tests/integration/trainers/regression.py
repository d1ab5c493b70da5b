"""The model and the data of trainings that resume, and a digest of what they must restore."""

import hashlib

import torch


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
    """Random rows, each with its own seed."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, number):
        x = torch.randn(8, generator=torch.Generator().manual_seed(number))
        return {"x": x, "labels": x.sum()}


def digest(module, optimizer):
    """Return a digest of all bits of weights and optimizer states."""
    hasher = hashlib.sha256()
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for parameter in module.parameters():
        hasher.update(parameter.detach().numpy().tobytes())
        for name, value in sorted(optimizer.state[parameter].items()):
            hasher.update(name.encode() + value.numpy().tobytes())
    hasher.update(repr([float(group["lr"]) for group in optimizer.param_groups]).encode())
    return hasher.hexdigest()
