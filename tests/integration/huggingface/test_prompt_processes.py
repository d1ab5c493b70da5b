"""Prompts of almost all model types continue with the same bits in another process."""

from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import numpy as np
import pytest
from needs import needs
from restored_prompts import put_prompt, restore_prompt

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
KINDS = []
if find_spec("transformers") and find_spec("torch"):
    from model_types import CONFIG_MAPPING
    from model_types import TYPES as TRANSFORMERS_TYPES

    mark = [pytest.mark.torch, needs("transformers")]
    names = [kind for kind in TRANSFORMERS_TYPES if kind in CONFIG_MAPPING]
    KINDS += [pytest.param("transformers", kind, marks=mark) for kind in names]
if find_spec("mlx_lm") and find_spec("mlx"):
    from mlx_types import TYPES as MLX_TYPES

    KINDS += [pytest.param("mlx", kind, marks=needs("mlx", "mlx_lm")) for kind in MLX_TYPES]


@pytest.fixture(scope="module")
def other_process():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(("engine", "kind"), KINDS)
def test_a_stored_prompt_continues_in_another_process(tmp_path, other_process, engine, kind):
    expected = put_prompt(engine, kind, tmp_path)
    got = other_process.submit(restore_prompt, engine, kind, tmp_path).result()
    assert np.array_equal(got, expected)
