"""Pooling parameters and outputs are values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
from vllm.config import PoolerConfig
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.outputs import RequestError
from vllm.pooling.late_chunking import build_late_chunking_metadata
from vllm.pooling_params import LateChunkingParams, LateInteractionParams


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
    ("field", "value"),
    [
        ("task", "classify"),
        ("dimensions", 0),
        ("dimensions", 33),
        ("step_tag_id", 3),
        ("use_activation", "x"),
        ("extra_kwargs", {"x": 1}),
        ("extra_kwargs", {"compressed_token_type_ids": "a"}),
    ],
)
def test_what_the_model_cannot_do_is_named(field, value):
    with pytest.raises(
        VLLMValidationError, match={"task": "embed, token_embed", "extra_kwargs": "_type_ids"}.get(field, field)
    ):
        PoolingParams(**{field: value}).verified(config())
    assert PoolingParams(normalize=False).verified(config()).use_activation is False


@pytest.mark.parametrize(
    ("offsets", "size", "expected"),
    [
        ([(0, 0), (0, 1), (2, 3), (2, 3), (4, 6), (0, 0)], 4, [((0, 4), (0, 3)), ((4, 6), (4, 6))]),
        ([(0, 0), (4, 6)], 1, [((0, 1), None), ((1, 2), (4, 6))]),
        (None, 1, "does not tell"),
        ([(0, 7)], 1, "outside"),
        ([(-1, 2)], 1, "outside"),
        ([(2, 3), (0, 1)], 2, "order"),
    ],
)
def test_parts_of_a_text_have_places_in_it(offsets, size, expected):
    count = len(offsets or ())
    if isinstance(expected, str):
        with pytest.raises(VLLMValidationError, match=expected):
            build_late_chunking_metadata("abcdef", count, offsets, size)
    else:
        chunks = build_late_chunking_metadata("abcdef", count, offsets, size).chunks
        assert [(chunk.token_range, chunk.char_range) for chunk in chunks] == expected


def config(**pooler: Any) -> SimpleNamespace:
    """The configuration of a model that embeds."""
    fields = {"pooling_tasks": ("embed", "token_embed"), "embedding_size": 32, "is_matryoshka": True}
    return SimpleNamespace(pooler_config=PoolerConfig(**pooler), matryoshka_dimensions=None, **fields)


def test_floats_without_a_fraction_are_integers():
    """Except token ids."""
    extra = {"attended_tokens": 2.0, "compressed_token_type_ids": [1.0, 2]}
    model = config()
    model.attn_type = "encoder_only"
    given = PoolingParams(dimensions=4.0, truncate_prompt_tokens=-1.0, extra_kwargs=extra)
    own = given.verified(model)
    numbers = [own.dimensions, own.truncate_prompt_tokens, own.extra_kwargs["attended_tokens"]]
    numbers += own.extra_kwargs["compressed_token_type_ids"]
    assert numbers == [4, -1, 2, 1, 2] and {type(each) for each in numbers} == {int}
    assert type(LateChunkingParams(2.0).chunk_size) is int
    for fields in ({"dimensions": 4.5}, {"extra_kwargs": {"attended_tokens": 1.5}}):
        with pytest.raises(VLLMValidationError, match=r"an integer"):
            PoolingParams(**fields).verified(model)
    for value in (0.5, True):
        with pytest.raises(VLLMValidationError, match="chunk_size"):
            LateChunkingParams(value)
    skipped = PoolingParams(task="token_embed", extra_kwargs={"skipped_token_ids": [7.0]})
    with pytest.raises(VLLMValidationError, match="skipped_token_ids must hold integers, got float 7.0"):
        skipped.verified(model)


@pytest.mark.parametrize("task", ["embed", "classify", "token_embed", "token_classify"])
@pytest.mark.parametrize("is_stepwise", [False, True])
def test_a_task_has_its_fields(task, is_stepwise):
    model = config(tok_pooling_type="STEP" if is_stepwise else "ALL", use_activation=False)
    params = PoolingParams(task=task)
    params.verify(model)
    assert params.use_activation is False
    given = {"dimensions": 8, "step_tag_id": 3, "returned_token_ids": [1], "use_activation": True}
    own = {"use_activation"} | ({"dimensions"} if "embed" in task else set())
    own |= {"step_tag_id", "returned_token_ids"} if is_stepwise and task.startswith("token") else set()
    for name, value in given.items():
        params = PoolingParams(**{"task": task, name: value})
        if name in own:
            params.verify(model)
            assert getattr(params, name) == value
        else:
            with pytest.raises(VLLMValidationError, match=name):
                params.verify(model)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"task": "embed", "late_chunking_params": LateChunkingParams(2)}, "requires token_embed"),
        ({"late_chunking_params": LateChunkingParams(2), "step_tag_id": 1}, "all token rows"),
        ({"late_interaction_params": LateInteractionParams("cache", "k")}, "cache_query or score_doc"),
        ({"late_interaction_params": LateInteractionParams("cache_query", "k", 0)}, "positive integer"),
        ({"dimensions": 33}, "in range 1 to 32"),
        ({"dimensions": 0}, "in range 1 to 32"),
    ],
)
def test_verify_names_what_is_wrong(fields, problem):
    with pytest.raises(VLLMValidationError, match=problem):
        PoolingParams(**{"task": "token_embed", **fields}).verify(config(tok_pooling_type="STEP"))


def test_late_parameters_keep_their_form():
    msgspec = pytest.importorskip("msgspec")
    params = PoolingParams(task="token_embed", late_chunking_params=LateChunkingParams(3))
    params.verify(config())
    assert params.skip_reading_prefix_cache and params.use_activation
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=PoolingParams) == params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params.late_chunking_params)) == [3]
    LateInteractionParams("score_doc", "k").check()
    with pytest.raises(VLLMValidationError, match="removed; use `classify`"):
        PoolingParams(task="score")
    sizes = config()
    sizes.matryoshka_dimensions = [8]
    with pytest.raises(VLLMValidationError, match="for the dimensions 8"):
        PoolingParams(task="embed", dimensions=4).verify(sizes)
    sizes.is_matryoshka = False
    with pytest.raises(VLLMValidationError, match="hf_overrides="):
        PoolingParams(task="embed", dimensions=8).verify(sizes)


def test_types_of_pairs_and_max_sim():
    from vllm.entrypoints.pooling.scoring.utils import compress_token_type_ids, compute_maxsim_score

    for types, places in (([0, 0, 1, 1], (2, 4)), ([0, 1, 1, 0], (1, 3)), ([0, 0], (2, 2)), ([1], (0, 1))):
        assert compress_token_type_ids(types) == places
    for types in ([0, 1, 0, 1], [0, 2], [2, 0, 1]):
        with pytest.raises(ValueError, match="optional trailing zeros"):
            compress_token_type_ids(types)
    query, document = torch.randn(3, 4), torch.randn(5, 4)
    best = [max(float(one @ other) for other in document) for one in query]
    assert float(compute_maxsim_score(query, document)) == pytest.approx(sum(best), abs=1e-5)
    assert float(compute_maxsim_score(query, document[:0])) == 0
