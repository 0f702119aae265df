"""VLLM_BATCH_INVARIANT=1 on CUDA: a position has the same bits as a prompt's and an output's, alone and in a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretend_cuda import pretending
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="gpu_check.py measures it on a real device")

IDS = [5, 30, 71]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's products in float64, whose order of sums is lost in the rounding."""
    multiply = np.matmul

    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        return multiply(a.astype(np.float64), b.astype(np.float64)).astype(dtype or np.result_type(a, b))

    monkeypatch.setattr(np, "matmul", matmul)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


def read(llm: LLM, prompts: list[list[int]], **fields: Any) -> list[Any]:
    params = SamplingParams(temperature=0, ignore_eos=True, **fields)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.mark.usefixtures("interpreted")
def test_prompts_and_outputs_have_the_same_bits(folder: Path) -> None:
    prompt = list(range(10, 18))
    with pretending(interpreted=True):
        llm = make_tiny_llm(folder, device="cuda", max_num_seqs=2, enforce_eager=True, num_gpu_blocks_override=20)
        (alone,) = read(llm, [prompt], max_tokens=2, logprob_token_ids=IDS)
        company = read(llm, [[7], prompt], max_tokens=2, logprob_token_ids=IDS)[1]
        tokens = list(alone.outputs[0].token_ids)
        assert tokens == list(company.outputs[0].token_ids)
        llm.reset_prefix_cache()
        (whole,) = read(llm, [[*prompt, *tokens]], max_tokens=1, prompt_logprob_token_ids=IDS)
    written, together = (out.outputs[0].logprobs.select(IDS) for out in (alone, company))
    as_prompt = whole.prompt_logprobs.select(IDS)
    for name in ("logprobs", "logits", "ranks"):
        wanted = getattr(written, name)
        assert np.array_equal(getattr(together, name), wanted)
        assert np.array_equal(getattr(as_prompt, name)[-len(tokens) :], wanted)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tensor_parallel_size": 2}, "rules out tensor_parallel_size"),
        ({"quantization": "fp8"}, "quantised weights follow the batch, got quantization='fp8'"),
    ],
)
def test_what_depends_on_the_batch_is_refused(
    monkeypatch: pytest.MonkeyPatch, folder: Path, fields: dict[str, Any], problem: str
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pretending():
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(ValueError, match=problem):
            make_tiny_llm(folder, device="cuda", **fields)
