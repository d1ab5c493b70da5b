"""The rename tool renames what its map names, and nothing else."""

import json

import pytest

tool = pytest.importorskip("rename_identifiers", reason="needs tools/ of a checkout")

PYTHON = """
@pytest.mark.parametrize("found", [1])
def test_what_is_lost(found):
    one = {"found": found}

    def inner():
        return f"{one['found']} {{one}} {found:>{one}}"

    return inner(), one.found


def other(found):
    return test_what_is_lost(found=found)
"""
C = """
struct sifting { int found; };
static int found_in(struct sifting *s, int found)
{
    return s->found + found; /* `found` */
}
TEST(what_is_lost)
{
    int found = found_in(NULL, 1);
}
"""


def test_renames_locals_of_one_function():
    scopes = {"test_what_is_lost": {"found": "count", "one": "row"}, "": {"other": "call"}}
    expected = PYTHON.replace("other(", "call(").replace("found=found", "count=found")
    head, tail = expected.split("def call(")
    for old, new in (('("found"', '("count"'), ("(found)", "(count)"), (": found}", ": count}")):
        head = head.replace(old, new)
    head = head.replace("one =", "row =").replace("{one[", "{row[").replace('{one}}"', '{row}}"')
    head = head.replace("{found:", "{count:").replace("one.found", "row.found")
    assert tool.PythonFile(PYTHON, scopes, strict=True).text() == head + "def call(" + tail


def test_refuses_names_in_use_and_unbound_names():
    for names in ({"found": "one"}, {"lost": "row"}):
        with pytest.raises(tool.RenameError):
            tool.PythonFile(PYTHON, {"test_what_is_lost": names}, strict=True)


def test_renames_c_by_function_and_tag_but_no_field():
    scopes = {"found_in": {"found": "count"}, "struct": {"sifting": "scan"}, "": {"found_in": "at"}}
    expected = C.replace("sifting", "scan").replace("found_in", "at").replace("`found`", "`count`")
    expected = expected.replace("int found)", "int count)").replace("+ found;", "+ count;")
    assert tool.CFile(C, scopes).text() == expected


def test_maps_name_scopes_and_names():
    for path in tool.MAPS.glob("*.json"):
        for scopes in json.loads(path.read_text()).values():
            for names in scopes.values():
                assert all(old != new and new.isidentifier() for old, new in names.items()), path
