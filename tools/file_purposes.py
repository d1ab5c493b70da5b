"""Print the source files of the package and its C core, each with the first line of its head."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("include", "csrc", "mlstate")


def purpose_of(path: Path) -> str:
    """Return the first sentence or paragraph of a file's docstring or head comment."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        head = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = re.match(r"/\*(.*?)\*/", text, re.DOTALL)
        head = re.sub(r"(?m)^ \* ?", "", comment[1]) if comment else ""
    paragraph = " ".join(head.split("\n\n")[0].split())
    return paragraph.removeprefix(f"{path.stem}: ").rstrip(".")


def source_files(folders: Iterable[str] = FOLDERS) -> list[Path]:
    """Return the source files below the folders, folder by folder."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    return sorted(
        (p for p in paths if p.suffix in (".c", ".h", ".py")), key=lambda p: (p.parent, p.name)
    )


def main() -> None:
    """Print one line for each file, below the name of its folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="only these")
    folder = None
    for path in source_files(parser.parse_args().folders):
        if path.parent != folder:
            folder = path.parent
            print(f"\n{folder.relative_to(ROOT)}")
        print(f"  {path.name:<30} {purpose_of(path)}")


if __name__ == "__main__":
    main()
