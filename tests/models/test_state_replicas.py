"""Two replicas of a model with recurrent states give what one engine gives, also of prefixes that either has cached."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from architectures import make_architecture
from test_state_models import READS, assert_equal_bits, make_llm, random_prompts, run

from vllm import AsyncEngineArgs, AsyncLLM, RequestOutput
from vllm.utils.device import usable_cores

pytestmark = pytest.mark.skipif(usable_cores() < 2, reason="every replica's process needs a core")


async def _last(engine: AsyncLLM, prompt: list[int], request_id: str) -> RequestOutput:
    (*_, last) = [each async for each in engine.generate({"prompt_token_ids": prompt}, READS, request_id)]
    return last


def test_replicas_give_what_one_engine_gives(tmp_path: Path, one_thread: None) -> None:
    make_architecture("mamba2", tmp_path, num_hidden_layers=2, max_position_embeddings=256)
    (base,) = random_prompts((70,))
    prompts = [base + other for other in random_prompts((3, 5, 9, 20), seed=2)] + random_prompts((1, 2, 33), seed=3)
    expected = run(make_llm(tmp_path, max_model_len=128, enable_prefix_caching=False), prompts)
    fields = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "data_parallel_size": 2}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path), **fields))

    async def twice() -> list[list[RequestOutput]]:
        return [
            list(await asyncio.gather(*(_last(engine, each, f"{turn}-{i}") for i, each in enumerate(prompts))))
            for turn in range(2)
        ]

    try:
        for outputs in asyncio.run(twice()):
            assert_equal_bits(outputs, expected)
    finally:
        engine.shutdown()
