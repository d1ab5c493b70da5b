"""The command line: output and exit status."""

import json
import re

import numpy as np
import pytest
from command_table import COMMANDS
from mlpackage_writer import KV, spec_bytes, state, write_package

import mlstate
from mlstate.cli import main


@pytest.fixture
def packages(tmp_path):
    small = write_package(tmp_path / "small.mlpackage", spec_bytes(state("kv_cache", KV)))
    large = write_package(
        tmp_path / "large.mlpackage", spec_bytes(state("kv_cache", (36, 1, 512, 256)))
    )
    both = write_package(
        tmp_path / "both.mlpackage",
        spec_bytes(
            functions=[
                ("short", [state("kv_cache", KV)]),
                ("long", [state("kv_cache", (36, 1, 512, 256))]),
            ],
            default="short",
        ),
    )
    return {"small": str(small), "large": str(large), "both": str(both)}


def plan(*arguments):
    return main(["coreml", "plan", *arguments])


def test_plan_that_fits(packages, capsys):
    assert plan(packages["small"], packages["large"], "--at", "200") == 0
    out, err = capsys.readouterr()
    assert "expand" in out
    assert "200 tokens: fits" in out
    assert err == ""


def test_plan_that_does_not_fit(packages, capsys):
    assert plan(packages["large"], packages["small"], "--at", "300") == 1
    out, err = capsys.readouterr()
    assert "problem: kv_cache: 300 tokens do not fit" in out
    assert err == ""


def test_plan_as_json(packages, capsys):
    assert plan(packages["large"], packages["small"], "--at", "180", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] is True
    assert data["moves"][0]["direction"] == "compact"
    assert data["moves"][0]["source_shape"] == [36, 1, 512, 256]
    assert data["copied_bytes"] == 36 * 180 * 256 * 2


def test_plan_between_functions(packages, capsys):
    functions = ["--source-function", "long", "--target-function", "short"]
    assert plan(packages["both"], packages["both"], "--at", "256", *functions) == 0
    assert plan(packages["both"], packages["both"], "--at", "257", *functions) == 1
    assert plan(packages["both"], packages["both"], "--at", "1", "--source-function", "no") == 2
    assert "no function 'no'" in capsys.readouterr().err
    assert plan(packages["both"], packages["both"], "--at", "1", "--source-function", "shirt") == 2
    assert "; did you mean 'short'?" in capsys.readouterr().err


def test_states(packages, capsys):
    assert main(["coreml", "states", packages["both"]]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "short (default)",
        "  kv_cache  float16  36x1x256x256  4.50 MiB",
        "long",
        "  kv_cache  float16  36x1x512x256  9.00 MiB",
    ]


def test_states_as_json(packages, capsys):
    assert main(["coreml", "states", packages["both"], "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["default_function"] == "short"
    assert data["functions"]["long"] == [
        {
            "name": "kv_cache",
            "shape": [36, 1, 512, 256],
            "dtype": "float16",
            "bytes": 36 * 512 * 256 * 2,
        }
    ]


def test_states_of_a_model_without_any_and_without_default(tmp_path, capsys):
    package = write_package(tmp_path / "m", spec_bytes(functions=[("a", []), ("b", [])]))
    assert main(["coreml", "states", str(package)]) == 0
    assert capsys.readouterr().out == "a\n  no states\nb\n  no states\n"


def test_warnings_are_one_line_each(tmp_path, capsys):
    package = write_package(tmp_path / "m", spec_bytes(state("kv", (2, 1, 100, 32))))
    assert main(["coreml", "states", str(package)]) == 0
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert err[0].startswith("mlstate: warning: state 'kv' has the shape (2, 1, 100, 32)")


@pytest.mark.parametrize("command", ["states", "plan"])
@pytest.mark.parametrize("fault", ["missing", "folder", "damaged", "newline"])
def test_unreadable_input_is_one_line_and_status_2(tmp_path, capsys, fault, command):
    package = tmp_path / "bad.mlpackage"
    if fault == "folder":
        package.mkdir()
    elif fault == "damaged":
        write_package(package, spec_bytes(state("kv", KV))[:-3])
    elif fault == "newline":
        package = tmp_path / "a\nb"
    extra = [str(package), "--at", "3"] if command == "plan" else []
    assert main(["coreml", command, str(package), *extra]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mlstate: ")
    assert err.count("\n") == 1
    assert "bad.mlpackage" in err or fault == "newline"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        *([name, *call.split()] for name, row in COMMANDS.items() for call in row.wrong),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_status_2(capsys, arguments):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mlstate: ")
    assert err.count("\n") == 1
    assert "--help" in err


def test_the_program_alone_prints_its_help(capsys):
    assert main([]) == 0
    assert "inspect" in capsys.readouterr().out


def test_the_table_of_commands_is_complete(capsys):
    assert main(["--help"]) == 0
    names = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert names == list(COMMANDS) and all(row.wrong for row in COMMANDS.values())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with one checkpoint."""
    mlstate.save(tmp_path / "ckpt", {"w": np.ones(3)})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["inspct", "run"], "inspect"),
        (["coreml", "state", "x"], "states"),
        (["verify", "run", "--al-steps"], "--all-steps"),
        (["prune", "run", "--lock-timout", "3"], "--lock-timeout"),
        (["prune", "run", "--lock-timout=3"], "--lock-timeout"),
        (["convert", "ckpt", "x", "--to", "safetensor"], "safetensors"),
        (["convert", "ckpt", "x.safetensor"], ".safetensors"),
        (["reshard", "ckpt", "x", "--layout", "row=2"], "rows"),
        (["reshard", "ckpt", "x", "--layout", "axes:1=2"], "axis"),
    ],
)
def test_a_misspelled_word_is_answered_with_the_one_meant(folder, capsys, arguments, meant):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"; did you mean '{meant}'?" in err
    assert [path.name for path in folder.iterdir()] == ["ckpt"]


def test_dissimilar_word_gets_no_suggestion(folder, capsys):
    for arguments in (["xyzzy"], ["inspect", "ckpt", "--xyzzy"], ["inspect", "ckpt", "other"]):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert "did you mean" not in err and "there are" not in err and err.count("\n") == 1
    assert "see mlstate inspect --help" in err


def test_a_negative_position_is_status_2(packages, capsys):
    assert plan(packages["small"], packages["large"], "--at", "-1") == 2
    assert "position -1 is negative" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["coreml", "--help"], ["coreml", "plan", "-h"]])
def test_help_is_good(capsys, arguments):
    assert main(arguments) == 0
    assert "usage: mlstate" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mlstate {mlstate.__version__}\n"
