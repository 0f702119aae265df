"""Tokenizers whose classes come with their checkpoints as code: read from `tokenizer.model`, without running any, and
without SentencePiece itself.

The file is a protobuf message; its fields are those of sentencepiece_model.proto (github.com/google/sentencepiece).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors

_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2


@dataclass(frozen=True)
class SentencePieceModel:
    """The contents of a tokenizer.model.

    Attributes:
        pieces: text, score and kind of each id.
        is_bpe: pairs are merged by their scores; else the most likely pieces are chosen (Unigram).
        charsmap: compiled normalisation of characters; empty = none.
        add_dummy_prefix: texts begin with a space.
        remove_extra_whitespaces: runs of spaces count as one, and those at both ends as none.
    """

    pieces: list[tuple[str, float, int]]
    is_bpe: bool
    byte_fallback: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    @classmethod
    def read(cls, path: Path) -> SentencePieceModel:
        """
        Raises:
            ValueError: the file is not a SentencePiece model of BPE or Unigram.
        """
        try:
            return cls._parse(path.read_bytes())
        except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{path.parent.name}/{path.name} is not a usable SentencePiece model: {error}") from None

    @classmethod
    def _parse(cls, data: bytes) -> SentencePieceModel:
        pieces: list[tuple[str, float, int]] = []
        trainer: dict[int, bytes | int] = {}
        normalizer: dict[int, bytes | int] = {}
        for number, value in _fields(data):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                text, score = bytes(piece.get(1, b"")), bytes(piece.get(2, b"\0\0\0\0"))  # type: ignore[arg-type]
                pieces.append((text.decode(), struct.unpack("<f", score)[0], int(piece.get(3, _NORMAL))))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
        kind = trainer.get(3, _UNIGRAM)
        if not pieces or kind not in (_UNIGRAM, _BPE):
            raise ValueError(f"it has {len(pieces)} pieces and model type {kind!r}")
        charsmap = normalizer.get(2, b"")
        return cls(
            pieces,
            kind == _BPE,
            bool(trainer.get(35, 0)),
            charsmap if isinstance(charsmap, bytes) else b"",
            bool(normalizer.get(3, 1)),
            bool(normalizer.get(4, 1)),
        )

    def to_tokenizer(self) -> tokenizers.Tokenizer:
        """The same tokenizer, with control and user-defined pieces as added tokens and nothing around a text."""
        vocab = {text: index for index, (text, _, _) in enumerate(self.pieces)}
        unknown = next((index for index, piece in enumerate(self.pieces) if piece[2] == _UNKNOWN), None)
        if self.is_bpe:
            unknown_text = None if unknown is None else self.pieces[unknown][0]
            model: models.Model = models.BPE(
                vocab, self._merges(vocab), unk_token=unknown_text, fuse_unk=True, byte_fallback=self.byte_fallback
            )
        else:
            scored = [(text, score) for text, score, _ in self.pieces]
            model = models.Unigram(scored, unknown, self.byte_fallback)
        tokenizer = tokenizers.Tokenizer(model)
        steps: list[normalizers.Normalizer] = [normalizers.Precompiled(self.charsmap)] if self.charsmap else []
        if self.remove_extra_whitespaces:
            steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
        steps += [normalizers.Prepend(_SPACE)] if self.add_dummy_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        strip = [decoders.Strip(" ", 1, 0)] if self.add_dummy_prefix else []
        spaces = decoders.Replace(_SPACE, " ")
        tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *strip])
        added = tokenizers.AddedToken
        control = (_CONTROL, _UNKNOWN)
        tokenizer.add_special_tokens(
            [added(text, normalized=False, special=True) for text, _, kind in self.pieces if kind in control]
        )
        tokenizer.add_tokens(
            [added(text, normalized=False, special=False) for text, _, kind in self.pieces if kind == _USER_DEFINED]
        )
        return tokenizer

    def _merges(self, vocab: dict[str, int]) -> list[tuple[str, str]]:
        """The pairs that make a piece, those of the best piece first."""
        found: list[tuple[float, int, int, str, str]] = []
        for text, score, kind in self.pieces:
            if kind not in (_NORMAL, _USER_DEFINED):
                continue
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in vocab and right in vocab:
                    found.append((-score, vocab[left], vocab[right], left, right))
        return [(left, right) for *_, left, right in sorted(found)]


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Number and value of each field of a protobuf message; fixed-width numbers as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        value: bytes | int
        if wire == 0:
            value, position = _varint(data, position)
        else:
            if wire == 2:
                size, position = _varint(data, position)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise ValueError(f"unknown wire type {wire}")
            if position + size > len(data):
                raise ValueError("it is cut short")
            value, position = data[position : position + size], position + size
        yield number, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


# The tokens behind the pieces of ChatGLM's models, in this order; the roles are ChatGLM3's.
_GLM_MARKS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
_GLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_PREFIX = ("[gMASK]", "sop")
# Classes that put a beginning-of-sequence token first, unless add_bos_token says otherwise.
_ADDS_BOS = {
    "ChatGLMTokenizer": False,
    "BaichuanTokenizer": False,
    "InternLMTokenizer": True,
    "InternLM2Tokenizer": True,
}


def is_known(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether `settings` (tokenizer_config.json) names such a class, and the folder has its tokenizer.model."""
    return settings.get("tokenizer_class") in _ADDS_BOS and (folder / "tokenizer.model").is_file()


def load(
    folder: Path, settings: dict[str, Any], is_first_glm: bool = False
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer, and its texts of bos_token, eos_token and so on.

    Args:
        is_first_glm: it is ChatGLM2's, which has no tokens for roles.

    Raises:
        ValueError: tokenizer.model cannot be used.
    """
    model = SentencePieceModel.read(folder / "tokenizer.model")
    backend = model.to_tokenizer()
    known = {text for text, _, _ in model.pieces}
    named = {name: text for name, text in (("bos_token", "<s>"), ("eos_token", "</s>")) if text in known}
    named |= {"unk_token": "<unk>"} if "<unk>" in known else {}
    prefix: tuple[str, ...] = ()
    name = settings["tokenizer_class"]
    if name == "ChatGLMTokenizer":
        marks = _GLM_MARKS if is_first_glm else _GLM_MARKS + _GLM_ROLES
        backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in marks])
        prefix = _GLM_PREFIX
        named["pad_token"] = named.get("unk_token", "")
    elif settings.get("add_bos_token", _ADDS_BOS[name]) and "bos_token" in named:
        prefix = (named["bos_token"],)
    if prefix:
        ids = [(text, backend.token_to_id(text)) for text in prefix]
        backend.post_processor = processors.TemplateProcessing(single=[*prefix, "$A"], special_tokens=ids)
    return backend, {name: text for name, text in named.items() if text}
