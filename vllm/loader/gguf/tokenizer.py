"""Writes a GGUF file's tokenizer as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm.loader.gguf.architectures import ARCHITECTURES
from vllm.loader.gguf.file import GGUFFile
from vllm.loader.gguf.special import check_lengths, checked_tokens
from vllm.loader.gguf.splits import WHOLE_WORDS, pre_tokenizer
from vllm.loader.gguf.unread import check_tokenizer
from vllm.tokenizers.bpe_files import write_bpe_files

_Merges = list[tuple[str, str]]
# A tokenizers.Tokenizer, and the merges of one by BPE.
_Built = tuple[Any, _Merges | None]

# Kinds of tokens, as SentencePiece numbers them.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"
_TEMPLATE, _NAME = "tokenizer.chat_template.", re.compile(r"[\w-]+")
MORE_TEMPLATES = "additional_chat_templates"
"""transformers' folder of chat templates that have a name."""
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, where the file has one, the chat template into `folder`;
    ValueError if the file has no tokenizer, or one of a kind that is not supported."""
    meta = checked_tokens(file)
    if "tokenizer.ggml.tokens" not in meta:
        raise ValueError(f"{file.path.name} holds no tokenizer")
    kind = meta.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise ValueError(f"{file.path.name}: tokenizer.ggml.model must be one of {', '.join(_BUILDERS)}, got {kind!r}")
    try:
        check_lengths(meta)
        check_tokenizer(meta)
        tokenizer, merges = _BUILDERS[kind](meta)
    except ValueError as error:
        raise ValueError(f"{file.path.name}: {error}") from error
    _add_tokens(tokenizer, meta)
    _surround(tokenizer, meta)
    tokenizer.save(str(folder / "tokenizer.json"))
    if merges is not None:
        write_bpe_files(tokenizer, meta["tokenizer.ggml.tokens"], merges, folder)
    _write_tokenizer_config(meta, folder)


def _byte_level_bpe(meta: dict[str, Any]) -> _Built:
    from tokenizers import Tokenizer, decoders, models

    name, vocab = meta.get("tokenizer.ggml.pre", "default"), _vocab(meta)
    words, merges = pre_tokenizer(name), _given_merges(meta)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in WHOLE_WORDS))
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, merges


def _given_merges(meta: dict[str, Any]) -> _Merges:
    vocab, kind = _vocab(meta), meta["tokenizer.ggml.model"]
    merges = [tuple(merge.split(" ")) for merge in meta.get("tokenizer.ggml.merges", ())]
    if not merges:
        raise ValueError(f"tokenizer.ggml.merges is missing, which tokenizer.ggml.model {kind!r} needs")
    for index, merge in enumerate(merges):
        if len(merge) != 2 or merge[0] not in vocab or merge[1] not in vocab or "".join(merge) not in vocab:
            raise ValueError(
                f"tokenizer.ggml.merges[{index}] must join two tokens into a third, got {' '.join(merge)!r}"
            )
    return merges


def _gemma4_bpe(meta: dict[str, Any]) -> _Built:
    """SentencePiece's text with merges of its own. llama.cpp takes a run of newlines that is a token as it is, which
    is the same where merges make it."""
    merges = _given_merges(meta)
    made = {"".join(merge) for merge in merges}
    for token in meta["tokenizer.ggml.tokens"]:
        if len(token) > 1 and set(token) == {"\n"} and token not in made:
            raise ValueError(f"tokenizer.ggml.merges has none that makes the token {token!r}")
    return _spaced_bpe(meta, merges, meta.get("tokenizer.ggml.add_space_prefix", False))


def _sentencepiece_bpe(meta: dict[str, Any]) -> _Built:
    return _spaced_bpe(meta, _merges_of_scores(meta), meta.get("tokenizer.ggml.add_space_prefix", True))


def _spaced_bpe(meta: dict[str, Any], merges: _Merges, prefixed: bool) -> _Built:
    """Spaces are U+2581, one before the text if `prefixed`; what has no token is spelt in bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, unknown = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab=_vocab(meta),
        merges=merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=_BYTE in meta.get("tokenizer.ggml.token_type", ()),
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer, merges


def _merges_of_scores(meta: dict[str, Any]) -> _Merges:
    """SentencePiece joins the two neighbours whose union has the best score: the same as merges in that order.

    One merge a token is enough: the last of those that make the token from its characters. Among the joins of any text,
    those inside of what becomes a token are the ones of the token by itself, in the same order.
    """
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    scores = meta.get("tokenizer.ggml.scores")
    if scores is None:
        raise ValueError("tokenizer.ggml.scores is missing, which tokenizer.ggml.model 'llama' needs")
    kinds = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    # Tokens of other kinds are never joined from parts, nor are parts of others.
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL}
    ranked = sorted(range(len(tokens)), key=lambda index: -scores[index])
    ranks = {tokens[index]: rank for rank, index in enumerate(ranked) if tokens[index] in normal}
    merges = (_last_merge(token, ranks) for token in ranks)
    return [merge for merge in merges if merge is not None]


def _last_merge(token: str, ranks: dict[str, int]) -> tuple[str, str] | None:
    """The two parts that a token is joined from; None: no joins make it."""
    parts, none = list(token), math.inf
    unions = [ranks.get(left + right, none) for left, right in pairwise(parts)]
    while len(parts) > 2:
        best = min(unions)
        if best == none:
            return None
        at = unions.index(best)
        if unions.count(best) > 1:
            # As merges that list a token's splits one after another: by where it is cut, then by place.
            at = min((len(parts[place]), place) for place, rank in enumerate(unions) if rank == best)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del unions[at]
        for place in range(max(at - 1, 0), min(at + 1, len(unions))):
            unions[place] = ranks.get(parts[place] + parts[place + 1], none)
    if len(parts) < 2 or parts[0] not in ranks or parts[1] not in ranks:
        return None
    return parts[0], parts[1]


def _unigram(meta: dict[str, Any]) -> _Built:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    kinds = meta.get("tokenizer.ggml.token_type", ())
    pieces = list(zip(tokens, meta["tokenizer.ggml.scores"], strict=True))
    unknown = meta.get("tokenizer.ggml.unknown_token_id", kinds.index(_UNKNOWN) if _UNKNOWN in kinds else None)
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=_BYTE in kinds))
    steps: list[Any] = []
    if charsmap := meta.get("tokenizer.ggml.precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(value & 0xFF for value in charsmap)))
    if meta.get("tokenizer.ggml.remove_extra_whitespaces", False):
        from tokenizers import Regex

        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if meta.get("tokenizer.ggml.add_space_prefix", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    return tokenizer, None


def _wordpiece(meta: dict[str, Any]) -> _Built:
    """BERT's. In the file pieces that begin a word have U+2581 before them, the others are without their ##."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = _wordpieces(meta)
    # Files that do not tell it: a vocabulary without capitals is of a model that does not see them.
    lowers = meta.get("tokenizer.ggml.normalizer.lowercase", not _has_capitals(meta))
    unknown = meta.get("tokenizer.ggml.unknown_token_id")
    name = "[UNK]" if unknown is None else meta["tokenizer.ggml.tokens"][unknown]
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token=name, max_input_chars_per_word=100))
    accents = meta.get("tokenizer.ggml.normalizer.strip_accents")
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowers, strip_accents=accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer, None


def _wordpieces(meta: dict[str, Any]) -> dict[str, int]:
    tokens = meta["tokenizer.ggml.tokens"]
    kinds = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    pieces: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        # Older files leave all names in brackets as they are.
        is_named = kind == _CONTROL or (len(token) > 2 and token[0] + token[-1] == "[]")
        text = token if is_named else token[1:] if token.startswith(_SPACE) else f"##{token}"
        pieces.setdefault(text, index)
    return pieces


def _has_capitals(meta: dict[str, Any]) -> bool:
    return any(
        "A" <= char <= "Z" for token in meta["tokenizer.ggml.tokens"] if token[:1] == _SPACE for char in token[1:2]
    )


_BUILDERS: dict[str, Callable[[dict[str, Any]], _Built]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
    "gemma4": _gemma4_bpe,
    "t5": _unigram,
    "bert": _wordpiece,
}


def _vocab(meta: dict[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(meta["tokenizer.ggml.tokens"])}


def _add_tokens(tokenizer: Any, meta: dict[str, Any]) -> None:
    """Tokens that are found before the text is split."""
    from tokenizers import AddedToken

    tokens, kinds = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.token_type") or []
    control, added = (
        [token for token, kind in zip(tokens, kinds, strict=False) if kind == wanted]
        for wanted in (_CONTROL, _USER_DEFINED)
    )
    # Runs of spaces are found in the text as it is normalised, unless that puts a space before each of them.
    prefixed = meta["tokenizer.ggml.model"] == "llama" and meta.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=not prefixed, special=False) for token in added])


def _surround(tokenizer: Any, meta: dict[str, Any]) -> None:
    """Put the tokens before and after every prompt that the file asks for."""
    from tokenizers import processors

    tokens = meta["tokenizer.ggml.tokens"]
    kind, row = meta["tokenizer.ggml.model"], ARCHITECTURES.get(meta.get("general.architecture", ""))
    between = 0 if row is None else row.tokenizer
    begins = between > 0 or kind in ("llama", "gemma4", "bert") or meta.get("tokenizer.ggml.pre") in WHOLE_WORDS
    ends = between > 0 or kind in ("t5", "bert")

    def text(flag: str, names: tuple[str, ...], default: bool) -> str | None:
        found = [value for name in names if (value := meta.get(f"tokenizer.ggml.{name}_token_id")) is not None]
        return tokens[found[0]] if meta.get(f"tokenizer.ggml.{flag}", default) and found else None

    around = (
        text("add_bos_token", ("cls", "bos") if kind == "bert" else ("bos",), begins),
        text("add_eos_token", ("seperator", "eos") if kind == "bert" else ("eos",), ends),
    )
    if around != (None, None):
        vocab = _vocab(meta)
        before, after = (f"{token} " if token is not None else "" for token in around)
        # BERT has types of tokens instead of a second token between the texts of a pair.
        second = "$B:1 " + after.replace(" ", ":1 ") if kind == "bert" else f"{after if between == 2 else ''}$B {after}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before}$A {after}".strip(),
            pair=f"{before}$A {after}{second}".strip(),
            special_tokens=[(token, vocab[token]) for token in around if token is not None],
        )


def _write_tokenizer_config(meta: dict[str, Any], folder: Path) -> None:
    for key, text in meta.items():
        if f"{key}.".startswith(_TEMPLATE) and not isinstance(text, str):
            raise ValueError(f"{key} must be a text, got {text!r}")
    tokens = meta["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if meta["tokenizer.ggml.model"] == "bert":
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    for name, key in _SPECIAL.items():
        if (token_id := meta.get(f"tokenizer.ggml.{key}")) is not None:
            config[name] = tokens[token_id]
    if (template := meta.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for key, text in meta.items():
        name = key.removeprefix(_TEMPLATE)
        # That of pairs of texts is no Jinja.
        if key.startswith(_TEMPLATE) and name != "rerank":
            if not _NAME.fullmatch(name):
                raise ValueError(f"{key} must have a name of letters, digits, _ and -")
            (folder / MORE_TEMPLATES).mkdir(exist_ok=True)
            (folder / MORE_TEMPLATES / f"{name}.jinja").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
