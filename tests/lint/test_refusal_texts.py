"""Each error text of the core is tested on one side of the C border."""

import pytest

refusal_texts = pytest.importorskip("refusal_texts", reason="needs tools/ of a checkout")


def test_every_error_text_is_tested_on_one_side(capsys):
    assert refusal_texts.main() == 0, (
        "give a text that neither side tests a row in tests/core; test one that both sides test "
        "in C, or in a row with the class of the error:\n" + capsys.readouterr().out
    )


def test_a_value_of_a_text_matches_any_instance():
    row = refusal_texts.C_TOKENS.findall('(st, c, "part %" PRIu64 " of %.*s%%", x, y, "z")')
    [parts] = refusal_texts.join_literals(refusal_texts.format_argument(row))
    text = refusal_texts.Text("x.c", parts)
    assert parts.split(refusal_texts.HOLE) == ["part ", " of ", "%"]
    assert text.whole.fullmatch("w: part 3 of it%") and not text.whole.fullmatch("part 3 of it")
