"""Fields of bodies whose answers have a prompt's readings as arrays, and the arrays of such an answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from vllm.server.protocol.base import NOT_EMPTY, UNREAD, UNREAD_LIST, NpyText, RequestModel

TableName = Literal[
    "positions", "token_ids", "logprobs", "logits", "ranks", "counts",
    "own_token_ids", "own_logprobs", "own_logits", "own_ranks", "lse", "entropy",
    "reverse_kl", "forward_kl",
]  # fmt: skip


def _check_names(names: list[Any]) -> list[Any]:
    """The names. ValueError: one is none, or there are none."""
    known = get_args(TableName)
    if not names:
        raise ValueError("must hold one or more names")
    for name in names:
        if name not in known:
            raise ValueError(f"must hold names out of {', '.join(known)}")
    return names


TableNames = Annotated[list[TableName], NOT_EMPTY, UNREAD_LIST, AfterValidator(_check_names)]

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
    prompt_tables: TableNames | None = Field(
        None, description="The prompt's readings as these arrays instead of objects."
    )
    prompt_student_logprobs: StudentLogprobs | None = Field(
        None,
        description="A student's logprobs of prompt_logprob_token_ids, position by position: the arrays then have the "
        "divergences reverse_kl and forward_kl. null: impossible.",
    )
