"""The `vllm` command itself."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import vllm
from vllm.cli import main as cli
from vllm.cli.serve import SignalsBeforeReady
from vllm.exceptions import CliError, VLLMValidationError


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["score", "--help"], ["bench", "latency", "--help"]])
def test_help_and_version_import_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from vllm.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'matplotlib', 'rich', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: vllm ") or result.stdout == f"vllm {vllm.__version__}\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"vllm {vllm.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["score"], "FILE"),
        (["score", "a.jsonl", "--labels", "x", "--label-ids", "1"], "not allowed with"),
        (["score", "a.jsonl", "--label-ids", "1.5"], "1.5"),
        (["score", "a.jsonl", "--labels"], "--labels"),
        (["score", "a.jsonl", "--labels", "x", "--dtype"], "--dtype"),
        (["serve", "a", "--model", "b"], "vllm serve: error: argument MODEL: not allowed with argument --model"),
        (["chat", "--model=b", "a"], "vllm chat: error: argument MODEL: not allowed with argument --model"),
        (["chat", "--tempreature=0"], "vllm chat: error: unrecognized arguments: --tempreature=0; did you mean --temp"),
        (["chat", "--temp", "0"], "unrecognized arguments: --temp"),
        (["chat", "model", "hello"], "vllm chat: error: unrecognized arguments: hello (see"),
    ],
)
def test_bad_usage_is_exit_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_run_without_a_task_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["score", "a.jsonl"]) == 2
    assert "one of --labels, --label-ids, --prompt-logprobs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (CliError("the file is bad"), 2, "vllm score: error: the file is bad\n"),
        (VLLMValidationError("max_tokens must be at least 0"), 2, "vllm score: error: max_tokens must be at least 0\n"),
        (RuntimeError("it\nbroke"), 1, "vllm score: error: RuntimeError: it broke (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "vllm score: interrupted\n"),
    ],
)
def test_errors_are_one_line(
    raised: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(args: object) -> int:
        raise raised

    monkeypatch.setattr("vllm.cli.score.run", run)
    assert cli.main(["score", "a.jsonl", "--labels", "x"]) == code
    captured = capsys.readouterr()
    assert captured.err == line
    assert captured.out == ""


@pytest.mark.parametrize(("raised", "code"), [(CliError("bad file"), 2), (RuntimeError("broke"), 1)])
def test_debug_shows_the_traceback(
    raised: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        raise raised

    monkeypatch.setattr("vllm.cli.score.run", run)
    assert cli.main(["score", "a.jsonl", "--labels", "x", "--debug"]) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("vllm score: error: ")


def test_ctrl_c_is_no_traceback() -> None:
    code = (
        "import sys, time\nfrom vllm.cli import main, score\n"
        "score.run = lambda args: print('started', flush=True) or time.sleep(60)\n"
        "sys.exit(main.main(['score', 'a', '--labels', 'x']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"vllm score: interrupted\n")
    assert process.returncode == 130


def test_help_through_a_closed_pipe() -> None:
    """As `vllm score --help | head`, whose reader is gone when the interpreter flushes."""
    command = [sys.executable, "-m", "vllm.cli.main", "score", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    # argparse swallows the error where it meets it first.
    assert process.wait(timeout=60) in (0, 141)


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _leaves(child)
            return
    yield parser


def test_every_command_has_the_frame(capsys: pytest.CaptureFixture[str]) -> None:
    for parser in _leaves(cli.build_parser()):
        with pytest.raises(SystemExit) as end:
            cli.main([*parser.prog.split()[1:], "--help"])
        assert end.value.code == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: {parser.prog} [options]")
        assert "--config FILE" in shown and "--debug" in shown
        for action in parser._actions:
            assert action.help, f"{parser.prog}: {action.dest} has no help"


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    code = (
        "import sys\nfrom vllm.cli import main, score\n"
        "score.run = lambda args: print('x' * 100_000) or 0\n"
        "sys.exit(main.main(['score', 'a', '--labels', 'x']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


@pytest.mark.parametrize(("signum", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_that_a_destructor_swallows_is_not_lost(
    signum: int, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    class Swallows:
        def __del__(self) -> None:
            signal.raise_signal(signum)

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        signals = SignalsBeforeReady()
        signals.check()
        Swallows()
        assert [each.exc_type for each in unraisable] == [raised]
        with pytest.raises(raised) as error:
            signals.check()
        assert getattr(error.value, "code", None) in (None, 128 + signum)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
