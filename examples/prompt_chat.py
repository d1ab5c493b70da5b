"""Chat with a model of transformers or mlx-lm; its history is prefilled once, also after a crash.

    python examples/prompt_chat.py "Who are you?" "And then?"
    python examples/prompt_chat.py "Go on."            # a new process: the history is restored
    python examples/prompt_chat.py --model FOLDER "Who are you?"
    python examples/prompt_chat.py --model FOLDER --mlx "Go on."   # the same history, in mlx-lm

Each message is one turn.  The text stays in FOLDER/chat.json, and the cache in a PromptStore.  Kill
the process at any time, and start it again.  For each turn the example prints how many tokens were
restored, and the time until the first token of the answer, with the store and without it.

Without --model, a small model with random weights answers, with one token for each byte.
"""

import argparse
import json
import time
from pathlib import Path

from mlstate.prompts import PromptStore

SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


class Bytes:
    """A tokenizer with one token for each byte."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode("latin-1")


class Transformers:
    """A model of transformers, its tokenizer, and what identifies it."""

    def __init__(self, folder):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

        if folder is None:
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=1 << 16, **SIZES))
            self.tokenizer, self.identity = Bytes(), "random weights of torch, seed 0"
        else:
            model = AutoModelForCausalLM.from_pretrained(folder)
            self.tokenizer, self.identity = AutoTokenizer.from_pretrained(folder), Path(folder)
        self.model = model.eval()

    def new_cache(self):
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def next_token(self, tokens, cache):
        """Append tokens to the cache; return the most likely next one."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([tokens]), past_key_values=cache).logits
        return int(logits[0, -1].argmax())


class Mlx:
    """A model of mlx-lm, its tokenizer, and what identifies it."""

    def __init__(self, folder):
        import mlx.core as mx
        from mlx_lm import load
        from mlx_lm.models.llama import Model, ModelArgs

        if folder is None:
            mx.random.seed(0)
            self.model = Model(ModelArgs(model_type="llama", rms_norm_eps=1e-6, **SIZES))
            self.tokenizer, self.identity = Bytes(), "random weights of mlx, seed 0"
        else:
            self.model, self.tokenizer = load(folder)
            self.identity = Path(folder)

    def new_cache(self):
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def next_token(self, tokens, cache):
        """Append tokens to the cache; return the most likely next one."""
        import mlx.core as mx

        return self.model(mx.array([tokens]), cache=cache)[0, -1].argmax().item()


def prefill(engine, store, tokens):
    """Return the next token, the cache, and the number of tokens restored."""
    cache = engine.new_cache()
    with store.match(tokens) as match:
        restored = start = store.restore(match, into=cache)
    for stop in store.stops(tokens, start):
        engine.next_token(tokens[start:stop], cache)
        store.put(tokens[:stop], cache)
        start = stop
    return engine.next_token(tokens[start:], cache), cache, restored


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("messages", nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("chat"))
    parser.add_argument("--model", help="the folder of a Hugging Face model")
    parser.add_argument("--mlx", action="store_true", help="run the model with mlx-lm")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--max-bytes", default="10GB", help="of the store on disk")
    arguments = parser.parse_args()

    engine = (Mlx if arguments.mlx else Transformers)(arguments.model)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path, new = arguments.folder / "chat.json", arguments.folder / "chat.json.new"
    history = json.loads(path.read_text()) if path.exists() else []
    prompts = arguments.folder / "prompts"
    with PromptStore(prompts, model=engine.identity, max_bytes=arguments.max_bytes) as store:
        for message in arguments.messages:
            tokens = history + engine.tokenizer.encode(message)
            began = time.perf_counter()
            engine.next_token(tokens, engine.new_cache())
            without = time.perf_counter() - began
            began = time.perf_counter()
            token, cache, restored = prefill(engine, store, tokens)
            seconds = time.perf_counter() - began
            reply = [token]
            while len(reply) < arguments.tokens:
                reply.append(engine.next_token(reply[-1:], cache))
            history = tokens + reply
            store.put(history[:-1], cache)  # the model has not seen the last token
            new.write_text(json.dumps(history))
            new.replace(path)  # at once, also if the process is killed
            print(f"{message}\n  {engine.tokenizer.decode(reply)!r}")
            print(
                f"  {restored:,} of {len(tokens):,} tokens restored; first token after "
                f"{seconds * 1e3:.1f} ms, without the store {without * 1e3:.1f} ms"
            )


if __name__ == "__main__":
    main()
