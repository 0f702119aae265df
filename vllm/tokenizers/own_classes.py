"""Tokenizers whose classes come with their checkpoints as code: read from `tokenizer.model`, without running any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from vllm.tokenizers.sentencepiece_model import SentencePieceModel

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
