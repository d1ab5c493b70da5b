#!/usr/bin/env python3
"""Print lines of code by folder and by capability, without comments, docstrings and blank lines.

A new capability has at most 2,500 lines of source, and at most as many lines of tests. A file
belongs to the first capability of `CAPABILITIES` whose words its path contains.
"""

from __future__ import annotations

import ast
import io
import pathlib
import re
import subprocess
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator

import refusal_texts

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = (
    "csrc/core",
    "csrc/public",
    "csrc/python",
    "mlstate",
    "tests",
    "tools",
    "benchmarks",
    "examples",
    "docs",
    "include",
)
CAPABILITIES = {
    "tools, examples, benchmarks": r"^(tools|examples|docs|benchmarks)/",
    "prompts stored once": r"prompt",
    "followed weights": r"follow|delta|published",
    "object stores": r"remote|object_server|gcs|azure|s3_",
    "Hugging Face, quantised files": r"huggingface|quantized_(?!kv)|_quantized|scale|block_codes",
    "Core ML, Core AI, Swift": r"coreml|coreai|swift|mlpackage|anemll",
    "KV caches": r"/kv|kv_|cache|mlx|attention",
    "activation and plans": r"activation|planning|planner|strateg|plan_model",
    "groups of ranks": r"collectives|shm|distributed|/mpi|testing|group_|_ranks|hosts",
    "gradients": r"fsdp|gradient|hook|reduce|bucket",
    "tiers": r"tier",
    "values beside tensors": r"_states|states_|optimizer|trainers|lightning|resume|training",
    "foreign files": r"convert|foreign|_files|_layouts|_sources|safetensors|/files|any_format",
    "state dicts": r"/state/|state_|_tensors|diff|load_into",
    "attacks": r"tests/(attacks|hostile|leaks|golden)",
    "checkpoints": r"checkpoint|sharding|crc32c",
    "commands": r"cli|command|plot|demo",
}
C_TOKENS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
# Tokens that do not count as code.
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def python_lines(text: str) -> int:
    """Return the number of lines with code; a string that is a statement is a docstring."""
    code: set[int] = set()
    is_start = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in LAYOUT:
            is_start = is_start or token.type not in (tokenize.COMMENT, tokenize.NL)
            continue
        if not (is_start and token.type == tokenize.STRING):
            code.update(range(token.start[0], token.end[0] + 1))
        is_start = False
    return len(code)


def _without_comment(match: re.Match[str]) -> str:
    text = match.group()
    return re.sub(r"[^\n]+", "", text) if text.startswith("/") else text


def c_lines(text: str) -> int:
    """Return the number of lines that have more than comments."""
    return sum(bool(line.strip()) for line in C_TOKENS.sub(_without_comment, text).splitlines())


def shell_lines(text: str) -> int:
    """Return the number of lines that are neither blank nor comments."""
    lines = (line.strip() for line in text.splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


COUNTERS = {
    ".py": python_lines,
    ".pyi": python_lines,
    ".c": c_lines,
    ".h": c_lines,
    ".inc": c_lines,
    ".def": c_lines,
    ".sh": shell_lines,
    ".mk": shell_lines,
}


def counted_files() -> Iterator[tuple[str, str, int]]:
    """Yield name, text and number of lines of code of each file that git tracks."""
    names = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in names.stdout.splitlines():
        path = ROOT / name
        counter = COUNTERS.get(path.suffix)
        if counter and path.exists():
            text = path.read_text(encoding="utf-8")
            yield name, text, counter(text)


def lines_of_tests(text: str) -> int:
    """Return the lines of code inside the test functions of a Python file."""
    rows = text.splitlines()
    inside: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            inside += [*rows[first - 1 : node.end_lineno], ""]
    return python_lines(textwrap.dedent("\n".join(inside)))


def capability_of(name: str) -> str:
    """Return the capability that a file belongs to."""
    words = name.lower()
    return next((c for c, text in CAPABILITIES.items() if re.search(text, words)), "shared")


def main() -> None:
    """Print both tables, and the share of Python test lines that are inside tests."""
    folders = dict.fromkeys(FOLDERS, 0)
    source: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    shares = Counter[str]()
    for name, text, lines in counted_files():
        folders[next(f for f in FOLDERS if name.startswith(f"{f}/"))] += lines
        is_test = name.startswith("tests/")
        (tests if is_test else source)[capability_of(name)] += lines
        if is_test and name.endswith(".py"):
            shares["all"] += lines
            shares["inside"] += lines_of_tests(text)
    for folder, lines in folders.items():
        print(f"{folder:28}{lines:8,}")
    print(f"{'all':28}{sum(folders.values()):8,}\n\n{'capability':28}{'source':>8}{'tests':>8}")
    for name, _ in (source | tests).most_common():
        ratio = f"{tests[name] / source[name]:7.2f}" if source[name] else ""
        print(f"{name:28}{source[name]:8,}{tests[name]:8,}{ratio}")
    share = shares["inside"] / shares["all"]
    print(f"\n{share:.0%} of the lines of Python tests are inside tests")
    counts = {side: len(texts) for side, texts in refusal_texts.unsettled().items()}
    print(f"error texts of the core: {counts['both']} tested twice, {counts['neither']} by no test")


if __name__ == "__main__":
    main()
