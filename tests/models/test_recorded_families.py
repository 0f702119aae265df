"""Decode steps of whole families are recorded: what runs in them is our own operators, and a replay has the bits of the
modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from architectures import make_architecture
from layouts import needs_kernels

from vllm import LLM, SamplingParams

pytestmark = needs_kernels

# Norms whose weight has more digits than the activations, a GELU's gate, scaled embeddings, norms after a layer, caps
# and windows; scaled residuals; norms in other places; latent attention. Layer norms, positions' embeddings,
# activations without a gate.
FAMILIES = (
    *("gemma", "gemma2", "gemma3", "vaultgemma", "granite", "helium", "glm4", "olmo2", "minicpm3"),
    *("gpt2", "opt", "phi", "gpt_neox", "stablelm", "cohere", "falcon", "xglm"),
    # Mixtures: with an MLP of all tokens, and a gate of it; routers in float32; biases; LayerNorms.
    *("qwen2_moe", "glm4_moe", "gpt_oss", "phimoe", "laguna", "deepseek_v3"),
    # Recurrent states, alone in their layers.
    *("lfm2", "lfm3", "rwkv", "xlstm"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_have_the_bits_of_the_modules(family: str, tmp_path: Path) -> None:
    make_architecture(family, tmp_path)
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 12, 33)]
    params = [
        SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, logprobs=3, temperature=0)
        for count in (6, 9, 12)
    ]
    results = []
    for eager in (False, True):
        llm = LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=96, dtype="bfloat16", enforce_eager=eager)
        results.append([output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)])
        if not eager:
            runner = llm.llm_engine.engine_core.executor.worker.model_runner
            assert {rows for rows, *_ in runner.replay.steps._recorded} == {1, 2, 3}, "a step was not recorded"
    for replayed, by_modules in zip(*results, strict=True):
        assert replayed.token_ids == by_modules.token_ids
        for field in ("token_ids", "logprobs", "logits", "ranks"):
            np.testing.assert_array_equal(getattr(replayed.logprobs, field), getattr(by_modules.logprobs, field))
