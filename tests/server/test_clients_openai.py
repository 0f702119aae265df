"""The openai SDK against a live server: models and completions. Values are those of the same model offline."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer
from openai.types import Completion
from served import MODEL

from vllm import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def offline(llm: LLM, prompt: Any = PROMPT, **params: Any) -> RequestOutput:
    (output,) = llm.generate([prompt], SamplingParams(**{**GREEDY, **params}), use_tqdm=False)
    return output


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_text_usage_and_finish(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, **GREEDY)
    expected = offline(llm)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (expected.outputs[0].text, "length", None)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == len(expected.prompt_token_ids) + 8


def test_prompts_of_every_kind(client: openai.OpenAI, llm: LLM) -> None:
    texts = [PROMPT, "One, two,"]
    ids = [llm.get_tokenizer().encode(text) for text in texts]
    expected = [offline(llm, text).outputs[0].text for text in texts]
    for prompt, count in ((texts, 2), (ids, 2), (texts[0], 1), (ids[0], 1)):
        answer = client.completions.create(model=MODEL, prompt=prompt, **GREEDY)
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert [choice.text for choice in answer.choices] == expected[:count]


def test_choices_of_a_seed(client: openai.OpenAI, llm: LLM) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt=[PROMPT, "One"], n=3, seed=seed, temperature=1.0, top_p=1.0, max_tokens=6
        )
        assert [choice.index for choice in answer.choices] == list(range(6))
        return [choice.text for choice in answer.choices]

    first = texts(7)
    assert texts(7) == first != texts(8)
    assert len(set(first)) > 2
    assert [output.text for output in offline(llm, n=3, seed=7, temperature=1.0, max_tokens=6).outputs] == first[:3]


def test_stop_and_penalties(client: openai.OpenAI, llm: LLM) -> None:
    stopped = client.completions.create(model=MODEL, prompt="1 2 3 4 5 6", stop=[" 9", "9"], temperature=0)
    (choice,) = stopped.choices
    assert choice.finish_reason == "stop"
    assert choice.stop_reason in (" 9", "9")
    assert "9" not in choice.text
    bias = {str(llm.get_tokenizer().encode(" Lyon")[0]): 100}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 1.5, "logit_bias": bias}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, **GREEDY, **penalties)
    expected = offline(llm, **{**penalties, "logit_bias": {int(key): value for key, value in bias.items()}})
    assert answer.choices[0].text == expected.outputs[0].text != offline(llm).outputs[0].text


def test_echo_with_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=3, **GREEDY)
    expected = offline(llm, logprobs=3, prompt_logprobs=3)
    (choice,) = answer.choices
    logprobs = choice.logprobs
    ids = [*expected.prompt_token_ids, *expected.outputs[0].token_ids]
    positions = [*expected.prompt_logprobs, *expected.outputs[0].logprobs]
    assert "".join(logprobs.tokens) == choice.text == PROMPT + expected.outputs[0].text
    spans = zip(logprobs.text_offset, logprobs.tokens, strict=True)
    assert all(choice.text.startswith(token, offset) for offset, token in spans)
    assert logprobs.token_ids == ids
    assert logprobs.ranks[1:] == [position[i].rank for i, position in zip(ids[1:], positions[1:], strict=True)]
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    for token_id, logprob, top, position in zip(
        ids[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], positions[1:], strict=True
    ):
        assert logprob == position[token_id].logprob
        assert top == {entry.decoded_token: entry.logprob for entry in position.values()}
        # Evaluation harnesses take it as "the model would have said this itself".
        assert (logprob == max(top.values())) == (position[token_id].rank == 1)


def test_our_own_fields(client: openai.OpenAI, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    labels = [" Paris", " London"]
    label_ids = [tokenizer.encode(label)[0] for label in labels]
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        **GREEDY,
        extra_body={
            "labels": labels,
            "logprob_token_ids": [17, 30],
            "logits_indices": [30, 198],
            "prompt_logprobs": 2,
            "prompt_logprob_token_ids": [42],
            "logprob_entropy": True,
        },
    )
    ids = [17, 30, *label_ids]
    expected = offline(
        llm, logprob_token_ids=[*ids, 198], prompt_logprobs=2, prompt_logprob_token_ids=[42], logprob_entropy=True
    )
    assert answer.labels == [{"label": text, "token_id": i} for text, i in zip(labels, label_ids, strict=True)]
    (choice,) = answer.choices
    for reading, token_id, position in zip(
        choice.readings, expected.outputs[0].token_ids, expected.outputs[0].logprobs, strict=True
    ):
        assert reading["token_id"] == token_id
        assert list(reading["ids"]) == [str(each) for each in ids]
        shares = position.softmax(ids)
        for each in ids:
            entry, wanted = reading["ids"][str(each)], position[each]
            assert (entry["logprob"], entry["logit"], entry["rank"]) == (wanted.logprob, wanted.logit, wanted.rank)
            assert entry["token"] == wanted.decoded_token
            assert entry["probability"] == pytest.approx(shares[each])
        assert reading["mass"] == pytest.approx(position.mass(ids))
        assert reading["entropy"] == pytest.approx(position.entropy)
    assert choice.logits_values_per_token == [
        {"30": position[30].logit, "198": position[198].logit} for position in expected.outputs[0].logprobs
    ]
    assert choice.logits_values == choice.logits_values_per_token[0]
    assert choice.prompt_logprobs == [
        position and {str(i): _fields(entry) for i, entry in position.items()} for position in expected.prompt_logprobs
    ]


def _fields(entry: Any) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in ("logprob", "rank", "decoded_token", "logit")}


def test_scoring_without_a_token(client: openai.OpenAI, llm: LLM) -> None:
    body = {"logprob_token_ids": [7042, 9230]}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, extra_body=body)
    (choice,) = answer.choices
    (reading,) = choice.readings
    assert (choice.text, reading["token_id"], answer.usage.completion_tokens) == ("", None, 0)
    (position,) = offline(llm, max_tokens=1, **body).outputs[0].logprobs
    assert {int(key): entry["logprob"] for key, entry in reading["ids"].items()} == {
        token_id: position[token_id].logprob for token_id in body["logprob_token_ids"]
    }


def test_a_stream_is_the_whole_answer_in_parts(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": MODEL, "prompt": [PROMPT, "😀 你好"], "n": 2, "seed": 3, "temperature": 0.8, "max_tokens": 12,
        "echo": True, "logprobs": 2, "extra_body": {"labels": [" Paris", "!"], "logits_indices": [30]},
    }  # fmt: skip
    whole = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].labels == whole.labels
    assert not any("labels" in chunk.model_extra for chunk in chunks[1:])
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert len(parts) > 2
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset", "token_ids", "ranks"):
            joined = [value for part in parts for value in getattr(part.logprobs, name)]
            assert joined == getattr(choice.logprobs, name), name
        for name in ("readings", "logits_values_per_token"):
            assert [value for part in parts for value in getattr(part, name, [])] == getattr(choice, name)
        assert parts[0].logits_values == choice.logits_values


def test_async_clients_at_the_same_time(live_server: LiveServer, client: openai.OpenAI) -> None:
    prompts = [f"{number} plus {number} is" for number in range(12)]
    alone = [client.completions.create(model=MODEL, prompt=prompt, logprobs=2, **GREEDY) for prompt in prompts]

    async def whole(client: openai.AsyncOpenAI, prompt: str) -> Completion:
        return await client.completions.create(model=MODEL, prompt=prompt, logprobs=2, **GREEDY)

    async def streamed(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> tuple[list[Completion], list[str]]:
        url = f"{live_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            wholes = asyncio.gather(*[whole(client, prompt) for prompt in prompts])
            streams = asyncio.gather(*[streamed(client, prompt) for prompt in prompts])
            return await wholes, await streams

    together, texts = asyncio.run(run())
    for one, other, text in zip(alone, together, texts, strict=True):
        assert one.choices == other.choices
        assert text == one.choices[0].text
    assert all(math.isfinite(value) for one in together for value in one.choices[0].logprobs.token_logprobs)
