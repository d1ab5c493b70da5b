"""The example of a chat: killed and started again, its history is not computed again."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import child
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "prompt_chat.py"
ENGINES = {"transformers": [], "mlx_lm": ["--mlx"]}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLE.exists(), reason="no examples beside these tests"),
]


def start(folder, *arguments):
    command = [sys.executable, "-u", EXAMPLE, "--folder", folder, "--tokens", "4", *arguments]
    environment = os.environ | child.PATHS
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_chat_goes_on_from_its_last_answer(tmp_path, engine):
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"needs {engine}")
    messages = ["Who are you?"] + ["More."] * 500
    with start(tmp_path, *ENGINES[engine], *messages) as process:
        first = [process.stdout.readline() for _ in range(3)]
        process.kill()
    assert first[0] == "Who are you?\n" and " 0 of 12 tokens restored" in first[2]
    with start(tmp_path, *ENGINES[engine], "Go on.") as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    restored, count = map(int, re.search(r"(\d+) of (\d+) tokens restored", output).groups())
    assert restored == count - len("Go on.") - 1 >= 15  # all but the last token of the answer


def test_a_killed_chat_stays_within_its_budget(tmp_path):
    """The chat outgrows the budget, of about 70 tokens, before it is killed."""
    pytest.importorskip("transformers")

    def bytes_on_disk():
        return sum(path.stat().st_size for path in (tmp_path / "prompts").iterdir())

    budget = 600_000
    options = ["--max-bytes", str(budget)]
    with start(tmp_path, *options, *["More."] * 500) as process:
        for _ in range(30):  # three lines for each of ten turns
            assert process.stdout.readline()
        process.kill()
    assert bytes_on_disk() <= budget
    with start(tmp_path, *options, "Go on.") as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "tokens restored" in output
    assert 0 < bytes_on_disk() <= budget
