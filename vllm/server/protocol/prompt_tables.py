"""Fields of bodies whose answers have a prompt's readings as arrays, and the arrays of such an answer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vllm.server.protocol.base import NOT_EMPTY, UNREAD, NpyText, RequestModel

TableName = Literal[
    "positions", "token_ids", "logprobs", "logits", "ranks", "counts",
    "own_token_ids", "own_logprobs", "own_logits", "own_ranks", "lse", "entropy",
    "reverse_kl", "forward_kl",
]  # fmt: skip

PromptTables = dict[
    TableName,
    Annotated[str, Field(description="A .npy file in base64.")]
    | list[int]
    | list[float | None]
    | list[list[int]]
    | list[list[float | None]],
]
"""Vectors [rows] and tables [rows, K]; null for what is not finite."""

StudentLogprobs = Annotated[
    list[list[float | None]] | NpyText,
    UNREAD,
]


class PromptTableFields(RequestModel):
    """How the prompt's readings are answered."""

    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: arrays as .npy files, as `prompt_tables`; float: numbers."
    )
    prompt_tables: Annotated[list[TableName], NOT_EMPTY] | None = Field(
        None, description="The prompt's readings as these arrays instead of objects."
    )
    prompt_student_logprobs: StudentLogprobs | None = Field(
        None,
        description="A student's logprobs of prompt_logprob_token_ids, position by position: the arrays then have the "
        "divergences reverse_kl and forward_kl. null: impossible.",
    )
