"""An engine over two ranks, threads of this process, against one rank: every way to sample and to read, end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, byte_ids
from thread_ranks import make_thread_llm
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

PROMPTS = [byte_ids(text) for text in ("one", "a second, longer prompt", "3", "and the last")]
IDS = [0, VOCAB_SIZE // 2 - 1, VOCAB_SIZE // 2, VOCAB_SIZE - 1, 65]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """(one rank, two ranks)."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    together = make_thread_llm(folder, 2, max_num_batched_tokens=24)
    yield make_tiny_llm(folder, max_num_batched_tokens=24), together
    assert is_empty(together)
    together.llm_engine.engine_core.shutdown()


def double_even(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    assert logits.shape == (VOCAB_SIZE,)
    logits[::2] *= 2
    return logits


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 3, "logprob_token_ids": IDS, "logprob_entropy": True},
    "the vocabulary": {"temperature": 0, "logprobs": -1, "prompt_logprobs": -1},
    "random": {"seed": 1, "logprobs": 2, "logprobs_mode": "processed_logprobs"},
    "penalties": {"seed": 2, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"seed": 3, "logit_bias": {IDS[1]: 4.0, IDS[2]: 4.0}, "min_tokens": 3, "bad_words": ["a", "bc"]},
    "allowed": {"seed": 4, "allowed_token_ids": IDS, "logprob_token_ids": IDS[:2]},
    "cut": {"seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "top_p": {"seed": 6, "top_p": 0.8, "logprobs": 1},
    "callable": {"seed": 7, "logits_processors": [double_even], "logprobs": 1},
    "prompt": {"temperature": 0, "prompt_logprobs": 4, "prompt_logprob_token_ids": IDS, "logprob_entropy": True},
    "prompt alone": {"max_tokens": 0, "prompt_logprobs": 0, "prompt_logprob_token_ids": [1, IDS[3]]},
    "several": {"seed": 8, "n": 3, "logprobs": 0},
}


def assert_near(mine: Any, theirs: Any) -> None:
    """Readings of some positions: ids and ranks equal, numbers near: the model's sums differ by their order."""
    assert (mine is None) == (theirs is None)
    for one, other in zip(mine or (), theirs or (), strict=True):
        assert (one is None) == (other is None)
        if one is None:
            continue
        assert (one.entropy is None) == (other.entropy is None)
        assert one.entropy is None or one.entropy == pytest.approx(other.entropy, abs=1e-4)
        assert [(id_, entry.rank) for id_, entry in one.items()] == [(id_, entry.rank) for id_, entry in other.items()]
        for id_, entry in one.items():
            assert entry.logprob == pytest.approx(other[id_].logprob, abs=1e-4)
            assert entry.logit == pytest.approx(other[id_].logit, abs=1e-4)


def test_every_request_alike(pair: tuple[LLM, LLM]) -> None:
    """In one batch, whose prompts take several steps."""
    params = [SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **fields}) for fields in REQUESTS.values()]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(params))]
    expected, together = (llm.generate(prompts, params, use_tqdm=False) for llm in pair)
    for name, own, other in zip(REQUESTS, together, expected, strict=True):
        assert len(own.outputs) == len(other.outputs)
        for mine, theirs in zip(own.outputs, other.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids, name
            assert_near(mine.logprobs, theirs.logprobs)
        assert_near(own.prompt_logprobs, other.prompt_logprobs)
    executor = pair[1].llm_engine.engine_core.executor
    tokens = [worker.model_runner.states.token_ids for worker in executor.workers]
    assert (tokens[0] == tokens[1]).all()


def test_labels_are_scored_alike(pair: tuple[LLM, LLM]) -> None:
    """Labels of one token and of several, with a prefix in common."""
    labels, texts = ["a", "b", "one two", "one three"], ["Is it ", "Or "]
    expected, together = (llm.score_labels(texts, labels) for llm in pair)
    for mine, theirs in zip(together, expected, strict=True):
        assert mine.error is theirs.error is None
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert mine.token_logits == pytest.approx(theirs.token_logits, abs=1e-4)
        assert mine.token_ranks.tolist() == theirs.token_ranks.tolist()


class ShiftByRow(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        shift = (params.extra_args or {}).get("shift")
        return None if shift is None else lambda output_ids, logits: logits.index_add_(0, IDS_TENSOR, shift * ONES)


IDS_TENSOR, ONES = torch.tensor(IDS), torch.ones(len(IDS))


def test_custom_processors(tmp_path: Any) -> None:
    folder = make_tiny_model(tmp_path)
    fields = {"logits_processors": [ShiftByRow]}
    alone, together = make_tiny_llm(folder, **fields), make_thread_llm(folder, 2, **fields)
    params = [
        SamplingParams(max_tokens=4, temperature=0, extra_args={"shift": shift}, logprobs=1)
        for shift in (None, 2.5, 9.0)
    ]
    expected, got = (llm.generate(PROMPTS[:3], params, use_tqdm=False) for llm in (alone, together))
    for own, other in zip(got, expected, strict=True):
        assert own.outputs[0].token_ids == other.outputs[0].token_ids
        assert_near(own.outputs[0].logprobs, other.outputs[0].logprobs)
    together.llm_engine.engine_core.shutdown()
