#!/usr/bin/env python3
"""Count marks of unclear English in comments, docstrings, pages and identifiers, by folder.

``python tools/language.py [--words MARK] [FOLDER ...]``. A mark is a phrase that plain technical
English avoids, such as "whoever" or "is no file". A rate is the number of marks in 1,000 words.
``--words MARK`` prints each place of one mark, or of `all`. ``--added`` reads only the lines that
the branch added since it left main, and fails if their rate is above `CEILING`.

The names of tests, functions, locals and parameters are read as prose, split at underscores.
``NAME_WORDS`` are marks in names of functions, and ``LOCAL_NAMES`` are marks as names of locals:
they do not name what a variable holds. NumPy has 1.6 marks in 1,000 words, 0.2 in its test names.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CEILING = 2.0  # marks in 1,000 words

MARKS = {
    "what as a noun": r"what (is|was|are|were|has|have|had|the|it|they|there|does|did|comes|goes)",
    "whoever": r"(whoever|whatever|nobody|somebody|anybody|whichever)",
    "that of": r"(that of|those of)",
    "is no X": r"(is|are|was|were) no (?!longer\b|more\b)\w+",
    "is there": r"(is|are|was|were) there",
    "told": r"(told|tells? of|says?|said)",
    "lies": r"(lies|lie|stands|goes|lay)",
    "where for if": r"where (it|that|they|nothing|all|none|there|this|these|no|some|one|both|only)",
    "at hand": r"(at hand|of its own|of their own|but for)",
}
PATTERNS = {name: re.compile(rf"\b{pattern}\b", re.IGNORECASE) for name, pattern in MARKS.items()}
NAME_WORDS = re.compile(
    rf"\b({'|'.join(MARKS.values())}|what|whose|nothing|anything|something|everything|everyone"
    r"|tells?|say|stand|stood|anew|meanwhile|sense|made|wanted|held|plain|mine|ours|theirs"
    r"|its own|their own|crew|extents|bells|yard|wire)\b"
)
LOCAL_NAMES = re.compile(
    r"found|made|one|known|wanted|given|held|plain|what|whole|kept|mine|own|ours|theirs|told|said"
    r"|shown|taken|there|here|gone|nobody|nothing|whoever|somebody|tell|crew|wire|extents|bells|yard"
)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
C_TEXT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
PYTHON_TEXT = re.compile(
    r'#[^\n]*|"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\''
    r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'',
    re.DOTALL,
)
HOLDERS = (ast.stmt, ast.excepthandler, ast.match_case)  # nodes that can contain a definition
CODE = re.compile(r"```.*?```|~~~.*?~~~|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)

Text = tuple[int, str]  # the line on which it begins, and its words


def c_texts(source: str) -> Iterator[Text]:
    """Yield the comments of a C source."""
    for match in C_TEXT.finditer(source):
        if match.group().startswith(("/*", "//")):
            yield source.count("\n", 0, match.start()) + 1, match.group()


def python_texts(source: str) -> Iterator[Text]:
    """Yield comments and docstrings of a Python source, without examples."""
    for match in PYTHON_TEXT.finditer(source):
        if match.group().startswith("#"):
            yield source.count("\n", 0, match.start()) + 1, match.group()
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, HOLDERS)]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                line = node.body[0].lineno
                lines = [
                    " " if row.lstrip().startswith((">>>", "...")) else row
                    for row in text.split("\n")
                ]
                yield line, CODE.sub(" ", "\n".join(lines))


def page_texts(source: str) -> Iterator[Text]:
    """Yield the prose of a page, without code."""
    yield 1, CODE.sub(lambda match: "\n" * match.group().count("\n") or " ", source)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
C_FUNCTION = re.compile(
    r"^(?:\w[^\n;{}#=]*?\b)?(\w+)\(([^;{}#]*?)\)\s*\{(.*?)^\}", re.DOTALL | re.MULTILINE
)
C_LOCAL = re.compile(r"(?<![\w.>])[a-z]\w*\b(?!\s*\()")
C_WORDS = re.compile(
    r"mls\w*|\w+_t|if|else|for|while|do|switch|case|default|break|continue|return|goto|sizeof|const"
    r"|static|inline|struct|union|enum|void|char|short|int|long|float|double|signed|unsigned|bool"
    r"|true|false|defined|elif|endif|undef|define"
)
Name = tuple[int, bool, str]  # its line, whether it is a local, and its words


def python_names(source: str) -> Iterator[Name]:
    """Yield the names of functions, and once per function those of its locals."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, FUNCTIONS):
            continue
        yield node.lineno, False, node.name.replace("_", " ")
        names = {a.arg: a.lineno for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        inner: list[ast.AST] = list(node.body)
        for child in inner:
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                names.setdefault(child.id, child.lineno)
            elif isinstance(child, ast.ExceptHandler) and child.name:
                names.setdefault(child.name, child.lineno)
            if not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
                inner += ast.iter_child_nodes(child)
        for name, line in names.items():
            yield line, True, name.replace("_", " ")


def c_names(source: str) -> Iterator[Name]:
    """Yield the names of C functions and tests, and once per function those that it uses."""
    code = C_TEXT.sub(lambda text: "\n" * text.group().count("\n"), source)
    for function in C_FUNCTION.finditer(code):
        line = code.count("\n", 0, function.start()) + 1
        name, parameters, body = function.groups()
        test = name.startswith("TEST")
        yield line, False, (parameters if test else name).replace("_", " ")
        for local in sorted(set(C_LOCAL.findall(body if test else f"{parameters};{body}"))):
            if not C_WORDS.fullmatch(local):
                yield line, True, local.replace("_", " ")


def name_marks(local: bool, words: str) -> int:
    """Return the number of marks in a name."""
    return bool(LOCAL_NAMES.fullmatch(words)) if local else len(NAME_WORDS.findall(words))


NAME_READERS = {".py": python_names, ".c": c_names, ".h": c_names}
READERS = {
    ".c": c_texts,
    ".h": c_texts,
    ".py": python_texts,
    ".pyi": python_texts,
    ".md": page_texts,
}


def files() -> list[Path]:
    """Return the files that git tracks and this tool can read."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    paths = [ROOT / name for name in names if Path(name).suffix in READERS]
    return [path for path in paths if path.is_file() and path != Path(__file__).resolve()]


def added_lines(base: str) -> dict[Path, set[int]]:
    """Return the numbers of the lines that are not in a commit, by file."""
    command = ["git", "diff", "-U0", "--no-color", "--no-ext-diff", base]
    patch = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines: dict[Path, set[int]] = defaultdict(set)
    path = ROOT
    for row in patch.split("\n"):
        if row.startswith("+++ "):
            path = ROOT / row[6:]
        elif header := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", row):
            first, count = int(header[1]), int(header[2] or 1)
            lines[path].update(range(first, first + count))
    return lines


def merge_base() -> str | None:
    """Return the commit at which this branch left main; None on main and without git."""
    for main in ("origin/main", "main"):
        command = ["git", "merge-base", "HEAD", main]
        result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        if result.returncode == 0:
            return result.stdout.strip()
    return None


Place = tuple[Path, int, str, str]  # file, line, mark, and the words around it


def read(
    paths: list[Path], lines: dict[Path, set[int]] | None
) -> tuple[Counter[Path], list[Place]]:
    """Return the number of words of each file, and its marks; `lines` restricts both."""
    words: Counter[Path] = Counter()
    places: list[Place] = []
    for path in paths:
        source = path.read_text(encoding="utf-8")
        for first, text in READERS[path.suffix](source):
            rows = text.split("\n")
            chosen = [lines is None or first + i in lines[path] for i in range(len(rows))]
            words[path] += sum(len(WORD.findall(r)) for r, c in zip(rows, chosen, strict=True) if c)
            for name, pattern in PATTERNS.items():
                for match in pattern.finditer(text):
                    row = text.count("\n", 0, match.start())
                    around = text[max(0, match.start() - 40) : match.end() + 40]
                    if chosen[row]:
                        places.append((path, first + row, name, " ".join(around.split())))
        for line, local, name in NAME_READERS.get(path.suffix, lambda _: ())(source):
            if lines is None or line in lines[path]:
                words[path] += len(name.split())
                places += [(path, line, "identifier", name)] * name_marks(local, name)
    return words, places


def is_below(path: Path, folders: list[str]) -> bool:
    """Return whether a file is in one of some folders, or any file if there are none."""
    return not folders or any(path.is_relative_to(ROOT / folder) for folder in folders)


def main(arguments: list[str] | None = None) -> int:
    """Count, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", help="only these, with what is below them")
    parser.add_argument("--words", metavar="MARK", help="print the places of a mark, or of `all`")
    parser.add_argument("--added", action="store_true", help="read the lines since main only")
    options = parser.parse_args(arguments)
    base = merge_base() if options.added else None
    if options.added and base is None:
        print("skipped: no main to compare with")
        return 0
    paths = [path for path in files() if is_below(path, options.folders)]
    lines = added_lines(base) if base else None
    words, places = read(paths if lines is None else [p for p in paths if p in lines], lines)
    marks = Counter(path for path, *_ in places)
    shown = "all" if options.added else options.words
    for path, line, mark, around in places:
        if shown in (mark, "all"):
            print(f"{path.relative_to(ROOT)}:{line}: {mark}: {around}")
    for folder in [] if shown else sorted({path.parent for path in paths}):
        inside = [path for path in paths if path.parent == folder]
        title = folder.relative_to(ROOT).as_posix()
        print_rate(title, sum(words[p] for p in inside), sum(marks[p] for p in inside))
    print_rate("all", words.total(), marks.total())
    # Few words have no rate: two marks are always allowed.
    return int(options.added and marks.total() > max(2, CEILING * words.total() / 1000))


def print_rate(title: str, words: int, marks: int) -> None:
    """Print words, marks and the marks in 1,000 words of a folder."""
    print(f"{title:<52}{words:>8}{marks:>7}{1000 * marks / max(words, 1):>7.1f}")


if __name__ == "__main__":
    sys.exit(main())
