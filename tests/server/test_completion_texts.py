"""Text, tokens and offsets of completions: prompts that end inside a character, stops, special tokens, streams."""

from __future__ import annotations

import itertools
import random

import pytest
from asgi import AppThread, Serve
from byte_tokenizer import BOS, EOS, byte_ids
from forced_tokens import FORCED
from tiny_llm import make_tiny_llm

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("engines_of_one_thread")

TEXTS = ["a中b", "🙂é", "né🙂 the 你好", "\U0010ffffx"]


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve(FORCED)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return make_tiny_llm(folder)


def complete(server, prompt, output, **fields) -> dict:
    """The choice in which `output` follows `prompt`, the same whole and streamed."""
    body = {
        "prompt": prompt, "max_tokens": len(output), "vllm_xargs": {"forced": output}, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **fields,
    }  # fmt: skip
    (whole,) = server.post("/v1/completions", **body)["choices"]
    joined = {"text": "", "tokens": [], "text_offset": []}
    for chunk in server.stream("/v1/completions", **body):
        (choice,) = chunk["choices"]
        joined["text"] += choice["text"]
        for name in ("tokens", "text_offset"):
            joined[name] += (choice["logprobs"] or {}).get(name, [])
        # Tokens come with the text in which they begin.
        assert all(offset <= len(joined["text"]) for offset in joined["text_offset"])
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"] == whole["finish_reason"]
    logprobs = whole["logprobs"] or {"tokens": [], "text_offset": []}
    assert joined == {"text": whole["text"], **{name: logprobs[name] for name in ("tokens", "text_offset")}}
    if whole["logprobs"] is not None:
        check_offsets(whole)
        assert len(logprobs["tokens"]) == len(whole["token_ids"]) + len(prompt) * fields.get("echo", False)
    return whole


def check_offsets(choice) -> None:
    text, tokens, offsets = choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    spans = list(itertools.pairwise([*offsets, len(text)]))
    assert "".join(text[slice(*span)] for span in spans) == text and offsets[:1] == [0]
    for token, (start, end) in zip(tokens, spans, strict=True):
        assert token.startswith(text[start:end])


@pytest.mark.parametrize("text", TEXTS)
def test_every_split_of_a_text(server, text):
    ids = byte_ids(text)
    for split in range(1, len(ids)):
        prompt, output = ids[:split], ids[split:]
        rest = text[len(bytes(text.encode()[:split]).decode(errors="ignore")) :]
        choice = complete(server, prompt, output, logprobs=0)
        assert choice["token_ids"] == output
        assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == rest
        whole = complete(server, prompt, output, logprobs=0, echo=True)
        assert whole["text"] == "".join(whole["logprobs"]["tokens"]) == text
        assert complete(server, prompt, output)["text"] == rest
        assert complete(server, prompt, output, echo=True)["text"] == text
        fields = {"token_ids": prompt, "sampling_params": {"trace_decode_token_ids": output}, "output_mode": "text"}
        assert server.post("/inference/v1/generate", **fields)["choices"][0]["text"] == rest
        chunks = server.stream("/inference/v1/generate", **fields)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == rest


def test_every_split_of_broken_bytes(server):
    rng = random.Random(0)
    for _ in range(12):
        data = bytes(rng.choices([*range(256), *"é中🙂".encode() * 30], k=rng.randint(3, 8)))
        ids, split = byte_ids(data), rng.randint(1, 2)
        text = data.decode(errors="replace")
        whole = complete(server, ids[:split], ids[split:], logprobs=0, echo=True)
        assert whole["text"] == "".join(whole["logprobs"]["tokens"])
        # A character that is unfinished at the end is no text.
        assert whole["text"] in (text, text.removesuffix("\ufffd"))
        assert whole["text"] == complete(server, ids[:split], ids[split:], echo=True)["text"]
        own = complete(server, ids[:split], ids[split:], logprobs=0)
        assert whole["text"].endswith(own["text"]) and own["text"] == "".join(own["logprobs"]["tokens"])


@pytest.mark.parametrize(
    ("output", "text", "echo"),
    [
        (b"\xad!", "中!", "a中!"),
        (b"!", "!", "a\ufffd!"),
        (b"\xff!", "\ufffd!", "a\ufffd\ufffd!"),
        ("é".encode(), "é", "a\ufffdé"),
    ],
)
def test_a_character_is_once_in_an_echo_and_none_is_invented(server, output, text, echo):
    prompt = byte_ids(b"a\xe4\xb8")
    assert complete(server, prompt, byte_ids(output), logprobs=0)["text"] == text
    whole = complete(server, prompt, byte_ids(output), logprobs=0, echo=True)
    assert whole["text"] == "".join(whole["logprobs"]["tokens"]) == echo
    # Not before the next byte is known.
    assert complete(server, prompt, [], echo=True)["text"] == "a"


def test_each_of_several_choices_goes_on_its_own_way(server):
    prompt = byte_ids(b"a\xe4\xb8")
    body = {"prompt": prompt, "echo": True, "n": 4, "max_tokens": 1, "temperature": 1.0, "seed": 1, "logprobs": 0}
    last = {"allowed_token_ids": byte_ids(b"\xad!")}
    choices = server.post("/v1/completions", **body, **last)["choices"]
    assert {choice["text"] for choice in choices} == {"a中", "a\ufffd!"}
    for choice in choices:
        check_offsets(choice)
    streamed = {chunk["choices"][0]["index"]: "" for chunk in server.stream("/v1/completions", **body, **last)}
    for chunk in server.stream("/v1/completions", **body, **last):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == {choice["index"]: choice["text"] for choice in choices}


def test_beams_go_on_inside_a_character(server):
    prompt = byte_ids(b"a\xe4\xb8")
    fields = {"use_beam_search": True, "best_of": 2, "max_tokens": 1, "allowed_token_ids": byte_ids(b"\xad")}
    for echo in (False, True):
        choice = server.post("/v1/completions", prompt=prompt, echo=echo, n=1, **fields)["choices"][0]
        assert choice["text"] == ("a中" if echo else "中")


def test_stop_strings_find_the_character(server):
    prompt, output = byte_ids(b"a\xe4\xb8"), byte_ids(b"\xadbc")
    for stop, included, text in (("中", False, ""), ("中b", True, "中b"), ("b", False, "中")):
        choice = complete(server, prompt, output, stop=stop, include_stop_str_in_output=included, logprobs=0)
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", stop)


def test_offline(llm):
    data = "x🙂y".encode()
    ids = byte_ids(data)
    for split in range(1, len(ids)):
        params = SamplingParams(trace_decode_token_ids=ids[split:], logprobs=0)
        (output,) = llm.generate({"prompt_token_ids": ids[:split]}, params, use_tqdm=False)
        (completion,) = output.outputs
        assert completion.text == ("🙂y" if split < 5 else "y")
        # A reading's text is its token's alone.
        decoded = [next(iter(position.values())).decoded_token for position in completion.logprobs]
        assert decoded == [bytes([byte]).decode(errors="replace") for byte in data[split:]]


def test_tokens_of_what_the_text_leaves_out(server):
    for output, fields, text, tokens, offsets in (
        # A stop string that is cut, in the midst of a token too.
        (byte_ids("ab, stop"), {"stop": "stop"}, "ab, ", [*"ab, stop"], [0, 1, 2, 3, 4, 4, 4, 4]),
        (byte_ids("abé"), {"stop": "bé"}, "a", ["a", "b", "", "é"], [0, 1, 1, 1]),
        (byte_ids("ab"), {"stop": "b", "include_stop_str_in_output": True}, "ab", ["a", "b"], [0, 1]),
        # Special tokens.
        ([*byte_ids("a"), BOS, *byte_ids("b")], {}, "ab", ["a", "<s>", "b"], [0, 1, 1]),
        ([*byte_ids("a"), BOS], {"skip_special_tokens": False}, "a<s>", ["a", "<s>"], [0, 1]),
        # Tokens that end the sequence.
        ([*byte_ids("a"), EOS], {"ignore_eos": False}, "a", ["a", "</s>"], [0, 1]),
        ([*byte_ids("a"), EOS], {"ignore_eos": False, "skip_special_tokens": False}, "a", ["a", "</s>"], [0, 1]),
        (byte_ids("ab"), {"stop_token_ids": byte_ids("b")}, "a", ["a", "b"], [0, 1]),
        # A character that is not finished.
        (byte_ids(b"a\xf0\x9f"), {}, "a", ["a", "", ""], [0, 1, 1]),
    ):
        choice = complete(server, byte_ids("x"), output, logprobs=1, **fields)
        shown = choice["logprobs"]
        assert (choice["text"], shown["tokens"], shown["text_offset"]) == (text, tokens, offsets)
        echo = complete(server, byte_ids("x"), output, logprobs=1, echo=True, **fields)
        shown = echo["logprobs"]
        assert (echo["text"], shown["tokens"]) == ("x" + text, ["x", *tokens])
        assert shown["text_offset"] == [0, *(offset + 1 for offset in offsets)]


def test_a_token_in_which_the_text_was_cut_is_shown_whole(server):
    stop = server.engine.input_processor.tokenizer.token_to_id("Ġstop")
    choice = complete(server, byte_ids("x"), [*byte_ids("a"), stop], stop="top", logprobs=0)
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("a s", ["a", " stop"])


def test_streamed_tokens_come_with_their_text(server):
    body = {"prompt": byte_ids("x"), "vllm_xargs": {"forced": byte_ids("sto, stop")}, "max_tokens": 9, "logprobs": 0}
    chunks = [chunk["choices"][0] for chunk in server.stream("/v1/completions", **body, stop="stop", temperature=0)]
    shown = [(chunk["text"], "".join(chunk["logprobs"]["tokens"])) for chunk in chunks]
    assert ("".join(text for text, _ in shown), "".join(tokens for _, tokens in shown)) == ("sto, ", "sto, stop")
    assert shown[:4] == [("", "s"), ("", ""), ("", ""), ("s", "t")]
