"""The exceptions: base classes, attributes, messages and pickling."""

import copy
import errno
import pickle

import numpy as np
import pytest

import mlstate
from mlstate import errors

WARNINGS = {
    "MLStateWarning": UserWarning,
    "CheckpointWarning": errors.MLStateWarning,
    "GradientWarning": RuntimeWarning,
}
ALL = [getattr(errors, name) for name in errors.__all__ if name not in WARNINGS]
FIELDS = ("name", "expected", "got", "path", "offset", "rank")
BUILTIN = {
    "MLStateError": Exception,
    "TensorNotFoundError": KeyError,
    "CompatibilityError": ValueError,
    "FormatError": ValueError,
    "ChecksumError": errors.FormatError,
    "CapacityError": ValueError,
    "StoreError": OSError,
    "StoreNotFoundError": FileNotFoundError,
    "StorePermissionError": PermissionError,
    "CollectiveError": RuntimeError,
    "GradientMismatchError": ValueError,
    "GradientNamesError": errors.GradientMismatchError,
    "UnstorableError": TypeError,
}


def test_every_error_class_is_exported():
    assert set(errors.__all__) == {*BUILTIN, *WARNINGS}


def test_one_category_selects_all_warnings():
    for name, base in {**WARNINGS, "StateShapeWarning": UserWarning}.items():
        home = errors if name in WARNINGS else mlstate.coreml
        assert issubclass(getattr(home, name), base)
        assert issubclass(getattr(home, name), errors.MLStateWarning)


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_family(error):
    assert issubclass(error, errors.MLStateError) and issubclass(error, BUILTIN[error.__name__])
    assert issubclass(error, Exception), "`except Exception` must catch it"
    assert error.__module__ == "mlstate.errors" and error.__doc__
    assert errors.MLStateError in error.__mro__
    for field in FIELDS:
        assert getattr(error("text"), field) is None


def test_missing_and_denied_files_are_store_errors():
    for error in (errors.StoreNotFoundError, errors.StorePermissionError):
        assert issubclass(error, errors.StoreError)


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_text_is_shown_as_it_is(error):
    assert str(error("Tensor 'w' not found")) == "Tensor 'w' not found"


def test_a_store_error_shows_number_text_and_path():
    error = errors.StoreNotFoundError(errno.ENOENT, "cannot open the file", "state.bin")
    assert str(error) == f"[Errno {errno.ENOENT}] cannot open the file: 'state.bin'"
    assert (error.errno, error.filename) == (errno.ENOENT, "state.bin")


def test_a_missing_file(tmp_path):
    path = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as caught:
        mlstate.load_file(path)
    assert type(caught.value) is errors.StoreNotFoundError
    assert caught.value.errno == errno.ENOENT
    assert str(caught.value).startswith(f"[Errno {errno.ENOENT}] ")
    assert "missing" in str(caught.value)


def raised(call, *arguments):
    with pytest.raises(errors.MLStateError) as caught:
        call(*arguments)
    return caught.value


def test_fields_of_a_capacity_error():
    error = raised(mlstate.compact_kv_state, np.zeros((2, 1, 512, 4), np.float16), 256, 300)
    assert type(error) is errors.CapacityError
    assert (error.expected, error.got) == ("0..256", "300")
    assert (error.name, error.path, error.offset, error.rank) == (None,) * 4


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles(error, protocol):
    instance = error("text")
    instance.name, instance.expected, instance.got, instance.rank = "w", "(2, 3)", "(4,)", 1
    back = pickle.loads(pickle.dumps(instance, protocol))
    assert type(back) is error and back.args == instance.args and str(back) == "text"
    assert [getattr(back, field) for field in FIELDS] == [
        getattr(instance, field) for field in FIELDS
    ]


def test_raised_errors_pickle_and_copy(tmp_path):
    bad = tmp_path / "bad"
    bad.write_bytes(b"nonsense")
    cache = np.zeros((2, 1, 8, 4), np.float16)
    for error in (
        raised(mlstate.compact_kv_state, cache, 2, 3),
        raised(mlstate.transition_kv_state, cache.ravel(), 12),
        raised(mlstate.load_file, bad),
        raised(mlstate.load_file, tmp_path / "missing"),
    ):
        for back in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(back) is type(error) and str(back) == str(error)
            assert [str(getattr(back, field)) for field in FIELDS] == [
                str(getattr(error, field)) for field in FIELDS
            ]


def test_fields_belong_to_the_instance():
    first, second = errors.CapacityError("a"), errors.CapacityError("b")
    first.name = "w"
    assert second.name is None and errors.CapacityError.name is None


def test_a_format_error_has_one_remedy():
    assert "`mlstate verify PATH`" in errors.ChecksumError("damaged").__notes__[0]
    assert not hasattr(errors.FormatError("damaged: copy it again"), "__notes__")
    assert not hasattr(errors.CompatibilityError("damaged"), "__notes__")
