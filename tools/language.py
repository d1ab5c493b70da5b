#!/usr/bin/env python3
"""Count marks of unclear English in comments, docstrings, pages and identifiers, by folder.

``python tools/language.py [--json] [--words MARK] [--update] [FOLDER ...]``. A mark is a phrase
that plain technical English avoids, such as "whoever" or "is no file". A folder's rate is the
number of marks in 1,000 words. `tools/language_ceilings.json` has the highest rate that each
folder may have; the exit status is 1 if a rate is above its ceiling. ``--update`` lowers
ceilings to today's rates and never raises one. ``--words MARK`` prints each place of one mark.

The names of tests, functions, locals and parameters are read as prose, split at underscores, and
counted as a folder of their own, ``FOLDER identifiers``. Beyond the nine marks, ``NAME_WORDS`` are
marks in names of functions, and ``LOCAL_NAMES`` are marks as names of locals: they do not name what
a variable holds. NumPy has 0.2 marks in 1,000 words of its test names, and 0.6 in its locals.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = ROOT / "tools" / "language_ceilings.json"
AIM = 2.0  # marks in 1,000 words, for folders without a ceiling of their own

MARKS = {
    "what as a noun": r"what (is|was|are|were|has|have|had|the|it|they|there|does|did|comes|goes)",
    "whoever": r"(whoever|whatever|nobody|somebody|anybody|whichever)",
    "that of": r"(that of|those of|of which|in which|to which|from which)",
    "is no X": r"(is|are|was|were) no (?!longer\b|more\b)\w+",
    "is there": r"(is|are|was|were) there",
    "told": r"(told|tells? of|says?|said)",
    "lies": r"(lies|lie|stands|goes|lay)",
    "where for if": r"where (it|that|they|nothing|all|none|there|this|these|no|some|one|both|only)",
    "at hand": r"(at hand|by itself|by themselves|of its own|of their own|beside|but for)",
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


def folder_of(path: Path) -> str:
    """Return the folder that a file is counted for, relative to the root."""
    name = path.relative_to(ROOT).parent.as_posix()
    return "pages" if name == "." else name


def count(folders: list[str]) -> dict[str, Counter[str]]:
    """Count words and marks by folder."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for path in files():
        folder = folder_of(path)
        if folders and not any((folder + "/").startswith(f.rstrip("/") + "/") for f in folders):
            continue
        for _, text in READERS[path.suffix](path.read_text(encoding="utf-8")):
            counts[folder]["words"] += len(WORD.findall(text))
            for name, pattern in PATTERNS.items():
                counts[folder][name] += len(pattern.findall(text))
        names = NAME_READERS.get(path.suffix)
        for _, local, words in names(path.read_text(encoding="utf-8")) if names else ():
            counts[f"{folder} identifiers"]["words"] += len(words.split())
            counts[f"{folder} identifiers"]["identifier"] += name_marks(local, words)
    return counts


def marks(counts: Counter[str]) -> int:
    """Return the number of marks, of all kinds."""
    return counts.total() - counts["words"]


def rate(counts: Counter[str]) -> float:
    """Return the marks in 1,000 words, rounded to a tenth."""
    return round(1000 * marks(counts) / max(counts["words"], 1), 1)


def print_places(mark: str, folders: list[str]) -> None:
    """Print each place of a mark, or of all marks for ``all``."""
    for path in files():
        folder = folder_of(path)
        if folders and not any((folder + "/").startswith(f.rstrip("/") + "/") for f in folders):
            continue
        for first, text in READERS[path.suffix](path.read_text(encoding="utf-8")):
            for name, pattern in PATTERNS.items():
                if mark not in (name, "all"):
                    continue
                for match in pattern.finditer(text):
                    line = first + text.count("\n", 0, match.start())
                    around = text[max(0, match.start() - 40) : match.end() + 40]
                    print(f"{path.relative_to(ROOT)}:{line}: {' '.join(around.split())}")
        if mark == "identifier" and path.suffix in NAME_READERS:
            for line, local, words in NAME_READERS[path.suffix](path.read_text(encoding="utf-8")):
                if name_marks(local, words):
                    print(f"{path.relative_to(ROOT)}:{line}: {words.replace(' ', '_')}")


def ceilings() -> dict[str, float]:
    """Return the highest rate that each folder may have."""
    limits: dict[str, float] = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
    return limits


def main(arguments: list[str] | None = None) -> int:
    """Count, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", help="only these, with what is below them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--words", metavar="MARK", help="print the places of a mark, or of `all`")
    parser.add_argument("--update", action="store_true", help="lower the ceilings to today's rates")
    options = parser.parse_args(arguments)
    if options.words:
        print_places(options.words, options.folders)
        return 0
    counts = count(options.folders)
    allowed = ceilings()
    if options.update:
        rates = {f: rate(c) for f, c in sorted(counts.items())}
        lowered = {
            f: min(r, allowed.get(f, 1000.0)) for f, r in rates.items() if f in allowed or r > AIM
        }
        CEILINGS.write_text(json.dumps(lowered, indent=1) + "\n")
        allowed = lowered
    rows = {
        f: {
            "words": c["words"],
            "marks": marks(c),
            "rate": rate(c),
            "ceiling": allowed.get(f, AIM),
        }
        for f, c in sorted(counts.items())
    }
    over = [f for f, row in rows.items() if row["rate"] > row["ceiling"]]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(f"{'folder':<52}{'words':>8}{'marks':>7}{'rate':>7}{'ceiling':>9}")
        for folder, row in rows.items():
            print(
                f"{folder:<52}{row['words']:>8}{row['marks']:>7}{row['rate']:>7.1f}"
                f"{row['ceiling']:>9.1f}{'  above' if folder in over else ''}"
            )
        for label, names in (("all", False), ("all identifiers", True)):
            parts = [c for f, c in counts.items() if f.endswith(" identifiers") == names]
            total: Counter[str] = sum(parts, Counter())
            print(f"{label:<52}{total['words']:>8}{marks(total):>7}{rate(total):>7.1f}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
