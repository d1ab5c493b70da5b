"""Texts use plain English: the rate of unclear phrases in each folder only falls."""

import house
import pytest

language = pytest.importorskip("language", reason="needs tools/ of a checkout")


def test_no_folder_is_above_its_ceiling(capsys):
    assert language.main([]) == 0, capsys.readouterr().out


def test_marks_are_counted_in_comments_docstrings_and_pages_only():
    marks = dict.fromkeys(("is no X", "whoever"), 1)
    c = list(language.c_texts('/* Whoever calls is no fool. */ char *s = "is no text";'))
    python = list(language.python_texts('"""Whoever calls is no fool."""\nx = "is no text"\n'))
    page = list(language.page_texts("Whoever calls is no fool. `is no code`\n"))
    for texts in (c, python, page):
        text = " ".join(text for _, text in texts)
        counts = {name: len(language.PATTERNS[name].findall(text)) for name in marks}
        assert counts == marks


def test_identifiers_are_read_as_prose():
    python = "def test_what_is_lost(found):\n    one = found.made\n    return one\n"
    c = "TEST(what_is_lost)\n{\n    int found = x.made; /* one */\n}\n\nint f(int wire)\n{\n}\n"
    marks = {
        (local, words): language.name_marks(local, words)
        for _, local, words in [*language.python_names(python), *language.c_names(c)]
    }
    assert marks == {
        (False, "test what is lost"): 1,
        (True, "found"): 1,
        (True, "one"): 1,
        (False, "what is lost"): 1,
        (True, "x"): 0,
        (False, "f"): 0,
        (True, "wire"): 1,
    }


def test_ceilings_name_folders_that_exist():
    folders = {name.removesuffix(" identifiers") for name in language.ceilings()}
    assert all(name == "pages" or (house.ROOT / name).is_dir() for name in folders)
