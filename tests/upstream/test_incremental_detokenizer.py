"""Texts that grow over transformers' tokenizers, as callers of upstream's classes make them."""

from __future__ import annotations

import pytest
import tokenizers
from byte_tokenizer import EOS, byte_ids, make_byte_tokenizer
from tokenizers import decoders, models

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import (
    BaseIncrementalDetokenizer,
    FastIncrementalDetokenizer,
    IncrementalDetokenizer,
    SlowIncrementalDetokenizer,
)

KINDS = (FastIncrementalDetokenizer, SlowIncrementalDetokenizer)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """transformers' own."""
    tokenizer = make_byte_tokenizer(tmp_path_factory.mktemp("bytes")).hf_tokenizer
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    return tokenizer


@pytest.fixture(scope="module")
def byte_fallback():
    """The same of a vocabulary of bytes as SentencePiece spells them."""
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def request(prompt_ids=(), **fields) -> EngineCoreRequest:
    return EngineCoreRequest("r", list(prompt_ids), SamplingParams(**fields))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["", "the prompt ", "half: \U0001f642"[:7]])
def test_pieces_add_up_to_the_whole_text(tokenizer, kind, prompt):
    text = "naïve \U0001f642 the stop, 你好"
    detokenizer = kind(tokenizer, request(byte_ids(prompt)))
    pieces = []
    for token_id in byte_ids(text):
        assert detokenizer.update([token_id], False) is None
        pieces.append(detokenizer.get_next_output_text(finished=False, delta=True))
    assert "".join(pieces) == detokenizer.output_text == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert detokenizer.get_next_output_text(finished=True, delta=False) == text
    assert detokenizer.output_token_ids == byte_ids(text) and detokenizer.num_output_tokens() == len(byte_ids(text))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_ends_inside_a_character(tokenizer, byte_fallback, kind):
    text = "a你é\U0001f642好b"
    for own, ids in ((tokenizer, byte_ids(text)), (byte_fallback, [3 + byte for byte in text.encode()])):
        for split in range(len(ids) + 1):
            detokenizer = kind(own, request(ids[:split]))
            detokenizer.update(ids[split:], False)
            whole = text.encode()[:split].decode(errors="ignore")
            assert whole + detokenizer.output_text == text
    # A character that a prompt begins and nothing finishes is no part of the output.
    for data, split, added in (
        (b"a\xe4\xb8bc", 3, "bc"),
        (b"a\xe4\xb8bc", 2, "bc"),
        (b"\xf0\x9f\xe4\xb8\xad", 2, "\u4e2d"),
    ):
        ids = byte_ids(data)
        detokenizer = kind(tokenizer, request(ids[:split]))
        detokenizer.update([EOS, len(tokenizer), *ids[split:]], False)
        assert detokenizer.output_text == added


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_and_ids_of_no_token(tokenizer, kind):
    ids = [*byte_ids("a"), EOS, *byte_ids("b")]
    shown = kind(tokenizer, request(skip_special_tokens=False))
    shown.update(ids, False)
    assert shown.output_text == "a</s>b"
    skipped = kind(tokenizer, request())
    skipped.update([*ids, len(tokenizer)], False)
    assert (skipped.output_text, skipped.output_token_ids[-1]) == ("ab", len(tokenizer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("included", "text"), [(False, "a "), (True, "a stop")])
def test_a_stop_string_cuts_text_and_ids(tokenizer, kind, included, text):
    detokenizer = kind(tokenizer, request(stop=["stop"], include_stop_str_in_output=included))
    assert detokenizer.update(byte_ids("a st"), False) is None
    held = detokenizer.get_next_output_text(finished=False, delta=True)
    assert held == ("a st" if included else "a")
    assert detokenizer.update(byte_ids("op and more"), False) == "stop"
    assert held + detokenizer.get_next_output_text(finished=True, delta=True) == text
    assert detokenizer.output_token_ids == byte_ids("a stop")


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (3, ""), (4, "stop "), (9, "stop stop")])
def test_what_the_first_tokens_complete_does_not_stop(tokenizer, min_tokens, text):
    detokenizer = FastIncrementalDetokenizer(tokenizer, request(stop="stop", min_tokens=min_tokens))
    found = detokenizer.update(byte_ids("stop stop"), False)
    assert (found, detokenizer.output_text) == (None if min_tokens == 9 else "stop", text)


@pytest.mark.parametrize(("included", "text"), [(False, "ab"), (True, "ab</s>")])
def test_a_stop_tokens_text_shows_only_where_stops_are_included(tokenizer, included, text):
    own = request(include_stop_str_in_output=included, skip_special_tokens=False)
    detokenizer = FastIncrementalDetokenizer(tokenizer, own)
    detokenizer.update([*byte_ids("ab"), EOS], True)
    assert (detokenizer.output_text, detokenizer.output_token_ids) == (text, [*byte_ids("ab"), EOS])


def test_a_callers_own_spelling_and_none_at_all(tokenizer):
    class Letters(BaseIncrementalDetokenizer):
        def decode_next(self, next_token_id: int) -> str:
            return chr(next_token_id)

    letters = Letters(request(stop=["c"]))
    assert letters.update([97, 98, 99, 100], True) == "c"
    assert (letters.output_text, letters.output_token_ids) == ("ab", [97, 98, 99])
    none = IncrementalDetokenizer.from_new_request(None, request())
    assert none.update([5], False) is None and none.get_next_output_text(True, False) == ""
    assert none.output_token_ids == [5]
    assert isinstance(IncrementalDetokenizer.from_new_request(tokenizer, request()), FastIncrementalDetokenizer)


@pytest.mark.parametrize("name", ["mm_features", "data_parallel_rank"])
def test_requests_are_of_text(name):
    assert EngineCoreRequest("r", [1], SamplingParams(), **{name: None}).prompt_token_ids == [1]
    with pytest.raises(VLLMValidationError, match=f"{name} must be None"):
        EngineCoreRequest("r", [1], SamplingParams(), **{name: 0})
