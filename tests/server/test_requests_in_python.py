"""Requests that callers make in Python and run on an engine of their own."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind

CHAT = [{"role": "user", "content": "hi"}]


def chat(**fields) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=CHAT, **fields)


def completion(**fields) -> CompletionRequest:
    return CompletionRequest(prompt="hi", **fields)


@pytest.mark.parametrize("make", [chat, completion])
def test_fields_become_parameters(make):
    own = {"temperature": 0.5, "top_k": 7, "seed": 0, "bad_words": ["no"], "stop": "x", "logprob_token_ids": [5, 9]}
    params = make(**own, n=3, vllm_xargs={"a": 1}, stream=True).to_sampling_params(20)
    wanted = SamplingParams(
        **own, n=3, max_tokens=20, extra_args={"a": 1}, output_kind=RequestOutputKind.DELTA, logprobs=None
    )
    assert params == wanted
    plain = make().to_sampling_params(max_tokens=None, default_sampling_params={})
    assert plain == SamplingParams(max_tokens=None, output_kind=RequestOutputKind.FINAL_ONLY)
    assert (make().n, make().bad_words, plain.bad_words) == (1, [], [])


@pytest.mark.parametrize("make", [chat, completion])
def test_defaults_fill_what_is_left_out_and_stop_tokens_add_up(make):
    defaults = {"temperature": 0.25, "presence_penalty": 1.5, "stop_token_ids": [7, 9]}
    params = make(presence_penalty=0.0, stop_token_ids=[9, 3]).to_sampling_params(1, defaults)
    assert (params.temperature, params.presence_penalty, params.stop_token_ids) == (0.25, 0.0, [9, 3, 7])
    assert make().to_sampling_params(1, defaults).stop_token_ids == [7, 9]
    assert defaults["stop_token_ids"] == [7, 9]


def test_logprobs_of_each_kind():
    assert chat(logprobs=True, top_logprobs=4).to_sampling_params(1).logprobs == 4
    assert chat(logprobs=True, top_logprobs=None).to_sampling_params(1).logprobs == 0
    assert chat(top_logprobs=4).to_sampling_params(1).logprobs is None
    echoed = completion(logprobs=2, echo=True).to_sampling_params(1)
    assert (echoed.logprobs, echoed.prompt_logprobs) == (2, 2)
    assert completion(logits_indices=[4]).to_sampling_params(1).logprob_token_ids == [4]


def test_a_batch_gives_a_request_for_each_conversation():
    batch = BatchChatCompletionRequest(messages=[CHAT, CHAT], temperature=0.5, logprobs=True, top_logprobs=None)
    one = batch.to_chat_completion_request(batch.messages[1])
    assert type(one) is ChatCompletionRequest and one.messages == CHAT
    assert (one.temperature, one.top_logprobs, one.n) == (0.5, 0, 1)
    assert one.to_sampling_params(3).logprobs == 0


@pytest.mark.parametrize("make", [chat, completion])
def test_what_cannot_be_honoured_is_refused_by_name(make):
    for name, value in (("watermarking", True), ("temprature", 1)):
        with pytest.raises(VLLMValidationError, match=name) as raised:
            make(**{name: value})
        assert raised.value.parameter == name
    assert make(user="me", structured_outputs=None).n == 1
    with pytest.raises(ValidationError, match="top_k"):
        make(top_k="3")
    with pytest.raises(VLLMValidationError, match="temperature"):
        make(temperature=-1.0).to_sampling_params(1)
    with pytest.raises(VLLMValidationError, match="labels need"):
        make(labels=["a"]).to_sampling_params(1)
