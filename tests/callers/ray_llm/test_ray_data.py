"""ray.data.llm: batches of chats, of rows with adapters and of embeddings, equal to the engine's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.data.llm import build_processor, vLLMEngineProcessorConfig
from tiny_adapters import make_adapter, merged

from vllm import LLM, SamplingParams

TEXTS = ["the stop", "a stop", "the the"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "logprob_token_ids": [5, 6, 7]}


def run(cluster: Any, model: Path, rows: list[dict[str, Any]], preprocess: Any, **options: Any) -> list[dict[str, Any]]:
    """Run rows through Ray's processor; they come back in their order."""
    engine = {"max_model_len": 256, "dtype": "float32", "max_num_seqs": 8} | options.pop("engine_kwargs", {})
    config = vLLMEngineProcessorConfig(
        model_source=str(model),
        engine_kwargs=engine,
        concurrency=1,
        batch_size=4,
        placement_group_config={"bundles": [{"CPU": 1}]},
        **options,
    )
    process = build_processor(config, preprocess=preprocess)
    items = [{**row, "place": place} for place, row in enumerate(rows)]
    return sorted(process(cluster.data.from_items(items)).take_all(), key=lambda row: row["place"])


def check_readings(row: dict[str, Any], own: Any) -> None:
    """Another batch may round differently in the last places."""
    assert row["generated_text"] == own.outputs[0].text
    for read, position in zip(row["logprobs"], own.outputs[0].logprobs, strict=True):
        for token in (5, 6, 7):
            assert read[token]["logprob"] == pytest.approx(position[token].logprob, abs=1e-4)


def test_chats_with_chosen_tokens(cluster: Any, tiny_model: Path, llm: LLM) -> None:
    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": row["text"]}], "sampling_params": GREEDY}

    rows = run(cluster, tiny_model, [{"text": text} for text in TEXTS], preprocess)
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    for row, own in zip(rows, llm.chat(chats, SamplingParams(**GREEDY), use_tqdm=False), strict=True):
        check_readings(row, own)
        assert row["metrics"]["first_token_latency"] > 0


def test_rows_of_different_parameters(cluster: Any, tiny_model: Path, llm: LLM) -> None:
    """A table has every row's fields in all rows, with nulls."""
    more: list[dict[str, Any]] = [
        {"max_tokens": 2},
        {"stop": ["stop"], "seed": 4, "max_tokens": 3},
        {"structured_outputs": {"choice": ["stop", "the"]}, "max_tokens": 8},
    ]
    params: list[dict[str, Any]] = [GREEDY, *({"temperature": 0.0, **each} for each in more)]

    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": "the", "sampling_params": params[row["place"]]}

    # Ray's own decoding of tokens treats halves of a character as it likes.
    options: dict[str, Any] = {"chat_template_stage": False, "detokenize_stage": False}
    rows = run(cluster, tiny_model, [{"text": "the"}] * len(params), preprocess, **options)
    own = llm.generate(["the"] * 3, [SamplingParams(**each) for each in params[:3]], use_tqdm=False)
    check_readings(rows[0], own[0])
    assert [row["generated_text"] for row in rows[1:3]] == [each.outputs[0].text for each in own[1:]]
    assert rows[1]["num_generated_tokens"] == 2 and rows[3]["generated_text"] in ("stop", "the")


@pytest.fixture
def adapted(tmp_path: Path, reference: Any) -> Iterator[tuple[Path, Any]]:
    """A folder with an adapter, and transformers' model with it."""
    plain = copy.deepcopy(reference)
    folder = make_adapter(tmp_path / "adapter", plain)
    yield folder, merged(plain, folder)


def test_adapters(cluster: Any, tiny_model: Path, adapted: tuple[Path, Any], reference: Any) -> None:
    """A row names its adapter as its model."""
    folder, with_it = adapted
    prompt = [5, 6, 7, 8]

    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        fields = {"temperature": 0.0, "max_tokens": 1, "logprob_token_ids": [5, 6, 7]}
        own = {"model": str(folder)} if row["adapted"] else {"model": str(tiny_model)}
        return {**own, "tokenized_prompt": prompt, "sampling_params": fields}

    rows = run(
        cluster,
        tiny_model,
        [{"adapted": False}, {"adapted": True}],
        preprocess,
        engine_kwargs={"enable_lora": True},
        chat_template_stage=False,
        tokenize_stage=False,
    )
    for row, model in zip(rows, (reference, with_it), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        read = {token: row["logprobs"][0][token]["logprob"] for token in (5, 6, 7)}
        assert read == {token: pytest.approx(expected[token].item(), abs=1e-4) for token in (5, 6, 7)}


def test_embeddings(cluster: Any, tiny_model: Path) -> None:
    rows = run(
        cluster,
        tiny_model,
        [{"text": text} for text in TEXTS],
        lambda row: {"prompt": row["text"]},
        task_type="embed",
        chat_template_stage=False,
        detokenize_stage=False,
    )
    llm = LLM(str(tiny_model), runner="pooling", convert="embed", dtype="float32", max_model_len=256)
    for row, own in zip(rows, llm.embed(TEXTS, use_tqdm=False), strict=True):
        assert list(row["embeddings"]) == pytest.approx(own.outputs.embedding, abs=1e-5)
