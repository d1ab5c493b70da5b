#!/usr/bin/env python3
"""Count nine marks of unclear English in comments, docstrings and pages, by folder.

``python tools/language.py [--json] [--words MARK] [--update] [FOLDER ...]``. A mark is a phrase
that plain technical English avoids, such as "whoever" or "is no file". A folder's rate is the
number of marks in 1,000 words. `tools/language_ceilings.json` has the highest rate that each
folder may have; the exit status is 1 if a rate is above its ceiling. ``--update`` lowers
ceilings to today's rates and never raises one. ``--words MARK`` prints each place of one mark.
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
AIM = 2.0  # marks in 1,000 words, for folders without a ceiling

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
    for found in C_TEXT.finditer(source):
        if found.group().startswith(("/*", "//")):
            yield source.count("\n", 0, found.start()) + 1, found.group()


def python_texts(source: str) -> Iterator[Text]:
    """Yield comments and docstrings of a Python source, without examples."""
    for found in PYTHON_TEXT.finditer(source):
        if found.group().startswith("#"):
            yield source.count("\n", 0, found.start()) + 1, found.group()
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
    yield 1, CODE.sub(lambda found: "\n" * found.group().count("\n") or " ", source)


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
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for path in files():
        folder = folder_of(path)
        if folders and not any((folder + "/").startswith(f.rstrip("/") + "/") for f in folders):
            continue
        for _, text in READERS[path.suffix](path.read_text(encoding="utf-8")):
            found[folder]["words"] += len(WORD.findall(text))
            for name, pattern in PATTERNS.items():
                found[folder][name] += len(pattern.findall(text))
    return found


def rate(counts: Counter[str]) -> float:
    """Return the marks in 1,000 words, rounded to a tenth."""
    marks = sum(counts[name] for name in MARKS)
    return round(1000 * marks / max(counts["words"], 1), 1)


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
                for found in pattern.finditer(text):
                    line = first + text.count("\n", 0, found.start())
                    around = text[max(0, found.start() - 40) : found.end() + 40]
                    print(f"{path.relative_to(ROOT)}:{line}: {' '.join(around.split())}")


def ceilings() -> dict[str, float]:
    """Return the highest rate that each folder may have."""
    known: dict[str, float] = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
    return known


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
    found = count(options.folders)
    allowed = ceilings()
    if options.update:
        lowered = {f: min(rate(c), allowed.get(f, 1000.0)) for f, c in sorted(found.items())}
        CEILINGS.write_text(json.dumps(lowered, indent=1) + "\n")
        allowed = lowered
    rows = {
        f: {
            "words": c["words"],
            "marks": sum(c[m] for m in MARKS),
            "rate": rate(c),
            "ceiling": allowed.get(f, AIM),
        }
        for f, c in sorted(found.items())
    }
    over = [f for f, row in rows.items() if row["rate"] > row["ceiling"]]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(f"{'folder':<44}{'words':>8}{'marks':>7}{'rate':>7}{'ceiling':>9}")
        for folder, row in rows.items():
            print(
                f"{folder:<44}{row['words']:>8}{row['marks']:>7}{row['rate']:>7.1f}"
                f"{row['ceiling']:>9.1f}{'  above' if folder in over else ''}"
            )
        total: Counter[str] = sum(found.values(), Counter())
        print(f"{'all':<44}{total['words']:>8}{sum(total[m] for m in MARKS):>7}{rate(total):>7.1f}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
