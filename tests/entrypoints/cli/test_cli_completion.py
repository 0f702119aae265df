"""`vllm completion`: bash runs its script here; of the other shells' the contents are checked."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.entrypoints.cli.completion import commands
from vllm.entrypoints.cli.completion_scripts import SCRIPTS, Command, Flag
from vllm.entrypoints.cli.main import build_parser, main

BASH = shutil.which("bash")
TRICKY = [
    Command("", (Flag(("--help",), "it's here", False, ()),), {"go": "it's: a \\ word"}, False),
    Command("go", (Flag(("--at", "-a"), "$(touch broken)", True, ("x", "y")),), {}, True),
]


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from leaves(child)
            return
    yield parser


def complete(script: str, line: str, folder: Path) -> list[str]:
    """What bash offers for the last word of a line, as readline splits it."""
    words = [word for word in re.split(r"\s|(=)", line) if word is not None]
    assert BASH is not None
    quoted = " ".join(f"'{word}'" for word in words)
    code = f'{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _vllm; printf "%s\\n" "${{COMPREPLY[@]}}"'
    result = subprocess.run([BASH, "--norc", "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return result.stdout.split()


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("vllm ch", ["chat"]),
        ("vllm comp", ["complete", "completion"]),
        ("vllm --v", ["--version"]),
        ("vllm bench ", ["latency", "throughput", "serve"]),
        ("vllm bench latency --batch", ["--batch-size"]),
        ("vllm bench throughput --batch", []),
        ("vllm chat --device ", ["auto", "cpu", "cuda"]),
        ("vllm chat --device=c", ["cpu", "cuda"]),
        ("vllm chat --device=", ["auto", "cpu", "cuda"]),
        ("vllm chat some/folder --no-enable-p", ["--no-enable-prefix-caching"]),
        ("vllm chat --model ", []),
        ("vllm chat ", []),
        ("vllm chat bench lat", []),
        ("vllm score --labels chat --pic", ["--picture"]),
        ("vllm completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_bash_completes(line: str, offered: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing is offered bash completes file names."""
    assert main(["completion", "bash"]) == 0
    assert complete(capsys.readouterr().out, line, tmp_path) == offered


@pytest.mark.parametrize("shell", SCRIPTS)
def test_every_command_and_flag_is_there(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for parser in leaves(build_parser()):
        path = parser.prog.removeprefix("vllm ")
        assert f'"{path}"' in script
        for flag in (name for action in parser._actions for name in action.option_strings):
            written = re.escape(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}")
            assert re.search(written if shell == "fish" else re.escape(flag), script), f"{path} {flag}"


def test_the_commands_are_those_of_the_parsers() -> None:
    found = {command.path: command for command in commands(build_parser())}
    assert set(found) >= {"", "chat", "bench", "bench latency", "completion"}
    device = next(flag for flag in found["chat"].flags if "--device" in flag.names)
    assert (device.takes_value, device.choices) == (True, ("auto", "cpu", "cuda"))
    debug = next(flag for flag in found["chat"].flags if "--debug" in flag.names)
    assert (debug.takes_value, debug.choices) == (False, ())
    assert list(found["bench"].words) == ["latency", "throughput", "serve"]
    assert found["score"].takes_files and not found["completion"].takes_files


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
def test_help_is_no_shell_code(tmp_path: Path) -> None:
    assert complete(SCRIPTS["bash"](TRICKY), "vllm go -a ", tmp_path) == ["x", "y"]
    assert not list(tmp_path.iterdir())
    assert r"'--help:it'\''s here'" in SCRIPTS["zsh"](TRICKY)
    assert r"'go:it'\''s: a \ word'" in SCRIPTS["zsh"](TRICKY)
    assert r"'it\'s: a \\ word'" in SCRIPTS["fish"](TRICKY)
    assert "'$(touch broken)'" in SCRIPTS["fish"](TRICKY)


def test_no_such_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["completion", "cmd"])
    assert end.value.code == 2
    assert "'cmd'" in capsys.readouterr().err
