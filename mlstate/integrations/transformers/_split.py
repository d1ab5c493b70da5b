"""`check_split`: whether a model of transformers continues a prefill that was split."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

from ..._common.arguments import check_int
from ...kv._arguments import incompatible

if TYPE_CHECKING:
    import torch

Answer = Literal["good", "feed singly", "no way"]

# Largest difference of logits that rounding explains, as a share of the largest logit, by the bytes
# of an element of the weights.
_ROUNDING = {8: 1e-8, 4: 1e-4}
_COARSE = 3e-2
_CACHES = ("cache", "past_key_values", "cache_params")  # names of the cache in calls and results


def check_split(model: torch.nn.Module, tokens: int) -> Answer:
    """Do as `mlstate.prompts.check_split`, for a model of transformers."""
    import torch

    count = check_int("tokens", tokens, 2)
    config = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or config is None:
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    most = config.get_text_config().vocab_size
    ids = torch.randint(0, most, (1, count), generator=generator).to(weight.device)
    half = count // 2
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            reference = model(ids, use_cache=False).logits[:, half:].float()
            limit = _ROUNDING.get(weight.element_size(), _COARSE) * float(reference.abs().max())
            for steps, answer in (([count - half], "good"), ([1] * (count - half), "feed singly")):
                logits = _continue(model, ids, [half, *steps])
                if float((logits - reference).abs().max()) <= limit:  # not NaN
                    return answer  # type: ignore[return-value]
    finally:
        model.train(was_training)
    return "no way"


def _continue(model: Any, ids: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return the logits of all calls but the first, which each take some tokens and the cache."""
    import torch

    names = [name for name in _CACHES if name in signature(model.forward).parameters]
    logits: list[Any] = []
    arguments: dict[str, Any] = {}
    start = 0
    for count in counts:
        result = model(ids[:, start : start + count], use_cache=True, **arguments)
        caches = [cache for n in _CACHES if (cache := getattr(result, n, None)) is not None]
        if not caches or not names:
            text = f"{type(model).__name__} takes or returns no cache"
            raise incompatible(text, None, "a model with a cache", type(model).__name__)
        arguments = {names[0]: caches[0]}
        logits.append(result.logits)
        start += count
    return torch.cat(logits[1:], 1).float()
