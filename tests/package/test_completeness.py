"""Each public name and each command is tested and documented, and nothing else is shown.

`docs/conf.py` checks at each build that all of them are in the inventory, objects.inv.
"""

import importlib
import re
from pathlib import Path

import pytest
from golden.pickled_objects import PUBLIC

from mlstate.cli.command_line import _COMMANDS

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [module.__name__.rpartition(".")[2] for module in _COMMANDS]


@pytest.fixture(scope="module")
def test_text():
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def exports(module):
    return importlib.import_module(module).__all__


@pytest.mark.parametrize("module", PUBLIC)
def test_dir_of_a_public_module_shows_its_exports_alone(module):
    assert dir(importlib.import_module(module)) == sorted(exports(module))


@pytest.mark.parametrize("module", PUBLIC)
def test_each_public_name_is_in_the_tests(module, test_text):
    assert not set(exports(module)) - set(re.findall(r"\w+", test_text))


@pytest.mark.parametrize("module", PUBLIC)
def test_each_public_name_is_on_a_page(module):
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.stem != "changelog"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    names = {name for name in exports(module) if not name.startswith("__")}
    assert not names - set(re.findall(r"\w+", text))


def test_each_command_is_in_the_tests_and_the_pages(test_text):
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    for command in COMMANDS:
        assert re.search(rf"""["'](mlstate )?{command}\b""", test_text), command
        assert re.search(rf"mlstate {command}\b", pages), command
