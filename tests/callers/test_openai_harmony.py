"""gpt-oss' answers, whole and cut at every token, as OpenAI's own parser of them reads them; conversations of
/v1/responses, as its own renderer writes them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from channel_template import TEMPLATE
from transformers.utils.chat_template_utils import render_jinja_template

from vllm.answers.answer import AnswerFormat, AnswerParser
from vllm.answers.events import collect
from vllm.answers.prompts.conversations import fitted, normal_messages
from vllm.server.serving.generation.chat_steps import Step
from vllm.server.serving.responses.input_items import normal_items, to_messages
from vllm.server.serving.responses.writer import ResponseWriter

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


# A conversation: what the model answers, and then a text of the user's, or outputs of what it has called.
TURNS: dict[str, list[tuple[str, str | list[str]]]] = {
    "a call": [(f'{ANALYSIS}{NEXT}{CALL}{{"city": "Oslo"}}<|call|>', ["rain"])],
    "texts": [
        (f"{ANALYSIS}{NEXT}<|channel|>final<|message|>Yes — it is.<|return|>", "And now?"),
        ("<|channel|>final<|message|>Yes.<|return|>", "Why?"),
    ],
    "calls one after the other": [
        (f'{ANALYSIS}{NEXT}{CALL}{{"city": "Oslo"}}<|call|>', ["rain"]),
        (f"{ANALYSIS}{NEXT} to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>", ['{"hour": 7}']),
        (f"{ANALYSIS}{NEXT}<|channel|>final<|message|>Rain at 7.<|return|>", "Thanks. And Rome?"),
        (f'{ANALYSIS}{NEXT}{CALL}{{"city": "Rome"}}<|call|>', ["sun"]),
    ],
    "a call without reasoning": [(f'{CALL}{{"city": "東京 {{x}}"}}<|call|>', ["<b> \n"])],
}


def items_of(text: str) -> list[dict[str, Any]]:
    """The output of a response whose model has answered `text`, without what ends it."""
    parser, writer = AnswerParser(AnswerFormat.of(None, "openai", "openai_gptoss")), ResponseWriter({})
    events = [*parser.feed(text), *parser.finish()]
    writer.take(Step(events, None, {}, "tool_calls" if parser.num_calls else "stop", None))
    writer.end({})
    return json.loads(json.dumps(writer.response["output"]))


def our_prompt(items: list[dict[str, Any]]) -> str:
    messages = fitted(normal_messages(to_messages(None, normal_items(items, lambda name: None))), TEMPLATE)
    texts, _ = render_jinja_template([messages], chat_template=TEMPLATE, add_generation_prompt=True)
    return texts[0]


def messages_of(encoding, ids: list[int]) -> list[tuple[Any, ...]]:
    """Each message of a prompt, and to whom it is said. Reasoning before the last answer is left out: the library does
    so only where that is the last thing that the assistant has said."""
    parser = openai_harmony.StreamableParser(encoding, role=None)
    for each in ids:
        parser.process(each)
    found = [(m, "".join(part.text for part in m.content)) for m in parser.messages]
    last = max((index for index, (m, _) in enumerate(found) if m.channel == "final"), default=-1)
    return [
        (m.author.role.value, m.author.name, m.recipient, m.channel, json.loads(text) if text[:1] == "{" else text)
        for index, (m, text) in enumerate(found)
        if m.channel != "analysis" or index > last
    ]


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
def test_conversations_are_rendered_alike(encoding, turns):
    harmony = openai_harmony
    items: list[dict[str, Any]] = [{"role": "user", "content": "Is it?"}]
    theirs = [harmony.Message.from_role_and_content(harmony.Role.USER, "Is it?")]
    for text, reply in turns:
        own = items_of(text)
        calls = [item for item in own if item["type"] == "function_call"]
        items += own
        ids = encoding.encode(text, allowed_special="all")
        theirs += encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT)
        if isinstance(reply, str):
            items.append({"role": "user", "content": reply})
            theirs.append(harmony.Message.from_role_and_content(harmony.Role.USER, reply))
            continue
        for call, output in zip(calls, reply, strict=True):
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})
            author = harmony.Author.new(harmony.Role.TOOL, f"functions.{call['name']}")
            message = harmony.Message.from_author_and_content(author, output)
            theirs.append(message.with_channel("commentary").with_recipient("assistant"))
        conversation = harmony.Conversation.from_messages(theirs)
        expected = encoding.render_conversation_for_completion(conversation, harmony.Role.ASSISTANT)
        found = encoding.encode(our_prompt(items), allowed_special="all")
        assert messages_of(encoding, found) == messages_of(encoding, expected)
