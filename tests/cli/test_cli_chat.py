"""`vllm chat` and `vllm complete`: one message through pipes, many in a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams
from vllm.cli import chat, dialogue, generation
from vllm.cli.main import build_parser, main

TEMPLATE = """\
{% for message in messages %}{% if message.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}\
{{ message.role[0] }}:{{ message.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"""
GREEDY = SamplingParams(temperature=0, max_tokens=6)
FLAGS = ["--temperature", "0", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("chat"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def tiny(model: Path) -> LLM:
    return make_tiny_llm(model)


@pytest.fixture
def loaded(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """Commands take the engine that is loaded already, and leave it empty."""
    monkeypatch.setattr(generation, "load_engine", lambda args: tiny.llm_engine)
    yield tiny
    assert is_empty(tiny)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make stdin a terminal where these lines are typed, then Ctrl-D."""

    def typed(*lines: str | BaseException) -> None:
        remaining = iter(lines)

        def read(prompt: str) -> str:
            line = next(remaining, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)

    return typed


def answer(llm: LLM, *messages: str, system: str | None = None) -> str:
    """The greedy answer to a conversation in which the model answers the earlier messages."""
    conversation = [] if system is None else [{"role": "system", "content": system}]
    for message in messages:
        conversation.append({"role": "user", "content": message})
        (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
        conversation.append({"role": "assistant", "content": output.outputs[0].text})
    return conversation[-1]["content"]


def shown(text: str) -> str:
    """A model's bytes as a terminal is to get them: what is no printable character stands as U+FFFD."""
    return "".join(c if c.isprintable() or c == "\n" or ord(c) > 159 else "\ufffd" for c in text)


class TestOneMessage:
    @pytest.mark.parametrize("flag", ["--message", "--quick", "-q"])
    def test_chat(self, loaded: LLM, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["chat", flag, "hello", *FLAGS]) == 0
        assert capsys.readouterr() == (answer(loaded, "hello") + "\n", "")

    def test_chat_with_a_system_prompt(self, loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["chat", "--system-prompt", "be kind", "--message", "hello", *FLAGS]) == 0
        expected = answer(loaded, "hello", system="be kind")
        assert expected != answer(loaded, "hello")
        assert capsys.readouterr().out == expected + "\n"

    def test_chat_with_another_template(self, loaded: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
        assert main(["chat", "--chat-template", str(tmp_path / "t.jinja"), "-q", "the cat", *FLAGS]) == 0
        (output,) = loaded.generate(["the cat"], GREEDY, use_tqdm=False)
        assert capsys.readouterr().out == output.outputs[0].text + "\n"

    def test_complete(self, loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["complete", "--prompt", "the cat", *FLAGS]) == 0
        (output,) = loaded.generate(["the cat"], GREEDY, use_tqdm=False)
        assert capsys.readouterr().out == output.outputs[0].text + "\n"

    @pytest.mark.parametrize(("command", "text"), [("chat", "hello\nyou\n"), ("complete", "the\ncat\n")])
    def test_stdin_is_one_message(
        self, loaded: LLM, command: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main([command, *FLAGS]) == 0
        from_stdin = capsys.readouterr().out
        assert main([command, "-q", text[:-1], *FLAGS]) == 0
        assert capsys.readouterr().out == from_stdin

    def test_pieces_are_written_as_they_come(self, loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        params = SamplingParams(temperature=0, max_tokens=6, output_kind=generation.RequestOutputKind.DELTA)
        pieces = list(generation.stream(loaded.llm_engine, "the cat", params))
        assert len(pieces) > 1
        flushed: list[str] = []
        out = io.StringIO()
        monkeypatch.setattr(out, "flush", lambda: flushed.append(out.getvalue()))
        monkeypatch.setattr(sys, "stdout", out)
        dialogue.answer_once(lambda text: iter(pieces), "the cat")
        assert flushed[: len(pieces)] == ["".join(pieces[: i + 1]) for i in range(len(pieces))]

    def test_without_a_limit_the_context_is_filled(self, loaded: LLM) -> None:
        args = ["complete", "-q", "the", "--temperature", "0"]
        namespace = build_parser().parse_args(args)
        assert generation.sampling_params(namespace).max_tokens == 128
        namespace = build_parser().parse_args(["chat", *args[1:]])
        assert generation.sampling_params(namespace).max_tokens is None

    def test_the_models_own_sampling_gives_way_to_flags(self) -> None:
        namespace = build_parser().parse_args(["chat", "--top-p", "0.5"])
        params = generation.sampling_params(namespace, {"temperature": 0.6, "top_p": 0.9, "top_k": 7})
        assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 7)


class TestErrors:
    @pytest.mark.parametrize("command", ["chat", "complete"])
    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["-q", "a", "--temperature", "-1"], "temperature must be"),
            (["-q", "a", "--top-p", "2"], "top_p must be"),
            (["-q", "a", "--max-tokens", "-3"], "max_tokens must be"),
            (["-q", ""], "the message is empty"),
            ([], "the message is empty"),
        ],
    )
    def test_are_known_before_the_model_loads(
        self,
        command: str,
        flags: list[str],
        message: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        assert main([command, "no-such-folder", *flags]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"vllm {command}: error: {message}") and error.count("\n") == 1

    @pytest.mark.parametrize("command", ["chat", "complete"])
    def test_no_such_model(self, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([command, str(tmp_path / "nowhere"), "-q", "a"]) == 2
        error = capsys.readouterr().err
        assert "nowhere" in error and error.count("\n") == 1

    @pytest.mark.parametrize("command", ["chat", "complete"])
    def test_too_long(self, loaded: LLM, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([command, "-q", "x" * 200, *FLAGS]) == 2
        assert "max_model_len=128" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["chat", "complete"])
    def test_no_tokenizer(self, model: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([command, str(model), "-q", "a", "--skip-tokenizer-init"]) == 2
        assert "--skip-tokenizer-init: " in capsys.readouterr().err

    def test_a_fault_of_the_model(
        self, loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail() -> None:
            raise RuntimeError("broke")

        monkeypatch.setattr(loaded.llm_engine, "step", fail)
        assert main(["chat", "-q", "a", *FLAGS]) == 1
        assert capsys.readouterr().err == "vllm chat: error: RuntimeError: broke (--debug shows where)\n"


class TestTerminal:
    def test_the_history_is_kept_until_reset(self, loaded: LLM, typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
        typed("hello", "", "why?", "/reset", "why?", "/exit", "never asked")
        assert main(["chat", "--system-prompt", "be kind", *FLAGS]) == 0
        out = capsys.readouterr().out
        expected = [answer(loaded, *turns, system="be kind") for turns in (["hello"], ["hello", "why?"], ["why?"])]
        assert expected[1] != expected[2]
        assert out.endswith("".join(shown(text) + "\n" for text in expected))

    def test_a_message_that_fails_leaves_no_trace(
        self, loaded: LLM, typed: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        typed("hello", "refuse", "x" * 200, "/dance", "why?")
        assert main(["chat", *FLAGS]) == 0
        out = capsys.readouterr().out
        assert "error: messages: the chat template failed: no" in out
        assert "max_model_len=128" in out
        assert "/dance is no command; there are /reset, /exit" in out
        assert out.endswith(shown(answer(loaded, "hello", "why?")) + "\n\n")

    def test_complete_knows_no_history(self, loaded: LLM, typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
        typed("the cat", "/etc/hosts", "the cat")
        assert main(["complete", *FLAGS]) == 0
        texts = [out.outputs[0].text for out in loaded.generate(["the cat", "/etc/hosts"], GREEDY, use_tqdm=False)]
        lines = "".join(shown(text) + "\n" for text in (*texts, texts[0]))
        assert capsys.readouterr().out.endswith(lines + "\n")

    def test_ctrl_c_stops_the_answer_only(
        self, loaded: LLM, typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The conversation goes on with all that was said until then."""
        step, steps = loaded.llm_engine.step, []

        def interrupted_step() -> Any:
            steps.append(None)
            if len(steps) == 2:
                signal.raise_signal(signal.SIGINT)
            return step()

        monkeypatch.setattr(loaded.llm_engine, "step", interrupted_step)
        conversations = []
        reset = chat.Conversation.reset
        monkeypatch.setattr(chat.Conversation, "reset", lambda self: (conversations.append(self), reset(self)))
        typed("hello", "why?", KeyboardInterrupt())
        assert main(["chat", "--temperature", "0", "--max-tokens", "4"]) == 130
        captured = capsys.readouterr()
        assert "[stopped]" in captured.out
        assert captured.err == "vllm chat: interrupted\n"
        (conversation,) = conversations
        said = conversation.messages[1]["content"]
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
        assert answer(loaded, "hello").startswith(said)

    def test_control_characters_do_not_reach_the_terminal(self, capsys: pytest.CaptureFixture[str], typed: Any) -> None:
        typed("go")
        dialogue.converse("", lambda text: iter(["a\x1b]0;b\x07", "\x9b2J\r\nc[bold]"]), {})
        assert capsys.readouterr().out.endswith("a\ufffd]0;b\ufffd\ufffd2J\ufffd\nc[bold]\n\n")


def test_in_a_real_terminal(model: Path, tiny: LLM) -> None:
    command = [sys.executable, "-m", "vllm.cli.main", "chat", str(model), "--dtype", "float32", *FLAGS]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "dumb"})
    os.close(theirs)
    seen = _read_until(ours, b">>> ")
    os.write(ours, b"hello\n")
    seen = _read_until(ours, b">>> ")
    assert shown(answer(tiny, "hello")).encode() in seen.replace(b"\r\n", b"\n")
    os.write(ours, b"\x04")
    assert process.wait(timeout=60) == 0
    os.close(ours)


def _read_until(terminal: int, mark: bytes) -> bytes:
    seen, deadline = b"", time.monotonic() + 60
    while not seen.endswith(mark):
        assert select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0], seen
        seen += os.read(terminal, 65536)
    return seen
