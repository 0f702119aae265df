"""model_impl="transformers": readings are those of transformers' own float32 run, whatever the architecture, however a
prompt is split over steps, and whatever shares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, make_tiny, reference

from vllm import LLM, SamplingParams

NUM_TOKENS = 6
IDS = [5, 17, 60, 198]
# float32's rounding over four layers, summed in another order.
TOLERANCE = 1e-4

ARCHITECTURES = [
    "afmoe", "apertus", "arcee", "bitnet", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone4",
    "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium",
    "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe",
    "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
]  # fmt: skip


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def start(folder: Path, **fields: Any) -> LLM:
    usual = {"dtype": "float32", "max_model_len": 64, "max_logprobs": -1, "gpu_memory_utilization": 0.3}
    return LLM(str(folder), model_impl="transformers", skip_tokenizer_init=True, **{**usual, **fields})


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprob_token_ids=IDS, **fields
    )


def check(output: Any, prompt: list[int], model: Any, reads_prompt: bool = True) -> None:
    """Tokens, logprobs and ranks of a request are transformers'."""
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    expected = reference(model, prompt + tokens)
    assert tokens == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
    if reads_prompt:
        for position in range(1, len(prompt)):
            reading = output.prompt_logprobs[position][prompt[position]]
            assert reading.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=TOLERANCE)
    for step, entries in enumerate(completion.logprobs):
        row = expected[len(prompt) - 1 + step]
        for token_id in {*IDS, tokens[step]}:
            assert entries[token_id].logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
            # A neighbour within the rounding may stand on either side.
            ranks = [1 + int((row > row[token_id] + margin).sum()) for margin in (TOLERANCE, -TOLERANCE)]
            assert ranks[0] <= entries[token_id].rank <= ranks[1] + 1


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_readings_are_transformers(tmp_path: Path, model_type: str) -> None:
    model = make_tiny(model_type, tmp_path)
    batch = prompts((40, 3, 23))
    llm = start(tmp_path, max_num_batched_tokens=16)
    together = llm.generate(batch, params(prompt_logprobs=0), use_tqdm=False)
    for output, prompt in zip(together, batch, strict=True):
        check(output, prompt, model)
    continued = [*batch[0][:33], 7, 9, 11]
    (output,) = llm.generate([continued], params(), use_tqdm=False)
    assert output.num_cached_tokens >= 32
    check(output, continued, model, reads_prompt=False)
