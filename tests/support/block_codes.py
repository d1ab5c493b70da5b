"""A tensor of codes with a scale for each block, as the optimizers of torchao keep their states."""

import torch


class Codes(torch.Tensor):
    """Integers with a scale for each block; `clone` is not implemented, as in torchao."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.codes.numel() // self.scale.numel(), torch.float32]

    @classmethod
    def __tensor_unflatten__(cls, parts, meta, size, stride):
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        aten = torch.ops.aten
        same = aten.detach, aten._to_copy, aten.alias, aten.view
        if function in [each.default for each in same]:
            return cls(arguments[0].codes, arguments[0].scale)
        if function is aten.copy_.default:
            for part in ("codes", "scale"):
                getattr(arguments[0], part).copy_(getattr(arguments[1], part))
            return arguments[0]
        raise NotImplementedError(function)


def codes(seed, block=4):
    numbers = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 127, (4, 8), dtype=torch.int8, generator=numbers)
    return Codes(values, torch.rand(32 // block, generator=numbers))
