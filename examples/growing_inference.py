"""Generate tokens with Core ML models of several context sizes: start small, grow when full.

    python examples/growing_inference.py
    python examples/growing_inference.py --overflow stop --tokens 5000
    python examples/growing_inference.py --models FOLDER --prompt 1,2,3

Without --models, small models made of NumPy replace Core ML's, and the example runs on any
machine.  With --models, on a Mac with coremltools 9, FOLDER has these packages, converted with
the names of inputs and outputs that `GrowingClient.run` uses:

    embed.mlpackage, head.mlpackage      input_ids to hidden_states; hidden_states to logits
    512/chunk_1.mlpackage, 512/...       chunk models that share a state, in order, each with
    1024/chunk_1.mlpackage, ...          the functions infer (one token) and prefill (a batch)
"""

import argparse
from pathlib import Path

import numpy as np

from mlstate.coreml import FakeMLState, StateManager

# ---- the client ----


class GrowingClient:
    """Generates tokens; a `StateManager` holds the state of the smallest sufficient model.

    The models of a size are its chunk models for one token, then those for a batch.
    """

    def __init__(self, manager, embed, head, pick):
        self.manager, self.embed, self.head, self.pick = manager, embed, head, pick

    def run(self, tokens, position, state):
        """Write tokens into the state, the first at `position`; return their hidden states."""
        models, ladder = self.manager.model, self.manager.ladder
        chunks = models[: len(models) // 2] if len(tokens) == 1 else models[len(models) // 2 :]
        ids = np.array([tokens], np.int32)
        hidden = self.embed.predict({"input_ids": ids})["hidden_states"]
        inputs = {
            "position_ids": np.arange(position, position + len(tokens), dtype=np.int32),
            "causal_mask": ladder.mask(position, self.manager.size, len(tokens)),
            "current_pos": np.array([position], np.int32),
        }
        for chunk in chunks:
            outputs = chunk.predict({"hidden_states": hidden, **inputs}, state=state)
            hidden = outputs["output_hidden_states"]
        return hidden

    def prefill(self, tokens, position, state):
        """Write a whole batch at once, the tokens of a shorter one in turn."""
        is_whole = len(tokens) == self.manager.ladder.batch_size
        count = len(tokens) if is_whole else 1
        for start in range(0, len(tokens), count):
            self.run(tokens[start : start + count], position + start, state)

    def make_room(self, window, position):
        """Grow or refill the state for the tokens from `position` on; return the action."""
        step = self.manager.grow_if_needed(position, len(window) - position)
        if step.action == "refill":
            step = self.manager.refill(window, self.prefill)
            window[:] = [window[i] for i in step.indices]
        return step.action

    def generate(self, prompt, count):
        """Yield up to `count` tokens that follow the prompt."""
        window = list(prompt)  # the tokens that the model attends to
        self.manager.reset()
        action = self.make_room(window, 0)
        if action in ("stay", "grow"):
            for start, stop in self.manager.ladder.prefill_batches(len(window)):
                self.prefill(window[start:stop], start, self.manager.state)
        for _ in range(count):
            if action == "stop":
                return
            hidden = self.run(window[-1:], len(window) - 1, self.manager.state)
            window.append(self.pick(self.head.predict({"hidden_states": hidden})["logits"]))
            yield window[-1]
            action = self.make_room(window, len(window) - 1)


def pick_best(logits):
    return int(np.argmax(logits))


# ---- models ----


def load_models(folder):
    """Return the embedding, the head, and a loader of the chunk models of each size."""
    import coremltools as ct

    def load(path, function=None):
        return ct.models.MLModel(str(path), function_name=function)

    def loader(size):
        paths = sorted((folder / str(size)).glob("*.mlpackage"))
        return lambda: [load(path, name) for name in ("infer", "prefill") for path in paths]

    sizes = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
    embed, head = load(folder / "embed.mlpackage"), load(folder / "head.mlpackage")
    return embed, head, {size: loader(size) for size in sizes}


VOCABULARY, WIDTH, CHUNKS = 251, 2, 2  # a prime; integers below 2,048 are exact in float16


class FakeEmbedding:
    def predict(self, inputs):
        ids = inputs["input_ids"].astype(np.float32)
        return {"hidden_states": ids[..., None] * np.arange(1, WIDTH + 1) % VOCABULARY}


class FakeHead:
    def predict(self, inputs):
        token = inputs["hidden_states"][0, -1] @ np.arange(3, WIDTH + 3) % VOCABULARY
        return {"logits": np.eye(VOCABULARY, dtype=np.float32)[int(token)]}


class FakeChunk:
    """A chunk model whose output depends on every cached token and its position, exactly."""

    def __init__(self, size, number):
        self.shapes = {"kv_cache": (CHUNKS, 1, size, WIDTH)}
        self.number = number

    def get_spec(self):
        return self.shapes

    def make_state(self):
        return FakeMLState(self.shapes)

    def predict(self, inputs, state):
        hidden, positions = inputs["hidden_states"][0], inputs["position_ids"]
        cache = state.read_state("kv_cache")
        layer = cache[self.number, 0]
        layer[positions] = hidden * (positions[:, None] + 1) % VOCABULARY
        state.write_state("kv_cache", cache)
        attended = (inputs["causal_mask"][0, 0] == 0).astype(np.float32)
        hidden = (hidden + attended @ layer) % VOCABULARY
        return {"output_hidden_states": hidden[None]}


def fake_models():
    """Return the same as `load_models`, without Core ML."""

    def loader(size):
        return lambda: [FakeChunk(size, number) for number in range(CHUNKS)] * 2

    sizes = (512, 1024, 2048, 3072, 4096)
    return FakeEmbedding(), FakeHead(), {size: loader(size) for size in sizes}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, help="folder of packages, on a Mac")
    parser.add_argument("--prompt", default="3,1,4,1,5,9,2,6", help="numbers of tokens")
    parser.add_argument("--tokens", type=int, default=5000, help="most tokens to generate")
    parser.add_argument("--batch", type=int, default=64, help="tokens of a prefill batch")
    parser.add_argument("--overflow", choices=["stop", "shift_refill"], default="shift_refill")
    options = parser.parse_args()
    prompt = [int(token) for token in options.prompt.split(",")]
    embed, head, models = load_models(options.models) if options.models else fake_models()
    manager = StateManager(
        models,
        overflow=options.overflow,
        batch_size=options.batch,
        prompt_tokens=len(prompt),
    )
    client = GrowingClient(manager, embed, head, pick_best)
    size, tokens = 0, []
    for token in client.generate(prompt, options.tokens):
        tokens.append(token)
        if manager.size != size:
            size = manager.size
            manager.release()  # the models of the smaller size
            print(f"token {len(tokens)}: {manager}", flush=True)
    print(f"{len(tokens)} tokens, the last ones {tokens[-8:]}")


if __name__ == "__main__":
    main()
