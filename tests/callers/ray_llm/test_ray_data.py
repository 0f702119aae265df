"""ray.data.llm: a batch of chats, equal to the engine's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.data.llm import build_processor, vLLMEngineProcessorConfig

from vllm import LLM, SamplingParams

TEXTS = ["the stop", "a stop", "the the"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "logprob_token_ids": [5, 6, 7]}


def test_chats_with_chosen_tokens(cluster: Any, tiny_model: Path, llm: LLM) -> None:
    config = vLLMEngineProcessorConfig(
        model_source=str(tiny_model),
        engine_kwargs={"max_model_len": 256, "dtype": "float32", "max_num_seqs": 8},
        concurrency=1,
        batch_size=4,
        placement_group_config={"bundles": [{"CPU": 1}]},
    )
    process = build_processor(
        config,
        preprocess=lambda row: {"messages": [{"role": "user", "content": row["text"]}], "sampling_params": GREEDY},
        postprocess=lambda row: {
            "text": row["text"],
            "answer": row["generated_text"],
            "read": [[position[token]["logprob"] for token in (5, 6, 7)] for position in row["logprobs"]],
            "latency": row["metrics"]["first_token_latency"],
        },
    )
    rows = process(cluster.data.from_items([{"text": text} for text in TEXTS])).take_all()
    found = {row["text"]: row for row in rows}
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    for text, own in zip(TEXTS, llm.chat(chats, SamplingParams(**GREEDY), use_tqdm=False), strict=True):
        row = found[text]
        assert row["answer"] == own.outputs[0].text and row["latency"] > 0
        for read, position in zip(row["read"], own.outputs[0].logprobs, strict=True):
            # Another batch may round differently in the last places.
            errors = [abs(value - position[token].logprob) for token, value in zip((5, 6, 7), read, strict=True)]
            assert max(errors) < 1e-4
