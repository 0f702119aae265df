"""The classic way to export a text's logprobs: completions with echo, a few top logprobs, then the whole vocabulary."""

from __future__ import annotations

import pytest
from byte_tokenizer import byte_ids
from tiny_llm import make_tiny_llm

from vllm import SamplingParams

TEXTS = {
    "plain": "the cat stops",
    "emoji": "a 😀😀 the 👩‍👩‍👧 stop",
    "chinese": "猫在垫子上。the 猫。",
    "mixed": "naïve — 你好 😺\n\tthe",
    "one token": "x",
}
FRAGMENT = byte_ids("a 😀 the ".encode() + b"\xf0\x9f")  # ends within a character


@pytest.fixture(scope="module")
def llm(folder):
    return make_tiny_llm(folder)


def export(server, prompt, **fields):
    body = {"prompt": prompt, "echo": True, "temperature": 0, "max_tokens": 0, "skip_special_tokens": False, **fields}
    (choice,) = server.post("/v1/completions", **body)["choices"]
    return choice


def check_reassembly(choice):
    """Every token stands at its offset, and all of them are the text."""
    text, logprobs = choice["text"], choice["logprobs"]
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert "".join(tokens) == text
    ends = [*offsets[1:], len(text)]
    assert [text[start:end] for start, end in zip(offsets, ends, strict=True)] == tokens
    assert len(tokens) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])
    for token, logprob, top in zip(tokens, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        if logprob is not None:
            assert top[token] == logprob


@pytest.mark.parametrize("max_tokens", [0, 1, 9])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("logprobs", [4, 0, "vocabulary"])
def test_tokens_and_offsets_reassemble_the_text(server, llm, name, logprobs, max_tokens):
    vocab_size = llm.llm_engine.model_config.vocab_size
    k = vocab_size if logprobs == "vocabulary" else logprobs
    choice = export(server, TEXTS[name], logprobs=k, max_tokens=max_tokens, ignore_eos=True)
    assert choice["text"].startswith(TEXTS[name])
    check_reassembly(choice)
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    for top in choice["logprobs"]["top_logprobs"][1:]:
        assert len(top) in (k, k + 1) or k == 0 == len(top) - 1


def test_a_prompt_of_ids_that_ends_within_a_character(server):
    choice = export(server, FRAGMENT, logprobs=4, max_tokens=6, ignore_eos=True)
    logprobs = choice["logprobs"]
    assert logprobs["token_ids"][: len(FRAGMENT)] == FRAGMENT
    assert len(logprobs["tokens"]) == len(FRAGMENT) + 6
    check_reassembly(choice)


def test_readings_are_those_of_offline(server, llm):
    vocab_size = llm.llm_engine.model_config.vocab_size
    logprobs = export(server, TEXTS["emoji"], logprobs=vocab_size)["logprobs"]
    params = SamplingParams(max_tokens=0, prompt_logprobs=vocab_size)
    (output,) = llm.generate([TEXTS["emoji"]], params, use_tqdm=False)
    tokenizer = llm.llm_engine.tokenizer
    for index, position in enumerate(output.prompt_logprobs):
        if position is None:
            continue
        top = logprobs["top_logprobs"][index]
        own = next(iter(position))
        assert logprobs["token_ids"][index] == own
        keys = {token_id: _key_of(token_id, top, tokenizer, own, logprobs["tokens"][index]) for token_id in position}
        assert len(set(keys.values())) == vocab_size == len(top), "an entry was lost"
        for token_id, entry in position.items():
            assert top[keys[token_id]] == pytest.approx(entry.logprob, abs=1e-5)


def _key_of(token_id, top, tokenizer, own, own_text):
    """The key that a token must have: its text; its id where another token has that text."""
    if token_id == own:
        return own_text
    name = f"token_id:{token_id}"
    return name if name in top else tokenizer.decode_tokens([token_id])[0]


def test_text_of_special_tokens_is_a_part_of_an_echo(server):
    choice = export(server, "a</s>b", logprobs=1)
    check_reassembly(choice)
    assert choice["logprobs"]["tokens"] == ["a", "</s>", "b"]


def test_special_tokens_that_the_text_leaves_out_have_no_width(server):
    fields = {"logprobs": 0, "max_tokens": 4, "logit_bias": {"1": 100.0}, "ignore_eos": True}
    choice = export(server, "ab", **fields, skip_special_tokens=True)
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "b", *["<s>"] * 4]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 2, 2]


def test_echo_without_logprobs(server):
    choice = export(server, TEXTS["emoji"], max_tokens=2, ignore_eos=True)
    assert choice["logprobs"] is None
    assert choice["text"].startswith(TEXTS["emoji"])


def test_echo_with_ids_alone_reads_the_prompt_too(server):
    choice = export(server, TEXTS["plain"], logprob_token_ids=[40])
    check_reassembly(choice)
    assert None not in choice["logprobs"]["token_logprobs"][1:]


def test_an_echoed_prompt_that_was_cut_is_the_rest(server, llm):
    tokenizer = llm.llm_engine.tokenizer
    ids = tokenizer.encode(TEXTS["mixed"])
    choice = export(server, TEXTS["mixed"], logprobs=1, truncate_prompt_tokens=3)
    assert choice["logprobs"]["token_ids"] == ids[-3:]
    check_reassembly(choice)


def test_streamed_offsets_go_on_after_the_prompt(server):
    body = {"prompt": TEXTS["emoji"], "echo": True, "logprobs": 2, "max_tokens": 9, "temperature": 0}
    chunks = server.stream("/v1/completions", **body, ignore_eos=True)
    whole = {"text": "", "logprobs": {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        whole["text"] += choice["text"]
        for name, values in whole["logprobs"].items():
            values += choice["logprobs"][name]
    check_reassembly(whole)
    assert chunks[0]["choices"][0]["text"].startswith(TEXTS["emoji"])
