"""The tokenizer against transformers on hostile text, its streams, and the settings of a folder."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from byte_tokenizer import make_byte_tokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from vllm.loader import embedded_model_path, resolve_model
from vllm.tokenizers.tokenizer import SlowTokenizer, Tokenizer, get_tokenizer

PIECES = [
    *"abcXYZ 0123\n\t'.,!?<|>_-/\\\"",
    *"é你好ßü🤗\u200d\u0000\u202e\u3000\ufeff\ufffd\u0301\x7f\x1b",
    "👨‍👩‍👧", "🇩🇪", "नमस्ते", "مرحبا", "  ", "    ", "\r\n", "'s", "n't", " the", "Hello", "ing", "\U0010ffff",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end", "<file_sep>",
]  # fmt: skip


def hostile_texts(count: int = 200) -> list[str]:
    rng = random.Random(0)
    texts = ["", " ", "\n", "\x00", "<|im_end|>", " <|im_end|> ", "a" * 300, "🤗" * 40, "\u0301\u0301"]
    texts += ["".join(rng.choices(PIECES, k=rng.randint(1, 40))) for _ in range(count - len(texts))]
    return texts


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(None, "float32").path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return get_tokenizer(folder)


@pytest.fixture(scope="module")
def of_gguf() -> Any:
    """Transformers' tokenizer of the embedded GGUF file, with the pre-tokenizer of SmolLM2's own tokenizer.json:
    transformers does not read the header's `tokenizer.ggml.pre`, by which digits stand alone."""
    from transformers import AutoTokenizer

    path = embedded_model_path()
    assert path is not None
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def test_equals_transformers_on_hostile_text(tokenizer: Tokenizer, of_gguf: Any) -> None:
    texts = hostile_texts()
    batch = tokenizer.encode_batch(texts)
    for text, from_batch in zip(texts, batch, strict=True):
        for special in (True, False):
            assert tokenizer.encode(text, special) == of_gguf.encode(text, add_special_tokens=special), repr(text)
        assert from_batch == tokenizer.encode(text)
        for skip in (True, False):
            want = of_gguf.decode(from_batch, skip_special_tokens=skip)
            assert tokenizer.decode(from_batch, skip) == want
            assert tokenizer.decode_stream(skip).step(from_batch) == want
    assert tokenizer.decode_batch(batch) == [tokenizer.decode(ids) for ids in batch]


def test_equals_transformers_otherwise(tokenizer: Tokenizer, of_gguf: Any) -> None:
    assert tokenizer.is_fast and len(tokenizer) == tokenizer.vocab_size == len(of_gguf) == 49152
    assert tokenizer.eos_token_id == of_gguf.eos_token_id and tokenizer.bos_token_id == of_gguf.bos_token_id
    assert tokenizer.pad_token_id == of_gguf.pad_token_id
    assert set(of_gguf.all_special_ids) <= set(tokenizer.all_special_ids) == set(range(17))
    ids = [0, 2, 17, 19556, 49151]
    assert tokenizer.convert_ids_to_tokens(ids) == of_gguf.convert_ids_to_tokens(ids)
    assert tokenizer.convert_tokens_to_ids(of_gguf.convert_ids_to_tokens(ids)) == ids
    assert tokenizer.convert_ids_to_tokens([-1, 49152, 2**40]) == [None] * 3
    assert tokenizer.convert_tokens_to_ids(["no such token"]) == [None]
    assert type(tokenizer.hf_tokenizer).__module__.startswith("transformers")
    messages = [{"role": "user", "content": "Hi <|im_end|> 你好"}]
    for options in ({"tokenize": False, "add_generation_prompt": True}, {"tokenize": False}):
        assert tokenizer.apply_chat_template(messages, **options) == of_gguf.apply_chat_template(messages, **options)
    assert tokenizer.chat_template == of_gguf.chat_template


def test_streams_never_cut_a_character(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for text in hostile_texts(60):
        ids = tokenizer.encode(text)
        stream = tokenizer.decode_stream(skip_special_tokens=False)
        pieces: list[str] = []
        rest = list(ids)
        while rest:
            take = rng.randint(1, 3)
            pieces.append(stream.step(rest[:take]))
            rest = rest[take:]
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_stream_of_broken_characters(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("🤗")
    assert len(smile) > 1
    stream = tokenizer.decode_stream()
    assert stream.step(smile[:1]) == ""
    # The character will never be whole: its start becomes a replacement character, what follows is not lost.
    assert stream.step(tokenizer.encode("abc")) == "\ufffdabc"


def test_bytes_and_texts_of_tokens(tokenizer: Tokenizer) -> None:
    for text in hostile_texts(60):
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert sorted(tokenizer.token_bytes(i) for i in range(17, 17 + 256))[0] == b"\x00"
    smile = tokenizer.encode("🤗")
    assert tokenizer.decode_tokens(np.array([smile[0], 2, 49152, -1], dtype=np.int32)) == [
        "\ufffd",
        "<|im_end|>",
        "",
        "",
    ]
    assert tokenizer.decode_tokens(tokenizer.encode("Hello world")) == ["Hello", " world"]


def make_folder(folder: Path, backend: tokenizers.Tokenizer, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"} | settings))
    return folder


def sentencepiece_like() -> tokenizers.Tokenizer:
    """The shape of Llama 2's tokenizer: spaces as U+2581, unknown characters as byte tokens."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["\u2581", *"abcdefgh", "\u2581a", "bc"]
    vocab = {text: index for index, text in enumerate(texts)}
    merges = [("\u2581", "a"), ("b", "c")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


@pytest.mark.parametrize(
    "settings",
    [
        {"bos_token": "<s>", "eos_token": "</s>"},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
        {"eos_token": "</s>", "add_bos_token": True},
        {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "additional_special_tokens": ["<new>"]},
        {"bos_token": "<s>", "added_tokens_decoder": {"300": {"content": "bcd", "special": False}}},
        {"clean_up_tokenization_spaces": True},
    ],
    ids=str,
)
def test_settings_of_a_folder_count_as_in_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_folder(tmp_path, sentencepiece_like(), **settings)
    mine, theirs = get_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("abc", " a bc", "a  é🤗 <s>b</s>", "<new> bcd . ,", ""):
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert mine.encode(text, special) == ids
            assert mine.decode(ids, False) == theirs.decode(ids)
            assert mine.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)
    assert (mine.bos_token_id, mine.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert len(mine) == len(theirs)


def test_sentencepiece_bytes_and_streams(tmp_path: Path) -> None:
    tokenizer = get_tokenizer(make_folder(tmp_path, sentencepiece_like()))
    ids = tokenizer.encode("a é bc", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == " a é bc".encode()
    stream = tokenizer.decode_stream()
    # A continuation of a prompt: the space before its first word belongs to it.
    assert [stream.step([token_id]) for token_id in ids] == [" a", " ", "", "é", " ", "bc"]


def test_other_decoders_stream_by_decoding_again(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "un": 1, "##able": 2, "well": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    tokenizer = get_tokenizer(make_folder(tmp_path, backend))
    stream = tokenizer.decode_stream()
    assert [stream.step([token_id]) for token_id in (1, 2, 3)] == ["un", "able", " well"]
    assert tokenizer.token_bytes(3) == b"well"


WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##able", "well", "##s", ",", "."]
SPECIAL_PIECES = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")


def wordpiece(folder: Path) -> Tokenizer:
    backend = tokenizers.Tokenizer(
        models.WordPiece({piece: index for index, piece in enumerate(WORD_PIECES)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(list(SPECIAL_PIECES))
    return get_tokenizer(make_folder(folder, backend))


def python_wordpiece(folder: Path) -> Tokenizer:
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    (folder / "vocab.txt").write_text("\n".join(WORD_PIECES))
    wordpiece(folder)
    return SlowTokenizer(BertTokenizerLegacy(str(folder / "vocab.txt")), wordpiece(folder)._source)


@pytest.mark.parametrize("make", [wordpiece, python_wordpiece])
def test_spaces_between_special_tokens(make: Any, tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    ids = [WORD_PIECES.index(piece) for piece in ("[CLS]", "[SEP]", "un", "##able", "[MASK]", "[PAD]", "[PAD]", "well")]
    assert tokenizer.decode(ids, False) == "[CLS] [SEP] unable [MASK] [PAD] [PAD] well"
    assert tokenizer.decode(ids, False, False) == "[CLS][SEP] unable [MASK][PAD][PAD] well"
    # Nothing is between them when they are left out.
    assert tokenizer.decode(ids, True, False) == tokenizer.decode(ids, True) == "unable well"
    assert tokenizer.decode([], False, False) == ""


@pytest.mark.parametrize("make", [wordpiece, python_wordpiece])
def test_streams_without_spaces_between_special_tokens_add_up(make: Any, tmp_path: Path) -> None:
    tokenizer, rng = make(tmp_path), random.Random(0)
    pair = re.compile(r"(\[(?:PAD|CLS|SEP|MASK)\]) (?=\[(?:PAD|CLS|SEP|MASK)\])")
    pieces = [index for index, piece in enumerate(WORD_PIECES) if piece not in ("[UNK]", ",", ".")]
    for _ in range(100):
        ids = rng.choices(pieces, k=rng.randint(0, 12))
        with_spaces = tokenizer.decode(ids, False)
        for spaces, want in ((True, with_spaces), (False, pair.sub(r"\1", with_spaces))):
            assert tokenizer.decode(ids, False, spaces) == want
            stream, rest, text = tokenizer.decode_stream(False, spaces), ids, ""
            while rest:
                size = rng.randint(1, 4)
                text += stream.step(rest[:size])
                rest = rest[size:]
            assert text == want


def test_streams_of_bytes_put_no_space_between_special_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    sentencepiece = get_tokenizer(make_folder(tmp_path, sentencepiece_like()))
    for own, ids in ((tokenizer, [0, 1, 2]), (sentencepiece, [1, 2, 1])):
        want = "".join(own.convert_ids_to_tokens(ids))
        for spaces in (True, False):
            assert own.decode(ids, False, spaces) == own.decode_stream(False, spaces).step(ids) == want


def test_slow_tokenizers_have_the_same_interface(tokenizer: Tokenizer) -> None:
    slow = SlowTokenizer(tokenizer.hf_tokenizer, tokenizer._source)
    text = "Hello <|im_end|> wörld 🤗!"
    ids = tokenizer.encode(text)
    assert not slow.is_fast and slow.encode(text) == ids == slow.encode_batch([text])[0]
    assert slow.decode(ids) == tokenizer.decode(ids) == slow.decode_batch([ids])[0]
    assert len(slow) == len(tokenizer) and slow.eos_token_id == tokenizer.eos_token_id
    assert slow.convert_ids_to_tokens(ids) == tokenizer.convert_ids_to_tokens(ids)
    stream = slow.decode_stream(skip_special_tokens=False)
    assert "".join(stream.step([token_id]) for token_id in ids) == text
    assert slow.decode_tokens(ids[:2]) == tokenizer.decode_tokens(ids[:2])
    assert slow.token_to_id("no such token") is None and slow.id_to_token(-1) is None


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "opt", None)
CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("tokenizer_class", (*CLASSES, None, "left out"))
def test_transformers_tokenizer_is_the_one_of_the_folders_config(
    tmp_path: Path, model_type: str | None, tokenizer_class: str | None
) -> None:
    from transformers import AutoTokenizer

    make_byte_tokenizer(tmp_path)
    settings = {"chat_template": "{{ messages[0].content }}!", "eos_token": "</s>"}
    named = {} if tokenizer_class == "left out" else {"tokenizer_class": tokenizer_class}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | named))
    if model_type:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": model_type, "tokenizer_class": "GPT2Tokenizer"})
        )
    mine, theirs = get_tokenizer(tmp_path).hf_tokenizer, AutoTokenizer.from_pretrained(tmp_path)
    assert type(mine) is type(theirs)
    assert mine.init_kwargs == theirs.init_kwargs and mine.name_or_path == theirs.name_or_path
    assert mine.encode("Hello wörld 🤗") == theirs.encode("Hello wörld 🤗")
    messages = [{"role": "user", "content": "Hello"}]
    assert mine.apply_chat_template(messages, tokenize=False) == "Hello!"


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_a_processors_chat_template_goes_before_the_tokenizers(name: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, sentencepiece_like(), chat_template="{{ messages[0].content }}!")
    (folder / name).write_text(json.dumps({"chat_template": "{{ messages[0].content }}?"}))
    messages = [{"role": "user", "content": "Hello"}]
    assert get_tokenizer(folder).apply_chat_template(messages, tokenize=False) == "Hello?"
    # A processor takes its own files' before chat_template.jinja, as transformers' does; a tokenizer has none of these.
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}.")
    without = "Hello?" if name == "processor_config.json" else "Hello."
    assert get_tokenizer(folder).apply_chat_template(messages, tokenize=False) == without
    (folder / "preprocessor_config.json").write_text("{}")
    assert get_tokenizer(folder).apply_chat_template(messages, tokenize=False) == "Hello?"


def test_the_configuration_of_a_processor_goes_before_chat_template_json(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, sentencepiece_like())
    for name, end in (("processor_config", "!"), ("chat_template", "?")):
        (folder / f"{name}.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}" + end}))
    messages = [{"role": "user", "content": "Hello"}]
    assert get_tokenizer(folder).apply_chat_template(messages, tokenize=False) == "Hello!"


@pytest.mark.parametrize("template", [7, ["{{ messages }}"], {"default": 7}])
def test_a_chat_template_that_is_no_text(template: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, sentencepiece_like())
    (folder / "processor_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ValueError, match="chat_template must be a text, or texts by their names, got"):
        _ = get_tokenizer(folder).chat_template


def test_a_chat_template_does_not_import_torchs_compiler(folder: Path) -> None:
    code = "import sys; from vllm.tokenizers.tokenizer import get_tokenizer; get_tokenizer(sys.argv[1]).chat_template; "
    code += "assert 'transformers' in sys.modules and 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


def test_without_tokenizer_json_transformers_loads(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(spec["vocab"]))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in spec["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    for mode in ("auto", "slow"):
        other = get_tokenizer(tmp_path, tokenizer_mode=mode)
        assert other.encode("Hello wörld 🤗") == tokenizer.encode("Hello wörld 🤗")
        assert other.hf_tokenizer is other.hf_tokenizer


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer_mode must be one of auto, slow, got 'fast'"):
        get_tokenizer(tmp_path, tokenizer_mode="fast")
    with pytest.raises(ValueError, match=f"no tokenizer could be loaded from {tmp_path.name}"):
        get_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json is not a usable tokenizer"):
        get_tokenizer(tmp_path)
