#!/usr/bin/env python3
"""Rename identifiers by a map, and check that a commit renamed nothing else.

``python tools/rename_identifiers.py MAP`` edits the files that the map names.
``python tools/rename_identifiers.py --check MAP ...`` takes the commit that added each map, applies
the map to the files of its parent, and compares. The syntax trees of Python without docstrings,
and the tokens of C without comments, must be equal to the commit. No other source may change.

A map of `tools/renames/` is JSON: ``{file: {scope: {old: new}}}``. In Python the scope is a
function (``Class.method``, ``outer.inner``) whose locals and parameters are renamed; a class,
whose methods and attributes are renamed in the file; ``.``, for attributes; ``call()``, for the
keywords of calls; ``strings``, for strings that are a name; or ``""``, for the names of the module
and those that it imports. In C it is a function, ``struct`` for tags,
``""`` for the whole file without its fields (after ``.`` or ``->``), or ``.`` for all of it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAPS = ROOT / "tools" / "renames"
Scopes = dict[str, dict[str, str]]
Names = dict[str, str]
Edit = tuple[int, int, str]  # first byte, end, new text

C_TOKEN = re.compile(
    r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.'])*"""
    r"""|->|\\\n|\n|[^\s\w]""",
    re.DOTALL,
)
STRING = re.compile(
    r'(?:""".*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')', re.DOTALL
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class RenameError(Exception):
    """A rename that would change the meaning, or that does not match the source."""


def replace_words(text: str, names: Names, quoted: bool = False) -> str:
    """Replace whole words that are not attributes; with ``quoted``, only those in backticks."""
    if not names:
        return text
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pattern = rf"(?<=`)({words})(?=`)" if quoted else rf"(?<![\w.\"'])({words})\b(?![\"'])"
    return re.sub(pattern, lambda match: names[match.group(1)], text)


class PythonFile:
    """A Python source, its syntax tree, and the edits that rename identifiers in both."""

    def __init__(self, source: str, scopes: Scopes, strict: bool = False) -> None:
        self.strict = strict
        self.source = source.encode()
        self.tree = ast.parse(source)
        self.edits: set[Edit] = set()
        starts = [0]
        for line in self.source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self.starts = starts
        self.defined = {
            node.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        nodes = dict[str, list[ast.AST]]()
        for name, node in self.named(self.tree, ""):
            nodes.setdefault(name, []).append(node)
        for scope, names in scopes.items():
            if scope.endswith("()"):
                self.rename_keywords(scope[:-2], names)
            elif scope == ".":
                self.rename_members([], names)
            elif scope == "strings":
                self.rename_strings(names)
            elif scope == "":
                self.rename([self.tree], names, "the module")
            elif scope not in nodes:
                raise RenameError(f"no function or class {scope}")
            elif isinstance(nodes[scope][0], ast.ClassDef):
                self.rename_members(nodes[scope], names)
            else:
                self.rename(nodes[scope], names, scope)
                self.rename_keywords(scope.rsplit(".", 1)[-1], names, nodes[scope])

    def named(self, node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        """Yield functions and classes with their qualified names."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                yield prefix + child.name, child
                yield from self.named(child, prefix + child.name + ".")
            else:
                yield from self.named(child, prefix)

    def offset(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self.offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self.offset(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def edit_word(self, node: ast.AST, old: str, new: str, before: str = "") -> None:
        """Replace the first word ``old`` in the text of a node."""
        first, end = self.span(node)
        match = re.compile(rf"{before}\b({re.escape(old)})\b".encode()).search(
            self.source, first, end
        )
        if match is None:
            raise RenameError(f"line {node.lineno}: no {old}")  # type: ignore[attr-defined]
        self.edits.add((*match.span(1), new))

    def rename(self, scopes: list[ast.AST], names: Names, label: str) -> None:
        """Rename local names in functions, or module names in the tree."""
        for scope in scopes:
            inner = [scope] if isinstance(scope, ast.Module) else [scope.args, *scope.body]  # type: ignore[attr-defined]
            nodes = [node for part in inner for node in ast.walk(part)]
            used = {n.id for n in nodes if isinstance(n, ast.Name)}
            used |= {n.arg for n in nodes if isinstance(n, ast.arg)}
            used |= {n.name for n in nodes if isinstance(n, FUNCTIONS)}
            bound = {
                n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
            bound |= {getattr(n, "name", None) for n in nodes}  # functions, errors, patterns
            if self.strict and not isinstance(scope, ast.Module) and not bound.issuperset(names):
                raise RenameError(f"{label} does not bind {', '.join(set(names) - bound)}")
            for new in names.values():
                if new in used and new not in names:
                    raise RenameError(f"{label}: {new} is in use")
            self.rename_nodes(nodes, names)
            if not isinstance(scope, ast.Module):
                self.rename_parametrized(scope, names)
                first, end = self.span(scope)
                self.rename_texts(first, end, names)

    def rename_nodes(self, nodes: list[ast.AST], names: Names) -> None:
        inside: set[ast.AST] = set()
        for node in nodes:
            if isinstance(node, ast.JoinedStr) and node not in inside:
                inside.update(ast.walk(node))
                self.rename_fields(node, names)
        for node in nodes:
            if isinstance(node, ast.Name) and node.id in names:
                if node not in inside:
                    self.edits.add((*self.span(node), names[node.id]))
                node.id = names[node.id]
            elif isinstance(node, ast.arg) and node.arg in names:
                if node not in inside:
                    self.edit_word(node, node.arg, names[node.arg])
                node.arg = names[node.arg]
            elif isinstance(node, FUNCTIONS) and node.name in names:
                self.edit_word(node, node.name, names[node.name], r"\bdef\s+")
                node.name = names[node.name]
            elif isinstance(node, ast.alias) and node.name in names and node.asname is None:
                self.edit_word(node, node.name, names[node.name])
                node.name = names[node.name]
            elif isinstance(node, ast.ExceptHandler) and node.name in names:
                self.edit_word(node, node.name, names[node.name], r"\bas\s+")
                node.name = names[node.name]
            elif isinstance(node, ast.Global | ast.Nonlocal):
                for old in set(node.names) & set(names):
                    self.edit_word(node, old, names[old])
                node.names = [names.get(name, name) for name in node.names]
            elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name in names:
                self.edit_word(node, node.name, names[node.name])
                node.name = names[node.name]

    def rename_fields(self, node: ast.JoinedStr, names: Names) -> None:
        """Rename inside the braces of an f-string, whose nodes have no exact places."""
        first, end = self.span(node)
        text = self.source[first:end].decode()
        pieces, depth, last = [], 0, 0
        for match in re.finditer(r"\{\{(?!\{)|\}\}|[{}]", text):
            if match.group() in ("{{", "}}") and depth == 0:
                continue
            piece = text[last : match.start()]
            pieces += [replace_words(piece, names) if depth else piece, match.group()]
            depth += match.group().count("{") - match.group().count("}")
            last = match.end()
        new = "".join([*pieces, text[last:]])
        if new != text:
            old = [e for e in self.edits if e[:2] == (first, end)]
            if old:
                raise RenameError(f"line {node.lineno}: an f-string with names of two scopes")
            self.edits.add((first, end, new))

    def rename_parametrized(self, scope: ast.AST, names: Names) -> None:
        """Rename the names in ``@pytest.mark.parametrize("a, b", ...)``."""
        for decorator in scope.decorator_list:  # type: ignore[attr-defined]
            if isinstance(decorator, ast.Call) and "parametrize" in ast.unparse(decorator.func):
                for node in ast.walk(decorator.args[0]):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        new = replace_words(node.value, names)
                        if new != node.value:
                            first, end = self.span(node)
                            text = self.source[first:end].decode()
                            self.edits.add((first, end, text.replace(node.value, new)))
                            node.value = new

    def rename_strings(self, names: Names) -> None:
        """Rename strings that are a name, as in lists of functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and node.value in names:
                new = names[node.value]
                self.edit_word(node, node.value, new)
                node.value = new

    def rename_keywords(
        self, name: str, names: Names, functions: list[ast.AST] | None = None
    ) -> None:
        """Rename keywords in calls of ``name``, if they are parameters of ``functions``."""
        if functions is not None:
            parameters = {
                n.arg for f in functions for n in ast.walk(f.args) if isinstance(n, ast.arg)
            }  # type: ignore[attr-defined]
            names = {old: new for old, new in names.items() if new in parameters}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                tail = getattr(node.func, "attr", getattr(node.func, "id", None))
                for keyword in node.keywords if tail == name else []:
                    if keyword.arg in names:
                        self.edit_word(keyword, keyword.arg, names[keyword.arg])
                        keyword.arg = names[keyword.arg]

    def rename_members(self, classes: list[ast.AST], names: Names) -> None:
        for node in [n for c in classes for n in c.body]:  # type: ignore[attr-defined]
            if isinstance(node, FUNCTIONS) and node.name in names:
                self.edit_word(node, node.name, names[node.name], r"\bdef\s+")
                node.name = names[node.name]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and node.attr in names:
                end = self.span(node)[1]
                self.edits.add((end - len(node.attr), end, names[node.attr]))
                node.attr = names[node.attr]

    def rename_texts(self, first: int, end: int, names: Names) -> None:
        """Rename names in backticks in comments."""
        for match in re.finditer(rb"^\s*#.*$", self.source[first:end], re.MULTILINE):
            text = match.group().decode()
            if (new := replace_words(text, names, quoted=True)) != text:
                self.edits.add((first + match.start(), first + match.end(), new))

    def text(self) -> str:
        """Return the source after all edits; the syntax tree must be the expected one."""
        result = apply_edits(self.source, self.edits)
        if python_shape(ast.parse(result)) != python_shape(self.tree):
            raise RenameError("the edited source has another syntax tree than the map says")
        return result


def apply_edits(source: bytes, edits: set[Edit]) -> str:
    """Return a source with its edits made."""
    pieces, last = [], 0
    for first, end, new in sorted(edits):
        if first < last:
            raise RenameError(f"two renames of {source[first:end].decode()!r}")
        pieces += [source[last:first], new.encode()]
        last = end
    return b"".join([*pieces, source[last:]]).decode()


def python_shape(tree: ast.AST) -> str:
    """Return a dump of a syntax tree without docstrings, with imported names in order."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                first.value.value = ""
        if isinstance(node, ast.ImportFrom):
            node.names.sort(key=lambda alias: alias.name)
    return ast.dump(tree)


class CFile:
    """A C source as tokens, some of them renamed."""

    def __init__(self, source: str, scopes: Scopes) -> None:
        self.source = source
        self.all = list(C_TOKEN.finditer(source))
        self.code = [
            t
            for t in self.all
            if not t.group().startswith(("/*", "//")) and t.group().strip("\\\n")
        ]
        self.words = [t.group() for t in self.code]
        self.edits: set[Edit] = set()
        for scope, names in sorted(scopes.items(), reverse=True):  # the file after its functions
            is_file_wide = scope in ("", ".", "struct")
            spans = [(0, len(self.code))] if is_file_wide else list(self.spans(scope))
            if not spans:
                raise RenameError(f"no function {scope}")
            for span in spans:
                self.rename(span, names, scope)

    def closing(self, index: int) -> int:
        """Return the index after the bracket that closes the one at ``index``."""
        pairs = {"(": ")", "{": "}"}
        opening, depth = self.words[index], 0
        for i in range(index, len(self.words)):
            depth += (self.words[i] == opening) - (self.words[i] == pairs[opening])
            if depth == 0:
                return i + 1
        raise RenameError("a bracket is not closed")

    def spans(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield the token ranges of the definitions and prototypes of a function or a macro."""
        depth = 0
        for i, word in enumerate(self.words):
            depth += (word == "{") - (word == "}")
            is_test = i > 1 and self.words[i - 2].startswith(
                "TEST"
            )  # macros may not balance braces
            if word != name or (depth > 0 and not is_test):
                continue
            if i > 1 and self.words[i - 2 : i] == ["#", "define"]:
                lines = re.compile(r"(?:[^\n\\]|\\.)*", re.DOTALL)
                end = lines.match(self.source, self.code[i].start()).end()  # type: ignore[union-attr]
                yield (
                    i,
                    next((k for k, t in enumerate(self.code) if t.start() >= end), len(self.code)),
                )
                continue
            after = i + 1
            if self.words[after] == "(":
                after = self.closing(after)
            elif self.words[after] == ")":
                after += 1  # TEST(name) {
            if self.words[after] == "{":
                after = self.closing(after)
            elif self.words[after] != ";":
                continue
            yield i + 1, after

    def rename(self, span: tuple[int, int], names: Names, scope: str) -> None:
        tags = ("struct", "union", "enum")
        free = [
            i
            for i in range(*span)
            if i == 0
            or scope == "."
            or (scope != "struct" and self.words[i - 1] not in (".", "->"))
            or (scope == "struct" and self.words[i - 1] in tags)
        ]
        used = {self.words[i] for i in free}
        for new in names.values():
            if new in used and new not in names:
                raise RenameError(f"{scope or 'the file'}: {new} is in use")
        for i in free:
            token = self.code[i]
            if token.group() in names:
                self.edits.add((*self.bytes(token), names[token.group()]))
                self.words[i] = names[token.group()]
        first, end = (
            (0, len(self.source))
            if scope in ("", ".", "struct")
            else (self.code[span[0]].start(), self.code[span[1] - 1].end())
        )
        for token in self.all:
            if token.group().startswith(("/*", "//")) and first <= token.start() < end:
                text = replace_words(token.group(), names, quoted=True)
                self.edits |= {(*self.bytes(token), text)} - {(*self.bytes(token), token.group())}

    def bytes(self, token: re.Match[str]) -> tuple[int, int]:
        return len(self.source[: token.start()].encode()), len(self.source[: token.end()].encode())

    def text(self) -> str:
        """Return the source after all edits."""
        result = apply_edits(self.source.encode(), self.edits)
        if c_shape(CFile(result, {}).words) != c_shape(self.words):
            raise RenameError("the edited source has other tokens than the map says")
        return result


def c_shape(words: list[str]) -> list[str]:
    """Return tokens with adjacent strings joined, as a formatter may break them."""
    joined: list[str] = []
    for word in words:
        if word[0] == '"' and joined and joined[-1][0] == '"':
            joined[-1] = joined[-1][:-1] + word[1:]
        else:
            joined.append(word)
    return joined


def shape(path: str, source: str, scopes: Scopes) -> str | list[str]:
    """Return what must be equal: the tree or the tokens of a source after its renames."""
    if path.endswith((".py", ".pyi")):
        return python_shape(PythonFile(source, scopes).tree)
    return c_shape(CFile(source, scopes).words)


def git(*arguments: str) -> str:
    """Return what a git command prints."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def apply_map(path: Path) -> list[str]:
    """Edit the files of a map; return the problems, with which a file is left alone."""
    problems = []
    for name, scopes in json.loads(path.read_text()).items():
        source = (ROOT / name).read_text(encoding="utf-8")
        try:
            if name.endswith((".py", ".pyi")):
                text = PythonFile(source, scopes, strict=True).text()
            else:
                text = CFile(source, scopes).text()
            (ROOT / name).write_text(text, encoding="utf-8")
        except RenameError as error:
            problems.append(f"{name}: {error}")
    return problems


def check_map(path: Path) -> list[str]:
    """Return the sources that the commit of a map changed beyond its renames."""
    name = path.resolve().relative_to(ROOT).as_posix()
    commit = git("log", "--diff-filter=A", "--format=%H", "-1", "--", name).strip()
    if not commit:
        return [f"{name}: in no commit"]
    renames: dict[str, Scopes] = json.loads(git("show", f"{commit}:{name}"))
    changed = git("diff-tree", "--no-commit-id", "--name-only", "-r", commit).split()
    problems = []
    for file in changed:
        if file.endswith((".py", ".pyi", ".c", ".h", ".def")):
            before, after = (git("show", f"{at}:{file}") for at in (f"{commit}^", commit))
            if shape(file, before, renames.get(file, {})) != shape(file, after, {}):
                problems.append(f"{name}: {file} differs by more than the renames")
    return problems + [f"{name}: {file} did not change" for file in renames if file not in changed]


def main(arguments: list[str] | None = None) -> int:
    """Apply one map, or check the commits of maps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("maps", nargs="*", type=Path, help="maps; with --check, default all")
    parser.add_argument("--check", action="store_true", help="compare commits with their maps")
    options = parser.parse_args(arguments)
    paths = options.maps or sorted(MAPS.glob("*.json"))
    problems = [p for path in paths for p in (check_map if options.check else apply_map)(path)]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
