"""Pieces of a text and their offsets, with tokenizers of several kinds."""

from __future__ import annotations

import pytest
import tokenizers
from byte_tokenizer import BOS, byte_ids, make_byte_tokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from vllm.server.rendering.token_texts import TokenNames, TokenPieces, split_text
from vllm.tokenizers.tokenizer import get_tokenizer


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    return make_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def metaspace_tokenizer(tmp_path_factory):
    """As Llama 2's: words begin with a mark, unknown characters are bytes, <s> stands before every text."""
    folder = tmp_path_factory.mktemp("metaspace")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdehot "]
    backend = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    return get_tokenizer(folder)


def cut(text, pieces, offsets):
    return [text[start:end] for start, end in zip(offsets, [*offsets[1:], len(text)], strict=True)]


def test_a_character_of_several_tokens_stands_at_its_last(byte_tokenizer):
    ids = byte_ids("a😀b")
    text, pieces, offsets = split_text(byte_tokenizer, "a😀b", ids)
    assert pieces == ["a", "", "", "", "😀", "b"]
    assert cut(text, pieces, offsets) == pieces


def test_text_of_ids_is_made_of_the_pieces(byte_tokenizer):
    text, pieces, _ = split_text(byte_tokenizer, None, byte_ids("né"))
    assert (text, pieces) == ("né", ["n", "", "é"])


def test_what_begins_every_text_has_no_width(metaspace_tokenizer):
    text = "the cat 猫"
    ids = metaspace_tokenizer.encode(text)
    shown, pieces, offsets = split_text(metaspace_tokenizer, text, ids)
    assert shown == text
    assert (ids[0], pieces[0], offsets[:2]) == (1, "<s>", [0, 0])
    assert "".join(pieces[1:]) == text
    assert cut(text, pieces, offsets)[1:] == pieces[1:]


def test_pieces_grow_as_one_text_would(byte_tokenizer):
    ids = byte_ids("x😀猫\n")
    once = TokenPieces(byte_tokenizer, 3, skip_special_tokens=True).add(ids)
    pieces = TokenPieces(byte_tokenizer, 3, skip_special_tokens=True)
    steps = [pieces.add([token_id]) for token_id in ids]
    assert once == ([step[0][0] for step in steps], [step[1][0] for step in steps])
    assert "".join(once[0]) == "x😀猫\n"
    assert once[1][0] == 3


def test_bytes_that_never_become_a_character(byte_tokenizer):
    pieces, offsets = TokenPieces(byte_tokenizer, 0, True).add(byte_ids(b"\xf0a"))
    assert (pieces, offsets) == (["", "\ufffda"], [0, 0])


@pytest.mark.parametrize(("skip", "width"), [(True, 0), (False, 3)])
def test_special_tokens(byte_tokenizer, skip, width):
    pieces = TokenPieces(byte_tokenizer, 5, skip)
    assert pieces.add([BOS, *byte_ids("a")]) == (["<s>", "a"], [5, 5 + width])


def test_names(byte_tokenizer):
    (a, half) = byte_ids(b"a\xf0")
    assert TokenNames(byte_tokenizer, False).texts([a, half]) == ["a", "\ufffd"]
    assert TokenNames(byte_tokenizer, False).bytes_of(half) == [0xF0]
    assert TokenNames(byte_tokenizer, True).texts([a]) == [f"token_id:{a}"]
    assert TokenNames(None, False).texts([7]) == ["token_id:7"]
    assert TokenNames(None, False).bytes_of(7) is None
