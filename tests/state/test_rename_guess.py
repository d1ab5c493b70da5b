"""Guesses of rename rules: the fewest rules that explain most names, or none."""

import pytest

from mlstate.state._rename_guess import guess_rules

FSDP, CHECKPOINT = "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."
LEAVES = ("attn.q.weight", "attn.q.bias", "norm.weight")


@pytest.mark.parametrize(
    ("unexpected", "missing", "rules"),
    [
        ("module.a.w module.a.b module.c", "a.w a.b c", [("module.", "")]),
        ("a.w a.b c d", "net.inner.a.w net.inner.a.b net.inner.c", [("", "net.inner.")]),
        (
            f"{FSDP}a.{FSDP}w {FSDP}b.{CHECKPOINT}w {FSDP}c.{FSDP}{CHECKPOINT}w",
            "a.w b.w c.w",
            [(f"*{FSDP}", ""), (f"*{CHECKPOINT}", "")],
        ),
        # no name contains "module.model."
        (
            "module._orig_mod.model.a module._orig_mod.model.b._orig_mod.w",
            "a b.w z",
            [("*_orig_mod.", ""), ("module.model.", "")],
        ),
        ("%n\"\0.a %n\"\0.ö", "a ö", [("%n\"\0.", "")]),
        ("a." * 2500 + "b " + "a." * 2500 + "c", "a." * 2400 + "b " + "a." * 2400 + "c",
         [("a." * 100, "")]),
    ],
    ids=["prefix removed", "prefix added", "marks", "marks and prefix", "strange", "long"],
)  # fmt: skip
def test_names_are_explained(unexpected, missing, rules):
    assert guess_rules(unexpected.split(" "), missing.split(" ")) == tuple(rules)


def test_fewest_rules_are_chosen():
    front, bare = ["_orig_mod.a", "_orig_mod.b"], ["a", "b"]
    assert guess_rules(front, bare) == (("_orig_mod.", ""),)  # not a mark at any position
    assert guess_rules(bare, front) == (("", "_orig_mod."),)
    both = [f"module.a.{FSDP}w", f"module.b.{FSDP}w"]  # a mark in both lists stays
    assert guess_rules(both, [f"a.{FSDP}w", f"b.{FSDP}w"]) == (("module.", ""),)


def test_usual_prefixes_win_ties():
    unexpected = ["aux.w", "aux.b", "model.w", "model.b"]
    assert guess_rules(unexpected, ["w", "b"]) == (("model.", ""),)


@pytest.mark.parametrize(
    ("unexpected", "missing"),
    [
        (["module.a", "module.b", "x", "y"], ["a", "b", "p", "q", "r"]),  # only half
        (["x", "y"], ["p", "q"]),
        ([], ["module.a"]),
        (["module.a"], []),
        (["module.a", "_orig_mod.b"], ["module.a", "_orig_mod.b"]),  # equal already
        (["module.a", "module.b", "a"], ["b"]),  # two names would become "a"
        (["x._orig_mod.a", "x.a", "y._orig_mod.b"], ["y.b"]),
        (["module.", "module.a"], ["a"]),  # nothing would be left of the first name
        (["_orig_mod.", "x._orig_mod.a"], ["x.a"]),
        (["xa", "xb"], ["a", "b"]),  # not whole segments
        (["x_orig_mod.a", "y_orig_mod.b"], ["xa", "yb"]),
    ],
)
def test_no_rules_without_a_safe_explanation(unexpected, missing):
    assert guess_rules(unexpected, missing) == ()


def test_more_than_half_of_the_shorter_list_suffices():
    unexpected = ["module.a", "module.b", "x", "y"]
    assert guess_rules(unexpected, ["a", "b", "p"]) == (("module.", ""),)
    # a renamed name makes way for the next one
    assert guess_rules(["m.m.a", "m.a", "m.b"], ["a", "b", "c"]) == (("m.", ""),)


def model_names(front="", middle="", count=3000):
    return [f"{front}layers.{i // 3}.{middle}{LEAVES[i % 3]}" for i in range(count)]


@pytest.mark.parametrize("count", [2600, 3000])
def test_large_models_are_explained_from_either_list(count):
    wrapped, bare = model_names("_orig_mod.net.", CHECKPOINT), model_names()[:2800]
    rules = ((f"*{CHECKPOINT}", ""), ("_orig_mod.net.", ""))
    assert guess_rules(wrapped[:count], bare) == rules
    added = [f"transformer.{name}" for name in bare]
    assert guess_rules(model_names(count=count), added) == (("", "transformer."),)


def test_few_names_among_many_others_are_explained():
    many, few = model_names("model."), model_names()[1500:1530]
    assert guess_rules(many, few) == (("model.", ""),)
    assert guess_rules(few, many) == (("", "model."),)
