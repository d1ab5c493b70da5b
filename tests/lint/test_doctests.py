"""Every example in a docstring runs, and every public name has a docstring."""

import doctest
import importlib
import inspect

import house
import pytest

# Importing these modules has side effects.
SKIPPED = {"mlstate.__main__"}
MODULES = [name for p in house.python_files() if (name := house.module_name(p)) not in SKIPPED]


class Finder(doctest.DocTestFinder):
    """Each example runs once, in the module that a name reports, even if defined elsewhere."""

    def _from_module(self, module, thing):
        if isinstance(thing, property) or not hasattr(thing, "__module__"):
            return super()._from_module(module, thing)
        return thing.__module__ == module.__name__


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, tmp_path, monkeypatch):
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        getattr(module, public)  # the top level imports a name on first use
    if name.startswith("mlstate.integrations."):
        framework = {"mpi": "mpi4py"}.get(name.split(".")[2], name.split(".")[2])
        pytest.importorskip(framework, reason="its examples need the framework")
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    report = []
    runner = doctest.DocTestRunner(optionflags=flags)
    for test in Finder().find(module, name):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def public_names():
    for name in MODULES:
        module = importlib.import_module(name)
        internal = name.startswith(("mlstate.cli", "mlstate.demo"))
        if internal or any(part.startswith("_") for part in name.split(".")):
            continue  # called by name only within the package
        for public in getattr(module, "__all__", ()):
            yield pytest.param(getattr(module, public), id=f"{name}.{public}")


@pytest.mark.parametrize("thing", list(public_names()))
def test_public_name_is_documented(thing):
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return
    text = inspect.getdoc(thing)
    assert text, "no docstring"
    if inspect.isroutine(thing) and inspect.signature(thing).parameters:
        assert "Parameters\n----------" in text, "no Parameters section"
    if inspect.isclass(thing):
        owners = [owner for owner in thing.__mro__ if owner.__module__.startswith("mlstate")]
        for name, member in [item for owner in owners for item in vars(owner).items()]:
            needs_docstring = not name.startswith("_") and (
                inspect.isroutine(member) or isinstance(member, property)
            )
            if needs_docstring and not hasattr(tuple, name):
                assert inspect.getdoc(member), f"{thing.__name__}.{name} has no docstring"
