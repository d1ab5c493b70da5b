"""Chat with a model of transformers; its history is prefilled once, also after a crash.

    python examples/prompt_chat.py "Who are you?" "And then?"
    python examples/prompt_chat.py "Go on."            # a new process: the history is restored
    python examples/prompt_chat.py --model FOLDER "Who are you?"

Each message is one turn.  The text stays in FOLDER/chat.json, and the cache in a PromptStore.  Kill
the process at any time, and start it again.  For each turn the example prints how many tokens were
restored, and the time until the first token of the answer, with the store and without it.

Without --model, a small model with random weights answers, with one token for each byte.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)

from mlstate.prompts import PromptStore


class Bytes:
    """A tokenizer with one token for each byte."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode("latin-1")


def load(name):
    """Return a model, its tokenizer, and what identifies it."""
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name)
        return model.eval(), AutoTokenizer.from_pretrained(name), Path(name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1 << 16,
    )
    return LlamaForCausalLM(config).eval(), Bytes(), "random weights, seed 0"


@torch.no_grad()
def prefill(model, store, tokens):
    """Return the logits of the last token, the cache, and the number of tokens restored."""
    ids, cache = torch.tensor([tokens]), DynamicCache(config=model.config)
    with store.match(tokens) as match:
        restored = start = store.restore(match, into=cache)
    for stop in store.stops(tokens, start):
        model(ids[:, start:stop], past_key_values=cache)
        store.put(tokens[:stop], cache)
        start = stop
    return model(ids[:, start:], past_key_values=cache).logits[0, -1], cache, restored


@torch.no_grad()
def answer(model, logits, cache, count):
    """Return the next tokens, greedily."""
    tokens = [int(logits.argmax())]
    while len(tokens) < count:
        logits = model(torch.tensor([tokens[-1:]]), past_key_values=cache).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("messages", nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("chat"))
    parser.add_argument("--model", help="the folder of a model of transformers")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    arguments = parser.parse_args()

    model, tokenizer, identity = load(arguments.model)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / "chat.json"
    history = json.loads(path.read_text()) if path.exists() else []
    with PromptStore(arguments.folder / "prompts", model=identity, max_bytes="10GB") as store:
        for message in arguments.messages:
            tokens = history + tokenizer.encode(message)
            began = time.perf_counter()
            model(torch.tensor([tokens]), past_key_values=DynamicCache(config=model.config))
            without = time.perf_counter() - began
            began = time.perf_counter()
            logits, cache, restored = prefill(model, store, tokens)
            seconds = time.perf_counter() - began
            reply = answer(model, logits, cache, arguments.tokens)
            history = tokens + reply
            store.put(history[:-1], cache)  # the model has not seen the last token
            path.write_text(json.dumps(history))
            print(f"{message}\n  {tokenizer.decode(reply)!r}")
            print(
                f"  {restored:,} of {len(tokens):,} tokens restored; first token after "
                f"{seconds * 1e3:.1f} ms, without the store {without * 1e3:.1f} ms"
            )


if __name__ == "__main__":
    main()
