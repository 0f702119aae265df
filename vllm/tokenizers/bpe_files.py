"""A BPE tokenizer in files that are read faster than tokenizer.json, of which a large vocabulary is a second."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

_SETTINGS, _VOCAB, _MERGES = "tokenizer_bpe.json", "tokenizer_vocab.txt", "tokenizer_merges.txt"
# Between the tokens of a vocabulary, in the order of their ids, and between the two of each merge and the next.
_SEPARATOR = "\0"
_OPTIONS = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)


def write_bpe_files(tokenizer: Any, tokens: list[str], merges: list[tuple[str, str]], folder: Path) -> None:
    """Of a tokenizers.Tokenizer whose model, BPE, has this vocabulary and these merges; nothing where a token has the
    files' separator. `tokenizer` has no vocabulary afterwards."""
    if any(_SEPARATOR in token for token in tokens):
        return
    tokenizer.model = models.BPE(**_given({name: getattr(tokenizer.model, name) for name in _OPTIONS}))
    _write(folder / _VOCAB, tokens)
    _write(folder / _MERGES, [token for merge in merges for token in merge])
    (folder / _SETTINGS).write_text(tokenizer.to_str(), encoding="utf-8")


def read_tokenizer(folder: Path) -> Any:
    """The tokenizers.Tokenizer of a folder, of these files if it has them. ValueError: it has no usable one."""
    try:
        if (folder / _SETTINGS).is_file():
            return _read_bpe_files(folder)
        return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{folder.name}/tokenizer.json is not a usable tokenizer: {error}") from error


def _read_bpe_files(folder: Path) -> Any:
    settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    options = _given({name: settings["model"][name] for name in _OPTIONS})
    texts, merged = _read(folder / _VOCAB), _read(folder / _MERGES)
    vocab = dict(zip(texts, range(len(texts)), strict=True))
    merges = list(zip(merged[::2], merged[1::2], strict=True))
    own = tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
    added, settings["added_tokens"] = settings["added_tokens"], []
    rest = tokenizers.Tokenizer.from_str(json.dumps(settings))
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(rest, name)) is not None:
            setattr(own, name, part)
    for is_special, tokens in groupby(added, lambda token: token["special"]):
        add = own.add_special_tokens if is_special else own.add_tokens
        add([AddedToken(**{name: value for name, value in token.items() if name != "id"}) for token in tokens])
    return own


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _write(path: Path, tokens: list[str]) -> None:
    path.write_bytes(_SEPARATOR.join(tokens).encode())


def _read(path: Path) -> list[str]:
    text = path.read_bytes().decode()
    return text.split(_SEPARATOR) if text else []
