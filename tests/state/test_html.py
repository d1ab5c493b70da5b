"""HTML views of state dicts: a well-formed, escaped tree, complete or with counts."""

import re

import numpy as np
import pytest
from html_page import Page
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from mlstate import ModelStateDict, OptimizerStateDict, StateDict

MOST_BYTES = 30_000
MIXED = (2, 3, 5, 7, 10_000)


class Tree(Page):
    """The page of a state, and the number of its tensors."""

    def __init__(self, text):
        self.deepest = 0
        self.more = []  # for each open <details>: whether it contains rows that the preview hides
        self.tensors = 0  # tensors shown, or counted in a row without details
        super().__init__(text)
        assert self.attributes <= {"class", "open"}

    def handle_starttag(self, tag, attrs):
        super().handle_starttag(tag, attrs)
        if tag == "details":
            self.more.append(("class", "more") in attrs)
        self.deepest = max(self.deepest, self.open.count("details"))

    def handle_endtag(self, tag):
        super().handle_endtag(tag)
        if tag == "details":
            self.more.pop()

    def handle_data(self, data):
        super().handle_data(data)
        in_summary = self.open[-2:] == ["summary", "i"]
        # already counted in the row above
        hidden = any(self.more[:-1] if in_summary else self.more)
        if self.open[-1:] == ["i"] and not hidden:
            count = re.match(r"([\d,]+) tensors?, ", data)
            if self.open[-2] == "div" or self.more[-1]:
                self.tensors += int(count[1].replace(",", "")) if count else 1
            else:
                self.tensors += "; itself" in data


def page(state):
    return Tree(state._repr_html_())


def model(layers, parts=("attn.q", "attn.k", "mlp.up", "mlp.down", "norm")):
    names = [f"layers.{i}.{part}.{n}" for i in range(layers) for part in parts for n in "wb"]
    return ModelStateDict({name: np.zeros((2, 3), np.float32) for name in names})


def test_a_model_unfolds_down_to_every_tensor():
    state = model(12)
    tree = page(state)
    # layers, 12 of them, 2 groups and 5 modules in each
    assert tree.tags.count("details") == 1 + 12 * (1 + 2 + 5)
    assert sum(text == "float32 (2, 3)" for text in tree.texts) == len(state)
    assert not [text for text in tree.texts if "more" in text]
    assert tree.deepest == 4
    assert "120 tensors, 2.81 KiB, float32" in tree.texts  # belongs to the only node at the top


@pytest.mark.parametrize(
    "names",
    [
        [f"model.layers.{i // 90}.{'amn'[i % 3]}.m{i % 90}.w" for i in range(10_000)],
        [f"w{i}" for i in range(10_000)],
        [".".join(f"a_long_part_{'of_a_name_' * 2}{i % p}" for p in MIXED) for i in range(10_000)],
        [".".join(["a"] * 300) + f".{i}" for i in range(10_000)],
        [f"{'<&>' * 30}.{i % 100}.{chr(34) * 90}{i}" for i in range(10_000)],
        [f"{chr(0x1F600) * 60}{i}.\n\0{i}" for i in range(10_000)],
        [f"{'x' * 5_000}.{i}" for i in range(10)],
    ],
    ids=["model", "flat", "long", "deep", "escaped", "unprintable", "5,000 characters"],
)  # fmt: skip
def test_page_is_bounded_and_counts_hidden_tensors(names):
    state = StateDict.fromkeys(names, np.zeros(2, np.float16))
    text = state._repr_html_()
    tree = Tree(text)
    assert len(text.encode()) < MOST_BYTES
    assert f"{len(state):,} tensors" in tree.texts[0]
    assert tree.tags.count("details") == tree.tags.count("summary")
    assert tree.tensors == len(state)


def test_hidden_layers_can_be_opened_and_equal_ones_are_one_row():
    parts = {"attn.q": (2, 3), "attn.k": (2, 3), "norm": (3,)}
    arrays = {
        f"layers.{i}.{part}": np.zeros(shape, np.float32)
        for i in range(200)
        for part, shape in parts.items()
    }
    arrays["layers.150.norm"] = np.zeros(4, np.float32)
    state = StateDict(arrays)
    text = state._repr_html_()
    tree = Tree(text)
    assert tree.tensors == len(state) and len(text.encode()) < MOST_BYTES
    row_count = sum(f">{i}</b>" in text for i in range(200))
    more = text[text.index("<details class=more>") :]
    assert re.search(r"<b>\d+ … 149</b><i>\d+ alike, 3 tensors each</i>", more)
    assert "<b>150</b><i>3 tensors</i>" in more and "<b>norm</b><i>float32 (4,)</i>" in more
    assert re.search(r"<b>151 … \d+</b><i>\d+ alike, 3 tensors each</i>", more)
    counts = [int(count) for count in re.findall(r"(\d+) alike, 3", more)]
    assert row_count + sum(counts) == 200


def test_hidden_tensors_are_counted_beyond_the_size_of_a_page():
    state = StateDict({f"w{i}": np.zeros(i) for i in range(5_000)})
    text = state._repr_html_()
    more = text[text.index("<details class=more>") :]
    assert len(text.encode()) < MOST_BYTES and more.count("<div><b>w") > 50
    assert re.search(r"<div>… \d,\d{3} more</div></details>", more)


@settings(max_examples=tries(60), deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]) | st.just("."), max_size=30)))
def test_any_names_give_a_page_that_is_well_formed(names):
    state = StateDict.fromkeys(names, np.zeros(1, np.int8))
    tree = page(state)
    assert tree.tensors == len(state)
    assert set(tree.tags) <= {"div", "style", "p", "b", "i", "details", "summary"}
    assert state._repr_html_() == state._repr_html_()
    assert len(repr(state).splitlines()) <= 20


def test_names_and_attributes_are_escaped():
    hostile = "</b><script>alert('1')</script>&amp;\""
    state = ModelStateDict({hostile: np.zeros(1), f"a.{hostile}": np.zeros(1)}, model_type=hostile)
    tree = page(state)
    assert "script" not in tree.tags
    assert hostile in tree.texts and hostile in tree.texts[0]


def test_layer_row_has_the_sums_of_its_tensors():
    state = StateDict(
        {"a.x": np.zeros(4, np.float32), "a.y": np.zeros(4, np.float16), "b": np.zeros(2)}
    )
    texts = page(state).texts
    assert texts[0] == "StateDict: 3 tensors, 40 B"
    assert "a" in texts and "2 tensors, 24 B, mixed" in texts
    assert texts[texts.index("b") + 1] == "float64 (2,)"


def test_tensor_with_children_shows_its_shape():
    state = StateDict({"a": np.zeros(7), "a.b": np.zeros(2), "a.c": np.zeros(3), "d": np.zeros(1)})
    tree = page(state)
    assert tree.texts[1:3] == ["a", "3 tensors, 96 B, float64; itself (7,)"]
    assert tree.texts[3:5] == ["b", "float64 (2,)"] and tree.tensors == 4


def test_tensors_without_memory_are_shown(torch):
    state = StateDict(w=torch.empty(2, 3, dtype=torch.bfloat16, device="meta"))
    assert page(state).texts[1:] == ["w", "bfloat16 (2, 3)"]
    assert repr(state) == "StateDict: 1 tensor, 12 B\n  w  bfloat16  (2, 3)"


def test_a_name_with_line_breaks_stays_on_its_line():
    state = StateDict({"a\nb\r\u2028\u202e": np.zeros(2)})
    assert repr(state).splitlines()[1:] == [r"  a\nb\r\u2028\u202e  float64  (2,)"]
    assert page(state).texts[1] == r"a\nb\r\u2028\u202e"


def test_first_line_names_class_and_attributes():
    state = ModelStateDict(w=np.zeros(2), model_type="llama", layer_count=12)
    assert repr(state).splitlines()[0] == "ModelStateDict: 1 tensor, 16 B, llama, 12 layers"
    assert page(state).texts[0] == "ModelStateDict: 1 tensor, 16 B, llama, 12 layers"
    adam = OptimizerStateDict(optimizer_type="adamw", step=1000, learning_rate=1e-3)
    assert (
        repr(adam) == "OptimizerStateDict: 0 tensors, 0 B, adamw, step 1,000, learning rate 0.001"
    )
    assert len(repr(ModelStateDict(model_type="x" * 5000))) < 200


def test_a_subclass_without_attributes_can_be_shown():
    class Bare(OptimizerStateDict):
        def __init__(self):
            pass

    assert repr(Bare()) == "Bare: 0 tensors, 0 B, other, step 0, learning rate 0"


def test_tensors_without_cpu_memory_are_printed(torch):
    lazy = torch.nn.parameter.UninitializedParameter()
    for odd in (torch.eye(2).to_sparse(), lazy, torch.empty((2, 2), device="meta")):
        state = StateDict(a=odd, b=np.zeros(2))
        assert "\n  a  float32" in repr(state)
        assert "StateDict: 2 tensors" in page(state).texts[0]


def test_unchecked_entries_are_printed():
    state = StateDict(a=np.zeros(2))
    dict.__setitem__(state, "b", [1])
    dict.__setitem__(state, 3, np.zeros(1))
    first, *lines = repr(state).splitlines()
    assert first == "StateDict: 3 tensors, unknown size"
    assert lines == ["  3  float64  (1,)", "  a  float64  (2,)", "  b  list"]
