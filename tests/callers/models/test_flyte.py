"""flyte's loader, which streams a checkpoint out of an object store, unmodified."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from buckets import bucket, upload

from vllm import LLM, SamplingParams

streamer = pytest.importorskip("flyteplugins.vllm.model_streamer", reason='"flyteplugins-vllm" is not installed')


def read(llm: LLM) -> list[dict[int, float]]:
    params = SamplingParams(max_tokens=3, temperature=0, logprob_token_ids=[5, 6])
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    return [{token: position[token].logprob for token in (5, 6)} for position in output.outputs[0].logprobs]


def test_weights_of_a_bucket(tiny_model: Path) -> None:
    expected = read(LLM(str(tiny_model), dtype="float32", max_model_len=64))
    with bucket("models") as address:
        upload(tiny_model, "models", "tiny")
        found = asyncio.run(streamer.engine_args(f"{address}/tiny"))
        assert not list(Path(found["model"]).glob("*.safetensors"))
        assert read(LLM(**found, dtype="float32", max_model_len=64)) == expected
