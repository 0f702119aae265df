"""`vllm completion`: what the shells' scripts are told, and bash running its own."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import argcomplete
import pytest

from vllm.cli.completion import answer_shell
from vllm.cli.main import build_parser, main

BASH = shutil.which("bash")


class Ended(Exception):
    """The process would end."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with one file, in which all commands run."""
    (tmp_path / "a file.yaml").write_text("device: tpu\nunknown: 1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"": "1", "_IFS": "\n", "_COMP_WORDBREAKS": " =", "_SUPPRESS_SPACE": "1"}.items():
        monkeypatch.setenv(f"_ARGCOMPLETE{name}", value)
    # It would open, and later close, a descriptor that pytest has.
    monkeypatch.setattr(argcomplete.CompletionFinder, "_init_debug_stream", lambda finder: None)
    # It is the error stream of when the module was imported, which may be closed by now.
    monkeypatch.setattr("argcomplete.io.debug_stream", io.StringIO())
    return monkeypatch


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from leaves(child)
            return
    yield parser


def offers(asked: pytest.MonkeyPatch, line: str, shell: str = "bash") -> list[str]:
    """The words that a shell is offered for the end of a line."""

    def end(code: int = 0) -> NoReturn:
        raise Ended

    asked.setenv("COMP_LINE", line)
    asked.setenv("COMP_POINT", str(len(line)))
    asked.setenv("_ARGCOMPLETE_SHELL", shell)
    stream = io.StringIO()
    with pytest.raises(Ended):
        answer_shell(build_parser(), output_stream=stream, exit_method=end)
    return stream.getvalue().splitlines()


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
        ("vllm chat some/folder --no-enable-pre", ["--no-enable-prefix-caching"]),
        ("vllm chat --model ", ["a\\ file.yaml"]),
        ("vllm chat ", ["a\\ file.yaml"]),
        ("vllm chat bench lat", []),
        ("vllm score --labels chat --pic", ["--picture"]),
        ("vllm completion ", ["bash", "zsh", "fish"]),
        ("vllm chat --config ", ["a\\ file.yaml"]),
        ("vllm chat --config a\\ file.yaml --dev", ["--device"]),
        ("vllm chat --config none.yaml --dev", ["--device"]),
    ],
)
def test_what_is_offered(asked: pytest.MonkeyPatch, line: str, offered: list[str]) -> None:
    assert offers(asked, line) == offered


def test_every_command_and_flag_is_there(asked: pytest.MonkeyPatch) -> None:
    for parser in leaves(build_parser()):
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        flags = {name for action in shown for name in action.option_strings}
        assert set(offers(asked, f"{parser.prog} -")) == flags


def test_help_is_shown_where_the_shell_can(asked: pytest.MonkeyPatch) -> None:
    assert offers(asked, "vllm cha", "zsh") == ["chat:talk to a model"]
    asked.setenv("_ARGCOMPLETE_DFS", "\t")
    assert offers(asked, "vllm cha", "fish") == ["chat\ttalk to a model"]


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o nospace -o default -o bashdefault -F _python_argcomplete vllm"),
        ("zsh", "compdef _python_argcomplete vllm"),
        ("fish", "complete --command vllm "),
    ],
)
def test_each_shell_has_its_script(shell: str, registers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert registers in capsys.readouterr().out


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
def test_bash_runs_its_script(tmp_path: Path) -> None:
    assert BASH is not None
    (tmp_path / "vllm").write_text(f'#!/bin/sh\nexec {sys.executable} -m vllm.cli.main "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    code = """eval "$(vllm completion bash)"
    for COMP_LINE in "vllm chat --device=c" "vllm ben"; do
        COMP_POINT=${#COMP_LINE} COMP_TYPE=9
        _python_argcomplete vllm
        printf "%s\\n" "${COMPREPLY[@]}"
    done"""
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run([BASH, "--norc", "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["cpu", "cuda", "bench"] and result.stderr == ""


def test_no_such_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["completion", "cmd"])
    assert end.value.code == 2
    assert "'cmd'" in capsys.readouterr().err
