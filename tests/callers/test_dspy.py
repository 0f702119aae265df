"""dspy against the server, by each of the two engines that it sends requests with."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import LiveServer

from vllm import LLM, SamplingParams

dspy = pytest.importorskip("dspy")

QUESTION = "the stop"
GREEDY = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture(params=["auto", "litellm"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


def lm_of(server: LiveServer, engine: str, **options: Any) -> Any:
    own = {"api_base": f"{server.url}/v1", "api_key": "unused", "cache": False, "num_retries": 0, "engine": engine}
    return dspy.LM("openai/tiny", **{**own, **GREEDY, **options})


def completion(llm: LLM, **params: Any) -> Any:
    (output,) = llm.chat(
        [{"role": "user", "content": QUESTION}], SamplingParams(**{**GREEDY, **params}), use_tqdm=False
    )
    return output.outputs


def test_chat(server: LiveServer, llm: LLM, engine: str) -> None:
    assert lm_of(server, engine)(QUESTION) == [completion(llm)[0].text]
    messages = [{"role": "user", "content": QUESTION}]
    assert lm_of(server, engine)(messages=messages) == [completion(llm)[0].text]


def test_text(server: LiveServer, llm: LLM) -> None:
    lm = lm_of(server, "litellm", model_type="text")
    (answer,) = lm(prompt="Hello there")
    # It adds to the prompt whose turn it is.
    (output,) = llm.generate(["Hello there\n\nBEGIN RESPONSE:"], SamplingParams(**GREEDY), use_tqdm=False)
    assert answer == output.outputs[0].text


def test_several_answers_with_logprobs(server: LiveServer, llm: LLM, engine: str) -> None:
    expected = completion(llm, n=2, temperature=1.0, seed=6, logprobs=0)
    answers = lm_of(server, engine, n=2, temperature=1.0, seed=6, logprobs=True)(QUESTION)
    texts = [each.text for each in expected]
    # One of dspy's engines asks n times for one answer, each time with the same seed.
    assert [answer["text"] for answer in answers] in (texts, texts[:1] * 2)
    for answer in answers:
        each = expected[texts.index(answer["text"])]
        entries = answer["logprobs"]["content"] if isinstance(answer["logprobs"], dict) else answer["logprobs"].content
        got = [entry["logprob"] if isinstance(entry, dict) else entry.logprob for entry in entries]
        own = [row[token_id].logprob for token_id, row in zip(each.token_ids, each.logprobs, strict=True)]
        assert got == pytest.approx(own, abs=1e-4)


def test_a_program(server: LiveServer, llm: LLM, engine: str) -> None:
    """The model's answer is noise: what is read from it is that the program's prompt came here and back."""

    class Whole(dspy.ChatAdapter):
        def parse(self, signature: Any, completion: str) -> dict[str, str]:
            return {"answer": completion}

    lm = lm_of(server, engine)
    with dspy.context(lm=lm, adapter=Whole()):
        answer = dspy.Predict(dspy.Signature("q -> answer", "Answer."))(q="the")
    sent = lm.history[-1]["messages"]
    (output,) = llm.chat(sent, SamplingParams(**GREEDY), use_tqdm=False)
    assert answer.answer == output.outputs[0].text
