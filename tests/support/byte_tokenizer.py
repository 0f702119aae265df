"""A small tokenizer of bytes, and words made of them: every text has ids, every id has bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from vllm.tokenizers.tokenizer import Tokenizer, get_tokenizer

PAD, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3
WORDS = ("th", "the", "Ġthe", "st", "op", "stop", "Ġstop", "ðŁ", "ðŁĺ")  # the last two begin emoji
VOCAB_SIZE = FIRST_BYTE + 256 + len(WORDS)


def byte_id(byte: int) -> int:
    """The id of a byte's own token."""
    return _alphabet().index(_char_of(byte)) + FIRST_BYTE


def byte_ids(text: str | bytes) -> list[int]:
    """A text as one token a byte, which is not how the tokenizer itself would spell its words."""
    data = text.encode() if isinstance(text, str) else text
    return [byte_id(byte) for byte in data]


def token_bytes(token: str) -> bytes:
    """The bytes that a token of WORDS stands for."""
    return bytes(byte for character in token for byte in range(256) if _char_of(byte) == character)


def make_byte_tokenizer(folder: Path, more: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """Write tokenizer.json and its tokenizer_config.json into `folder` and load it. `more`: pairs of tokens that are
    merged into further ones, whose ids come last."""
    vocab = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}
    for token in (*_alphabet(), *WORDS, *map("".join, more)):
        vocab[token] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("s", "t"), ("o", "p"), ("st", "op"), ("Ġ", "stop")]
    merges += [("ð", "Ł"), ("ðŁ", "ĺ"), *more]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    # Without a name, transformers asks the model's config class, which imports torch's compiler into every server.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return get_tokenizer(folder)


def make_template_tokenizer(folder: Path, template: str) -> Tokenizer:
    """The byte tokenizer with special tokens around every text, such as "<s> $A </s>"."""
    tokenizer = make_byte_tokenizer(folder)
    tokenizer.backend.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return get_tokenizer(folder)


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _char_of(byte: int) -> str:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in plain else chr(256 + [b for b in range(256) if b not in plain].index(byte))
