"""Copy the sources into a folder for another kind of build, keeping file times.

    python tools/copy_tree.py build/asan/tree

Only changed files are copied, and deleted files are deleted there too, so that later builds there
are incremental.  Built modules (``*.so``) and objects stay.
"""

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("csrc", "include", "mlstate", "swift", "tests", "tools", "fuzz", "benchmarks")
FOLDERS += ("docs", "examples")
FILES = ("pyproject.toml", "setup.py", "Makefile", "Package.swift", "README.md", "CHANGELOG.md")
FILES += ("LICENSE",)
SKIPPED = {"__pycache__", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ipynb_checkpoints"}
BUILT = (".so", ".o", ".gcno", ".gcda", ".pyc")


def sources(root: Path) -> set[str]:
    """Every source below `root`, as a path relative to it."""
    names = {name for name in FILES if (root / name).is_file()}
    for top in FOLDERS:
        for folder, folders, files in os.walk(root / top):
            folders[:] = [name for name in folders if name not in SKIPPED]
            names.update(
                str((Path(folder) / name).relative_to(root))
                for name in files
                if not name.endswith(BUILT)
            )
    return names


def same(source: Path, target: Path) -> bool:
    """Whether `target` is already the copy of `source`."""
    if not target.exists():
        return False
    a, b = source.stat(), target.stat()
    return a.st_size == b.st_size and a.st_mtime_ns == b.st_mtime_ns


def copy_tree(target: Path) -> None:
    """Make `target` hold exactly the sources of this repository."""
    names = sources(ROOT)
    for name in sorted(names):
        if not same(ROOT / name, target / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for name in sources(target) - names:
        (target / name).unlink()


if __name__ == "__main__":
    copy_tree(Path(sys.argv[1]))
