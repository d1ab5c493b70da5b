"""Classes that users only receive are in the module `records` of their package, nowhere else."""

import importlib

import child
import pytest
from golden.pickled_objects import PUBLIC

MODULES = [name for name in PUBLIC if name.endswith(".records")]


@pytest.mark.parametrize("name", MODULES)
def test_a_package_lists_its_records_module_instead_of_the_classes(name):
    package, records = (
        importlib.import_module(name.rpartition(".")[0]),
        importlib.import_module(name),
    )
    assert "records" in package.__all__ and records.__all__
    assert not [class_name for class_name in records.__all__ if hasattr(package, class_name)]


@pytest.mark.parametrize("name", MODULES)
def test_records_are_found_without_an_import_of_their_module(name):
    package, first = name.rpartition(".")[0], importlib.import_module(name).__all__[0]
    child.run(f"import {package}\nassert {name}.{first}.__module__ == {name!r}")
