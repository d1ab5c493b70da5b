"""Models of transformers and of mlx-lm, which take tokens and a cache in the same way."""

import dataclasses
import importlib
import json

import numpy as np
from model_types import config_of, mlx_arguments

from mlstate.prompts import PromptStore

TOKENS = np.random.default_rng(1).integers(2, 97, 90).tolist()
LENGTH, MORE = 30, 8


class Engine:
    """A model, its caches and their integration `module`."""

    def after(self, tokens):
        """Return a cache of these tokens."""
        return self.run(tokens, self.new_cache())[1]

    def continued(self, cache, start=LENGTH):
        """Return the logits of the next tokens, one by one."""
        results = []
        for token in TOKENS[start : start + MORE]:
            logits, cache = self.run([token], cache)
            results.append(logits)
        return np.stack(results)


class Transformers(Engine):
    """A model of transformers; `create_cache` takes its config."""

    def __init__(self, model, create_cache=None, argument=None):
        from cache_models import ARGUMENT
        from transformers import DynamicCache

        from mlstate.integrations import transformers

        self.module, self.model = transformers, model
        self.create_cache, self.argument = create_cache or DynamicCache, argument or ARGUMENT

    def new_cache(self):
        return self.create_cache(config=self.model.config)

    def empty(self, cache, count):
        """Remove all tokens of a cache; return whether that is possible."""
        if hasattr(cache, "reset"):
            cache.reset()
        return hasattr(cache, "reset")

    def run(self, tokens, cache):
        """Return the logits of the last token, and the cache."""
        import torch

        with torch.no_grad():
            tokens = torch.tensor([tokens])
            output = self.model(tokens, use_cache=True, **{self.argument: cache})
        return output.logits[0, -1].float().numpy(), getattr(output, self.argument, cache)


class Mlx(Engine):
    """A model of mlx-lm."""

    def __init__(self, model):
        from mlstate.integrations import mlx

        self.module, self.model = mlx, model

    def new_cache(self):
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def empty(self, cache, count):
        """Remove all `count` tokens of a cache; return whether that is possible."""
        from mlx_lm.models.cache import trim_prompt_cache

        return trim_prompt_cache(cache, count) == count

    def run(self, tokens, cache):
        """Return the logits of the last token, and the cache."""
        import mlx.core as mx

        logits = self.model(mx.array([tokens]), cache=cache)[0, -1]
        return np.array(logits.astype(mx.float32)), cache


def new_transformers_model(kind, layers=2, **options):
    """Return a model with the same weights each time."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(kind, layers, **options)).eval()


def new_mlx_model(kind, seed=0, arguments=None, **options):
    """Return a model with the same weights each time."""
    import mlx.core as mx

    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    arguments = mlx_arguments(kind, **options) if arguments is None else arguments
    model = module.Model(module.ModelArgs.from_dict(arguments))
    mx.eval(model.parameters())
    return model


def model_of(engine, kind):
    """Return the small model of a type; the engine "packed": of `packed_models.py`."""
    if engine == "mlx":
        return Mlx(new_mlx_model(kind))
    if engine == "transformers":
        return Transformers(new_transformers_model(kind))
    from packed_models import MODELS

    return MODELS[kind]()


def restore_prompt(engine, kind, folder):
    """Return the logits after a stored prompt, also in a process that did not store it."""
    model = model_of(engine, kind)
    cache = model.new_cache()
    with (
        PromptStore(folder, model=kind, block_tokens=8) as store,
        store.match(TOKENS[: LENGTH + 1]) as match,
    ):
        assert store.restore(match, into=cache) == LENGTH
    return model.continued(cache)


def mlx_config(model, kind):
    """Return the config of a model of transformers, with all that mlx-lm asks for."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope.get("sliding_attention", {}).get("rope_theta")
        rope = rope["full_attention"]
    names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    config = {name: rope[name] for name in names if name in rope} | config
    config |= {names[name]: rope[name] for name in names if name in rope}
    if rope:
        is_default = rope["rope_type"] == "default"
        config.setdefault("rope_scaling", None if is_default else rope)
        config.setdefault("partial_rotary_factor", 1.0)
    for alias, name in model.config.attribute_map.items():
        config.setdefault(alias, config.get(name))
    config |= {"full_attention_interval": 2, "layer_group_size": 2}
    if "sliding_attention" in (config.get("layer_types") or []):
        config["sliding_window_pattern"] = 2
    cls = importlib.import_module(f"mlx_lm.models.{kind}").ModelArgs
    for field in dataclasses.fields(cls):
        is_required = field.default is field.default_factory is dataclasses.MISSING
        if is_required and config.get(field.name) is None and field.name != "rope_scaling":
            config[field.name] = mlx_arguments(kind, 2).get(field.name)
    if "text_config" in config:
        config["text_config"] |= {
            k: v for k, v in config.items() if k != "text_config" and v is not None
        }
    return config | {"model_type": kind}


def loaded_by_mlx(model, folder, kind="llama", strict=True, **options):
    """Return the model of mlx-lm with the same weights.

    `strict`: refuse weights of other names. `options`: added to the config.
    """
    from mlx_lm.utils import load_model

    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(mlx_config(model, kind) | options))
    return load_model(folder, strict=strict)[0]
