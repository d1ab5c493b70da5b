"""Texts use plain English: the rate of unclear phrases in each folder only falls."""

import json

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
        found = {name: len(language.PATTERNS[name].findall(text)) for name in marks}
        assert found == marks


def test_ceilings_name_folders_that_exist():
    known = json.loads(language.CEILINGS.read_text())
    assert all(name == "pages" or (house.ROOT / name).is_dir() for name in known)
