"""Shared by the lint tests: lists of files, and C text without its comments."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "csrc" / "core"
BINDINGS = ROOT / "csrc" / "python"
PUBLIC = ROOT / "csrc" / "public"
INCLUDE = ROOT / "include"
PACKAGE = ROOT / "mlstate"
TESTS = ROOT / "tests"

# One file per instruction set: the test of the base name runs every variant.
VARIANT = re.compile(r"_(scalar|vector|sse\w*|avx\w*|neon|sve|x86|armv8|arm)$")


def base_name(stem):
    """`copy` for `copy_avx2`: the name without the instruction set."""
    return VARIANT.sub("", stem)


def c_files(*folders):
    """All sources, headers and tables of macros of `folders`, sorted."""
    return sorted(p for f in folders for end in ("[ch]", "def") for p in f.rglob(f"*.{end}"))


def python_files():
    """All Python files of the package, sorted."""
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path):
    """`mlstate.cli` for mlstate/cli/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def relative(path):
    """A short name for messages."""
    return path.relative_to(ROOT).as_posix()


_C_TOKEN = re.compile(
    r"""/\*.*?\*/ | //[^\n]* | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'""", re.DOTALL | re.VERBOSE
)


def c_code(path):
    """The C text with comments blanked and strings emptied; line numbers are preserved."""

    def blank(match):
        text = match.group()
        if text[0] in "\"'":
            return text[0] * 2
        return "\n" * text.count("\n")

    return _C_TOKEN.sub(blank, path.read_text(encoding="utf-8"))


def matches(pattern, path):
    """`file:line: text` for each line of the C code that matches `pattern`."""
    expression = re.compile(pattern)
    return [
        f"{relative(path)}:{number}: {line.strip()}"
        for number, line in enumerate(c_code(path).splitlines(), 1)
        if expression.search(line)
    ]


@cache
def tracked_files():
    """Every file that is tracked by git, or would be."""
    git = shutil.which("git")
    if git and (ROOT / ".git").exists():
        command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        paths = [ROOT / name for name in listing.decode().split("\0") if name]
    else:
        hidden = {".venv", "build", "dist", "__pycache__"}
        paths = [
            path
            for path in ROOT.rglob("*")
            if path.suffix != ".so"
            and not any(
                part in hidden or part.endswith(("_cache", ".egg-info"))
                for part in path.relative_to(ROOT).parts
            )
        ]
    return sorted(path for path in paths if path.is_file())


@cache
def text_files():
    """(path, text) of each tracked file in UTF-8, without the images in notebooks."""
    texts = []
    for path in tracked_files():
        raw = path.read_bytes()
        if b"\0" not in raw[:8192]:
            text = raw.decode("utf-8", errors="replace")
            if path.suffix == ".ipynb":
                text = re.sub(r'"image/png": "[^"]*"', "", text)
            texts.append((path, text))
    return texts
