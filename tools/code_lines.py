#!/usr/bin/env python3
"""Count lines of code by top folder, without comments, docstrings and blank lines.

    code_lines.py              print the counts of the files that git tracks
    code_lines.py --check      fail if a folder has more lines than code_lines.json allows
    code_lines.py --lower      write lower counts to code_lines.json; never higher ones

A folder may grow only together with a line in CHANGELOG.md that names the capability that needs
the lines: then edit code_lines.json by hand.
"""

from __future__ import annotations

import io
import json
import pathlib
import re
import subprocess
import sys
import tokenize

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMITS = ROOT / "tools" / "code_lines.json"
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


def count() -> dict[str, int]:
    """Return the lines of code of each top folder."""
    names = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    counts = dict.fromkeys(FOLDERS, 0)
    for name in names.stdout.splitlines():
        path = ROOT / name
        counter = COUNTERS.get(path.suffix)
        if counter and path.exists():
            folder = next(f for f in FOLDERS if name.startswith(f"{f}/"))
            counts[folder] += counter(path.read_text(encoding="utf-8"))
    return counts


def main() -> None:
    counts = count()
    limits = json.loads(LIMITS.read_text())
    if "--lower" in sys.argv:
        lower = {folder: min(n, limits.get(folder, n)) for folder, n in counts.items()}
        LIMITS.write_text(json.dumps(lower, indent=2) + "\n")
        return
    for folder, lines in counts.items():
        print(f"{folder:12} {lines:7,}  limit {limits.get(folder, 0):7,}")
    print(f"{'all':12} {sum(counts.values()):7,}")
    grown = [f"{f} by {n - limits[f]}" for f, n in counts.items() if n > limits[f]]
    if "--check" in sys.argv and grown:
        sys.exit(
            f"lines of code grew: {', '.join(grown)}. Delete code, or raise tools/code_lines.json "
            "and name the new capability in CHANGELOG.md"
        )


if __name__ == "__main__":
    main()
