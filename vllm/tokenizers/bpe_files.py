"""A BPE tokenizer in files that are read faster than tokenizer.json, of which a large vocabulary is a second."""

from __future__ import annotations

import array
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

# Tokens in the order of their ids; of each merge the ids of its two, int32.
_SETTINGS, _VOCAB, _MERGES = "tokenizer_bpe.json", "tokenizer_vocab.txt", "tokenizer_merges.bin"
_SEPARATOR = "\0"
_OPTIONS = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)


def write_bpe_files(tokenizer: Any, tokens: list[str], merges: list[tuple[str, str]], folder: Path) -> None:
    """Write the files of a tokenizers.Tokenizer whose model, BPE, has this vocabulary and these merges; nothing where a
    token has the files' separator. `tokenizer` has no vocabulary afterwards."""
    if any(_SEPARATOR in token for token in tokens):
        return
    tokenizer.model = models.BPE(**_given({name: getattr(tokenizer.model, name) for name in _OPTIONS}))
    ids = {token: index for index, token in enumerate(tokens)}
    (folder / _VOCAB).write_bytes(_SEPARATOR.join(tokens).encode())
    (folder / _MERGES).write_bytes(array.array("i", (ids[token] for merge in merges for token in merge)).tobytes())
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
    own = tokenizers.Tokenizer(models.BPE(*_vocab_and_merges(folder), **options))
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


def _vocab_and_merges(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    texts, ids = (folder / _VOCAB).read_bytes().decode().split(_SEPARATOR), array.array("i")
    ids.frombytes((folder / _MERGES).read_bytes())
    # The tokens of merges are the vocabulary's objects: each is made, and brought into UTF-8, once.
    merged = map(texts.__getitem__, ids)
    return dict(zip(texts, range(len(texts)), strict=True)), list(zip(merged, merged, strict=True))
