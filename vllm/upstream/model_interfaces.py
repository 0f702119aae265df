"""Upstream's models describe themselves by these: a model derives from a class here, or sets its flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

_T = TypeVar("_T", bound=type)


class VllmModel:
    """A model."""


class VllmModelForTextGeneration(VllmModel):
    """A model that generates."""


class VllmModelForPooling(VllmModel):
    """A model whose hidden states are pooled by its `pooler`."""

    is_pooling_model: ClassVar[bool] = True
    default_seq_pooling_type: ClassVar[str] = "LAST"
    default_tok_pooling_type: ClassVar[str] = "ALL"


class SupportsLoRA:
    """A model that takes adapters."""

    supports_lora: ClassVar[bool] = True
    embedding_modules: ClassVar[dict[str, str]] = {}
    packed_modules_mapping: dict[str, list[str]] = {}  # noqa: RUF012


class SupportsPP:
    """A model that can be split between layers. There is one stage here."""

    supports_pp: ClassVar[bool] = True


class SupportsMultiModal:
    """A model that takes media. None from outside the tree is served."""

    supports_multimodal: ClassVar[bool] = True


class SupportsTranscription:
    """A model that writes down speech. None from outside the tree is served."""

    supports_transcription: ClassVar[bool] = True


class SupportsQuant:
    """A model whose weights may be quantised in a checkpoint. From outside the tree they are plain."""


class SupportsCrossEncoding:
    """A model that scores pairs."""

    supports_cross_encoding: ClassVar[bool] = True


class HasInnerState:
    """A model whose layers keep states."""

    has_inner_state: ClassVar[bool] = True


class IsAttentionFree:
    """A model without attention."""

    is_attention_free: ClassVar[bool] = True


class IsHybrid:
    """A model that has layers with states beside attention."""

    is_hybrid: ClassVar[bool] = True


class HasNoOps:
    """A model some of whose layers do nothing."""

    has_noops: ClassVar[bool] = True


class MixtureOfExperts:
    """A model with layers of experts."""


def supports_lora(model: type[object] | object) -> bool:
    """Whether a caller's model says so; False for the engine's own classes, which take adapters in their own way."""
    return bool(getattr(model, "supports_lora", False))


def supports_pp(model: type[object] | object) -> bool:
    """Whether a caller's model says so; there is one stage here."""
    return bool(getattr(model, "supports_pp", False))


def supports_multimodal(model: type[object] | object) -> bool:
    """Whether a caller's model says so."""
    return bool(getattr(model, "supports_multimodal", False))


def is_pooling_model(model: type[object] | object) -> bool:
    """Whether a caller's model says so."""
    return bool(getattr(model, "is_pooling_model", False))


def default_pooling_type(
    seq_pooling_type: str | None = None, tok_pooling_type: str | None = None, **former: Any
) -> Callable[[_T], _T]:
    """A class decorator: how the model's states become an embedding ("CLS", "LAST" or "MEAN") and embeddings of tokens
    ("ALL") where its requests and configuration do not say. Former callers give one name."""

    def name(model: Any) -> Any:
        for attribute, value in (
            ("default_seq_pooling_type", seq_pooling_type or former.get("default_pooling_type")),
            ("default_tok_pooling_type", tok_pooling_type),
        ):
            if value is not None:
                setattr(model, attribute, value)
        return model

    return name


def attn_type(attn_type: str) -> Callable[[_T], _T]:
    """A class decorator: "decoder", or "encoder_only", where tokens see those after them."""

    def name(model: Any) -> Any:
        model.attn_type = attn_type
        return model

    return name
