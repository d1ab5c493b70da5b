"""A moving average of a torch module's parameters, as libraries write it."""


class Ema:
    """Averaged tensors, and a plain count."""

    def __init__(self, module):
        self.count = 0
        self.shadow = {name: p.detach().clone() for name, p in module.named_parameters()}

    def update(self, module):
        self.count += 1
        for name, p in module.named_parameters():
            self.shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)

    def state_dict(self):
        return {"shadow": self.shadow, "count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)  # takes tensors only
