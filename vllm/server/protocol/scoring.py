"""Requests and answers of /generative_scoring and /v1/score."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vllm.server.protocol.base import (
    UNREAD,
    EngineRequestModel,
    ListResponse,
    PictureOptions,
    ResponseModel,
    Text,
    TokenId,
)
from vllm.server.protocol.generation import NOT_EMPTY, PromptIds, Usage
from vllm.server.protocol.rerank import PAIRED_FIELDS, Content

Part = str | list[TokenId] | Content
Parts = Annotated[list[Part], NOT_EMPTY]


class ScoringFields(EngineRequestModel):
    """Fields of both endpoints."""

    ONE_OF: ClassVar[tuple[str, ...]] = ("label_token_ids", "labels")

    mm_processor_kwargs: PictureOptions = None
    query: Annotated[Part, UNREAD] = Field(
        description="What all items share: a text, token ids, or a content of text parts and pictures."
    )
    items: Annotated[str | Parts, UNREAD] = Field(
        description="What differs; each makes one prompt with the query, and one result. One text is a list of one."
    )
    label_token_ids: Annotated[Annotated[list[TokenId | PromptIds], NOT_EMPTY] | None, UNREAD] = Field(
        None, description="Labels as token ids, or as lists of token ids."
    )
    labels: Annotated[Annotated[list[Text], NOT_EMPTY] | None, UNREAD] = Field(
        None, description="Labels as texts of any number of tokens, each tokenised by itself: mind a leading space."
    )
    apply_softmax: bool | None = Field(
        None,
        description="Probabilities of the labels among themselves, or true ones. One label has only a true one. "
        "Left out: true on /generative_scoring, false on /v1/score.",
    )
    item_first: bool | None = Field(None, description="A prompt is the item and then the query.")
    add_special_tokens: bool | None = Field(
        None, description="Put around the prompt what the tokenizer puts around a text; on when left out."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        description="Longest prompt, in tokens (-1 = as the context holds). The query loses its beginning in a longer "
        "one; the item is never cut.",
    )


class GenerativeScoringRequest(ScoringFields):
    """POST /generative_scoring"""

    items: Annotated[Parts, UNREAD] = Field(
        description="What differs; each makes one prompt with the query, and one result."
    )
    return_token_ids: bool | None = Field(None, description="Add the ids of each prompt as it was scored.")


class ScoringRequest(ScoringFields):
    """POST /v1/score"""

    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        name: ((), PAIRED_FIELDS) for name in ("text_2", "data_2", "documents")
    }


class ScoredLabel(ResponseModel):
    """A label as the continuation of one prompt."""

    label: str = Field(description="As it was given, or what its token ids read as.")
    token_ids: list[int]
    probability: float | None = Field(
        description="With apply_softmax the label's share among all labels; otherwise, and for a single label, "
        "exp(logprob)."
    )
    logprob: float | None = Field(description="Log of the probability that the prompt goes on with this label.")
    logit: float | None = Field(description="Of its first token.")
    rank: int = Field(description="Of its first token in the vocabulary; 1 is the most likely.")
    normalized_logprob: float | None = Field(
        None, description="A token's mean logprob. Only there when some label has several tokens, as the next two."
    )
    token_logprobs: list[float | None] | None = None
    token_ranks: list[int] | None = None


class ScoredItem(ResponseModel):
    index: int
    object: Literal["score"]
    score: float | None = Field(description="The first label's probability.")
    prediction: str = Field(description="The label with the highest logprob.")
    label_mass: float | None = Field(description="Probability that the prompt goes on with any of the labels.")
    argmax_is_label: bool = Field(description="Whether the model's most likely next token begins a label.")
    num_prompt_tokens: int
    num_truncated_tokens: int = Field(description="Tokens of the query that truncate_prompt_tokens cut.")
    labels: list[ScoredLabel] = Field(description="In the order asked.")
    prompt_token_ids: list[int] | None = None


class GenerativeScoringResponse(ListResponse):
    data: list[ScoredItem]
    usage: Usage


class ScoringResponse(ResponseModel):
    """Lists are in the order of the items, inner ones in that of the labels."""

    scores: list[list[float | None]] = Field(description="Probabilities, as apply_softmax says.")
    logprobs: list[list[float | None]] = Field(description="Log of the labels' true probabilities.")
    ranks: list[list[int]] = Field(description="Of the labels' first tokens in the vocabulary.")
    label_mass: list[float | None] = Field(description="Probability that the prompt goes on with any of the labels.")
    argmax_is_label: list[bool] = Field(description="Whether the model's most likely next token begins a label.")
    num_truncated_tokens: list[int] = Field(description="Tokens of the query that truncate_prompt_tokens cut.")
    model: str
    usage: Usage
    object: Literal["scoring"]
