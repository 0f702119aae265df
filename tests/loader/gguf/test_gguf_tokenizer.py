"""Tokenizers of GGUF files against their definitions."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from vllm.loader import NO_EMBEDDED_MODEL, embedded_model_path
from vllm.loader.gguf.file import GGUFFile
from vllm.loader.gguf.splits import pre_tokenizer
from vllm.loader.gguf.tokenizer import write_tokenizer
from vllm.tokenizers.bpe_files import read_tokenizer

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def load(tmp_path: Path, model: str, tokens: list[str], kinds: list[int], arch: str = "llama", **options: Any) -> Any:
    from transformers import AutoTokenizer

    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, value in options.items():
        getattr(writer, f"add_{name}")(*value if name == "bool" else (value,))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    write_tokenizer(GGUFFile(path), tmp_path)
    own = read_tokenizer(tmp_path).to_str()
    assert own == tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str()
    return AutoTokenizer.from_pretrained(tmp_path)


def joined_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE: join the leftmost of the best pairs of neighbours, until none is a piece."""
    parts = list(text)
    while True:
        pairs = [(scores[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(scope="module")
def pieces() -> dict[str, float]:
    rng = random.Random(0)
    letters = [SPACE, *"abcde\n"]
    found = dict.fromkeys(letters)
    while len(found) < 200:
        found[rng.choice(list(found)) + rng.choice(list(found))[:3]] = None
    long = [piece for piece in found | {"\n\n": None} if len(piece) > 1]
    rng.shuffle(long)
    return dict.fromkeys(letters, -1e9) | {piece: -float(index) for index, piece in enumerate(long)}


@pytest.mark.parametrize(("kind", "prefixed"), [("llama", True), ("llama", False), ("gemma4", False)])
def test_sentencepiece_joins_by_score(tmp_path: Path, pieces: dict[str, float], kind: str, prefixed: bool) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<|go|>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 260 + list(pieces.values())
    options = {"token_scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    if kind == "gemma4":
        # Its order is that of merges.
        cuts = [(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))]
        options |= {"token_scores": [0.0] * len(tokens)}
        options |= {"token_merges": [f"{a} {b}" for a, b in cuts if a in pieces and b in pieces]}
    tokenizer = load(tmp_path, kind, tokens, kinds, **options, add_space_prefix=prefixed)
    rng = random.Random(1)
    ids = {token: index for index, token in enumerate(tokens)}
    for _ in range(300):
        text = "".join(rng.choice(" abcde\n") for _ in range(rng.randint(1, 20)))
        marked = (SPACE if prefixed else "") + text.replace(" ", SPACE)
        want = [ids[part] for part in joined_by_score(marked, pieces)]
        got = tokenizer.encode(text, add_special_tokens=False)
        assert got == want, text
        assert tokenizer.decode(got) == text
    # BOS is the default of this kind; what no piece has is bytes; a user's token is found whole.
    assert tokenizer.encode("é")[0] == 1
    assert tokenizer.encode("é", add_special_tokens=False)[-2:] == [ids["<0xC3>"], ids["<0xA9>"]]
    assert ids["<|go|>"] in tokenizer.encode("ab<|go|>c")


def test_sentencepiece_needs_scores(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="t.gguf: tokenizer.ggml.scores is missing"):
        load(tmp_path, "llama", ["<unk>", "a"], [UNKNOWN, NORMAL])


def test_gemma4_needs_merges_of_newlines(tmp_path: Path) -> None:
    tokens, kinds = ["<unk>", "a", "aa", "\n", "\n\n"], [UNKNOWN, *[NORMAL] * 4]
    with pytest.raises(ValueError, match=r"tokenizer.ggml.merges has none that makes the token '\\n\\n'"):
        load(tmp_path, "gemma4", tokens, kinds, token_merges=["a a"])


def test_unigram_takes_the_likeliest_pieces(tmp_path: Path) -> None:
    tokens = ["<pad>", "</s>", "<unk>", SPACE, "a", "b", "ab", f"{SPACE}a", "bb"]
    scores = [0.0, 0.0, 0.0, -3.0, -2.0, -2.0, -3.5, -4.0, -5.0]
    kinds = [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * 6]
    options = {"token_scores": scores, "eos_token_id": 1, "pad_token_id": 0, "unk_token_id": 2}
    tokenizer = load(tmp_path, "t5", tokens, kinds, **options, add_space_prefix=True)
    # " ab": [" a", "b"] -6, [" ", "ab"] -6.5, [" ", "a", "b"] -7.
    assert tokenizer.encode("ab", add_special_tokens=False) == [7, 5]
    # " abb": [" a", "b", "b"] -8, [" ", "ab", "b"] -8.5, [" a", "bb"] -9.
    assert tokenizer.encode("abb") == [7, 5, 5, 1]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 1234 ok\n\n x", ["it", "'s", " 1234", " ok", "\n\n", " x"]),
        ("starcoder", "it's 12 ok", ["it", "'s", " ", "1", "2", " ok"]),
        ("llama-bpe", "It'S 1234 ok!\n\n x", ["It", "'S", " ", "123", "4", " ok", "!\n\n", " x"]),
        ("jais-2", "It's 1234       b   c\n", ["It", "'s", " ", "123", "4", "    ", "  ", " b", "  ", " c", "\n"]),
        ("qwen2", "a 12\n\n\nb  c", ["a", " ", "1", "2", "\n\n\n", "b", " ", " c"]),
        ("qwen35", "a 12\nbe\u0301c!\n", ["a", " ", "1", "2", "\n", "be\u0301c", "!\n"]),
        ("lfm2", "It'S 1234 ok!", ["It", "'S", " ", "123", "4", " ok", "!"]),
        ("tekken", "fooBar 12 a/\nb", ["foo", "Bar", " ", "1", "2", " a", "/\n", "b"]),
        ("gpt-4o", "fooBar's 1234", ["foo", "Bar's", " ", "123", "4"]),
        ("falcon", "a-b 12345", ["a", "-", "b", " ", "123", "45"]),
        ("bloom", "a b, c", ["a", " b", ",", " c"]),
        ("deepseek-llm", "Ab wörld, 123\n\nx", ["Ab", " w", "ö", "rld", ",", " ", "1", "2", "3", "\n", "\n", "x"]),
        ("deepseek-coder", "f(x) = y, 12\n", ["f", "(", "x", ")", " =", " y", ",", " ", "1", "2", "\n"]),
        ("seed-coder", "it's 12!\n x", ["it", "'s", " ", "1", "2", "!", "\n", " x"]),
        ("kimi-k2", "Ab's 1234 x!\n", ["Ab's", " ", "123", "4", " x", "!\n"]),
        ("hunyuan", "a 12", ["a", " ", "1", "2"]),
        ("deepseek-v3", "x 1234 .abc", ["x", " ", "123", "4", " .", "abc"]),
    ],
)
def test_words_of_byte_level_vocabularies(name: str, text: str, words: list[str]) -> None:
    bytes_of_space = {" ": "\u0120", "\n": "\u010a", "ö": "\u00c3\u00b6", "\u0301": "\u00cc\u0123"}
    got = [word for word, _ in pre_tokenizer(name).pre_tokenize_str(text)]
    assert got == ["".join(bytes_of_space.get(char, char) for char in word) for word in words]


NUMERALS = "0123456789²½٣\uff12Ⅷ"
HOSTILE = ["\n 1", "  12", " 3.14", "\r\n\t7", " ²", "a½ ٣", "x \uff12Ⅷ", "日本 2 語", "😀  9", "<|im_end|>\n 1"]


def test_numerals_of_the_embedded_model_stand_alone(tmp_path: Path) -> None:
    """tokenizer.ggml.pre is "smollm": each numeral by itself, and what is between them as GPT-2's words."""
    from transformers import AutoTokenizer

    path = embedded_model_path()
    if path is None:
        pytest.skip(NO_EMBEDDED_MODEL)
    file = GGUFFile(path)
    assert file.metadata["tokenizer.ggml.pre"] == "smollm"
    write_tokenizer(file, tmp_path)
    ours = read_tokenizer(tmp_path)
    # It knows GPT-2's words, and is given what stands between numerals.
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    rng = random.Random(2)
    letters = [*" \n\t\r\u00a0ab'.é日😀", *NUMERALS, "<|im_start|>"]
    texts = HOSTILE + ["".join(rng.choices(letters, k=rng.randint(1, 12))) for _ in range(500)]
    for text in texts:
        parts = [part for part in re.split(f"([{NUMERALS}])", text) if part]
        assert ours.encode(text).ids == [own for part in parts for own in theirs.encode(part)], text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert ours.encode("\n 1").tokens == ["\u010a\u0120", "1"]


def test_word_pieces(tmp_path: Path) -> None:
    """BERT's: in the file, what begins a word is marked in place of what goes on."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", f"{SPACE}un", "believ", "able", f"{SPACE}b", f"{SPACE},", "[unused1]"]
    kinds = [CONTROL, NORMAL, CONTROL, CONTROL, *[NORMAL] * 6]
    options = {"unk_token_id": 1, "sep_token_id": 3, "bos_token_id": 2}
    tokenizer = load(tmp_path, "bert", tokens, kinds, "bert", **options)
    assert tokenizer.encode("Unbelievable, b\u00c9") == [2, 4, 5, 6, 8, 1, 3]
    assert tokenizer.convert_ids_to_tokens([4, 5, 9]) == ["un", "##believ", "[unused1]"]
    pair = tokenizer("un", "b")
    assert (pair["input_ids"], pair["token_type_ids"]) == ([2, 4, 3, 7, 3], [0, 0, 0, 1, 1])
    # A vocabulary with capitals is of a model that sees them, unless the file says otherwise.
    tokens[7] = f"{SPACE}B"
    assert load(tmp_path, "bert", tokens, kinds, "bert", **options).encode("B b") == [2, 7, 1, 3]
    lowercase = {"bool": ("tokenizer.ggml.normalizer.lowercase", True)}
    assert load(tmp_path, "bert", tokens, kinds, "bert", **options, **lowercase).encode("B Un") == [2, 1, 4, 3]


def test_pairs_of_roberta(tmp_path: Path) -> None:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", f"{SPACE}a", f"{SPACE}b"]
    kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN, NORMAL, NORMAL]
    options = {"token_scores": [0.0] * 4 + [-1.0, -2.0], "bos_token_id": 0, "eos_token_id": 2, "unk_token_id": 3}
    tokenizer = load(tmp_path, "t5", tokens, kinds, "bert", **options)
    assert tokenizer.encode("a") == [0, 4, 2] and tokenizer.encode("a", "b") == [0, 4, 2, 2, 5, 2]


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="t.gguf: tokenizer.ggml.model must be .* gpt2, llama, gemma4, t5, bert, got 'rwkv'"
    ):
        load(tmp_path, "rwkv", ["a"], [NORMAL])
    with pytest.raises(ValueError, match="tokenizer.ggml.pre must be one of .*, bloom, .*, got 'klingon'"):
        load(tmp_path, "gpt2", ["a"], [NORMAL], token_merges=["a a"], tokenizer_pre="klingon")
    with pytest.raises(ValueError, match=r"tokenizer.ggml.merges\[0\] must join two tokens into a third, got 'a a'"):
        load(tmp_path, "gpt2", ["a"], [NORMAL], token_merges=["a a"], tokenizer_pre="gpt-2")


def test_whole_words_and_the_begin_of_text(tmp_path: Path) -> None:
    tokens = ["<|begin|>", "<|end|>", "a", "b", "c", "ab", "abc"]
    kinds = [CONTROL, CONTROL, *[NORMAL] * 5]
    options = {"token_merges": ["a b"], "bos_token_id": 0, "eos_token_id": 1}
    # "abc" has no merge: only a vocabulary whose words count whole finds it.
    assert load(tmp_path, "gpt2", tokens, kinds, **options, tokenizer_pre="llama-bpe").encode("abc") == [0, 6]
    assert load(tmp_path, "gpt2", tokens, kinds, **options, tokenizer_pre="gpt-2").encode("abc") == [5, 4]
    options |= {"add_bos_token": False}
    assert load(tmp_path, "gpt2", tokens, kinds, **options, tokenizer_pre="llama-bpe").encode("abc") == [6]
