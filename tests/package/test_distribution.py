"""What a package index and a machine without a compiler see of the package."""

import re
import sys
from pathlib import Path

import child
import pytest

import mlstate

SOURCES = Path(__file__).parents[2]


def setup(*arguments, **variables):
    command = [sys.executable, "setup.py", *arguments]
    return child.finished(command, folder=SOURCES, **variables)


def test_page_of_the_index_has_absolute_links_to_files_that_exist():
    page = setup("-q", "--long-description").stdout
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert len(targets) > 20
    for target in targets:
        assert target.startswith(("https://", "#"))
        _, is_own, path = target.partition("/blob/main/")
        assert not is_own or (SOURCES / path.partition("#")[0]).is_file()


@pytest.mark.parametrize("missing", ["compiler", "broken", "foreign", "headers"])
def test_build_without_its_tools_ends_in_one_line_with_the_remedy(tmp_path, missing):
    build = ("-q", "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path)
    if missing == "compiler":
        run = setup(*build, CC="no-such-compiler")
        problem = "needs a C compiler; no-such-compiler was not found"
    elif missing == "broken":
        run = setup(*build, CC="false")
        problem = "needs a C11 compiler; false cannot compile an empty program"
    elif missing == "foreign":
        compiler = tmp_path / "cc"
        compiler.write_bytes(b"#!/bin/sh\nprintf 'ung\xfcltig' >&2; exit 1\n")
        compiler.chmod(0o755)
        run = setup(*build, CC=str(compiler))
        problem = "cannot compile an empty program (ung"
    else:
        (tmp_path / "sitecustomize.py").write_text(
            "import sysconfig\n"
            "get_path = sysconfig.get_path\n"
            "sysconfig.get_path = lambda name, *rest: (\n"
            "    '/no/headers' if name == 'include' else get_path(name, *rest)\n"
            ")\n"
        )
        run = setup(*build, PYTHONPATH=str(tmp_path))
        problem = "/no/headers has no Python.h"
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert problem in last and "apt install gcc python3-dev" in last
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(("tag", "is_accepted"), [(mlstate.__version__, True), ("9.9", False)])
def test_tag_is_published_only_with_its_version(tag, is_accepted, tmp_path):
    yaml = pytest.importorskip("yaml", reason="reads the workflow")
    workflow = yaml.safe_load((SOURCES / ".github/workflows/wheels.yml").read_text("utf-8"))
    jobs = workflow["jobs"]
    publish = jobs["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert {*publish["needs"], "publish"} == set(jobs)
    assert publish["permissions"] == {"id-token": "write"}
    [check] = [step["run"] for step in publish["steps"] if "run" in step]
    assert "pypi-publish" in publish["steps"][-1]["uses"]
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / f"mlstate-{mlstate.__version__}.tar.gz").touch()
    done = child.finished(["sh", "-c", check], folder=tmp_path, GITHUB_REF_NAME=f"v{tag}")
    assert (done.returncode == 0) == is_accepted
