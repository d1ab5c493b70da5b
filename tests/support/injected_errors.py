"""Errors at every line of mlstate during one operation: nothing is half changed."""

import ast
import functools
import pathlib
import sys

import mlstate
from mlstate._core import deferred_interrupts

PACKAGE = str(pathlib.Path(mlstate.__file__).parent)
ERRORS = (MemoryError, KeyboardInterrupt)


@functools.cache
def statements(file):
    """Return the last line of each `with` block by the lines of its head, and the lines of `try`.

    The tracer is called between a block and its `__exit__`, and no signal handler runs there.
    The line of a `try` has no instruction that can raise, so a `with` around it would not end.
    """
    blocks, tries = {}, set()
    for node in ast.walk(ast.parse(pathlib.Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.With):
            head = range(node.lineno, max(node.body[0].lineno, node.lineno + 1))
            blocks |= dict.fromkeys(head, node.end_lineno)
        elif isinstance(node, ast.Try):
            tries.add(node.lineno)
    return blocks, tries


class Injected:
    """Raises an error at one line of the package that a call runs; 0: at none.

    `files`: ends of the paths of files whose lines count; `others`: files of other packages.
    Nothing is raised where Python or a section of deferred interrupts runs no signal handler.
    """

    def __init__(self, at, error, files=".py", others=()):
        self.at, self.error, self.files, self.others, self.count = at, error, files, others, 0
        self.lines = {}  # the last line of each frame
        self.place = None  # of the error

    def __call__(self, call):
        former = sys.gettrace()
        try:
            sys.settrace(self._trace)
            return call()
        finally:
            sys.settrace(former)

    def _trace(self, frame, event, argument):
        file = frame.f_code.co_filename
        if not ((file.startswith(PACKAGE) and file.endswith(self.files)) or file in self.others):
            return None
        if event == "line":
            line, last = frame.f_lineno, self.lines.get(id(frame), 0)
            self.lines[id(frame)] = line
            blocks, tries = statements(file)
            leaves = line < last <= blocks.get(line, 0)
            if not (leaves or line in tries or deferred_interrupts.is_active()):
                self.count += 1
                if self.count == self.at:
                    self.place = f"{pathlib.Path(file).name}:{line} {frame.f_code.co_qualname}"
                    raise self.error("injected")
        elif event == "return":
            self.lines.pop(id(frame), None)
        return self._trace


def half_changed(make, operate, content, most=400, files=".py"):
    """Run an operation on new targets, with an error at one line of each run.

    `make` returns a target, `operate` changes it, `content` returns its content, and None if it
    reports no token. Returns the number of errors that were raised, and a list of the lines
    that left something else than the content before or after. At most `most` lines, evenly chosen.
    """
    target = make()
    before = content(target)
    lines = Injected(0, MemoryError, files)
    lines(lambda: operate(target))
    after = content(target)
    assert before != after and None not in (before, after)
    wrong, raised = [], 0
    step = max(lines.count // most, 1)
    for number, at in enumerate(range(1, lines.count + 1, step)):
        target, injected = make(), Injected(at, ERRORS[number % 2], files)
        try:
            injected(lambda target=target: operate(target))
        except BaseException as error:
            raised += 1
            if "injected" not in str(error):
                wrong.append((at, repr(error)))
        if content(target) not in (before, after, None):
            wrong.append((at, content(target)))
        operate(target)
        if content(target) != after:
            wrong.append((at, "the second call"))
    return raised, wrong
