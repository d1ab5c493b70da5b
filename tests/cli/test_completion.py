"""Completion scripts: shells parse them, and complete the parser's options."""

import shutil
import sys

import child
import pytest

from mlstate.cli import main

COMPLETE = """
source ./script
COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
COMP_LINE="${{COMP_WORDS[*]}}" COMP_POINT=${{#COMP_LINE}}
_shtab_mlstate
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(tmp_path, capsys):
    """Write the script for a shell."""
    pytest.importorskip("shtab", reason="writes the scripts")

    def write(shell):
        assert main(["--print-completion", shell]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        (tmp_path / "script").write_text(out)
        return out

    return write


@pytest.mark.parametrize(
    ("words", "completion"),
    [
        ("mlstate ins", "inspect"),
        ("mlstate verify --all", "--all-steps"),
        ("mlstate convert --to saf", "safetensors"),
        ("mlstate coreml sta", "states"),
        ("mlstate inspect check", "checkpoint"),
        ("mlstate reshard check", "checkpoint"),
    ],
)
def test_bash_completes(script, tmp_path, words, completion):
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    script("bash")
    (tmp_path / "checkpoint").mkdir()
    done = child.finished(["bash", "-c", COMPLETE.format(words=words)], folder=tmp_path)
    assert (done.stdout.split(), done.stderr) == ([completion], "")


@pytest.mark.parametrize(
    ("shell", "start"), [("zsh", "#compdef mlstate\n"), ("fish", "# AUTO"), ("tcsh", "# AUTO")]
)
def test_scripts_for_other_shells(script, tmp_path, shell, start):
    text = script(shell)
    assert text.startswith(start)
    assert "inspect" in text and "all-steps" in text
    if shutil.which(shell):
        assert child.finished([shell, "-n", "script"], folder=tmp_path).returncode == 0


def test_missing_shtab_names_the_extra(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    error = refused("--print-completion", "bash")
    assert error == "mlstate: shell completion needs shtab: pip install 'mlstate[completion]'"


def test_an_unknown_shell_is_wrong_usage(refused):
    assert "; did you mean 'bash'?" in refused("--print-completion", "bsh")
