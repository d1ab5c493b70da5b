"""The text of the demo's character model: code of Python's own library.

The text is read from the library installed next to the interpreter that runs this. Docstrings and
comments are removed, so that the few weights learn code only.
"""

from __future__ import annotations

import ast
import io
import sysconfig
import tokenize
from pathlib import Path

# Printable ASCII and the newline: a character's index is its token.
VOCABULARY = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))
SOURCES = (
    "argparse.py", "base64.py", "bisect.py", "calendar.py", "cmd.py", "code.py", "codecs.py",
    "collections/__init__.py", "configparser.py", "contextlib.py", "copy.py", "csv.py",
    "dataclasses.py", "difflib.py", "fnmatch.py", "fractions.py", "functools.py", "glob.py",
    "gzip.py", "heapq.py", "json/decoder.py", "json/encoder.py", "logging/__init__.py",
    "pathlib.py", "pprint.py", "queue.py", "random.py", "sched.py", "shelve.py", "shlex.py",
    "shutil.py", "statistics.py", "string.py", "subprocess.py", "tarfile.py", "tempfile.py",
    "textwrap.py", "threading.py", "timeit.py", "tokenize.py", "traceback.py", "weakref.py",
    "zipfile.py",
)  # fmt: skip


def docstring_lines(source: str) -> set[int]:
    """Return the numbers of all lines that belong to a docstring."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, owners) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def code_only(source: str) -> str:
    """Return ``source`` without docstrings and comments, at most one blank line in a row."""
    cut = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            cut[token.start[0]] = token.start[1]
    dropped = docstring_lines(source)
    lines_kept: list[str] = []
    for number, line in enumerate(source.splitlines(), start=1):
        text = line[: cut[number]] if number in cut else line
        text = text.rstrip().expandtabs(4)
        foreign = not all(character in VOCABULARY for character in text)
        if number in dropped or foreign or (number in cut and not text):
            continue
        if text or (lines_kept and lines_kept[-1]):
            lines_kept.append(text)
    return "\n".join(lines_kept) + "\n"


def load_text() -> tuple[str, list[str]]:
    """Return the training text and the names of the library files in it."""
    library = Path(sysconfig.get_path("stdlib"))
    names = [name for name in SOURCES if (library / name).is_file()]
    if len(names) < len(SOURCES) // 2:
        raise SystemExit(
            f"found only {len(names)} of {len(SOURCES)} library sources; is the "
            "standard library of this Python installed as plain .py files?"
        )
    text = "".join(code_only((library / name).read_text(encoding="utf-8")) for name in names)
    return text, names


def load_unseen(count: int, length: int) -> list[str]:
    """Return texts of `length` characters from library files that the model was not trained on.

    They are spread evenly over the code of all modules that are one file, and begin at the start
    of a line.
    """
    library = Path(sysconfig.get_path("stdlib"))
    names = sorted({path.name for path in library.glob("*.py")}.difference(SOURCES))
    text = "".join(code_only((library / name).read_text(encoding="utf-8")) for name in names)
    distance = (len(text) - 2 * length) // count
    starts = [text.index("\n", number * distance) + 1 for number in range(count)]
    return [text[start : start + length] for start in starts]
