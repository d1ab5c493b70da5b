"""Leak cases of Core AI models: their files, and states that were not created yet."""

import hashlib

from leak_cases import case, each, raises

from mlstate import coreai, errors


@case("verify")
def verified_assets(tmp_path):
    good, cut = tmp_path / "good.aimodel", tmp_path / "cut.aimodel"
    program = b"program" * 20_000
    for folder in (good, cut):
        folder.mkdir()
        (folder / "main.mlirb").write_bytes(program if folder is good else program[:-1])
        (folder / "main.hash").write_bytes(hashlib.sha256(program).digest())
        (folder / "metadata.json").write_text("{}")
    return each(
        lambda: coreai.verify(good),
        raises(errors.ChecksumError, coreai.verify, cut),
        raises(FileNotFoundError, coreai.verify, good / "none"),
    ), [good, cut]


@case("StateSpec.with_size", "StateManager.refill", "StateManager.refill_async")
def dynamic_states(_):
    model = {"k": (2, 1, 2, None, 8), "conv": (5,)}
    tokens = list(range(20))

    def run():
        specs = coreai.state_specs(model)
        specs["k"].with_size(8)
        specs._repr_html_()
        coreai.plan_transition(specs, specs, 5, source_size=8, target_size=16)
        manager = coreai.StateManager(specs, (8, 16), batch_size=4)
        manager.grow_if_needed(0, 16)
        raises(TypeError, manager.refill, tokens, None)()
        coroutine = manager.refill_async(tokens, None)
        raises(TypeError, coroutine.send, None)()
        coreai.StateManager({8: (specs,)})

    return run, [model, tokens]
