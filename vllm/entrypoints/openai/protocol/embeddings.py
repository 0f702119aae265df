"""Requests and answers of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vllm.entrypoints.openai.protocol.base import REFUSED_FIELDS, UNREAD, RequestModel, ResponseModel, Text
from vllm.entrypoints.openai.protocol.generation import NOT_EMPTY, PromptIds, Usage


class EmbeddingRequest(RequestModel):
    """POST /v1/embeddings"""

    TASK: ClassVar[str | None] = "embed"
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "mm_processor_kwargs": REFUSED_FIELDS["mm_processor_kwargs"],
        "messages": ((), "texts are embedded; join a conversation by its template first"),
        "add_special_tokens": ((True,), "the model was trained with them"),
        "truncation_side": (("right",), "texts that are too long lose their end"),
        "embed_dtype": (("float32",), "embeddings are float32"),
        "endianness": (("native", "little"), "base64 is of little-endian numbers"),
    }

    model: str | None = Field(None, description="One of the names in /v1/models; the server has only one model.")
    input: Annotated[Text | PromptIds | Annotated[list[Text | PromptIds], NOT_EMPTY], UNREAD] = Field(
        description="A text, a list of texts, a list of token ids, or a list of such lists."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Lists of numbers, or base64 of little-endian float32."
    )
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="So many of an embedding's first numbers, normalised anew (Matryoshka)."
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="Longest text, in tokens (-1 = as the model reads). Longer ones lose their end."
    )
    normalize: bool | None = Field(
        None, description="Whether embeddings have length 1; the model's default if left out."
    )
    priority: int | None = Field(None, description="Changes nothing: texts are embedded as they come.")
    request_id: str | None = Field(None, min_length=1, description="In place of one that the server makes.")


class Embedding(ResponseModel):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingResponse(ResponseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding] = Field(description="In the order of the input.")
    usage: Usage
