"""A checkpoint's prediction layers as drafters: they draft what their formula says, and change no output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import VOCAB_SIZE, make_architecture
from models_util import random_prompts
from prediction_models import FAMILIES, Reference
from test_state_models import assert_equal_bits
from tiny_llm import is_empty

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 4
PROMPTS = random_prompts(VOCAB_SIZE, (1, 40, 16))
GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, detokenize=False, logprobs=2)
DRAWN = SamplingParams(max_tokens=14, temperature=1, seed=3, detokenize=False, logprobs=2, logprob_token_ids=[5])


def make_llm(folder: Path, num_tokens: int = 0, method: str = "mtp", **fields: Any) -> LLM:
    usual = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 120}
    if num_tokens:
        # Drafts of random layers do not pay.
        usual["speculative_config"] = {
            "method": method,
            "num_speculative_tokens": num_tokens,
            "num_speculative_tokens_per_batch_size": [(1, 1024, num_tokens)],
        }
    return LLM(str(folder), **(usual | fields))


def run(llm: LLM, params: SamplingParams | list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[Any]:
    found = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    assert is_empty(llm)
    return found


def drafts_of(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Fills with each text that something was drafted after, and what."""
    follower: Any = llm.llm_engine.engine_core.executor.worker.model_runner.follower
    found: list[tuple[list[int], list[int]]] = []
    propose = follower.propose

    def noted(slots: np.ndarray, states: Any, room: np.ndarray) -> list[np.ndarray]:
        texts = [states.token_ids[slot, : states.total_len[slot]].tolist() for slot in slots.tolist()]
        drafts = propose(slots, states, room)
        found.extend((text, draft.tolist()) for text, draft in zip(texts, drafts, strict=True))
        return drafts

    follower.propose = noted
    return found


def assert_as_reference(drafts: list[tuple[list[int], list[int]]], reference: Reference) -> None:
    assert sum(len(draft) for _, draft in drafts) > 20
    for text, draft in drafts:
        for step, (token, logits) in enumerate(zip(draft, reference.logits(text, len(draft))[1], strict=True)):
            # Close seconds are as good, but what follows them is another draft.
            assert logits[token] >= logits.max() - 1e-3, (len(text), step)
            if token != int(logits.argmax()):
                break


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, Reference(request.param, folder)


def test_drafts_follow_the_formula(made: tuple[Path, Reference]) -> None:
    """Of each family, with more tokens than layers; the second time after cached prefixes."""
    folder, reference = made
    plain = make_llm(folder)
    llm = make_llm(folder, NUM_TOKENS)
    drafts = drafts_of(llm)
    for params in (GREEDY, DRAWN):
        assert_equal_bits(run(llm, params), run(plain, params))
    assert_as_reference(drafts[::5], reference)
