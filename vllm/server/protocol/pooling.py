"""Requests and answers of /v1/embeddings, /v2/embed, /classify and /pooling."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from vllm.server.protocol.base import (
    REFUSED_FIELDS,
    UNREAD,
    UNREAD_LIST,
    EngineRequestModel,
    ListResponse,
    Object,
    PictureOptions,
    RequestModel,
    ResponseModel,
    Text,
)
from vllm.server.protocol.generation import (
    NOT_EMPTY,
    PromptIds,
    TextMessage,
    ToolCallMessage,
    Usage,
    check_conversation,
    check_conversations,
)
from vllm.utils.checks import MAX_INTEGER

Input = Annotated[Text | PromptIds | Annotated[list[Text | PromptIds], NOT_EMPTY], UNREAD]
Dimensions = Annotated[int, Field(ge=1)]
# Not empty; only the first wrong entry is reported.
FIRST_WRONG = Field(min_length=1, fail_fast=True)
_MEDIA = {"media_io_kwargs": REFUSED_FIELDS["media_io_kwargs"]}


def _check_either(messages: list[Any]) -> list[Any]:
    is_nested = bool(messages) and isinstance(messages[0], list)
    return check_conversations(messages) if is_nested else check_conversation(messages)


_Conversation = Annotated[list[TextMessage | ToolCallMessage], NOT_EMPTY]
Conversations = Annotated[
    _Conversation | Annotated[list[_Conversation], NOT_EMPTY], UNREAD_LIST, AfterValidator(_check_either)
]
"""One, or a list of them."""


class PoolingFields(EngineRequestModel):
    """Fields of all these endpoints but Cohere's."""

    ONE_OF: ClassVar[tuple[str, ...]] = ("input", "messages")
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **_MEDIA,
        "padding": (("do_not_pad",), "texts run side by side without padding"),
    }

    input: Input | None = Field(
        None,
        description="A text, a list of texts, a list of token ids, a list of such lists; or as messages.",
    )
    messages: Conversations | None = Field(
        None,
        description="A conversation, which the chat template makes one text, or a list of them, in place of input.",
    )
    add_special_tokens: bool | None = Field(
        None, description="Add what the tokenizer puts around a text. Left out: true with input, false with messages."
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="Longest text, in tokens (-1 = as the model reads). Without it a longer one is an error."
    )
    truncation_side: Literal["right", "left"] | None = Field(
        None, description="Which side of such a text is cut; the right one if left out."
    )
    chat_template: str | None = Field(None, description="A Jinja template in place of the model's own.")
    chat_template_kwargs: Object | None = Field(None, description="Further variables of the template.")
    add_generation_prompt: bool | None = Field(None, description="End with the beginning of an answer.")
    continue_final_message: bool | None = Field(None, description="Leave the last message open.")
    mm_processor_kwargs: PictureOptions = None
    use_activation: bool | None = Field(
        None, description="Whether vectors have length 1, or classes probabilities; the model's default if left out."
    )

    def conversations(self) -> list[list[Any]] | None:
        """The conversations, wherever messages are given; None: the input is of texts or token ids."""
        given: Any = self.input if self.messages is None else self.messages
        if not isinstance(given, list) or not given:
            return None
        if isinstance(given[0], dict):
            return [given]
        is_nested = isinstance(given[0], list) and given[0] and isinstance(given[0][0], dict)
        return given if is_nested else None


class EncodingFields(PoolingFields):
    """How vectors are written."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = Field(
        None,
        description="Lists of numbers, base64 of their bytes, or the bytes of all as the answer's body; where each is "
        'says the header "metadata", which bytes_only leaves out.',
    )
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = Field(
        None, description="Of bytes and base64; float32 if left out."
    )
    endianness: Literal["native", "big", "little"] | None = Field(
        None, description="Of bytes and base64; little if left out."
    )
    dimensions: Dimensions | None = Field(
        None, description="So many of an embedding's first numbers, normalised anew (Matryoshka)."
    )
    normalize: bool | None = Field(None, description="The older name of use_activation.")
    prompt_name: Text | None = Field(
        None, description="Of one of the model's prompts (config_sentence_transformers.json), put before each text."
    )
    input_type: Text | None = Field(None, description="As of /v2/embed: what the texts are for.")


class LateChunking(RequestModel):
    ACCEPTED: ClassVar[tuple[str, ...]] = ()

    chunk_size: int = Field(ge=1, le=MAX_INTEGER, description="Tokens of a part, special ones included.")


class EmbeddingRequest(EncodingFields):
    """POST /v1/embeddings"""

    TASK: ClassVar[str | None] = "vectors"

    late_chunking_params: LateChunking | None = Field(
        None,
        description="An embedding for each part of so many tokens, read in the light of the whole text, which must be "
        "text and is not cut; of models with the task token_embed.",
    )


class PoolingRequest(EncodingFields):
    """POST /pooling"""

    TASK: ClassVar[str | None] = "pool"
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **PoolingFields.REFUSED,
        "data": ((), "there are no plugins that read it"),
        "softmax": ((), "use_activation is its name"),
        "activation": ((), "use_activation is its name"),
    }

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = Field(
        None, description="Which of the model's; its first if left out."
    )


class ClassificationRequest(PoolingFields):
    """POST /classify"""

    TASK: ClassVar[str | None] = "classify"


class TextPart(RequestModel):
    ACCEPTED: ClassVar[tuple[str, ...]] = ()

    type: Literal["text"]
    text: Text


class CohereInput(RequestModel):
    ACCEPTED: ClassVar[tuple[str, ...]] = ()

    content: Annotated[list[TextPart], NOT_EMPTY]


class CohereEmbedRequest(RequestModel):
    """POST /v2/embed"""

    TASK: ClassVar[str | None] = "embed"
    ONE_OF: ClassVar[tuple[str, ...]] = ("texts", "inputs")
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **_MEDIA,
        "images": (([],), "inputs are texts"),
    }

    model: str | None = Field(None, description="One of the names in /v1/models; the server has only one model.")
    texts: Annotated[Annotated[list[Text], NOT_EMPTY], UNREAD_LIST] | None = Field(None, description="Texts.")
    inputs: Annotated[Annotated[list[CohereInput], NOT_EMPTY], UNREAD_LIST] | None = Field(
        None, description="Texts in parts, which are joined."
    )
    input_type: Text | None = Field(
        None,
        description="What the texts are for: a name of the model's prompts, which is put before each text, or one of "
        "Cohere's, which change nothing where the model has no prompts.",
    )
    embedding_types: Annotated[list[Literal["float", "binary", "ubinary", "base64"]], FIRST_WRONG] | None = Field(
        None, description="How vectors are written; as numbers if left out."
    )
    output_dimension: Dimensions | None = Field(None, description="As dimensions of /v1/embeddings.")
    truncate: Literal["END", "START", "NONE"] | None = Field(
        None, description="Which side a text that is too long loses, END if left out; with NONE it is an error."
    )
    max_tokens: int | None = Field(None, ge=1, description="Longest text, in tokens; as the model reads if left out.")
    priority: int | None = Field(None, description="Lower runs earlier, under --scheduling-policy priority.")
    request_id: str | None = Field(None, min_length=1, description="In place of one that the server makes.")


class Chunk(ResponseModel):
    token_range: tuple[int, int]
    char_range: tuple[int, int] | None = Field(description="Null where all of its tokens are special ones.")


class Chunks(ResponseModel):
    strategy: Literal["fixed_tokens"]
    chunk_size: int
    input_tokens: int
    chunks: list[Chunk] = Field(description="One for each of the embedding's rows.")


class Embedding(ResponseModel):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | list[list[float]] | str = Field(
        description="Of a model that only embeds tokens, or with late_chunking_params, a list of vectors."
    )
    late_chunking: Chunks | None = None


class EmbeddingResponse(ListResponse):
    data: list[Embedding] = Field(description="In the order of the input.")
    usage: Usage


class Pooled(ResponseModel):
    index: int
    object: Literal["pooling"]
    data: list[Any] | str = Field(description="Numbers, or a list of them for each token.")


class PoolingResponse(ListResponse):
    data: list[Pooled] = Field(description="In the order of the input.")
    usage: Usage


class Classified(ResponseModel):
    index: int
    label: str = Field(description="The likeliest.")
    probs: list[float] = Field(description="By label, in the order of config.json.")
    num_classes: int


class ClassificationResponse(ListResponse):
    data: list[Classified] = Field(description="In the order of the input.")
    usage: Usage


class CohereEmbedResponse(ResponseModel):
    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    embeddings: dict[str, list[Any]] | list[list[float]] = Field(description="By type; on /v1/embed also as numbers.")
    texts: list[str]
    meta: dict[str, Any]
