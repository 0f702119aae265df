"""tokenizer.model read without SentencePiece: its own rules written out here, and the classes that use it."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path

import pytest

from vllm.tokenizers.own_classes import SentencePieceModel
from vllm.tokenizers.tokenizer import get_tokenizer

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
SPECIAL = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
BYTES = [(f"<0x{value:02X}>", 0.0, BYTE) for value in range(256)]
WORDS = ["th", "the", SPACE + "the", "he", "in", SPACE + "in", "ing", "er", SPACE + "t", "at", "cat", SPACE + "cat"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz.,!", SPACE, "\u4e2d"]


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def model_file(path: Path, pieces: list[tuple[str, float, int]], kind: int, add_dummy_prefix: bool = True) -> Path:
    data = b""
    for text, score, piece_kind in pieces:
        entry = message(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score)
        data += message(1, entry + varint(3 << 3) + varint(piece_kind))
    data += message(2, varint(3 << 3) + varint(kind) + varint(35 << 3) + varint(1))
    data += message(3, message(1, b"identity") + varint(3 << 3) + varint(add_dummy_prefix) + varint(4 << 3) + varint(0))
    path.write_bytes(data)
    return path


def pieces() -> list[tuple[str, float, int]]:
    words = [(text, -float(index), NORMAL) for index, text in enumerate([*WORDS, *LETTERS])]
    return [*SPECIAL, *BYTES, *words]


def merge(text: str, table: dict[str, tuple[int, float]]) -> list[int]:
    """SentencePiece's BPE: the neighbours whose union has the best score are joined, the first of equals, until none
    has one; what is left unknown becomes its bytes."""
    parts = list(SPACE + text.replace(" ", SPACE))
    while True:
        unions = [(-table[a + b][1], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in table]
        if not unions:
            break
        index = min(unions)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    ids = []
    for part in parts:
        ids += [table[part][0]] if part in table else [table[f"<0x{byte:02X}>"][0] for byte in part.encode()]
    return ids


TEXTS = ["the cat", "in the thing.", "  spaces  inside ", "\u4e2d\u6587, emoji \U0001f600!", "catcatthetheing", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_bpe_merges_by_score(text: str, tmp_path: Path) -> None:
    table = {piece: (index, score) for index, (piece, score, _) in enumerate(pieces())}
    tokenizer = SentencePieceModel.read(model_file(tmp_path / "tokenizer.model", pieces(), 2)).to_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids == (merge(text, table) if text else [])
    assert tokenizer.decode(ids) == text


def test_unigram_takes_the_likeliest_pieces(tmp_path: Path) -> None:
    table = {"a": -2.0, "b": -2.0, "ab": -3.0, "bc": -2.5, "c": -4.0, SPACE: -1.0}
    scored = [*SPECIAL, *BYTES, *((text, score, NORMAL) for text, score in table.items())]
    tokenizer = SentencePieceModel.read(model_file(tmp_path / "tokenizer.model", scored, 1)).to_tokenizer()
    # a + bc = -4.5 is likelier than ab + c = -7 and a + b + c = -8.
    assert tokenizer.encode("abc").tokens == [SPACE, "a", "bc"]
    assert tokenizer.encode("ab").tokens == [SPACE, "ab"]


def test_no_space_before_the_first_word(tmp_path: Path) -> None:
    path = model_file(tmp_path / "tokenizer.model", pieces(), 2, add_dummy_prefix=False)
    tokenizer = SentencePieceModel.read(path).to_tokenizer()
    assert tokenizer.encode("the cat").tokens == ["the", SPACE + "cat"]
    assert tokenizer.decode(tokenizer.encode(" cat").ids) == " cat"


def glm_folder(folder: Path, **config: str) -> Path:
    model_file(folder / "tokenizer.model", pieces(), 2)
    template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    settings = {"tokenizer_class": "ChatGLMTokenizer", "auto_map": {"AutoTokenizer": ["x.ChatGLMTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    (folder / "config.json").write_text(json.dumps({"model_type": "chatglm"} | config))
    return folder


def test_chatglm3(tmp_path: Path) -> None:
    tokenizer = get_tokenizer(glm_folder(tmp_path))
    size = len(pieces())
    assert tokenizer.encode("the cat")[:2] == [size + 1, size + 3]  # [gMASK] sop
    assert tokenizer.encode("the cat", add_special_tokens=False) == tokenizer.encode("the cat")[2:]
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    assert tokenizer.token_to_id("<|observation|>") == size + 8 and tokenizer.vocab_size == size + 9
    assert tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "in"}], tokenize=False)
    assert tokenizer.encode(chat, add_special_tokens=False)[0] == size + 6


def test_chatglm2_has_no_roles(tmp_path: Path) -> None:
    tokenizer = get_tokenizer(glm_folder(tmp_path, _name_or_path="THUDM/chatglm2-6b"))
    assert tokenizer.vocab_size == len(pieces()) + 5 and tokenizer.token_to_id("<|user|>") is None


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"tokenizer_class": "InternLM2Tokenizer"}, [1]),
        ({"tokenizer_class": "BaichuanTokenizer"}, []),
        ({"tokenizer_class": "BaichuanTokenizer", "add_bos_token": True}, [1]),
    ],
)
def test_beginning_of_sequence(settings: dict, first: list[int], tmp_path: Path) -> None:
    model_file(tmp_path / "tokenizer.model", pieces(), 2)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = get_tokenizer(tmp_path)
    assert tokenizer.encode("the cat") == first + tokenizer.encode("the cat", add_special_tokens=False)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x0a\xff\xff", message(1, message(1, b"a"))[:-1]])
def test_files_that_are_no_model(content: bytes, tmp_path: Path) -> None:
    glm_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path.name}/tokenizer.model is not a usable SentencePiece model"):
        get_tokenizer(tmp_path)
