"""A small torch model, and its gradients summed in the order of ranks."""

import threading

import torch

SEEDED = threading.Lock()  # guards torch's default generator, which threads share


def layers():
    """Rows that do not divide evenly, and a rank without rows."""
    with SEEDED:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 7), torch.nn.Tanh(),
            torch.nn.Linear(7, 1),
        )  # fmt: skip


def rows_of(rank, step=0):
    """The rows of a rank in a step."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def in_rank_order(ranks, gradient_of, divisor=1.0):
    """Sums of ``own(rank)``, each rank's gradients by name, in float32; rounded once."""
    first, *others = [gradient_of(rank) for rank in ranks]
    sums = {}
    for name, gradient in first.items():
        total = gradient.float()
        for of in others:
            total = total + of[name].float()
        sums[name] = (total / divisor).to(gradient.dtype)
    return sums
