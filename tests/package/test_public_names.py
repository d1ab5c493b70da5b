"""Every public name reports the public module that exports it."""

import importlib
import inspect
import pickle
import pkgutil
import pydoc
import re
import typing

import child
import pytest
from golden.pickled_objects import PUBLIC

import mlstate
from mlstate._common.set_module import set_module
from mlstate.checkpoint import Layout
from mlstate.state.records import Difference

INTERNAL = ("mlstate.cli", "mlstate.demo")
RE_EXPORTS = {  # every other name is defined by the module that exports it
    "mlstate": set(mlstate.__all__)
    - {"convert", "diff", "digest", "get_include", "get_library_dir", "info"},
    "mlstate.kv": {"compact_coreml_state", "transition_coreml_state"},
}


LISTED = """
    Chain CheckpointManager Follower KVState MLStateError PromptStore Publisher StateDict
    compact_kv_state convert diff digest export_huggingface get_include get_library_dir info
    inspect load load_file load_into plan rename reshard save save_async save_file
    transition_kv_state verify
"""
UNLISTED = """
    CapacityError ChecksumError CollectiveError CompatibilityError FormatError ModelStateDict
    OptimizerStateDict OptimizerType StoreError Stateful TensorNotFoundError set_num_threads
"""


def exported(module_name):
    """Exported names and their objects, without modules and constants."""
    module = importlib.import_module(module_name)
    things = [(name, getattr(module, name)) for name in module.__all__]
    assert len(set(module.__all__)) == len(things) and None not in [thing for _, thing in things]
    return [(name, thing) for name, thing in things if callable(thing)]


HOMES = [(m, *item) for m in PUBLIC for item in exported(m) if item[0] not in RE_EXPORTS.get(m, ())]
home = pytest.mark.parametrize(
    ("module", "name", "thing"), HOMES, ids=lambda value: value if isinstance(value, str) else ""
)


def is_public(name):
    return not any(part.startswith("_") for part in name.split("."))


def test_the_public_modules_are_all_known():
    modules = {m.name for m in pkgutil.walk_packages(mlstate.__path__, "mlstate.")}
    modules = {n for n in modules if is_public(n) and not n.startswith(INTERNAL)}
    assert modules | {"mlstate"} == {*PUBLIC, "mlstate.integrations"}  # which exports no names


def test_the_top_level_lists_few_names():
    assert {name for name, _ in exported("mlstate")} == set(LISTED.split())
    assert len(LISTED.split()) <= 28


def test_other_names_of_the_top_level_are_not_listed_but_importable():
    for name in UNLISTED.split():
        thing = getattr(mlstate, name)
        assert getattr(importlib.import_module(thing.__module__), name) is thing
    lazy = {name for names in mlstate._NAMES.values() for name in names}
    assert lazy == {*LISTED.split(), *UNLISTED.split()}
    aliases = re.findall(r"import (\w+) as \1\n", inspect.getsource(mlstate))
    assert {*aliases} == {"testing", *UNLISTED.split()}, "type checkers accept only `X as X`"
    assert mlstate.testing.assert_same_bits and "testing" not in dir(mlstate)


@home
def test_a_misspelled_option_of_a_public_call_is_answered(module, name, thing):
    members = vars(thing).items() if inspect.isclass(thing) else [(name, thing)]
    for member, call in members:
        call = getattr(call, "__func__", call)
        if not inspect.isfunction(call) or call.__module__ != module:
            continue
        if member.startswith("_") and member != "__init__":
            continue
        for parameter in inspect.signature(call).parameters.values():
            if parameter.default is not parameter.empty:
                with pytest.raises(TypeError, match="; "):
                    call(**{f"{parameter.name}x": None})


@home
def test_a_public_name_reports_its_public_module(module, name, thing):
    assert (thing.__module__, thing.__qualname__) == (module, name)
    assert pydoc.plain(pydoc.render_doc(thing)).splitlines()[0].endswith(f"in module {module}")
    if inspect.isclass(thing):
        kind = "enum" if "enum" in repr(thing) else "class"
        assert repr(thing).startswith((f"<{kind} '{module}.{name}'", f"<{kind} '{name}'"))
    assert pickle.loads(pickle.dumps(thing)) is thing
    assert module in pickle.dumps(thing, 0).decode()


@pytest.mark.parametrize("module", RE_EXPORTS)
def test_a_name_of_several_modules_has_one_home(module):
    homes = {(name, thing) for _, name, thing in HOMES}
    for name, thing in exported(module):
        assert (name, thing) in homes


@home
def test_methods_report_the_module_of_their_class(module, name, thing):
    if not inspect.isclass(thing):
        return
    for key, member in vars(thing).items():
        member = getattr(member, "__func__", member)
        if inspect.isfunction(member) and member.__qualname__ == f"{name}.{key}":
            assert is_public(member.__module__), key


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("_sharding.layout", "checkpoint"),
        ("_safetensors", "checkpoint"),
        ("kv._transition_plan", "coreml.records"),
    ],
)
def test_names_of_another_folder_report_it_before_it_is_imported(file, module):
    script = (
        f"import sys, mlstate.{file} as file\n"
        f"assert 'mlstate.{module}' not in sys.modules\n"
        f"homes = {{name: thing.__module__ for name, thing in vars(file).items() "
        f"if getattr(thing, '__module__', '') == 'mlstate.{file}'}}\n"
        f"import mlstate.{module} as public\n"
        f"assert not homes.keys() & set(public.__all__), homes\n"
    )
    child.run(script)


def test_methods_can_be_pickled():
    for method in (Layout.rows, Layout.shape, Layout.rows(2).shape):
        again = pickle.loads(pickle.dumps(method))
        assert again.__qualname__ == method.__qualname__
        assert getattr(again, "__self__", None) == getattr(method, "__self__", None)
        assert b"mlstate._" not in pickle.dumps(method)


def test_sources_of_functions_and_methods_are_found():
    assert inspect.getsource(mlstate.save_file).count("def save_file(") == 1
    assert inspect.getsource(Layout.shard).startswith("    def shard(")


def test_annotations_resolve_in_their_module():
    assert typing.get_type_hints(Difference)["source"] is typing.Any
    config = typing.get_type_hints(mlstate.activation.CheckpointConfig)
    assert config["interval"] is int


def test_nested_classes_and_wrapped_methods_follow():
    @set_module("mlstate.state")
    class Outer:
        class Inner:
            def method(self): ...

        @staticmethod
        def static(): ...

        @classmethod
        def of_class(cls): ...

        borrowed = inspect.getsource

    for thing in (Outer, Outer.Inner, Outer.Inner.method, Outer.static, Outer.of_class):
        assert thing.__module__ == "mlstate.state"
    assert Outer.borrowed.__module__ == "inspect"
