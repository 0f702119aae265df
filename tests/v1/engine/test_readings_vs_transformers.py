"""Readings against transformers, float32, the same weights: every architecture, every way a prompt is computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models_util import ARCHITECTURES, SIZES, make_random_model, random_prompts
from readings_reference import assert_matches, own_logits, reference_logits

from vllm import LLM, SamplingParams

LENGTHS = (1, 16, 5, 37, 2, 50, 33)


def mixed_params(vocab_size: int) -> list[SamplingParams]:
    """Ids alone, top-k alone, both, the sampled token alone, the whole vocabulary; one a prompt."""
    ids = [3, vocab_size - 1, 0, 77, 11]
    common = {"max_tokens": 5, "ignore_eos": True, "temperature": 0}
    return [
        SamplingParams(logprob_token_ids=ids, **common),
        SamplingParams(logprobs=4, **common),
        SamplingParams(logprobs=2, logprob_token_ids=ids, **common),
        SamplingParams(logprobs=0, **common),
        SamplingParams(logprobs=-1, **common),
        SamplingParams(logprob_token_ids=[5], max_tokens=5, ignore_eos=True, temperature=1.0, seed=7),
        SamplingParams(logprobs=3, logprob_token_ids=range(40), max_tokens=5, ignore_eos=True, top_p=0.5, seed=8),
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_random_models(arch, size, tmp_path, device):
    folder, model = make_random_model(arch, size, tmp_path)
    vocab_size = model.config.vocab_size
    prompts = random_prompts(vocab_size, LENGTHS)
    # The last prompt continues an earlier one, so that a cold cache is shared within a step, too.
    prompts[-1] = prompts[-2][:33] + prompts[-1]
    params = mixed_params(vocab_size)
    for chunked in (False, True):
        llm = LLM(
            str(folder),
            device=device,
            dtype="float32",
            skip_tokenizer_init=True,
            gpu_memory_utilization=0.3,
            max_logprobs=-1,
            enable_chunked_prefill=chunked,
            max_num_batched_tokens=13 if chunked else None,
        )
        cold, warm = (llm.generate(prompts, params, use_tqdm=False) for _ in range(2))
        for outputs in (cold, warm):
            rows = own_logits(llm, outputs)
            for prompt, output, own, own_rows in zip(prompts, outputs, params, rows, strict=True):
                assert output.prompt_token_ids == prompt
                assert_matches(output, own, reference_logits(model, output), own_rows)
        for prompt, output in zip(prompts, warm, strict=True):
            # All but the last token, where blocks that are full of what followed are copied in part.
            assert (len(prompt) - 1) // 16 * 16 <= output.num_cached_tokens < len(prompt)


def test_the_embedded_model_on_real_prompts(embedded_reference):
    reviews = Path(__file__).parents[3] / "examples" / "data" / "reviews.jsonl"
    texts = [json.loads(line)["text"] for line in reviews.read_text(encoding="utf-8").splitlines()][::4]
    prompts = [f"Review: {text}\nThe sentiment of this review is" for text in texts]
    prompts += [f"{text}\n\nIn one word:" for text in texts]
    prompts += ["Once upon a time", "Émile a dit : « 今天天气很好 » 🙂"]
    # Prompts of several steps, the last ones beside others' decode steps.
    llm = LLM(dtype="float32", max_num_batched_tokens=128, max_logprobs=-1)
    tokenizer = llm.llm_engine.tokenizer
    labels = [tokenizer.encode(label, add_special_tokens=False)[0] for label in (" positive", " negative")]
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=5, logprob_token_ids=[*labels, 0, 49151])
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert sum(len(output.prompt_token_ids) for output in outputs) > 2 * 128
    for output, own_rows in zip(outputs, own_logits(llm, outputs), strict=True):
        assert_matches(output, params, reference_logits(embedded_reference, output), own_rows)
