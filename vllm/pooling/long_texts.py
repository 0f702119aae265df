"""Texts longer than the model reads, embedded in parts (`enable_chunked_processing`): the text's embedding is the mean
of the parts' embeddings, weighted by their numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from vllm.pooling_outputs import PoolingOutput, PoolingRequestOutput
from vllm.v1.engine.input_processor import ProcessedPrompt

_P = TypeVar("_P")


def in_parts(
    prompts: Sequence[ProcessedPrompt], params: Sequence[_P], size: int
) -> tuple[list[ProcessedPrompt], list[_P], list[int]]:
    """The prompts as such of at most `size` tokens, each one's parameters, and how many of them every prompt became."""
    parts: list[ProcessedPrompt] = []
    own: list[_P] = []
    counts = []
    for prompt, each in zip(prompts, params, strict=True):
        ids = prompt.token_ids
        counts.append(max(-(-len(ids) // size), 1))
        if counts[-1] == 1:
            parts.append(prompt)
        else:
            parts += [replace(prompt, text=None, token_ids=ids[at : at + size]) for at in range(0, len(ids), size)]
        own += [each] * counts[-1]
    return parts, own, counts


def joined(outputs: Sequence[PoolingRequestOutput[Any]], counts: Sequence[int]) -> list[PoolingRequestOutput[Any]]:
    """An output for each prompt, from those of its parts; `counts`: of `in_parts`."""
    rest = iter(outputs)
    return [_joined(list(islice(rest, count))) for count in counts]


def _joined(parts: list[PoolingRequestOutput[Any]]) -> PoolingRequestOutput[Any]:
    first = parts[0]
    failed = next((part for part in parts if part.error is not None), None)
    if len(parts) == 1 or failed is not None:
        return failed or first
    ids = [token_id for part in parts for token_id in part.prompt_token_ids]
    total = sum(len(part.prompt_token_ids) * part.outputs.data for part in parts)
    num_cached = sum(part.num_cached_tokens for part in parts)
    return PoolingRequestOutput(first.request_id, PoolingOutput(total / len(ids)), ids, num_cached, True)
