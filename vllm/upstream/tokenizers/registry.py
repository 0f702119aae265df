"""Tokenizers for callers: transformers' own, so that all that can be done with one can be done with these; or of a
class that a caller has registered under a mode of its own."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_OWN_MODES = ("auto", "hf", "slow")


@dataclass
class _TokenizerRegistry:
    """Classes of tokenizers by the tokenizer_mode that asks for them.

    Attributes:
        tokenizers: (module, class) of each mode that callers have registered.
    """

    tokenizers: dict[str, tuple[str, str]] = field(default_factory=dict)

    def register(self, tokenizer_mode: str, module: str, class_name: str) -> None:
        """Let a mode stand for a class with a from_pretrained method, which is imported when it is asked for."""
        self.tokenizers[tokenizer_mode] = (module, class_name)

    def load_tokenizer_cls(self, tokenizer_mode: str) -> Any:
        """The class of a mode.

        Raises:
            ValueError: nobody has registered it.
        """
        if tokenizer_mode not in self.tokenizers:
            known = ", ".join([*_OWN_MODES, *self.tokenizers])
            raise ValueError(f"tokenizer_mode must be one of {known}, got {tokenizer_mode!r}")
        module, class_name = self.tokenizers[tokenizer_mode]
        return getattr(importlib.import_module(module), class_name)

    def load_tokenizer(self, tokenizer_mode: str, *args: Any, **kwargs: Any) -> Any:
        """The result of the class's from_pretrained."""
        return self.load_tokenizer_cls(tokenizer_mode).from_pretrained(*args, **kwargs)


TokenizerRegistry = _TokenizerRegistry()


def resolve_tokenizer_args(
    tokenizer_name: str | Path,
    *args: Any,
    runner_type: str = "generate",
    tokenizer_mode: str = "auto",
    **kwargs: Any,
) -> tuple[str, str, tuple[Any, ...], dict[str, Any]]:
    """(mode, name, args, kwargs) that `get_tokenizer` loads from: those given, with "slow" as use_fast=False, and with
    prompts cut at their left end where a model generates."""
    if tokenizer_mode == "slow":
        if kwargs.get("use_fast"):
            raise ValueError("tokenizer_mode='slow' and use_fast=True exclude each other")
        tokenizer_mode, kwargs["use_fast"] = "hf", False
    kwargs.setdefault("truncation_side", "left" if runner_type == "generate" else "right")
    return "hf" if tokenizer_mode == "auto" else tokenizer_mode, str(tokenizer_name), args, kwargs


cached_resolve_tokenizer_args = lru_cache(resolve_tokenizer_args)


def tokenizer_args_from_config(config: ModelConfig, **kwargs: Any) -> tuple[str, str, tuple[Any, ...], dict[str, Any]]:
    """`resolve_tokenizer_args` of a model's configuration."""
    return cached_resolve_tokenizer_args(
        config.tokenizer,
        runner_type="generate",
        tokenizer_mode=config.tokenizer_mode,
        revision=config.tokenizer_revision,
        trust_remote_code=config.trust_remote_code,
        **kwargs,
    )


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
        tokenizer_mode: "auto" (or "hf"), "slow" for the Python implementation where there is one, or a mode that
            TokenizerRegistry knows.
        *args, **kwargs: further arguments of from_pretrained.

    Raises:
        ValueError: a folder or file without a usable tokenizer, or a tokenizer_mode that is not there.
        FileNotFoundError: a hub name that cannot be had.
    """
    from vllm.tokenizers.tokenizer import get_tokenizer as load
    from vllm.upstream.tokenizers.protocol import TokenizerLike

    loader = None if tokenizer_cls is TokenizerLike else tokenizer_cls
    if tokenizer_mode not in _OWN_MODES:
        loader = loader or TokenizerRegistry.load_tokenizer_cls(tokenizer_mode)
    elif loader is None and not args and not kwargs and download_dir is None:
        mode = "slow" if tokenizer_mode == "slow" else "auto"
        return load(tokenizer_name, mode, trust_remote_code, revision).hf_tokenizer
    elif tokenizer_mode == "slow":
        kwargs["use_fast"] = False
    if loader is None:
        from transformers import AutoTokenizer

        loader = AutoTokenizer
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
