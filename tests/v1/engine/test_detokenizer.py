"""Text as it grows: never half a character, stop strings wherever they fall."""

from __future__ import annotations

import random

import pytest
import tokenizers
from byte_tokenizer import BOS, EOS, byte_ids, make_byte_tokenizer
from tokenizers import decoders, models

from vllm import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer, get_tokenizer
from vllm.v1.engine.detokenizer import Detokenizer, check_stop_strings

TEXTS = [
    "plain",
    "naïve café",
    "🙂🤗",
    "a🇩🇪b👨‍👩‍👧c",
    "नमस्ते 你好",
    "\n\t the stop\x00",
    " the 🙂 stop",
    "\U0010ffffx",
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    return make_byte_tokenizer(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    """A sentencepiece-like vocabulary: words with their space, bytes for what it cannot spell."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁the",
        "▁stop",
        "é",
        "🙂",
        *"abcplinxvst▁",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    folder = tmp_path_factory.mktemp("byte_fallback")
    backend.save(str(folder / "tokenizer.json"))
    return get_tokenizer(folder)


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1000, **fields})


def stream(tokenizer, ids, own=None, sizes=(1,), stopped_by_token=False, prompt=()) -> tuple[list[str], str | None]:
    """Feed ids in groups; the pieces a client sees and the stop string found."""
    detokenizer = Detokenizer(tokenizer, own or params(), prompt)
    pieces, rest, turn = [], list(ids), 0
    while rest:
        size = sizes[turn % len(sizes)]
        group, rest, turn = rest[:size], rest[size:], turn + 1
        last = not rest
        stop = detokenizer.update(group, stopped_by_token and last)
        pieces.append(detokenizer.take_text(finished=last or stop is not None, delta=True))
        if stop is not None:
            return pieces, stop
    return pieces, None


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (100,)])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_and_hold_whole_characters(byte_level, byte_fallback, text, sizes):
    as_sentencepiece = byte_fallback.encode(text.replace(" ", "▁"))
    for tokenizer, ids in (
        (byte_level, byte_level.encode(text)),
        (byte_level, byte_ids(text)),
        (byte_fallback, as_sentencepiece),
        (byte_fallback, [3 + byte for byte in text.encode()]),
    ):
        pieces, _ = stream(tokenizer, ids, sizes=sizes)
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces)
        cumulative = Detokenizer(tokenizer, params())
        cumulative.update(ids, False)
        assert cumulative.take_text(True, False) == text


def test_random_bytes_stream_as_they_decode_whole(byte_level):
    rng = random.Random(0)
    for _ in range(200):
        data = bytes(rng.choices([*range(256), *"🙂é".encode() * 20], k=rng.randint(1, 20)))
        pieces, _ = stream(byte_level, byte_ids(data), sizes=(rng.randint(1, 4),))
        whole = data.decode("utf-8", errors="replace")
        # A character that was never finished is dropped at the end; everything else comes through.
        assert "".join(pieces) in (whole, whole.removesuffix("\ufffd"))


def test_an_unfinished_character_at_the_end_is_no_text(byte_level):
    for cut in (1, 2, 3):
        pieces, _ = stream(byte_level, byte_ids("ok🙂".encode()[:-cut]))
        assert pieces == ["o", "k", *[""] * (4 - cut)]


def test_special_tokens(byte_level):
    ids = [BOS, *byte_ids("ab"), EOS, *byte_ids("c")]
    assert "".join(stream(byte_level, ids)[0]) == "abc"
    assert "".join(stream(byte_level, ids, params(skip_special_tokens=False))[0]) == "<s>ab</s>c"
    own = params(skip_special_tokens=False, stop=["b</s>"])
    assert ("".join(stream(byte_level, ids, own)[0]), stream(byte_level, ids, own)[1]) == ("<s>a", "b</s>")


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (100,)])
def test_spaces_between_special_tokens(tmp_path, sizes):
    pieces = ["[CLS]", "[SEP]", "[PAD]", "un", "##able"]
    backend = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(pieces[:3])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = get_tokenizer(tmp_path)
    ids = [0, 1, 3, 4, 2, 2, 2, 3, 1, 3]
    for own, expected in (
        (params(skip_special_tokens=False), "[CLS] [SEP] unable [PAD] [PAD] [PAD] un [SEP] un"),
        (
            params(skip_special_tokens=False, spaces_between_special_tokens=False),
            "[CLS][SEP] unable [PAD][PAD][PAD] un [SEP] un",
        ),
        (params(spaces_between_special_tokens=False), "unable un un"),
    ):
        assert "".join(stream(tokenizer, ids, own, sizes)[0]) == expected
    own = params(skip_special_tokens=False, spaces_between_special_tokens=False, stop=["][PAD]["])
    assert "".join(stream(tokenizer, ids, own, sizes)[0]) == "[CLS][SEP] unable [PAD"


def test_a_special_token_inside_a_character_does_not_break_it(byte_level):
    first, *rest = byte_ids("🙂")
    assert "".join(stream(byte_level, [first, BOS, *rest])[0]) == "🙂"


def test_ids_without_a_token_have_no_text(byte_level):
    ids = [*byte_ids("a"), 5000, *byte_ids("b")]
    assert "".join(stream(byte_level, ids)[0]) == "ab"


@pytest.mark.parametrize("sizes", [(1,), (2,), (100,)])
def test_a_prompt_that_ends_inside_a_character(byte_level, sizes):
    first, second, third = byte_ids("你")
    for prompt, ids, text in (
        ([first, second], [third, *byte_ids("a")], "你a"),
        ([first], [second, third], "你"),
        ([first, second], byte_ids("ab"), "ab"),
        ([first], [second, *byte_ids("a")], "a"),
        ([first, second], [BOS, third], "你"),
        ([first, second, third], byte_ids("a"), "a"),
    ):
        assert "".join(stream(byte_level, ids, sizes=sizes, prompt=prompt)[0]) == text
    for stop, included, text in (("你", False, ""), ("你a", True, "你a"), ("a", False, "你")):
        own = params(stop=[stop], include_stop_str_in_output=included)
        pieces, found = stream(byte_level, [third, *byte_ids("ab")], own, sizes, prompt=[first, second])
        assert ("".join(pieces), found) == (text, stop)


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (100,)])
@pytest.mark.parametrize(
    ("text", "stop", "expected", "found"),
    [
        ("one stop two", ["stop"], "one ", "stop"),
        ("one stop two", ["two", "stop"], "one ", "stop"),
        ("stop", ["stop"], "", "stop"),
        ("ststop", ["stop"], "st", "stop"),
        ("aaab", ["aab"], "a", "aab"),
        ("abc🙂def", ["🙂d"], "abc", "🙂d"),
        ("x\n\ny", ["\n\n"], "x", "\n\n"),
        ("nothing here", ["stop", "hereafter"], "nothing here", None),
        ("x" * 50 + "stop", ["stop", "y" * 30], "x" * 50, "stop"),
    ],
)
def test_stop_strings(byte_level, text, stop, expected, found, sizes, included):
    own = params(stop=stop, include_stop_str_in_output=included)
    wanted = expected + found if included and found else expected
    for ids in (byte_ids(text), byte_level.encode(text)):
        pieces, match = stream(byte_level, ids, own, sizes)
        assert ("".join(pieces), match) == (wanted, found)


@pytest.mark.parametrize("sizes", [(1,), (2,), (100,)])
@pytest.mark.parametrize("included", [False, True])
def test_the_stop_string_that_ends_first_wins_and_of_equals_the_one_named_first(byte_level, sizes, included):
    for stop, begin, found in (
        (["d", "bcd"], "abc", "d"),
        (["bcd", "d"], "a", "bcd"),
        (["bcd", "bc"], "a", "bc"),
        (["bcd", "c"], "ab", "c"),
    ):
        own = params(stop=stop, include_stop_str_in_output=included)
        pieces, match = stream(byte_level, byte_ids("abcde"), own, sizes)
        assert ("".join(pieces), match) == (begin + found if included else begin, found)


def test_where_to_cut_the_text():
    assert check_stop_strings("a stop.", 3, ["stop"], False) == ("stop", 2)
    assert check_stop_strings("a stop.", 3, ["stop"], True) == ("stop", 6)
    assert check_stop_strings("a stop", 1, ["stop"], True) == ("stop", -1)
    assert check_stop_strings("a stop.", 1, ["stop"], False) is None, "it ended before the new characters"
    assert check_stop_strings("stop", 0, ["stop"], False) is check_stop_strings("stop", 4, [], False) is None


def test_what_may_become_a_stop_string_is_held_back(byte_level):
    own = params(stop=["stop"])
    pieces, _ = stream(byte_level, byte_ids("a sto b"), own)
    assert pieces == ["", "", "", "a", " ", "s", "to b"]
    # Kept stop strings take nothing back, so nothing waits.
    own = params(stop=["stop"], include_stop_str_in_output=True)
    assert stream(byte_level, byte_ids("a sto b"), own)[0] == list("a sto b")


def test_min_tokens_defers_stop_strings(byte_level):
    ids = byte_ids("stop and stop")
    assert stream(byte_level, ids, params(stop=["stop"]))[0] == [""] * 4
    for sizes in ((1,), (3,), (100,)):
        pieces, match = stream(byte_level, ids, params(stop=["stop"], min_tokens=5), sizes)
        assert ("".join(pieces), match) == ("stop and ", "stop")
    for min_tokens, text in ((3, ""), (4, "stop and ")):
        pieces, match = stream(byte_level, ids, params(stop=["stop"], min_tokens=min_tokens))
        assert ("".join(pieces), match) == (text, "stop"), "what the first min_tokens tokens complete does not count"


@pytest.mark.parametrize(("included", "expected"), [(False, "ab"), (True, "ab</s>")])
def test_the_token_that_ended_the_text_shows_only_when_asked(byte_level, included, expected):
    own = params(include_stop_str_in_output=included, skip_special_tokens=False)
    pieces, _ = stream(byte_level, [*byte_ids("ab"), EOS], own, stopped_by_token=True)
    assert "".join(pieces) == expected


def test_cumulative_text_never_shrinks(byte_level):
    detokenizer = Detokenizer(byte_level, params(stop=["stop", "nowhere"]))
    seen = ""
    for token_id in byte_ids("now we sto, then stop"):
        stop = detokenizer.update([token_id], False)
        text = detokenizer.take_text(finished=stop is not None, delta=False)
        assert text.startswith(seen)
        seen = text
    assert (seen, stop) == ("now we sto, then ", "stop")
