"""The lines that the page about other libraries counts; test_docs_examples.py runs its examples."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming_from.md"


def code_lines(text):
    return [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def test_the_page_counts_lines_right():
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python [^\n]*lines=(\d+)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 7
    counted = [len(code_lines(block)) for _, block in blocks]
    assert counted == [int(stated) for stated, _ in blocks]
    dcp, mlstate_lines, safetensors, mlstate_file_lines, lightning, plugin, manager = counted
    assert f"| lines | {dcp} | {mlstate_lines} |" in text
    assert f"| lines | {safetensors} | {mlstate_file_lines} |" in text
    row = f"| lines for the rules | {lightning} | {lightning}, and {plugin} for the Trainer |"
    assert f"{row} {manager}, with the loop |" in text
