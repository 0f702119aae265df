"""Tokenizers for callers: transformers' own, so that all that can be done with one can be done with these."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def get_tokenizer(
    tokenizer_name: str | Path,
    *args: Any,
    tokenizer_cls: Any = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    tokenizer_mode: str = "auto",
    **kwargs: Any,
) -> Any:
    """transformers' tokenizer of a folder, a .gguf file or a hub name, in which everything can be changed, its
    chat_template, too.

    Args:
        tokenizer_cls: what is to load it: a class with from_pretrained; None or TokenizerLike: transformers' choice.
        trust_remote_code: let the repository run its own code.
        revision: branch, tag or commit of a hub name.
        download_dir: where hub files are kept.
        tokenizer_mode: "auto" (or "hf"), or "slow" for the Python implementation where there is one.
        *args, **kwargs: further arguments of from_pretrained.

    Raises:
        ValueError: a folder or file without a usable tokenizer, or a tokenizer_mode that is not there.
        FileNotFoundError: a hub name that cannot be had.
    """
    from vllm.tokenizers.protocol import TokenizerLike
    from vllm.tokenizers.tokenizer import get_tokenizer as load

    if tokenizer_mode not in ("auto", "hf", "slow"):
        raise ValueError(f"tokenizer_mode must be one of auto, hf, slow, got {tokenizer_mode!r}")
    if tokenizer_cls in (None, TokenizerLike) and not args and not kwargs and download_dir is None:
        mode = "slow" if tokenizer_mode == "slow" else "auto"
        return load(tokenizer_name, mode, trust_remote_code, revision).hf_tokenizer
    from transformers import AutoTokenizer

    loader = AutoTokenizer if tokenizer_cls in (None, TokenizerLike) else tokenizer_cls
    if tokenizer_mode == "slow":
        kwargs["use_fast"] = False
    if download_dir is not None:
        kwargs["cache_dir"] = download_dir
    return loader.from_pretrained(
        str(tokenizer_name), *args, trust_remote_code=trust_remote_code, revision=revision, **kwargs
    )


cached_get_tokenizer = lru_cache(get_tokenizer)
"""The same, which gives one object for equal arguments."""


def cached_tokenizer_from_config(model_config: ModelConfig, **kwargs: Any) -> Any:
    """The tokenizer of a model's configuration; None with skip_tokenizer_init."""
    if model_config.skip_tokenizer_init:
        return None
    return cached_get_tokenizer(
        model_config.tokenizer,
        tokenizer_mode=model_config.tokenizer_mode,
        trust_remote_code=model_config.trust_remote_code,
        revision=model_config.tokenizer_revision,
        **kwargs,
    )
