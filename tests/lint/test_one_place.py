"""Documents name every dtype, layout and command of the tables, and nothing else lists them."""

import json
import re

import house
import pytest
from command_table import COMMANDS

from mlstate import _core
from mlstate._common.dtypes import DTYPES
from mlstate._sharding.layout import LAYOUT_NAMES, Layout

SCHEMA = json.loads((house.PACKAGE / "schema" / "index.schema.json").read_text())
KIND = SCHEMA["$defs"]["kind"]["properties"]


def test_the_schema_has_every_dtype():
    assert KIND["dtype"]["enum"] == [info.file_name for info in DTYPES]


def test_the_page_of_the_format_has_every_dtype_with_its_size():
    text = (house.ROOT / "docs" / "format_index.md").read_text()
    table = text.partition("| dtype | bytes | elements |")[2].partition("\n\n")[0]
    pairs = []
    for names, sizes in re.findall(r"^\| (`[^|]*) \| ([\d ]+) \|", table, re.MULTILINE):
        row = re.findall(r"`(\w+)`", names)
        each = [int(size) for size in sizes.split()]
        pairs += zip(row, each * len(row) if len(each) == 1 else each, strict=True)
    assert pairs == [(info.file_name, info.item_bytes) for info in DTYPES]


def test_the_page_of_dtypes_has_every_dtype_with_its_name_in_files():
    text = (house.ROOT / "docs" / "dtypes.md").read_text()
    pairs = []
    for names, file_names in re.findall(r"^\| (`[^|]*) \| (`[^|]*) \|", text, re.MULTILINE):
        both = [re.findall(r"`(\w+)`", column) for column in (names, file_names)]
        pairs += zip(*both, strict=True)
    assert sorted(pairs) == sorted((info.name, info.file_name) for info in DTYPES)


def test_the_schema_has_every_step_without_an_axis():
    steps = KIND["layout"]["items"]["prefixItems"][0]["anyOf"]
    named = []
    for name in LAYOUT_NAMES:
        layout, _ = _core.layout_parse(name)
        named += [axis for axis, _ in layout if isinstance(axis, str)]
    assert [step["const"] for step in steps if "const" in step] == named


@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_a_layout_has_a_constructor_and_is_in_every_list(name):
    layout, has_parts = _core.layout_parse(name)
    make = getattr(Layout, name)
    instance = make(3) if layout else make()
    assert instance.steps == tuple((axis, 3) for axis, _ in layout) and not has_parts
    assert f'``"{name}"``' in (Layout.__doc__ or "")
    assert f'`"{name}"` |' in (house.ROOT / "docs" / "checkpoint_ranks.md").read_text()


# Sources may choose some dtypes by name, but only the table has all of them.
LISTED = re.compile(r"float8_e4m3fnuz|F8_E4M3FNUZ")


def test_only_the_table_lists_all_dtypes():
    sources = [*house.c_files(house.CORE, house.BINDINGS), *house.python_files()]
    files = {
        path.relative_to(house.ROOT).as_posix()
        for path in sources
        if path.name != "dtypes.def"
        and LISTED.search(path.read_text().replace("DLPACK_F8_E4M3FNUZ", ""))
    }
    assert not files


def test_the_page_of_commands_has_every_command():
    text = (house.ROOT / "docs" / "commands.md").read_text()
    assert [name for name in COMMANDS if f"`mlstate {name}" not in text] == []
