"""Our own fields: readings of chosen tokens, asked for and answered."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from vllm.entrypoints.openai.protocol.base import UNREAD, ResponseModel, Texts, TokenId, TokenIds


class ReadingFields(BaseModel):
    """What to read at generated positions."""

    logprob_token_ids: TokenIds | None = Field(
        None, description="Token ids to read at every generated position, with or without `logprobs`."
    )
    labels: Texts | None = Field(
        None, description="Texts of one token each, read like logprob_token_ids; the answer says which ids they are."
    )
    logits_indices: TokenIds | None = Field(None, description="Token ids whose logits `logits_values` shall hold.")
    logprob_entropy: bool | None = Field(None, description="Add each position's entropy, in nats, to `readings`.")


class PromptReadingFields(BaseModel):
    """What to read at prompt positions."""

    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Annotated[list[TokenId] | list[list[TokenId]] | None, UNREAD] = None
    prompt_logprob_start: int | None = None


class LabelEntry(ResponseModel):
    """A label and the token that it is."""

    label: str
    token_id: int


class TokenReading(ResponseModel):
    """One requested token at one position; null where a logits processor made the token impossible."""

    token: str | None
    label: str | None = None
    logprob: float | None
    logit: float | None
    rank: int
    probability: float | None = Field(description="Softmax over the requested tokens alone.")


class PositionReadings(ResponseModel):
    """The requested tokens at one generated position."""

    token_id: int | None = Field(description="The token that was generated; null when none was (max_tokens=0).")
    ids: dict[str, TokenReading] = Field(description="By token id, in the order asked.")
    mass: float | None = Field(description="Probability of all requested tokens together.")
    lse: float | None = Field(description="Log of the sum of exp of the position's logits.")
    entropy: float | None = None
