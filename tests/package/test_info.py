"""`mlstate.info` and ``mlstate info``: one line a fact, on every kind of machine."""

import inspect
import json
import platform
import re
import subprocess
import sys

import child
import numpy as np
import pytest
from html_page import Page
from thread_team import num_threads

import mlstate
from mlstate import _core, _info
from mlstate.cli import main

STORES = ("plain", "loop", "stream1")


def choice(operation, destination, chosen, *speeds, cache="past"):
    return {
        "operation": operation,
        "cache": cache,
        "destination": destination,
        "chosen": chosen,
        "gigabytes_per_second": dict(zip(STORES, speeds or (None, None, None), strict=True)),
    }


def choices(*some):
    return {
        "forced": "auto",
        "variants": 7,
        "cache_bytes": 32 << 20,
        "least_bytes": {
            "small": 32 << 10,
            "small_8x": 256 << 10,
            "small_64x": 2 << 20,
            "within": 2 << 20,
            "within_4x": 8 << 20,
            "within_16x": 16 << 20,
            "past": 16 << 20,
        },
        "choices": list(some),
    }


UNKNOWN = choices(choice("copy", "touched", None), choice("copy", "fresh", None))
KNOWN = choices(
    choice("copy", "touched", "stream1", 7.61, 2.8, 11.12),
    choice("copy", "fresh", None),
)


class Core:
    """The two functions of the core that tell `mlstate.info` how copies work."""

    def __init__(self, before, after=None):
        self.now, self.after, self.measured = before, after, 0

    def copy_choices(self):
        return self.now

    def measure_copies(self):
        self.measured += 1
        self.now = self.after


@pytest.fixture
def core(monkeypatch):
    def use(before, after=None):
        fake_core = Core(before, after)
        monkeypatch.setattr(_core, "copy_choices", fake_core.copy_choices)
        monkeypatch.setattr(_core, "measure_copies", fake_core.measure_copies)
        return fake_core

    return use


def lines_of(facts):
    return dict(line.split(maxsplit=1) for line in str(facts).splitlines())


# ---- output ----


def test_every_fact_has_a_line(core):
    core(KNOWN)
    facts = mlstate.info()
    lines = str(facts).splitlines()
    assert [line[:13].strip() for line in lines] == [
        "mlstate",
        "Python",
        "NumPy",
        "system",
        "processor",
        "instructions",
        "threads",
        "copies",
        "huge pages",
        *_info.PACKAGES,
    ]
    assert all(line[13] == " " and line[14:].strip() for line in lines)
    assert repr(facts) == str(facts)


def test_facts_describe_this_process(core):
    core(KNOWN)
    with num_threads(3):
        facts = mlstate.info()
    assert facts.version == mlstate.__version__
    assert facts.python.startswith(platform.python_version())
    assert facts.numpy == np.__version__
    assert platform.machine() in facts.system
    assert facts.threads == 3
    assert facts.processors >= 1
    assert facts.instruction_set == _core.cpu_name()


def test_offered_instruction_sets_are_those_that_can_be_asked_for():
    offered = _core.cpu_offered()
    assert offered[0] == "scalar" and _core.cpu_name() in offered
    assert set(offered) <= {"scalar", "avx2", "avx512", "neon"}
    code = "import mlstate; print(mlstate.info().instruction_set)"
    for name in offered:
        assert child.run(f"import os; os.environ['MLSTATE_CPU'] = {name!r}; {code}").strip() == name


def test_info_omits_host_and_user_names(core):
    core(KNOWN)
    text = json.dumps(mlstate.info().to_dict())
    host = platform.node()
    assert not host or not re.search(rf"\b{re.escape(host)}\b", text)
    assert sys.prefix not in text


def test_the_page_has_all_lines(core):
    core(KNOWN)
    facts = mlstate.info()
    page = "".join(Page(facts._repr_html_()).texts)
    for line in str(facts).splitlines():
        assert line[14:] in page


# ---- the choice of stores ----


@pytest.mark.parametrize(
    ("before", "after", "text", "measured"),
    [
        (
            KNOWN,
            None,
            "from 16.00 MiB: stream1 (plain 7.6, loop 2.8, stream1 11.1 GB/s); smaller: loop",
            0,
        ),
        (UNKNOWN, UNKNOWN, "from 32.00 KiB: not measured; smaller: loop", 1),
        ({**UNKNOWN, "forced": "loop"}, None, "loop, forced by MLSTATE_COPY", 0),
        ({**UNKNOWN, "variants": 1}, None, "plain, the only way of this instruction set", 0),
    ],
    ids=["known", "nothing found", "forced", "one"],
)
def test_copies_as_the_core_chose_them(core, before, after, text, measured):
    fake_core = core(before, after)
    facts = mlstate.info()
    assert lines_of(facts)["copies"] == text
    assert lines_of(facts)["processor"].endswith(", cache of 32.00 MiB")
    assert facts.copies == before
    assert fake_core.measured == measured


def test_the_core_measures_once(core):
    fake_core = core(UNKNOWN, KNOWN)
    assert mlstate.info().copies == KNOWN
    assert mlstate.info().copies == KNOWN
    assert fake_core.measured == 1


def test_other_operations_are_shown_once_measured():
    some = choices(
        choice("copy", "touched", None),
        choice("copy", "touched", "plain", 9.0, 8.0, None, cache="small"),
        choice("copy", "fresh", None, 5.0, None, None),
        choice("fill", "touched", None),
        choice("widen", "touched", "stream1", 4.0, None, 5.0),
        choice("checksum", "fresh", "plain", 3.0, None, 2.0),
        choice("gather", "touched", "plain", 1.0, None, None),
    )
    assert _info._choice_lines(some) == [
        (
            "copies",
            "from 32.00 KiB: plain (plain 9.0, loop 8.0 GB/s); "
            "fresh memory from 16.00 MiB: not decided (plain 5.0 GB/s); smaller: loop",
        ),
        ("widening", "from 16.00 MiB: stream1 (plain 4.0, stream1 5.0 GB/s)"),
        ("checksums", "fresh memory from 16.00 MiB: plain (plain 3.0, stream1 2.0 GB/s)"),
        ("gather", "from 16.00 MiB: plain (plain 1.0 GB/s)"),
    ]


def test_a_cache_of_unknown_size_is_left_out(core):
    core({**KNOWN, "cache_bytes": 0})
    assert "cache" not in lines_of(mlstate.info())["processor"]


@pytest.mark.parametrize("forced", ["auto", "plain", "loop", "stream1"])
@pytest.mark.parametrize("cpu", _core.cpu_offered())
def test_the_copies_of_this_machine(forced, cpu):
    code = f"""
import os
os.environ.update(MLSTATE_COPY={forced!r}, MLSTATE_CPU={cpu!r})
import mlstate
found = mlstate.info()
print(found.copies["variants"])
print(found)
"""
    variants, *lines = child.run(code).splitlines()
    (copies,) = (line[14:] for line in lines if line.startswith("copies"))
    if forced != "auto":
        assert copies == f"{forced}, forced by MLSTATE_COPY"
    elif variants == "1":
        assert copies == "plain, the only way of this instruction set"
    else:
        assert re.match(r"from .* [KM]iB: (plain|loop|stream1) \(plain \d+\.\d", copies), copies


# ---- the processor ----


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n\n"
            "processor\t: 1\nmodel name\t: another\n",
            "AMD EPYC (family 25 model 1)",
        ),
        ("model name : Cortex\n", "Cortex"),
        (
            "processor : 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n",
            "arm64 implementer 0x41 part 0xd0c",
        ),
        ("cpu family : 6\nmodel name : X: 3\n", "X: 3 (family 6 model ?)"),
        ("", None),
        ("model name :\n", None),
        (None, None),
    ],
)
def test_the_processor_of_linux(tmp_path, monkeypatch, text, name):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(_info, "_CPUINFO", path)
    monkeypatch.setattr(sys, "platform", "linux")
    assert _info._linux_processor() == name
    assert _info._processor_name() == (name or platform.processor() or platform.machine())


def test_the_processor_of_a_mac(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    calls = []

    def answer(command, **options):
        calls.append(command)
        return subprocess.CompletedProcess(command, 0, "Apple M2\n", "")

    monkeypatch.setattr(subprocess, "run", answer)
    assert _info._processor_name() == "Apple M2"
    assert calls == [["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]]


@pytest.mark.parametrize(
    "error", [FileNotFoundError("no sysctl"), subprocess.TimeoutExpired("sysctl", 5)]
)
def test_a_mac_that_does_not_answer(monkeypatch, error):
    def fail(command, **options):
        raise error

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert _info._processor_name() == "arm"
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "")
    assert _info._processor_name() == "unknown"


def test_processor_count_without_affinity(monkeypatch):
    monkeypatch.delattr(_info.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(_info.os, "cpu_count", lambda: 7)
    assert _info._processor_count() == 7
    monkeypatch.setattr(_info.os, "cpu_count", lambda: None)
    assert _info._processor_count() == 1


# ---- huge pages ----


@pytest.mark.parametrize(
    ("files", "facts", "text"),
    [
        (
            {
                "enabled": "always [madvise] never\n",
                "defrag": "always [defer] never\n",
                "hpage_pmd_size": "2097152\n",
            },
            {"enabled": "madvise", "defrag": "defer", "bytes": 2097152},
            "madvise, defrag defer, 2.00 MiB",
        ),
        ({"enabled": "[never]\n"}, {"enabled": "never", "defrag": None, "bytes": None}, "never"),
        (
            {"enabled": "always\n", "hpage_pmd_size": "large\n"},
            {"enabled": "always", "defrag": None, "bytes": None},
            "always",
        ),
        ({}, None, "unknown"),
    ],
)
def test_huge_pages(tmp_path, monkeypatch, files, facts, text):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(_info, "_HUGE_PAGES", tmp_path)
    assert _info._huge_pages() == facts
    assert _info._huge_pages_text(facts) == text


# ---- versions ----


def install(folder, name, version):
    (folder / f"{name}-1.dist-info").mkdir()
    (folder / f"{name}-1.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\n" + (f"Version: {version}\n" if version else "")
    )


def test_packages_are_found_without_importing_them(tmp_path, monkeypatch):
    install(tmp_path, "not_there", "1.2.3")
    (tmp_path / "not_there.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert _info._package_version("not_there") == "1.2.3"
    assert _info._package_version("nowhere_at_all") is None
    install(tmp_path, "half_there", None)
    assert _info._package_version("half_there") == "unknown"


def test_a_loaded_package_has_the_last_word(monkeypatch):
    loaded = type(sys)("torch")
    loaded.__version__ = "9.9+mine"
    monkeypatch.setitem(sys.modules, "torch", loaded)
    assert mlstate.info().packages["torch"] == "9.9+mine"


def test_optional_packages_are_not_imported():
    code = """
import sys, mlstate
assert "importlib.metadata" not in sys.modules and "mlstate._info" not in sys.modules
found = mlstate.info()
print(*set(found.packages) & set(sys.modules))
"""
    assert child.run(code).strip() == ""


def test_a_python_without_the_gil_is_named(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert _info._python_version().endswith(", without the GIL)")


# ---- the command ----


def test_the_command_prints_the_lines(core, capsys):
    core(KNOWN)
    assert main(["info"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{mlstate.info()}\n"
    assert err == ""


def test_the_command_prints_json(core, capsys):
    core(KNOWN)
    assert main(["info", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == mlstate.info().to_dict()
    assert data["copies"]["choices"][0]["gigabytes_per_second"]["stream1"] == 11.12
    assert list(data) == [
        "version",
        "python",
        "numpy",
        "system",
        "processor",
        "instruction_set",
        "offered_instruction_sets",
        "threads",
        "processors",
        "copies",
        "huge_pages",
        "packages",
    ]


def test_the_name_is_public():
    assert "info" in mlstate.__all__ and "info" in dir(mlstate)
    assert inspect.unwrap(mlstate.info) is _info.info
