"""gpt-oss' answers, whole and cut at every token, as OpenAI's own parser of them reads them."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from vllm.chat.answers import AnswerFormat, AnswerParser
from vllm.parser.events import collect

openai_harmony = pytest.importorskip("openai_harmony")

# The name by which tiktoken keeps the vocabulary, which litellm brings along.
VOCABULARY = "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
ANALYSIS, NEXT = "<|channel|>analysis<|message|>Hm, {x}: <b>.", "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
TEXTS = [
    f"{ANALYSIS}{NEXT}<|channel|>final<|message|>Yes — it is.\n\n東 <br>\n<|return|>",
    f"{ANALYSIS}{NEXT}{ANALYSIS}{NEXT}<|channel|>final<|message|>Yes.<|return|>",
    f'{ANALYSIS}{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{CALL}{{"city": "Oslo"}}<|call|>',
    f"{ANALYSIS}{NEXT}{CALL}{{}}<|call|>",
    f'{CALL}{{"a":1}}<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{{}}<|call|>',
    f'{ANALYSIS}{NEXT} to=functions.weather<|channel|>commentary json<|message|>{{"city":"Rome"}}<|call|>',
    '<|channel|>analysis to=functions.weather<|message|>{"q":1}<|call|>',
    "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
    "<|channel|>commentary<|message|>Only a remark.<|end|>",
    "<|channel|>final<|message|><|return|>",
    f"<|channel|>final<|message|>One{NEXT}<|channel|>final<|message|>Two<|return|>",
]

Parts = tuple[str | None, str | None, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def encoding(tmp_path_factory):
    litellm = importlib.util.find_spec("litellm")
    file = Path(litellm.origin).parent / VOCABULARY if litellm is not None and litellm.origin else Path()
    if not file.is_file():
        pytest.skip("no vocabulary without a download")
    folder = tmp_path_factory.mktemp("encodings")
    shutil.copy(file, folder / "o200k_base.tiktoken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def theirs(encoding, ids: list[int]) -> Parts:
    """Messages by their channels and recipients, with the one that has begun."""
    parser = openai_harmony.StreamableParser(encoding, role=openai_harmony.Role.ASSISTANT)
    for each in ids:
        parser.process(each)
    messages = [(m.channel, m.recipient or "", "".join(part.text for part in m.content)) for m in parser.messages]
    if parser.current_content or parser.current_recipient:
        messages.append((parser.current_channel, parser.current_recipient or "", parser.current_content))
    calls = [(to.removeprefix("functions."), text) for _, to, text in messages if to.startswith("functions.")]
    others = [(channel, to, text) for channel, to, text in messages if not to.startswith("functions.")]
    reasoning = "".join(text for channel, to, text in others if channel == "analysis" or to)
    content = "".join(text for channel, to, text in others if channel != "analysis" and not to)
    return reasoning or None, content or None, calls


def ours(text: str) -> Parts:
    parser = AnswerParser(AnswerFormat.of(None, "openai", "openai_gptoss"))
    answer = collect([event for char in text for event in parser.feed(char)] + parser.finish())
    return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize("text", TEXTS)
def test_every_beginning_of_an_answer_is_read_alike(encoding, text):
    ids = encoding.encode(text, allowed_special="all")
    for count in range(len(ids) + 1):
        beginning = encoding.decode(ids[:count])
        if "\ufffd" not in beginning:  # half a character
            assert ours(beginning) == theirs(encoding, ids[:count]), beginning
