"""The page of error messages lists the texts of the sources under the page of their subject."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def listed():
    spec = importlib.util.spec_from_file_location("error_index", ROOT / "docs" / "error_index.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.messages(ROOT)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("checkpoints", "the file is longer than it was"),  # these five only `verify` prints
        ("checkpoints", "the bytes have changed since they were written"),
        ("checkpoints", "the bytes have changed since their checksums were written"),
        ("checkpoints", "the list of its entries is damaged: …"),
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
