"""Beam searches over HTTP find what LLM.beam_search finds."""

from __future__ import annotations

import math

import pytest
from asgi import AppThread, Serve
from tiny_llm import make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams

pytestmark = pytest.mark.usefixtures("engines_of_one_thread")

PROMPTS = ["the stop", "hi"]


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return make_tiny_llm(folder)


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve()


FIELDS = {"use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 4, "return_token_ids": True}


@pytest.mark.parametrize("own", [{}, {"length_penalty": 2.0, "early_stopping": True}, {"allowed_token_ids": [5, 6, 7]}])
def test_completions_are_the_best_beams(server, llm, own):
    answer = server.post("/v1/completions", prompt=PROMPTS, **FIELDS, **own)
    params = SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=4, temperature=0, **own)
    wanted = [each.token_ids for output in llm.generate(PROMPTS, params) for each in output.outputs]
    assert [choice["token_ids"] for choice in answer["choices"]] == wanted
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == sum(map(len, wanted))
    chunks = server.stream("/v1/completions", prompt=PROMPTS, **FIELDS, **own)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == wanted, "each result whole"


def test_chats_take_it_too(server):
    chat = {"messages": [{"role": "user", "content": "hi"}], "chat_template": "{{ messages[0].content }}"}
    answer = server.post("/v1/chat/completions", **chat, **FIELDS)
    texts = [choice["text"] for choice in server.post("/v1/completions", prompt="hi", **FIELDS)["choices"]]
    assert [choice["message"]["content"] for choice in answer["choices"]] == texts


def test_a_search_that_cannot_be_is_refused_by_field(server):
    for name, value in (
        ("temperature", 0.5),
        ("logprobs", 1),
        ("max_tokens", 0),
        ("early_stopping", "maybe"),
        ("stop", "a"),
    ):
        body = {"model": "tiny", "prompt": "hi", **FIELDS, name: value}
        response = server.request("POST", "/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    alone = server.request("POST", "/v1/completions", json={"model": "tiny", "prompt": "hi", "length_penalty": 2.0})
    assert alone.json()["error"]["param"] == "length_penalty"
    batch = {"model": "tiny", "messages": [[{"role": "user", "content": "hi"}]], "use_beam_search": True}
    refused = server.request("POST", "/v1/chat/completions/batch", json=batch)
    assert refused.json()["error"]["param"] == "use_beam_search"


def test_allowed_tokens_keep_their_probability_in_the_whole_vocabulary(llm):
    allowed = [5, 9]
    (found,) = llm.beam_search(
        [{"prompt": "hi"}], BeamSearchParams(beam_width=4, max_tokens=2, allowed_token_ids=allowed)
    )
    ids = llm.get_tokenizer().encode("hi")
    pairs = [[a, b] for a in allowed for b in allowed]
    scores = llm.score_labels([{"prompt_token_ids": ids}], pairs)[0].logprobs
    wanted = sorted(zip(scores.tolist(), pairs, strict=True), reverse=True)
    assert [each.tokens[len(ids) :] for each in found.sequences] == [pair for _, pair in wanted]
    for each, (score, _) in zip(found.sequences, wanted, strict=True):
        assert math.isclose(each.cum_logprob, score, rel_tol=1e-5), "float32 sums in two orders"
        assert all(set(position) == set(allowed) for position in each.logprobs)


def test_beam_parameters_that_cannot_be_are_refused_by_name(llm):
    for name, value in (
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("watermarking", True),
        ("structured_outputs", "a"),
    ):
        with pytest.raises(VLLMValidationError, match=name):
            BeamSearchParams(beam_width=2, max_tokens=2, **{name: value})
    params = BeamSearchParams(beam_width=2, max_tokens=2, allowed_token_ids=[10**6], watermarking=False)
    with pytest.raises(VLLMValidationError, match="allowed_token_ids"):
        llm.beam_search([{"prompt": "hi"}], params)
