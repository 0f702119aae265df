"""Texts that grow from wherever a prompt ends, inside a character too, with vocabularies of every spelling."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import tokenizers
from byte_tokenizer import EOS, byte_ids, make_byte_tokenizer
from tokenizers import decoders, models

from vllm.loader import resolve_model
from vllm.tokenizers.text_streams import unfinished_ids
from vllm.tokenizers.tokenizer import SlowTokenizer, Tokenizer, get_tokenizer

CHARACTERS = [*"ab \n", "é", "你", "中", "🙂", "\U0010ffff", "\ufffd"]
BYTES = [*range(256), *"é你🙂\ufffd".encode() * 20]


def byte_fallback(folder: Path) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁ab"]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    return get_tokenizer(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    return make_byte_tokenizer(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback", "embedded", "redecoded"])
def tokenizer(request, tmp_path_factory, byte_level) -> Tokenizer:
    match request.param:
        case "byte-level":
            return byte_level
        case "byte-fallback":
            return byte_fallback(tmp_path_factory.mktemp("byte_fallback"))
        case "embedded":
            return get_tokenizer(resolve_model(None, "float32").path)
    return SlowTokenizer(byte_level.hf_tokenizer, byte_level._source)


def ids_of_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """The token that is a byte alone; the embedded vocabulary lacks a few."""
    if isinstance(tokenizer, SlowTokenizer):
        return {byte: byte_ids(bytes([byte]))[0] for byte in range(256)}
    known = {tokenizer.token_bytes(token_id): token_id for token_id in reversed(range(600))}
    return {byte: known[bytes([byte])] for byte in range(256) if bytes([byte]) in known}


def in_steps(stream, ids: Iterable[int], size: int = 1) -> str:
    ids = list(ids)
    return "".join(stream.step(ids[start : start + size]) for start in range(0, len(ids), size))


def test_every_split_of_a_text_gives_the_text(tokenizer):
    rng, ids_of = random.Random(1), ids_of_bytes(tokenizer)
    for _ in range(40):
        text = "".join(rng.choices(CHARACTERS, k=rng.randint(1, 9)))
        ids = [ids_of[byte] for byte in text.encode()]
        for split in range(len(ids) + 1):
            prompt, rest = ids[:split], ids[split:]
            begun = in_steps(tokenizer.decode_stream(skip_special_tokens=False), prompt)
            stream = tokenizer.decode_stream(prompt_ids=prompt)
            added = in_steps(stream, rest, rng.randint(1, 4))
            if text.endswith("\ufffd") and isinstance(tokenizer, SlowTokenizer):
                # By decoding alone it could be an unfinished character, and there it ends.
                assert text.rstrip("\ufffd") == (begun + stream.broken + added).rstrip("\ufffd")
                continue
            assert begun + stream.broken + added == text
            assert stream.broken == "" or isinstance(tokenizer, SlowTokenizer)


def test_every_split_of_broken_bytes_gives_what_one_stream_gives(tokenizer):
    rng, ids_of = random.Random(2), ids_of_bytes(tokenizer)
    for _ in range(100):
        data = bytes(byte for byte in rng.choices(BYTES, k=rng.randint(1, 12)) if byte in ids_of)
        ids = [ids_of[byte] for byte in data]
        whole = in_steps(tokenizer.decode_stream(), ids)
        assert whole.rstrip("\ufffd") == data.decode(errors="replace").rstrip("\ufffd")
        for split in range(len(ids) + 1):
            begun = in_steps(tokenizer.decode_stream(), ids[:split])
            stream = tokenizer.decode_stream(prompt_ids=ids[:split])
            added = in_steps(stream, ids[split:], rng.randint(1, 4))
            assert begun + stream.broken + added == whole


@pytest.mark.parametrize("spelling", ["bytes", "redecoded"])
def test_tokens_that_cross_characters(tmp_path, spelling):
    # x and two bytes of 中, its last, y, its last and two of 你, its last.
    names = ["x\u00e4\u00b8", "\u0143", "y", "\u0143\u00e4\u00bd", "\u0142"]
    backend = tokenizers.Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, "y"))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = get_tokenizer(tmp_path)
    if spelling == "redecoded":
        tokenizer = SlowTokenizer(tokenizer.hf_tokenizer, tokenizer._source)
    for prompt, begun, ids, pieces, broken in (
        ([0], "x", [1, 2], ["中", "y"], ""),
        ([0], "x", [3, 4, 2], ["中", "你", "y"], ""),
        ([0, 3], "x中", [4, 2], ["你", "y"], ""),
        ([0, 3], "x中", [2, 2], ["y", "y"], "\ufffd"),
        ([0], "x", [0, 1], ["x", "中"], "\ufffd"),
    ):
        assert in_steps(tokenizer.decode_stream(), prompt) == begun
        stream = tokenizer.decode_stream(prompt_ids=prompt)
        assert ([stream.step([token_id]) for token_id in ids], stream.broken) == (pieces, broken)


def test_whose_replacement_characters_are(byte_level):
    for data, split, broken, added in (
        (b"\xe4\xb8a", 2, "\ufffd", "a"),
        (b"\xe4\xb8a", 1, "\ufffd", "a"),  # what the prompt began is the prompt's
        (b"\xf0\x9f\x98\xe4\xb8\xad", 3, "\ufffd", "中"),
        (b"\xf0\x80a", 1, "\ufffd", "\ufffda"),  # no character goes on so: the second one is the continuation's
        (b"\xe4\xff\xffa", 1, "\ufffd", "\ufffd\ufffda"),
        (b"\xff\xadab", 1, "", "\ufffdab"),  # nothing is unfinished behind a byte that begins no character
        (b"\xe4\xb8", 1, "", ""),
    ):
        ids = byte_ids(data)
        stream = byte_level.decode_stream(prompt_ids=ids[:split])
        assert (in_steps(stream, ids[split:]), stream.broken) == (added, broken), data


def test_special_tokens_at_the_seam(byte_level):
    first, second, third = byte_ids("中")
    # In the prompt one is text like any other; in the continuation it has none and breaks nothing.
    stream = byte_level.decode_stream(prompt_ids=[first, second, EOS])
    assert stream.step([third]) == "\ufffd"
    stream = byte_level.decode_stream(prompt_ids=[first, second])
    assert (stream.step([EOS, third]), stream.broken) == ("中", "")
    stream = byte_level.decode_stream(skip_special_tokens=False, prompt_ids=[first, second])
    assert (stream.step([EOS]), stream.broken) == ("</s>", "\ufffd")


def test_only_the_prompts_end_is_read(byte_level):
    class Ids(list):
        def __iter__(self):
            raise AssertionError("the whole prompt was read")

    prompt = Ids(byte_ids("a" * 5000 + "中")[:-1])
    read = []
    unfinished_ids(lambda ids: read.append(ids) or "x", prompt)
    assert read == [prompt[-1:]]
    assert byte_level.decode_stream(prompt_ids=prompt).step(byte_ids("中")[-1:]) == "中"


def test_ordinary_prompts_change_nothing(tokenizer):
    ids = tokenizer.encode(" b c", add_special_tokens=False)
    for prompt in ([], tokenizer.encode("a 中", add_special_tokens=False), [tokenizer.vocab_size + 5] * 30):
        assert tokenizer.decode_stream(prompt_ids=prompt).step(ids) == tokenizer.decode_stream().step(ids)
