"""What `load`, `inspect`, `verify` and `mlstate convert` do with files of other programs."""

import contextlib
import re
import shutil
import warnings

import house
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="it writes most of the files")
import foreign_folders  # noqa: E402, F401 (registers kinds)
from foreign_files import FILES  # noqa: E402
from foreign_kinds import KINDS, VERIFIED, moments, network, table  # noqa: E402

import mlstate  # noqa: E402
from mlstate.cli import main  # noqa: E402
from mlstate.errors import MLStateError  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
LOADED = [title for title, kind in KINDS.items() if kind.holds]
REFUSED = [title for title, kind in KINDS.items() if not kind.holds]
WITHOUT_OPTIMIZER = [title for title in LOADED if "optimizer" not in KINDS[title].holds]
KEYS = ("state", "param_groups")  # of the state dict of an optimizer


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    """A function that returns the sample of a kind, which is written once."""
    written = {}

    def sample(title):
        if title not in written:
            try:
                written[title] = KINDS[title].sample(tmp_path_factory.mktemp("foreign"))
            except ModuleNotFoundError as error:
                pytest.skip(f"{error.name} is not installed")
        return written[title]

    return sample


def bits(value):
    """The dtype, shape and bytes of an array or a tensor."""
    if hasattr(value, "detach"):
        flat = value.detach().contiguous()
        dtype = str(value.dtype).removeprefix("torch.")
        return dtype, tuple(value.shape), flat.reshape(-1).view(torch.uint8).numpy().tobytes()
    array = np.asarray(value)
    return array.dtype.name, array.shape, array.tobytes()


def is_array(value):
    return hasattr(value, "detach") or isinstance(value, np.ndarray)


def is_same(value, expected):
    """Whether two trees are equal, bit for bit; lists and tuples are alike, as in JSON."""
    if is_array(expected):
        return is_array(value) and bits(value) == bits(expected)
    if isinstance(expected, dict):
        same = hasattr(value, "keys") and value.keys() == expected.keys()
        return same and all(is_same(value[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(is_same, value, expected))
    return type(value) is type(expected) and value == expected


def arrays_of(tree):
    """Return all arrays in a tree."""
    if isinstance(tree, dict):
        return arrays_of(list(tree.values()))
    if isinstance(tree, list | tuple):
        return [array for value in tree for array in arrays_of(value)]
    return [tree] if is_array(tree) else []


def assert_holds(loaded, kind):
    """The loaded state has the parts that the table names."""
    parts = [part for part in ("model", "optimizer") if getattr(loaded, part)]
    named, _, states = kind.holds.removesuffix(", …").partition(", states ")
    assert ", ".join(parts) == named
    others = loaded.states.keys() - set(states.split(", "))
    assert set(states.split(", ")) <= loaded.states.keys() | {""}
    assert not others or kind.holds.endswith("…"), others


def by_parameter(optimizer, sample):
    """Return the states by the names of the model's parameters, if the file has only numbers."""
    names = {f"param_{n}": name for n, name in enumerate(sample.model or ())}
    pairs = [(*name.rpartition("."), value) for name, value in optimizer.items()]
    return {f"{names.get(owner, owner)}.{state}": value for owner, _, state, value in pairs}


def assert_equal(loaded, sample):
    """The loaded state has the values that the program's own reader returns, bit for bit."""
    tied = (sample.model or {}).keys() - (loaded.model or {}).keys()
    stored = {bits(value) for value in (loaded.model or {}).values()}
    assert {bits(sample.model[name]) for name in tied} <= stored  # stored once
    for name, value in (loaded.model or {}).items():
        assert bits(value) == bits(sample.model[name]), name
    if sample.optimizer is not None:
        expected = by_parameter(sample.optimizer, sample)
        optimizer = by_parameter(loaded.optimizer or {}, sample)
        assert optimizer.keys() == expected.keys()
        for name, value in expected.items():
            assert bits(optimizer[name])[::2] == bits(value)[::2], name
    for name, state in sample.states.items():
        assert contains(loaded.states[name], state), name
    for name, value in sample.metadata.items():
        assert is_same(loaded.metadata[name], value), name
    saved = [bits(array) for array in arrays_of(loaded.states)]
    assert all(bits(value) in saved for value in sample.by_rank)


def contains(state, expected):
    """Whether a state is the one that is expected; a dict may have other entries too."""
    if not isinstance(expected, dict):
        return is_same(state, expected)
    return all(key in state and is_same(state[key], value) for key, value in expected.items())


def ignore_warnings_of(kind):
    """Ignore the warnings of this kind until the test ends."""
    if kind.warns:
        warnings.simplefilter("ignore", UserWarning)


def absent_words(kind, text):
    """Return the words of a refusal that a text lacks."""
    return [word for word in kind.words if word.lower() not in text.lower()]


@contextlib.contextmanager
def warned(kind, capsys=None):
    """Check that mlstate warns, or that a command prints the warning, if the kind has one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always" if kind.warns else "error", UserWarning)
        yield
    text = "".join(str(warning.message) for warning in caught)
    text += capsys.readouterr().err if capsys else ""
    assert re.search(kind.warns or "", text), text
    assert capsys or len(caught) == bool(kind.warns)


@pytest.mark.parametrize("title", LOADED)
def test_load_equals_the_reader_of_the_program(samples, title):
    with warned(KINDS[title]):
        loaded = mlstate.load(samples(title).path)
    assert_equal(loaded, samples(title))
    assert_holds(loaded, KINDS[title])


@pytest.mark.parametrize("title", LOADED)
def test_a_file_has_the_digest_of_its_loaded_tensors(samples, title):
    sample = samples(title)
    with warned(KINDS[title]):
        digest = mlstate.digest(sample.path)
    with warnings.catch_warnings():
        ignore_warnings_of(KINDS[title])
        loaded = mlstate.load(sample.path)
    assert digest == mlstate.digest(loaded)
    model = {name: sample.model[name] for name in loaded.model or {}}
    assert mlstate.digest(model).items() <= digest.items()


@pytest.mark.parametrize("title", REFUSED)
def test_a_refusal_names_the_file_and_the_remedy(samples, title):
    path = samples(title).path
    with pytest.raises(MLStateError) as raised:
        mlstate.load(path)
    text = str(raised.value)
    places = [path, *path.rglob("*")] if path.is_dir() else [path]
    assert any(place.name in text for place in places), text
    assert absent_words(KINDS[title], text) == []
    assert "weights_only" not in text or "torch.load" in text  # not an argument of mlstate
    assert "\n" not in text


@pytest.mark.parametrize("title", KINDS)
def test_inspect_lists_the_loaded_tensors(samples, title, capsys):
    path, kind = samples(title).path, KINDS[title]
    if kind.holds:
        with warned(kind):
            loaded = mlstate.load(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = {tensor.key for tensor in mlstate.inspect(path).tensors()}
            assert main(["inspect", str(path)]) == 0
        assert {*(loaded.model or {}), *(loaded.optimizer or {})} <= names
    else:
        with pytest.raises(MLStateError) as raised:
            mlstate.inspect(path).tensors()
        assert absent_words(kind, str(raised.value)) == []
        assert main(["inspect", str(path)]) == 2
    capsys.readouterr()


@pytest.mark.parametrize("title", KINDS)
def test_verify_has_three_answers(samples, title, capsys):
    path, verify = samples(title).path, KINDS[title].verify
    status = VERIFIED[verify][0]
    ignore_warnings_of(KINDS[title])
    assert main(["verify", str(path)]) == status
    capsys.readouterr()
    if verify == "unparsed":
        with pytest.raises(MLStateError):
            mlstate.verify(path)
        return
    report = mlstate.verify(path)
    assert str(report.path) == str(path)
    assert report.good == (status == 0)
    assert report.is_loadable == (status == 0)
    assert bool(report) == (status != 1) == (not report.problems)
    if status == 0:
        assert report.checksums == (verify == "good")


@pytest.mark.parametrize("title", LOADED)
def test_a_converted_file_holds_the_same(samples, title, tmp_path, capsys):
    sample = samples(title)
    # a folder of a whole checkpoint of Lightning is one of MLStateCheckpointIO
    own = tmp_path / ("own.pt" if sample.path.suffix == ".ckpt" else "own")
    with warned(KINDS[title], capsys):
        assert main(["convert", str(sample.path), str(own)]) == 0
    loaded = mlstate.load(own)
    assert_equal(loaded, sample)
    assert_holds(loaded, KINDS[title])
    suffix = ".dcp" if (sample.path / ".metadata").exists() else sample.path.suffix
    can_hold = "…" not in KINDS[title].holds  # all entries of DeepSpeed: no
    if suffix in (".pt", ".npz", ".safetensors", ".dcp") and can_hold:
        back = tmp_path / f"back{suffix}"
        assert main(["convert", str(own), str(back)]) == 0
        assert_equal(mlstate.load(back), sample)
    capsys.readouterr()


@pytest.mark.parametrize("title", REFUSED)
def test_a_refused_file_is_not_converted(samples, title, tmp_path, capsys):
    assert main(["convert", str(samples(title).path), str(tmp_path / "own")]) == 2
    assert list(tmp_path.iterdir()) == []
    assert absent_words(KINDS[title], capsys.readouterr().err) == []


@pytest.mark.parametrize("title", LOADED)
def test_targets_are_filled(samples, title):
    sample = samples(title)
    with warned(KINDS[title]):
        loaded = mlstate.load(sample.path)
    part = "model" if loaded.model else "optimizer"
    target = {name: np.zeros_like(array) for name, array in getattr(loaded, part).items()}
    ignore_warnings_of(KINDS[title])
    mlstate.load(sample.path, into={part: target})
    assert is_same(target, dict(getattr(loaded, part)))
    if sample.fills:
        assert_resumes(sample)


def assert_resumes(sample):
    """A load restores the run of torch that the file holds, and warns of a state without entry."""
    run, saved = network(seed=1, steps=1), network()
    mlstate.load(sample.path, into={"model": run[0], "optimizer": run[1]})
    assert is_same(run[0].state_dict(), saved[0].state_dict())
    states, groups = ([each[1].state_dict()[k] for each in (run, saved)] for k in KEYS)
    assert is_same(*states)
    assert is_same(*({k: group[0][k] for k in ("lr", "betas", "eps")} for group in groups))
    with pytest.warns(UserWarning, match="other"):
        mlstate.load(sample.path, into={"model": run[0], "states": {"other": run[2]}})


@pytest.mark.parametrize("title", WITHOUT_OPTIMIZER)
def test_an_optimizer_that_is_not_stored_is_an_error(samples, title):
    sample = samples(title)
    ignore_warnings_of(KINDS[title])
    target = dict(mlstate.load(sample.path).model)
    _, optimizer, _ = network()
    before = moments(optimizer.state_dict())
    for strict in (True, False):
        with pytest.raises(MLStateError, match="optimizer"):
            into = {"model": target, "optimizer": optimizer}
            mlstate.load(sample.path, into=into, strict=strict)
    assert is_same(moments(optimizer.state_dict()), before)


# ---- any suffix ----

SUFFIXES = ("", ".safetensors", ".npz", ".pt", ".bin", ".ckpt", ".pth.tar", ".th", ".model",
            ".h5", ".json")  # fmt: skip


def outcome(path):
    """Return the loaded values, or the error's text without the path, and verify's status."""
    try:
        loaded = mlstate.load(path)
        result = [
            {name: bits(value) for name, value in (part or {}).items()}
            for part in (loaded.model, loaded.optimizer)
        ]
    except MLStateError as error:
        result = type(error), re.sub(r"\S*\bcontent[\w.]*", "PATH", str(error))
    return result, main(["verify", str(path)])


@pytest.mark.parametrize("title", FILES)
def test_the_suffix_does_not_matter(samples, title, tmp_path, capsys):
    source = samples(title).path
    (tmp_path / "right").mkdir()
    right = shutil.copy(source, tmp_path / "right" / f"content{''.join(source.suffixes)}")
    expected = outcome(right)
    for suffix in SUFFIXES:
        path = shutil.copy(source, tmp_path / f"content{suffix}")
        assert outcome(path) == expected, suffix
    capsys.readouterr()


# ---- the page ----


def test_the_page_has_the_table():
    text = (house.ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    assert table() in text, "python tests/support/foreign_folders.py prints the table"
    assert len(KINDS) >= 60 and {kind.verify for kind in KINDS.values()} == VERIFIED.keys()
