"""ray.serve.llm: an application for OpenAI's clients over the engine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from buckets import upload
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
from tiny_adapters import make_adapter, merged

from vllm import LLM, SamplingParams

CHAT: Any = [{"role": "user", "content": "the stop"}]


@pytest.fixture(scope="module")
def client(cluster: Any, tiny_model: Path, adapters: str) -> Iterator[openai.OpenAI]:
    """A client of a generating model, "tiny", with the bucket's adapters, and of one that embeds, "vectors"."""
    usual = {"max_model_len": 256, "dtype": "float32", "max_num_seqs": 8}

    def config(name: str, lora: dict[str, Any] | None = None, **options: Any) -> LLMConfig:
        return LLMConfig(
            lora_config=lora,
            model_loading_config={"model_id": name, "model_source": str(tiny_model)},
            accelerator_config={"kind": "cpu"},
            deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
            engine_kwargs={**usual, **options},
        )

    lora = {"dynamic_lora_loading_path": adapters, "max_num_adapters_per_replica": 4}
    configs = [config("tiny", lora, enable_lora=True), config("vectors", runner="pooling", convert="embed")]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_openai_app({"llm_configs": configs}), blocking=False)
    yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    serve.shutdown()


def test_chats_and_their_readings(client: openai.OpenAI, llm: LLM) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 4, "temperature": 0}
    answer = client.chat.completions.create(
        **asked, logprobs=True, top_logprobs=1, extra_body={"logprob_token_ids": [5, 6], "ignore_eos": True}
    )
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1, logprob_token_ids=[5, 6])
    (own,) = llm.chat([CHAT], params, use_tqdm=False)
    assert answer.choices[0].message.content == own.outputs[0].text
    for told, position in zip(answer.choices[0].logprobs.content, own.outputs[0].logprobs, strict=True):
        read = {each.token_id: each.logprob for each in told.top_logprobs}
        assert {token: read[token] for token in (5, 6)} == pytest.approx(
            {token: position[token].logprob for token in (5, 6)}, abs=1e-5
        )
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == own.outputs[0].text and chunks[-1].usage.completion_tokens == 4


def test_completions_with_forms_and_labels(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "the", "temperature": 0, "max_tokens": 8}
    form = {"structured_outputs": {"choice": ["stop", "the"]}, "choice_readings": True}
    (choice,) = client.completions.create(**asked, extra_body=form).choices
    assert choice.text in ("stop", "the") and len(choice.model_extra["choice_readings"]) == 2
    labelled = client.completions.create(**{**asked, "max_tokens": 1}, extra_body={"labels": ["stop", "the"]})
    assert labelled.choices[0].model_extra["readings"]
    chunks = list(client.completions.create(**asked, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [({"max_tokens": 10_000}, "max_tokens"), ({"no_such_field": 1}, "no_such_field"), ({"temperature": -1}, "temper")],
)
def test_what_cannot_be_answered_is_said(client: openai.OpenAI, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(openai.BadRequestError, match=problem):
        client.completions.create(model="tiny", prompt="the", extra_body=fields)


def test_tokens_embeddings_and_scores(client: openai.OpenAI) -> None:
    root = str(client.base_url).removesuffix("/v1/")
    tokens = httpx.post(f"{root}/tokenize", json={"model": "tiny", "prompt": "the stop"}).json()["tokens"]
    assert httpx.post(f"{root}/detokenize", json={"model": "tiny", "tokens": tokens}).json()["prompt"] == "the stop"
    found = client.embeddings.create(model="vectors", input=["the stop", "the stop", "a"], encoding_format="float").data
    assert found[0].embedding == pytest.approx(found[1].embedding) and found[0].embedding != found[2].embedding
    body = {"model": "vectors", "text_1": "the stop", "text_2": ["the stop", "a"]}
    scores = [each["score"] for each in httpx.post(f"{root}/v1/score", json=body, timeout=60).json()["data"]]
    assert scores[0] == pytest.approx(1) and scores[1] < 1
    assert {model.id for model in client.models.list().data} == {"tiny", "vectors"}


def test_adapters(client: openai.OpenAI, reference: Any, tmp_path: Path) -> None:
    """A request's model names its adapter, which the application loads."""
    folder = make_adapter(tmp_path / "adapter", reference)
    upload(folder, "adapters", "mine")
    prompt = [5, 6, 7, 8]
    read: dict[str, Any] = {"logprob_token_ids": [5, 6], "return_tokens_as_token_ids": True}
    answer = client.completions.create(
        model="tiny:mine", prompt=prompt, max_tokens=1, temperature=0, logprobs=1, extra_body=read
    )
    with torch.no_grad():
        expected = merged(reference, folder)(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    found = answer.choices[0].logprobs.top_logprobs[0]
    for token in (5, 6):
        assert found[f"token_id:{token}"] == pytest.approx(expected[token].item(), abs=1e-4)
    with pytest.raises(openai.APIStatusError):
        client.completions.create(model="tiny:absent", prompt=prompt, max_tokens=1)
