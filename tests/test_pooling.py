"""Pooling parameters and outputs are values."""

from __future__ import annotations

import pytest
import torch

from vllm import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.outputs import RequestError
from vllm.pooling_params import LateChunkingParams


def pooled(*values: float) -> PoolingRequestOutput[PoolingOutput]:
    data = torch.tensor(values) if len(values) != 1 else torch.tensor(values[0])
    return PoolingRequestOutput("r", PoolingOutput(data), [1, 2], 1, True)


def test_a_tensor_is_read_as_what_was_asked_for():
    embedding = EmbeddingRequestOutput.from_base(pooled(0.5, 0.25, 1.0))
    assert embedding.outputs.embedding == [0.5, 0.25, 1.0]
    assert embedding.outputs.hidden_size == 3
    assert (embedding.request_id, embedding.prompt_token_ids, embedding.num_cached_tokens) == ("r", [1, 2], 1)
    classes = ClassificationRequestOutput.from_base(pooled(0.75, 0.25))
    assert (classes.outputs.probs, classes.outputs.num_classes) == ([0.75, 0.25], 2)
    assert ScoringRequestOutput.from_base(pooled(0.5)).outputs.score == 0.5


@pytest.mark.parametrize(("kind", "values"), [(ScoringRequestOutput, (1.0, 2.0)), (EmbeddingRequestOutput, (1.0,))])
def test_a_tensor_of_another_shape_is_named(kind, values):
    with pytest.raises(ValueError, match="shape"):
        kind.from_base(pooled(*values))


def test_a_failed_request_has_empty_outputs():
    error = RequestError("busy", "The engine is busy.", retryable=True)
    failed = PoolingRequestOutput("r", PoolingOutput(torch.empty(0, 2)), [1], 0, True, error=error)
    assert EmbeddingRequestOutput.from_base(failed).outputs.embedding == []
    assert ClassificationRequestOutput.from_base(failed).outputs.probs == []
    assert ScoringRequestOutput.from_base(failed).outputs.score == 0.0
    assert ScoringRequestOutput.from_base(failed).error is error
    assert isinstance(error.to_exception(), GenerationError)
    assert isinstance(RequestError("bad", "A bad request.").to_exception(), VLLMValidationError)


def test_outputs_compare_by_value():
    assert PoolingOutput(torch.ones(2)) == PoolingOutput(torch.ones(2))
    assert PoolingOutput(torch.ones(2)) != PoolingOutput(torch.zeros(2))
    assert "ScoringOutput(score=0.5)" in repr(ScoringRequestOutput.from_base(pooled(0.5)))


def test_params_are_values():
    params = PoolingParams(dimensions=8, extra_kwargs={"a": [1]})
    copied = params.clone()
    copied.extra_kwargs["a"].append(2)
    assert params.extra_kwargs == {"a": [1]}
    with pytest.raises(VLLMValidationError, match="chunk_size"):
        LateChunkingParams(0)


@pytest.mark.parametrize(
    ("field", "value"), [("task", "classify"), ("dimensions", 0), ("dimensions", 9), ("step_tag_id", 3)]
)
def test_what_the_model_cannot_do_is_named(field, value):
    with pytest.raises(VLLMValidationError, match=field if field != "task" else "embed, token_embed"):
        PoolingParams(**{field: value}).verified(("embed", "token_embed"), 8)
    assert PoolingParams(normalize=False).verified(("embed",), 8).use_activation is False
