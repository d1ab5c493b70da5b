"""Names of paths, and names in files of others, cannot control the terminal."""

import json
import os

import numpy as np
import pytest
from command_table import COMMANDS, call_of
from mlpackage_writer import spec_bytes, state, write_package

import mlstate
from mlstate._common.text import printable
from mlstate.checkpoint import CheckpointManager
from mlstate.cli import main

BAD = "a\x1b[31m\r\nb\u202ec\x7f\x9b"
NAMES = [BAD, "x\udcff", "\x07", "tab\there", "\u2066iso\u2069", "line\u2028two", "nul\x1b]0;t\x07"]
STATE = {"w": np.ones(3)}


def shown(capsys):
    """What a command printed; no line has a character that a terminal would obey."""
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert all(line.isprintable() for line in text.split("\n")), repr(text)
    return text


def hostile_checkpoint(folder):
    """A run whose tensors, metadata and foreign files have hostile names."""
    manager = CheckpointManager(folder, keep=None)
    for step in (1, 2):
        manager.save(step, {BAD: np.full(3, step)}, metadata={BAD: BAD})
    (folder / "params" / f"{BAD}.txt").touch()
    return folder


CALLS = [
    *(
        call_of(name, source=source, other="{run}", target="{out}")
        for name, row in COMMANDS.items()
        for source in ("{run}", "{file}", "{missing}", "{broken}")
        if "{source}" in row.call
    ),
    ["inspect", "--shards", "{run}"],
    ["verify", "--all-steps", "{run}"],
    ["diff", "{run}", "{missing}"],
    ["convert", "{run}", "{out}.npz"],
    ["convert", "{run}", "{out}.{missing}"],
    ["reshard", "{run}", "{out}", "--layout", "{missing}", "--world-size", "1"],
    ["prune", "{run}", "--keep", "1", "--dry-run"],
    ["{name}"],
    ["inspect", "--{name}", "x"],
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_no_command_prints_a_control_character(tmp_path, capsys, words, name):
    base = tmp_path / name
    base.mkdir()
    places = {"name": name, "missing": base / "missing", "out": base / "out"}
    places["run"] = hostile_checkpoint(base / "run")
    places["file"], places["broken"] = base / "m.safetensors", base / "b.safetensors"
    mlstate.save_file({BAD: np.ones(3)}, places["file"], {BAD: BAD})
    places["broken"].write_bytes(b"x" * 30)
    capsys.readouterr()
    main([word.format(**places) for word in words])
    shown(capsys)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_json_stays_json(tmp_path, capsys, command, name):
    folder = hostile_checkpoint(tmp_path / name)
    main([command, "--json", str(folder)])
    assert os.path.basename(json.loads(capsys.readouterr().out)["path"]) == name  # noqa: PTH119


def test_names_of_states_are_escaped(tmp_path, capsys):
    spec = spec_bytes(state(BAD, (2, 1, 64, 32)), state("k", (2, 1, 64, 32)))
    package = write_package(tmp_path / "m.mlpackage", spec)
    assert main(["coreml", "states", str(package)]) == 0
    assert "\\x1b" in shown(capsys)
    main(["coreml", "plan", str(package), str(package), "--at", "1"])
    assert "\\x1b" in shown(capsys)


def test_printable_text_stays_as_it_is():
    text = "straße 日本 naïve 'x' \\n"
    assert printable(text) is text
    assert printable("é\n日\x1b") == "é\\n日\\x1b"
