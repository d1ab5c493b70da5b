"""The command line: output and exit status."""

import argparse
import re

import numpy as np
import pytest
from command_table import COMMANDS
from mlpackage_writer import KV, spec_bytes, state, write_package

import mlstate
from mlstate.cli.command_line import _name_options, _parser


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


PLAN = ("coreml", "plan")


@pytest.mark.parametrize(
    ("source", "target", "position", "status", "texts"),
    [
        ("small", "large", 200, 0, ["expand", "200 tokens: fits"]),
        ("large", "small", 300, 1, ["problem: kv_cache: 300 tokens do not fit"]),
    ],
)
def test_plan_tells_whether_the_tokens_fit(packages, run, source, target, position, status, texts):
    result, out, err = run(*PLAN, packages[source], packages[target], "--at", position)
    assert (result, err) == (status, [])
    assert all(text in "\n".join(out) for text in texts)


def test_plan_as_json(packages, run_json):
    status, data = run_json(*PLAN, packages["large"], packages["small"], "--at", 180)
    assert (status, data["fits"]) == (0, True)
    assert data["moves"][0]["direction"] == "compact"
    assert data["moves"][0]["source_shape"] == [36, 1, 512, 256]
    assert data["copied_bytes"] == 36 * 180 * 256 * 2


def test_plan_between_functions(packages, run, refused):
    both = [*PLAN, packages["both"], packages["both"]]
    functions = ["--source-function", "long", "--target-function", "short"]
    assert run(*both, "--at", 256, *functions)[0] == 0
    assert run(*both, "--at", 257, *functions)[0] == 1
    assert "no function 'no'" in refused(*both, "--at", 1, "--source-function", "no")
    error = refused(*both, "--at", 1, "--source-function", "shirt")
    assert "; did you mean 'short'?" in error


def test_states(packages, run):
    status, out, _ = run("coreml", "states", packages["both"])
    assert status == 0
    assert out == [
        "short (default)",
        "  kv_cache  float16  36x1x256x256  4.50 MiB",
        "long",
        "  kv_cache  float16  36x1x512x256  9.00 MiB",
    ]


def test_states_as_json(packages, run_json):
    status, data = run_json("coreml", "states", packages["both"])
    assert (status, data["default_function"]) == (0, "short")
    assert data["functions"]["long"] == [
        {
            "name": "kv_cache",
            "shape": [36, 1, 512, 256],
            "dtype": "float16",
            "bytes": 36 * 512 * 256 * 2,
        }
    ]


def test_states_of_a_model_without_any_and_without_default(tmp_path, run):
    package = write_package(tmp_path / "m", spec_bytes(functions=[("a", []), ("b", [])]))
    expected = ["a", "  no states", "b", "  no states"]
    assert run("coreml", "states", package)[:2] == (0, expected)


def test_warnings_are_one_line_each(tmp_path, run):
    package = write_package(tmp_path / "m", spec_bytes(state("kv", (2, 1, 100, 32))))
    status, _, [error] = run("coreml", "states", package)
    assert status == 0
    assert error.startswith("mlstate: warning: state 'kv' has the shape (2, 1, 100, 32)")


@pytest.mark.parametrize("command", ["states", "plan"])
@pytest.mark.parametrize("fault", ["missing", "folder", "damaged", "newline"])
def test_unreadable_input_is_one_line_and_status_2(tmp_path, refused, fault, command):
    package = tmp_path / "bad.mlpackage"
    if fault == "folder":
        package.mkdir()
    elif fault == "damaged":
        write_package(package, spec_bytes(state("kv", KV))[:-3])
    elif fault == "newline":
        package = tmp_path / "a\nb"
    extra = [package, "--at", 3] if command == "plan" else []
    error = refused("coreml", command, package, *extra)
    assert error.startswith("mlstate: ")
    assert "bad.mlpackage" in error or fault == "newline"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        *([name, *call.split()] for name, row in COMMANDS.items() for call in row.wrong),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_status_2(refused, arguments):
    error = refused(*arguments)
    assert error.startswith("mlstate: ")
    assert "--help" in error


def test_the_program_alone_prints_its_help(run):
    status, out, _ = run()
    assert status == 0
    assert any("inspect" in line for line in out)


def test_the_table_of_commands_is_complete(run):
    status, out, _ = run("--help")
    assert status == 0
    names = re.findall(r"^    (\w+) ", "\n".join(out), re.MULTILINE)
    assert names == [*COMMANDS, "help"] and all(row.wrong for row in COMMANDS.values())


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
def test_a_misspelled_word_is_answered_with_the_one_meant(folder, refused, arguments, meant):
    assert f"; did you mean '{meant}'?" in refused(*arguments)
    assert [path.name for path in folder.iterdir()] == ["ckpt"]


def test_dissimilar_word_gets_no_suggestion(folder, refused):
    for arguments in (["xyzzy"], ["inspect", "ckpt", "--xyzzy"], ["inspect", "ckpt", "other"]):
        error = refused(*arguments)
        assert "did you mean" not in error and "there are" not in error
    assert "see mlstate inspect --help" in error


def test_a_negative_position_is_status_2(packages, refused):
    error = refused(*PLAN, packages["small"], packages["large"], "--at", "-1")
    assert "position -1 is negative" in error


@pytest.mark.parametrize("arguments", [["--help"], ["coreml", "--help"], ["coreml", "plan", "-h"]])
def test_help_is_good(run, arguments):
    status, out, _ = run(*arguments)
    assert status == 0
    assert "usage: mlstate" in out[0]


def test_version(run):
    assert run("--version") == (0, [f"mlstate {mlstate.__version__}"], [])


def test_help_shows_a_command(run, refused):
    for command in (["verify"], ["cache", "convert"], []):
        assert run("help", *command) == run(*command, "--help")
    assert "choose from" in refused("help", "nothing")


def test_a_wrong_step_lists_the_choices(refused):
    text = refused("inspect", "run", "--step", "last")
    assert "argument --step: expected a number, latest or best, got 'last'" in text


def test_a_model_of_the_hub_is_downloaded_first(refused):
    assert "hf download owner/model makes it one" in refused("inspect", "hf://owner/model/main")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("set A_B=true or storage_options={'c': {'d': True}}: x", "set A_B=true: x"),
        ("set REGION or pass storage_options={'region': ...}", "set REGION"),
        ("in the environment or storage_options", "in the environment"),
        ("call f.g(a, b=...) (f a on the command line), or h", "call f a, or h"),
        (
            "cast='bfloat16' or cast= or recast= or 'cast='",
            "--dtype bfloat16 or --dtype or recast= or 'cast='",
        ),
        ("pass overwrite=True; overwrite is a word", "pass --overwrite; overwrite is a word"),
        ("max_shard_bytes is 0, files_from= too", "--max-shard-bytes is 0, --files-from too"),
        ("without step=, with step=3", "without --step, with --step 3"),
    ],
)
def test_errors_have_the_words_of_the_command(text, expected):
    arguments = argparse.Namespace()
    _parser().parse_args(["convert", "a", "b"], arguments)
    assert _name_options(text, arguments.parser) == expected
