"""Texts use plain English: few unclear phrases in the lines that a branch adds."""

import subprocess

import pytest

language = pytest.importorskip("language", reason="needs tools/ of a checkout")


def test_added_lines_have_few_marks(capsys):
    assert language.main(["--added"]) == 0, capsys.readouterr().out


def test_marks_of_added_lines_only_are_counted(tmp_path, monkeypatch, capsys):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *words], cwd=tmp_path)

    page, marks = tmp_path / "page.md", "Whoever calls is no fool.\n"
    monkeypatch.setattr(language, "ROOT", tmp_path)
    assert language.main(["--added"]) == 0 and "no main" in capsys.readouterr().out
    git("init", "-q", "-b", "main")
    for text, branch in ((9 * marks, "work"), (9 * marks + "A line.\n" + 2 * marks, "more")):
        page.write_text(text)
        git("add", ".")
        git("commit", "-qm", "page: write a line")
        assert language.main(["--added"]) == (branch == "more")
        git("checkout", "-qb", branch)
    assert "page.md:11: whoever: " in capsys.readouterr().out


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
