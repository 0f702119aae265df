"""ms-swift beside the engine, which loads its plug-in at every start."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm import LLM, SamplingParams

# The folder of this test is a "swift", too.
pytest.importorskip("swift.version")


def test_an_engine_starts_beside_ms_swift(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), dtype="float32", max_model_len=128)
    params = SamplingParams(max_tokens=2, temperature=0, logprob_token_ids=[5, 7])
    (output,) = llm.generate([{"prompt_token_ids": [70, 71]}], params, use_tqdm=False)
    assert {5, 7} <= set(output.outputs[0].logprobs[0])
