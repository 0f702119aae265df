"""Requests and answers of /rerank and /score: how well documents answer queries."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from vllm.exceptions import VLLMValidationError, shown
from vllm.server.protocol.base import (
    REFUSED_FIELDS,
    UNREAD,
    EngineRequestModel,
    ListResponse,
    Object,
    PictureOptions,
    ResponseModel,
    Text,
)
from vllm.server.protocol.generation import NOT_EMPTY, Usage
from vllm.utils.checks import wrong_type

PAIRED_FIELDS = (
    "what goes together is text_1 and text_2, data_1 and data_2, queries and documents (or items), or, for labels of a "
    "generating model, query and items"
)


Content = dict[Literal["content"], Annotated[list[dict[str, Any]], NOT_EMPTY]]
"""A text in parts: parts of type "text", and pictures ("image_url" and its kin), one after the other."""


Documents = Annotated[Annotated[list[Text | Content | dict[Literal["text"], Text]], NOT_EMPTY], UNREAD]
Pairs = Annotated[Text | Content | Annotated[list[Text | Content], NOT_EMPTY], UNREAD]


class PairFields(EngineRequestModel):
    """Fields of both endpoints."""

    TASK: ClassVar[str | None] = "score"
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "media_io_kwargs": REFUSED_FIELDS["media_io_kwargs"],
        "truncation_side": (("right",), "documents that are too long lose their end"),
        "max_chunks_per_doc": ((1,), "a document is one text; max_tokens_per_doc cuts it"),
        "rank_fields": (([], ["text"]), "a document is its text"),
        "add_special_tokens": ((True,), "pairs are joined by special tokens"),
        "chat_template": ((), "the server's --score-template is what the model was trained on"),
    }

    mm_processor_kwargs: PictureOptions = None
    instruction: Text | None = Field(None, description="What the query is for, in templates that ask for it.")
    chat_template_kwargs: Object | None = Field(
        None, description="Variables of the score template: instruction, which wins over the field."
    )
    max_tokens_per_query: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Longer queries lose their end; 0 or left out: none does."
    )
    max_tokens_per_doc: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Longer documents lose their end; 0 or left out: none does."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        description="Longest prompt, in tokens (-1 = as the context holds). Longer ones lose the document's end; "
        "the query and the template are never cut.",
    )
    use_activation: bool | None = Field(
        None,
        description="False: scores are log-odds, log(p / (1 - p)), instead of probabilities p; of a cross-encoder its "
        "logits.",
    )
    return_readings: bool | None = Field(None, description="Add logprob, logit and rank of both answers to each score.")

    def asked_instruction(self) -> str | None:
        """VLLMValidationError: another variable of the template, or an instruction that is no text."""
        variables = dict(self.chat_template_kwargs or {})
        instruction = variables.pop("instruction", None) or self.instruction
        if variables:
            name = next(iter(variables))
            message = f"chat_template_kwargs: the score template has query, document and instruction, not {shown(name)}"
            raise VLLMValidationError(message, "chat_template_kwargs", name)
        if instruction is not None and not isinstance(instruction, str):
            raise wrong_type("chat_template_kwargs", instruction, "an instruction that is a text")
        return instruction


class RerankRequest(PairFields):
    """POST /rerank"""

    query: Annotated[Text | Content, UNREAD] = Field(description="What the documents should answer.")
    documents: Documents = Field(description="Texts, or objects with a text or with a content of parts.")
    top_n: Annotated[int, Field(ge=0)] | None = Field(
        None, description="How many of the best are returned; 0 or left out: all."
    )
    return_documents: bool | None = Field(None, description="Add the documents' texts; on when left out.")
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(None, description="The same as top_n.")

    def num_results(self) -> int | None:
        """How many of the best are asked for; None: all. Raises VLLMValidationError: two numbers."""
        if self.top_n and self.top_k and self.top_n != self.top_k:
            message = f"top_n and top_k exclude each other: got {self.top_n} and {self.top_k}"
            raise VLLMValidationError(message, "top_k", self.top_k)
        return self.top_n or self.top_k or None


class RouterRerankRequest(RerankRequest):
    """POST /rerank as vllm-router asks: `rid` is there, if only as null, and a model that was left out is "default"."""

    rid: str | None = Field(None, min_length=1, description="The request's id, as request_id.")

    @field_validator("model")
    @classmethod
    def _read_default(cls, value: str | None) -> str | None:
        return None if value == "default" else value


class ScorePairsRequest(PairFields):
    """POST /score"""

    ONE_OF: ClassVar[tuple[str, ...]] = ("text_1", "data_1", "queries")
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **PairFields.REFUSED,
        **{name: ((), f"beside a pair's texts; {PAIRED_FIELDS}") for name in ("query", "labels")},
    }

    text_1: Pairs | None = Field(None, description="A query, or one for each of text_2.")
    text_2: Pairs | None = Field(None, description="Documents.")
    data_1: Pairs | None = Field(None, description="As text_1, with data_2.")
    data_2: Pairs | None = Field(None, description="As text_2.")
    queries: Pairs | None = Field(None, description="As text_1, with documents.")
    documents: Pairs | None = Field(None, description="As text_2.")
    items: Pairs | None = Field(None, description="As documents.")


class Answer(ResponseModel):
    """The reading of one of the template's two answers."""

    label: str
    token_ids: list[int]
    logprob: float | None = Field(description="Log of the probability that the prompt goes on with it.")
    logit: float | None = Field(description="Of its first token.")
    rank: int = Field(description="Of its first token in the vocabulary; 1 is the most likely.")


class PairReadings(ResponseModel):
    label_mass: float | None = Field(description="Probability that the prompt goes on with one of the answers.")
    answers: list[Answer] = Field(description="The positive one first.")


class RankedDocument(ResponseModel):
    text: str | None = Field(description="Null of one in parts.")
    multi_modal: dict[str, Any] | None = Field(None, description="One in parts, as it came.")


class RerankResult(ResponseModel):
    index: int = Field(description="Of the document in the request.")
    relevance_score: float | None
    document: RankedDocument | None = None
    readings: PairReadings | None = None


class RerankResponse(ResponseModel):
    id: str
    model: str
    usage: Usage
    results: list[RerankResult] = Field(description="By descending score.")


class RouterRerankResult(ResponseModel):
    """A document by its rank, of which vllm-router makes a client's answer."""

    score: float | None
    index: int = Field(description="Of the document in the request.")
    document: str | None = None


class PairScore(ResponseModel):
    index: int
    object: Literal["score"]
    score: float | None
    readings: PairReadings | None = None


class ScorePairsResponse(ListResponse):
    data: list[PairScore]
    usage: Usage
