"""Run the notebooks of examples/ and store them with their outputs.

    python tools/notebooks.py [NAME ...]

Each runs in a temporary folder, from top to bottom, and stops at the first error. The stored
outputs do not contain its name. The metadata contain a checksum of the cells that ran, so that
tests/package/test_examples.py notices a cell that was edited but not run again.
"""

import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
LOADED = re.compile(r"(ODIE \[default\]: Loading function '\w+'\s*)+")


def source_digest(cells):
    """SHA-256 of the sources of code cells."""
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def run_notebook(source, folder):
    """Run the notebook file `source` in `folder`; return it with its outputs."""
    notebook = nbformat.read(source, as_version=4)
    manager = AsyncKernelManager(kernel_name="python3")
    # instead of the interpreter of a registered kernel
    manager.kernel_spec.argv[0] = sys.executable
    manager.kernel_spec.argv.append("--log-level=ERROR")  # no warning about local TCP
    NotebookClient(
        notebook,
        km=manager,
        timeout=120,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    drop_log_of_core_ai(notebook)
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["executed"] = {"sha256": source_digest(notebook.cells)}
    return notebook


def drop_log_of_core_ai(notebook):
    """Drop the lines of Core AI's runtime about functions that it loads."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                output
                for output in cell.outputs
                if output.get("name") != "stderr" or not LOADED.fullmatch(output["text"])
            ]


def remove_folder_name(notebook, folder):
    """Make the paths below `folder` in texts relative."""

    def relative(text):
        return text.replace(f"{folder}{os.sep}", "").replace(str(folder), ".")

    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "text" in output:
                output["text"] = relative(output["text"])
            for kind, content in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output["data"][kind] = relative(content)


def main(names):
    """Run the named notebooks, or all, and store each of them."""
    package = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.environ |= {"PYTHONPATH": package, "IPYTHONDIR": str(Path(folder, ".ipython"))}
            notebook = run_notebook(path, folder)
            remove_folder_name(notebook, folder)
        nbformat.write(notebook, path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
