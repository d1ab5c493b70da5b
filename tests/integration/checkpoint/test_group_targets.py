"""Ranks whose modules have other names, in one checkpoint: stages of a pipeline, and experts."""

import numpy as np
import pytest
import torch
from rank_threads import outcomes
from torch import nn

import mlstate
from mlstate import CompatibilityError
from mlstate.testing import run_ranks

pytestmark = pytest.mark.torch


class Tagged(nn.Linear):
    """A layer with an extra state."""

    tag = None

    def get_extra_state(self):
        return self.tag

    def set_extra_state(self, state):
        self.tag = state


def part(names, seed, layer=nn.Linear):
    """A model with these layers of one larger model, and its optimizer after one step."""
    generator = torch.Generator().manual_seed(seed)  # ranks are threads, which share torch's own
    model = nn.Module()
    for name in names:
        model.add_module(name, layer(2, 3))
        for parameter in model.get_submodule(name).parameters():
            nn.init.uniform_(parameter, generator=generator)
        model.get_submodule(name).tag = seed
        model.get_submodule(name).unused = nn.Parameter(torch.zeros(1))  # without states
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for layer in names:
        model.get_submodule(layer)(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def content(*parts):
    """Tensors of the models and states of the optimizers, by name of the parameter."""
    loaded = {}
    for model, optimizer in parts:
        loaded.update(model.state_dict())
        for name, parameter in model.named_parameters():
            states = optimizer.state.get(parameter, {})
            loaded.update({f"{name}.{key}": value for key, value in states.items()})
    return loaded


def check_equal(loaded, expected):
    assert loaded.keys() <= expected.keys()
    for name, value in loaded.items():
        same = torch.equal(value, expected[name]) if hasattr(value, "shape") else True
        assert same and (hasattr(value, "shape") or value == expected[name]), name


def saved(path, names_of_ranks, layer=nn.Linear):
    """The content of a checkpoint that ranks with these layers saved together."""

    def save(group):
        pair = part(names_of_ranks[group.rank], 0, layer)
        mlstate.save(path, *pair, group=group)
        return content(pair)

    contents = run_ranks(len(names_of_ranks), save)
    return {name: value for each in contents for name, value in each.items()}


def load_into(path, names_of_ranks, layer=nn.Linear, **options):
    """Load on ranks with these layers; the content or the error of each, and the targets before."""

    def load(group):
        pair = part(names_of_ranks[group.rank], 5, layer)
        before = {name: copy_of(value) for name, value in content(pair).items()}
        into = dict(zip(("model", "optimizer"), pair, strict=True))
        try:
            mlstate.load(path, into=into, group=group, **options)
        except CompatibilityError as error:
            check_equal(content(pair), before)
            return error
        return content(pair)

    return run_ranks(len(names_of_ranks), load)


def copy_of(value):
    return value.clone() if hasattr(value, "clone") else value


STAGES = [["a"], ["b", "c"]]
EXPERTS = [["gate", "e0", "e1"], ["gate", "e2", "e3"], ["gate"]]


@pytest.mark.parametrize(
    ("saved_names", "names"),
    [
        (STAGES, STAGES),
        (STAGES, STAGES[::-1]),
        (STAGES, [["a", "b"], ["c"]]),
        (STAGES, [["a"], ["b"], ["c"]]),
        (STAGES, [["a", "b", "c"], ["b"]]),
        (STAGES, [["a", "b", "c"]]),
        ([["a", "b", "c"]], STAGES),
        (EXPERTS, EXPERTS),
        (EXPERTS, [["gate", "e3"], ["gate", "e2", "e1", "e0"]]),
    ],
)
def test_ranks_load_the_parts_of_a_checkpoint_that_they_have(tmp_path, saved_names, names):
    expected = saved(tmp_path / "c", saved_names)
    for loaded in load_into(tmp_path / "c", names):
        check_equal(loaded, expected)


def test_a_name_that_no_rank_has_is_an_error_of_all_ranks(tmp_path):
    saved(tmp_path / "c", STAGES)
    for error in load_into(tmp_path / "c", [["a"], ["b"]]):
        assert isinstance(error, CompatibilityError)
        assert '"c.weight"' in str(error) and "a.weight" not in str(error)
        assert "b.weight" not in str(error)
    loaded = load_into(tmp_path / "c", [["a"], ["b"]], strict=False)
    assert [sorted(each)[0] for each in loaded] == ["a.bias", "b.bias"]


def test_a_name_that_is_not_stored_is_an_error_of_all_ranks(tmp_path):
    saved(tmp_path / "c", STAGES)
    for error in load_into(tmp_path / "c", [["a"], ["b", "c", "d"]]):
        assert 'Missing key(s) in checkpoint: "d.weight", "d.bias", "d.unused"' in str(error)


@pytest.mark.parametrize("one_rank_saves", [False, True])
def test_stages_load_the_extra_states_that_they_have(tmp_path, one_rank_saves):
    names = [["a", "b", "c"]] if one_rank_saves else STAGES
    expected = saved(tmp_path / "c", names, Tagged)
    for loaded in load_into(tmp_path / "c", STAGES, Tagged):
        check_equal(loaded, expected)
        assert {v for n, v in loaded.items() if n.endswith("_extra_state")} == {0}


def test_a_stage_that_loads_itself_gets_only_its_entries(tmp_path):
    expected = saved(tmp_path / "c", STAGES)

    def load(group):
        pair = part(STAGES[group.rank], 5)
        pair[0].register_load_state_dict_post_hook(lambda *_: None)
        mlstate.load(tmp_path / "c", into={"model": pair[0]}, group=group)
        return pair[0].state_dict()

    for loaded in run_ranks(2, load):
        check_equal(loaded, expected)


def test_each_rank_may_rename_tensors_differently(tmp_path):
    expected = saved(tmp_path / "c", [["a"], ["b"]])

    def load(group):
        rules = {"ab"[group.rank] + ".": "layer."}
        pair = part(["layer"], 5)
        into = dict(zip(("model", "optimizer"), pair, strict=True))
        mlstate.load(tmp_path / "c", into=into, group=group, rename=rules)
        return content(pair)

    for name, loaded in zip("ab", run_ranks(2, load), strict=True):
        check_equal({n.replace("layer.", f"{name}."): v for n, v in loaded.items()}, expected)


def test_chosen_names_need_a_rank_that_loads_them(tmp_path):
    expected = saved(tmp_path / "c", STAGES)

    def load(group, names):
        model = part([["a"], ["b"]][group.rank], 5)[0]
        mlstate.load(tmp_path / "c", into={"model": model}, group=group, names=names)
        return model.state_dict()

    for loaded in run_ranks(2, lambda group: load(group, ["a", "b"])):
        check_equal(loaded, expected)
    for error in outcomes(2, lambda group: load(group, ["a", "c"])):
        assert isinstance(error, CompatibilityError) and '"c.bias"' in str(error)
    # rank 1 has the name, but does not choose it
    for error in outcomes(2, lambda group: load(group, ["a", "b"] if group.rank == 0 else [])):
        assert isinstance(error, CompatibilityError) and '"b.bias"' in str(error)


def test_named_states_of_stages_are_loaded_together(tmp_path):
    def save(group):
        pair = part(STAGES[group.rank], 0)
        mlstate.save(tmp_path, pair[0], states={"ema": pair[0], "optimizer": pair[1]}, group=group)
        return content(pair)

    expected = {name: value for each in run_ranks(2, save) for name, value in each.items()}

    def load(group):
        pair, ema = part(STAGES[group.rank], 5), part(STAGES[group.rank], 6)[0]
        states = {"ema": ema, "optimizer": pair[1]}
        mlstate.load(tmp_path, into={"model": pair[0], "states": states}, group=group)
        check_equal(ema.state_dict(), expected)
        return content(pair)

    for loaded in run_ranks(2, load):
        check_equal(loaded, expected)


def test_arrays_of_ranks_are_filled_together_or_not_at_all(tmp_path):
    arrays = {name: np.full(4, ord(name)) for name in "abc"}
    mlstate.save(tmp_path, arrays)

    def load(group, names):
        into = {name: np.zeros_like(arrays[name]) for name in names[group.rank]}
        try:
            mlstate.load(tmp_path, into={"model": into}, group=group)
        except CompatibilityError as error:
            assert not any(array.any() for array in into.values())
            return str(error)
        return all(np.array_equal(array, arrays[name]) for name, array in into.items())

    assert run_ranks(2, lambda group: load(group, ["ab", "bc"])) == [True, True]
    for text in run_ranks(2, lambda group: load(group, ["a", "b"])):
        assert '"c"' in text and '"b"' not in text


def test_all_ranks_raise_the_error_of_one(tmp_path):
    saved(tmp_path / "c", STAGES)

    def load(group):
        model = part(STAGES[group.rank], 5)[0]
        into = {"model": model, "states": [] if group.rank else None}
        mlstate.load(tmp_path / "c", into=into, group=group)

    errors = outcomes(2, load)
    assert isinstance(errors[1], TypeError)
    assert "rank 1: TypeError" in str(errors[0]) and "Unexpected" not in str(errors[0])
