"""README and docs say what is there."""

import inspect
import re

import house
import pytest

import mlstate
from mlstate.checkpoint import CheckpointManager, reshard
from mlstate.fsdp import FSDPBackwardHook
from mlstate.state import rename

DOCUMENTS = [
    path
    for path in house.tracked_files()
    if path.suffix == ".md" and path.relative_to(house.ROOT).parts[0] in ("docs", path.name)
]
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def targets():
    makefile = (house.ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z0-9-]*):.*##", makefile, re.MULTILINE))


def anchors(text):
    """The anchors that GitHub and MyST give to headings."""
    headings = re.findall(r"^#+\s+(.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_readme_is_there_and_names_both_commands():
    text = (house.ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in text
    assert "make test" in text


@pytest.mark.parametrize("path", DOCUMENTS, ids=house.relative)
def test_make_commands_exist(path):
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^\s*(?:\$ )?)make ([a-z][a-z0-9-]*)", text, re.MULTILINE))
    assert named <= targets(), f"not in the Makefile: {sorted(named - targets())}"


@pytest.mark.parametrize("name", ["ci.yml", "wheels.yml"])
def test_workflows_run_what_exists(name):
    text = (house.ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8")
    commands = "\n".join(re.findall(r"^\s*(?:- )?run: (.+)$", text, re.MULTILINE))
    files = re.findall(r"(?<![\w/])((?:tools|requirements|\.ci)/[\w.]+)", commands)
    goals = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", commands))
    assert goals <= targets(), f"not in the Makefile: {sorted(goals - targets())}"
    assert not [file for file in files if not (house.ROOT / file).is_file()]
    assert name != "ci.yml" or ".ci/run" in files


@pytest.mark.parametrize("path", DOCUMENTS, ids=house.relative)
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    bad = []
    for pair in LINK.findall(FENCE.sub("", text)):
        link = pair[0] or pair[1]
        if re.match(r"[a-z]+:", link):
            continue  # the network is not asked
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        generated = name.startswith("api/")  # pages that `make docs` writes
        if not (target.exists() or generated) or (
            anchor and target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8"))
        ):
            bad.append(link)
    assert not bad, f"{house.relative(path)}: {bad}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=house.relative)
def test_files_named_in_code_marks_exist(path):
    """`csrc/...`, `tests/...` and the like, as code, are files of this repository."""
    text = path.read_text(encoding="utf-8")
    pattern = r"`((?:csrc|tests|tools|docs|examples|benchmarks|fuzz)/[\w./-]*\w)`"
    missing = [name for name in re.findall(pattern, text) if not (house.ROOT / name).exists()]
    assert not missing, f"{house.relative(path)} names {missing}"


@pytest.mark.parametrize(
    ("function", "default"),
    [
        (CheckpointManager, "keep=None"),
        (reshard, "overwrite=False"),
        (mlstate.save, "lock_timeout=0"),
        (FSDPBackwardHook.register_hooks, 'gradients="shard"'),
        (rename, 'unused="error"'),
    ],
)
def test_changelog_names_changed_defaults(function, default):
    name, _, value = default.partition("=")
    assert repr(inspect.signature(function).parameters[name].default) == value.replace('"', "'")
    text = (house.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = text.partition("### Changed defaults")[2].partition("\n### ")[0]
    assert default in section
