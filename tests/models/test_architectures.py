"""Every native architecture's readings against transformers in float32, through the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB_SIZE, make_architecture

from vllm import LLM, SamplingParams

TOLERANCE = 1e-4
NUM_STEPS = 6


def prompts() -> list[list[int]]:
    """Lengths below a window and far beyond; the third begins as the second does."""
    generator = torch.Generator().manual_seed(5)
    short, long, tail = (torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (3, 49, 10))
    return [short, long, long[:33] + tail]


pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def expected_logprobs(model: Any, ids: list[int]) -> np.ndarray:
    """[length, V], float32, at each position of one sequence."""
    return model(torch.tensor([ids])).logits[0].float().log_softmax(-1).numpy()


def check_readings(want: np.ndarray, prompt: list[int], output: Any) -> None:
    tokens = list(output.outputs[0].token_ids)
    assert want.std() > 0.3, "logits that are all alike would prove nothing"
    for position in range(1, len(prompt)):
        token = prompt[position]
        got = output.prompt_logprobs[position][token].logprob
        assert got == pytest.approx(want[position - 1, token], abs=TOLERANCE), f"prompt position {position}"
    for step, entries in enumerate(output.outputs[0].logprobs):
        row = want[len(prompt) - 1 + step]
        assert tokens[step] == row.argmax()
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(row[token], abs=TOLERANCE)
            above, not_below = (row > row[token] + TOLERANCE).sum(), (row >= row[token] - TOLERANCE).sum()
            assert above < entry.rank <= not_below


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_readings_equal_transformers(name: str, tmp_path: Path) -> None:
    model = make_architecture(name, tmp_path)
    # Prompts in chunks beside others' decode steps, and the second call's prefixes from the cache.
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        max_model_len=64,
    )
    params = SamplingParams(
        max_tokens=NUM_STEPS, temperature=0, ignore_eos=True, detokenize=False, logprobs=3, prompt_logprobs=0
    )
    first, second = (llm.generate(prompts(), params, use_tqdm=False) for _ in range(2))
    for prompt, *outputs in zip(prompts(), first, second, strict=True):
        tokens = list(outputs[0].outputs[0].token_ids)
        want = expected_logprobs(model, prompt + tokens)
        for output in outputs:
            assert list(output.outputs[0].token_ids) == tokens
            check_readings(want, prompt, output)
    ids_only = SamplingParams(max_tokens=1, temperature=0, detokenize=False, logprob_token_ids=[3, 7, 11])
    (output,) = llm.generate([prompts()[1]], ids_only, use_tqdm=False)
    row = expected_logprobs(model, prompts()[1])[-1]
    for token in (3, 7, 11):
        assert output.outputs[0].logprobs[0][token].logprob == pytest.approx(row[token], abs=TOLERANCE)
    assert output.num_cached_tokens > 0
