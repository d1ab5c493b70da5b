"""The examples of README and docs/ run, page by page, from top to bottom.

A page's blocks share one namespace and one temporary working directory. A page with the comment
``<!-- continues NAME -->`` runs after the blocks of that page. In README and the start
page each block has its own, because readers copy single blocks:

- ``python`` blocks run; with ``no-run`` they are only compiled, with
  ``needs=NAME`` they are skipped if that module is missing, with ``file=NAME`` they are
  stored as that file for a later block to run.
- ``pycon`` blocks are doctests: their output is compared. ``needs=NAME`` works here too.
- ``console`` blocks: lines that start with ``$ mlstate``, ``$ python FILE`` or ``$ torchrun``
  run, and their output is compared; ``...`` in a script works as in doctests. Other commands
  do not run. ``needs=NAME`` works here too. Instead of ``torchrun`` one process that has
  imported torch forks the ranks, because each import of torch takes seconds.

The directory holds the demo's packages at the same paths as a checkout, so readers can run the
blocks from the repository's root.
"""

import doctest
import importlib.util
import os
import re
import shlex
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import child
import forked
import pytest

import mlstate
from mlstate.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SEPARATE = {"README", "index"}  # pages whose blocks run separately, each in a fresh namespace
CONTINUES = re.compile(r"^<!-- continues (\w+) -->$", re.MULTILINE)
FENCE = re.compile(r"^```(python|pycon|console)\b([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block."""

    language: str
    words: list[str]
    text: str
    line: int


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(fence[1], fence[2].split(), fence[3], text.count("\n", 0, fence.start()) + 2)
        for fence in FENCE.finditer(text)
    ]


def continued_blocks(page):
    """The blocks of the page that this one continues, and its own."""
    continued = CONTINUES.search(page.read_text(encoding="utf-8"))
    earlier = continued_blocks(page.with_name(f"{continued[1]}.md")) if continued else []
    return earlier + blocks_of(page)


def values(block, key):
    """The values of ``key=`` on a block's first line."""
    return [word[len(key) + 1 :] for word in block.words if word.startswith(key + "=")]


def is_missing(block):
    """Whether a module that the block needs is not installed."""
    return any(not importlib.util.find_spec(name) for name in values(block, "needs"))


def run_python(block, where, namespace):
    padded = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's line
    code = compile(padded, where, "exec", dont_inherit=True)
    for name in values(block, "file"):
        Path(name).write_text(block.text, encoding="utf-8")
        return
    if "no-run" not in block.words and not is_missing(block):
        exec(code, namespace)


def run_doctest(block, where, namespace):
    test = doctest.DocTestParser().get_doctest(block.text, namespace, where, where, block.line - 1)
    assert test.examples, f"{where}:{block.line}: a pycon block without >>>"
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    if is_missing(block):
        return
    runner.run(test, out=report.append, clear_globs=False)
    namespace.update(test.globs)
    assert not runner.failures, "".join(report)


def run_script(words):
    """The output of a script, run in its own process by the page's command."""
    if words[:2] == ["torchrun", "--nproc-per-node"]:
        return run_ranks(int(words[2]), words[3], words[4:])
    variables = child.PATHS | {"OMP_NUM_THREADS": "1"}
    process = child.finished([sys.executable, *words[1:]], timeout=200, **variables)
    assert process.returncode == 0, process.stderr
    return process.stdout


def run_ranks(world, program, arguments):
    """The output of each rank of a job in turn, with the variables that torchrun sets."""
    with socket.create_server(("localhost", 0)) as server:
        job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
    job |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    ranks = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    results = forked.run(Path(program).absolute(), *((arguments, rank) for rank in ranks))
    for status, _, err in results:
        assert status == 0, err
    return "".join(out for _, out, _ in results)


def run_commands(block, where, capsys):
    for command in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, expected = command.partition("\n")
        words = shlex.split(line)
        sanitized = words[0] == "torchrun" and "MLSTATE_UNDER_SANITIZER" in os.environ
        if words[0] in ("python", "torchrun") and not is_missing(block) and not sanitized:
            printed = run_script(words)
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            same = doctest.OutputChecker().check_output(expected, printed, flags)
            assert same, f"{where}:{block.line}: {line} prints\n{printed}"
        if words[0] != "mlstate" or is_missing(block):
            continue
        capsys.readouterr()
        main(words[1:])
        printed = capsys.readouterr()
        assert (printed.out + printed.err).split() == expected.split(), f"{where}:{block.line}"


def test_there_are_pages():
    if not (ROOT / "README.md").exists():
        pytest.skip("no documentation beside these tests")
    assert {"README", "kv", "coreml", "files"} <= {page.stem for page in PAGES}


def enter(folder, monkeypatch):
    """Make `folder` the working directory, with the demo's packages at the paths of a checkout.

    The folder of these is a link: Python would import an empty `mlstate` from a plain one.
    """
    folder.mkdir(parents=True)
    (folder / "mlstate").symlink_to(Path(mlstate.__file__).parent)
    monkeypatch.chdir(folder)
    return {"__name__": "__page__"}


def run_block(block, where, namespace, capsys):
    if block.language == "python":
        run_python(block, where, namespace)
    elif block.language == "pycon":
        run_doctest(block, where, namespace)
    else:
        run_commands(block, where, capsys)


@pytest.mark.parametrize("page", [p for p in PAGES if p.exists()], ids=lambda page: page.stem)
def test_page_runs(page, tmp_path, monkeypatch, capsys):
    where = page.relative_to(ROOT).as_posix()
    namespace = enter(tmp_path / "page", monkeypatch)
    for block in continued_blocks(page):
        if page.stem in SEPARATE:
            namespace = enter(tmp_path / str(block.line), monkeypatch)
        run_block(block, where, namespace, capsys)


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="no README beside these tests")
def test_a_block_that_needs_another_fails_in_readme(tmp_path, monkeypatch, capsys):
    """Blocks of README see neither names nor files of earlier blocks."""
    first = "x = 1\nopen('f', 'w').close()\n"
    for i, second in enumerate(("x\n", "open('f')\n")):
        text = f"```python\n{first}```\n\n```python\n{second}```\n"
        page = tmp_path / str(i) / "README.md"
        page.parent.mkdir()
        page.write_text(text, encoding="utf-8")
        monkeypatch.setattr(sys.modules[__name__], "ROOT", page.parent)
        with pytest.raises((NameError, FileNotFoundError)):
            test_page_runs(page, page.parent, monkeypatch, capsys)


def test_a_wrong_page_fails(tmp_path, capsys):
    """The test above can fail: on wrong code, output, commands and scripts."""
    script = tmp_path / "script.py"
    script.write_text("print(1 + 1)\n", encoding="utf-8")
    good = Block("console", [], f"$ python {script}\n2\n", 1)
    run_commands(good, "page", capsys)
    for text in (good.text.replace("2", "3"), good.text.replace("script", "no_such_script")):
        with pytest.raises(AssertionError):
            run_commands(good._replace(text=text), "page", capsys)
    wrong = {
        "python": "assert 1 == 2\n",
        "pycon": ">>> 1 + 1\n3\n",
        "console": "$ mlstate --version\nanother program\n",
    }
    for language, text in wrong.items():
        page = tmp_path / f"{language}.md"
        page.write_text(f"Text.\n\n```{language}\n{text}```\n", encoding="utf-8")
        (block,) = blocks_of(page)
        with pytest.raises(AssertionError):
            run_block(block, "page", {}, capsys)
