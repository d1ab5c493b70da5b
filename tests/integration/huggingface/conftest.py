"""Fixtures of several tests of prompts."""

import pytest

from mlstate.prompts import PromptStore


@pytest.fixture
def store(tmp_path):
    with PromptStore(tmp_path / "store", model="m", block_tokens=16) as store:
        yield store
