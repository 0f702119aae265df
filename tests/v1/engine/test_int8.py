"""quantization="int8" through the engine: every architecture runs, reads nearly the same, and the same in any batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from models_util import ARCHITECTURES, make_random_model, random_prompts

from vllm import LLM, EngineArgs, SamplingParams

# One token takes another road through the kernel than many; 40 tokens and more are split into tiles.
PROMPTS = (1, 9, 40, 17, 3, 30)


def make_llm(folder: Path, dtype: str, quantization: str | None) -> LLM:
    return LLM(
        str(folder),
        dtype=dtype,
        quantization=quantization,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_logprob_token_ids=-1,
    )


def readings(llm: LLM, prompts: list[list[int]], vocab_size: int) -> np.ndarray:
    """float32 [prompts, 3, V]: logprobs after each prompt, then after the token 5 and after another."""
    ids = range(vocab_size)
    params = SamplingParams(max_tokens=3, ignore_eos=True, allowed_token_ids=[5], logprob_token_ids=ids)
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False)
    return np.stack([output.outputs[0].logprobs.select(ids).logprobs for output in outputs])


@pytest.mark.parametrize(
    ("arch", "size", "dtype"),
    [
        *((arch, "small", "float32") for arch in ARCHITECTURES),
        ("qwen2", "odd", "float32"),
        ("llama", "odd", "bfloat16"),
        ("opt", "odd", "float16"),
    ],
)
def test_architectures(arch: str, size: str, dtype: str, tmp_path: Path) -> None:
    """ "small" models have tied heads, "odd" ones heads of their own; biases in qwen2, opt and the odd llama."""
    folder, hf_model = make_random_model(arch, size, tmp_path)
    vocab_size = hf_model.config.vocab_size
    prompts = random_prompts(vocab_size, PROMPTS)
    plain = readings(make_llm(folder, dtype, None), prompts, vocab_size)
    llm = make_llm(folder, dtype, "int8")
    together = readings(llm, prompts, vocab_size)
    # A weight is off by up to half of 1/127 of its row's greatest, about 1 % of a typical one, in each of few layers.
    error = np.sqrt(np.mean((together - plain) ** 2)) / plain.std()
    assert 1e-4 < error < 0.05
    for prompt, expected in zip(prompts, together, strict=True):
        llm.reset_prefix_cache()
        np.testing.assert_array_equal(readings(llm, [prompt], vocab_size)[0], expected)


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="quantization must be one of None, 'int8', .*'gguf'.*, got 'int3'"):
        EngineArgs(quantization="int3").create_engine_config()
