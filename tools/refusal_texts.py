#!/usr/bin/env python3
"""Print the error texts of the core that C and Python tests check, and those that neither does.

A text is a format of mls_fail, mls_fail_at or mls_fail_os in csrc/core. One test in tests/core
checks the whole text. Tests in Python check it only in rows such as (call, bad arguments, error,
words), which prove that a binding passes its arguments to the rule; or in any way, if C tests
cannot reach it. `fail_each` of tests/core checks the texts of MLS_E_MEMORY.
"""

from __future__ import annotations

import ast
import itertools
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
C_TOKENS = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\w+|[^\w\s]""", re.DOTALL
)
MACRO = re.compile(r"^# *define +\w+(?:\([^)]*\))?(.*)$", re.MULTILINE)
CONVERSION = re.compile(r"%(?!%)[-+ #0]*[\d*]*(?:\.[\d*]+)?(?:hh|h|ll|l|z|j|t)?[a-zA-Z]")
ESCAPE = re.compile(r"\\(\W)")
HOLE = "\0"  # a value between the constant parts of a text
# What a regular expression may contain between constant parts.
VARIABLE = re.compile(r"(?<!\\)(?:[.\])][*+?]|\\[dwsSW][+*]?|\[|[|^$()*+?{}]|\.\*)")
LEAST_SHARED = 10  # characters that identify a text


class Text(NamedTuple):
    """A format of mls_fail: its file and its constant parts, separated by HOLE."""

    file: str
    parts: str

    @property
    def whole(self) -> re.Pattern[str]:
        """Match an instance of the text, after names and before the words of an errno."""
        parts = (re.escape(part) for part in self.parts.split(HOLE))
        return re.compile(rf"(?:.*: )?{'.*?'.join(parts)}(?:: .*)?", re.DOTALL)

    @property
    def constant(self) -> int:
        """Count the constant characters."""
        return len(self.parts.replace(HOLE, ""))


def tokens(path: pathlib.Path) -> list[str]:
    """Split a C file, without its comments; the values of macros are statements."""
    text = path.read_text(encoding="utf-8").replace("\\\n", "")
    text = MACRO.sub(r";\1;", text)
    return [token for token in C_TOKENS.findall(text) if not token.startswith(("//", "/*"))]


def join_literals(row: list[str]) -> list[str]:
    """Join adjacent literals of C; a macro or a conversion becomes HOLE."""
    texts, literal = [], None
    for token, following in itertools.pairwise([*row, ";"]):
        if token.startswith('"'):
            literal = (literal or "") + token[1:-1]
        elif token.isidentifier() and (literal is not None or following.startswith('"')):
            literal = (literal or "") + "%s"
        elif literal is not None:
            texts.append(literal)
            literal = None
    texts += [] if literal is None else [literal]
    unescaped = (ESCAPE.sub(r"\1", text.replace("%%s", "%s")) for text in texts)
    return [CONVERSION.sub(HOLE, text).replace("%%", "%") for text in unescaped]


def format_argument(row: list[str]) -> list[str]:
    """Return the tokens of the first argument of a call that contains a literal."""
    depth, argument = 0, []
    for token in row:
        depth += (token in "([{") - (token in ")]}")
        if depth == 0 or (depth == 1 and token == ","):
            if any(part.startswith('"') for part in argument):
                break
            argument = []
            if depth == 0:
                break
        elif depth > 1 or token != "(":
            argument.append(token)
    return argument


def core_texts() -> list[Text]:
    """Return every text of mls_fail in the core, except for MLS_E_MEMORY."""
    texts = set()
    for path in sorted((ROOT / "csrc" / "core").rglob("*.[ch]")):
        row = tokens(path)
        file = path.relative_to(ROOT).as_posix()
        for i, token in enumerate(row):
            if token in ("mls_fail", "mls_fail_at", "mls_fail_os") and row[i + 1] == "(":
                call = row[i + 1 : i + 80]
                first = next((n for n, part in enumerate(call) if part.startswith('"')), 0)
                if "MLS_E_MEMORY" in call[:first]:
                    continue
                for parts in join_literals(format_argument(call)):
                    if re.search(r"\w", parts):
                        texts.add(Text(file, parts))
    return sorted(texts)


def c_literals() -> Iterator[str]:
    """Return the literals of the C tests, with 0 for each value."""
    for path in (ROOT / "tests" / "core").rglob("*.[ch]"):
        for literal in join_literals(tokens(path)):
            yield literal.replace(HOLE, "0")


def constant_parts(node: ast.expr) -> list[str]:
    """Return the constant parts of a literal, an f-string or a regular expression."""
    values = node.values if isinstance(node, ast.JoinedStr) else [node]
    constants = (value.value for value in values if isinstance(value, ast.Constant))
    texts = [text for text in constants if isinstance(text, str)]
    parts = [part for text in texts for part in (text, *VARIABLE.split(text))]
    return [re.sub(r"\\(\W)", r"\1", part) for part in parts]


def is_row(node: ast.AST) -> bool:
    """Whether a node is a row of a table of refusals: a tuple with a class of errors."""
    return isinstance(node, ast.Tuple) and any(
        isinstance(item, ast.Name) and item.id.endswith("Error") for item in node.elts
    )


def is_docstring(node: ast.AST) -> bool:
    """Whether a node is a statement that consists of a literal."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def python_parts(folder: str) -> tuple[set[str], set[str]]:
    """Return the constant parts of literals in a folder: outside rows of refusals, and in them."""
    outside: set[str] = set()
    inside: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        docstrings: set[int] = set()
        rows: set[int] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if is_docstring(node):
                docstrings.update(map(id, ast.walk(node)))
            elif is_row(node):
                rows.update(map(id, ast.walk(node)))
            elif isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings:
                parts = map(str.strip, constant_parts(node))
                (inside if id(node) in rows else outside).update(filter(is_identifying, parts))
    return outside, inside


def in_c(texts: list[Text]) -> set[Text]:
    """Return the texts that a C test has in full."""
    tested = set()
    patterns = [(text, text.whole) for text in texts]
    for literal in set(c_literals()):
        matched = [text for text, pattern in patterns if pattern.fullmatch(literal)]
        most = max((text.constant for text in matched), default=0)
        if most >= min(LEAST_SHARED, len(literal) // 2):
            tested.update(text for text in matched if text.constant == most)
    return tested


def in_python(texts: list[Text], parts: set[str], package: str = "") -> set[Text]:
    """Return the texts whose longest constant part, or words of a part, is among `parts`.

    Words of `package`, the package's own texts, do not identify a text of the core.
    """
    parts = {part for part in parts if part not in package}
    constants = {text: [part.strip() for part in text.parts.split(HOLE)] for text in texts}
    all_constants = "\n".join(itertools.chain.from_iterable(constants.values()))
    all_parts = "\n".join(parts)
    shared = [part for part in parts if part in all_constants]
    tested = set()
    for text, own in constants.items():
        longest = max(own, key=len)
        is_long = is_identifying(longest) and longest not in package
        if (is_long and longest in all_parts) or any(
            part in constant for constant in own for part in shared
        ):
            tested.add(text)
    return tested


def is_identifying(part: str) -> bool:
    """Whether words are long enough to identify a text."""
    return len(part) >= LEAST_SHARED and " " in part and re.search("[a-z]{3}", part) is not None


def unsettled() -> dict[str, list[Text]]:
    """Return the texts that both sides test, and those that neither does."""
    texts = core_texts()
    c = in_c(texts)
    package = "\n".join(set.union(*python_parts("mlstate")))
    outside, rows = python_parts("tests")
    return {
        "both": sorted(c & in_python(texts, outside, package)),
        "neither": sorted(set(texts) - c - in_python(texts, outside | rows)),
    }


def main() -> int:
    """Print the unsettled texts, and return their number."""
    lines = [
        f"{side}: {text.file}: {text.parts.replace(HOLE, '…')}"
        for side, texts in unsettled().items()
        for text in texts
    ]
    print(*lines, sep="\n")
    return len(lines)


if __name__ == "__main__":
    sys.exit(main() > 0)
