"""The openai SDK's decisions against a live server, unmodified. Values are those of the same model offline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from live_server import LiveServer
from openai.types import Decision
from served import API_KEY, MODEL

from vllm import LLM

pytestmark = pytest.mark.usefixtures("one_thread")

INPUT = "The package arrived with a broken screen."
QUESTIONS = [
    {"type": "predicate", "name": "damaged", "instructions": "Is something broken?"},
    {
        "type": "choice",
        "instructions": "Which department?",
        "choices": [{"value": "returns"}, {"value": True}, {"value": "true"}],
    },
    {"type": "score", "instructions": "How bad is it?", "levels": [{"label": "fine"}, {"label": "broken"}]},
]
CREATE = {"model": MODEL, "input": INPUT, "questions": QUESTIONS}


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def check(decision: Decision, llm: LLM) -> None:
    (expected,) = llm.decide(INPUT, QUESTIONS, use_tqdm=False)
    predicate, choice, score = decision.answers
    own = expected.answers
    assert (predicate.type, predicate.name) == ("predicate", "damaged")
    assert predicate.probability == pytest.approx(own[0].probability, abs=1e-4)
    assert choice.type == "choice" and choice.name is None
    assert [each.value for each in choice.probabilities] == ["returns", True, "true"]
    found = [each.probability for each in choice.probabilities]
    assert found == pytest.approx([each.probability for each in own[1].probabilities], abs=1e-4)
    assert choice.choice == own[1].choice and type(choice.choice) is type(own[1].choice)
    assert choice.confidence == pytest.approx(own[1].confidence, abs=1e-4)
    assert score.type == "score" and score.score == pytest.approx(own[2].score, abs=1e-4)
    assert [each.label for each in score.probabilities] == ["fine", "broken"]
    assert decision.model == MODEL and decision.usage.output_tokens == 3
    assert decision.usage.input_tokens == expected.usage.input_tokens


def test_a_decision(client: openai.OpenAI, llm: LLM) -> None:
    check(client.decisions.create(**CREATE), llm)
    check(client.decisions.create(**CREATE, safety_identifier="me", prompt_cache_key="mine"), llm)
    options = {"mode": "explicit", "ttl": "30m"}
    apart = client.decisions.create(**CREATE, prompt_cache_options=options)
    check(apart, llm)
    assert apart.usage.input_tokens_details.cached_tokens < apart.usage.input_tokens


def test_raw_response_and_own_fields(client: openai.OpenAI, llm: LLM) -> None:
    raw = client.decisions.with_raw_response.create(**CREATE, extra_body={"diagnostics": True})
    assert raw.status_code == 200 and raw.headers["x-request-id"]
    check(raw.parse(), llm)
    assert raw.parse().answers[0].diagnostics["label_mass"] > 0


def test_on_an_event_loop(live_server: LiveServer, llm: LLM) -> None:
    async def run() -> list[Decision]:
        async with openai.AsyncOpenAI(base_url=f"{live_server.url}/v1", api_key="unused") as client:
            return await asyncio.gather(*(client.decisions.create(**CREATE) for _ in range(3)))

    for decision in asyncio.run(run()):
        check(decision, llm)


def test_errors_are_the_sdks(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 200") as caught:
        client.decisions.create(**{**CREATE, "questions": QUESTIONS[:1] * 201})
    assert caught.value.param == "questions"
    with pytest.raises(openai.NotFoundError):
        client.decisions.create(**{**CREATE, "model": "other"})


def test_a_full_queue_is_tried_again(guarded_server: LiveServer) -> None:
    """One sequence at a time has a place: the SDK waits as Retry-After says."""
    name = httpx.get(f"{guarded_server.url}/v1/models", headers={"Authorization": f"Bearer {API_KEY}"})
    model = name.json()["data"][0]["id"]
    # Its labels share their first token: one sequence.
    create = {"model": model, "input": "a", "questions": QUESTIONS[1:2]}
    sdk = openai.OpenAI(base_url=f"{guarded_server.url}/v1", api_key=API_KEY, max_retries=0)
    with sdk as client, ThreadPoolExecutor() as pool:
        long = {"model": model, "prompt": "a", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        # A decision may have the place before it.
        busy = pool.submit(client.with_options(max_retries=60).completions.create, **long)
        deadline = time.monotonic() + 30
        while True:
            try:
                client.decisions.create(**create)
            except openai.RateLimitError as error:
                assert error.response.headers["retry-after"] == "1"
                break
            assert time.monotonic() < deadline and not busy.done()
        assert client.with_options(max_retries=60).decisions.create(**create).answers[0].confidence <= 1
        busy.result()
