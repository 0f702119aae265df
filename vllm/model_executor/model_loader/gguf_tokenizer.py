"""Writes a GGUF file's tokenizer as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.model_executor.model_loader.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4
# Vocabularies whose merges were learned on GPT-2's own split of the text. Building these here is several seconds faster
# than transformers; the result is the same.
_GPT2_SPLITS = ("gpt-2", "smollm")
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, where the file has one, the chat template into `folder`;
    ValueError if the file has no tokenizer, or one that transformers cannot read."""
    meta = file.metadata
    if "tokenizer.ggml.tokens" not in meta:
        raise ValueError(f"{file.path.name} holds no tokenizer")
    if meta.get("tokenizer.ggml.model") == "gpt2" and meta.get("tokenizer.ggml.pre") in _GPT2_SPLITS:
        _byte_level_tokenizer(meta).save(str(folder / "tokenizer.json"))
        _write_tokenizer_config(meta, folder)
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{file.path.name}: its tokenizer cannot be read: {error}") from error
    tokenizer.save_pretrained(str(folder))


def _byte_level_tokenizer(meta: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta.get("tokenizer.ggml.token_type") or []
    control, added = (
        [token for token, kind in zip(tokens, kinds, strict=False) if kind == wanted]
        for wanted in (_CONTROL, _USER_DEFINED)
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=True, special=False) for token in added])
    around = _tokens_around(meta)
    if around != (None, None):
        before, after = (f"{text} " if text is not None else "" for text in around)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before}$A {after}".strip(),
            special_tokens=[(text, vocab[text]) for text in around if text is not None],
        )
    return tokenizer


def _tokens_around(meta: dict[str, Any]) -> tuple[str | None, str | None]:
    """Texts of the tokens before and after every prompt."""
    tokens = meta["tokenizer.ggml.tokens"]

    def text(flag: str, which: str) -> str | None:
        token_id = meta.get(f"tokenizer.ggml.{which}")
        return tokens[token_id] if meta.get(f"tokenizer.ggml.{flag}") and token_id is not None else None

    return text("add_bos_token", "bos_token_id"), text("add_eos_token", "eos_token_id")


def _write_tokenizer_config(meta: dict[str, Any], folder: Path) -> None:
    tokens = meta["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in _SPECIAL.items():
        if (token_id := meta.get(f"tokenizer.ggml.{key}")) is not None:
            config[name] = tokens[token_id]
    if (template := meta.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
