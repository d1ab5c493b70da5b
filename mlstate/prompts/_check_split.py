"""`check_split`: whether a model continues a stored prompt; a warning for types that do not."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from .._common.log import log
from .._common.set_module import set_module

if TYPE_CHECKING:
    import torch

Answer = Literal["good", "feed singly", "no way"]

# Model types whose forward of several tokens ignores a cached state, in transformers 5.24. The
# logits of "bamba" differ for single tokens too.
_UNSPLIT = {
    "jamba": "feed singly",
    "mamba": "feed singly",
    "falcon_mamba": "feed singly",
    "bamba": "no way",
}


@set_module("mlstate.prompts")
def check_split(model: torch.nn.Module, tokens: int = 64) -> Answer:
    """Compare a whole prefill with a split one, to know whether stored prompts can be continued.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model of transformers, on any device.
    tokens : int
        Number of random tokens, 2 or more. The second half continues a cache of the first.

    Returns
    -------
    {"good", "feed singly", "no way"}
        "good": the logits are those of a whole prefill. "feed singly": only if the tokens after a
        restored prompt are fed one at a time; also put prompts after a single prefill only, without
        `PromptStore.stops`. "no way": not even then, so do not use a `PromptStore` for this model.

    Raises
    ------
    CompatibilityError
        The model returns no cache. A ValueError.
    TypeError
        `model` is not a model of transformers, or `tokens` is not an integer.

    Notes
    -----
    Runs three prefills. Differences are relative to the largest logit; those that rounding explains
    are accepted: 1e-4 for float32, 0.03 for 16 bits. Random weights of small magnitude can hide a
    difference: pass the trained model.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from mlstate.prompts import check_split
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    >>> config = LlamaConfig(vocab_size=50, num_hidden_layers=2, num_key_value_heads=2, **sizes)
    >>> check_split(LlamaForCausalLM(config))
    'good'
    """
    answer: Answer = import_module("mlstate.integrations.transformers").check_split(model, tokens)
    return answer


def warn_of_split(config: dict[str, Any], path: str) -> None:
    """Log a warning if a model ignores its cached state when it takes several tokens.

    `config`: of the model. `path`: of the store.
    """
    kind = config.get("model_type")
    answer = _UNSPLIT.get(kind) if isinstance(kind, str) else None
    if answer is not None:
        text = "%s: %s in transformers 5.24 ignores a cached state if it takes several tokens, so "
        text += "a split prefill has other logits: "
        if answer == "feed singly":
            text += "prefill in one call, and feed the tokens after a restored prompt singly"
        else:
            text += "do not continue a restored prompt"
        log("WARNING", text + "; mlstate.prompts.check_split(model) tests it", path, kind)
