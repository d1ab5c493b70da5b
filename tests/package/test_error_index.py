"""The page of error messages lists the texts of the sources under the page of their subject."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def error_index():
    spec = importlib.util.spec_from_file_location("error_index", ROOT / "docs" / "error_index.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def listed(error_index):
    return error_index.messages(ROOT)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("checkpoint_verify", "the file is longer than it was"),  # these five only `verify` prints
        ("checkpoint_verify", "the bytes have changed since they were written"),
        ("files", "the bytes have changed since their checksums were written"),
        ("checkpoint_load", "the list of its entries is damaged: …"),
        ("prompts", "another record is stored there"),
        ("kv", "a mask is made of floats, not of dtype …"),
        ("state", "dtype must be a dtype or its name, got …"),
        ("activation", "chain must be a Chain, got …; Chain.from_torch measures a module"),
    ],
)
def test_a_text_is_listed_under_its_page(listed, page, text):
    assert text in listed[page]


def test_each_page_of_the_index_exists(listed):
    assert all((ROOT / "docs" / f"{page}.md").is_file() for page in listed)


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize(
    ("query", "is_first"),
    [
        ("bytes have changed since they", True),
        ("MLStateError: dtype must be a dtype or its name, got str at line 7", True),
        ("resume on another number of ranks", False),
        ("dtype", False),
    ],
)
def test_search_ranks_the_index_by_text_of_a_message_and_pages_by_title(
    error_index, listed, tmp_path, query, is_first
):
    error_index.write_search_scorer(
        listed, ROOT / "docs" / "search_scorer.js", tmp_path / "scorer.js"
    )
    page = tmp_path / "page.html"
    page.write_text(
        "<meta charset=utf-8><script src=scorer.js></script><script>"
        'const score = (page, title = "") => Scorer.score([page, title, "", null, 5]);'
        'document.title = [score("api/error_messages") > score("state"),'
        f'score("proof", "Proof > One {query}") > score("state", "Page")];</script>',
        encoding="utf-8",
    )
    command = ["chromium", "--headless", "--no-sandbox", f"--user-data-dir={tmp_path}/profile"]
    command += ["--dump-dom", f"{page.as_uri()}?q={query.replace(' ', '+')}"]
    html = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"<title>{str(is_first).lower()},true</title>" in html
